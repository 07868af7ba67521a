"""FedPer: the first blocks are shared, the other blocks and the head are personal (Arivazhagan et al. 2019).

Algorithm 1 of arXiv:1912.00818. Base layers: the LoRA of the first k blocks. Personalisation layers: the LoRA
of the other blocks and an untied language model head (FedPDPO's baseline, arXiv:2603.19741)::

    server   samples a cohort S and broadcasts the base layers φ
    client   φ_i ← φ; loads its own layers v_i; trains both together
    server   φ ← Σ_{i∈S} p_i φ_i;  v_i stays with the client
"""

from __future__ import annotations

from functools import partial

from pydantic import Field

from prefed.core import Entry, Layout, Method
from prefed.merge import Aggregator
from prefed.methods.base import BaselineSettings, FedAvgBase, PersonalSettings, lora_parts

SOURCE = "FedPer (arXiv:1912.00818), algorithm 1"


class Settings(PersonalSettings, BaselineSettings):
    """Settings of FedPer."""

    lr: float = Field(5e-5, gt=0, description="learning rate of the LoRA, shared and personal")
    shared_layers: int = Field(
        2, ge=1, description="number of first blocks with a shared LoRA; the LoRA of the others is personal"
    )
    personal_head: bool = Field(True, description="personal language model head, untied from the embeddings")
    personal_lr: float = Field(1e-4, gt=0, description="learning rate of the personal head")


def needs(settings: Settings) -> frozenset[str]:
    """The LoRA and, if enabled, the head."""
    return lora_parts(settings, head=settings.personal_head)


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedPer over ``layout``."""

    def personal(entry: Entry) -> bool:
        return entry.part == "head" or entry.block is None or entry.block >= settings.shared_layers

    fedavg = FedAvgBase.of(settings, aggregator, rounds, personal)
    rates = fedavg.rates(head=settings.personal_lr)
    train = fedavg.exchange(work=partial(fedavg.work, rates=rates))
    return fedavg.method("fedper", SOURCE, train, adapt=partial(fedavg.adapt, rates=rates))
