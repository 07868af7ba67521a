"""The experiment file: typed records, their errors, and files to begin with."""

from prefed.config.align import AlignConfig
from prefed.config.cluster import RayConfig
from prefed.config.errors import ConfigError
from prefed.config.experiment import (
    CohortConfig,
    EngineConfig,
    EvaluateConfig,
    Experiment,
    MethodConfig,
    method_kind,
    to_toml,
)

__all__ = [
    "AlignConfig",
    "CohortConfig",
    "ConfigError",
    "EngineConfig",
    "EvaluateConfig",
    "Experiment",
    "MethodConfig",
    "RayConfig",
    "method_kind",
    "to_toml",
]
