"""Prints the statistics of a dataset on the terminal."""

from __future__ import annotations

import numpy as np
from rich.console import Console

from prefed.core.text import pluralize
from prefed.data.statistics import ClientStatistics, DatasetStatistics, Lengths
from prefed.runs.data_notices import CUT, LEFT_OUT
from prefed.ui.pages.tables import LISTED, Row, Table, terminal

_COUNTS = {
    **{name: f"left out: {text}" for name, (text, _) in LEFT_OUT.items()},
    "dropped": "clients left out: nothing to train on",
    **{name: several for name, (_, several) in CUT.items()},
    "prefixes": "responses that repeated the prompt",
}
"""Counts of :class:`~prefed.data.dataset.RowCounts`, and their texts."""


def print_dataset_statistics(statistics: DatasetStatistics, console: Console) -> None:
    """Print a table with one line per client (the first 40), then a table of the whole dataset."""
    rows: list[Row] = [_client_row(client) for client in statistics.clients[:LISTED]]
    if len(statistics.clients) > LISTED:
        rows.append((f"… and {len(statistics.clients) - LISTED:,} more", []))
    heads = ["client", "train", "val.", "test", "prompt", "response", "JSD cat.", "JSD tok.", "category"]
    console.print(
        terminal(
            Table(
                pluralize(len(statistics.clients), "client", "clients"),
                heads,
                rows,
                left=1,
                fold=("prompt", "response"),
            )
        )
    )
    console.print(
        "prompt, response: tokens, median/95%/largest. JSD: distance from all clients together, 0 to 1."
    )
    whole = [(name, [text]) for name, text in _dataset_rows(statistics)]
    console.print(terminal(Table("", ["all clients", ""], whole)))


def _client_row(client: ClientStatistics) -> Row:
    cells = [f"{count:,}" for count in (client.train, client.validation, client.test)]
    cells += [_quantiles(client.prompt), _quantiles(client.response)]
    cells += ["–" if client.category_distance is None else f"{client.category_distance:.2f}"]
    cells += [f"{client.token_distance:.2f}", _largest(client.categories)]
    return client.id + (" (flipped)" if client.flipped else ""), cells


def _dataset_rows(statistics: DatasetStatistics) -> list[tuple[str, str]]:
    clients, counts = statistics.clients, statistics.row_counts.model_dump()
    train = [client.train for client in clients]
    sizes = f"{min(train):,} / {np.median(train):,g} / {max(train):,}"
    categories = _beside_random(statistics.category_distance, statistics.random_category_distance)
    tokens = _beside_random(statistics.token_distance, statistics.random_token_distance)
    elsewhere = sum(client.test_elsewhere for client in clients)
    return [
        ("training pairs: all", f"{sum(train):,}"),
        ("training pairs a client: least / median / most", sizes),
        ("Gini coefficient of sizes", f"{statistics.gini:.2f}"),
        ("mean distance of categories (assigned at random)", categories),
        ("mean distance of tokens (assigned at random)", tokens),
        ("prompts that several clients train on", f"{statistics.shared_prompts:,}"),
        ("pairs that several clients train on", f"{statistics.shared_pairs:,}"),
        ("pairs on which clients disagree", f"{statistics.contradictions:,}"),
        ("repeated pairs within clients", f"{sum(client.duplicates for client in clients):,}"),
        ("test pairs that another client trains on", f"{elsewhere:,} of {sum(c.test for c in clients):,}"),
        (
            "test pairs whose prompt their client trains on",
            f"{sum(client.test_prompts for client in clients):,}",
        ),
        ("clients without a test pair", f"{sum(client.test == 0 for client in clients):,}"),
        ("rows read", f"{statistics.row_counts.rows:,}"),
        *((text, f"{counts[name]:,}") for name, text in _COUNTS.items() if counts[name]),
    ]


def _beside_random(value: float | None, random: float | None) -> str:
    return "–" if value is None or random is None else f"{value:.2f} ({random:.2f})"


def _quantiles(lengths: Lengths) -> str:
    return f"{lengths.median:.0f}/{lengths.p95:.0f}/{lengths.max}"


def _largest(categories: dict[str, int], most: int = 2) -> str:
    """The largest categories with their shares, and the number of the others."""
    total = sum(categories.values())
    ranked = sorted(categories.items(), key=lambda item: (-item[1], item[0]))
    listed = ", ".join(f"{name} {count / total:.0%}" for name, count in ranked[:most])
    return listed + (f", {len(ranked) - most} more" if len(ranked) > most else "")
