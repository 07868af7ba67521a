"""The least that the files of a run directory must hold, checked when they are read."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from prefed.core.records import RoundRecord, Summary


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True)


class _Named(_Schema):
    name: str


class _Config(_Schema):
    seed: int
    data: dict[str, Any]
    model: _Named
    method: _Named


class _Rate(_Schema):
    mean: float
    low: float
    high: float


class _Judged(_Schema):
    name: str
    judge: str
    taste: str | None = None
    model: str
    against: str
    win_rate: _Rate
    wins: float
    length_controlled: float | None
    ties: int
    judged: int
    failed: int
    note: str


_Point = Annotated[list[float], Field(min_length=2, max_length=2)]


class _Map(_Schema):
    clients: list[_Point]
    prototypes: list[_Point]
    shares: _Point


class _Tastes(_Schema):
    clients: list[str] = Field(min_length=1)
    own: float
    another: float | None
    population: float
    collapsed: bool
    accuracies: list[list[float]]
    active_units: int
    kl_per_dimension: list[float]
    map: _Map
    prototypes: dict[str, int]
    trust: dict[str, dict[str, float]]
    told: float | None = None
    trainable_share: float | None = None
    met: float = 0.0


class Verdict(_Schema):
    """A row of ``verdicts.jsonl``."""

    row: int
    prompt: str | list[dict[str, str]]
    text: str
    against: str
    result: str


class _Prompts(_Schema):
    read: int
    clients: int
    duplicates: int
    kept: int


class _Completions(_Schema):
    completions: int
    too_long: int


class _Labels(_Schema):
    pairs: int
    identical: int
    blank: int
    # Of selectors the first, of a judge the second.
    too_long: int = 0
    failed: int = 0
    ties: int
    labelled: int
    unanimous: int


class _Epoch(_Schema):
    epoch: int
    loss: float | None
    agreement: float | None


class _Training(_Schema):
    pairs: int
    held_out: int
    epochs: list[_Epoch]
    kept: int


class _Alignment(_Schema):
    prompts: _Prompts
    completions: _Completions
    labels: _Labels
    train: _Training


class Label(_Schema):
    """A row of ``labels.jsonl``."""

    prompt: str | list[dict[str, str]]
    chosen: str
    rejected: str
    votes: list[int] = Field(min_length=2, max_length=2)
    margin: float
    index: int


def read_config(path: Path) -> dict[str, Any]:
    """Read ``config.toml``.

    Raises:
        ValueError: it is missing or damaged; the message names the file and the problem.
    """
    config: dict[str, Any] = _read(path, tomllib.loads, _Config)
    return config


def read_summary(path: Path) -> Summary:
    """Read ``summary.json``; raises as :func:`read_config`."""
    summary: Summary = _read(path, json.loads, Summary)
    return summary


def read_told_tastes(path: Path) -> dict[str, Any]:
    """Read ``tastes.json``; raises as :func:`read_config`."""
    tastes: dict[str, Any] = _read(path, json.loads, _Tastes)
    return tastes


def read_judged(path: Path) -> dict[str, Any]:
    """Read ``summary.json`` of a comparison by a judge; raises as :func:`read_config`."""
    summary: dict[str, Any] = _read(path, json.loads, _Judged)
    return summary


def read_alignment(path: Path) -> dict[str, Any]:
    """Read ``summary.json`` of an alignment; raises as :func:`read_config`."""
    summary: dict[str, Any] = _read(path, json.loads, _Alignment)
    return summary


RowT = TypeVar("RowT", bound=_Schema)


def read_rows(path: Path, kind: type[RowT]) -> Iterator[RowT]:
    """The whole rows of a file of JSON lines, one at a time; none if it is missing.

    A last line that has no end is under way, and no row.

    Raises:
        ValueError: a line is damaged; the message names the file, the line and the problem.
    """
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield kind.model_validate(json.loads(line))
            except ValidationError as error:
                raise _damage(path, f"line {number}: {_problem(error)}") from error
            except (ValueError, RecursionError) as error:
                raise _damage(path, f"line {number}: {error}") from error


def read_rounds(path: Path, rounds: int) -> tuple[RoundRecord, ...]:
    """Read the first ``rounds`` records of ``rounds.jsonl``; raises as :func:`read_config`."""

    def parse(text: str) -> list[Any]:
        # Other ends of lines may stand in a name.
        lines = [line for line in text.split("\n") if line][:rounds]
        if len(lines) < rounds:
            raise ValueError(f"it holds {len(lines)} of {rounds} rounds")
        records = []
        for number, line in enumerate(lines, 1):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
        return records

    return tuple(_read(path, parse, list[RoundRecord]))


def _read(path: Path, parse: Callable[[str], Any], schema: Any) -> Any:
    try:
        content = parse(path.read_text("utf-8"))
        TypeAdapter(schema).validate_python(content)
    except FileNotFoundError:
        wrong = "it is not there"
    except ValidationError as error:
        wrong = _problem(error)
    except (OSError, ValueError, RecursionError) as error:
        wrong = str(error)
    else:
        return content
    raise _damage(path, wrong)


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = [f"line {step + 1}" if isinstance(step, int) else step for step in first["loc"]]
    message = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", first["msg"])
    wrong = f"{'.'.join(place) or 'all of it'}: {message.removeprefix('Input ').lower()}"
    return wrong if isinstance(first["input"], Mapping | list) else f"{wrong}, and is {first['input']!r}"


def _damage(path: Path, wrong: str) -> ValueError:
    return ValueError(f"{path} is damaged: {wrong}; put a copy of it back")
