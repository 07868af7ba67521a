"""Partitions: which client gets which rows. Pure functions of a few columns and a key.

Every function gives each row exactly one client, as an index. No row is left over. Results depend on the
arguments alone.

flwr-datasets has partitioners of these names. It pins ``datasets<5``, its shards drop leftover rows by
default, and its Dirichlet partitioner splits the rows of a prompt between clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from prefed.core.key import Key
from prefed.data.errors import DataError

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


def client_weights(clients: int, sizes: float | Sequence[float] | None) -> Floats:
    """The relative sizes of the clients, ``float64 [clients]``.

    Args:
        clients: the number of clients.
        sizes: ``None`` for equal sizes, the exponent a of a power law (k+1)^−a, or one weight per client.

    Raises:
        DataError: there is not one weight per client.

    >>> client_weights(3, 1.0).round(2).tolist()
    [1.0, 0.5, 0.33]
    """
    if sizes is None:
        return np.ones(clients)
    if isinstance(sizes, int | float):
        return np.asarray((1.0 + np.arange(clients)) ** -float(sizes))
    if len(sizes) != clients:
        raise DataError(f"{len(sizes)} sizes for {clients} clients")
    return np.asarray(sizes, dtype=np.float64)


def shard_sizes(total: int, weight: Floats, *, least: int = 1) -> Ints:
    """Split ``total`` in proportion to ``weight`` by the method of largest remainders, ``int64 [clients]``.

    Every client gets at least ``least``.

    Raises:
        DataError: ``total`` is too small for that.

    >>> shard_sizes(10, np.array([5.0, 3.0, 2.0])).tolist(), shard_sizes(11, np.ones(3)).tolist()
    ([5, 3, 2], [4, 4, 3])
    """
    count = len(weight)
    if total < least * count:
        raise DataError(f"{total} pairs are not enough for {count} clients; lower the number of clients")
    exact = total * weight / weight.sum()
    sizes = np.floor(exact).astype(np.int64)
    order = np.argsort(sizes - exact, kind="stable")
    sizes[order[: total - int(sizes.sum())]] += 1
    short = np.maximum(least - sizes, 0)
    sizes += short
    for _ in range(int(short.sum())):
        sizes[int(np.argmax(sizes))] -= 1
    return np.asarray(sizes, dtype=np.int64)


def contiguous_shards(order: Ints, sizes: Ints) -> Ints:
    """Cut the rows, sorted as in ``order``, into contiguous shards; returns the client of each row."""
    client = np.empty(len(order), dtype=np.int64)
    client[order] = np.repeat(np.arange(len(sizes)), sizes)
    return client


def iid_partition(rows: int, weight: Floats, key: Key, *, least: int = 1) -> Ints:
    """Shuffle the rows and cut them into shards whose sizes follow ``weight``, within one row.

    Raises:
        DataError: there are fewer than ``least`` rows per client.
    """
    return contiguous_shards(key.numpy().permutation(rows), shard_sizes(rows, weight, least=least))


def margin_partition(margins: NDArray[np.floating[Any]], weight: Floats, *, least: int = 1) -> Ints:
    """Sort the rows by margin, largest first, and cut them into contiguous shards.

    Rows of equal margin keep their order.

    Raises:
        DataError: there are fewer than ``least`` rows per client.
    """
    sizes = shard_sizes(len(margins), weight, least=least)
    return contiguous_shards(np.argsort(-margins, kind="stable"), sizes)


def dirichlet_shares(categories: int, clients: int, alpha: float, key: Key) -> Floats:
    """The clients' shares of each category, ``float64 [categories, clients]``: rows drawn from Dir(α)."""
    generator = key.numpy()
    # Gamma variates of a small alpha underflow to zero all at once. Their logarithms do not:
    # if G ~ Gamma(alpha + 1) and U is uniform, then G · U^(1/alpha) ~ Gamma(alpha).
    shape = (categories, clients)
    uniform = 1.0 - generator.random(shape)
    logs = np.log(generator.gamma(alpha + 1.0, size=shape)) + np.log(uniform) / alpha
    values = np.exp(logs - logs.max(axis=1, keepdims=True))
    return np.asarray(values / values.sum(axis=1, keepdims=True))


def dirichlet_partition(
    category: Ints,
    prompt: NDArray[np.uint64],
    share: Floats,
    key: Key,
    placed: tuple[Any, Any] | None = None,
) -> Ints:
    """Divide the rows of each category by the given shares. All rows of a prompt go to one client.

    A prompt's category is that of its first row. The prompts of a category are shuffled. Then they are cut at
    the clients' cumulative shares of the category's rows.

    Args:
        category: ``int64 [n]``, in ``range(len(share))``.
        prompt: ``uint64 [n]``, equal for equal prompts.
        share: ``float64 [categories, clients]``, each row sums to one; see :func:`dirichlet_shares`.
        key: shuffles the prompts.
        placed: prompts (``uint64``) that have a client already, and these clients.
    """
    codes, first, group, counts = np.unique(
        prompt, return_index=True, return_inverse=True, return_counts=True
    )
    of_group = category[first]
    client = np.full(len(codes), -1, dtype=np.int64)
    if placed is not None and len(placed[0]):
        order = np.argsort(placed[0], kind="stable")
        prompts = np.asarray(placed[0])[order]
        at = np.minimum(np.searchsorted(prompts, codes), len(prompts) - 1)
        client = np.where(prompts[at] == codes, np.asarray(placed[1])[order][at], -1)
    for index in range(len(share)):
        members = np.flatnonzero((of_group == index) & (client < 0))
        if len(members) == 0:
            continue
        # The shuffle starts from the order of the rows, so that the order of the codes has no influence.
        members = members[np.argsort(first[members], kind="stable")]
        members = members[key.at("category", index).numpy().permutation(len(members))]
        sizes = counts[members]
        middle = np.cumsum(sizes) - sizes / 2
        edges = np.cumsum(share[index])[:-1] * sizes.sum()
        client[members] = np.searchsorted(edges, middle, side="right")
    return np.asarray(client[group.reshape(-1)], dtype=np.int64)


def fill_empty_clients(client: Ints, prompt: NDArray[np.uint64], clients: int) -> Ints:
    """Give every client without rows one prompt: the smallest prompt of the client with the most rows.

    Args:
        client: ``int64 [n]``, the client of each row; all rows of a prompt have one client.
        prompt: ``uint64 [n]``, equal for equal prompts.
        clients: the number of clients.

    Raises:
        DataError: there are fewer prompts than clients.
    """
    codes, group, counts = np.unique(prompt, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    if len(codes) < clients:
        raise DataError(
            f"{len(codes)} different prompts are not enough for {clients} clients that share none; "
            "lower the number of clients"
        )
    of_prompt = np.empty(len(codes), dtype=np.int64)
    of_prompt[group] = client
    rows = np.bincount(client, minlength=clients)
    prompts = np.bincount(of_prompt, minlength=clients)
    for empty in np.flatnonzero(rows == 0):
        largest = int(np.argmax(np.where(prompts > 1, rows, -1)))
        own = np.flatnonzero(of_prompt == largest)
        moved = own[int(np.argmin(counts[own]))]
        of_prompt[moved] = empty
        for array, amount in ((rows, counts[moved]), (prompts, 1)):
            array[largest] -= amount
            array[empty] += amount
    return np.asarray(of_prompt[group], dtype=np.int64)


def first_kind_count(clients: int, ratio: float) -> int:
    """How many clients of a conflict are of the first kind.

    It is the whole number nearest to ``ratio * clients``, with at least one client of each kind.
    """
    return min(max(int(np.floor(ratio * clients + 0.5)), 1), clients - 1)


def conflict_partition(category: Ints, weight: Floats, ratio: float, key: Key, *, least: int = 1) -> Ints:
    """Divide the rows of category 0 among the clients of the first kind, those of category 1 among the rest.

    Args:
        category: ``int64 [n]`` of 0 and 1.
        weight: ``float64 [clients]``, relative sizes among the clients of each kind.
        ratio: the first kind's share of the clients.
        key: shuffles the rows.
        least: the least number of rows per client.

    Raises:
        DataError: a category has too few rows.
    """
    first = first_kind_count(len(weight), ratio)
    client = np.empty(len(category), dtype=np.int64)
    for kind, members in ((0, weight[:first]), (1, weight[first:])):
        rows = np.flatnonzero(category == kind)
        client[rows] = iid_partition(len(rows), members, key.at("kind", kind), least=least) + kind * first
    return client
