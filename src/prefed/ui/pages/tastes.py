"""What clients have as latent tastes, on the page and the terminal: whether z says anything of its client."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from prefed.train.metrics import COLLAPSE_REMEDY
from prefed.ui.pages.drawing import BARS, Theme, canvas, color_of, legend, percent_axis, short_name, tell
from prefed.ui.pages.parts import Facts, Plot, Table, number, plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TasteRecord = Mapping[str, Any]
"""What ``tastes.json`` of a run holds."""

TOLD_APART = 0.1
"""Where accuracy with own z is this much above that with the z that clients told the server, these differ."""
READERS = (
    "This section is made of clients' pairs and private states; no message has it. Whoever reads it learns "
    "what each client named here prefers, and whom it trusts. So only the owner of this file can read it."
)


def section(tastes: TasteRecord) -> dict[str, Any]:
    """What the page's section on tastes shows."""
    plots = (gains_plot(tastes), map_plot(tastes), trust_plot(tastes), kl_plot(tastes))
    return {
        "readers": READERS,
        "facts": tastes_facts(tastes),
        "plots": [each for each in plots if each is not None],
        "table": tastes_table(tastes),
    }


def tastes_facts(tastes: TasteRecord) -> Facts:
    """Accuracy with own z beside others', and figures that prove nothing without it."""
    another, units = tastes["another"], len(tastes["kl_per_dimension"])
    facts = [("accuracy with own z", f"{tastes['own']:.1%}")]
    if another is not None:
        facts.append(("with another client's z", f"{another:.1%}, averaged over all others"))
    facts.append(("with the population's z", f"{tastes['population']:.1%}"))
    if (told := tastes.get("told")) is not None:
        facts.append(
            (
                "with the z that it told the server",
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
            f"{tastes['active_units']} of {units}; they prove nothing alone, for a pull to prototypes makes "
            "units active too, and tastes may differ by less than counts",
        )
    )
    facts.append(("KL to N(0, I)", f"{sum(tastes['kl_per_dimension']):.2f} nats, mean over clients"))
    if share := tastes.get("trainable_share"):
        facts.append(("trained numbers", f"{share:.2%} of the frozen model's"))
    return facts


def _astray(tastes: TasteRecord) -> str:
    """A warning where what clients told judges much worse than their own z, else nothing."""
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


def gains_plot(tastes: TasteRecord) -> Plot | None:
    """What own z is worth to each client; ``None`` where there is one client."""
    if not (each := gains(tastes)):
        return None
    order = sorted(each, key=lambda client: (each[client], client))
    text = f"Own z less another's: lowest {order[0]} with {100 * each[order[0]]:.1f} points, "
    text += f"highest {order[-1]} with {100 * each[order[-1]]:.1f}."
    caption = "Accuracy of each client's pairs with its own z, less the mean with the other clients' z."
    return plot(partial(_draw_gains, {client: each[client] for client in order}), text, caption)


def _draw_gains(each: Mapping[str, float], theme: Theme) -> Figure:
    figure, (axes,) = canvas(7.2, 0.8 + 0.2 * len(each))
    at = np.arange(len(each))[::-1]
    bars = axes.barh(at, list(each.values()), 0.8, color=theme.lines[0])
    for bar, (client, gain) in zip(bars, each.items(), strict=True):
        tell(bar, [f"{client}: {100 * gain:.1f} points"])
    axes.axvline(0, color=theme.quiet)
    axes.set_yticks(at, [short_name(client) for client in each])
    axes.set_ylim(-0.6, len(each) - 0.4)
    axes.tick_params("y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("preference accuracy, own z less another's")
    percent_axis(axes.xaxis)
    return figure


def map_plot(tastes: TasteRecord) -> Plot | None:
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
    return plot(partial(_draw_map, tastes), f"{text}.", caption)


def _by_prototype(tastes: TasteRecord) -> dict[str, list[int]]:
    """Name of a prototype → the places of its clients."""
    groups: dict[str, list[int]] = {}
    numbers = sorted(set(tastes["prototypes"].values()))
    for label in numbers:
        own = [at for at, c in enumerate(tastes["clients"]) if tastes["prototypes"].get(c) == label]
        groups[f"at prototype {label}"] = own
    rest = [at for at, client in enumerate(tastes["clients"]) if client not in tastes["prototypes"]]
    return groups | ({"without one": rest} if rest else {})


def _draw_map(tastes: TasteRecord, theme: Theme) -> Figure:
    figure, (axes,) = canvas(7.2, 4.2)
    points, groups = np.array(tastes["map"]["clients"], dtype=np.float64), _by_prototype(tastes)
    for index, (name, places) in enumerate(groups.items()):
        shown = name if tastes["prototypes"] else None
        color = color_of(theme, index, len(groups))
        drawn = axes.scatter(points[places, 0], points[places, 1], s=28, color=color, label=shown)
        tell(drawn, [f"{tastes['clients'][place]}, {name}" for place in places])
    marks = np.array(tastes["map"]["prototypes"], dtype=np.float64).reshape(-1, 2)
    axes.scatter(marks[:, 0], marks[:, 1], s=70, marker="x", color=theme.text)
    for label, (x, y) in enumerate(marks):
        axes.annotate(f" {label}", (x, y), fontsize=9)
    if len(points) <= BARS // 2:
        for client, (x, y) in zip(tastes["clients"], points, strict=True):
            axes.annotate(f" {short_name(client, 16)}", (x, y), fontsize=8)
    axes.set(xlabel="first component", ylabel="second component")
    axes.set_aspect("equal", adjustable="datalim")
    legend(axes)
    return figure


def kl_plot(tastes: TasteRecord) -> Plot:
    """How far posteriors are from N(0, 1) in each dimension of z."""
    values = tastes["kl_per_dimension"]
    top = int(np.argmax(values))
    most = f"most in dimension {top} with {values[top]:.2f}"
    text = f"KL per dimension of z: {sum(values):.2f} nats in all, {most}."
    caption = "KL of clients' posteriors to N(0, 1) in each dimension, means over clients."
    return plot(partial(_draw_kl, values), text, caption)


def _draw_kl(values: list[float], theme: Theme) -> Figure:
    figure, (axes,) = canvas(7.2, 2.2)
    bars = axes.bar(np.arange(len(values)), values, 0.8, color=theme.lines[2])
    for dimension, (bar, value) in enumerate(zip(bars, values, strict=True)):
        tell(bar, [f"dimension {dimension}: {value:.3g} nats"])
    axes.set(xlabel="dimension of z", ylabel="nats")
    axes.grid(visible=False, axis="x")
    return figure


def trust_plot(tastes: TasteRecord) -> Plot | None:
    """Whom each client trusts; ``None`` where the prior is no mixture of the others' posteriors."""
    if not tastes["trust"]:
        return None
    text = "; ".join(f"{client} trusts {most_trusted(own)} most" for client, own in tastes["trust"].items())
    caption = (
        "How much each client, a row, trusts each other client, a column, as a source of its prior. A row "
        "sums to 1."
    )
    return plot(partial(_draw_trust, tastes), f"{text}.", caption)


def most_trusted(weights: Mapping[str, float]) -> str:
    """The client that is trusted most, the first one on a tie."""
    return max(sorted(weights), key=lambda client: weights[client])


def _draw_trust(tastes: TasteRecord, theme: Theme) -> Figure:
    from matplotlib import colormaps

    rows, columns = [c for c in tastes["clients"] if c in tastes["trust"]], tastes["clients"]
    values = [[tastes["trust"][row].get(column, np.nan) for column in columns] for row in rows]
    figure, (axes,) = canvas(7.2, 1.6 + 0.2 * len(rows))
    edges = [np.arange(len(side) + 1) - 0.5 for side in (columns, rows)]
    mesh = axes.pcolormesh(*edges, np.array(values), cmap=colormaps["cividis"].resampled(40), vmin=0)
    cells = ((row, column, tastes["trust"][row].get(column)) for row in rows for column in columns)
    named = [f"{row} trusts {column}: {value or 0:.2f}" for row, column, value in cells]
    tell(mesh, named)
    axes.invert_yaxis()
    axes.set_yticks(range(len(rows)), [short_name(client) for client in rows])
    axes.set_xticks(range(len(columns)), [short_name(client, 16) for client in columns], rotation=90)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    figure.colorbar(mesh, ax=axes, shrink=0.8)
    return figure


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
                    number(own - each[client] if each else None),
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
        end += f"; with what clients told the server {tastes['told']:.3f}{apart}"
    return f"tastes: accuracy with own z {tastes['own']:.3f}{another}{end}"
