"""Ditto: each client also trains a personal model with a pull towards the shared one (Li et al. 2021).

Algorithm 1 of arXiv:2012.04221, in every round::

    server   samples a cohort S and broadcasts φ
    client   φ_i ← φ; local training of φ_i on L_i
             local training of its own v_i, initially φ, on L_i(v_i) + λ/2 ‖v_i − φ‖²
    server   φ ← Σ_{i∈S} p_i φ_i;  v_i stays with the client and is used for predictions
"""

from __future__ import annotations

from functools import partial

from pydantic import Field

from prefed.core import ClientTrainer, Download, Layout, Method, Owner, Proximal, State, Upload
from prefed.merge import Aggregator
from prefed.methods.base import FedAvgBase, LocalSettings, TwoPhaseSettings, lora_parts

SOURCE = "Ditto (arXiv:2012.04221), algorithm 1"


class Settings(TwoPhaseSettings, LocalSettings):
    """Settings of Ditto. The personal phase trains the personal model."""

    lam: float = Field(
        0.1, ge=0, description="strength of the pull of the personal model towards the shared one"
    )


needs = lora_parts


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """Ditto over ``layout``.

    Raises:
        ValueError: the LoRA rule is ``flora``.
    """
    if settings.lam and aggregator.config.lora == "flora":
        raise ValueError(
            "lora 'flora' in [merge] starts a new LoRA in every round, towards which Ditto would pull the "
            "personal models; use another lora"
        )
    fedavg = FedAvgBase.of(settings, aggregator, rounds)
    personal = fedavg.ownership.names(Owner.PERSONAL)

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        received = fedavg.start(trainer, private, download)
        result = trainer.train(received, fedavg.phase(trainer, download))
        pull = Proximal(settings.lam, to=received.select(fedavg.shared_trainable)) if settings.lam else None
        second = fedavg.phase(
            trainer,
            download,
            "personal",
            train=(*fedavg.shared_trainable, *personal),
            proximal=pull,
            **settings.personal_phase(),
        )
        own = trainer.train(fedavg.predict_own(trainer, private, download), second).tensors
        state = fedavg.keep(private, result.tensors).update({"own": own.select((*fedavg.shared, *personal))})
        return fedavg.upload(trainer, result.tensors, result.loss), state

    return fedavg.method(
        "ditto",
        SOURCE,
        fedavg.exchange(work=work),
        predict=fedavg.predict_own,
        adapt=partial(fedavg.adapt, lr=settings.personal_lr, pull=settings.lam),
        personal=True,
    )
