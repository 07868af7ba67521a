"""The experiment file: typed records, their errors, and files to begin with."""

from prefed.config.align import AlignConfig
from prefed.config.cluster import RayConfig
from prefed.config.cohort import CohortConfig
from prefed.config.engine import EngineConfig
from prefed.config.errors import ConfigError
from prefed.config.evaluate import EvaluateConfig
from prefed.config.experiment import Experiment, to_toml
from prefed.config.method import MethodConfig, method_kind
from prefed.config.stop import StopConfig
from prefed.config.track import TrackConfig

__all__ = [
    "AlignConfig",
    "CohortConfig",
    "ConfigError",
    "EngineConfig",
    "EvaluateConfig",
    "Experiment",
    "MethodConfig",
    "RayConfig",
    "StopConfig",
    "TrackConfig",
    "method_kind",
    "to_toml",
]
