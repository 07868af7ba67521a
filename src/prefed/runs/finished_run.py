"""Records of finished runs, read from their directories and validated."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model

from prefed.core.records import GenerationAnswers, Judged, LabelRow, RoundRecord, Summary, Tastes, VerdictRow
from prefed.core.text import did_you_mean, listed
from prefed.runs.metrics import (
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
from prefed.store.directory import refuse_links
from prefed.train.metrics import ACCURACY_METRICS, FederatedMetric, Spread, spread
from prefed.train.metrics.run_warnings import small_clients_note


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True)


def _schema(**fields: Any) -> Any:
    """A schema of some keys of an object; others are allowed."""
    return create_model("_Content", __base__=_Schema, **fields)


def _counts(*names: str) -> Any:
    return _schema(**dict.fromkeys(names, int))


_NAMED = _schema(name=str)
_CONFIG = _schema(seed=int, data=dict[str, Any], model=_NAMED, method=_NAMED)
_EPOCH = _schema(epoch=int, loss=float | None, agreement=float | None)
_ALIGNMENT = _schema(
    prompts=_counts("read", "clients", "duplicates", "kept"),
    completions=_counts("completions", "too_long"),
    labels=_counts("pairs", "identical", "blank", "ties", "labelled", "unanimous"),
    train=_schema(pairs=int, held_out=int, epochs=list[_EPOCH], kept=int),  # type: ignore[valid-type]
)


class RunError(ValueError):
    """A directory has no finished run, a file of the run is damaged, or the run has no such client."""


def read_config(path: Path) -> dict[str, Any]:
    """Read ``config.toml``.

    Raises:
        RunError: the file is missing or damaged.
    """
    config: dict[str, Any] = _read(path, tomllib.loads, _CONFIG)
    return config


def read_summary(path: Path) -> Summary:
    """Read ``summary.json``.

    Raises:
        RunError: the file is missing or damaged.
    """
    summary: Summary = _read(path, json.loads, Summary)
    return summary


ANSWERS = "answers.jsonl"
"""File of a run with its models' answers to the prompts of ``[report]`` and to held-out prompts."""


SITE_TEXT = "text.json"
"""File in the folder of a run at a federation's site: the last measured round, and the health of text."""


class Answer(_Schema):
    """A row of ``answers.jsonl``.

    Attributes:
        client: whose own model it is.
        holder: the client that holds the prompt; ``None`` for a prompt of ``[report]``.
        ended: whether the model ended the answer; ``None`` in runs of earlier versions.
        surprise: −log p under the base model in nats a token; ``None`` in runs of earlier versions.
    """

    round: int
    model: Literal["untouched", "shared", "own"]
    client: str | None = None
    holder: str | None = None
    prompt: str
    text: str
    ended: bool | None = None
    surprise: float | None = None


RowT = TypeVar("RowT")
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def _rows(path: Path, kind: type[RowT]) -> Iterator[RowT]:
    """Yield the rows of a JSON Lines file; nothing if it is missing.

    A last line without a line break is still being written and is skipped.

    Raises:
        RunError: a line is damaged.
    """
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield _adapter(kind).validate_python(json.loads(line))
            except ValidationError as error:
                raise _damage(path, f"line {number}: {_problem(error)}") from error
            except (ValueError, RecursionError) as error:
                raise _damage(path, f"line {number}: {error}") from error


def _rounds(path: Path, rounds: int) -> tuple[RoundRecord, ...]:

    def parse(text: str) -> list[Any]:
        # Not splitlines(): a client's name may contain other line separators.
        lines = [line for line in text.split("\n") if line][:rounds]
        if len(lines) < rounds:
            raise ValueError(f"it has {len(lines)} of {rounds} rounds")
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
        _adapter(schema).validate_python(content)
    except FileNotFoundError:
        raise RunError(f"{path} is missing; restore it from a backup") from None
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
    wrong = f"{'.'.join(place) or 'the content'}: {message.removeprefix('Input ').lower()}"
    return wrong if isinstance(first["input"], Mapping | list) else f"{wrong}, not {first['input']!r}"


def _damage(path: Path, wrong: str) -> RunError:
    return RunError(f"{path} is damaged: {wrong}; restore it from a backup")


_ROUND = ("loss", "bytes_up", "bytes_down", "seconds")
"""Numbers in the record of every round."""


def no_client(client: str, names: Sequence[str]) -> str:
    """Format the error for an unknown client, with the nearest names or the first few.

    >>> no_client("ward7", ("ward-7", "ward-8", "clinic"))
    "no client is called 'ward7'; did you mean 'ward-7' or 'ward-8'?"
    >>> no_client("x", ("ward-7", "ward-8"))
    "no client is called 'x'; the clients are 'ward-7', 'ward-8'"
    """
    hint = did_you_mean(client, names, most=3) or f"; the clients are {listed(names)}"
    return f"no client is called {client!r}{hint}"


@dataclass(frozen=True)
class RunRecord:
    """A finished run.

    Attributes:
        config: the experiment with all defaults filled in.
        fingerprint: digests of the data and the model; empty if the checkpoint is missing.
    """

    path: Path
    config: Mapping[str, Any]
    rounds: tuple[RoundRecord, ...]
    summary: Summary
    fingerprint: Mapping[str, str]

    def at_best(self) -> RunRecord:
        """Return the record as of the best round on validation pairs; costs remain those of the whole run."""
        best = self.summary["stop"]["best"]
        number = best["round"]
        summary = cast(Summary, {**self.summary, **best, "rounds": number})
        return replace(self, rounds=self.rounds[:number], summary=summary)

    @property
    def name(self) -> str:
        """The name of the directory."""
        return self.path.resolve().name

    def check_clients(self, clients: Iterable[str | None]) -> None:
        """Check that the run has these clients, before its model is loaded; ``None`` is any.

        Raises:
            RunError: it does not.
        """
        names = sorted(self.summary["clients"])
        for client in clients:
            if client is not None and client not in names:
                raise RunError(f"{self.path}: {no_client(client, names)}")

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.summary["method"])

    @property
    def seed(self) -> int:
        """The seed of all random draws."""
        return int(self.config["seed"])

    @cached_property
    def sites(self) -> Mapping[str, str]:
        """Client → the site that stores its pairs and private state; empty for a run without sites."""
        return {client: site for site, own in self.summary.get("sites", {}).items() for client in own}

    @property
    def split(self) -> str:
        """The split used for evaluation: ``"test"`` or ``"validation"``."""
        return str(self.summary.get("split", "test"))

    @cached_property
    def figures(self) -> Mapping[str, Figure]:
        """Name → per-client metric, in display order; the method or the data may add metrics."""
        return figures_of(self.summary)

    @cached_property
    def profiles(self) -> Mapping[str, Profile]:
        """Name → values per model block from private states, e.g. gates."""
        return profiles_of(self.summary)

    @cached_property
    def groupings(self) -> tuple[Grouping, ...]:
        """The clusters of clients, in the order of rounds; empty if clients were never clustered."""
        return groupings_of(self.rounds)

    @cached_property
    def agreements(self) -> list[Agreement]:
        """Agreement of each selector, and of their majority, with the clients; empty with fewer than two."""
        return agreements(self.summary, self.groupings[-1].clusters if self.groupings else ())

    @cached_property
    def tastes(self) -> Mapping[str, Any] | None:
        """The content of ``tastes.json``; ``None`` if the file is missing or not readable by this user.

        Raises:
            RunError: the file is damaged.
        """
        return tastes_in(self.path)

    @cached_property
    def answers(self) -> tuple[Answer, ...]:
        """The rows of ``answers.jsonl``; empty if there is no such file or it is not readable.

        Raises:
            RunError: the file is damaged.
        """
        return read_answers(self.path) if os.access(self.path / ANSWERS, os.R_OK) else ()

    @property
    def clients(self) -> tuple[str, ...]:
        """The evaluated clients, sorted, without those too small to be listed separately."""
        return tuple(sorted(self.summary["preference_accuracy"]["per_client"]))

    @property
    def evaluated(self) -> int:
        """The number of evaluated clients, including those too small to be listed separately."""
        figure: FederatedMetric = self.summary["preference_accuracy"]
        return len(self.clients) + figure.get("mean_alone", 0) + figure.get("left_out", 0)

    @property
    def unlisted(self) -> str:
        """A note on evaluated clients that are not listed; empty if all are."""
        return small_clients_note(self.summary["preference_accuracy"])

    def pairs(self, client: str) -> int | None:
        """Return the number of pairs that ``client`` was evaluated on; ``None`` if not recorded."""
        sizes = self.summary.get("clients", {}).get(client, {})
        value = sizes.get(self.split)
        return None if value is None else int(value)

    def spread(self, name: str) -> Spread:
        """Return the spread of a per-client metric after the last round.

        Raises:
            KeyError: the run has no such metric.
        """
        if name not in self.figures:
            raise _unknown_metric(name, self.figures)
        return spread(self.figures[name].values)

    def curve(self, name: str, of: str = "mean") -> tuple[list[int], list[float]]:
        """Return the rounds in which a metric was measured, and its values.

        Args:
            name: a per-client metric, a metric of the evaluation such as ``margin``, or a number in the
                records of the rounds.
            of: ``"mean"``, ``"worst"`` or ``"worst_decile"`` over clients, for a per-client metric.

        Returns:
            Two empty lists for a standard metric that the run did not measure.

        Raises:
            KeyError: the run has no such metric.
        """
        names = dict.fromkeys(key for r in self.rounds for key in (*r.get("evaluation", {}), *r))
        if name not in {*names, *self.figures, *_ROUND, *ACCURACY_METRICS}:
            raise _unknown_metric(name, [key for key in names if key not in ("round", "evaluation")])
        points: list[tuple[int, float]] = []
        for record in self.rounds:
            figure = record.get("evaluation", {}).get(name, record.get(name))
            value = figure.get(of) if isinstance(figure, Mapping) else figure if of == "mean" else None
            if isinstance(value, int | float) and math.isfinite(value):
                points.append((int(record["round"]), float(value)))
        return [number for number, _ in points], [value for _, value in points]

    @cached_property
    def own_figures(self) -> tuple[str, ...]:
        """Names of the metrics that the method or the merge rule added to the records of the rounds."""
        usual = {"round", *_ROUND, *ACCURACY_METRICS}
        names: dict[str, None] = {}
        for record in self.rounds:
            for name, value in {**record, **record.get("evaluation", {})}.items():
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if number and name not in usual and name not in ("clients", "left_out"):
                    names[name] = None
        return tuple(names)


def read_run(path: str | Path) -> RunRecord:
    """Read a finished run.

    The directory must have ``config.toml``, ``rounds.jsonl`` and ``summary.json``; ``checkpoint/`` and
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
        hint = f"; runs inside: {', '.join(inside[:5])}" if inside else "; start one: prefed run FILE"
        raise RunError(f"{path} is not a run directory: it has no config.toml{hint}")
    checkpoint: RunReader | None = None
    try:
        refuse_links(path, but="adapters")  # an export checks its own folder
        # Another user cannot read the checkpoint and does without it.
        with suppress(PermissionError):
            if (path / "checkpoint/COMMIT.json").exists():
                checkpoint = RunReader(path)
        if not (path / "summary.json").exists():
            done = checkpoint.commit.round if checkpoint else 0
            stopped = f"after round {done}" if done else "before the first round"
            over_sites = (path / "federation.json").exists()
            where = ["--out", str(path), *(["--hub", "HUB"] if over_sites else [])]
            again = shlex.join(
                ["prefed", "federate" if over_sites else "run", str(config), *where, "--resume"]
            )
            raise RunError(f"{path} is not finished: it stopped {stopped}; resume it: {again}")
        settings, summary = read_config(config), read_summary(path / "summary.json")
        rounds = _rounds(path / "rounds.jsonl", summary["rounds"])
        if checkpoint is not None:
            checkpoint.rounds()
    except StoreError as error:
        raise RunError(str(error)) from error
    return RunRecord(path, settings, rounds, summary, checkpoint.commit.fingerprint if checkpoint else {})


def find_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Return the finished runs in ``paths`` and in folders below them, e.g. those of ``prefed sweep``.

    Raises:
        RunError: a path is a run that is not finished, or there is no finished run.
    """
    found: dict[Path, RunRecord] = {}
    for path in paths:
        inside = [path] if (path / "config.toml").exists() or not path.is_dir() else []
        if not inside:
            configs = sorted(path.rglob("config.toml"))
            inside = [file.parent for file in configs if (file.parent / "summary.json").exists()]
        found |= {each.resolve(): read_run(each) for each in inside if each.resolve() not in found}
    if not found:
        raise RunError(f"no finished run in {', '.join(map(str, paths))}")
    return list(found.values())


def _unknown_metric(name: str, names: Iterable[str]) -> KeyError:
    return KeyError(f"the run has no metric {name!r}; available: {', '.join(names)}")


def _runs(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(item.name for item in folder.iterdir() if (item / "config.toml").exists())


EXAMPLES = 4
"""Number of example prompts shown for a comparison or an alignment."""


@dataclass(frozen=True)
class Example:
    """Two responses to a prompt.

    Attributes:
        first: the response of the model; in an alignment, the chosen one.
        outcome: the verdict or the votes, as text.
    """

    prompt: str
    first: str
    second: str
    outcome: str


@dataclass(frozen=True)
class Outcome:
    """The result of a comparison by a judge, or of an alignment.

    Attributes:
        summary: the content of its ``summary.json``.
        examples: those of the first prompts.
        answers: prompts, each with the answers of an alignment's initial policy and of its generations.
    """

    summary: Mapping[str, Any]
    examples: tuple[Example, ...]
    answers: tuple[tuple[str, Sequence[str]], ...] = ()


def judged_of(run: RunRecord) -> list[Outcome]:
    """Return the finished comparisons under ``RUN/judge`` that this user can read, by name.

    If the run has continued since a comparison, the name of its model says after which round it was judged.

    Raises:
        RunError: a file is damaged.
    """
    found = []
    for path in sorted((run.path / "judge").glob("*/summary.json")):
        if os.access(path, os.R_OK):
            summary = _read(path, json.loads, Judged)
            number = summary.get("round")
            if number not in (None, run.summary["rounds"]):
                summary["model"] += f" after round {number}"
            found.append(Outcome(summary, _verdicts(path.with_name("verdicts.jsonl"))))
    return found


def alignment_of(run: Path) -> Outcome | None:
    """Return the finished alignment under ``RUN/align``, or ``None``.

    Raises:
        RunError: a file is damaged.
    """
    path = run / "align" / "summary.json"
    if not path.exists():
        return None
    rows = _rows(path.with_name(ANSWERS), GenerationAnswers)
    return Outcome(
        _read(path, json.loads, _ALIGNMENT),
        _labels(path.with_name("labels.jsonl")),
        tuple((prompt_text(row["prompt"]), row["answers"]) for row in rows),
    )


def spent_with_votes(alignment: Outcome | None) -> dict[str, Any]:
    """Return the entry ``privacy`` of an alignment with clients' votes, which replaces that of its run."""
    known: Mapping[str, Any] = {} if alignment is None else alignment.summary
    return {"privacy": known["privacy"]} if "privacy" in known else {}


def tastes_in(run: Path) -> Mapping[str, Any] | None:
    """Return :attr:`RunRecord.tastes` without reading the other files of the run."""
    path = run / "tastes.json"
    return _read(path, json.loads, Tastes) if os.access(path, os.R_OK) else None


def read_answers(run: Path) -> tuple[Answer, ...]:
    """Read ``answers.jsonl`` of a run.

    Raises:
        RunError: the file is damaged.
    """
    return tuple(_rows(run / ANSWERS, Answer))


def _verdicts(path: Path) -> tuple[Example, ...]:
    first: dict[int, VerdictRow] = {}
    for row in _rows(path, VerdictRow):
        # Rows are in the order of judging, and the last one of a prompt counts.
        first[row["row"]] = row
        if len(first) > EXAMPLES:
            del first[max(first)]
    rows = (first[number] for number in sorted(first))
    return tuple(
        Example(prompt_text(row["prompt"]), row["text"], row["against"], row["result"]) for row in rows
    )


def _labels(path: Path) -> tuple[Example, ...]:
    first: dict[int, LabelRow] = {}
    for row in _rows(path, LabelRow):
        first.setdefault(row["index"], row)
        if len(first) == EXAMPLES:
            break
    return tuple(
        Example(prompt_text(row["prompt"]), row["chosen"], row["rejected"], _lead(row))
        for row in first.values()
    )


def _lead(row: LabelRow) -> str:
    won, lost = row["votes"]
    return f"{won} to {lost} votes" if won + lost > 1 else f"margin {row['margin']:.2f}"


def prompt_text(prompt: str | list[dict[str, str]]) -> str:
    """Format a prompt for display, one paragraph per turn of a conversation."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{turn.get('role', '')}: {turn.get('content', '')}" for turn in prompt)
