"""Figures as text: tables of clients for the terminal, and how settings and names are written everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prefed.core.text import printable
from prefed.runs.figures import Figure
from prefed.train.metrics import FederatedMetric, Spread, spread

if TYPE_CHECKING:
    from rich.table import Table

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
"""How a figure is spread over clients: name → number."""


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


def clients_table(title: str, figures: Sequence[Figure], pairs: Callable[[str], int | None]) -> Table:
    """Clients against figures, and each figure's spread; of many clients the lowest are listed.

    Args:
        title: above the table.
        figures: one column each. The clients are those of the preference accuracy, which also says who is
            lowest; of the last figure if it is not among them.
        pairs: client → pairs it was judged on.
    """
    leading = next((figure for figure in figures if figure.name == "preference_accuracy"), figures[-1])
    clients, more = lowest_clients(leading.values["per_client"])
    table = new_table(title, "client", "pairs", *(figure.label for figure in figures))
    for client in clients:
        count = pairs(client)
        values = (figure.values["per_client"].get(client) for figure in figures)
        cells = ("" if value is None else f"{value:.3f}" for value in values)
        table.add_row(literal(client), "" if count is None else f"{count:,}", *cells)
    if more:
        table.add_row(more)
    table.add_section()
    spreads = [spread(figure.values) for figure in figures]
    for name, of in SPREAD.items():
        table.add_row(name, "", *(f"{of(s):.3f}" for s in spreads), style="bold" if name == "mean" else "")
    return table


UNSEEN = ("clients", "mean", "worst", "worst tenth")
"""Columns of :func:`unseen_rows`."""


def unseen_words(unseen: Mapping[str, FederatedMetric], taste: str | None = None) -> tuple[str, str]:
    """What stands above a table of :func:`unseen_rows`, and above its first column.

    Args:
        taste: the one taste by which these clients judge, if there is one.
    """
    if taste is not None:
        return "clients that never took part, by the taste that was asked for", "taste"
    words = "clients that never took part, after some local steps from what was published"
    if all(name.isdecimal() for name in unseen):
        return words, "steps"
    zero = "; 0: as published, with the population's taste" if "0" in unseen else ""
    return f"{words}, or with a taste inferred from some pairs{zero}", "steps or pairs"


def unseen_rows(unseen: Mapping[str, FederatedMetric]) -> list[tuple[str, list[str]]]:
    """How clients that never took part do: steps, pairs or taste → accuracy over those clients, as text."""
    rows = []
    for steps, accuracy in unseen.items():
        figures = (accuracy["mean"], accuracy["worst"], accuracy["worst_decile"])
        count = len(accuracy["per_client"]) + accuracy.get("mean_alone", 0)
        rows.append((steps, [f"{count:,}", *(f"{figure:.3f}" for figure in figures)]))
    return rows


def unseen_table(unseen: Mapping[str, FederatedMetric], taste: str | None = None) -> Table:
    """:func:`unseen_rows` for the terminal; ``taste`` as :func:`unseen_words` takes it."""
    table = new_table(*unseen_words(unseen, taste), *UNSEEN)
    for name, cells in unseen_rows(unseen):
        table.add_row(literal(name), *cells)
    return table


def new_table(title: str, first: str, *others: str) -> Table:
    """An empty table for the terminal, columns of figures behind a first one of names."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=literal(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column(literal(first), overflow="fold", min_width=10)
    for name in others:
        table.add_column(literal(name).replace(" ", "\n"), justify="right", no_wrap=True)
    return table


def literal(text: str) -> str:
    """``text`` for a table: neither rich nor the terminal obeys what it holds."""
    from rich.markup import escape

    return escape(printable(text))
