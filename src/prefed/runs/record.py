"""A finished run as its directory describes it, without its model or its data."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from prefed.core.records import RoundRecord, Summary
from prefed.core.text import did_you_mean
from prefed.runs.figures import USUAL, Figure, Profile, figures_of, profiles_of
from prefed.runs.groupings import Agreement, Grouping, agreements, groupings_of
from prefed.runs.schema import read_config, read_rounds, read_summary, read_told_tastes
from prefed.store import RunReader, StoreError
from prefed.train.metrics import FederatedMetric, Spread, small_clients_note, spread

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
