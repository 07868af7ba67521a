"""Dataset statistics: sizes, lengths, overlap between clients, and distances between their distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefed.core.random_keys import Key
from prefed.core.strict_settings import StrictModel
from prefed.data.dataset import FederatedDataset, RowCounts
from prefed.data.partition import duplicate_mask
from prefed.data.tokens import TokenSet, comparable, thumbs


class Lengths(StrictModel):
    """Lengths of texts in tokens, including special tokens."""

    median: float
    p95: float
    max: int


class ClientStatistics(StrictModel):
    """Statistics of one client.

    Attributes:
        flipped: chosen and rejected are swapped relative to the source.
        categories: number of training pairs by category.
        prompt: lengths of the training prompts.
        response: lengths of the training responses, chosen and rejected.
        duplicates: training pairs that repeat an earlier pair of the client, with the same preference.
        shared_prompts: training pairs with a prompt that another client also trains on.
        shared_pairs: training pairs that another client also trains on, with either preference.
        contradictions: training pairs that another client trains on with the opposite preference.
        test_prompts: test pairs with a prompt that the client trains on.
        test_elsewhere: test pairs that another client trains on.
        thumbs_up: training rows that are thumbs up.
        thumbs_down: training rows that are thumbs down.
        category_distance: Jensen–Shannon distance (base 2, between 0 and 1) between the categories of the
            training pairs of the client and of all clients; ``None`` without categories.
        token_distance: the same for the tokens of the chosen responses; for selectors, of both responses; for
            thumbs, of all responses.
    """

    id: str
    train: int
    validation: int
    test: int
    flipped: bool
    categories: dict[str, int]
    prompt: Lengths
    response: Lengths
    duplicates: int
    shared_prompts: int
    shared_pairs: int
    contradictions: int
    test_prompts: int
    test_elsewhere: int
    thumbs_up: int
    thumbs_down: int
    category_distance: float | None
    token_distance: float


class DatasetStatistics(StrictModel):
    """Statistics of a federated dataset.

    Clients with few pairs differ from the whole by chance. The distances of a random partition into clients
    of the same sizes show by how much.

    Attributes:
        categories: number of training pairs by category.
        prompt: lengths of all training prompts.
        response: lengths of all training responses.
        gini: Gini coefficient of the numbers of training pairs; see :func:`gini`.
        shared_prompts: number of distinct prompts that two or more clients train on.
        shared_pairs: number of distinct pairs that two or more clients train on.
        contradictions: number of distinct pairs on which two clients have opposite preferences.
        test_trained: number of distinct test pairs that some client trains on.
        category_distance: mean over clients, weighted by training pairs; ``None`` without categories.
        token_distance: mean over clients, weighted by training pairs.
        random_category_distance: ``category_distance`` of a random partition.
        random_token_distance: ``token_distance`` of a random partition.
    """

    clients: tuple[ClientStatistics, ...]
    row_counts: RowCounts
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
    random_category_distance: float | None
    random_token_distance: float


def gini(sizes: Sequence[int] | NDArray[Any]) -> float:
    """Return the Gini coefficient of sizes: 0 if all are equal, near 1 if one client has everything.

    >>> gini([5, 5, 5]), gini([0, 0, 0, 8])
    (0.0, 0.75)
    """
    x = np.sort(np.asarray(sizes, dtype=np.float64))
    n = len(x)
    return float(2 * (np.arange(1, n + 1) @ x) / (n * x.sum()) - (n + 1) / n)


def jensen_shannon_distance(index: NDArray[Any], count: NDArray[Any], pool: NDArray[Any]) -> float:
    """Jensen–Shannon distance, base 2, between a sparse histogram and a dense one that contains it.

    Args:
        index: positions of the nonzero entries of the sparse histogram, ``int [k]``.
        count: these entries, ``[k]``.
        pool: the dense histogram, ``[m]``.

    >>> pool = np.array([1.0, 1.0])
    >>> jensen_shannon_distance(np.array([0, 1]), np.array([3, 3]), pool)
    0.0
    >>> round(jensen_shannon_distance(np.array([0]), np.array([1]), pool), 4)
    0.5579
    """
    p = count / count.sum()
    q = pool[index] / pool.sum()
    middle = (p + q) / 2
    # Where p is 0, q is twice the middle, which adds log2(2) = 1 bit times the mass of q.
    bits = p @ np.log2(p / middle) + q @ np.log2(q / middle) + (1.0 - q.sum())
    return math.sqrt(max(float(bits), 0.0) / 2)


def shared_mask(item: NDArray[Any], client: NDArray[Any]) -> NDArray[np.bool_]:
    """Mark rows with an item that another client also has."""
    return overlap_mask(item, client, item, client, same_client=False)


def contradiction_mask(pairs: NDArray[Any], side: NDArray[Any], client: NDArray[Any]) -> NDArray[np.bool_]:
    """Mark rows with a pair that another client has with the opposite preference."""
    code = 2 * np.unique(pairs, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return overlap_mask(code + 1 - side, client, code + side, client, same_client=False)


def overlap_mask(
    item: NDArray[Any],
    client: NDArray[Any],
    other_item: NDArray[Any],
    other_client: NDArray[Any],
    *,
    same_client: bool,
) -> NDArray[np.bool_]:
    """Mark rows with an item that also occurs in a second set of rows, ``bool [n]``.

    Args:
        item: codes of pairs or prompts, ``[n]``.
        client: indices of their clients, ``[n]``.
        other_item: items of the second set, ``[m]``.
        other_client: indices of their clients, ``[m]``.
        same_client: compare with rows of the same client; otherwise with rows of other clients.
    """
    codes, of_row = np.unique(np.concatenate([item, other_item]), return_inverse=True)
    of_row = of_row.reshape(-1).astype(np.int64)
    clients = int(max(client.max(initial=0), other_client.max(initial=0))) + 1
    first = of_row[: len(item)] * clients + client
    second = np.unique(of_row[len(item) :] * clients + other_client)
    own = np.isin(first, second)
    if same_client:
        return own
    clients_of_code = np.bincount(second // clients, minlength=len(codes))[of_row[: len(item)]]
    return np.asarray(clients_of_code > own)


def dataset_statistics(dataset: FederatedDataset) -> DatasetStatistics:
    """Compute the statistics of a dataset. Each chosen training response is read from disk three times."""
    tokens = dataset.tokens
    clients = list(dataset.clients.values())
    sizes = np.array([len(data.train) for data in clients])
    test_sizes = np.array([len(data.test) for data in clients])
    train = np.concatenate([data.train for data in clients])
    test = np.concatenate([data.test for data in clients])
    client, test_client = (np.repeat(np.arange(len(clients)), counts) for counts in (sizes, test_sizes))
    prompts, pairs, side = (np.asarray(c)[train] for c in (tokens.prompts, tokens.pairs, tokens.orientations))
    test_prompts, test_pairs = np.asarray(tokens.prompts)[test], np.asarray(tokens.pairs)[test]
    test_keys, keys = comparable(tokens, test, tokens, train)
    width = keys.shape[1]
    elsewhere = overlap_mask(
        *(test_keys.reshape(-1), np.repeat(test_client, width)),
        *(keys.reshape(-1), np.repeat(client, width)),
        same_client=False,
    )
    train_masks = {
        "duplicates": duplicate_mask(client, np.zeros_like(client), pairs, side),
        "shared_prompts": shared_mask(prompts, client),
        "shared_pairs": shared_mask(pairs, client),
        "contradictions": contradiction_mask(pairs, side, client),
    }
    test_masks = {
        "test_prompts": overlap_mask(test_prompts, test_client, prompts, client, same_client=True),
        "test_elsewhere": np.asarray(elsewhere.reshape(-1, width).any(axis=1)),
    }
    category = np.asarray(tokens.categories)[train]
    category_pool = np.bincount(category[category >= 0], minlength=len(tokens.category_names))
    token_pool = _token_counts(tokens, train)
    shuffled = Key(0).at("survey").numpy().permutation(len(train))
    edges, test_edges = np.cumsum([0, *sizes]), np.cumsum([0, *test_sizes])

    def distances(rows: slice | NDArray[Any]) -> tuple[float | None, float]:
        categories, counts = _histogram(category[rows])
        distance = jensen_shannon_distance(categories, counts, category_pool) if len(categories) else None
        chosen = np.concatenate([tokens.pair(row).chosen for row in train[rows]])
        return distance, jensen_shannon_distance(*_histogram(chosen), token_pool)

    each: list[ClientStatistics] = []
    random: list[tuple[float | None, float]] = []
    for k, data in enumerate(clients):
        own, tests = slice(edges[k], edges[k + 1]), slice(test_edges[k], test_edges[k + 1])
        random.append(distances(shuffled[own]))
        category_distance, token_distance = distances(own)
        codes, counts = _histogram(category[own])
        feedback = thumbs(tokens.lengths[data.train])
        each.append(
            ClientStatistics(
                id=data.id,
                train=len(data.train),
                validation=len(data.validation),
                test=len(data.test),
                flipped=data.id in dataset.flipped,
                categories={tokens.category_names[i]: int(n) for i, n in zip(codes, counts, strict=True)},
                prompt=_lengths(tokens.lengths[data.train][:, 0]),
                response=_response_lengths(tokens, data.train),
                **{name: int(mask[own].sum()) for name, mask in train_masks.items()},
                **{name: int(mask[tests].sum()) for name, mask in test_masks.items()},
                thumbs_up=int((feedback > 0).sum()),
                thumbs_down=int((feedback < 0).sum()),
                category_distance=category_distance,
                token_distance=token_distance,
            )
        )
    names = zip(tokens.category_names, category_pool, strict=True)
    return DatasetStatistics(
        clients=tuple(each),
        row_counts=dataset.row_counts,
        fingerprint=dataset.fingerprint,
        categories={name: int(count) for name, count in names if count},
        prompt=_lengths(tokens.lengths[train][:, 0]),
        response=_response_lengths(tokens, train),
        gini=gini(sizes),
        shared_prompts=len(np.unique(prompts[train_masks["shared_prompts"]])),
        shared_pairs=len(np.unique(pairs[train_masks["shared_pairs"]])),
        contradictions=len(np.unique(pairs[train_masks["contradictions"]])),
        test_trained=len(np.unique(test_pairs[np.isin(test_keys, keys).any(axis=1)])),
        category_distance=_mean([client.category_distance for client in each], sizes),
        token_distance=_mean([client.token_distance for client in each], sizes) or 0.0,
        random_category_distance=_mean([distance for distance, _ in random], sizes),
        random_token_distance=_mean([distance for _, distance in random], sizes) or 0.0,
    )


def _lengths(values: NDArray[Any]) -> Lengths:
    return Lengths(
        median=float(np.median(values)), p95=float(np.percentile(values, 95)), max=int(values.max())
    )


def _response_lengths(tokens: TokenSet, rows: NDArray[np.int64]) -> Lengths:
    lengths = tokens.lengths[rows][:, 1:]
    # The second response of a thumb is absent.
    return _lengths(lengths[lengths > 0])


def _mean(values: Sequence[float | None], sizes: NDArray[Any]) -> float | None:
    """Return the weighted mean of the values that are not ``None``; ``None`` if there are none."""
    pairs = [(value, int(size)) for value, size in zip(values, sizes, strict=True) if value is not None]
    return sum(value * size for value, size in pairs) / sum(size for _, size in pairs) if pairs else None


def _histogram(codes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    return np.unique(codes[codes >= 0], return_counts=True)


def _token_counts(tokens: TokenSet, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count each token in the chosen responses of ``rows``."""
    total = np.zeros(1, dtype=np.int64)
    for row in rows:
        counts = np.bincount(tokens.pair(row).chosen)
        if len(counts) > len(total):
            total = np.concatenate([total, np.zeros(len(counts) - len(total), dtype=np.int64)])
        total[: len(counts)] += counts
    return total
