"""Clusters of clients over rounds, and agreement of selectors with clients."""

from __future__ import annotations

from collections.abc import Sequence

from prefed.core.text import pluralize
from prefed.runs.finished_run import RunRecord
from prefed.runs.metrics import Agreement, Grouping
from prefed.ui.pages.chart_data import ROUNDS, Axis, Bars, Chart, Look, Panel, color_of, over_rounds
from prefed.ui.pages.tables import ROWS, Table, cell

CLIENTS = 300
"""Maximum number of clients with a row in the chart of clusters; beyond it, sizes and moves are drawn."""
SPANS = 5000
"""Maximum number of coloured spans in the chart, which limits the size of the page."""
NAMED = 40
"""Maximum number of clients named in a cell."""

Span = tuple[int, int, int]
"""First round, end (exclusive), and cluster of a client."""


def clusters_chart(run: RunRecord) -> Chart | None:
    """Chart of clients over rounds, coloured by cluster; ``None`` if clients were never grouped.

    With very many clients, the sizes of the clusters and the numbers of moves.
    """
    if not run.groupings:
        return None
    last, rows = run.groupings[-1], spans(run)
    sizes = ", ".join(f"{len(own):,} in selector-{u}" for u, own in enumerate(last.clusters))
    times = pluralize(len(run.groupings), "grouping", "groupings")
    moves = sum(len(grouping.moved) for grouping in run.groupings)
    text = f"Clusters after {times}: {sizes}; {pluralize(moves, 'move', 'moves')} in total."
    if len(rows) <= CLIENTS and sum(map(len, rows.values())) <= SPANS:
        caption = "Each client's cluster, named by its selector, since the first grouping."
        return Chart("clusters", text, caption, [_stays(run, rows)])
    caption = "Number of clients per cluster, and number of clients that moved at each grouping."
    return Chart("clusters", text, caption, _sizes(run))


def spans(run: RunRecord) -> dict[str, list[Span]]:
    """Client → spans of rounds in one cluster. The last span ends after the last round."""
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


def _stays(run: RunRecord, rows: dict[str, list[Span]]) -> Panel:
    # Sort clients by their final cluster.
    order = sorted(rows, key=lambda client: (rows[client][-1][2], client))
    shown = []
    for u in range(len(run.groupings[-1].clusters)):
        own = [(at, *stay) for at, client in enumerate(order) for stay in rows[client] if stay[2] == u]
        bars = [(float(at), start - 0.5, end - 0.5) for at, start, end, _ in own]
        notes = [_stay(order[at], u, start, end - start) for at, start, end, _ in own]
        shown.append(Bars(f"selector-{u}", bars, notes, color_of(u), thickness=0.86))
    height = 90 + max(3 * len(order), min(18 * len(order), 420))
    return Panel(ROUNDS, Axis(names=order), shown, height=height)


def _stay(client: str, cluster: int, start: int, length: int) -> str:
    """Tooltip of a span.

    >>> _stay("ann", 1, 3, 2), _stay("ann", 0, 5, 1)
    ('ann, selector-1: rounds 3 to 4', 'ann, selector-0: round 5')
    """
    end = start + length - 1
    rounds = f"round {start}" if end == start else f"rounds {start} to {end}"
    return f"{client}, selector-{cluster}: {rounds}"


def _sizes(run: RunRecord) -> list[Panel]:
    rounds, count = [grouping.round for grouping in run.groupings], len(run.groupings[-1].clusters)
    sizes = [
        over_rounds(
            f"selector-{u}",
            rounds,
            [len(grouping.clusters[u]) for grouping in run.groupings],
            Look(color_of(u), mark=u % 7),
            "{:,.0f}".format,
        )
        for u in range(count)
    ]
    moved = [len(grouping.moved) for grouping in run.groupings]
    moves = over_rounds("", rounds, moved, Look(0), "{:,.0f}".format)
    y = Axis(whole=True, zero=True)
    return [
        Panel(ROUNDS, y, sizes, "clients in each cluster", 260),
        Panel(ROUNDS, y, [moves], "clients that moved", 260),
    ]


def clusters_table(run: RunRecord) -> Table | None:
    """Table of clusters by grouping, last grouping first; ``None`` if clients were never grouped."""
    if not run.groupings:
        return None
    rows = [row for grouping in reversed(run.groupings) for row in _cluster_rows(grouping)]
    more = f" The last {ROWS:,} of {len(rows):,} rows." if len(rows) > ROWS else ""
    caption = (
        "Clusters by grouping. The loss is the selector's mean loss on validation pairs, in nats, over all "
        f"clients that reported it.{more}"
    )
    return Table(caption, ["round, selector", "clients", "loss", "moved here", "members"], rows[:ROWS])


def _cluster_rows(grouping: Grouping) -> list[tuple[str, list[str]]]:
    moved, rows = set(grouping.moved), []
    for u, clients in enumerate(grouping.clusters):
        loss = cell(grouping.losses[u], ".4f") if grouping.losses else ""
        came = [client for client in clients if client in moved]
        cells = [f"{len(clients):,}", loss, _named(came), _named(clients)]
        rows.append((f"{grouping.round}, selector-{u}", cells))
    return rows


def _named(clients: Sequence[str]) -> str:
    more = f" and {len(clients) - NAMED:,} more" if len(clients) > NAMED else ""
    return ", ".join(clients[:NAMED]) + more


AGREEMENT = ("clients", "mean", "worst", "its clients", "others", "newcomers")
"""Columns of :func:`agreement_table`; empty columns are left out."""


def agreement_table(agreements: Sequence[Agreement], pairs: str) -> Table | None:
    """Table of each selector's and the vote's agreement with clients; ``None`` without agreements.

    ``pairs`` describes the evaluated pairs in the caption.
    """
    if not agreements:
        return None
    each = [
        (row.name, (row.clients, row.mean, row.worst, row.members, row.others, row.newcomers))
        for row in agreements
    ]
    used = [k for k in range(len(AGREEMENT)) if any(values[k] is not None for _, values in each)]
    rows = [(name, [cell(values[k], ".3f" if k else ",") for k in used]) for name, values in each]
    caption = (
        f"Selectors: preference accuracy on {pairs} of each selector and of their majority vote; means "
        "over all clients, over the clients of its cluster, over the others"
    )
    if AGREEMENT.index("newcomers") in used:
        caption += ", and over clients that never trained"
    return Table(f"{caption}.", ["selector", *(AGREEMENT[k] for k in used)], rows)
