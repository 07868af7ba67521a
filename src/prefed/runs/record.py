"""A finished run as its directory describes it; its files are checked when they are read."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from prefed.core.records import RoundRecord, Summary
from prefed.core.text import did_you_mean
from prefed.runs.metrics import (
    USUAL,
    Agreement,
    Figure,
    Grouping,
    Profile,
    agreements,
    figures_of,
    groupings_of,
    profiles_of,
)
from prefed.store import RunReader, StoreError
from prefed.train.metrics import FederatedMetric, Spread, small_clients_note, spread


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


_ROUND = ("loss", "bytes_up", "bytes_down", "seconds")
"""Numbers that every round's record has."""


class RunError(ValueError):
    """A directory holds no finished run, or the run has no such client. The message says what to do."""


@dataclass(frozen=True)
class RunRecord:
    """A finished run: its settings, its rounds and its summary.

    Attributes:
        config: the experiment as it was run, every default filled in.
        fingerprint: digests of the data and the model; empty where the checkpoint is missing.
    """

    path: Path
    config: Mapping[str, Any]
    rounds: tuple[RoundRecord, ...]
    summary: Summary
    fingerprint: Mapping[str, str]

    def at_best(self) -> RunRecord:
        """The run as its best round by validation pairs left it; what it cost is that of the whole run."""
        best = self.summary["stop"]["best"]
        number = best["round"]
        summary = cast(Summary, {**self.summary, **best, "rounds": number})
        return replace(self, rounds=self.rounds[:number], summary=summary)

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.resolve().name

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.summary["method"])

    @property
    def seed(self) -> int:
        """The seed that all its draws come from."""
        return int(self.config["seed"])

    @cached_property
    def sites(self) -> Mapping[str, str]:
        """Client → the site that has its pairs and its private state; empty where both are here."""
        return {client: site for site, own in self.summary.get("sites", {}).items() for client in own}

    @property
    def split(self) -> str:
        """The split that clients were evaluated on: ``"test"`` or ``"validation"``."""
        return str(self.summary.get("split", "test"))

    @cached_property
    def figures(self) -> Mapping[str, Figure]:
        """The figures that every client has, by name, in the order in which they are shown.

        Besides the usual ones, the method or the data may add more.
        """
        return figures_of(self.summary)

    @cached_property
    def profiles(self) -> Mapping[str, Profile]:
        """Figures of each block from private states, such as gates, by name."""
        return profiles_of(self.summary)

    @cached_property
    def groupings(self) -> tuple[Grouping, ...]:
        """How clients were grouped, in the order of rounds; empty if they never were."""
        return groupings_of(self.rounds)

    @cached_property
    def agreements(self) -> list[Agreement]:
        """How each of several selectors, and their vote, agree with clients; empty without such."""
        return agreements(self.summary, self.groupings[-1].clusters if self.groupings else ())

    @cached_property
    def tastes(self) -> Mapping[str, Any] | None:
        """What ``tastes.json`` holds; ``None`` where there is none, or for whoever may not read it.

        Raises:
            RunError: the file is damaged.
        """
        path = self.path / "tastes.json"
        try:
            return read_told_tastes(path) if os.access(path, os.R_OK) else None
        except ValueError as error:
            raise RunError(str(error)) from error

    @property
    def clients(self) -> tuple[str, ...]:
        """The evaluated clients, sorted, without those that are too small for a figure of their own."""
        return tuple(sorted(self.summary["preference_accuracy"]["per_client"]))

    @property
    def evaluated(self) -> int:
        """How many clients were evaluated, with those too small for a figure of their own."""
        figure: FederatedMetric = self.summary["preference_accuracy"]
        return len(self.clients) + figure.get("mean_alone", 0) + figure.get("left_out", 0)

    @property
    def unlisted(self) -> str:
        """A sentence on evaluated clients that are not listed; empty if all are."""
        return small_clients_note(self.summary["preference_accuracy"])

    def pairs(self, client: str) -> int | None:
        """How many pairs a client was evaluated on; ``None`` if the summary does not say."""
        sizes = self.summary.get("clients", {}).get(client, {})
        value = sizes.get(self.split)
        return None if value is None else int(value)

    def spread(self, name: str) -> Spread:
        """The spread of a figure over clients, after the last round.

        Raises:
            KeyError: the run has no such figure; the message lists those that it has.
        """
        if name not in self.figures:
            raise _no_figure(name, self.figures)
        return spread(self.figures[name].values)

    def curve(self, name: str, of: str = "mean") -> tuple[list[int], list[float]]:
        """The rounds in which a figure was measured, and its values there.

        Args:
            name: a figure of every client, a figure of the evaluation such as ``margin``, or a number of
                the round's record.
            of: ``"mean"``, ``"worst"`` or ``"worst_decile"`` of a figure of every client.

        Raises:
            KeyError: the run has no such figure; the message lists those that it has. A usual figure that
                the run did not measure gives no points.
        """
        names = dict.fromkeys(key for r in self.rounds for key in (*r.get("evaluation", {}), *r))
        if name not in {*names, *self.figures, *_ROUND, *USUAL}:
            raise _no_figure(name, [key for key in names if key not in ("round", "evaluation")])
        points: list[tuple[int, float]] = []
        for record in self.rounds:
            figure = record.get("evaluation", {}).get(name, record.get(name))
            value = figure.get(of) if isinstance(figure, Mapping) else figure if of == "mean" else None
            if isinstance(value, int | float) and math.isfinite(value):
                points.append((int(record["round"]), float(value)))
        return [number for number, _ in points], [value for _, value in points]

    @cached_property
    def own_figures(self) -> tuple[str, ...]:
        """Names of the numbers that the method or the merge rule added to the rounds' records."""
        usual = {"round", *_ROUND, *USUAL}
        names: dict[str, None] = {}
        for record in self.rounds:
            for name, value in {**record, **record.get("evaluation", {})}.items():
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if number and name not in usual and name not in ("clients", "left_out"):
                    names[name] = None
        return tuple(names)


def read_run(path: str | Path) -> RunRecord:
    """Read the finished run in a directory.

    It needs ``config.toml``, ``rounds.jsonl`` and ``summary.json``. The private folders ``checkpoint/`` and
    ``cache/`` may be missing.

    Raises:
        RunError: there is no run, it is not finished, or a file is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        hint = did_you_mean(path.name, _runs(path.parent), show=lambda near: str(path.parent / near))
        raise RunError(f"{path}: no such directory{hint}")
    config = path / "config.toml"
    if not config.exists():
        inside = _runs(path)
        hint = f"; the runs in it: {', '.join(inside[:5])}" if inside else "; `prefed run FILE` makes one"
        raise RunError(f"{path} is not a run directory: it holds no config.toml{hint}")
    done: int | None = None
    checkpoint: RunReader | None = None
    fingerprint: Mapping[str, str] = {}
    if (path / "checkpoint/COMMIT.json").exists():
        try:
            # For whoever is not its owner the checkpoint is as good as missing.
            with suppress(PermissionError):
                checkpoint = RunReader(path)
        except StoreError as error:
            raise RunError(str(error)) from error
    if checkpoint is not None:
        done, fingerprint = checkpoint.commit.round, checkpoint.commit.fingerprint
    if not (path / "summary.json").exists():
        stood = "before its first round" if not done else f"after round {done}"
        over_sites = (path / "federation.json").exists()
        where = ["--out", str(path), *(["--hub", "HUB"] if over_sites else [])]
        again = shlex.join(["prefed", "federate" if over_sites else "run", str(config), *where, "--resume"])
        raise RunError(f"{path} is not finished: it stands {stood}; go on with it: {again}")
    try:
        settings, summary = read_config(config), read_summary(path / "summary.json")
        rounds = read_rounds(path / "rounds.jsonl", summary["rounds"])
        if checkpoint is not None:
            checkpoint.rounds()
    except (ValueError, StoreError) as error:
        raise RunError(str(error)) from error
    return RunRecord(path, settings, rounds, summary, fingerprint)


def _no_figure(name: str, names: Iterable[str]) -> KeyError:
    return KeyError(f"the run has no figure {name!r}; it has {', '.join(names)}")


def _runs(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(item.name for item in folder.iterdir() if (item / "config.toml").exists())


EXAMPLES = 4
"""Prompts that are shown of a comparison or an alignment."""


@dataclass(frozen=True)
class Example:
    """Two responses to a prompt.

    Attributes:
        first: the model's response; of a label the chosen one.
        second: the other response.
        outcome: in words.
    """

    prompt: str
    first: str
    second: str
    outcome: str


@dataclass(frozen=True)
class Outcome:
    """A comparison by a judge, or an alignment.

    Attributes:
        summary: what its ``summary.json`` holds.
        examples: of its first prompts, whatever came of them.
    """

    summary: Mapping[str, Any]
    examples: tuple[Example, ...]


def judged_of(run: Path) -> list[Outcome]:
    """The finished comparisons under ``RUN/judge``, by name.

    For whoever may not read that folder there are none.

    Raises:
        RunError: a file is damaged.
    """
    try:
        return [
            Outcome(read_judged(path), _verdicts(path.with_name("verdicts.jsonl")))
            for path in sorted((run / "judge").glob("*/summary.json"))
            if os.access(path, os.R_OK)
        ]
    except ValueError as error:
        raise RunError(str(error)) from error


def alignment_of(run: Path) -> Outcome | None:
    """The finished alignment under ``RUN/align``; ``None`` where there is none.

    Raises:
        RunError: a file is damaged.
    """
    path = run / "align" / "summary.json"
    if not path.exists():
        return None
    try:
        return Outcome(read_alignment(path), _labels(path.with_name("labels.jsonl")))
    except ValueError as error:
        raise RunError(str(error)) from error


def _verdicts(path: Path) -> tuple[Example, ...]:
    first: dict[int, Verdict] = {}
    for row in read_rows(path, Verdict):
        # The rows stand in the order in which they were judged, and the last one of a prompt counts.
        first[row.row] = row
        if len(first) > EXAMPLES:
            del first[max(first)]
    rows = (first[number] for number in sorted(first))
    return tuple(Example(_text(row.prompt), row.text, row.against, row.result) for row in rows)


def _labels(path: Path) -> tuple[Example, ...]:
    first: dict[int, Label] = {}
    for row in read_rows(path, Label):
        first.setdefault(row.index, row)
        if len(first) == EXAMPLES:
            break
    return tuple(
        Example(_text(row.prompt), row.chosen, row.rejected, f"{row.votes[0]} to {row.votes[1]} votes")
        for row in first.values()
    )


def _text(prompt: str | list[dict[str, str]]) -> str:
    """A prompt as people read it; the turns of a conversation below one another."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{turn.get('role', '')}: {turn.get('content', '')}" for turn in prompt)
