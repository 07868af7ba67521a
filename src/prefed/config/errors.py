"""Validation errors as messages that name the file, the key, the value and a remedy."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from prefed.core.strict_settings import ConfigError
from prefed.core.text import did_you_mean

_OTHER_NAMES = {
    "method.lr": "learning_rate learningrate eta step_size",
    "method.local_epochs": "epochs epoch num_epochs num_train_epochs",
    "method.local_steps": "steps max_steps num_steps",
    "method.batch_size": "batch batchsize train_batch_size per_device_train_batch_size",
    "method.accumulate": "gradient_accumulation_steps gradient_accumulation",
    "method.clip": "max_grad_norm grad_clip",
    "method.optimizer": "optim optimiser",
    "method.objective": "loss_type loss",
    "method.objective_settings.alpha": "rpo_alpha",
    "model.name": "model_name model_name_or_path base_model",
    "model.lora.rank": "r lora_r lora_rank rank",
    "model.lora.alpha": "lora_alpha alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.targets": "target_modules lora_target_modules",
    "data.train": "dataset dataset_name train_file data_path",
    "data.max_length": "max_seq_length max_seq_len max_len max_tokens cutoff_len",
    "cohort.size": "clients_per_round num_clients",
    "cohort.fraction": "fraction_fit client_fraction participation",
    "graph.name": "topology",
    "graph.weights": "mixing",
    "fleet.max_delay": "max_staleness",
    "rounds": "num_rounds n_rounds communication_rounds",
    "seed": "random_seed",
}
"""Key of an experiment → its names in other tools."""


M = TypeVar("M", bound=BaseModel)


def validate(
    root: type[M],
    tree: Mapping[str, Any],
    where: str,
    origins: Mapping[tuple[str, ...], str] = MappingProxyType({}),
) -> M:
    """Validate nested tables; the arguments are those of :func:`explain`.

    Raises:
        ConfigError: a key or a value is invalid; the message has one line per problem.
    """
    try:
        return root.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, root, tree, where, origins)) from None


def explain(
    error: ValidationError,
    root: type[BaseModel],
    tree: Mapping[str, Any],
    where: str,
    origins: Mapping[tuple[str, ...], str],
) -> str:
    """Describe each validation problem in one line.

    Args:
        root: the settings class that ``tree`` was validated against.
        where: the file of ``tree``, for messages.
        origins: path of a key → the option that set it, for keys not set by the file.
    """
    branches: dict[tuple[str, ...], dict[str, list[tuple[tuple[str, ...], str]]]] = {}
    for detail in error.errors(include_url=False):
        keys, union, tag = _locate(detail["loc"], tree)
        line = f"{_origin(keys, where, origins)}: {_line(detail, keys, root, tree)}"
        branches.setdefault(union, {}).setdefault(tag, []).append((keys, line))
    # A value that matches no branch of a union fails in every branch: show the one with the fewest problems.
    nearest_branches = [
        min(tags.values(), key=lambda lines: (len(lines), -max(len(keys) for keys, _ in lines)))
        for tags in branches.values()
    ]
    lines = [line for branch in nearest_branches for _, line in branch]
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
        meant = _synonym(keys, known, root)
        known += ["name"] if keys[:-1] == ("method",) else []
        meant = meant or did_you_mean(keys[-1], known)
        of = f" of {tree['method'].get('name')}" if keys[:-1] == ("method",) else ""
        listed = f"; known keys{of}: {', '.join(sorted(set(known)))}" if known else ""
        return f"{name}: no such key{meant or listed}"
    if detail["type"] == "missing":
        return f"{name}: missing; it has no default"
    if detail["type"] == "union_tag_invalid":
        context = detail["ctx"]
        tag = context["discriminator"].strip("'")
        return f"{name}.{tag} = {context['tag']!r}: should be one of {context['expected_tags']}"
    message, value = in_words(detail), detail["input"]
    if isinstance(value, Mapping | BaseModel) or not keys:
        return f"{name}: {message}" if name else message
    return f"{name} = {value!r}: {message}"


def in_words(detail: ErrorDetails) -> str:
    """What a value should be, e.g. "should be greater than 0"."""
    if detail["type"] == "string_pattern_mismatch":
        names = detail["ctx"]["pattern"].strip("^()$").replace(r"\w*", "…").replace("|", " or ")
        if re.fullmatch("[A-Z_… or]+", names):
            return f"should be {names}"
    message = re.sub("^(Value error, |Input |String |List )", "", detail["msg"])
    return re.sub(r"a valid dictionary( or instance of \w+)?", "a table", message)


def _synonym(keys: Sequence[str], known: Collection[str], root: type[BaseModel]) -> str:
    """A hint for a key that belongs to another tool or another table; empty if there is none."""
    *table, key = keys
    names = (name for name, others in _OTHER_NAMES.items() if key.lower() in others.split())
    # A key in the wrong table, such as lr at the top of the file.
    name = next(names, "") or next((name for name in _OTHER_NAMES if name.endswith(f".{key}")), "")
    last, top = name.rpartition(".")[2], name.partition(".")[0]
    if table == ["method"] == [top] and name.split(".")[1] not in known:
        return ""  # the method has no such setting
    if last in known:
        return f"; did you mean {last!r}?"
    return f"; did you mean {name!r}?" if name and top in root.model_fields else ""


def _locate(loc: tuple[int | str, ...], tree: Any) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Find the key at pydantic's ``loc``.

    Returns:
        The path of the key, without union tags. Then the path and the branch of the outermost untagged union
        on the way, both empty if there is none.
    """
    keys: list[str] = []
    union: tuple[str, ...] = ()
    branch = ""
    for number, step in enumerate(loc):
        last = number == len(loc) - 1
        if isinstance(tree, Mapping) and step == tree.get("by") and not last:
            continue  # the union tag, given by the table's key "by"
        if isinstance(tree, Mapping) and (step in tree or last):
            tree = tree.get(step)
        elif isinstance(tree, list | tuple) and isinstance(step, int) and (step < len(tree) or last):
            tree = tree[step] if step < len(tree) else None
        else:
            union, branch = (union, branch) if branch else (tuple(keys), str(step))
            continue
        keys.append(str(step))
    return tuple(keys), union, branch


def records(root: type[BaseModel], keys: Iterable[str], tree: Mapping[str, Any]) -> list[type[BaseModel]]:
    """The settings classes that the table at ``keys`` may have, given the union tags in ``tree``."""
    candidates = [root]
    inside: Any = tree
    for key in keys:
        fields = [record.model_fields[key] for record in candidates if key in record.model_fields]
        inside = inside.get(key, {}) if isinstance(inside, Mapping) else {}
        if fields:
            candidates = [record for field in fields for record in _records_in(field.annotation)]
        candidates = [record for candidate in candidates for record in _by_tag(candidate, inside)]
    return candidates


def _by_tag(record: type[BaseModel], inside: Any) -> list[type[BaseModel]]:
    """``record`` if the table's tag allows it; for ``MethodConfig``, the settings class of the method."""
    tags = inside if isinstance(inside, Mapping) else {}
    if record.__name__ == "MethodConfig":
        from prefed.methods import METHODS

        kind = METHODS.get(str(tags.get("name")))
        return [kind.Settings] if kind else []
    tag = record.model_fields.get("by")
    return [record] if tag is None or tags.get("by", tag.default) == tag.default else []


def _records_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _records_in(argument)
