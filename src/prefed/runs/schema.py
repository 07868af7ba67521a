"""The least that the files of a run directory must hold, checked when they are read."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True)


class _Named(_Schema):
    name: str


class _Config(_Schema):
    seed: int
    data: dict[str, Any]
    model: _Named
    method: _Named


class _Figure(_Schema):
    mean: float
    worst: float
    worst_decile: float
    per_client: dict[str, float] = Field(min_length=1)


class _Traffic(_Schema):
    up: float
    down: float


class _Summary(_Schema):
    method: str
    rounds: int = Field(ge=1)
    preference_accuracy: _Figure
    baseline_accuracy: _Figure | None = None
    shared_accuracy: _Figure | None = None
    reward_accuracy: _Figure | None = None
    unseen_accuracy: dict[str, _Figure] = {}
    bytes: _Traffic
    seconds: float
    clients: dict[str, dict[str, int]] = {}
    parameters: dict[str, int] = {}
    personal: dict[str, dict[str, dict[str, float | None]]] = {}


class _Round(_Schema):
    round: int
    bytes_up: float
    bytes_down: float
    evaluation: dict[str, Any] = {}
    dropped: list[dict[str, Any]] = []
    cohort: list[str] = []


def read_config(path: Path) -> dict[str, Any]:
    """Read ``config.toml``.

    Raises:
        ValueError: it is missing or damaged; the message names the file and the problem.
    """
    config: dict[str, Any] = _read(path, tomllib.loads, _Config)
    return config


def read_summary(path: Path) -> dict[str, Any]:
    """Read ``summary.json``; raises as :func:`read_config`."""
    summary: dict[str, Any] = _read(path, json.loads, _Summary)
    return summary


def read_rounds(path: Path, rounds: int) -> tuple[dict[str, Any], ...]:
    """Read the first ``rounds`` records of ``rounds.jsonl``; raises as :func:`read_config`."""

    def parse(text: str) -> list[Any]:
        lines = text.splitlines()[:rounds]
        if len(lines) < rounds:
            raise ValueError(f"it holds {len(lines)} of {rounds} rounds")
        records = []
        for number, line in enumerate(lines, 1):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
        return records

    return tuple(_read(path, parse, list[_Round]))


def _read(path: Path, parse: Callable[[str], Any], schema: Any) -> Any:
    try:
        content = parse(path.read_text("utf-8"))
        TypeAdapter(schema).validate_python(content)
    except FileNotFoundError:
        wrong = "it is not there"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = [f"line {step + 1}" if isinstance(step, int) else step for step in first["loc"]]
        message = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", first["msg"])
        wrong = f"{'.'.join(place) or 'all of it'}: {message.removeprefix('Input ').lower()}"
        if not isinstance(first["input"], Mapping | list):
            wrong += f", and is {first['input']!r}"
    except (OSError, ValueError) as error:
        wrong = str(error)
    else:
        return content
    raise ValueError(f"{path} is damaged: {wrong}; put a copy of it back")
