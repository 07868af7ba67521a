"""Latent tastes of clients on the page and the terminal, and whether they are informative."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from prefed.train.metrics.run_warnings import COLLAPSE_REMEDY, GAINS_FROM
from prefed.ui.pages.chart_data import (
    BARS,
    Axis,
    Bars,
    Cells,
    Chart,
    Line,
    Look,
    Panel,
    color_of,
    percent,
    short_name,
)
from prefed.ui.pages.tables import Facts, Table, cell

TasteRecord = Mapping[str, Any]
"""Content of a run's ``tastes.json``."""

APART = 0.1
"""Minimum loss of accuracy with the z sent to the server for a warning."""
READERS = (
    "This section is computed from the clients' pairs and private states, which no message contains. It "
    "reveals what each client prefers and whom it trusts, so only the owner of this file can read it."
)


def section(tastes: TasteRecord) -> dict[str, Any]:
    """Values of the page's section on latent tastes."""
    plots = (gains_chart(tastes), map_chart(tastes), trust_chart(tastes), kl_chart(tastes))
    return {
        "readers": READERS,
        "facts": tastes_facts(tastes),
        "plots": [each for each in plots if each is not None],
        "table": tastes_table(tastes),
    }


def tastes_facts(tastes: TasteRecord) -> Facts:
    """Accuracy with each client's own z compared with others', and further metrics."""
    another, units = tastes["another"], len(tastes["kl_per_dimension"])
    facts = [("accuracy with own z", f"{tastes['own']:.1%}")]
    if another is not None:
        facts.append(("accuracy with another client's z", f"{another:.1%}, mean over all other clients"))
    facts.append(("accuracy with the population's z", f"{tastes['population']:.1%}"))
    if (sent := tastes.get("sent")) is not None:
        facts.append(
            (
                "accuracy with the z sent to the server",
                f"{sent:.1%}; an alignment uses this z{_warning(tastes)}",
            )
        )
    facts.append(("are tastes informative", verdict(tastes)))
    if met := tastes.get("met"):
        facts.append(
            (
                "pairs that others train on",
                f"{met:.1%} of the evaluated pairs; another client's z may have learned their labels, so "
                "interpret the accuracy with another client's z with care",
            )
        )
    facts.append(
        (
            "active units",
            f"{tastes['active_units']} of {units}; neither necessary nor sufficient for informative tastes: "
            "a pull towards prototypes also activates units, and small differences do not",
        )
    )
    facts.append(("KL to N(0, I)", f"{sum(tastes['kl_per_dimension']):.2f} nats, mean over clients"))
    if share := tastes.get("trainable_share"):
        facts.append(("trainable parameters", f"{share:.2%} of the frozen model's"))
    return facts


def _warning(tastes: TasteRecord) -> str:
    """A warning if accuracy with the z sent to the server is much lower than with own z; else empty."""
    sent = tastes.get("sent")
    if sent is None or tastes["own"] - sent < APART:
        return ""
    return ", which differs from the clients' own z: use fewer local_steps, or schedule = 'cosine'"


def verdict(tastes: TasteRecord) -> str:
    """Whether z is informative about its client."""
    if tastes["another"] is None:
        return "unknown: there is only one client"
    gain = 100 * (tastes["own"] - tastes["another"])
    if tastes["collapsed"]:
        return f"no, they have collapsed: own z gains {gain:.1f} points over another's; {COLLAPSE_REMEDY}"
    if gain < 100 * GAINS_FROM:
        return f"the clients have the same taste: own z gains {gain:.1f} points over another's"
    return f"yes: own z gains {gain:.1f} points over another's"


def gains(tastes: TasteRecord) -> dict[str, float]:
    """Client → accuracy with own z minus the mean with the others' z; empty if there is only one client."""
    table = np.array(tastes["accuracies"], dtype=np.float64)
    n = len(table)
    if n < 2:
        return {}
    others = (table.sum(1) - table.diagonal()) / (n - 1)
    return dict(zip(tastes["clients"], (table.diagonal() - others).tolist(), strict=True))


def gains_chart(tastes: TasteRecord) -> Chart | None:
    """Chart of :func:`gains`; ``None`` if there is only one client."""
    if not (each := gains(tastes)):
        return None
    order = sorted(each, key=lambda client: (each[client], client))
    text = f"Gain of own z over others' z: {100 * each[order[0]]:.1f} points ({order[0]}) "
    text += f"to {100 * each[order[-1]]:.1f} points ({order[-1]})."
    caption = "Accuracy on each client's pairs with its own z, minus the mean with the other clients' z."
    spans = [(float(at), 0.0, each[client]) for at, client in enumerate(order)]
    bars = Bars("", spans, [f"{client}: {100 * each[client]:.1f} points" for client in order])
    x, y = Axis("preference accuracy, own z minus others'", percent, zero=True), Axis(names=order)
    panel = Panel(x, y, [bars], height=70 + 18 * len(order), at_x=0)
    return Chart("gains", text, caption, [panel])


def map_chart(tastes: TasteRecord) -> Chart | None:
    """The clients' tastes on two principal components; ``None`` if there is only one client."""
    if len(tastes["clients"]) < 2:
        return None
    first, second = tastes["map"]["shares"]
    text = f"Tastes of {len(tastes['clients'])} clients on two principal components"
    groups = _by_prototype(tastes)
    if tastes["prototypes"]:
        text += ": " + ", ".join(f"{len(at)} with {name}" for name, at in groups.items())
    caption = (
        f"Each client's μ̄ on the first two principal components, which explain {first:.0%} and "
        f"{second:.0%} of the variance. Colours show the clients' prototypes, crosses their positions."
    )
    if not tastes["prototypes"]:
        caption = caption.partition(" Colours")[0]
    points, clients = tastes["map"]["clients"], tastes["clients"]
    shown = []
    for index, (name, places) in enumerate(groups.items()):
        few = len(clients) <= BARS // 2
        line = Line(
            name if tastes["prototypes"] else "",
            [(points[place][0], points[place][1]) for place in places],
            [f"{clients[place]}, {name}" for place in places],
            Look(color_of(index)),
            joined=False,
            texts=[short_name(clients[place], 16) for place in places] if few else (),
        )
        shown.append(line)
    marks = [(x, y) for x, y in tastes["map"]["prototypes"]]
    notes = [f"prototype {label}" for label in range(len(marks))]
    shown.append(
        Line("", marks, notes, Look(0, mark=5), joined=False, texts=list(map(str, range(len(marks)))))
    )
    panel = Panel(Axis("first component"), Axis("second component"), shown, height=420)
    return Chart("map", f"{text}.", caption, [panel])


def _by_prototype(tastes: TasteRecord) -> dict[str, list[int]]:
    """Name of a prototype → indices of its clients."""
    groups: dict[str, list[int]] = {}
    numbers = sorted(set(tastes["prototypes"].values()))
    for label in numbers:
        own = [at for at, c in enumerate(tastes["clients"]) if tastes["prototypes"].get(c) == label]
        groups[f"prototype {label}"] = own
    rest = [at for at, client in enumerate(tastes["clients"]) if client not in tastes["prototypes"]]
    return groups | ({"no prototype": rest} if rest else {})


def kl_chart(tastes: TasteRecord) -> Chart:
    """Chart of the KL divergence to N(0, 1) by dimension of z."""
    values = tastes["kl_per_dimension"]
    top = int(np.argmax(values))
    text = f"KL per dimension of z: {sum(values):.2f} nats in total, "
    text += f"at most {values[top]:.2f} (dimension {top})."
    caption = "KL divergence of the clients' posteriors to N(0, 1) by dimension, means over clients."
    spans = [(float(at), 0.0, value) for at, value in enumerate(values)]
    bars_notes = [f"dimension {at}: {value:.3g} nats" for at, value in enumerate(values)]
    bars = Bars("", spans, bars_notes, 3, lying=False)
    panel = Panel(Axis("dimension of z", whole=True), Axis("nats", zero=True), [bars], height=220)
    return Chart("kl", text, caption, [panel])


def trust_chart(tastes: TasteRecord) -> Chart | None:
    """Chart of trust between clients; ``None`` if the prior is not a mixture of the others' posteriors."""
    if not tastes["trust"]:
        return None
    text = "; ".join(f"{client} trusts {most_trusted(own)} most" for client, own in tastes["trust"].items())
    caption = "Weight of each other client (column) in a client's prior (row). Each row sums to 1."
    columns, trust = tastes["clients"], tastes["trust"]
    rows = [client for client in columns if client in trust]
    values = [[trust[row].get(column, np.nan) for column in columns] for row in rows]
    notes = [
        f"{row} trusts {column}: {trust[row].get(column, 0.0):.2f}" for row in rows for column in columns
    ]
    most = max(weight for own in trust.values() for weight in own.values())
    cells = Cells(values, notes, 0.0, most)
    panel = Panel(Axis(names=columns), Axis(names=rows), [cells], height=160 + 22 * len(rows))
    return Chart("trust", f"{text}.", caption, [panel])


def most_trusted(weights: Mapping[str, float]) -> str:
    """The most trusted client; on a tie, the first by name."""
    return max(sorted(weights), key=lambda client: weights[client])


def tastes_table(tastes: TasteRecord) -> Table:
    """Table of each client's accuracies, prototype and most trusted client."""
    each, rows = gains(tastes), []
    for at, client in enumerate(tastes["clients"]):
        own, trusted = tastes["accuracies"][at][at], tastes["trust"].get(client, {})
        label = tastes["prototypes"].get(client)
        rows.append(
            (
                client,
                [
                    f"{own:.3f}",
                    cell(own - each[client] if each else None),
                    "" if label is None else str(label),
                    most_trusted(trusted) if trusted else "",
                ],
            )
        )
    heads = ["client", "own z", "another's", "prototype", "trusts most"]
    return Table("Preference accuracy with own z and with others' z.", heads, rows)


def tastes_line(tastes: TasteRecord) -> str:
    """Accuracies and verdict in one line."""
    another = "" if tastes["another"] is None else f", with another client's {tastes['another']:.3f}"
    end = f"; the tastes have collapsed: {COLLAPSE_REMEDY}" if tastes["collapsed"] else ""
    if warning := _warning(tastes):
        end += f"; with the z sent to the server {tastes['sent']:.3f}{warning}"
    return f"tastes: accuracy with own z {tastes['own']:.3f}{another}{end}"
