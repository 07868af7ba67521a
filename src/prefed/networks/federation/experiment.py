"""The experiment of a federation, whose file may leave out what the sites have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefed.config import ConfigError, Experiment
from prefed.config.file import make_absolute, override, read_toml
from prefed.config.table import load_cell

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
            "leave it out; [privacy] kind = 'local' covers posteriors too"
        )
    if getattr(experiment.method.settings, "trust_start", "uniform") == "sizes":
        raise ConfigError(
            "[method] trust_start = 'sizes' needs all clients' numbers of pairs, which a site does not have: "
            "leave it out"
        )
    if experiment.evaluate.diagnose is not None:
        raise ConfigError(
            "[evaluate] diagnose has clients send gradients over a few of their pairs, which is for "
            "simulations: leave it out"
        )
    if experiment.privacy.secret_cohorts:
        raise ConfigError(
            "[privacy] secret_cohorts: every site sees models and knows the seed, from which cohorts are "
            "drawn: leave it out"
        )
    try:
        return experiment.model_copy(update={"privacy": experiment.privacy.federated()})
    except ValueError as error:
        raise ConfigError(str(error)) from error
