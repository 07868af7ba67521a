"""Ditto: beside the shared model each client trains one of its own, held near it (Li et al. 2021).

Algorithm 1 of arXiv:2012.04221, in every round::

    server   samples a cohort S and broadcasts φ
    client   φ_i ← φ; local training of φ_i on L_i
             local training of its own v_i, at first φ, on L_i(v) + λ/2 ‖v − φ‖²
    server   φ ← Σ_{i∈S} p_i φ_i;  v_i stays with the client, who predicts with it
"""

from __future__ import annotations

from functools import partial

from pydantic import Field

from prefed.core import (
    ClientTrainer,
    Download,
    Exchange,
    Layout,
    Method,
    Owner,
    Proximal,
    State,
    Tensors,
    Upload,
)
from prefed.merge import Aggregator
from prefed.methods.base.fedavg import FedAvgBase, LocalSettings, lora_only
from prefed.methods.base.settings import TwoPhaseSettings

__all__ = ["SOURCE", "Settings", "build", "needs"]

SOURCE = "Ditto (arXiv:2012.04221), algorithm 1"


class Settings(TwoPhaseSettings, LocalSettings):
    """Settings of Ditto; its personal phase is the training of a client's own model."""

    lam: float = Field(0.1, ge=0, description="strength of the own model's pull towards the shared one")


needs = lora_only


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """Ditto over ``layout``."""
    fedavg = FedAvgBase.of(settings, aggregator, rounds)
    moving = (*fedavg.learnt, *fedavg.ownership.names(Owner.PERSONAL))
    own = (*fedavg.common, *fedavg.ownership.names(Owner.PERSONAL))

    def mine(private: State, common: Tensors) -> Tensors:
        """v_i put into the model ``common``; that itself before the client's first visit."""
        return common.replace(private.tensors["own"]) if "own" in private.tensors else common

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        received = fedavg.start(trainer, private, download)
        trained = trainer.train(received, fedavg.phase(trainer, download))
        steps, epochs = settings.personal_length()
        second = fedavg.phase(
            trainer,
            download,
            "personal",
            train=moving,
            lr=settings.personal_lr,
            steps=steps,
            epochs=epochs,
            proximal=Proximal(settings.lam, to=received.select(fedavg.learnt)) if settings.lam else None,
        )
        after = trainer.train(mine(private, received), second)
        kept = fedavg.keep(private, trained.tensors).update({"own": after.tensors.select(own)})
        return fedavg.upload(trainer, trained), kept

    def predict(trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        return mine(private, fedavg.start(trainer, private, published))

    adapt = partial(fedavg.adapt, lr=settings.personal_lr, pull=settings.lam)
    train = Exchange("train", fedavg.send, work, fedavg.merge, figures=fedavg.figures)
    return fedavg.method("ditto", SOURCE, train, predict=predict, adapt=adapt, personal=True)
