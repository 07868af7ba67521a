"""Centralised DPO: all pairs in one place, the reference point that federations are measured against.

DPO (Rafailov et al. 2023, arXiv:2305.18290), eq. 7, on the pooled pairs; a round is one local visit to
the pool, so that its rounds and steps are counted as a federation's are.
"""

from __future__ import annotations

from prefed.core import ClientTrainer, Download, Exchange, Layout, Method, State, Upload
from prefed.merge import Aggregator, MergeConfig
from prefed.methods.base.fedavg import FedAvgBase, LocalSettings, lora_only

__all__ = ["SOURCE", "Settings", "build", "needs"]

SOURCE = "DPO (arXiv:2305.18290), eq. 7, on pooled data"


class Settings(LocalSettings):
    """Settings of centralised DPO."""


needs = lora_only


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """Centralised DPO over ``layout``. The mean of one upload is that upload: ``aggregator`` has no say."""
    fedavg = FedAvgBase.of(settings, Aggregator(MergeConfig(), layout, aggregator.scaling), rounds)

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        start = fedavg.start(trainer, private, download)
        trained = trainer.train(start, fedavg.phase(trainer, download))
        return fedavg.upload(trainer, trained), private

    train = Exchange("train", fedavg.send, work, fedavg.merge, figures=fedavg.figures)
    return fedavg.method("centralized", SOURCE, train, pooled=True)
