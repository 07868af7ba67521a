"""What the files of a run directory have to hold for anything to be told of the run."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

__all__ = ["read_config", "read_rounds", "read_summary"]


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True)


class _Named(_Shape):
    name: str


class _Config(_Shape):
    seed: int
    data: dict[str, Any]
    model: _Named
    method: _Named


class _Figure(_Shape):
    mean: float
    worst: float
    worst_decile: float
    per_client: dict[str, float] = Field(min_length=1)


class _Traffic(_Shape):
    up: float
    down: float


class _Summary(_Shape):
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


class _Round(_Shape):
    round: int
    bytes_up: float
    bytes_down: float
    evaluation: dict[str, Any] = {}
    dropped: list[dict[str, Any]] = []
    cohort: list[str] = []


def read_config(path: Path) -> dict[str, Any]:
    """``config.toml``.

    Raises:
        ValueError: it is not there, or damaged; the message names the file and what is wrong in it.
    """
    held: dict[str, Any] = _read(path, tomllib.loads, _Config)
    return held


def read_summary(path: Path) -> dict[str, Any]:
    """``summary.json``; raises as :func:`read_config`."""
    held: dict[str, Any] = _read(path, json.loads, _Summary)
    return held


def read_rounds(path: Path, rounds: int) -> tuple[dict[str, Any], ...]:
    """The first ``rounds`` records of ``rounds.jsonl``; raises as :func:`read_config`."""

    def parse(text: str) -> list[Any]:
        lines = text.splitlines()[:rounds]
        if len(lines) < rounds:
            raise ValueError(f"it holds {len(lines)} of {rounds} rounds")
        return [_line(number, line) for number, line in enumerate(lines, 1)]

    return tuple(_read(path, parse, list[_Round]))


def _line(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error


def _read(path: Path, parse: Callable[[str], Any], shape: Any) -> Any:
    try:
        held = parse(path.read_text("utf-8"))
        TypeAdapter(shape).validate_python(held)
    except FileNotFoundError:
        wrong = "it is not there"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = [f"line {step + 1}" if isinstance(step, int) else step for step in first["loc"]]
        said = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", first["msg"])
        wrong = f"{'.'.join(place) or 'all of it'}: {said.removeprefix('Input ').lower()}"
        if not isinstance(first["input"], Mapping | list):
            wrong += f", and is {first['input']!r}"
    except (OSError, ValueError) as error:
        wrong = str(error)
    else:
        return held
    raise ValueError(f"{path} is damaged: {wrong}; put a copy of it back")
