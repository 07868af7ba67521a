"""The experiment of a federation: how the hub loads it and how a site adds its own data and model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefed.config import ConfigError, Experiment, to_toml
from prefed.config.experiment_table import load_cell
from prefed.config.file import allow_code, make_absolute, override, parse_toml, read_toml
from prefed.core import files, plugins
from prefed.data import DataMismatchError, FederatedDataset
from prefed.engines import Job, JobFactory
from prefed.networks.federation.config import OWN_DATA, SiteConfig, SiteJudge
from prefed.runs.build import (
    answered_prompts,
    assemble_job,
    build_data,
    build_trainers,
    code_digests,
    parent_experiment,
)

HELD = "held by the sites"
"""The data source of an experiment that names none."""
NAMED = {"by": "column", "column": "client"}
"""Its partition if it leaves out clients, who have names only then."""


def load_federated(file: Path, cell: str | None, overrides: Sequence[str]) -> Experiment:
    """Read an experiment file. Its ``[data]`` may omit sources and partition, which the sites set.

    Raises:
        ConfigError: as :meth:`prefed.Experiment.load`.
    """
    if cell is not None:
        return load_cell(file, cell, list(overrides))
    tables = read_toml(file)
    make_absolute(tables, (file.parent, Path()))
    origins = override(tables, overrides, file.parent)
    data = tables.setdefault("data", {})
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: data must be a table")
    if "train" not in data:
        data["train"] = HELD
        data.setdefault("partition", NAMED if data.get("exclude") else {"by": "iid", "clients": 1})
    allow_code(tables, file)
    return Experiment.from_tables(tables, str(file), origins)


def with_real_clients(experiment: Experiment) -> Experiment:
    """The experiment for real clients: privacy noise comes from the operating system, not from the seed.

    Raises:
        ConfigError: a setting relies on a secret seed, or makes clients send more than is private.
    """
    if getattr(experiment.method.settings, "posterior_noise", 0):
        raise ConfigError(
            "[method] posterior_noise is drawn from the seed, which hub and sites know, so it protects "
            "nothing: use [privacy] kind = 'local' instead, which also covers posteriors"
        )
    if getattr(experiment.method.settings, "trust_start", "uniform") == "sizes":
        raise ConfigError(
            "[method] trust_start = 'sizes' needs the number of pairs of all clients, which a site does not "
            "know: remove it"
        )
    if experiment.evaluate.diagnose is not None:
        raise ConfigError(
            "[evaluate] diagnose makes clients send gradients of a few pairs, so it is only for "
            "simulations: remove it"
        )
    if experiment.privacy.secret_cohorts:
        raise ConfigError(
            "[privacy] secret_cohorts: cohorts are drawn from the seed, which every site knows: remove it"
        )
    try:
        return experiment.model_copy(update={"privacy": experiment.privacy.federated()})
    except ValueError as error:
        raise ConfigError(str(error)) from error


WHERE = "the hub's experiment with this site's data and model"


def own_experiment(text: str, config: SiteConfig, withdrawn: Collection[str] = ()) -> Experiment:
    """The hub's experiment with this site's data, model and threads.

    No path and no model that the hub names is read on this machine, and no code from outside prefed is used
    except what ``[limits] code`` names.

    Args:
        withdrawn: clients of the site that no run has any more.

    Raises:
        ConfigError: the result is not a valid experiment, or the hub uses a table that a federation does not
            support.
    """
    tables = parse_toml(text, "the hub's experiment")
    for table in ("fleet", "graph", "align", "stop"):
        if table in tables:
            raise ConfigError(f"[{table}] is not available in a federation: remove it")
    data = {key: value for key, value in _table(tables, "data").items() if key not in OWN_DATA}
    if withdrawn and isinstance(exclude := data.get("exclude", []), list):
        data["exclude"] = [*exclude, *sorted({*withdrawn} - {*map(str, exclude)})]
    if config.data.get("partition", {}).get("by", "source") not in ("column", "source", "file"):
        data.pop("exclude", None)  # the site draws its clients, who are nobody in particular
    model = {**_table(tables, "model"), "name": config.model.name}
    if config.model.device is not None:
        model["device"] = config.model.device
    for name in ("revision", "kernels"):
        model.pop(name, None)
    if config.model.revision is not None:
        model["revision"] = config.model.revision
    method = _table(tables, "method")
    method.pop("reward_model", None)
    if method.get("objective") == "ppo":
        if config.model.reward_model is None:
            raise ConfigError("ppo needs a reward model: set reward_model in this site's [model]")
        method["reward_model"] = config.model.reward_model
    engine = {**_table(tables, "engine"), "name": "local", "workers": 0, "stack": 1}
    engine.pop("ray", None)
    if config.threads is not None:
        engine["threads"] = config.threads
    own = {"data": {**data, **config.data}, "model": model, "method": method, "engine": engine}
    tables, allowed = {**tables, **own}, config.limits.code
    with plugins.only(allowed):
        allow_code(tables, allow=lambda name: plugins.allow(name) if name in allowed else None)
        return with_real_clients(Experiment.from_tables(tables, WHERE))


def check_code(experiment: Experiment, hub: Mapping[str, Mapping[str, str]]) -> None:
    """Check that this site's code from outside prefed is the hub's.

    Args:
        experiment: from :func:`own_experiment`.
        hub: name → :meth:`~prefed.core.plugins.Code.record` at the hub.

    Raises:
        ConfigError: the Python files differ.
    """
    for name, code in experiment.code().items():
        theirs, ours = hub.get(name), code.record()
        if theirs is not None and theirs.get("sha256") != ours["sha256"]:
            different = " and ".join(
                f"{who} {each.get('version') or 'without a version'} (SHA-256 {each.get('sha256')})"
                for who, each in (("the hub has", theirs), ("this site", ours))
            )
            raise ConfigError(
                f"{name} from {code.place}: {different}: install the same version at hub and site, and "
                "restart the site"
            )


def started_experiment(
    order: Mapping[str, Any], config: SiteConfig, withdrawn: Collection[str] = ()
) -> Experiment:
    """The site's experiment for a started run, including which clients never train.

    Raises:
        ConfigError: as :func:`own_experiment` and :func:`check_code`.
    """
    experiment = own_experiment(order["experiment"], config, withdrawn)
    check_code(experiment, order.get("code", {}))
    unseen = {"evaluate": experiment.evaluate.model_copy(update={"unseen": order["unseen"]})}
    return experiment.model_copy(update=unseen)


def _table(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"the hub's experiment: {name} must be a table")
    return dict(table)


def own_dataset(experiment: Experiment, folder: Path) -> FederatedDataset:
    """The tokenised pairs of the site, cached in ``folder`` for later runs."""
    files.private_folder(folder)
    try:
        return build_data(experiment, folder / "data")
    except DataMismatchError as error:
        # The cache is of other settings or data. Each run checks the fingerprint that it started with.
        name = error.inputs
    files.private_folder(folder / name)
    return build_data(experiment, folder / name / "data")


def reported_names(dataset: FederatedDataset, config: SiteConfig, secret: bytes) -> dict[str, str]:
    """Client → the name reported to the hub, which is a pseudonym under ``[disclose] names = false``."""
    if config.disclose.names:
        return {name: name for name in dataset.clients}
    return {
        name: f"{config.name}-{hashlib.blake2b(name.encode(), key=secret, digest_size=6).hexdigest()}"
        for name in dataset.clients
    }


def site_factory(
    experiment: Experiment,
    folder: Path,
    run: Path,
    names: Mapping[str, str],
    members: Sequence[str],
    judge: SiteJudge | None = None,
) -> JobFactory:
    """The factory with which the training process builds a site's job.

    Args:
        folder: the cache.
        run: the run's folder, in which clients' models answer prompts.
    """
    order = {
        "experiment": to_toml(experiment),
        "code": code_digests(experiment),
        "folder": str(folder.resolve()),
        "run": str(run.resolve()),
        "names": dict(names),
        "members": list(members),
        "judge": judge and judge.model_dump(),
    }
    return JobFactory("prefed.networks.federation.experiment:build_site_job", json.dumps(order))


def build_site_job(arguments: str) -> Job:
    """Build a site's job in the training process; see :func:`site_factory`."""
    order = json.loads(arguments)
    tables = parse_toml(order["experiment"], WHERE)
    experiment = parent_experiment(tables, order["code"])  # checked by the site
    folder = Path(order["folder"])
    dataset = own_dataset(experiment, folder)
    # The others' clients have enough held-out pairs to be evaluated.
    least = max(1, experiment.privacy.minimum_pairs)
    among = dataset.renamed(order["names"]).among(order["members"], least)
    trainers = build_trainers(experiment, among, folder / "reference")
    job, run = assemble_job(experiment, trainers), Path(order["run"])
    if order["judge"]:
        from prefed.networks.federation.judging import SiteJudges

        judge = SiteJudge.model_validate(order["judge"])
        job = replace(job, judges=SiteJudges(judge, dataset, order["names"], run))
    if not answered_prompts(experiment, trainers.backbone.tokenizer):
        return job
    from prefed.runs.answers import SiteAnswers

    return replace(job, answers=SiteAnswers(experiment, job, run))
