"""Tables for the terminal, HTML (``templates/parts.html``) and Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from prefed.core.text import printable
from prefed.runs.metrics import Figure
from prefed.train.metrics import FederatedMetric, Spread, spread

if TYPE_CHECKING:
    from rich.table import Table as RichTable

ROWS = 500
"""Maximum number of rows in a table on a page."""
LISTED = 40
"""Maximum number of clients or settings in a table on the terminal."""

SPREAD: Mapping[str, Callable[[Spread], float]] = {
    "mean": lambda s: s.mean,
    "worst client": lambda s: s.worst,
    "worst tenth": lambda s: s.worst_decile,
    "best client": lambda s: s.best,
    "standard deviation": lambda s: s.std,
    "Jain index": lambda s: s.jain,
}
"""Statistics over clients, by name."""

Row: TypeAlias = tuple[str, Sequence[str]]
"""Name of the row, and its cells."""
Facts: TypeAlias = list[tuple[str, str]]
"""Pairs of a name and a text."""


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        heads: column headings, starting with the column of names.
        summary: rows below a separator, such as means; the first one is emphasised.
        left: number of last columns that are left-aligned text.
        fold: headings of further columns whose cells may wrap.
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[Row]
    summary: Sequence[Row] = ()
    left: int = 0
    fold: Sequence[str] = ()


def terminal(table: Table) -> RichTable:
    """Convert a table for rich."""
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


def split(table: Table, fits: Callable[[Table], bool]) -> list[Table]:
    """Split the columns of a table so that each part fits; each part repeats the names of the rows."""

    def columns(first: int, end: int) -> Table:
        def cut(rows: Sequence[Row]) -> list[Row]:
            return [(name, cells[first - 1 : end - 1]) for name, cells in rows]

        heads, caption = [table.heads[0], *table.heads[first:end]], table.caption if first == 1 else ""
        return replace(table, caption=caption, heads=heads, rows=cut(table.rows), summary=cut(table.summary))

    parts, first = [], 1
    while first < len(table.heads):
        ends = range(len(table.heads), first + 1, -1)
        end = next((end for end in ends if fits(columns(first, end))), first + 1)
        parts.append(columns(first, end))
        first = end
    return parts


def markdown(table: Table) -> str:
    """Convert a table to Markdown, without its caption. Bars in cells are escaped unless they are already."""
    rows = ([name, *cells] for name, cells in (*table.rows, *table.summary))
    lines = [table.heads, ["---"] * len(table.heads), *rows]
    escaped = ([re.sub(r"(?<!\\)\|", r"\|", cell) for cell in cells] for cells in lines)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in escaped)


def cell(value: Any, form: str = ".3f") -> str:
    """Format a number; empty for anything else."""
    return format(value, form) if isinstance(value, int | float) else ""


def setting(value: Any) -> str:
    """Format a setting as in TOML, but strings without quotes.

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
    """The clients to list: all by name or, of more than :data:`LISTED`, the lowest by value.

    Returns:
        The clients, and a text about the others; empty if there are none.

    >>> lowest_clients({"bob": 0.5, "ann": 0.75})
    (['ann', 'bob'], '')
    >>> lowest_clients({f"c{k}": k / 100 for k in range(100)})[1]
    '… and 60 clients with higher values'
    """
    clients = sorted(values)
    if len(clients) <= LISTED:
        return clients, ""
    more = f"… and {len(clients) - LISTED:,} clients with higher values"
    return sorted(clients, key=lambda client: values[client])[:LISTED], more


def metrics_table(title: str, metrics: Sequence[Figure], pairs: Callable[[str], int | None]) -> Table:
    """A table of clients and metrics, with each metric's spread.

    Args:
        metrics: one column each. Clients are selected by preference accuracy or, without it, by the last
            metric.
        pairs: client → number of evaluated pairs.
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
    heads = ["client", "pairs", *(metric.label for metric in metrics)]
    return Table(title, heads, rows, without_repeated_tenth(summary))


def without_repeated_tenth(rows: Sequence[Row]) -> list[Row]:
    """Leave out the row "worst tenth" if it is equal to "worst client", as with few clients."""
    cells = dict(rows)
    return [row for row in rows if row[0] != "worst tenth" or row[1] != cells["worst client"]]


def unseen_table(unseen: Mapping[str, FederatedMetric], taste: str | None = None) -> Table:
    """A table of the accuracy of clients that never trained.

    Args:
        unseen: local steps, pairs or taste → accuracy over those clients.
        taste: the taste that all these clients use, if given.
    """
    words, first = "Clients that never trained, with the given taste", "taste"
    if taste is None:
        words, first = "Clients that never trained, after local steps from the published model", "steps"
        if not all(name.isdecimal() for name in unseen):
            zero = "; 0: the published model with the population's taste" if "0" in unseen else ""
            words, first = f"{words}, or with a taste inferred from pairs{zero}", "steps or pairs"
    rows = []
    for steps, accuracy in unseen.items():
        shares = (accuracy["mean"], accuracy["worst"], accuracy["worst_decile"])
        count = len(accuracy["per_client"]) + accuracy.get("mean_alone", 0)
        rows.append((steps, [f"{count:,}", *(f"{value:.3f}" for value in shares)]))
    return Table(f"{words}.", [first, "clients", "mean", "worst", "worst tenth"], rows)


def literal(text: str) -> str:
    """Escape rich markup and control characters."""
    from rich.markup import escape

    return escape(printable(text))
