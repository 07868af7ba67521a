"""What clients hold, before anything trains: sizes, lengths, overlaps, and how unlike they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prefed.core.key import Key
from prefed.core.strict import StrictModel
from prefed.core.text import printable
from prefed.data import overlaps
from prefed.data.dataset import FederatedDataset, Report
from prefed.data.tokens import TokenSet

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["ClientStatistics", "DatasetStatistics", "Lengths", "divergence", "gini", "print_survey", "survey"]

_SHOWN = 40
"""Clients that a printed table lists at most."""


class Lengths(StrictModel):
    """Tokens per text, special tokens included."""

    median: float
    p95: float
    max: int


class ClientStatistics(StrictModel):
    """One client.

    Attributes:
        id: the client.
        train: number of training pairs.
        validation: number of validation pairs.
        test: number of test pairs.
        flipped: chosen and rejected stand swapped from what the source says.
        categories: training pairs by category.
        prompt: lengths of the training prompts.
        response: lengths of the training responses, chosen and rejected.
        repeats: training pairs that say again what another of the client's says.
        shared_prompts: training pairs whose prompt another client trains on too.
        shared_pairs: training pairs that another client trains on too, whichever response it prefers.
        contradicted: training pairs of which another client prefers the other response.
        test_prompts: test pairs whose prompt the client trains on.
        test_elsewhere: test pairs that another client trains on.
        category_distance: Jensen–Shannon distance (base 2, between 0 and 1) of the client's categories from
            those of all training pairs; ``None`` without categories.
        token_distance: the same of the tokens of its chosen responses.
    """

    id: str
    train: int
    validation: int
    test: int
    flipped: bool
    categories: dict[str, int]
    prompt: Lengths
    response: Lengths
    repeats: int
    shared_prompts: int
    shared_pairs: int
    contradicted: int
    test_prompts: int
    test_elsewhere: int
    category_distance: float | None
    token_distance: float


class DatasetStatistics(StrictModel):
    """A federation's data.

    Attributes:
        clients: each of them.
        report: what became of the rows that were read.
        fingerprint: of the federation.
        categories: training pairs by category.
        prompt: lengths of all training prompts.
        response: lengths of all training responses.
        gini: of the numbers of training pairs: 0 where all are equal, towards 1 where one client has all.
        shared_prompts: different prompts that two or more clients train on.
        shared_pairs: different pairs that two or more clients train on.
        contradictions: different pairs of which two clients prefer different responses.
        test_trained: different test pairs that some client trains on.
        category_distance: mean over clients, weighted by training pairs; ``None`` without categories.
        token_distance: mean over clients, weighted by training pairs.
        dealt_category_distance: the same if the training pairs were dealt at random to clients of these
            sizes: few pairs differ from the whole by chance alone, and this is by how much.
        dealt_token_distance: likewise.
    """

    clients: tuple[ClientStatistics, ...]
    report: Report
    fingerprint: str
    categories: dict[str, int]
    prompt: Lengths
    response: Lengths
    gini: float
    shared_prompts: int
    shared_pairs: int
    contradictions: int
    test_trained: int
    category_distance: float | None
    token_distance: float
    dealt_category_distance: float | None
    dealt_token_distance: float


def gini(sizes: Sequence[int] | NDArray[Any]) -> float:
    """Gini coefficient of sizes.

    >>> gini([5, 5, 5]), gini([0, 0, 0, 8])
    (0.0, 0.75)
    """
    x = np.sort(np.asarray(sizes, dtype=np.float64))
    n = len(x)
    return float(2 * (np.arange(1, n + 1) @ x) / (n * x.sum()) - (n + 1) / n)


def divergence(index: NDArray[Any], count: NDArray[Any], pool: NDArray[Any]) -> float:
    """Jensen–Shannon distance, base 2, of a sparse histogram from a dense one that contains it.

    Args:
        index: where the histogram is not zero, ``int [k]``.
        count: its values there, ``[k]``.
        pool: the other histogram, ``[m]``.

    >>> pool = np.array([1.0, 1.0])
    >>> divergence(np.array([0, 1]), np.array([3, 3]), pool)
    0.0
    >>> round(divergence(np.array([0]), np.array([1]), pool), 4)
    0.5579
    """
    p = count / count.sum()
    q = pool[index] / pool.sum()
    middle = (p + q) / 2
    # Where the histogram is zero, the pool's mass is twice the middle's: log2(2) = 1 bit times that mass.
    bits = p @ np.log2(p / middle) + q @ np.log2(q / middle) + (1.0 - q.sum())
    return math.sqrt(max(float(bits), 0.0) / 2)


def survey(federation: FederatedDataset) -> DatasetStatistics:
    """Look through all that clients hold.

    Reads every chosen training response three times, so that memory is a few arrays over rows and one over
    tokens.
    """
    tokens = federation.tokens
    ids = list(federation.clients)
    held = [federation.clients[name] for name in ids]
    sizes = np.array([len(data.train) for data in held])
    rows = np.concatenate([data.train for data in held])
    who = np.repeat(np.arange(len(held)), sizes)
    tested = np.concatenate([data.test for data in held])
    tester = np.repeat(np.arange(len(held)), [len(data.test) for data in held])
    prompts, pairs, side = (np.asarray(c)[rows] for c in (tokens.prompts, tokens.pairs, tokens.orientations))
    shared_prompts, shared_pairs = overlaps.shared(prompts, who), overlaps.shared(pairs, who)
    contradicted = overlaps.contradicted(pairs, side, who)
    repeats = overlaps.repeats(pairs, side, who)
    test_pairs, test_prompts = np.asarray(tokens.pairs)[tested], np.asarray(tokens.prompts)[tested]
    own_prompt = overlaps.found(test_prompts, tester, prompts, who, same=True)
    elsewhere = overlaps.found(test_pairs, tester, pairs, who, same=False)
    category = np.asarray(tokens.categories)[rows]
    named = category >= 0
    pool = np.bincount(category[named], minlength=len(tokens.category_names))
    words = _words(tokens, rows)
    edges, test_edges = np.cumsum([0, *sizes]), np.cumsum([0, *(len(data.test) for data in held)])
    clients = []
    random = Key(0).at("survey").numpy().permutation(len(rows))
    dealt: list[tuple[float | None, float]] = []
    for k, data in enumerate(held):
        mine = slice(edges[k], edges[k + 1])
        tests = slice(test_edges[k], test_edges[k + 1])
        lengths = tokens.lengths[data.train]
        kinds, counts = _histogram(category[mine])
        others = random[mine]
        dealt.append((_apart(category[others], pool), _distance(tokens, rows[others], words)))
        clients.append(
            ClientStatistics(
                id=data.id,
                train=len(data.train),
                validation=len(data.validation),
                test=len(data.test),
                flipped=data.id in federation.flipped,
                categories={tokens.category_names[i]: int(n) for i, n in zip(kinds, counts, strict=True)},
                prompt=_lengths(lengths[:, 0]),
                response=_lengths(lengths[:, 1:]),
                repeats=int(repeats[mine].sum()),
                shared_prompts=int(shared_prompts[mine].sum()),
                shared_pairs=int(shared_pairs[mine].sum()),
                contradicted=int(contradicted[mine].sum()),
                test_prompts=int(own_prompt[tests].sum()),
                test_elsewhere=int(elsewhere[tests].sum()),
                category_distance=_apart(category[mine], pool),
                token_distance=_distance(tokens, data.train, words),
            )
        )
    lengths = tokens.lengths[rows]
    return DatasetStatistics(
        clients=tuple(clients),
        report=federation.report,
        fingerprint=federation.fingerprint,
        categories={name: int(n) for name, n in zip(tokens.category_names, pool, strict=True) if n},
        prompt=_lengths(lengths[:, 0]),
        response=_lengths(lengths[:, 1:]),
        gini=gini(sizes),
        shared_prompts=len(np.unique(prompts[shared_prompts])),
        shared_pairs=len(np.unique(pairs[shared_pairs])),
        contradictions=len(np.unique(pairs[contradicted])),
        test_trained=int(np.isin(np.unique(test_pairs), pairs).sum()),
        category_distance=_mean([c.category_distance for c in clients], sizes),
        token_distance=_mean([c.token_distance for c in clients], sizes) or 0.0,
        dealt_category_distance=_mean([apart for apart, _ in dealt], sizes),
        dealt_token_distance=_mean([apart for _, apart in dealt], sizes) or 0.0,
    )


def print_survey(survey: DatasetStatistics, console: Console) -> None:
    """Tables for people: one line per client (the first 40), then the federation as a whole."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    title = f"{len(survey.clients)} clients"
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False
    )
    # What may fold, and how far; the others are whole.
    least = {"client": 10, "prompt": 9, "response": 9, "category": 10}
    for name in (
        "client",
        "train",
        "val.",
        "test",
        "prompt",
        "response",
        "category",
        "JSD\ncat.",
        "JSD\ntok.",
    ):
        table.add_column(
            name,
            justify="left" if name in ("client", "category") else "right",
            overflow="fold",
            min_width=least.get(name),
            no_wrap=name not in least,
        )
    for client in survey.clients[:_SHOWN]:
        table.add_row(
            escape(printable(client.id)) + (" (flipped)" if client.flipped else ""),
            f"{client.train:,}",
            f"{client.validation:,}",
            f"{client.test:,}",
            _spread(client.prompt),
            _spread(client.response),
            escape(printable(_top(client.categories))),
            "–" if client.category_distance is None else f"{client.category_distance:.2f}",
            f"{client.token_distance:.2f}",
        )
    if len(survey.clients) > _SHOWN:
        table.add_row(f"… and {len(survey.clients) - _SHOWN:,} more", *[""] * 8)
    table.caption = (
        "prompt, response: tokens, median/95%/largest. JSD: distance from all clients together, 0 to 1."
    )
    console.print(table)
    whole = Table(show_header=False, title="all clients", title_justify="left")
    whole.add_column()
    whole.add_column(justify="right")
    for name, value in _facts(survey):
        whole.add_row(name, value)
    console.print(whole)


def _facts(survey: DatasetStatistics) -> list[tuple[str, str]]:
    clients, report = survey.clients, survey.report
    train = [client.train for client in clients]
    untested = sum(client.test == 0 for client in clients)
    facts = [
        ("training pairs: all", f"{sum(train):,}"),
        (
            "training pairs a client: least / median / most",
            f"{min(train):,} / {np.median(train):,g} / {max(train):,}",
        ),
        ("Gini coefficient of sizes", f"{survey.gini:.2f}"),
        (
            "mean distance of categories (dealt at random)",
            _against(survey.category_distance, survey.dealt_category_distance),
        ),
        (
            "mean distance of tokens (dealt at random)",
            _against(survey.token_distance, survey.dealt_token_distance),
        ),
        ("prompts that several clients train on", f"{survey.shared_prompts:,}"),
        ("pairs that several clients train on", f"{survey.shared_pairs:,}"),
        ("pairs on which clients disagree", f"{survey.contradictions:,}"),
        ("repeated pairs within clients", f"{sum(client.repeats for client in clients):,}"),
        (
            "test pairs that another client trains on",
            f"{sum(client.test_elsewhere for client in clients):,} of {sum(c.test for c in clients):,}",
        ),
        (
            "test pairs whose prompt their client trains on",
            f"{sum(client.test_prompts for client in clients):,}",
        ),
        ("clients without a test pair", f"{untested:,}"),
    ]
    words = {
        "read": "rows read",
        "invalid": "left out: malformed or blank",
        "identical": "left out: equal responses",
        "ties": "left out: no preference",
        "too_long": "left out: response longer than max_length",
        "duplicates": "left out: repeats",
        "leaks": "left out of training: also tested on",
        "unplaced": "left out: test rows of no training client",
        "limited": "left out: over the limit",
        "dropped": "clients left out: nothing to train on",
        "cut": "prompts that lost their beginning",
        "prefixes": "responses that repeated the prompt",
    }
    counts = report.model_dump()
    return facts + [
        (text, f"{counts[name]:,}") for name, text in words.items() if counts[name] or name == "read"
    ]


def _against(value: float | None, dealt: float | None) -> str:
    return "–" if value is None or dealt is None else f"{value:.2f} ({dealt:.2f})"


def _spread(lengths: Lengths) -> str:
    return f"{lengths.median:.0f}/{lengths.p95:.0f}/{lengths.max}"


def _top(categories: dict[str, int], most: int = 2) -> str:
    total = sum(categories.values())
    ranked = sorted(categories.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{name} {count / total:.0%}" for name, count in ranked[:most])
    return shown + (f", {len(ranked) - most} more" if len(ranked) > most else "")


def _lengths(values: NDArray[Any]) -> Lengths:
    return Lengths(
        median=float(np.median(values)), p95=float(np.percentile(values, 95)), max=int(values.max())
    )


def _mean(values: Sequence[float | None], sizes: NDArray[Any]) -> float | None:
    """Mean weighted by ``sizes`` of the values that are there."""
    there = [(value, int(size)) for value, size in zip(values, sizes, strict=True) if value is not None]
    return sum(value * size for value, size in there) / sum(size for _, size in there) if there else None


def _histogram(codes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    return np.unique(codes[codes >= 0], return_counts=True)


def _apart(codes: NDArray[Any], pool: NDArray[Any]) -> float | None:
    kinds, counts = _histogram(codes)
    return divergence(kinds, counts, pool) if len(kinds) else None


def _words(tokens: TokenSet, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each token occurs in the chosen responses of ``rows``."""
    counts = np.zeros(1, dtype=np.int64)
    for row in rows:
        found = np.bincount(tokens.pair(row).chosen)
        if len(found) > len(counts):
            counts = np.concatenate([counts, np.zeros(len(found) - len(counts), dtype=np.int64)])
        counts[: len(found)] += found
    return counts


def _distance(tokens: TokenSet, rows: NDArray[np.int64], pool: NDArray[np.int64]) -> float:
    found = np.concatenate([tokens.pair(row).chosen for row in rows])
    return divergence(*np.unique(found, return_counts=True), pool)
