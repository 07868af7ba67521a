"""FedProx: FedDPO with a proximal term towards the received model (Li et al. 2020, arXiv:1812.06127).

Algorithm 2, in every round::

    server   samples a cohort S and broadcasts φ
    client   φ_i ← φ; local training on L_i(φ_i) + μ/2 ‖φ_i − φ‖²
    server   φ ← Σ_{i∈S} p_i φ_i
"""

from __future__ import annotations

from functools import partial

from pydantic import Field

from prefed.core import ClientTrainer, Download, Layout, Method, Proximal, State, Upload
from prefed.merge import Aggregator
from prefed.methods.base import FedAvgBase, LocalSettings, lora_parts

SOURCE = "FedProx (arXiv:1812.06127), algorithm 2"


class Settings(LocalSettings):
    """Settings of FedProx."""

    mu: float = Field(
        0.01, ge=0, description="strength of the pull towards the received model; 0 gives FedDPO"
    )


needs = lora_parts


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedProx over ``layout``."""
    fedavg = FedAvgBase.of(settings, aggregator, rounds)

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        received = fedavg.share(fedavg.start(trainer, private, download), trainer.round)
        pull = Proximal(settings.mu, to=received) if settings.mu else None
        return fedavg.work(trainer, private, download, proximal=pull)

    adapt = partial(fedavg.adapt, pull=settings.mu)
    return fedavg.method("fedprox", SOURCE, fedavg.exchange(work=work), adapt=adapt)
