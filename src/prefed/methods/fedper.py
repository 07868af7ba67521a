"""FedPer: the first blocks are shared, the rest and the head are personal (Arivazhagan et al. 2019).

Algorithm 1 of arXiv:1912.00818, the LoRA of the first k blocks being the base layers, and the other blocks'
LoRA and an untied language model head the personalisation layers (FedPDPO's baseline, arXiv:2603.19741)::

    server   samples a cohort S and broadcasts the base layers φ
    client   φ_i ← φ; takes up its own layers v_i; trains both together
    server   φ ← Σ_{i∈S} p_i φ_i;  v_i stays with the client
"""

from __future__ import annotations

from functools import partial

from pydantic import Field

from prefed.core import ClientTrainer, Download, Entry, Exchange, Layout, Method, State, Upload
from prefed.merge import Aggregator, lora
from prefed.methods.base import ppo
from prefed.methods.base.fedavg import FedAvgBase
from prefed.methods.base.settings import PersonalSettings

__all__ = ["SOURCE", "Settings", "build", "needs"]

SOURCE = "FedPer (arXiv:1912.00818), algorithm 1"


class Settings(PersonalSettings, ppo.BaselineSettings):
    """Settings of FedPer."""

    lr: float = Field(5e-5, gt=0, description="learning rate of the LoRA, shared and personal")
    shared_layers: int = Field(
        2, ge=1, description="blocks, from the first, whose LoRA is shared; that of the others is personal"
    )
    personal_head: bool = Field(
        True, description="a personal language model head, untied from the embeddings"
    )
    personal_lr: float = Field(1e-4, gt=0, description="learning rate of the personal head")


def needs(settings: Settings) -> frozenset[str]:
    """The LoRA, and the head unless it is switched off."""
    return ppo.needs(settings, lora.LORA, *(["head"] if settings.personal_head else []))


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedPer over ``layout``."""

    def personal(entry: Entry) -> bool:
        return entry.part == "head" or entry.block is None or entry.block >= settings.shared_layers

    fedavg = FedAvgBase.of(settings, aggregator, rounds, personal)

    rates = {entry.name: settings.personal_lr for entry in layout.entries if entry.part == "head"}

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        start = fedavg.start(trainer, private, download)
        trained = trainer.train(start, fedavg.phase(trainer, download, rates=rates))
        return fedavg.upload(trainer, trained), fedavg.keep(private, trained.tensors)

    train = Exchange("train", fedavg.send, work, fedavg.merge, figures=fedavg.figures)
    return fedavg.method("fedper", SOURCE, train, adapt=partial(fedavg.adapt, rates=rates))
