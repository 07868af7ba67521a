"""Per-FedAvg: a shared start from which a few steps adapt to any client (Fallah et al. 2020).

Algorithm 1 of arXiv:2002.07948, in every round, with K inner steps of rate α and an outer step of rate η::

    server   samples a cohort S and broadcasts w
    client   w_i ← w; several times:  θ ← w_i; K times θ ← θ − α ∇L(θ; D)
                                      w_i ← w_i − η g
    server   w ← Σ_{i∈S} p_i w_i
    to predict, a client takes K inner steps from w on its training pairs

First order: g = ∇L(θ; D').  HF: g = Π_k (I − α ∇²L(θ_k; D''_k)) ∇L(θ; D') over the points θ_k at which inner
steps began. A product with a Hessian is taken as [∇L(θ_k + h v) − ∇L(θ_k − h v)] / 2h.

With AdamW, as in FedPDPO's experiments, the K inner steps have an AdamW that is new at each θ ← w_i. The
outer steps have another AdamW, which takes ∇L(θ; D') as the gradient at w_i. Its moments go on from outer
step to outer step.
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
"""The model after an outer step, the loss where its gradient was taken, and the optimiser's moments."""


class Settings(PersonalSettings, BaselineSettings):
    """Settings of Per-FedAvg.

    ``local_steps`` is the number of outer steps. ``local_epochs`` counts the passes of all steps, inner and
    outer. Clipping bounds the gradient of each inner and each outer step.

    >>> Settings().weight_decay, Settings(optimizer="adamw").weight_decay
    (0.0, 0.01)
    """

    lr: float = Field(1e-3, gt=0, description="rate of the outer steps")
    inner_lr: float = Field(0.01, gt=0, description="rate of the inner steps; no schedule changes it")
    inner_steps: int = Field(5, ge=1, description="inner steps before each outer one, and before predicting")
    variant: Literal["first_order", "hf"] = Field(
        "first_order", description="first_order leaves the Hessian out; hf takes its products by differences"
    )
    difference: float = Field(
        1e-3,
        gt=0,
        description="for hf: distance at which the two gradients of a Hessian product are taken; 0.1 for a "
        "frozen model in bfloat16, whose rounding drowns a shorter one",
    )
    optimizer: Literal["sgd", "adamw"] = Field(
        "sgd", description="of inner and outer steps alike: sgd, plain gradient steps, or adamw"
    )
    weight_decay: float = Field(
        0.0, ge=0, description="weight decay of inner and outer steps; left out with adamw, 0.01"
    )

    @model_validator(mode="before")
    @classmethod
    def _usual_decay(cls, values: Any) -> Any:
        adamw = isinstance(values, dict) and values.get("optimizer") == "adamw"
        return {"weight_decay": 0.01, **values} if adamw else values

    @model_validator(mode="after")
    def _plain(self) -> Settings:
        if self.optimizer == "sgd" and (self.momentum or self.weight_decay):
            raise ValueError("steps of sgd are plain here: leave momentum and weight_decay at 0")
        if self.optimizer == "adamw" and self.variant == "hf":
            raise ValueError(
                "variant 'hf' is the derivative through plain inner steps: use optimizer 'sgd', or variant "
                "'first_order' with 'adamw'"
            )
        if self.ppo and self.variant == "hf":
            raise ValueError(
                "objective 'ppo' has no Hessian to take products with; use variant 'first_order'"
            )
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
        # The optimiser makes its step from ∇L(θ) at θ. w takes that step, and its own weight decay.
        after = trainer.train(theta, replace(phase, optimizer=replace(optimizer, weight_decay=0.0)))
        trainable = fedavg.trainable(trainer.round)
        decayed = w.select(trainable) * (1 - optimizer.lr * optimizer.weight_decay)
        moved = decayed + (after.tensors.select(trainable) - theta.select(trainable))
        critic = after.tensors.select(name for name in trainable if layout[name].part == VALUE)
        return w.replace(moved).replace(critic), after.loss, after.moments

    def second_order(
        trainer: ClientTrainer, download: Download, w: Tensors, number: int, moments: Moments | None
    ) -> OuterStep:
        """As :func:`first_order`, with the Hessians of the inner steps."""
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
        """∇²L(at) v. Both gradients have one name, so that their batch and dropout are the same."""
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
