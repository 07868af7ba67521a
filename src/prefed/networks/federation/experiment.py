"""A federation's experiment: as the hub loads it, and as a site completes it with its data and model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefed.config import ConfigError, Experiment, to_toml
from prefed.config.file import make_absolute, override, parse_toml, read_toml
from prefed.config.table import load_cell
from prefed.core import files
from prefed.data import ClientSizes, DataMismatchError, FederatedDataset
from prefed.engines import Job, JobFactory
from prefed.networks.federation.config import OWN_DATA, SiteConfig
from prefed.runs.build import assemble_job, build_data, build_trainers

HELD = "held by the sites"
"""The source of an experiment whose file names none."""


def load_federated(file: Path, cell: str | None, overrides: Sequence[str]) -> Experiment:
    """Read an experiment file in which ``[data]`` may lack sources and a partition: the sites have them.

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
        raise ConfigError(f"{file}: data is no table")
    if "train" not in data:
        data["train"] = HELD
        data.setdefault("partition", {"by": "iid", "clients": 1})
    return Experiment.from_tables(tables, str(file), origins)


def with_real_clients(experiment: Experiment) -> Experiment:
    """The experiment where clients are real: if it has noise, that is the operating system's.

    Raises:
        ConfigError: it takes the seed for a secret, which hub and sites know, or has clients send what only
            a simulation may.
    """
    if getattr(experiment.method.settings, "posterior_noise", 0):
        raise ConfigError(
            "[method] posterior_noise is drawn from the seed, which hub and sites know, so it hides nothing: "
            "remove it; [privacy] kind = 'local' covers posteriors too"
        )
    if getattr(experiment.method.settings, "trust_start", "uniform") == "sizes":
        raise ConfigError(
            "[method] trust_start = 'sizes' needs all clients' numbers of pairs, which a site does not have: "
            "remove it"
        )
    if experiment.evaluate.diagnose is not None:
        raise ConfigError(
            "[evaluate] diagnose has clients send gradients over a few of their pairs, which is for "
            "simulations: remove it"
        )
    if experiment.privacy.secret_cohorts:
        raise ConfigError(
            "[privacy] secret_cohorts: every site sees models and knows the seed, from which cohorts are "
            "drawn: remove it"
        )
    try:
        return experiment.model_copy(update={"privacy": experiment.privacy.federated()})
    except ValueError as error:
        raise ConfigError(str(error)) from error


WHERE = "the hub's experiment with this site's data and model"


def own_experiment(text: str, config: SiteConfig) -> Experiment:
    """The hub's experiment, with this site's data, model and threads.

    Nothing that the hub names is read from this machine's disk, and no model of its choice is loaded.

    Raises:
        ConfigError: together they are no valid experiment, or the hub asks for what a federation has not.
    """
    tables = parse_toml(text, "the hub's experiment")
    for table in ("fleet", "graph", "align", "stop"):
        if table in tables:
            raise ConfigError(f"[{table}] is not for a federation: remove it")
    data = {key: value for key, value in _table(tables, "data").items() if key not in OWN_DATA}
    model = {**_table(tables, "model"), "name": config.model.name}
    if config.model.device is not None:
        model["device"] = config.model.device
    model.pop("revision", None)
    if config.model.revision is not None:
        model["revision"] = config.model.revision
    method = _table(tables, "method")
    method.pop("reward_model", None)
    if method.get("objective") == "ppo":
        if config.model.reward_model is None:
            raise ConfigError("ppo needs a reward model: name it in this site's [model] reward_model")
        method["reward_model"] = config.model.reward_model
    engine = {**_table(tables, "engine"), "name": "local", "workers": 0}
    engine.pop("ray", None)
    if config.threads is not None:
        engine["threads"] = config.threads
    own = {"data": {**data, **config.data}, "model": model, "method": method, "engine": engine}
    return with_real_clients(Experiment.from_tables({**tables, **own}, WHERE))


def begun_experiment(order: Mapping[str, Any], config: SiteConfig) -> Experiment:
    """The experiment of a run that has started, as the site keeps it: it names the clients that never train.

    Raises:
        ConfigError: as :func:`own_experiment`.
    """
    experiment = own_experiment(order["experiment"], config)
    unseen = {"evaluate": experiment.evaluate.model_copy(update={"unseen": order["unseen"]})}
    return experiment.model_copy(update=unseen)


def _table(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"the hub's experiment: {name} is no table")
    return dict(table)


def own_dataset(experiment: Experiment, folder: Path) -> FederatedDataset:
    """The site's pairs as tokens, in a folder that keeps them for the next run too."""
    files.private_folder(folder)
    try:
        return build_data(experiment, folder / "data")
    except DataMismatchError as error:
        # Another run's settings, or other data: each run checks the fingerprint that it started with.
        name = error.inputs
    files.private_folder(folder / name)
    return build_data(experiment, folder / name / "data")


def told_names(dataset: FederatedDataset, config: SiteConfig, secret: bytes) -> dict[str, str]:
    """Each client's own name → the name that the hub knows it by."""
    if config.tell.names:
        return {name: name for name in dataset.clients}
    return {
        name: f"{config.name}-{hashlib.blake2b(name.encode(), key=secret, digest_size=6).hexdigest()}"
        for name in dataset.clients
    }


def member_dataset(
    dataset: FederatedDataset, names: Mapping[str, str], members: Sequence[str], least: int
) -> FederatedDataset:
    """``dataset`` under the names that the hub knows, among the names of all members of the federation.

    How many pairs the others have is nobody's business: each counts as one that trains, and has as many pairs
    to be evaluated on as a figure needs.

    Args:
        least: ``[privacy] minimum_pairs``.
    """
    some = max(1, least)
    clients = {told: replace(dataset.clients[name], id=told) for name, told in names.items()}
    own = {told: dataset.sizes[name] for name, told in names.items()}
    strangers = {name: ClientSizes(1, some, some) for name in members}
    return replace(dataset, clients=clients, sizes={**strangers, **own})


def site_factory(
    experiment: Experiment, folder: Path, names: Mapping[str, str], members: Sequence[str]
) -> JobFactory:
    """How the process that trains builds a site's job.

    Args:
        folder: of the site's tokens.
        names: from :func:`told_names`.
        members: all clients of the federation.
    """
    order = {
        "experiment": to_toml(experiment),
        "folder": str(folder.resolve()),
        "names": dict(names),
        "members": list(members),
    }
    return JobFactory("prefed.networks.federation.experiment:build_site_job", json.dumps(order))


def build_site_job(arguments: str) -> Job:
    """Build a site's job, in the process that trains; see :func:`site_factory`."""
    from prefed.models.quiet_libraries import silence_transformers

    silence_transformers()
    order = json.loads(arguments)
    experiment = Experiment.parse(order["experiment"])
    folder = Path(order["folder"])
    dataset = own_dataset(experiment, folder)
    least = experiment.privacy.minimum_pairs
    among = member_dataset(dataset, order["names"], order["members"], least)
    trainers = build_trainers(experiment, among, folder / "reference")
    return assemble_job(experiment, trainers)
