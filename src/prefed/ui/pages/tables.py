"""Tables as values, and their three outputs: the terminal, HTML (``templates/parts.html``) and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from prefed.core.text import printable
from prefed.runs.metrics import Figure
from prefed.train.metrics import FederatedMetric, Spread, spread

if TYPE_CHECKING:
    from rich.table import Table as RichTable

ROWS = 500
"""Rows that a table of clients or rounds has on a page at most."""
LISTED = 40
"""Clients or settings that a table lists at most."""

SPREAD: Mapping[str, Callable[[Spread], float]] = {
    "mean": lambda s: s.mean,
    "worst client": lambda s: s.worst,
    "worst tenth": lambda s: s.worst_decile,
    "best client": lambda s: s.best,
    "standard deviation": lambda s: s.std,
    "Jain index": lambda s: s.jain,
}
"""How a metric is spread over clients: name → number."""

Row: TypeAlias = tuple[str, Sequence[str]]
"""The name of a row and the cells that follow it."""
Facts: TypeAlias = list[tuple[str, str]]
"""Names and texts."""


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        caption: above it.
        heads: of all columns, that of the names first.
        summary: rows below a line, such as means; the first one is emphasised.
        left: columns of text: so many of the last ones.
        fold: heads of other columns that a narrow terminal may break into lines.
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[Row]
    summary: Sequence[Row] = ()
    left: int = 0
    fold: Sequence[str] = ()


def terminal(table: Table) -> RichTable:
    """A table for the terminal."""
    from rich import box
    from rich.table import Table as RichTable

    made = RichTable(
        title=literal(table.caption) or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    first, *others = table.heads
    made.add_column(literal(first), overflow="fold", min_width=10)
    for at, name in enumerate(others, 1):
        if at >= len(table.heads) - table.left:
            made.add_column(literal(name), overflow="fold", min_width=10)
        elif name in table.fold:
            made.add_column(literal(name), justify="right", overflow="fold", min_width=9)
        else:
            made.add_column(literal(name).replace(" ", "\n"), justify="right", no_wrap=True)
    for name, cells in table.rows:
        made.add_row(literal(name), *map(literal, cells))
    if table.summary:
        made.add_section()
    for at, (name, cells) in enumerate(table.summary):
        made.add_row(literal(name), *map(literal, cells), style="" if at else "bold")
    return made


def markdown(table: Table) -> str:
    """A table in Markdown, without its caption."""
    rows = ([name, *cells] for name, cells in (*table.rows, *table.summary))
    lines = [table.heads, ["---"] * len(table.heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def cell(value: Any, form: str = ".3f") -> str:
    """A number as a cell has it; empty for what is none."""
    return format(value, form) if isinstance(value, int | float) else ""


def setting(value: Any) -> str:
    """A setting's value as an experiment file has it, but texts without quotes.

    >>> setting(True), setting(["c_attn"]), setting(1e-05), setting("dpo")
    ('true', '["c_attn"]', '1e-05', 'dpo')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(f'"{v}"' if isinstance(v, str) else setting(v) for v in value) + "]"
    return str(value)


def lowest_clients(values: Mapping[str, float]) -> tuple[list[str], str]:
    """The clients that a table lists: all by name, or of many the lowest :data:`LISTED`, lowest first.

    Returns:
        The clients, and what a last row says of the others; empty if there are none.

    >>> lowest_clients({"bob": 0.5, "ann": 0.75})
    (['ann', 'bob'], '')
    >>> lowest_clients({f"c{k}": k / 100 for k in range(100)})[1]
    '… and 60 clients that do better'
    """
    clients = sorted(values)
    if len(clients) <= LISTED:
        return clients, ""
    more = f"… and {len(clients) - LISTED:,} clients that do better"
    return sorted(clients, key=lambda client: values[client])[:LISTED], more


def metrics_table(title: str, metrics: Sequence[Figure], pairs: Callable[[str], int | None]) -> Table:
    """Clients against metrics, and each metric's spread; of many clients the lowest are listed.

    Args:
        title: above the table.
        metrics: one column each. The clients are those of the preference accuracy, which also says who is
            lowest; of the last metric if it is not among them.
        pairs: client → pairs it was judged on.
    """
    leading = next((metric for metric in metrics if metric.name == "preference_accuracy"), metrics[-1])
    clients, more = lowest_clients(leading.values["per_client"])
    rows: list[Row] = []
    for client in clients:
        values = (metric.values["per_client"].get(client) for metric in metrics)
        rows.append((client, [cell(pairs(client), ","), *map(cell, values)]))
    if more:
        rows.append((more, []))
    spreads = [spread(metric.values) for metric in metrics]
    summary = [(name, ["", *(f"{of(s):.3f}" for s in spreads)]) for name, of in SPREAD.items()]
    return Table(title, ["client", "pairs", *(metric.label for metric in metrics)], rows, summary)


def unseen_table(unseen: Mapping[str, FederatedMetric], taste: str | None = None) -> Table:
    """Clients that never took part: steps, pairs or taste → accuracy over those clients.

    Args:
        taste: the one taste by which these clients judge, if there is one.
    """
    words, first = "Clients that never took part, by the taste that was asked for", "taste"
    if taste is None:
        words, first = "Clients that never took part, after some local steps from what was published", "steps"
        if not all(name.isdecimal() for name in unseen):
            zero = "; 0: as published, with the population's taste" if "0" in unseen else ""
            words, first = f"{words}, or with a taste inferred from some pairs{zero}", "steps or pairs"
    rows = []
    for steps, accuracy in unseen.items():
        shares = (accuracy["mean"], accuracy["worst"], accuracy["worst_decile"])
        count = len(accuracy["per_client"]) + accuracy.get("mean_alone", 0)
        rows.append((steps, [f"{count:,}", *(f"{value:.3f}" for value in shares)]))
    return Table(f"{words}.", [first, "clients", "mean", "worst", "worst tenth"], rows)


def literal(text: str) -> str:
    """``text`` for a table: neither rich nor the terminal obeys what it holds."""
    from rich.markup import escape

    return escape(printable(text))
