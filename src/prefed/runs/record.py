"""A finished run as its directory tells it, without its model or its data."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from prefed.metrics.accuracy import Accuracy, unlisted
from prefed.metrics.fairness import Spread, spread
from prefed.runs.profiles import Profile, profiles_of
from prefed.runs.shapes import read_config, read_rounds, read_summary
from prefed.store import RunReader, StoreError

__all__ = [
    "REWARDED",
    "Figure",
    "RunError",
    "RunRecord",
    "figures_of",
    "leaves",
    "nearest_clients",
    "read_run",
]

KNOWN = (
    "baseline_accuracy",
    "shared_accuracy",
    "preference_accuracy",
    "reward_accuracy",
    "normalized_accuracy",
    "combined_accuracy",
    "explicit_accuracy",
    "agreement",
)
"""Figures of every client, in the order in which they are shown; others follow in the run's own order."""


REWARDED = ("combined_accuracy", "explicit_accuracy", "agreement")
"""Figures of models with an explicit reward head."""


class RunError(ValueError):
    """A directory that holds no finished run, or a client that is not in it; the message says what to do."""


@dataclass(frozen=True)
class Figure:
    """A figure that every judged client has.

    Attributes:
        name: as in ``summary.json``.
        label: what a column or a curve is headed.
        meaning: one sentence.
        values: over clients, after the last round.
    """

    name: str
    label: str
    meaning: str
    values: Accuracy


@dataclass(frozen=True)
class RunRecord:
    """What a finished run left: its settings, its rounds and its end.

    Attributes:
        path: the run directory.
        config: the experiment as it was run, every default filled in.
        rounds: the records of ``rounds.jsonl``.
        summary: ``summary.json``.
        fingerprint: digests of the data and the model; empty where the checkpoint is not there.
    """

    path: Path
    config: Mapping[str, Any]
    rounds: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]
    fingerprint: Mapping[str, str]

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.resolve().name

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.summary["method"])

    @property
    def split(self) -> str:
        """The pairs that clients were judged on: ``"test"`` or ``"validation"``."""
        return str(self.summary.get("split", "test"))

    @cached_property
    def figures(self) -> Mapping[str, Figure]:
        """The figures of every client, by name, in the order in which they are shown.

        Besides those of every run, whatever else of this shape the method or the data brought.
        """
        return figures_of(self.summary)

    @cached_property
    def profiles(self) -> Mapping[str, Profile]:
        """What private states tell of a model's blocks, such as gates, by name."""
        return profiles_of(self.summary)

    @property
    def clients(self) -> tuple[str, ...]:
        """The judged clients, sorted, without those that are too small for a figure of their own."""
        return tuple(sorted(self.summary["preference_accuracy"]["per_client"]))

    @property
    def judged(self) -> int:
        """How many clients were judged, those included that are too small for a figure of their own."""
        figure: Accuracy = self.summary["preference_accuracy"]
        return len(self.clients) + figure.get("mean_alone", 0) + figure.get("left_out", 0)

    @property
    def unlisted(self) -> str:
        """What to say of the judged clients that are not listed; empty if all are."""
        return unlisted(self.summary["preference_accuracy"])

    def pairs(self, client: str) -> int | None:
        """How many pairs a client was judged on, where the summary says so."""
        sizes = self.summary.get("clients", {}).get(client, {})
        value = sizes.get(self.split)
        return None if value is None else int(value)

    def spread(self, name: str) -> Spread:
        """How a figure is spread over clients, after the last round."""
        return spread(self.summary[name])

    def curve(self, name: str, of: str = "mean") -> tuple[list[int], list[float]]:
        """Rounds and values of a figure where it was measured.

        Args:
            name: a figure of every client, a figure of the evaluation such as ``margin``, or a number of
                the round's record.
            of: ``"mean"``, ``"worst"`` or ``"worst_decile"`` of a figure of every client.
        """
        points: list[tuple[int, float]] = []
        for record in self.rounds:
            held = record.get("evaluation", {}).get(name, record.get(name))
            value = held.get(of) if isinstance(held, Mapping) else held if of == "mean" else None
            if isinstance(value, int | float) and math.isfinite(value):
                points.append((int(record["round"]), float(value)))
        return [number for number, _ in points], [value for _, value in points]

    @cached_property
    def own_figures(self) -> tuple[str, ...]:
        """Names of the numbers that the method or the merge rule put into the rounds' records."""
        usual = {"round", "loss", "bytes_up", "bytes_down", "seconds", *KNOWN}
        found: dict[str, None] = {}
        for record in self.rounds:
            for name, value in {**record, **record.get("evaluation", {})}.items():
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if number and name not in usual and name not in ("clients", "left_out"):
                    found[name] = None
        return tuple(found)


def read_run(path: str | Path) -> RunRecord:
    """The finished run in a directory.

    It needs ``config.toml``, ``rounds.jsonl`` and ``summary.json`` alone: a directory that was passed on
    without its private ``checkpoint/`` and ``cache/`` will do.

    Raises:
        RunError: there is no run, or it is not finished.
    """
    path = Path(path)
    if not path.is_dir():
        near = difflib.get_close_matches(path.name, _runs(path.parent), n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
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
            checkpoint = RunReader(path)
        except StoreError as error:
            raise RunError(str(error)) from error
        done, fingerprint = checkpoint.commit.round, checkpoint.commit.fingerprint
    if not (path / "summary.json").exists():
        stood = "before its first round" if not done else f"after round {done}"
        again = shlex.join(["prefed", "run", str(config), "--out", str(path), "--resume"])
        raise RunError(f"{path} is not finished: it stands {stood}; go on with it: {again}")
    try:
        settings, summary = read_config(config), read_summary(path / "summary.json")
        rounds = read_rounds(path / "rounds.jsonl", summary["rounds"])
        if checkpoint is not None:
            checkpoint.rounds()
    except (ValueError, StoreError) as error:
        raise RunError(str(error)) from error
    return RunRecord(path, settings, rounds, summary, fingerprint)


def figures_of(held: Mapping[str, Any]) -> dict[str, Figure]:
    """What of ``held`` every client has, in the order in which it is shown."""
    found = {name: value for name, value in held.items() if _per_client(value)}
    personal = "shared_accuracy" in found
    order = [name for name in KNOWN if name in found] + [name for name in found if name not in KNOWN]
    return {name: Figure(name, *_words(name, personal), found[name]) for name in order}


def nearest_clients(client: str, known: Mapping[str, Any] | tuple[str, ...]) -> str:
    """What to say of a client that is not there: the nearest names, or the first few.

    >>> nearest_clients("ward7", ("ward-7", "ward-8", "clinic"))
    "no client is called 'ward7'; did you mean 'ward-7' or 'ward-8'?"
    >>> nearest_clients("x", ("ward-7", "ward-8"))
    "no client is called 'x'; the clients are 'ward-7', 'ward-8'"
    """
    names = list(known)
    near = difflib.get_close_matches(client, names, n=3)
    if near:
        return f"no client is called {client!r}; did you mean {' or '.join(map(repr, near))}?"
    shown = ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8:,} more" if len(names) > 8 else "")
    return f"no client is called {client!r}; the clients are {shown}"


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of nested tables by their dotted names.

    >>> dict(leaves({"seed": 1, "method": {"lr": 0.1}}))
    {'seed': 1, 'method.lr': 0.1}
    """
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _runs(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(item.name for item in folder.iterdir() if (item / "config.toml").exists())


def _per_client(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("per_client"), Mapping)


def _words(name: str, personal: bool) -> tuple[str, str]:
    """The label and the meaning of a figure."""
    likelier = "share of pairs whose chosen response the model finds likelier than the rejected one"
    known = {
        "baseline_accuracy": ("before", f"{likelier}, by the untouched model"),
        "shared_accuracy": (
            "shared model",
            f"{likelier}, by the shared model without the client's own parts",
        ),
        "preference_accuracy": (
            ("own model", f"{likelier}, by the client's own model") if personal else ("after", likelier)
        ),
        "reward_accuracy": (
            "reward",
            "share of pairs whose chosen response gained more likelihood over the untouched model",
        ),
        "normalized_accuracy": ("per token", f"{likelier}, token for token"),
        "combined_accuracy": (
            "combined",
            "share of pairs whose chosen response is favoured by both margins together, the model's own and "
            "the reward head's, weighed as in the loss",
        ),
        "explicit_accuracy": (
            "reward head",
            "share of pairs whose chosen response the reward head scores higher",
        ),
        "agreement": (
            "agreement",
            "share of pairs on which the reward head favours the response that gained more likelihood",
        ),
    }
    plain = name.replace("_", " ")
    return known.get(name, (plain.removesuffix(" accuracy"), plain))
