"""A finished run's models judged on pairs: the clients' own, or those of another file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from prefed.engines import Task, run_task
from prefed.metrics import (
    FederatedMetric,
    client_metrics,
    divergence_warning,
    federated_metrics,
    not_finite_counts,
    small_clients_note,
)
from prefed.runs.loaded import LoadedRun
from prefed.runs.new_pairs import EVERYBODY, read_pairs
from prefed.train import PairTrainer
from prefed.train.trainer_factory import check_lengths
from prefed.wire import encode

__all__ = ["Evaluation", "evaluate_file", "judge"]

Tell = Callable[[int, int], None]
"""Told how many of how many clients are judged."""


@dataclass(frozen=True)
class Evaluation:
    """What judging came to.

    Attributes:
        what: the pairs, e.g. ``"test pairs"``.
        pairs: client → pairs it was judged on.
        figures: as :func:`prefed.metrics.client_metrics` names them, over clients; for a method whose
            clients have models of their own also ``shared_accuracy``, of the published model alone.
        unseen: number of local steps → preference accuracy of the clients that never took part.
        notes: what a reader should know, a sentence each.
    """

    what: str
    pairs: Mapping[str, int]
    figures: Mapping[str, FederatedMetric]
    unseen: Mapping[str, FederatedMetric]
    notes: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As JSON keeps it; accuracies have the shape they have in ``summary.json``."""
        return {
            "pairs": self.what,
            **self.figures,
            **({"unseen_accuracy": self.unseen} if self.unseen else {}),
            "clients": {client: {"pairs": count} for client, count in self.pairs.items()},
            "notes": list(self.notes),
        }


def judge(
    run: LoadedRun,
    split: Literal["train", "validation", "test"] = "test",
    clients: Sequence[str] | None = None,
    tell: Tell = lambda done, of: None,
) -> Evaluation:
    """Every client's model on its own pairs.

    On the split and the clients of the run's own evaluations it gives what ``summary.json`` has.

    Args:
        run: opened with its data.
        split: which of a client's pairs.
        clients: only these.
        tell: told of every client.

    Raises:
        RunError: there is no such client.
        ValueError: nobody that was asked for has a pair in the split, or as many as ``[privacy]
            minimum_pairs``.
    """
    job = replace(run.job, split=cast(Any, split), judged=None)
    asked = [run.check(client) for client in clients] if clients else list(run.clients)
    there = {*job.judges, *job.newcomers}
    able = [client for client in asked if client in there]
    if not able:
        raise ValueError(f"{run.record.path}: {', '.join(asked)} has no pair in the {split} split")
    seen: dict[str, dict[str, float]] = {}
    unseen: dict[str, dict[str, float]] = {}
    for done, client in enumerate(able, 1):
        private = run.reader.client(client)
        message = encode(run.method.publish(run.server, client))
        state = None if private is None else encode(private)
        task = Task("judge", client, run.reader.commit.round, "", message, state)
        (unseen if client in job.unseen else seen)[client] = json.loads(run_task(job, task).message)
        tell(done, len(able))
    notes = []
    if len(able) < len(asked):
        notes.append(f"{len(asked) - len(able):,} clients have no pair in their {split} split")
    pairs = {client: getattr(run.trainers.clients[client], split) for client in able}
    notes += _diverged(seen, pairs)
    return _judged(run, f"{split} pairs", pairs, seen, unseen, notes)


def evaluate_file(
    run: LoadedRun,
    file: str,
    clients: Sequence[str] | None = None,
    *,
    everyone: bool = False,
    tell: Tell = lambda done, of: None,
) -> Evaluation:
    """The run's models on the pairs of another file, read by the run's ``[data]`` settings.

    Where the run's clients come from a column, each client is judged on its own rows. Otherwise, or with
    ``everyone``, each is judged on all of them; where all have one model, it is judged once, under the name
    ``"everybody"``.

    Args:
        run: an opened run.
        file: a file, a folder of files or a hub name.
        clients: only these.
        everyone: all rows for each client, whatever their column says.
        tell: told of every client.

    Raises:
        RunError: there is no such client.
        DataError: the file cannot be used, or no row of it belongs to a client of the run.
        ValueError: nobody is judged on as many pairs as ``[privacy] minimum_pairs``.
        ModelError: a pair is longer than the model's context.
    """
    asked = [run.check(client) for client in clients] if clients else None
    with tempfile.TemporaryDirectory(prefix="prefed-pairs-") as folder:
        pairs = read_pairs(run, file, Path(folder), everyone=everyone)
        rows, common = dict(pairs.rows), pairs.common and not (run.method.personal or asked)
        if pairs.common and not common:
            rows = dict.fromkeys(asked or run.participants, rows[EVERYBODY])
        elif asked:
            rows = {client: rows[client] for client in asked if client in rows}
        if not rows:
            raise ValueError(f"{file}: none of its rows belongs to {', '.join(asked or ())}")
        check_lengths(run.backbone, pairs.tokens.lengths)
        pair_trainer = PairTrainer(
            run.backbone,
            pairs.tokens,
            max_tokens=run.experiment.engine.max_tokens,
            fast=run.experiment.model.fast,
        )
        found: dict[str, dict[str, float]] = {}
        for client, held in rows.items():
            if common:
                own, weight = run.published_model, 1.0
            else:
                private = run.private_state(client)
                own = run.model(client, private)
                weight = run.method.reward_weight(private, run.reader.commit.round)
            found[client] = client_metrics(pair_trainer.score(own, held), run.job.beta, weight)
            if run.method.personal:
                scores = pair_trainer.score(run.shared_model(client), held)
                found[client]["shared_accuracy"] = client_metrics(scores, run.job.beta)["preference_accuracy"]
            tell(len(found), len(rows))
    counts = {client: len(held) for client, held in rows.items()}
    return _judged(run, f"pairs of {file}", counts, found, {}, [*pairs.notes, *_diverged(found, counts)])


def _diverged(found: Mapping[str, Mapping[str, float]], pairs: Mapping[str, int]) -> list[str]:
    broken = not_finite_counts(found)
    return [divergence_warning(broken, pairs)] if broken else []


def _judged(
    run: LoadedRun,
    what: str,
    pairs: Mapping[str, int],
    seen: Mapping[str, Mapping[str, float]],
    unseen: Mapping[str, Mapping[str, float]],
    notes: Sequence[str],
) -> Evaluation:
    """Figures over clients, and a word on the clients that they do not list."""
    privacy = run.experiment.privacy
    figures, newcomers = (federated_metrics(found, pairs, privacy) for found in (seen, unseen))
    small = [small_clients_note(next(iter(over.values()))) for over in (figures, newcomers) if over]
    return Evaluation(what, pairs, figures, newcomers, (*notes, *filter(None, dict.fromkeys(small))))
