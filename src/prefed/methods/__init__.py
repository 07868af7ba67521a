"""The methods, one file each, and their registry."""

from prefed.methods.base import LocalSettings, TrainingSettings, to_neighbours
from prefed.methods.registry import METHODS, MethodKind

__all__ = ["METHODS", "LocalSettings", "MethodKind", "TrainingSettings", "to_neighbours"]
