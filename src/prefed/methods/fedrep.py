"""FedRep: each client trains its head, then the shared representation (Collins et al. 2021).

Algorithm 1 of arXiv:2102.07078, with the LoRA as representation φ and an untied language model head h_i::

    server   samples a cohort S and broadcasts φ
    client   trains h_i on L_i(φ, h_i) with φ frozen; then trains φ_i on L_i(φ_i, h_i) with h_i frozen
    server   φ ← Σ_{i∈S} p_i φ_i;  h_i stays with the client
"""

from __future__ import annotations

from functools import partial

from pydantic import Field

from prefed.core import ClientTrainer, Download, Layout, Method, State, Upload
from prefed.merge import Aggregator
from prefed.methods.base import VALUE, BaselineSettings, FedAvgBase, TwoPhaseSettings, lora_parts

SOURCE = "FedRep (arXiv:2102.07078), algorithm 1"


class Settings(TwoPhaseSettings, BaselineSettings):
    """Settings of FedRep, with the defaults of FedPDPO's experiments (arXiv:2603.19741, D.3.1)."""

    lr: float = Field(5e-5, gt=0, description="learning rate of the shared LoRA")


def needs(settings: Settings) -> frozenset[str]:
    """The LoRA and the head."""
    return lora_parts(settings, "head")


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedRep over ``layout``."""
    fedavg = FedAvgBase.of(settings, aggregator, rounds, personal=lambda entry: entry.part == "head")

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        trainable = fedavg.trainable(trainer.round)
        # PPO's critic trains in both phases.
        head = [name for name in trainable if layout[name].part in ("head", VALUE)]
        rest = [name for name in trainable if layout[name].part != "head"]
        first = fedavg.phase(trainer, download, "personal", train=head, **settings.personal_phase())
        fitted = trainer.train(fedavg.start(trainer, private, download), first)
        result = trainer.train(fitted.tensors, fedavg.phase(trainer, download, train=rest))
        return fedavg.upload(trainer, result.tensors, result.loss), fedavg.keep(private, result.tensors)

    adapt = partial(fedavg.adapt, rates=fedavg.rates(head=settings.personal_lr))
    return fedavg.method("fedrep", SOURCE, fedavg.exchange(work=work), adapt=adapt)
