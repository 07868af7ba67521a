"""New experiment files, generated from the settings classes."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from prefed.config import AlignConfig, ConfigError, Experiment, ReportConfig, StopConfig, TrackConfig
from prefed.config.file import override
from prefed.data.errors import ErrorCollector
from prefed.data.sources.files import read_rows
from prefed.data.sources.folders import data_files
from prefed.engines.simulated_fleet import FleetConfig
from prefed.merge.graphs import GraphConfig
from prefed.methods import METHODS, MethodKind

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
{rates}
{length}"""
COLUMNS = ("prompt", "chosen", "rejected", "client")
PAIRS = 100
"""Pairs per client in the example."""
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


def model_width(model: str) -> int | None:
    """The hidden size in the ``config.json`` of a model; ``None`` where none is on this machine.

    Args:
        model: a folder, or a hub name (looked up in the local cache only).
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    file: Any = Path(model) / "config.json"
    try:
        if not Path(model).is_dir():
            file = try_to_load_from_cache(model, "config.json")
        config = json.loads(Path(file).read_bytes())
    except (OSError, ValueError, TypeError, HFValidationError):
        return None
    if not isinstance(config, dict):
        return None
    inner = config.get("text_config")
    found = [table.get(key) for table in (config, inner) if isinstance(table, dict) for key in WIDTH_KEYS]
    return next((width for width in found if isinstance(width, int) and width > 0), None)


def learning_rates(kind: MethodKind, width: int) -> dict[str, float]:
    """First learning rates to try for a method's Adam steps on LoRA: 0.6 / width, to one digit.

    Methods that take plain gradient steps or train a selector get none: their rates do not follow the width.

    >>> from prefed.methods import METHODS
    >>> learning_rates(METHODS["fedper"], 576)
    {'lr': 0.001, 'personal_lr': 0.001}
    """
    fields = kind.Settings.model_fields
    if kind.reads == "choice" or fields["optimizer"].default == "sgd":
        return {}
    rate = float(f"{0.6 / width:.0e}")
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


def starting_file(method: str, model: str = MODEL, rates: Mapping[str, float] | None = None) -> str:
    """A commented experiment file for ``method``: every key with its default and description.

    Keys with a default are commented out, because some exclude each other.

    Args:
        method: the method's name, as in ``[method] name``.
        model: a folder or a hub name.
        rates: learning rates of ``[method]`` in place of the defaults.

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
    for name, rate in (rates or {}).items():
        default = _assignment(name, kind.Settings.model_fields[name], ("method", name))
        lines[lines.index(default, table)] = f"{name} = {toml_value(rate)}"
    return "\n".join(lines) + "\n"


def example_file(
    method: str, pairs: str, model: str = MODEL, rates: Mapping[str, float] | None = None
) -> str:
    """A short experiment file for ``method``.

    Args:
        pairs: name of a file with :func:`example_pairs`.
        model: a folder or a hub name.
        rates: learning rates of ``[method]`` in place of the default of ``lr``.
    """
    kind = METHODS[method]
    rates = rates or {"lr": kind.Settings.model_fields["lr"].default}
    # A method with its own number of rounds keeps its own number of local steps too.
    rounds, length = (10, "local_epochs = 1\n") if kind.rounds is None else (kind.rounds, "")
    return EXAMPLE.format(
        rounds=rounds,
        pairs=toml_value(pairs),
        model=toml_value(model),
        method=toml_value(method),
        rates="\n".join(f"{name} = {toml_value(rate)}" for name, rate in rates.items()),
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
