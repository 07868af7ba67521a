"""FedBN: federated averaging in which each client keeps its own norms (Li et al. 2021, arXiv:2102.07623).

Algorithm 1, in every round, with the affine parameters of all norms as v_i::

    server   samples a cohort S and broadcasts the LoRA φ
    client   φ_i ← φ; loads its own norms v_i; trains both together
    server   φ ← Σ_{i∈S} p_i φ_i;  v_i stays with the client
"""

from __future__ import annotations

from prefed.core import Layout, Method
from prefed.merge import Aggregator
from prefed.methods.base import FedAvgBase, LocalSettings, PersonalSettings, lora_parts

SOURCE = "FedBN (arXiv:2102.07623), algorithm 1"


class Settings(PersonalSettings, LocalSettings):
    """Settings of FedBN."""


def needs(settings: Settings) -> frozenset[str]:
    """The LoRA and the norms."""
    return lora_parts(settings, "norm")


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedBN over ``layout``."""
    fedavg = FedAvgBase.of(settings, aggregator, rounds, personal=lambda entry: entry.part == "norm")
    return fedavg.method("fedbn", SOURCE, fedavg.exchange())
