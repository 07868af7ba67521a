"""What is wrong with an experiment file, said with the file, the key, the value and what would do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

__all__ = ["ConfigError", "explain", "nearest", "records"]


class ConfigError(ValueError):
    """An experiment file that cannot be run; the message names the file, the key and what to do."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing if no known name is near.

    >>> nearest("batchsize", ["lr", "batch_size"])
    "; did you mean 'batch_size'?"
    """
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def explain(
    error: ValidationError,
    root: type[BaseModel],
    tree: Mapping[str, Any],
    where: str,
    origins: Mapping[tuple[str, ...], str],
) -> str:
    """One line for each thing that is wrong.

    Args:
        error: what pydantic found.
        root: the record that ``tree`` should have been.
        tree: what was read.
        where: the file.
        origins: where a key came from if not from the file.
    """
    branches: dict[tuple[str, ...], dict[str, list[tuple[tuple[str, ...], str]]]] = {}
    for detail in error.errors(include_url=False):
        keys, union, tag = _place(detail["loc"], tree)
        line = f"{_origin(keys, where, origins)}: {_line(detail, keys, root, tree)}"
        branches.setdefault(union, {}).setdefault(tag, []).append((keys, line))
    # A value that fits no branch of a union fails in each: the branch that it misses by least is meant.
    meant = [
        min(tags.values(), key=lambda found: (len(found), -max(len(keys) for keys, _ in found)))
        for tags in branches.values()
    ]
    lines = [line for found in meant for _, line in found]
    return "\n".join(dict.fromkeys(lines))


def _origin(keys: tuple[str, ...], where: str, origins: Mapping[tuple[str, ...], str]) -> str:
    for length in range(len(keys), 0, -1):
        if keys[:length] in origins:
            return origins[keys[:length]]
    within = [origin for place, origin in origins.items() if place[: len(keys)] == keys]
    return f"{where} with {' '.join(within)}" if within else where


def _line(detail: ErrorDetails, keys: tuple[str, ...], root: type[BaseModel], tree: Mapping[str, Any]) -> str:
    name = ".".join(keys)
    if detail["type"] == "extra_forbidden":
        known = [field for record in records(root, keys[:-1], tree) for field in record.model_fields]
        listed = f"; known there: {', '.join(sorted(set(known)))}" if known else ""
        return f"{name}: no such key{nearest(keys[-1], known) or listed}"
    if detail["type"] == "missing":
        return f"{name}: missing, and it has no default"
    if detail["type"] == "union_tag_invalid":
        context = detail["ctx"]
        tag = context["discriminator"].strip("'")
        return f"{name}.{tag} = {context['tag']!r}: should be one of {context['expected_tags']}"
    message = re.sub("^(Value error, |Input |String |List )", "", detail["msg"])
    message = re.sub(r"a valid dictionary( or instance of \w+)?", "a table", message)
    value = detail["input"]
    if isinstance(value, Mapping | BaseModel) or not keys:
        return f"{name}: {message}" if name else message
    return f"{name} = {value!r}: {message}"


def _place(loc: tuple[int | str, ...], tree: Any) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Where in the file pydantic's ``loc`` is.

    Returns:
        The key's path without the tags of unions; the path of the outermost union on the way that chose
        none of its branches itself, and its branch: both empty if there is none.
    """
    keys: list[str] = []
    union: tuple[str, ...] = ()
    branch = ""
    for number, step in enumerate(loc):
        last = number == len(loc) - 1
        if isinstance(tree, Mapping) and step == tree.get("by") and not last:
            continue  # the tag of the branch that the table itself names
        if isinstance(tree, Mapping) and (step in tree or last):
            tree = tree.get(step)
        elif isinstance(tree, list) and isinstance(step, int) and (step < len(tree) or last):
            tree = tree[step] if step < len(tree) else None
        else:
            union, branch = (union, branch) if branch else (tuple(keys), str(step))
            continue
        keys.append(str(step))
    return tuple(keys), union, branch


def records(root: type[BaseModel], keys: Iterable[str], tree: Mapping[str, Any]) -> list[type[BaseModel]]:
    """The records that a table at ``keys`` could be, in view of what ``tree`` holds."""
    found = [root]
    inside: Any = tree
    for key in keys:
        fields = [record.model_fields[key] for record in found if key in record.model_fields]
        inside = inside.get(key, {}) if isinstance(inside, Mapping) else {}
        if fields:
            found = [record for field in fields for record in _inner(field.annotation)]
        found = [record for choice in found for record in _chosen(choice, inside)]
    return found


def _chosen(record: type[BaseModel], inside: Any) -> list[type[BaseModel]]:
    """``record``, or what takes its place or is ruled out in view of the table's tag."""
    tags = inside if isinstance(inside, Mapping) else {}
    if record.__name__ == "MethodConfig":
        from prefed.methods import METHODS

        kind = METHODS.get(str(tags.get("name")))
        return [kind.Settings] if kind else []
    tag = record.model_fields.get("by")
    return [record] if tag is None or tags.get("by", tag.default) == tag.default else []


def _inner(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _inner(argument)
