"""Per-FedAvg: a shared initial model that adapts to any client in a few steps (Fallah et al. 2020).

Algorithm 1 of arXiv:2002.07948, in every round, with K inner steps of rate α and an outer step of rate η::

    server   samples a cohort S and broadcasts w
    client   w_i ← w; several times:  θ ← w_i; K times θ ← θ − α ∇L(θ; D)
                                      w_i ← w_i − η g
    server   w ← Σ_{i∈S} p_i w_i
    to predict, a client takes K inner steps from w on its training pairs

First order: g = ∇L(θ; D'). HF: g = Π_k (I − α ∇²L(θ_k; D''_k)) ∇L(θ; D') over the starting points θ_k of the
inner steps. Hessian-vector products are computed as [∇L(θ_k + h v) − ∇L(θ_k − h v)] / 2h.

With AdamW, as in FedPDPO's experiments, the inner steps start with a new AdamW at each θ ← w_i. The outer
steps share another AdamW, which uses ∇L(θ; D') as the gradient at w_i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from pydantic import Field, model_validator

from prefed.core import ClientTrainer, Download, Layout, Method, Moments, Phase, State, Tensors, Upload
from prefed.merge import Aggregator
from prefed.methods.base import VALUE, BaselineSettings, FedAvgBase, PersonalSettings, lora_parts

SOURCE = "Per-FedAvg (arXiv:2002.07948), algorithm 1"
Gradient = Callable[[Tensors, str], "tuple[Tensors, float]"]
OuterStep = tuple[Tensors, float, "Moments | None"]
"""The model after an outer step, the loss at its gradient, and the moments of the optimiser."""


class Settings(PersonalSettings, BaselineSettings):
    """Settings of Per-FedAvg.

    ``local_steps`` is the number of outer steps. ``local_epochs`` counts passes of both inner and outer
    steps. Clipping applies to each inner and outer step.

    >>> Settings().weight_decay, Settings(optimizer="adamw").weight_decay
    (0.0, 0.01)
    """

    lr: float = Field(1e-3, gt=0, description="learning rate of the outer steps")
    inner_lr: float = Field(0.01, gt=0, description="constant learning rate of the inner steps")
    inner_steps: int = Field(5, ge=1, description="inner steps before each outer step and before predictions")
    variant: Literal["first_order", "hf"] = Field(
        "first_order", description="first_order ignores the Hessian; hf uses Hessian-vector products"
    )
    difference: float = Field(
        1e-3,
        gt=0,
        description="for hf: step size of the finite differences; use 0.1 for a frozen model in bfloat16",
    )
    optimizer: Literal["sgd", "adamw"] = Field(
        "sgd", description="optimiser of inner and outer steps: plain sgd, or adamw"
    )
    weight_decay: float = Field(
        0.0, ge=0, description="weight decay of inner and outer steps; default with adamw: 0.01"
    )

    @model_validator(mode="before")
    @classmethod
    def _usual_decay(cls, values: Any) -> Any:
        adamw = isinstance(values, dict) and values.get("optimizer") == "adamw"
        return {"weight_decay": 0.01, **values} if adamw else values

    @model_validator(mode="after")
    def _plain(self) -> Settings:
        if self.optimizer == "sgd" and (self.momentum or self.weight_decay):
            raise ValueError("optimizer 'sgd' requires momentum = 0 and weight_decay = 0")
        if self.optimizer == "adamw" and self.variant == "hf":
            raise ValueError(
                "variant 'hf' requires optimizer 'sgd'; use variant 'first_order' with optimizer 'adamw'"
            )
        if self.ppo and self.variant == "hf":
            raise ValueError("variant 'hf' does not support objective 'ppo'; use variant 'first_order'")
        return self


needs = lora_parts


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """Per-FedAvg over ``layout``."""
    fedavg = FedAvgBase.of(settings, aggregator, rounds)

    def inner(trainer: ClientTrainer, download: Download, name: str, steps: int) -> Phase:
        phase = fedavg.phase(trainer, download, name, steps=steps)
        return replace(phase, optimizer=replace(phase.optimizer, lr=settings.inner_lr))

    def first_order(
        trainer: ClientTrainer, download: Download, w: Tensors, number: int, moments: Moments | None
    ) -> OuterStep:
        theta = trainer.train(w, inner(trainer, download, f"inner/{number}", settings.inner_steps)).tensors
        phase = fedavg.phase(trainer, download, f"outer/{number}", steps=1, moments=moments)
        optimizer = phase.optimizer
        # Take the optimiser step at θ, then apply it to w with the weight decay of w.
        after = trainer.train(theta, replace(phase, optimizer=replace(optimizer, weight_decay=0.0)))
        trainable = fedavg.trainable(trainer.round)
        decayed = w.select(trainable) * (1 - optimizer.lr * optimizer.weight_decay)
        moved = decayed + (after.tensors.select(trainable) - theta.select(trainable))
        critic = after.tensors.select(name for name in trainable if layout[name].part == VALUE)
        return w.replace(moved).replace(critic), after.loss, after.moments

    def second_order(
        trainer: ClientTrainer, download: Download, w: Tensors, number: int, moments: Moments | None
    ) -> OuterStep:
        """Like :func:`first_order`, with the Hessians of the inner steps."""
        trainable, points = fedavg.trainable(trainer.round), [w]
        for step in range(settings.inner_steps):
            phase = inner(trainer, download, f"inner/{number}/{step}", 1)
            points.append(trainer.train(points[-1], phase).tensors)

        def gradient(at: Tensors, name: str) -> tuple[Tensors, float]:
            slope, loss = trainer.gradient(at, settings.goal(), batch_size=settings.step_pairs(), name=name)
            return slope.select(trainable), loss

        g, loss = gradient(points[-1], f"outer/{number}")
        for step, point in reversed(list(enumerate(points[:-1]))):
            g = g - hessian(gradient, point, g, f"hessian/{number}/{step}") * settings.inner_lr
        if settings.clip and g.norm() > settings.clip:
            g = g * (settings.clip / g.norm())
        return w.replace(w.select(trainable) - g * fedavg.rate(trainer, download, settings.lr)), loss, moments

    def hessian(gradient: Gradient, at: Tensors, v: Tensors, name: str) -> Tensors:
        """∇²L(at) v. Both gradients have the same name, and thus the same batch and dropout."""
        length = v.norm()
        if not length:
            return v
        h, here = settings.difference / length, at.select(v)
        up, _ = gradient(at.replace(here + v * h), name)
        down, _ = gradient(at.replace(here - v * h), name)
        return (up - down) / (2 * h)

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        step = first_order if settings.variant == "first_order" else second_order
        w, losses = fedavg.start(trainer, private, download), []
        moments = Moments() if settings.optimizer == "adamw" else None
        for number in range(fedavg.repeats(trainer, settings.inner_steps + 1)):
            w, loss, moments = step(trainer, download, w, number, moments)
            losses.append(loss)
        return fedavg.upload(trainer, w, sum(losses) / len(losses)), fedavg.keep(private, w)

    def predict(trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        w = fedavg.start(trainer, private, published)
        if not trainer.size:
            return w
        return trainer.train(w, inner(trainer, published, "inner", settings.inner_steps)).tensors

    adapt = partial(fedavg.adapt, lr=settings.inner_lr)
    train = fedavg.exchange(work=work)
    return fedavg.method("perfedavg", SOURCE, train, predict=predict, adapt=adapt, personal=True)
