"""Experiments drawn from the schema, and what the dry run and the run of one have in common."""

from __future__ import annotations

import json
import random
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from finished import small_place
from prefed import Experiment, run
from prefed.config import ConfigError
from prefed.core.text import is_ours
from prefed.engines import RoundError
from prefed.methods import METHODS
from prefed.runs.dry_run import dry_run
from prefed.train.losses import OBJECTIVES

CLIENTS = ("ann", "bob", "cyd")
TEXTS: dict[str, tuple[Any, ...]] = {
    "rule": ("mean", "median", "trimmed_mean", "krum", "multi_krum", "norm_clip"),
    "unseen": (0, 1, ["ann"], ["nobody"]),
    "unseen_steps": ([0], [0, 1]),
    "unseen_pairs": ([], [1]),
    "ranks": ({}, {"ann": 1}, {"ann": 9}, {"nobody": 1}),
    "metrics": ([],),
    "rule_settings": ({},),
    "objective_settings": ({}, {"alpha": 0.5}),
    "betas": ((0.5, 0.9),),
    "targets": (None, ["c_attn"], ["nothing"], ["all-linear"]),
    "widths": ((8,), (8, 4)),
    "to": (["tensorboard"],),
    "clients": (["ann"], ["nobody"], 1, 2),
    "prompts": (["Case 1:"], ["Case " * 60]),
    "flip": ((), ("ann",), ("nobody",)),
    "sampling": ("fixed", "poisson"),
    "delta": (1e-3,),
    "name": (None,),
    "project": ("p",),
    "kernels": (None, "torch", "liger"),
    "quantize": (None, "nf4"),
    "device": ("auto", "cpu", "cuda"),
    "layer": (None, 1, 7),
    "shared_layers": (0, 1, 2, 9),
}
"""Name of a key → values for it, where its type does not say enough or says too much."""
LEFT_ALONE = {"reward_model", "trace", "file", "period", "ray", "devices", "revision", "gpus", "address"}
"""Keys of files, clusters and devices, which a test does not have."""


def values(name: str, field: FieldInfo, draw: random.Random) -> Any:
    """A value for a key, of its type and within its bounds, most of the time."""
    if name in TEXTS:
        return draw.choice(TEXTS[name])
    kind = field.annotation
    options = [kind] if get_origin(kind) not in (Union, types.UnionType) else list(get_args(kind))
    if type(None) in options and draw.random() < 0.2:
        return None
    kind = draw.choice([option for option in options if option is not type(None)])
    if get_origin(kind) is Literal:
        return draw.choice(get_args(kind))
    if kind is bool:
        return draw.random() < 0.5
    bounds = {key: getattr(each, key) for each in field.metadata for key in _BOUNDS if hasattr(each, key)}
    low = bounds.get("ge", bounds.get("gt", 0))
    if kind is int:
        step = bounds.get("multiple_of", 1)
        return draw.choice([low, max(low, step), 2 * step, 4 * step])
    if kind is float:
        high = min(bounds.get("le", 10.0), bounds.get("lt", 10.0))
        return draw.choice([low, low + (high - low) / 100, low + (high - low) / 3, high])
    return field.get_default(call_default_factory=True)


_BOUNDS = ("ge", "gt", "le", "lt", "multiple_of")


def table(model: type[BaseModel], draw: random.Random, most: int) -> dict[str, Any]:
    """Some keys of a table; of an inner table likewise."""
    names = [name for name in model.model_fields if name not in LEFT_ALONE]
    chosen = draw.sample(names, min(len(names), draw.randint(1, most)))
    drawn: dict[str, Any] = {}
    for name in chosen:
        field = model.model_fields[name]
        inner = [each for each in (field.annotation, *get_args(field.annotation)) if _is_table(each)]
        drawn[name] = table(inner[0], draw, 2) if inner else values(name, field, draw)
    return drawn


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def experiment(place: Path, seed: int) -> dict[str, Any]:
    """The tables of an experiment over :func:`make_place`, which may be valid or not."""
    draw = random.Random(seed)
    method = draw.choice(list(METHODS.builtin))
    settings = METHODS[method].Settings
    given = table(settings, draw, 3) if draw.random() < 0.7 else {}
    if "objective" in settings.model_fields and draw.random() < 0.4:
        given["objective"] = draw.choice([*OBJECTIVES.builtin, "ppo"])
        given["reward_model"] = str(place / "judge")
    choice = METHODS[method].reads == "choice"
    short = {"local_epochs": 1} if draw.random() < 0.3 else {"local_steps": draw.choice([1, 2])}
    given = {key: value for key, value in given.items() if not key.startswith("local_")}
    thumbs = given.get("objective") == "kto" and draw.random() < 0.7
    tables: dict[str, Any] = {
        "seed": seed,
        "rounds": draw.choice([1, 2]),
        "data": {
            "train": str(place / ("thumbs.jsonl" if thumbs else "pairs.jsonl")),
            "partition": {"by": "column", "column": "worker"},
            "test_fraction": 0.25,
            "max_length": 48,
        },
        "model": {
            "name": str(place / draw.choice(["model", "model", "llama"])),
            "lora": {"rank": 2},
            "variational": {"latent": 4, "widths": [8]},
            "bottleneck": {"width": 4},
            "reward": {"width": 4},
        },
        "method": {"name": method, "batch_size": 2 if choice else draw.choice([1, 2, 4]), **given, **short},
        "engine": {"threads": 1},
    }
    fields = {
        name: next(e for e in (f.annotation, *get_args(f.annotation)) if _is_table(e))
        for name, f in Experiment.model_fields.items()
        if name not in ("seed", "rounds", "method", "align")
    }
    for name in draw.sample(sorted(fields), draw.randint(0, 4)):
        for key, value in table(fields[name], draw, 3).items():
            if (name, key) not in _FIXED:
                own = tables.setdefault(name, {})
                own[key] = {**own[key], **value} if isinstance(own.get(key), dict) else value
    return without_none(tables)


_FIXED = {("data", key) for key in ("train", "test", "validation", "partition", "format", "columns")}
_FIXED |= {("data", "encoding"), ("model", "name"), ("engine", "workers"), ("engine", "name")}


def without_none(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables without keys that have no value, as TOML has none."""
    inner = {k: without_none(v) if isinstance(v, dict) else v for k, v in tables.items()}
    return {key: value for key, value in inner.items() if value is not None}


def make_place(folder: Path) -> Path:
    """Models, pairs and thumbs of three clients."""
    from transformers import AutoTokenizer

    from small_models import save_llama, save_reward_model

    small_place(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    size = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    save_llama(folder / "llama", tokenizer, eos_token_id=0, **size)
    save_reward_model(folder / "judge", tokenizer, pad_token_id=tokenizer.pad_token_id)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    rows = [{**row, "worker": CLIENTS[n % 3], "margin": 1.0, "category": "a"} for n, row in enumerate(rows)]
    thumbs = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": n % 4 < 2, "worker": row["worker"]}
        for n, row in enumerate(rows)
    ]
    for name, content in (("pairs", rows), ("thumbs", thumbs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return folder


@dataclass(frozen=True)
class Ended:
    """The outcome of a start.

    Attributes:
        refused: the message for the user; empty if it was accepted.
        failed: an error that is not a message for the user.
        late: it was refused for what a client sent or did not send, not for its settings.
    """

    refused: str = ""
    failed: str = ""
    late: bool = False

    @classmethod
    def of(cls, start: Callable[[], object]) -> Ended:
        try:
            start()
        except Exception as error:
            expected = isinstance(error, ValueError | OSError) or is_ours(error)
            if expected and not isinstance(error, ValidationError):
                return cls(refused=str(error), late=isinstance(error, RoundError))
            return cls(failed=f"{type(error).__name__}: {error}")
        return cls()


def outcome(tables: dict[str, Any], out: Path) -> tuple[str, list[str]]:
    """Start an experiment dry and for real: ``invalid``, ``refused`` or ``completed``, and what is wrong.

    A dry run refuses uploads that the run would drop with a warning.
    """
    try:
        made = Experiment.model_validate(tables)
    except ConfigError:
        return "invalid", []
    tried, ran = Ended.of(lambda: dry_run(made, out)), Ended.of(lambda: run(made, out))
    wrong = [
        f"{what} fails: {each.failed}" for what, each in (("dry run", tried), ("run", ran)) if each.failed
    ]
    if not wrong and tried.refused != ran.refused and not (tried.late or ran.late):
        wrong = [f"dry run: {tried.refused or 'accepted'}; run: {ran.refused or 'accepted'}"]
    if ran.refused and not ran.late and out.exists():
        wrong.append(f"{ran.refused!r} left {sorted(path.name for path in out.iterdir())}")
    return "refused" if ran.refused else "completed", wrong
