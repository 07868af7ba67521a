"""Building blocks of methods: the steps of a FedAvg round, settings, learning-rate schedules, selectors."""

from typing import TYPE_CHECKING

from prefed.core.lazy import attach

if TYPE_CHECKING:
    from prefed.methods.base.fedavg import FedAvgBase, to_neighbours
    from prefed.methods.base.ranks import with_ranks
    from prefed.methods.base.selector import Selectors
    from prefed.methods.base.settings import (
        VALUE,
        BaselineSettings,
        ClusterSettings,
        LocalSettings,
        PersonalSettings,
        SelectorSettings,
        TrainingSettings,
        TwoPhaseSettings,
        lora_parts,
    )

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
    "with_ranks",
]

attach(__name__, __file__)
