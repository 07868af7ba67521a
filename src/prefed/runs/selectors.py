"""The selectors of a run."""

from __future__ import annotations

from collections.abc import Iterator

from prefed.align import Selectors
from prefed.methods import METHODS
from prefed.methods.base.tastes import Z
from prefed.runs.build import response_encoder
from prefed.runs.loaded import LoadedRun
from prefed.runs.record import RunError, RunRecord
from prefed.runs.tastes import told_taste


def check_selectors(record: RunRecord) -> None:
    """Refuse a run without selectors.

    Raises:
        RunError: its method trains none.
    """
    if METHODS[record.method].reads != "choice":
        named = " or ".join(name for name, kind in METHODS.items() if kind.reads == "choice")
        raise RunError(
            f"{record.path}: {record.method} trains no selectors, and without one nobody labels completions; "
            f"run {named} on these clients, and align with that run"
        )


def selectors_of(run: LoadedRun, taste: str | None = None) -> Selectors:
    """The selectors that a run published last.

    Args:
        taste: whose taste they judge with, as :func:`prefed.runs.tastes.told_taste` takes it; ``None``
            for the published one, or where they have none.

    Raises:
        RunError: the server knows no such taste.
    """
    # Every client gets all selectors, so anyone's message will do.
    published = run.method.publish(run.server, run.job.members[0])
    models = run.job.shared_models(published)
    if taste is not None:
        z = told_taste(run, taste)
        models = {name: model.replace({Z: z}) for name, model in models.items()}
    return Selectors(
        run.backbone,
        models,
        run.experiment.selector,
        run.experiment.data.max_length,
        run.experiment.engine.max_tokens,
        run.experiment.model.fast,
        response_encoder(run.experiment, run.backbone),
    )


def untrained(run: LoadedRun) -> Iterator[str]:
    """The names of those selectors that are as they were before the first round."""
    start = run.method.init_server(run.trainers.initial)
    models = run.job.shared_models(run.method.publish(start, run.job.members[0]))
    return (name for name, model in run.published_models.items() if model.equal(models[name]))
