"""Clusters of clients over rounds, and how selectors agree with clients, on the page and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from prefed.core.text import pluralize
from prefed.runs.groupings import Agreement, Grouping
from prefed.runs.record import RunRecord
from prefed.ui.pages.drawing import (
    BARS,
    Theme,
    canvas,
    color_of,
    draw_line,
    legend,
    round_axis,
    short_name,
    tell,
)
from prefed.ui.pages.parts import ROWS, Plot, Table, number, plot
from prefed.ui.pages.tables import literal, new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table as RichTable

CLIENTS = 300
"""Clients that get a row of their own in the plot of clusters at most; of more, sizes and moves are drawn."""
SPANS = 5000
"""Coloured spans in that plot at most. Each takes space in the page."""
NAMED = 40
"""Clients that a cell names at most."""

Span = tuple[int, int, int]
"""The first round, the end, and the cluster of a client in between."""


def clusters_plot(run: RunRecord) -> Plot | None:
    """Which cluster each client is in over rounds; ``None`` where clients were never grouped."""
    if not run.groupings:
        return None
    last = run.groupings[-1]
    sizes = ", ".join(f"{len(own):,} of selector-{u}" for u, own in enumerate(last.clusters))
    times = pluralize(len(run.groupings), "grouping", "groupings")
    moves = sum(len(grouping.moved) for grouping in run.groupings)
    text = f"After {times} the clients are {sizes}; in all {pluralize(moves, 'client', 'clients')} moved."
    if _each_client(spans(run)):
        caption = "The selector whose cluster each client is in, from the first grouping on."
    else:
        caption = "How many clients each selector's cluster has, and how many moved at each grouping."
    return plot(partial(draw_clusters, run), text, caption)


def spans(run: RunRecord) -> dict[str, list[Span]]:
    """Client → the spans of rounds that it spends in one cluster. The last one ends after the last round."""
    starts = [grouping.round for grouping in run.groupings]
    ends = [*starts[1:], run.summary["rounds"] + 1]
    result: dict[str, list[Span]] = {}
    for grouping, end in zip(run.groupings, ends, strict=True):
        for u, clients in enumerate(grouping.clusters):
            for client in clients:
                own = result.setdefault(client, [])
                if own and own[-1][1:] == (grouping.round, u):
                    own[-1] = (own[-1][0], end, u)
                else:
                    own.append((grouping.round, end, u))
    return result


def _each_client(rows: dict[str, list[Span]]) -> bool:
    return len(rows) <= CLIENTS and sum(map(len, rows.values())) <= SPANS


def draw_clusters(run: RunRecord, theme: Theme) -> Figure:
    """Clients against rounds, coloured by cluster; of very many clients, sizes of clusters and moves."""
    rows = spans(run)
    if not _each_client(rows):
        return _draw_sizes(run, theme)
    # Clients that end in one cluster stand together.
    order = sorted(rows, key=lambda client: (rows[client][-1][2], client))
    few = len(order) <= BARS
    figure, (axes,) = canvas(7.2, 1.2 + (0.2 * len(order) if few else min(5.5, 0.05 * len(order) + 1.5)))
    count = len(run.groupings[-1].clusters)
    for u in range(count):
        bars = [
            (at, start - 0.5, end - start)
            for at, client in enumerate(order)
            for start, end, cluster in rows[client]
            if cluster == u
        ]
        at, left, width = np.array(bars, dtype=np.float64).reshape(-1, 3).T
        color = color_of(theme, u, count)
        drawn = axes.barh(at, width, 0.86 if few else 1.0, left=left, color=color, label=f"selector-{u}")
        for bar, (row, first, length) in zip(drawn, bars, strict=True):
            tell(bar, [_stay(order[row], u, first + 0.5, length)])
    axes.set_yticks(range(len(order)) if few else [], [short_name(c) for c in order] if few else [])
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.margins(x=0)
    axes.grid(visible=False, axis="y")
    axes.tick_params("y", length=0)
    axes.set(xlabel="round", ylabel="" if few else f"{len(order):,} clients")
    figure.legend(loc="outside upper left", ncols=min(count, 5))
    round_axis(axes)
    return figure


def _stay(client: str, cluster: int, start: float, length: float) -> str:
    """Which rounds a client spends in a cluster.

    >>> _stay("ann", 1, 3.0, 2.0), _stay("ann", 0, 5.0, 1.0)
    ('ann, selector-1: rounds 3 to 4', 'ann, selector-0: round 5')
    """
    end = start + length - 1
    rounds = f"round {start:.0f}" if end == start else f"rounds {start:.0f} to {end:.0f}"
    return f"{client}, selector-{cluster}: {rounds}"


def _draw_sizes(run: RunRecord, theme: Theme) -> Figure:
    figure, (sizes, moves) = canvas(7.2, 2.8, 1, 2)
    rounds, count = [grouping.round for grouping in run.groupings], len(run.groupings[-1].clusters)
    for u in range(count):
        values = [len(grouping.clusters[u]) for grouping in run.groupings]
        draw_line(sizes, rounds, values, color=color_of(theme, u, count), label=f"selector-{u}")
    draw_line(moves, rounds, [len(grouping.moved) for grouping in run.groupings], color=theme.quiet)
    for axes, title in ((sizes, "clients in each cluster"), (moves, "clients that moved")):
        axes.set(xlabel="round", title=title)
        axes.set_ylim(bottom=0)
        round_axis(axes)
    legend(sizes)
    return figure


def clusters_table(run: RunRecord) -> Table | None:
    """Each cluster at each grouping, the last grouping first; ``None`` where clients were never grouped."""
    if not run.groupings:
        return None
    rows = [row for grouping in reversed(run.groupings) for row in _cluster_rows(grouping)]
    more = f" The last {ROWS:,} of {len(rows):,} rows." if len(rows) > ROWS else ""
    caption = (
        "Clusters from each grouping on. The loss is the selector's on validation pairs, in nats, the mean "
        f"over all clients that told theirs.{more}"
    )
    return Table(caption, ["round, selector", "clients", "loss", "moved here", "members"], rows[:ROWS])


def _cluster_rows(grouping: Grouping) -> list[tuple[str, list[str]]]:
    moved, rows = set(grouping.moved), []
    for u, clients in enumerate(grouping.clusters):
        loss = number(grouping.losses[u], ".4f") if grouping.losses else ""
        came = [client for client in clients if client in moved]
        cells = [f"{len(clients):,}", loss, _named(came), _named(clients)]
        rows.append((f"{grouping.round}, selector-{u}", cells))
    return rows


def _named(clients: Sequence[str]) -> str:
    more = f" and {len(clients) - NAMED:,} more" if len(clients) > NAMED else ""
    return ", ".join(clients[:NAMED]) + more


AGREEMENT = ("clients", "mean", "worst", "its clients", "others", "newcomers")
"""Columns of :func:`agreement_table`."""
ABOUT = "Preference accuracy on {} pairs of each selector by itself, and of the vote of all"


def _cells(rows: Sequence[Agreement]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The columns that any row has a value for, and the rows."""
    each = [
        (row.name, (row.clients, row.mean, row.worst, row.members, row.others, row.newcomers)) for row in rows
    ]
    used = [k for k in range(len(AGREEMENT)) if any(values[k] is not None for _, values in each)]
    texts = [
        (name, [f"{values[k]:,}" if AGREEMENT[k] == "clients" and values[k] is not None
                else number(values[k]) for k in used])
        for name, values in each
    ]  # fmt: skip
    return [AGREEMENT[k] for k in used], texts


def agreement_table(run: RunRecord) -> Table | None:
    """How each selector and the vote agree with clients; ``None`` where there are not several selectors."""
    if not run.agreements:
        return None
    heads, rows = _cells(run.agreements)
    caption = f"{ABOUT.format(run.split)}: means over all clients, over those of its cluster, over the others"
    if "newcomers" in heads:
        caption += ", and over clients that never took part"
    return Table(f"{caption}.", ["selector", *heads], rows)


def agreement_terminal(agreements: Sequence[Agreement], what: str) -> RichTable:
    """:func:`agreement_table` for the terminal."""
    heads, rows = _cells(agreements)
    table = new_table(f"selectors: preference accuracy on {what}, means over clients", "selector", *heads)
    for name, cells in rows:
        table.add_row(literal(name), *cells)
    return table
