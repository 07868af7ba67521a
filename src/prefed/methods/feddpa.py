"""FedDPA: a shared global adapter and a personal local adapter, combined with a weight α (Yang et al. 2024).

FedDPA-T of arXiv:2403.19211. Both adapters are LoRAs of the same shape. In every round::

    server   samples a cohort S and broadcasts the global adapter
    client   trains the global adapter on W0 x + s B_g A_g x
             trains its own local adapter, with the received global adapter frozen, on
             W0 x + s ((1 − α) B_g A_g + α B_l A_l) x
             sends the global adapter
    server   averages the global adapters;  local adapters stay
    to predict, a client combines the published global adapter and its own with the same α
"""

from __future__ import annotations

import math

from pydantic import Field

from prefed.core import ClientTrainer, Download, Layout, Method, State, Tensors, Upload
from prefed.core.lazy import torch
from prefed.merge import Aggregator
from prefed.merge.lora import LORA, RESIDUAL
from prefed.methods.base import FedAvgBase, LocalSettings, TwoPhaseSettings, lora_parts

SOURCE = "FedDPA (arXiv:2403.19211), FedDPA-T with a fixed weight"
LOCAL = "personal_lora"


class Settings(TwoPhaseSettings, LocalSettings):
    """Settings of FedDPA. The personal phase trains the local adapter."""

    local_weight: float = Field(
        0.5, gt=0, lt=1, description="alpha, weight of the local adapter; the global adapter has 1 - alpha"
    )


def needs(settings: Settings) -> frozenset[str]:
    """The LoRA, and a personal LoRA with a gate, which is α."""
    return lora_parts(settings, LOCAL, "gate")


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedDPA over ``layout``."""
    local = [entry.name for entry in layout.entries if entry.part == LOCAL]
    gates = [entry.name for entry in layout.entries if entry.part == "gate"]
    factors = [name for name in local if layout[name].factor == "B"]
    # Factors of these scale the whole global adapter.
    whole = [e.name for e in layout.entries if e.part == RESIDUAL or (e.part == LORA and e.factor == "B")]
    fedavg = FedAvgBase.of(settings, aggregator, rounds, lambda entry: entry.part in (LOCAL, "gate"))
    logit = math.log(settings.local_weight / (1 - settings.local_weight))

    def unadapted(model: Tensors) -> Tensors:
        """Return ``model`` without a local adapter."""
        return model.replace({name: torch.zeros_like(model[name]) for name in factors})

    def combined(model: Tensors) -> Tensors:
        """Weight the adapters with 1 − α and α."""
        scaled = {name: (1 - settings.local_weight) * model[name] for name in whole}
        return model.replace(scaled, {name: torch.full_like(model[name], logit) for name in gates})

    def init_client(initial: Tensors, client: str) -> State:
        return fedavg.init_client(unadapted(initial), client)

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        received = fedavg.start(trainer, private, download)
        shared = [name for name in fedavg.trainable(trainer.round) if name not in {*local, *gates}]
        result = trainer.train(unadapted(received), fedavg.phase(trainer, download, train=shared))
        second = fedavg.phase(trainer, download, "personal", train=local, **settings.personal_phase())
        own = trainer.train(combined(received), second).tensors.select([*local, *gates])
        state = fedavg.keep(private, result.tensors.replace(own))
        return fedavg.upload(trainer, result.tensors, result.loss), state

    def predict(trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        """Return the combination or, before the first visit of a client, the global adapter."""
        model = fedavg.start(trainer, private, published)
        if "personal" not in private.tensors:
            return unadapted(model)
        return combined(model) if any(model[name].any() for name in factors) else model

    def adapt(trainer: ClientTrainer, published: Download, steps: int) -> Tensors:
        """Return the model of a newcomer that trains a local adapter."""
        start = combined(unadapted(fedavg.start(trainer, State(), published)))
        phase = settings.phase("newcomer", local, steps=steps, lr=settings.personal_lr)
        return trainer.train(start, phase).tensors

    return fedavg.method(
        "feddpa", SOURCE, fedavg.exchange(work=work), init_client=init_client, predict=predict, adapt=adapt
    )
