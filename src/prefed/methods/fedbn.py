"""FedBN: averaging that leaves each client its own norms (Li et al. 2021, arXiv:2102.07623).

Algorithm 1, in every round, with the affine parameters of all norms as v_i::

    server   samples a cohort S and broadcasts the LoRA φ
    client   φ_i ← φ; takes up its own norms v_i; trains both together
    server   φ ← Σ_{i∈S} p_i φ_i;  v_i stays with the client
"""

from __future__ import annotations

from prefed.core import ClientTrainer, Download, Exchange, Layout, Method, State, Upload
from prefed.merge import Aggregator, lora
from prefed.methods.base.fedavg import FedAvgBase, LocalSettings
from prefed.methods.base.settings import PersonalSettings

__all__ = ["SOURCE", "Settings", "build", "needs"]

SOURCE = "FedBN (arXiv:2102.07623), algorithm 1"


class Settings(PersonalSettings, LocalSettings):
    """Settings of FedBN."""


def needs(settings: Settings) -> frozenset[str]:
    """The LoRA and the norms."""
    return frozenset({lora.LORA, "norm"})


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedBN over ``layout``."""
    fedavg = FedAvgBase.of(settings, aggregator, rounds, personal=lambda entry: entry.part == "norm")

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        start = fedavg.start(trainer, private, download)
        trained = trainer.train(start, fedavg.phase(trainer, download))
        return fedavg.upload(trainer, trained), fedavg.keep(private, trained.tensors)

    return fedavg.method(
        "fedbn", SOURCE, Exchange("train", fedavg.send, work, fedavg.merge, figures=fedavg.figures)
    )
