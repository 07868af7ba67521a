"""The methods, one file each, and the registry of them by name."""

from prefed.methods.base import LocalSettings, TrainingSettings, to_neighbours
from prefed.methods.registry import METHODS, MethodKind

__all__ = ["METHODS", "LocalSettings", "MethodKind", "TrainingSettings", "to_neighbours"]
