"""Centralised DPO: training on the pooled pairs of all clients, as a baseline.

DPO (Rafailov et al. 2023, arXiv:2305.18290), eq. 7. A round is one visit to the pool, so that rounds and
steps are comparable with those of federated methods.
"""

from __future__ import annotations

from prefed.core import Layout, Method
from prefed.merge import Aggregator, MergeConfig
from prefed.methods.base import FedAvgBase, LocalSettings, lora_parts

SOURCE = "DPO (arXiv:2305.18290), eq. 7, on pooled data"
NO_NOISE = "it pools all pairs, so there is no client to protect"


class Settings(LocalSettings):
    """Settings of centralised DPO."""


needs = lora_parts


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """Centralised DPO over ``layout``, regardless of the merge rule."""
    fedavg = FedAvgBase.of(settings, Aggregator(MergeConfig(), layout, aggregator.scaling), rounds)
    return fedavg.method(
        "centralized", SOURCE, fedavg.exchange(late=fedavg.late(averages=False)), pooled=True
    )
