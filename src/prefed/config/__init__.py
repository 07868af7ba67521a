"""The experiment file: typed settings and their validation errors."""

from prefed.config.align import AlignConfig, EndpointConfig, JudgeConfig, RefreshConfig
from prefed.config.experiment import Experiment, to_toml
from prefed.config.settings import (
    EngineConfig,
    MethodConfig,
    RayConfig,
    ReportConfig,
    TrackConfig,
    method_kind,
)
from prefed.core.strict_settings import ConfigError
from prefed.engines.config import CohortConfig, EvaluateConfig, StopConfig
from prefed.store import CheckpointConfig

__all__ = [
    "AlignConfig",
    "CheckpointConfig",
    "CohortConfig",
    "ConfigError",
    "EndpointConfig",
    "EngineConfig",
    "EvaluateConfig",
    "Experiment",
    "JudgeConfig",
    "MethodConfig",
    "RayConfig",
    "RefreshConfig",
    "ReportConfig",
    "StopConfig",
    "TrackConfig",
    "method_kind",
    "to_toml",
]
