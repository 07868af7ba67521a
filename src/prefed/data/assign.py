"""From the ``[data.partition]`` table to a client for every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefed.core.key import Key
from prefed.core.text import control_character
from prefed.data import partition as deal
from prefed.data.config import ByColumn, BySource, Conflict, Dirichlet, Iid, Margin, Partition
from prefed.data.errors import AbsentError, DataError
from prefed.data.record import Record

__all__ = ["ROLES", "Assignment", "Rows", "assign", "label", "natural"]

ROLES = ("train", "validation", "test")
"""What rows are for; a row's role is an index into this."""


@dataclass(frozen=True)
class Rows:
    """The columns that a partition looks at, one entry per row.

    Attributes:
        role: ``int64 [n]``, index into :data:`ROLES`.
        label: ``int64 [n]``, index into ``labels``.
        labels: values of the partition's column (or names of sources).
        margin: ``float [n]``.
        prompt: ``uint64 [n]``, equal for equal prompts.
        use: ``bool [n]``, rows to be given a client.
    """

    role: NDArray[np.int64]
    label: NDArray[np.int64]
    labels: Sequence[str]
    margin: NDArray[np.floating[Any]]
    prompt: NDArray[np.uint64]
    use: NDArray[np.bool_]

    def of(self, role: int) -> NDArray[np.int64]:
        """Indices of the used rows of a role."""
        return np.flatnonzero(self.use & (self.role == role))


@dataclass(frozen=True)
class Assignment:
    """Who holds what.

    Attributes:
        names: the clients' ids.
        client: ``int64 [n]``, index into ``names``, −1 for a row that no client holds.
        flipped: ``bool [clients]``, clients whose chosen and rejected are swapped.
    """

    names: tuple[str, ...]
    client: NDArray[np.int64]
    flipped: NDArray[np.bool_]


def label(partition: Partition, record: Record, source: str | None) -> str:
    """What the partition needs to know of a record: the value of its column, or its source.

    Raises:
        AbsentError: the record does not have it.
        ValueError: it is no name.
    """
    if isinstance(partition, BySource):
        return source or ""
    if isinstance(partition, Margin) and record.margin is None:
        raise AbsentError("margin", "no margin", record.columns)
    column = getattr(partition, "column", None)
    if column is None:
        return ""
    value = record.column(column)
    if value is None or value == "":
        raise AbsentError(column, f"no value in column {column!r}", record.columns)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    name = str(value)
    control = control_character(name)
    if control is not None:
        raise ValueError(f"{column} is {name!r}: a name has no control character, and this has {control}")
    return name


def natural(partition: Partition, rows: Rows) -> Assignment | None:
    """The assignment where the data say whose rows are whose, else ``None``.

    Raises:
        DataError: a value belongs to no group, or a group has no rows.
    """
    if not isinstance(partition, ByColumn | BySource):
        return None
    held = np.unique(rows.label[rows.of(0)])
    groups = partition.groups if isinstance(partition, ByColumn) else None
    of_label = np.full(len(rows.labels), -1, dtype=np.int64)
    if groups is None:
        present = [rows.labels[k] for k in held]
        names = (
            tuple(rows.labels[k] for k in held) if isinstance(partition, BySource) else tuple(sorted(present))
        )
        code = {name: k for k, name in enumerate(rows.labels)}
        of_label[[code[name] for name in names]] = np.arange(len(names))
    else:
        names = tuple(groups)
        group_of: dict[str, int] = {}
        for index, (name, values) in enumerate(groups.items()):
            for value in values:
                if value in group_of:
                    raise DataError(f"value {value!r} is in two groups: {names[group_of[value]]} and {name}")
                group_of[value] = index
        homeless = [rows.labels[k] for k in held if rows.labels[k] not in group_of]
        if homeless:
            raise DataError(f"these values belong to no group: {_listed(sorted(homeless))}")
        for k, value in enumerate(rows.labels):
            of_label[k] = group_of.get(value, -1)
        empty = set(range(len(names))) - set(of_label[held].tolist())
        if empty:
            raise DataError(
                f"these groups have no rows: {_listed([names[k] for k in sorted(empty)])}; "
                f"the values are {_listed(sorted(rows.labels[k] for k in held))}"
            )
    client = np.where(rows.use, of_label[rows.label], -1)
    return Assignment(names, client, np.zeros(len(names), dtype=np.bool_))


def assign(partition: Partition, rows: Rows, key: Key) -> Assignment:
    """A client for every row.

    Rows of validation and test sources are dealt by the same rule: to the client of their column's value;
    shuffled and cut, or sorted by margin and cut, in the sizes of the training rows; by the shares drawn for
    the training rows, or to the client that trains on their prompt. A row whose value no client trains on
    gets none.

    Args:
        partition: the rule.
        rows: the columns.
        key: the randomness.

    Raises:
        DataError: the rows cannot be divided so.
    """
    found = natural(partition, rows)
    if found is not None:
        return found
    client = np.full(len(rows.role), -1, dtype=np.int64)
    if isinstance(partition, Dirichlet):
        _dirichlet(partition, rows, key, client)
        return _drawn("client", partition.clients, client)
    assert isinstance(partition, Iid | Margin | Conflict)
    weight = deal.weights(partition.clients, partition.sizes)
    kinds = _kinds(partition, rows) if isinstance(partition, Conflict) and partition.column else None
    for role, name in enumerate(ROLES):
        members = rows.of(role)
        least = 1 if role == 0 else 0
        here = key.at(name)
        if isinstance(partition, Margin):
            client[members] = deal.margin(rows.margin[members], weight, least=least)
        elif kinds is None:
            client[members] = deal.iid(len(members), weight, here, least=least)
        else:
            assert isinstance(partition, Conflict)
            category = kinds[0][rows.label[members]]
            known = members[category >= 0]
            client[known] = deal.conflict(category[category >= 0], weight, partition.ratio, here, least=least)
    if not isinstance(partition, Conflict):
        return _drawn("client", partition.clients, client)
    first = deal.split_of(partition.clients, partition.ratio)
    parts = kinds[1] if kinds is not None else ("as-given", "reversed")
    names = (*_names(parts[0], first), *_names(parts[1], partition.clients - first))
    flipped = (
        deal.flip(partition.clients, partition.ratio)
        if partition.flip
        else np.zeros(len(names), dtype=np.bool_)
    )
    return Assignment(names, client, flipped)


def _dirichlet(partition: Dirichlet, rows: Rows, key: Key, client: NDArray[np.int64]) -> None:
    train = rows.of(0)
    # Categories in the order of their names, so that the order of the rows does not change the draw.
    present = sorted(np.unique(rows.label[train]).tolist(), key=lambda k: rows.labels[k])
    code = np.full(len(rows.labels), -1, dtype=np.int64)
    code[present] = np.arange(len(present))
    prompt = np.arange(len(rows.role), dtype=np.uint64) if partition.share_prompts else rows.prompt
    if not partition.share_prompts:
        _check_prompts(prompt[train], code[rows.label[train]])
    share = deal.shares(len(present), partition.clients, partition.alpha, key.at("shares"))
    first = deal.deal(code[rows.label[train]], prompt[train], share, key.at("train"))
    client[train] = deal.fill(first, prompt[train], partition.clients)
    held = train
    for role in (1, 2):
        members = rows.of(role)
        members = members[code[rows.label[members]] >= 0]
        owner = (prompt[held], client[held])
        client[members] = deal.deal(
            code[rows.label[members]], prompt[members], share, key.at(ROLES[role]), owner
        )
        held = np.concatenate([held, members])


def _check_prompts(prompt: NDArray[np.uint64], category: NDArray[np.int64]) -> None:
    """Refuse prompts that cross categories: kept apart, they would decide who holds what, not the shares."""
    names, group = np.unique(prompt, return_inverse=True)
    group = group.reshape(-1)
    low, high = np.full(len(names), category.max()), np.zeros(len(names), dtype=np.int64)
    np.minimum.at(low, group, category)
    np.maximum.at(high, group, category)
    crossing = float((low != high)[group].mean())
    if crossing > 0.5:
        raise DataError(
            f"{crossing:.0%} of the pairs have a prompt that occurs in several categories ({len(names)} "
            "different prompts in all); keeping each prompt with one client would undo the Dirichlet shares: "
            "set share_prompts = true"
        )


def _kinds(partition: Conflict, rows: Rows) -> tuple[NDArray[np.int64], tuple[str, str]]:
    """The kind (0, 1, −1 for neither) of each label, and the two categories."""
    present = sorted(rows.labels[k] for k in np.unique(rows.label[rows.of(0)]))
    wanted = partition.categories or tuple(present)
    if len(wanted) != 2 or set(wanted) != set(present):
        raise DataError(
            f"a conflict is between two categories, and column {partition.column!r} has {len(present)}: "
            f"{_listed(present)}" + (f"; categories names {_listed(wanted)}" if partition.categories else "")
        )
    order = {wanted[0]: 0, wanted[1]: 1}
    return np.array([order.get(name, -1) for name in rows.labels], dtype=np.int64), (wanted[0], wanted[1])


def _names(stem: str, count: int) -> tuple[str, ...]:
    width = len(str(count - 1))
    return tuple(f"{stem}-{k:0{width}d}" for k in range(count))


def _drawn(stem: str, count: int, client: NDArray[np.int64]) -> Assignment:
    return Assignment(_names(stem, count), client, np.zeros(count, dtype=np.bool_))


def _listed(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(names[:most]) or "none"
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
