"""pFedMe: averaging over the clients' Moreau envelopes (T Dinh et al. 2020, arXiv:2006.08848).

Algorithm 1, in every round, with R local rounds::

    server   samples a cohort S and broadcasts w
    client   w_i ← w; R times:  θ_i ≈ argmin_θ L_i(θ) + λ/2 ‖θ − w_i‖²  by K steps from the last θ_i
                                w_i ← w_i − η λ (w_i − θ_i)
    server   w ← (1 − β) w + β Σ_{i∈S} p_i w_i;  θ_i stays with the client and is used for predictions
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pydantic import Field, model_validator

from prefed.core import (
    ClientTrainer,
    Download,
    Layout,
    Merged,
    Method,
    Owner,
    Proximal,
    Round,
    State,
    Tensors,
    Upload,
)
from prefed.core.lazy import torch
from prefed.merge import Aggregator
from prefed.merge.config import PRODUCT_RULES
from prefed.methods.base import FedAvgBase, LocalSettings, PersonalSettings, lora_parts

SOURCE = "pFedMe (arXiv:2006.08848), algorithm 1"


class Settings(PersonalSettings, LocalSettings):
    """Settings of pFedMe.

    ``local_steps`` is the number of local rounds R. ``local_epochs`` counts passes of all their steps.
    """

    lr: float = Field(1e-4, gt=0, description="learning rate of the inner problem")
    lam: float = Field(1.0, gt=0, description="strength of the pull towards the shared model")
    inner_steps: int = Field(5, ge=1, description="optimiser steps K on the inner problem per local round")
    outer_lr: float = Field(
        0.5,
        gt=0,
        description="learning rate of the shared model, which moves by outer_lr x lam of the way to the "
        "personal one per local round",
    )
    server_mixing: float = Field(
        1.0, gt=0, description="weight of the clients' mean in the next server model; 1: only the mean"
    )

    @model_validator(mode="after")
    def _no_overshoot(self) -> Settings:
        if self.outer_lr * self.lam > 1:
            raise ValueError(
                f"outer_lr x lam must be at most 1, not {self.outer_lr * self.lam:g}, which would move the "
                "shared model past the personal one"
            )
        return self


needs = lora_parts


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """PFedMe over ``layout``.

    Raises:
        ValueError: ``server_mixing`` cannot be combined with the LoRA rule.
    """
    if settings.server_mixing != 1 and aggregator.config.lora in PRODUCT_RULES:
        raise ValueError(
            f"lora {aggregator.config.lora!r} cannot be combined with server_mixing, which would change the "
            "mean of the products BA; set server_mixing to 1"
        )
    fedavg = FedAvgBase.of(settings, aggregator, rounds)

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        theta = fedavg.start(trainer, private, download)
        trainable = fedavg.trainable(trainer.round, Owner.SHARED)
        w, loss, count = theta.select(trainable), 0.0, fedavg.repeats(trainer, settings.inner_steps)
        for number in range(count):
            pull = Proximal(settings.lam, to=w)
            name, steps = f"inner/{number}", settings.inner_steps
            result = trainer.train(theta, fedavg.phase(trainer, download, name, steps=steps, proximal=pull))
            theta, loss = result.tensors, loss + result.loss / count
            w = _towards(w, theta.select(trainable), settings.outer_lr * settings.lam)
        return trainer.upload({"model": w}, {"loss": loss}), fedavg.keep_own(private, theta)

    def merge(server: State, uploads: Sequence[Upload], now: Round) -> Merged:
        merged, report = fedavg.merge(server, uploads, now)
        mixed = _towards(server.tensors["model"], merged.tensors["model"], settings.server_mixing)
        return merged.update({"model": mixed}), report

    adapt = partial(fedavg.adapt, pull=settings.lam)
    train = fedavg.exchange(work=work, merge=merge, late=fedavg.late(averages=settings.server_mixing == 1))
    return fedavg.method("pfedme", SOURCE, train, predict=fedavg.predict_own, adapt=adapt, personal=True)


def _towards(start: Tensors, end: Tensors, share: float) -> Tensors:
    """Interpolate from ``start`` (share 0) to ``end`` (share 1, exact)."""
    return Tensors(start.layout, torch.lerp(start.flat, end.flat, share))
