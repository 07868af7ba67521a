"""The experiment file: typed records, their errors, and files to begin with."""

from prefed.config.errors import ConfigError
from prefed.config.experiment import (
    FREE,
    CohortConfig,
    EngineConfig,
    EvaluateConfig,
    Experiment,
    MethodConfig,
    load,
    method_kind,
    to_toml,
)

__all__ = [
    "FREE",
    "CohortConfig",
    "ConfigError",
    "EngineConfig",
    "EvaluateConfig",
    "Experiment",
    "MethodConfig",
    "load",
    "method_kind",
    "to_toml",
]
