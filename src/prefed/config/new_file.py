"""New experiment files, generated from the settings classes."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from prefed.config import AlignConfig, ConfigError, Experiment, ReportConfig, StopConfig, TrackConfig
from prefed.config.file import override
from prefed.data.errors import ErrorCollector
from prefed.data.sources.files import read_rows
from prefed.data.sources.folders import data_files
from prefed.engines.config import FleetConfig
from prefed.merge.config import GraphConfig
from prefed.methods import METHODS, MethodKind
from prefed.models.first_learning_rate import first_rate

WIDTH = 100
MODEL = "distilbert/distilgpt2"
"""Default model: a small one on the hub."""
WIDTH_KEYS = ("hidden_size", "n_embd", "d_model")
"""Names of the hidden size in the configurations of models."""
EXAMPLES: dict[tuple[str, ...], Any] = {
    ("data", "train"): "train.jsonl",
    ("data", "partition"): {"by": "column", "column": "client"},
    ("model", "name"): MODEL,
    ("align", "prompts"): "prompts.jsonl",
    ("report", "prompts"): ["How can I sleep better?"],
    ("track", "to"): ["tensorboard"],
}
"""Example values of keys without a default."""
EXAMPLE = """\
rounds = {rounds}

[data]
train = {pairs}
partition = {{ by = "column", column = "client" }}
validation_fraction = 0.2
test_fraction = 0.3

[model]
name = {model}

[method]
name = {method}
{settings}
{length}"""
COLUMNS = ("prompt", "chosen", "rejected", "client")
PAIRS = 100
"""Pairs per client in the example."""
CHAT_ROUNDS = 4
"""Rounds for a chat model: twenty steps on 40 pairs. After ten, SmolLM2 can loop (experiments/smollm2)."""
OPTIONAL: dict[str, type[BaseModel]] = {
    "fleet": FleetConfig,
    "graph": GraphConfig,
    "stop": StopConfig,
    "report": ReportConfig,
    "track": TrackConfig,
    "align": AlignConfig,
}
"""Optional tables; an empty one already changes the run."""
SET = {("seed",), ("rounds",), ("method", "lr"), ("method", "batch_size")}
"""Keys whose default is written uncommented."""


class Recipe(NamedTuple):
    """First settings to try for a model.

    Attributes:
        method: settings of ``[method]`` in place of the defaults.
        rounds: in place of the method's; ``None``: the method's.
        width: the hidden size that the learning rates follow.
    """

    method: Mapping[str, Any] = MappingProxyType({})
    rounds: int | None = None
    width: int | None = None


def recipe(kind: MethodKind, model: str) -> Recipe:
    """The settings that ``prefed init --model`` writes; the defaults where the model is not on this machine.

    A chat model trains with RPO, for a number of rounds that suits 40 pairs per client.

    Args:
        model: a folder, or a hub name (looked up in the local cache only).
    """
    width = model_width(model)
    settings: dict[str, Any] = learning_rates(kind, width) if width else {}
    if "objective" in kind.Settings.model_fields and has_chat_template(model):
        return Recipe({"objective": "rpo", **settings}, CHAT_ROUNDS, width if settings else None)
    return Recipe(settings, None, width if settings else None)


def model_width(model: str) -> int | None:
    """The hidden size in the ``config.json`` of a model; ``None`` where none is on this machine."""
    config = _json_of(model, "config.json")
    inner = config.get("text_config")
    found = [table.get(key) for table in (config, inner) if isinstance(table, dict) for key in WIDTH_KEYS]
    return next((width for width in found if isinstance(width, int) and width > 0), None)


def has_chat_template(model: str) -> bool:
    """Whether the tokenizer of a model on this machine has a chat template."""
    template = _file_of(model, "chat_template.jinja")
    return template is not None or bool(_json_of(model, "tokenizer_config.json").get("chat_template"))


def _file_of(model: str, name: str) -> Path | None:
    """A file of a model; ``None`` where it is not on this machine."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(model).is_dir():
        file: Any = Path(model) / name
        return file if file.is_file() else None
    try:
        file = try_to_load_from_cache(model, name)
    except HFValidationError:
        return None
    return Path(file) if isinstance(file, str) else None


def _json_of(model: str, name: str) -> dict[str, Any]:
    """The content of a JSON file of a model; empty where it is absent or damaged."""
    file = _file_of(model, name)
    try:
        content = {} if file is None else json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def learning_rates(kind: MethodKind, width: int) -> dict[str, float]:
    """First learning rates to try for a method's Adam steps on LoRA; see :func:`first_rate`.

    Methods that take plain gradient steps or train a selector get none: their rates do not follow the width.

    >>> from prefed.methods import METHODS
    >>> learning_rates(METHODS["fedper"], 576)
    {'lr': 0.001, 'personal_lr': 0.001}
    """
    fields = kind.Settings.model_fields
    if kind.reads == "choice" or fields["optimizer"].default == "sgd":
        return {}
    rate = first_rate(width)
    return {name: rate for name in ("lr", "personal_lr") if name in fields and fields[name].default}


def data_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Return the experiment that `prefed data` assumes for a data file or folder without an experiment file.

    There is one client per value of the column ``client`` or, without it, per file of a folder.

    Args:
        overrides: ``KEY=VALUE`` each; one names the model.

    Raises:
        ConfigError: no model is named, or an override is invalid.
        DataError: the data cannot be read.
    """
    tables: dict[str, Any] = {"data": {"train": str(path)}, "method": {"name": "feddpo"}}
    origins = override(tables, overrides, Path())
    if "partition" not in (data := tables["data"]):
        items, encoding = data_files(path, "train"), str(data.get("encoding", "utf-8"))
        row = next((row for row, _ in read_rows(items[0], encoding, ErrorCollector(count_only=True))), {})
        data["partition"] = {"by": "file"} if len(items) > 1 else {"by": "iid", "clients": 1}
        if "client" in row:
            data["partition"] = {"by": "column", "column": "client"}
    if "model" not in tables:
        raise ConfigError(
            f"{path} contains data: name the model whose tokenizer reads them with --set model.name=FOLDER, "
            "or give an experiment file"
        )
    return Experiment.from_tables(tables, str(path), origins)


def starting_file(method: str, model: str = MODEL, first: Recipe | None = None) -> str:
    """A commented experiment file for ``method``: every key with its default and description.

    Keys with a default are commented out, because some exclude each other.

    Args:
        method: the method's name, as in ``[method] name``.
        model: a folder or a hub name.
        first: settings in place of the defaults.

    Raises:
        KeyError: unknown method.
    """
    kind = METHODS[method]
    head = (
        f"{kind.name}: {kind.title}\nSource: {kind.source}\n"
        "Keys after # show their default value, or none; remove the # to set them."
    )
    lines = [*_comment(head), "", *_table(Experiment, (), kind)]
    lines[lines.index(f"name = {toml_value(MODEL)}")] = f"name = {toml_value(model)}"
    table = lines.index("[method]")
    lines[table + 1] = f"name = {toml_value(method)}"
    first = first or Recipe()
    for name, value in first.method.items():
        default = _assignment(name, kind.Settings.model_fields[name], ("method", name))
        lines[lines.index(default, table)] = f"{name} = {toml_value(value)}"
    if first.rounds is not None:
        (place,) = (number for number, line in enumerate(lines) if line.startswith("rounds = "))
        lines[place] = f"rounds = {first.rounds}"
    return "\n".join(lines) + "\n"


def example_file(method: str, pairs: str, model: str = MODEL, first: Recipe | None = None) -> str:
    """A short experiment file for ``method``.

    Args:
        pairs: name of a file with :func:`example_pairs`.
        model: a folder or a hub name.
        first: settings in place of the default of ``lr`` and of the rounds.
    """
    kind = METHODS[method]
    first = first or Recipe()
    settings = {"lr": kind.Settings.model_fields["lr"].default, **first.method}
    # A method with its own number of rounds keeps its own number of local steps too.
    rounds, length = (10, "local_epochs = 1\n") if kind.rounds is None else (kind.rounds, "")
    return EXAMPLE.format(
        rounds=first.rounds or rounds,
        pairs=toml_value(pairs),
        model=toml_value(model),
        method=toml_value(method),
        settings="\n".join(f"{name} = {toml_value(value)}" for name, value in settings.items()),
        length=length,
    )


def example_pairs() -> str:
    """Example pairs as JSON lines: four clients with different tastes (:mod:`prefed.data.synthetic`)."""
    from prefed.core import Key
    from prefed.data import synthetic

    records = synthetic.generate(Key(7), clients=4, train=PAIRS, test=0)
    rows = ({name: getattr(record, name) for name in COLUMNS} for record in records)
    return "".join(json.dumps(row) + "\n" for row in rows)


def describe(record: type[BaseModel], name: str) -> str:
    """The description of a field, or its entry under ``Attributes:`` in the class docstring.

    >>> from prefed.data import DataConfig
    >>> describe(DataConfig, "flip")
    'clients with chosen and rejected swapped'
    """
    text = record.model_fields[name].description
    if text is None:
        lines = inspect.cleandoc(record.__doc__ or "").partition("Attributes:\n")[2].splitlines()
        match = re.search(rf"^    {name}: (.*(?:\n      .*)*)", "\n".join(lines), re.MULTILINE)
        text = re.sub(r"\s+", " ", match[1]) if match else ""
    return text.strip().rstrip(".").replace("``", "").replace("`", "")


def _table(record: type[BaseModel], path: tuple[str, ...], kind: MethodKind) -> Iterator[str]:
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in record.model_fields.items():
        if not path and name in OPTIONAL:
            continue
        below = _record(field, (*path, name), kind)
        if below is not None:
            inner.append((name, below))
            continue
        yield from _comment(describe(record, name))
        if (*path, name) == ("rounds",) and kind.rounds is not None:
            yield f"rounds = {kind.rounds}"
        else:
            yield _assignment(name, field, (*path, name))
        yield ""
    for name, below in inner:
        yield from _comment(describe(record, name))
        yield f"[{'.'.join((*path, name))}]"
        if (*path, name) == ("method",):
            yield f'name = "{kind.name}"'
            yield ""
        yield from _table(below, (*path, name), kind)
    if record is Experiment:
        for name, table in OPTIONAL.items():
            # Selectors can align a model, and write no text for a report.
            never = ReportConfig if kind.reads == "choice" else AlignConfig
            yield from _optional(name, None if table is never else table)


def _optional(name: str, table: type[BaseModel] | None) -> Iterator[str]:
    yield from _comment(f"[{name}]: {describe(Experiment, name)}")
    if table is not None:
        yield f"# [{name}]"
        for key, field in table.model_fields.items():
            yield ""
            yield from _comment(describe(table, key))
            yield f"# {_assignment(key, field, (name, key)).removeprefix('# ')}"
    yield ""


def _record(field: FieldInfo, path: tuple[str, ...], kind: MethodKind) -> type[BaseModel] | None:
    """The settings class of a field that is a table; ``None`` for other fields."""
    if path == ("method",):
        return kind.Settings
    annotation = field.annotation
    if path in EXAMPLES or not isinstance(annotation, type) or not issubclass(annotation, BaseModel):
        return None
    return annotation


def _assignment(name: str, field: FieldInfo, path: tuple[str, ...]) -> str:
    if path in EXAMPLES:
        return f"{name} = {toml_value(EXAMPLES[path])}"
    default = field.get_default(call_default_factory=True)
    if default is None:
        return f"# {name} ="
    return f"{name} = {toml_value(default)}" if path in SET else f"# {name} = {toml_value(default)}"


def toml_value(value: Any) -> str:
    r"""A value as it is written in a TOML file, on one line.

    >>> print(toml_value({"by": ("column", 'a "b"')}))
    {by = ["column", "a \"b\""]}
    """
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").strip()


def _comment(text: str) -> list[str]:
    return [f"# {line}" for paragraph in text.splitlines() for line in textwrap.wrap(paragraph, WIDTH - 2)]
