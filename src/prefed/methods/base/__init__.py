"""What method files are written with: the usual moves of a round, settings, schedules, offline PPO."""

from prefed.methods.base.fedavg import FedAvgBase
from prefed.methods.base.neighbours import to_neighbours
from prefed.methods.base.ppo import VALUE, BaselineSettings, lora_parts
from prefed.methods.base.selector import ClusterSettings, Selectors, SelectorSettings
from prefed.methods.base.settings import LocalSettings, PersonalSettings, TrainingSettings, TwoPhaseSettings

__all__ = [
    "VALUE",
    "BaselineSettings",
    "ClusterSettings",
    "FedAvgBase",
    "LocalSettings",
    "PersonalSettings",
    "SelectorSettings",
    "Selectors",
    "TrainingSettings",
    "TwoPhaseSettings",
    "lora_parts",
    "to_neighbours",
]
