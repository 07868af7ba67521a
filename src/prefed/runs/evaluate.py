"""Evaluate the models of a finished run on the clients' own pairs, or on those of another file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from prefed.core.text import pluralize
from prefed.engines.tasks import Score, evaluate_client, evaluate_newcomer, pair_figures
from prefed.runs.finished_run import RunError
from prefed.runs.loaded_run import EVERYBODY, LoadedRun, read_pairs
from prefed.runs.tastes import OWN, is_one_taste, split_taste
from prefed.train.forward_passes import check_lengths
from prefed.train.metrics import FederatedMetric, federated_metrics, not_finite_counts
from prefed.train.metrics.run_warnings import divergence_warning, small_clients_note
from prefed.train.pair_cache import Rows

Progress = Callable[[int, int], None]
"""Called with the number of evaluated clients, and of all clients."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        what: the evaluated pairs, e.g. ``"test pairs"``.
        pairs: client → number of evaluated pairs.
        figures: name of a metric, as in :func:`prefed.engines.tasks.evaluate_client`, → values over
            clients.
        unseen: number of local steps → preference accuracy of the clients that never took part; the key is
            ``pairs/K`` if their tastes were inferred from K pairs, and ``taste`` if that is set.
        unseen_selectors: accuracy of each selector and of their majority on the pairs of these clients.
        notes: for the reader, one sentence each.
        taste: the taste that was set with :func:`prefed.runs.tastes.at_taste`.
    """

    what: str
    pairs: Mapping[str, int]
    figures: Mapping[str, FederatedMetric]
    unseen: Mapping[str, FederatedMetric]
    notes: tuple[str, ...] = ()
    unseen_selectors: Mapping[str, FederatedMetric] = field(default_factory=dict)
    taste: str | None = None

    def plain(self) -> dict[str, Any]:
        """Convert to JSON values; accuracies have the same shape as in ``summary.json``."""
        return {
            "pairs": self.what,
            **({} if self.taste is None else {"taste": self.taste}),
            **self.figures,
            **({"unseen_accuracy": self.unseen} if self.unseen else {}),
            **({"unseen_selectors": self.unseen_selectors} if self.unseen_selectors else {}),
            "clients": {client: {"pairs": count} for client, count in self.pairs.items()},
            "notes": list(self.notes),
        }


def evaluate(
    run: LoadedRun,
    split: Literal["train", "validation", "test"] = "test",
    clients: Sequence[str] | None = None,
    progress: Progress = lambda done, of: None,
) -> Evaluation:
    """Evaluate the model of every client on its own pairs.

    For the split and the clients that the run evaluated, the results equal those in ``summary.json``.

    Args:
        run: loaded with its data.

    Raises:
        RunError: there is no such client.
        ValueError: no client has enough pairs in the split (at least 1, and ``[privacy] minimum_pairs``).
    """
    everybody = run.job.evaluate.model_copy(update={"split": split, "clients": None})
    job = replace(run.job, evaluate=everybody)
    names = [run.check(client) for client in clients] if clients else list(run.clients)
    with_pairs = {*job.evaluation_clients, *job.newcomers}
    evaluated = [client for client in names if client in with_pairs]
    if not evaluated:
        raise ValueError(f"{run.record.path}: no pairs of {', '.join(names)} in the {split} split")
    figures: dict[str, dict[str, float]] = {}
    unseen: dict[str, dict[str, float]] = {}
    last = run.reader.commit.round
    for done, client in enumerate(evaluated, 1):
        published = run.published(client)
        if client in job.unseen and run.taste is None:
            unseen[client] = evaluate_newcomer(job, client, published, last)
        else:
            own = evaluate_client(job, client, run.private_state(client), published, last)
            if client in job.unseen:
                unseen[client] = {str(run.taste): own["preference_accuracy"]}
            else:
                figures[client] = own
        progress(done, len(evaluated))
    notes = _too_few_pairs(run, evaluated)
    if split == "train" and _uses_labels_of(run, evaluated):
        notes.append(
            "the taste was inferred from training pairs of these clients: the metrics do not measure "
            "generalisation"
        )
    if len(evaluated) < len(names):
        skipped = pluralize(len(names) - len(evaluated), "client has", "clients have")
        notes.append(f"{skipped} no pairs in the {split} split")
    pairs = {client: getattr(run.trainers.clients[client], split) for client in evaluated}
    return _over_clients(run, f"{split} pairs", pairs, figures, unseen, notes)


def evaluate_file(
    run: LoadedRun,
    file: str,
    clients: Sequence[str] | None = None,
    *,
    everyone: bool = False,
    progress: Progress = lambda done, of: None,
) -> Evaluation:
    """Evaluate the models of a run on the pairs of another file, read with the run's ``[data]`` settings.

    If clients come from a column or from files, each client is evaluated on its own rows. Otherwise, or with
    ``everyone``, each is evaluated on all rows. If all clients have the same model and the same taste, it is
    evaluated once, under the name ``"everybody"``.

    Args:
        file: a file, a folder of files or a hub name.
        everyone: evaluate each client on all rows.

    Raises:
        RunError: there is no such client.
        DataError: the file cannot be used, or no row belongs to a client of the run.
        ValueError: no client is evaluated on at least ``[privacy] minimum_pairs`` pairs.
        ModelError: a pair exceeds the context of the model.
    """
    names = [run.check(client) for client in clients] if clients else None
    with tempfile.TemporaryDirectory(prefix="prefed-pairs-") as folder:
        new = read_pairs(run, file, Path(folder), everyone=everyone)
        # In a method with tastes, only the taste is personal.
        one_taste = is_one_taste(run.taste)
        personal = run.method.personal and not one_taste
        if personal and run.record.sites:
            _check_here(run)
        own_models = personal or bool(run.job.jury) or run.job.graph is not None
        rows, common = dict(new.rows), new.common and not (own_models or names)
        if new.common and not common:
            participants = [client for client in run.clients if client not in run.job.unseen]
            rows = dict.fromkeys(names or participants, rows[EVERYBODY])
        elif names:
            rows = {client: rows[client] for client in names if client in rows}
        if not rows:
            raise ValueError(f"{file}: no row belongs to {', '.join(names or ())}")
        check_lengths(run.backbone, new.tokens)
        pair_trainer = run.pair_trainer(new.tokens)

        def scorer(client: str, own: Rows) -> Score:
            return lambda model: pair_trainer.score(model, own, run.trainers.examples(client, model))

        figures: dict[str, dict[str, float]] = {}
        for client, own in rows.items():
            score = scorer(client, own)
            if common and not one_taste:
                figures[client] = pair_figures(run.job, score(run.published_model))
            else:
                name = run.clients[0] if common else client
                # Sites store the private states of their clients; a common taste needs none.
                first = one_taste and run.record.sites
                private = run.first_state(name) if first else run.private_state(name)
                published, last = run.published(name), run.reader.commit.round
                figures[client] = evaluate_client(run.job, name, private, published, last, score)
            progress(len(figures), len(rows))
    pairs = {client: len(own) for client, own in rows.items()}
    notes = [*new.notes, *_too_few_pairs(run, [] if common else [*rows])]
    return _over_clients(run, f"pairs of {file}", pairs, figures, {}, notes)


def _check_here(run: LoadedRun) -> None:
    """Check that personal models can be assembled here, and not only at the sites of a federation."""
    try:
        run.check_whole(run.clients[0])
    except RunError as error:
        if run.method.tastes:
            raise RunError(f"{error}; or use --taste population or --taste CLIENT here") from error
        raise


def _too_few_pairs(run: LoadedRun, judged: Sequence[str]) -> list[str]:
    """Return a note if clients have fewer training pairs than their taste should be inferred from."""
    if run.taste is None:
        return []
    kind, which = (OWN, "") if run.taste == OWN else split_taste(run.taste)
    asked = int(which) if kind == "pairs" else 1
    inferred_from = {OWN: judged, "pairs": judged, "client": [which]}.get(kind, [])
    sizes = {client: run.trainers.clients[client].train for client in inferred_from}
    few = {client: size for client, size in sizes.items() if size < asked}
    if not few:
        return []
    first, asked_for = min(few), pluralize(asked, "pair", "pairs")
    more = f", and {pluralize(len(few) - 1, 'more has', 'more have')} too few" if len(few) > 1 else ""
    none = "; a client without pairs has the taste of the population" if 0 in few.values() else ""
    return [f"taste {run.taste}: {asked_for} requested, client {first!r} has {few[first]:,}{more}{none}"]


def _uses_labels_of(run: LoadedRun, judged: Sequence[str]) -> bool:
    """Whether a taste used for ``judged`` was inferred from training pairs of one of them."""
    if not run.method.tastes:
        return False
    members = not set(judged) <= set(run.job.unseen)
    if run.taste is None:
        return members or any(run.job.newcomer_figures.values())
    if run.taste == OWN:
        return True
    kind, which = split_taste(run.taste)
    return {"pairs": True, "population": members, "client": which in judged}.get(kind, False)


def _over_clients(
    run: LoadedRun,
    what: str,
    pairs: Mapping[str, int],
    figures: Mapping[str, Mapping[str, float]],
    unseen: Mapping[str, Mapping[str, float]],
    notes: Sequence[str],
) -> Evaluation:
    """Aggregate metrics over clients, and add notes on divergence and on clients that are not listed."""
    privacy, broken = run.experiment.privacy, not_finite_counts(figures)
    diverged = [divergence_warning(broken, pairs)] if broken else []
    seen, newcomers = (federated_metrics(table, pairs, privacy) for table in (figures, unseen))
    small = [small_clients_note(next(iter(over.values()))) for over in (seen, newcomers) if over]
    notes = [*notes, *diverged, *filter(None, dict.fromkeys(small))]
    rows = run.job.newcomer_figures if run.taste is None else (run.taste,)
    steps = {name: over for name, over in newcomers.items() if name in rows}
    selectors = {name: over for name, over in newcomers.items() if name not in steps}
    return Evaluation(what, pairs, seen, steps, tuple(notes), selectors, run.taste)
