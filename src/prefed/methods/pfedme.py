"""pFedMe: averaging over the clients' Moreau envelopes (T Dinh et al. 2020, arXiv:2006.08848).

Algorithm 1, in every round, with R local rounds::

    server   samples a cohort S and broadcasts w
    client   w_i ← w; R times:  θ_i ≈ argmin_θ L_i(θ) + λ/2 ‖θ − w_i‖²  by K steps from the last θ_i
                                w_i ← w_i − η λ (w_i − θ_i)
    server   w ← (1 − β) w + β Σ_{i∈S} p_i w_i;  θ_i stays with the client, who predicts with it
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from pydantic import Field, model_validator

from prefed.core import (
    ClientTrainer,
    Download,
    Exchange,
    Layout,
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
from prefed.methods.base.fedavg import FedAvgBase, LocalSettings, lora_only
from prefed.methods.base.settings import PersonalSettings

__all__ = ["SOURCE", "Settings", "build", "needs"]

SOURCE = "pFedMe (arXiv:2006.08848), algorithm 1"


class Settings(PersonalSettings, LocalSettings):
    """Settings of pFedMe.

    ``local_steps`` counts local rounds R; ``local_epochs`` the passes that all their steps make together.
    """

    lr: float = Field(1e-4, gt=0, description="learning rate of the inner problem's optimiser")
    lam: float = Field(1.0, gt=0, description="strength of the own model's pull towards the shared one")
    inner_steps: int = Field(5, ge=1, description="optimiser steps K on the inner problem in a local round")
    outer_lr: float = Field(
        0.5,
        gt=0,
        description="rate of the shared model's step towards the own one: each moves it by outer_lr x lam",
    )
    server_mixing: float = Field(
        1.0, gt=0, description="how far the server goes from its model to the clients' mean; 1 takes the mean"
    )

    @model_validator(mode="after")
    def _no_overshoot(self) -> Settings:
        if self.outer_lr * self.lam > 1:
            raise ValueError(
                f"a local round moves the shared model by outer_lr x lam = {self.outer_lr * self.lam:g} of "
                "the way to the own one: make it at most 1"
            )
        return self


needs = lora_only


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """The method over ``layout``.

    Raises:
        ValueError: a LoRA rule that sets the product of the factors is to be mixed with the old factors.
    """
    if settings.server_mixing != 1 and aggregator.config.lora in ("fedex", "flexlora"):
        raise ValueError(
            f"lora {aggregator.config.lora!r} makes the server's product the mean of the clients' products, "
            "which server_mixing would undo; leave it at 1"
        )
    fedavg = FedAvgBase.of(settings, aggregator, rounds)

    def local_rounds(trainer: ClientTrainer) -> int:
        return settings.local_steps or math.ceil(fedavg.steps(trainer) / settings.inner_steps)

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        theta = fedavg.start(trainer, private, download)
        moving = fedavg.movable(trainer.round, Owner.SHARED)
        w, loss, count = theta.select(moving), 0.0, local_rounds(trainer)
        for number in range(count):
            pull = Proximal(settings.lam, to=w)
            name, steps = f"inner/{number}", settings.inner_steps
            trained = trainer.train(theta, fedavg.phase(trainer, download, name, steps=steps, proximal=pull))
            theta, loss = trained.tensors, loss + trained.loss / count
            w = _towards(w, theta.select(moving), settings.outer_lr * settings.lam)
        kept = fedavg.keep(private, theta).update({"own": theta.select(fedavg.common)})
        return trainer.upload({"model": w}, {"loss": loss}), kept

    def merge(server: State, uploads: Sequence[Upload], now: Round) -> State:
        merged, before = fedavg.merge(server, uploads, now), server.tensors["model"]
        mixed = _towards(before, merged.tensors["model"], settings.server_mixing)
        return merged.update({"model": mixed})

    def predict(trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        model, own = fedavg.start(trainer, private, published), private.tensors.get("own")
        return model if own is None else model.replace(own)

    adapt = partial(fedavg.adapt, pull=settings.lam)
    train = Exchange("train", fedavg.send, work, merge, figures=fedavg.figures)
    return fedavg.method("pfedme", SOURCE, train, predict=predict, adapt=adapt, personal=True)


def _towards(start: Tensors, end: Tensors, share: float) -> Tensors:
    """``start`` moved by ``share`` of the way to ``end``; with 1 that is ``end`` to the bit."""
    return Tensors(start.layout, torch.lerp(start.flat, end.flat, share))
