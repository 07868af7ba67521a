"""Local only: each client trains its own model on its own pairs, and nothing travels.

DPO (Rafailov et al. 2023, arXiv:2305.18290), eq. 7, on one client's pairs: the reference point that
taking part in a federation has to beat. All tensors are personal; only the mean training loss is
reported.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefed.core import ClientTrainer, Download, Exchange, Layout, Method, Round, State, Tensors, Upload
from prefed.merge import Aggregator
from prefed.methods.base import schedule
from prefed.methods.base.fedavg import FedAvgBase, LocalSettings, lora_only

__all__ = ["SOURCE", "Settings", "build", "needs"]

SOURCE = "DPO (arXiv:2305.18290), eq. 7, on each client alone"


class Settings(LocalSettings):
    """Settings of training alone."""


needs = lora_only


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """Training alone over ``layout``. There is nothing to merge, so ``aggregator`` has no say."""
    fedavg = FedAvgBase.of(settings, aggregator, rounds, personal=lambda entry: True)

    def init_server(initial: Tensors) -> State:
        return State({}, schedule.begin(settings))

    def send(server: State, client: str) -> Download:
        return Download({}, schedule.announce(server))

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        start = fedavg.start(trainer, private, download)
        trained = trainer.train(start, fedavg.phase(trainer, download))
        return trainer.upload({}, {"loss": trained.loss}), fedavg.keep(private, trained.tensors)

    def merge(server: State, uploads: Sequence[Upload], now: Round) -> State:
        return fedavg.advance(server, uploads)

    def publish(server: State, client: str) -> Download:
        return Download()

    def nothing(client: str, now: Round) -> dict[str, Layout]:
        return {}

    train = Exchange("train", send, work, merge, groups=nothing, figures=schedule.announce)
    return fedavg.method("local", SOURCE, train, init_server=init_server, publish=publish)
