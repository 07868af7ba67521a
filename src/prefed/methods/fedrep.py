"""FedRep: each client fits its head to the shared representation, then improves it (Collins et al. 2021).

Algorithm 1 of arXiv:2102.07078, with the LoRA as representation φ and an untied language model head h_i::

    server   samples a cohort S and broadcasts φ
    client   h_i by local training on L_i(φ, h), φ held; then φ_i by local training on L_i(φ, h_i), h_i held
    server   φ ← Σ_{i∈S} p_i φ_i;  h_i stays with the client
"""

from __future__ import annotations

from functools import partial

from pydantic import Field

from prefed.core import ClientTrainer, Download, Exchange, Layout, Method, State, Upload
from prefed.merge import Aggregator, lora
from prefed.methods.base import ppo
from prefed.methods.base.fedavg import FedAvgBase
from prefed.methods.base.settings import TwoPhaseSettings

__all__ = ["SOURCE", "Settings", "build", "needs"]

SOURCE = "FedRep (arXiv:2102.07078), algorithm 1"


class Settings(TwoPhaseSettings, ppo.BaselineSettings):
    """Settings of FedRep, as FedPDPO's experiments have them (arXiv:2603.19741, D.3.1)."""

    lr: float = Field(5e-5, gt=0, description="learning rate of the shared LoRA")


def needs(settings: Settings) -> frozenset[str]:
    """The LoRA and the head."""
    return ppo.needs(settings, lora.LORA, "head")


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedRep over ``layout``."""
    fedavg = FedAvgBase.of(settings, aggregator, rounds, personal=lambda entry: entry.part == "head")

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        moving = fedavg.movable(trainer.round)
        # PPO's critic follows whatever moves.
        head = [name for name in moving if layout[name].part in ("head", ppo.VALUE)]
        rest = [name for name in moving if layout[name].part != "head"]
        steps, epochs = settings.personal_length()
        first = fedavg.phase(
            trainer, download, "personal", train=head, lr=settings.personal_lr, steps=steps, epochs=epochs
        )
        fitted = trainer.train(fedavg.start(trainer, private, download), first)
        trained = trainer.train(fitted.tensors, fedavg.phase(trainer, download, train=rest))
        return fedavg.upload(trainer, trained), fedavg.keep(private, trained.tensors)

    rates = {entry.name: settings.personal_lr for entry in layout.entries if entry.part == "head"}
    train = Exchange("train", fedavg.send, work, fedavg.merge, figures=fedavg.figures)
    return fedavg.method("fedrep", SOURCE, train, adapt=partial(fedavg.adapt, rates=rates))
