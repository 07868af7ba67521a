"""How another process, of this machine or of another one, builds the job of a run."""

from __future__ import annotations

import json
from pathlib import Path

from prefed.config import Experiment, to_toml
from prefed.config.file import parse_toml
from prefed.core.strict import flatten
from prefed.data import FederatedDataset
from prefed.engines import Job, JobFactory
from prefed.runs.build import assemble_job, build_job, build_trainers

DATA, REFERENCE = "data", "reference"
_MODELS = ("model.name", "method.reward_model")
_FILES = ("fleet.trace", "graph.file")
"""Settings whose values are folders or files that a job is built from."""


def job_factory(experiment: Experiment, cache: Path) -> JobFactory:
    """How :func:`build_worker_job` is called for a run, and what another machine needs for that.

    Another machine gets the tokens of all pairs, and the model's folder unless ``[engine.ray] ship_model``
    says otherwise. It loads a model with a hub name from the hub.

    Args:
        cache: the folder in which :func:`~prefed.runs.build.build_job` has built the run's job.
    """
    # A worker sees no device but its own.
    engine = experiment.engine.model_copy(update={"devices": None})
    text = to_toml(experiment.model_copy(update={"engine": engine}))
    order = {"experiment": text, "folder": str(cache.resolve())}
    ray, settings = experiment.engine.ray, flatten(experiment.tables())
    names = _FILES if ray is not None and not ray.ship_model else (*_MODELS, *_FILES)
    paths = {name: Path(settings[name]) for name in names if name in settings}
    shipped = {name: path.resolve() for name, path in paths.items() if path.exists()}
    factory = "prefed.runs.worker_job:build_worker_job"
    return JobFactory(factory, json.dumps(order), {DATA: cache.resolve() / DATA, **shipped})


def build_worker_job(arguments: str, folder: Path | None = None) -> Job:
    """Build a run's job in another process.

    Args:
        arguments: its experiment and folder as JSON.
        folder: where this machine has copies of what :func:`job_factory` ships, and keeps the reference's
            log-probabilities; ``None`` if it has the run's own files.
    """
    from prefed.models.notices import silence_transformers

    silence_transformers()
    order = json.loads(arguments)
    if folder is None:
        return build_job(Experiment.parse(order["experiment"]), Path(order["folder"]))
    tables = parse_toml(order["experiment"], "the run's experiment")
    for name in (*_MODELS, *_FILES):
        table, _, key = name.partition(".")
        if (folder / name).exists():
            tables[table][key] = str(folder / name)
    experiment = Experiment.from_tables(tables, "the run's experiment")
    dataset = FederatedDataset.open(folder / DATA)
    return assemble_job(experiment, build_trainers(experiment, dataset, folder / REFERENCE))
