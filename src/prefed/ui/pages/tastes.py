"""What clients have as latent tastes, on the page and the terminal: whether z says anything of its client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from prefed.train.metrics import COLLAPSE_REMEDY
from prefed.ui.pages.chart import (
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
"""What ``tastes.json`` of a run holds."""

TOLD_APART = 0.1
"""Where accuracy with own z is this much above that with the z sent to the server, these differ."""
READERS = (
    "This section is made of clients' pairs and private states; no message has it. Whoever reads it learns "
    "what each client named here prefers, and whom it trusts. So only the owner of this file can read it."
)


def section(tastes: TasteRecord) -> dict[str, Any]:
    """What the page's section on tastes shows."""
    plots = (gains_chart(tastes), map_chart(tastes), trust_chart(tastes), kl_chart(tastes))
    return {
        "readers": READERS,
        "facts": tastes_facts(tastes),
        "plots": [each for each in plots if each is not None],
        "table": tastes_table(tastes),
    }


def tastes_facts(tastes: TasteRecord) -> Facts:
    """Accuracy with own z next to others', and metrics that prove nothing without it."""
    another, units = tastes["another"], len(tastes["kl_per_dimension"])
    facts = [("accuracy with own z", f"{tastes['own']:.1%}")]
    if another is not None:
        facts.append(("with another client's z", f"{another:.1%}, averaged over all others"))
    facts.append(("with the population's z", f"{tastes['population']:.1%}"))
    if (told := tastes.get("told")) is not None:
        facts.append(
            (
                "with the z that it sent to the server",
                f"{told:.1%}; an alignment takes this one{_astray(tastes)}",
            )
        )
    facts.append(("do tastes say anything", verdict(tastes)))
    if met := tastes.get("met"):
        facts.append(
            (
                "pairs that others train on",
                f"{met:.1%} of the judged ones; another client's z knows their labels, so read the "
                "figure with another's z with care",
            )
        )
    facts.append(
        (
            "active units",
            f"{tastes['active_units']} of {units}; by themselves they prove nothing: a pull to prototypes "
            "makes units active too, and tastes may differ by less than counts",
        )
    )
    facts.append(("KL to N(0, I)", f"{sum(tastes['kl_per_dimension']):.2f} nats, mean over clients"))
    if share := tastes.get("trainable_share"):
        facts.append(("trained numbers", f"{share:.2%} of the frozen model's"))
    return facts


def _astray(tastes: TasteRecord) -> str:
    """A warning where the z that clients sent judges much worse than their own, else nothing."""
    told = tastes.get("told")
    if told is None or tastes["own"] - told < TOLD_APART:
        return ""
    return ", and it is not their own: take fewer local_steps, or schedule = 'cosine'"


def verdict(tastes: TasteRecord) -> str:
    """Whether z says anything of its client, in words."""
    if tastes["another"] is None:
        return "unknown: there is one client"
    gain = 100 * (tastes["own"] - tastes["another"])
    if tastes["collapsed"]:
        return f"no, they have collapsed: own z is worth {gain:.1f} points over another's; {COLLAPSE_REMEDY}"
    return f"yes: own z is worth {gain:.1f} points over another's"


def gains(tastes: TasteRecord) -> dict[str, float]:
    """Client → accuracy with its own z less the mean with the others'; empty where there is one client."""
    table = np.array(tastes["accuracies"], dtype=np.float64)
    n = len(table)
    if n < 2:
        return {}
    others = (table.sum(1) - table.diagonal()) / (n - 1)
    return dict(zip(tastes["clients"], (table.diagonal() - others).tolist(), strict=True))


def gains_chart(tastes: TasteRecord) -> Chart | None:
    """What own z is worth to each client; ``None`` where there is one client."""
    if not (each := gains(tastes)):
        return None
    order = sorted(each, key=lambda client: (each[client], client))
    text = f"Own z less another's: lowest {order[0]} with {100 * each[order[0]]:.1f} points, "
    text += f"highest {order[-1]} with {100 * each[order[-1]]:.1f}."
    caption = "Accuracy of each client's pairs with its own z, less the mean with the other clients' z."
    spans = [(float(at), 0.0, each[client]) for at, client in enumerate(order)]
    bars = Bars("", spans, [f"{client}: {100 * each[client]:.1f} points" for client in order])
    x, y = Axis("preference accuracy, own z less another's", percent, zero=True), Axis(names=order)
    panel = Panel(x, y, [bars], height=70 + 18 * len(order), at_x=0)
    return Chart("gains", text, caption, [panel])


def map_chart(tastes: TasteRecord) -> Chart | None:
    """The clients' tastes on the plane of most variance; ``None`` where there is one client."""
    if len(tastes["clients"]) < 2:
        return None
    first, second = tastes["map"]["shares"]
    text = f"Tastes of {len(tastes['clients'])} clients on a plane"
    groups = _by_prototype(tastes)
    if tastes["prototypes"]:
        text += ": " + ", ".join(f"{len(at)} {name}" for name, at in groups.items())
    caption = (
        f"The μ̄ of each client on their first two principal components, which hold {first:.0%} and "
        f"{second:.0%} of the variance. Colours are the prototypes that clients are pulled to, crosses the "
        "prototypes."
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
    """Name of a prototype → the places of its clients."""
    groups: dict[str, list[int]] = {}
    numbers = sorted(set(tastes["prototypes"].values()))
    for label in numbers:
        own = [at for at, c in enumerate(tastes["clients"]) if tastes["prototypes"].get(c) == label]
        groups[f"at prototype {label}"] = own
    rest = [at for at, client in enumerate(tastes["clients"]) if client not in tastes["prototypes"]]
    return groups | ({"without one": rest} if rest else {})


def kl_chart(tastes: TasteRecord) -> Chart:
    """How far posteriors are from N(0, 1) in each dimension of z."""
    values = tastes["kl_per_dimension"]
    top = int(np.argmax(values))
    most = f"most in dimension {top} with {values[top]:.2f}"
    text = f"KL per dimension of z: {sum(values):.2f} nats in all, {most}."
    caption = "KL of clients' posteriors to N(0, 1) in each dimension, means over clients."
    spans = [(float(at), 0.0, value) for at, value in enumerate(values)]
    bars_notes = [f"dimension {at}: {value:.3g} nats" for at, value in enumerate(values)]
    bars = Bars("", spans, bars_notes, 3, lying=False)
    panel = Panel(Axis("dimension of z", whole=True), Axis("nats", zero=True), [bars], height=220)
    return Chart("kl", text, caption, [panel])


def trust_chart(tastes: TasteRecord) -> Chart | None:
    """Whom each client trusts; ``None`` where the prior is no mixture of the others' posteriors."""
    if not tastes["trust"]:
        return None
    text = "; ".join(f"{client} trusts {most_trusted(own)} most" for client, own in tastes["trust"].items())
    caption = (
        "How much each client, a row, trusts each other client, a column, as a source of its prior. A row "
        "sums to 1."
    )
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
    """The client that is trusted most, the first one on a tie."""
    return max(sorted(weights), key=lambda client: weights[client])


def tastes_table(tastes: TasteRecord) -> Table:
    """Each client's accuracies, prototype, and whom it trusts most."""
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
    return Table("Every client's z.", ["client", "own z", "another's", "prototype", "trusts most"], rows)


def tastes_line(tastes: TasteRecord) -> str:
    """The same for the terminal, in one line."""
    another = "" if tastes["another"] is None else f", with another client's {tastes['another']:.3f}"
    end = f"; the tastes have collapsed: {COLLAPSE_REMEDY}" if tastes["collapsed"] else ""
    if apart := _astray(tastes):
        end += f"; with what clients sent to the server {tastes['told']:.3f}{apart}"
    return f"tastes: accuracy with own z {tastes['own']:.3f}{another}{end}"
