"""Local training: each client trains its own model on its own pairs, as a baseline.

DPO (Rafailov et al. 2023, arXiv:2305.18290), eq. 7. All tensors are personal. Clients send only their mean
training loss.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefed.core import ClientTrainer, Download, Layout, Merged, Method, Round, State, Tensors, Upload
from prefed.merge import Aggregator
from prefed.methods.base import FedAvgBase, LocalSettings, lora_parts, lr_schedule

SOURCE = "DPO (arXiv:2305.18290), eq. 7, on each client alone"
NO_NOISE = "its clients send neither tensors nor, with a kind, losses"


class Settings(LocalSettings):
    """Settings of local training."""


needs = lora_parts


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """Local training over ``layout``, regardless of the merge rule."""
    fedavg = FedAvgBase.of(settings, aggregator, rounds, personal=lambda entry: True)

    def init_server(initial: Tensors) -> State:
        return State({}, lr_schedule.begin(settings))

    def send(server: State, client: str, now: Round) -> Download:
        return Download({}, lr_schedule.announce(server))

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        upload, state = fedavg.work(trainer, private, download)
        return trainer.upload({}, upload.scalars), state

    def merge(server: State, uploads: Sequence[Upload], now: Round) -> Merged:
        server = fedavg.advance(server, uploads)
        return server, lr_schedule.announce(server)

    def publish(server: State, client: str) -> Download:
        return Download()

    train = fedavg.exchange(
        send=send,
        work=work,
        merge=merge,
        groups=lambda client, now: {},
        late=fedavg.late(averages=False),
    )
    return fedavg.method("local", SOURCE, train, init_server=init_server, publish=publish)
