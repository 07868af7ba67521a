"""Assign rows to clients, and split each client's rows into training, validation and test sets.

Partitions are pure functions of a few columns and a key. They assign each row to exactly one client. Splits
never put a pair into two sets.

The partitioners of flwr-datasets have the same names but are not used: the package pins ``datasets<5``, its
shards drop leftover rows by default, and its Dirichlet partitioner divides the rows of one prompt among
clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from prefed.core.random_keys import Key
from prefed.core.text import control_character, listed
from prefed.data.config import (
    ByColumn,
    ByFile,
    BySource,
    Conflict,
    DataConfig,
    Dirichlet,
    Iid,
    Margin,
    Partition,
)
from prefed.data.errors import DataError, MissingColumnError
from prefed.data.record import Record

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


def client_weights(clients: int, sizes: float | Sequence[float] | None) -> Floats:
    """Return the relative sizes of the clients, ``float64 [clients]``.

    Args:
        sizes: ``None`` for equal sizes, the exponent a of a power law (k+1)^−a, or one weight per client.

    Raises:
        DataError: the number of weights is not the number of clients.

    >>> client_weights(3, 1.0).round(2).tolist()
    [1.0, 0.5, 0.33]
    """
    if sizes is None:
        return np.ones(clients)
    if isinstance(sizes, int | float):
        return np.asarray((1.0 + np.arange(clients)) ** -float(sizes))
    if len(sizes) != clients:
        raise DataError(f"[data.partition] sizes has {len(sizes)} weights for {clients} clients")
    return np.asarray(sizes, dtype=np.float64)


def shard_sizes(total: int, weight: Floats, *, least: int = 1) -> Ints:
    """Divide ``total`` in proportion to ``weight`` by the largest remainder method, ``int64 [clients]``.

    Raises:
        DataError: ``total`` is too small to give every client at least ``least``.

    >>> shard_sizes(10, np.array([5.0, 3.0, 2.0])).tolist(), shard_sizes(11, np.ones(3)).tolist()
    ([5, 3, 2], [4, 4, 3])
    """
    count = len(weight)
    if total < least * count:
        raise DataError(f"{total} pairs are too few for {count} clients; use fewer clients")
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
    """Cut the rows, in the given order, into contiguous shards. Returns the client of each row."""
    client = np.empty(len(order), dtype=np.int64)
    client[order] = np.repeat(np.arange(len(sizes)), sizes)
    return client


def iid_partition(rows: int, weight: Floats, key: Key, *, least: int = 1) -> Ints:
    """Shuffle the rows and cut them into shards in proportion to ``weight``, within one row.

    Raises:
        DataError: there are fewer than ``least`` rows per client.
    """
    return contiguous_shards(key.numpy().permutation(rows), shard_sizes(rows, weight, least=least))


def margin_partition(margins: NDArray[np.floating[Any]], weight: Floats, *, least: int = 1) -> Ints:
    """Sort the rows stably by margin, largest first, and cut them into contiguous shards.

    Raises:
        DataError: there are fewer than ``least`` rows per client.
    """
    sizes = shard_sizes(len(margins), weight, least=least)
    return contiguous_shards(np.argsort(-margins, kind="stable"), sizes)


def dirichlet_shares(categories: int, clients: int, alpha: float, key: Key) -> Floats:
    """Draw the clients' shares of each category from Dir(α), ``float64 [categories, clients]``."""
    generator = key.numpy()
    # For a small alpha, gamma variates underflow to zero, but their logarithms do not:
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

    A prompt has the category of its first row. The prompts of each category are shuffled and then cut at the
    cumulative shares of the clients.

    Args:
        category: ``int64 [n]``, in ``range(len(share))``.
        prompt: ``uint64 [n]``, equal for equal prompts.
        share: ``float64 [categories, clients]`` from :func:`dirichlet_shares`; each row sums to one.
        key: shuffles the prompts.
        placed: prompts (``uint64``) that are already assigned, and their clients.
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
        # Sort by first row before shuffling, so that the order of the prompt codes has no influence.
        members = members[np.argsort(first[members], kind="stable")]
        members = members[key.at("category", index).numpy().permutation(len(members))]
        sizes = counts[members]
        middle = np.cumsum(sizes) - sizes / 2
        edges = np.cumsum(share[index])[:-1] * sizes.sum()
        client[members] = np.searchsorted(edges, middle, side="right")
    return np.asarray(client[group.reshape(-1)], dtype=np.int64)


def fill_empty_clients(client: Ints, prompt: NDArray[np.uint64], clients: int) -> Ints:
    """Move one prompt to each client without rows: the smallest prompt of the client with the most rows.

    Args:
        client: ``int64 [n]``, the client of each row; all rows of a prompt have the same client.
        prompt: ``uint64 [n]``, equal for equal prompts.

    Raises:
        DataError: there are fewer prompts than clients.
    """
    codes, group, counts = np.unique(prompt, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    if len(codes) < clients:
        raise DataError(
            f"{len(codes)} distinct prompts are too few for {clients} clients, since each prompt goes to one "
            "client only; use fewer clients"
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
    """Round ``ratio * clients`` to the number of clients of the first kind, at least one of each kind."""
    return min(max(int(np.floor(ratio * clients + 0.5)), 1), clients - 1)


def conflict_partition(category: Ints, weight: Floats, ratio: float, key: Key, *, least: int = 1) -> Ints:
    """Divide category 0 among the clients of the first kind, and category 1 among the other clients.

    Args:
        category: ``int64 [n]`` of 0 and 1.
        weight: ``float64 [clients]``, relative sizes among the clients of each kind.
        ratio: share of clients that are of the first kind.
        key: shuffles the rows.
        least: minimum number of rows per client.

    Raises:
        DataError: a category has too few rows.
    """
    first = first_kind_count(len(weight), ratio)
    client = np.empty(len(category), dtype=np.int64)
    for kind, members in ((0, weight[:first]), (1, weight[first:])):
        rows = np.flatnonzero(category == kind)
        client[rows] = iid_partition(len(rows), members, key.at("kind", kind), least=least) + kind * first
    return client


ROLES = ("train", "validation", "test")
"""The roles of rows. A row's role is stored as an index into this tuple."""


@dataclass(frozen=True)
class RowTable:
    """The columns that a partition needs, one entry per row.

    Attributes:
        role: ``int64 [n]``, index into :data:`ROLES`.
        value: ``int64 [n]``, index into ``values``.
        values: the distinct values of the partition's column, or the names of the sources.
        margin: ``float [n]``.
        prompt: ``uint64 [n]``, equal for equal prompts.
        usable: ``bool [n]``, false for rows that are not assigned to a client.
    """

    role: NDArray[np.int64]
    value: NDArray[np.int64]
    values: Sequence[str]
    margin: NDArray[np.floating[Any]]
    prompt: NDArray[np.uint64]
    usable: NDArray[np.bool_]

    def rows_of(self, role: int) -> NDArray[np.int64]:
        """Return the indices of the usable rows of a role."""
        return np.flatnonzero(self.usable & (self.role == role))


@dataclass(frozen=True)
class Assignment:
    """The client of every row.

    Attributes:
        client: ``int64 [n]``, index into ``ids``; −1 for a row without a client.
        flipped: clients with chosen and rejected swapped.
    """

    ids: tuple[str, ...]
    client: NDArray[np.int64]
    flipped: frozenset[str] = frozenset()


def partition_value(partition: Partition, record: Record, source: str | None) -> str:
    """Return the record's value in the partition's column, the name of its source, or ``""``.

    Raises:
        MissingColumnError: the record has no value in the column, or no margin.
        ValueError: the value contains a control character.
    """
    if isinstance(partition, BySource | ByFile):
        return source or ""
    if isinstance(partition, Margin) and record.margin is None:
        raise MissingColumnError("margin", "no margin", record.columns)
    column = getattr(partition, "column", None)
    if column is None:
        return ""
    value = record.column(column)
    if value is None or value == "":
        raise MissingColumnError(column, f"no value in column {column!r}", record.columns)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    name = str(value)
    control = control_character(name)
    if control is not None:
        raise ValueError(f"{column} {name!r} contains the control character {control}")
    return name


def natural_partition(partition: Partition, table: RowTable) -> Assignment | None:
    """Return the assignment if the data name the clients, otherwise ``None``.

    Raises:
        DataError: a value belongs to no group, or a group has no rows.
    """
    if not isinstance(partition, ByColumn | BySource):
        return None
    present = [table.values[k] for k in np.unique(table.value[table.rows_of(0)])]
    if isinstance(partition, ByColumn) and partition.groups is not None:
        ids = list(partition.groups)
        client_of = _client_of_value(partition.groups, present)
    else:
        ids = present if isinstance(partition, BySource) else sorted(present)
        client_of = {name: k for k, name in enumerate(ids)}
    of_value = np.array([client_of.get(value, -1) for value in table.values], dtype=np.int64)
    client = np.where(table.usable, of_value[table.value], -1)
    return Assignment(tuple(ids), client)


def client_names(partition: Partition, values: Sequence[str]) -> list[str] | None:
    """Return the client of each value if the data name the clients, otherwise ``None``."""
    if not isinstance(partition, ByColumn | BySource):
        return None
    groups = partition.groups or {} if isinstance(partition, ByColumn) else {}
    client_of = {value: name for name, inside in groups.items() for value in inside}
    return [client_of.get(value, value) for value in values]


def _client_of_value(groups: dict[str, list[str]], present: list[str]) -> dict[str, int]:
    """Map each value of a group to the index of its client. ``present`` lists the values in the data."""
    ids = list(groups)
    client_of: dict[str, int] = {}
    for index, (name, values) in enumerate(groups.items()):
        for value in values:
            if value in client_of:
                raise DataError(
                    f"[data.partition] groups: {value!r} is in {ids[client_of[value]]!r} and {name!r}; "
                    "remove it from one of them"
                )
            client_of[value] = index
    without_group = sorted(value for value in present if value not in client_of)
    if without_group:
        raise DataError(
            f"[data.partition] groups: no group contains {_listed(without_group)}; add each to a group"
        )
    empty = set(range(len(ids))) - {client_of[value] for value in present}
    if empty:
        raise DataError(
            f"[data.partition] groups: no rows for {_listed([ids[k] for k in sorted(empty)])}; "
            f"the values in the data are {_listed(sorted(present))}"
        )
    return client_of


def assign_clients(partition: Partition, table: RowTable, key: Key) -> Assignment:
    """Assign every row to a client.

    Validation and test rows follow the same rule as training rows:

    - Column, source: a row goes to the client of its value, or to none if no client trains on that value.
    - Iid, margin, conflict: each role is shuffled, or sorted, and cut separately, with the relative sizes of
      the training set.
    - Dirichlet: a row goes to the client that trains on its prompt. All other rows are divided by the shares
      of the training rows.

    Raises:
        DataError: the rows cannot be divided by this rule.
    """
    natural = natural_partition(partition, table)
    if natural is not None:
        return natural
    if isinstance(partition, Conflict):
        return _conflict(partition, table, key)
    client = np.full(len(table.role), -1, dtype=np.int64)
    if isinstance(partition, Dirichlet):
        _dirichlet(partition, table, key, client)
    else:
        assert isinstance(partition, Iid | Margin)
        weight = client_weights(partition.clients, partition.sizes)
        for role, name in enumerate(ROLES):
            rows, least = table.rows_of(role), int(role == 0)
            if isinstance(partition, Margin):
                client[rows] = margin_partition(table.margin[rows], weight, least=least)
            else:
                client[rows] = iid_partition(len(rows), weight, key.at(name), least=least)
    return Assignment(_numbered("client", partition.clients), client)


def _conflict(partition: Conflict, table: RowTable, key: Key) -> Assignment:
    client = np.full(len(table.role), -1, dtype=np.int64)
    weight = client_weights(partition.clients, partition.sizes)
    kind_of, kinds = _kinds(partition, table) if partition.column else (None, ("as-given", "reversed"))
    for role, name in enumerate(ROLES):
        rows, least, role_key = table.rows_of(role), int(role == 0), key.at(name)
        if kind_of is None:
            client[rows] = iid_partition(len(rows), weight, role_key, least=least)
            continue
        kind = kind_of[table.value[rows]]
        rows, kind = rows[kind >= 0], kind[kind >= 0]
        client[rows] = conflict_partition(kind, weight, partition.ratio, role_key, least=least)
    first = first_kind_count(partition.clients, partition.ratio)
    ids = (*_numbered(kinds[0], first), *_numbered(kinds[1], partition.clients - first))
    return Assignment(ids, client, frozenset(ids[first:] if partition.flip else ()))


def _dirichlet(partition: Dirichlet, table: RowTable, key: Key, client: NDArray[np.int64]) -> None:
    train = table.rows_of(0)
    # Sort categories by name, so that the draw does not depend on the order of the rows.
    present = sorted(np.unique(table.value[train]).tolist(), key=lambda k: table.values[k])
    category_of = np.full(len(table.values), -1, dtype=np.int64)
    category_of[present] = np.arange(len(present))
    category = category_of[table.value]
    # With share_prompts, treat every row as a separate prompt.
    prompt = np.arange(len(table.role), dtype=np.uint64) if partition.share_prompts else table.prompt
    if not partition.share_prompts:
        _check_prompts(prompt[train], category[train])
    share = dirichlet_shares(len(present), partition.clients, partition.alpha, key.at("shares"))
    first = dirichlet_partition(category[train], prompt[train], share, key.at("train"))
    client[train] = fill_empty_clients(first, prompt[train], partition.clients)
    assigned = train
    for role in (1, 2):
        rows = table.rows_of(role)
        rows = rows[category[rows] >= 0]
        placed = (prompt[assigned], client[assigned])
        client[rows] = dirichlet_partition(category[rows], prompt[rows], share, key.at(ROLES[role]), placed)
        assigned = np.concatenate([assigned, rows])


def _check_prompts(prompt: NDArray[np.uint64], category: NDArray[np.int64]) -> None:
    """Refuse data in which most pairs have a prompt that occurs in several categories.

    All rows of a prompt go to one client, so the prompts would decide the partition instead of the shares.
    """
    codes, group = np.unique(prompt, return_inverse=True)
    group = group.reshape(-1)
    low, high = np.full(len(codes), category.max()), np.zeros(len(codes), dtype=np.int64)
    np.minimum.at(low, group, category)
    np.maximum.at(high, group, category)
    crossing = float((low != high)[group].mean())
    if crossing > 0.5:
        raise DataError(
            f"{crossing:.0%} of the pairs have a prompt that occurs in several categories (distinct prompts: "
            f"{len(codes)}). Assigning each prompt to one client would distort the Dirichlet shares; set "
            "[data.partition] share_prompts = true"
        )


def _kinds(partition: Conflict, table: RowTable) -> tuple[NDArray[np.int64], tuple[str, str]]:
    """Return the kind of each value (0 or 1; −1 for neither), and the two categories."""
    present = sorted(table.values[k] for k in np.unique(table.value[table.rows_of(0)]))
    categories = partition.categories or tuple(present)
    if len(categories) != 2 or set(categories) != set(present):
        raise DataError(
            f"a conflict needs exactly two categories, but column {partition.column!r} has {len(present)}: "
            f"{_listed(present)}"
            + (f"; [data.partition] categories: {_listed(categories)}" if partition.categories else "")
        )
    kind_of = {categories[0]: 0, categories[1]: 1}
    kind = np.array([kind_of.get(value, -1) for value in table.values], dtype=np.int64)
    return kind, (categories[0], categories[1])


def _numbered(stem: str, count: int) -> tuple[str, ...]:
    """Return ``stem-0``, ``stem-1``, … with numbers of equal width."""
    width = len(str(count - 1))
    return tuple(f"{stem}-{k:0{width}d}" for k in range(count))


def _listed(names: Sequence[str]) -> str:
    return listed(names, str, 12) or "none"


Mask: TypeAlias = NDArray[np.bool_]

_NO_ROLE = -1
"""Role of a row that is assigned to no client."""


def duplicate_mask(scope: Ints, role: Ints, pair: NDArray[np.uint64], orientation: NDArray[Any]) -> Mask:
    """Mark rows that repeat an earlier row of the same scope and role, ``bool [n]``.

    Args:
        scope: ``int64 [n]``; rows are compared within a scope. Rows of a negative scope are never marked.
        role: ``int64 [n]``.
        pair: ``uint64 [n]``, equal for the same prompt with the same two responses.
        orientation: ``[n]``, which of the two responses is chosen. An opposite preference is not a duplicate.
    """
    # lexsort is stable, so the first of several equal rows stays first.
    order = np.lexsort((orientation, pair, role, scope))
    same = np.ones(len(order), dtype=np.bool_)
    for column in (scope, role, pair, orientation):
        ordered = column[order]
        same[1:] &= ordered[1:] == ordered[:-1]
    same[:1] = False
    mask = np.zeros(len(order), dtype=np.bool_)
    mask[order] = same
    return mask & (scope >= 0)


def leak_mask(
    scope: Ints, role: Ints, pair: NDArray[np.uint64], responses: NDArray[np.uint64] | None = None
) -> Mask:
    """Mark rows whose pair also has a later role within the scope, ``bool [n]``.

    Roles are ordered train, validation, test. Which response is chosen does not matter.

    Args:
        responses: ``uint64 [n, 2]``, hashes of the prompt with either response, equal for a thumb. A thumb
            on a response of a pair counts as the same pair. The rows of a role are all pairs or all thumbs.
    """
    if responses is not None:
        mask = leak_mask(scope, role, pair)
        thumb = responses[:, 0] == responses[:, 1]
        for two in ((0, 1), (0, 2), (1, 2)):
            if thumb[role == two[0]].any() != thumb[role == two[1]].any():
                at = np.flatnonzero(np.isin(role, two))
                either = leak_mask(np.repeat(scope[at], 2), np.repeat(role[at], 2), responses[at].reshape(-1))
                mask[at] |= either.reshape(-1, 2).any(axis=1)
        return mask
    order = np.lexsort((role, pair, scope))
    last = np.ones(len(order), dtype=np.bool_)
    last[:-1] = (pair[order][1:] != pair[order][:-1]) | (scope[order][1:] != scope[order][:-1])
    group = np.cumsum(np.concatenate([[False], last[:-1]]))
    highest = role[order][last][group]
    mask = np.zeros(len(order), dtype=np.bool_)
    mask[order] = role[order] < highest
    return mask & (scope >= 0)


def random_split(group: NDArray[np.uint64], validation: float, test: float, key: Key) -> Ints:
    """Draw a role for each row of a client, ``int64 [n]``: 0 train, 1 validation, 2 test.

    All rows of a group get the same role. ``test · m`` and ``validation · m`` of m groups are drawn, rounded
    to whole numbers. At least one group is left for training, so a single pair is always a training pair.

    >>> random_split(np.arange(1, dtype=np.uint64), 0.5, 0.4, Key(0)).tolist()
    [0]
    """
    if validation == 0 and test == 0:
        return np.zeros(len(group), dtype=np.int64)
    _, first, of_row = np.unique(group, return_index=True, return_inverse=True)
    count = len(first)
    tests = min(int(np.floor(test * count + 0.5)), count - 1)
    validations = min(int(np.floor(validation * count + 0.5)), count - 1 - tests)
    # Sort groups by first row before shuffling, so that their codes have no influence.
    order = np.argsort(first, kind="stable")[key.numpy().permutation(count)]
    role = np.zeros(count, dtype=np.int64)
    role[order[:tests]] = 2
    role[order[tests : tests + validations]] = 1
    return np.asarray(role[of_row.reshape(-1)])


@dataclass(frozen=True)
class ClientSplits:
    """The rows of each client by role.

    Attributes:
        ids: clients with at least one training pair.
        rows: ``int64 [m]``, client by client: sorted training rows, then validation rows, then test rows.
        bounds: ``int64 [clients, 4]``, the offsets in ``rows`` of the three parts of each client, and its
            end.
        counts: numbers of dropped rows or clients, by field name of
            :class:`~prefed.data.dataset.RowCounts`.
        tested: rows dropped by ``drop_tested`` because they are test pairs of another client.
    """

    ids: list[str]
    rows: Ints
    bounds: Ints
    counts: dict[str, int]
    tested: Ints


def split_clients(
    config: DataConfig,
    assignment: Assignment,
    table: RowTable,
    pair: NDArray[np.uint64],
    key: Key,
    responses: NDArray[np.uint64] | None = None,
) -> ClientSplits:
    """Split the rows of each client into training, validation and test sets.

    Args:
        pair: ``uint64 [n]``, equal for equal pairs.
        key: randomness of the splits, and of the rows kept within ``config.limit``.
        responses: see :func:`leak_mask`.

    Raises:
        DataError: no client has a training pair, or both the data and the settings define a split.
    """
    fractions = _fractions(config, table)
    group = table.prompt if config.split_by == "prompt" else pair
    usable = np.flatnonzero(table.usable & (assignment.client >= 0))
    order = usable[np.argsort(assignment.client[usable], kind="stable")]
    edges = np.searchsorted(assignment.client[order], np.arange(len(assignment.ids) + 1))
    role = table.role.copy()
    for k, name in enumerate(assignment.ids):
        train = order[edges[k] : edges[k + 1]]
        train = train[role[train] == 0]
        if len(train):
            role[train] = random_split(group[train], *fractions(name), key.at("client", name).at("split"))
    counts = {"unplaced": int(table.usable.sum()) - len(usable), "limited": 0, "dropped": 0, "leaks": 0}
    if config.duplicates == "drop_tested":
        # All clients form one scope. The test pairs are known only after the splits are drawn.
        scope = np.full(len(pair), -1, dtype=np.int64)
        scope[usable] = 0
        role[leak_mask(scope, role, pair, responses)] = _NO_ROLE
        counts["leaks"] = int((role[usable] == _NO_ROLE).sum())
    ids: list[str] = []
    # One array for all clients takes less memory than many small ones.
    rows = np.empty(len(order), dtype=np.int64)
    ends = [0]
    for k, name in enumerate(assignment.ids):
        own = order[edges[k] : edges[k + 1]]
        train, validation, test = (own[role[own] == index] for index in range(3))
        if not len(train):
            counts["dropped"] += 1
            counts["unplaced"] += len(validation) + len(test)
            continue
        if config.limit is not None and len(train) > config.limit:
            counts["limited"] += len(train) - config.limit
            drawn = key.at("client", name).at("limit").numpy().permutation(len(train))[: config.limit]
            train = train[np.sort(drawn)]
        ids.append(name)
        for part in (train, validation, test):
            rows[ends[-1] : ends[-1] + len(part)] = np.sort(part)
            ends.append(ends[-1] + len(part))
    if not ids:
        raise DataError(
            'no training pairs are left: all of them are also test pairs; set [data] duplicates = "drop"'
        )
    every = np.array(ends, dtype=np.int64)
    bounds = np.stack([every[0:-1:3], every[1::3], every[2::3], every[3::3]], axis=1)
    return ClientSplits(ids, rows[: ends[-1]], bounds, counts, usable[role[usable] == _NO_ROLE])


def _fractions(config: DataConfig, table: RowTable) -> Callable[[str], tuple[float, float]]:
    """Return a function from a client's name to its validation and test fractions."""
    test_fraction = 0.1 if config.test_fraction is None else config.test_fraction
    if config.partition.by == "source":
        # With one dataset per client, validation and test are tables by client, if given.
        validated, tested = (
            set(s) if isinstance(s, dict) else set() for s in (config.validation, config.test)
        )
        return lambda name: (
            0.0 if name in validated else config.validation_fraction,
            0.0 if name in tested else test_fraction,
        )
    has_validation, has_test = (bool(len(table.rows_of(role))) for role in (1, 2))
    if (has_test and config.test_fraction) or (has_validation and config.validation_fraction):
        raise DataError(
            "the data already contain validation or test pairs; remove validation_fraction or test_fraction "
            "from [data]"
        )
    return lambda name: (config.validation_fraction, 0.0 if has_test else test_fraction)
