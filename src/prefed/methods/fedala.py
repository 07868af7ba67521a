"""FedALA: each client weighs, layer by layer, how much of the shared model it takes in (Zhang et al. 2023).

Algorithm 1 of arXiv:2212.01197, in every round, for a client that has a model φ_i of its own::

    server   samples a cohort S and broadcasts φ
    client   learns weights W in [0, 1]:  W ← clip(W − η ∇_W L_i(φ_i + (φ − φ_i) ⊙ W))         eqs. 4 and 5
             φ_i ← φ_i + (φ − φ_i) ⊙ W; local training on L_i(φ_i)
    server   φ ← Σ_{i∈S} p_i φ_i;  W and φ_i stay with the client
    to predict, a client learns W on the published φ and takes φ_i + (φ − φ_i) ⊙ W

W starts at 1, the shared model, and is kept from visit to visit. Of a LoRA the factors A and B are weighed as
they are, with one weight for all factors of a block unless ``grain`` says otherwise: ∂L/∂w is then the sum of
∇L(φ̂) ⊙ (φ − φ_i) over the block.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from pydantic import Field

from prefed.core import ClientTrainer, Download, Exchange, Layout, Method, State, Tensors, Upload
from prefed.core.lazy import torch
from prefed.merge import Aggregator
from prefed.methods.base.fedavg import FedAvgBase, LocalSettings, lora_only
from prefed.methods.base.settings import PersonalSettings

__all__ = ["SOURCE", "Settings", "block_weights", "build", "needs"]

SOURCE = "FedALA (arXiv:2212.01197), algorithm 1"


class Settings(PersonalSettings, LocalSettings):
    """Settings of FedALA."""

    adaptive_layers: int | None = Field(
        None, ge=1, description="last blocks that are weighed, lower ones being taken over; left out: all"
    )
    grain: Literal["block", "tensor", "element"] = Field(
        "block", description="what has a weight of its own; element is the paper's, for dense layers"
    )
    weight_lr: float = Field(1.0, gt=0, description="step size of the weights")
    weight_steps: int = Field(
        5, ge=0, description="steps of the weights at a visit, each on a batch of its own"
    )
    first_weight_steps: int = Field(
        20, ge=0, description="such steps at the first visit of a client that has a model of its own"
    )
    relearn: bool = Field(
        True,
        description="before predicting, the weights are learnt again for the published model; without, they "
        "are those of the client's last visit",
    )


needs = lora_only


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedALA over ``layout``."""
    fedavg = FedAvgBase.of(settings, aggregator, rounds)
    width, count = settings.batches()
    groups = _groups(settings, layout.select(fedavg.common))
    each = settings.grain == "element"

    def mixed(private: State, received: Tensors) -> Tensors:
        """φ_i + (φ − φ_i) ⊙ W put into ``received``; that itself without a φ_i."""
        if "own" not in private.tensors:
            return received
        own, weights = private.tensors["own"], private.tensors["weights"]
        # lerp is exact at both ends: a weight of 1 is the received model to the bit.
        inside = torch.lerp(own.flat, received.select(own).flat, weights.flat)
        return received.replace(Tensors(own.layout, inside))

    def learn(trainer: ClientTrainer, private: State, received: Tensors) -> State:
        """The private state with its weights fitted to the client's pairs."""
        if "own" not in private.tensors:
            return private
        gap = received.select(fedavg.common) - private.tensors["own"]
        first = "weighed" not in private.values
        for step in range(settings.first_weight_steps if first else settings.weight_steps):
            slope, _ = trainer.gradient(
                mixed(private, received), settings.goal(), batch_size=width * count, name=f"weights/{step}"
            )
            step_down = _pooled(slope.select(gap) * gap, groups, each) * settings.weight_lr
            weights = private.tensors["weights"] - step_down
            private = private.update({"weights": Tensors(weights.layout, weights.flat.clamp(0, 1))})
        return private.update(values={"weighed": True})

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        received = fedavg.start(trainer, private, download)
        private = learn(trainer, private, received)
        trained = trainer.train(mixed(private, received), fedavg.phase(trainer, download))
        own = trained.tensors.select(fedavg.common)
        weights = private.tensors.get("weights", Tensors(own.layout, torch.ones_like(own.flat)))
        kept = fedavg.keep(private, trained.tensors).update({"own": own, "weights": weights})
        return fedavg.upload(trainer, trained), kept

    def predict(trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        received = fedavg.start(trainer, private, published)
        # What is learnt here is for this prediction alone: the client's state changes in visits only.
        known = learn(trainer, private, received) if settings.relearn and trainer.size else private
        return mixed(known, received)

    train = Exchange("train", fedavg.send, work, fedavg.merge, figures=fedavg.figures)
    return fedavg.method(
        "fedala",
        SOURCE,
        train,
        predict=predict,
        personal=True,
        profile=lambda private: {"weight": block_weights(private)},
    )


def block_weights(private: State) -> dict[int, float]:
    """How much of the shared model a client takes in: block → W, a mean over the block's elements.

    Args:
        private: the client's private state; before its first visit it has no weights.

    >>> from prefed.core import Entry
    >>> layout = Layout((Entry("lora/0/A", (2,), "lora", 0, "A"), Entry("lora/0/B", (2,), "lora", 0, "B")))
    >>> block_weights(State({"weights": Tensors(layout, torch.tensor([1.0, 1.0, 0.5, 0.5]))}))
    {0: 0.75}
    """
    weights = private.tensors.get("weights", Tensors.empty())
    blocks: dict[int, list[torch.Tensor]] = defaultdict(list)
    for entry in weights.layout.entries:
        if entry.block is not None:
            blocks[entry.block].append(weights[entry.name].reshape(-1).double())
    return {block: float(torch.cat(held).mean()) for block, held in sorted(blocks.items())}


def _groups(settings: Settings, layout: Layout) -> list[list[str]]:
    """Names of the tensors that have a weight in common; under ``element`` those that are weighed."""
    blocks = sorted({entry.block for entry in layout.entries if entry.block is not None})
    weighed = blocks if settings.adaptive_layers is None else blocks[-settings.adaptive_layers :]
    groups: dict[object, list[str]] = defaultdict(list)
    for entry in layout.entries:
        if entry.block is None or entry.block in weighed:
            groups[entry.block if settings.grain == "block" else entry.name].append(entry.name)
    return list(groups.values())


def _pooled(slopes: Tensors, groups: list[list[str]], each: bool) -> Tensors:
    """The slope of every element's weight: its group's sum, its own if ``each``; 0 outside the groups."""
    pooled = Tensors.zeros(slopes.layout, slopes.flat.dtype)
    for names in groups:
        total = torch.stack([slopes[name].sum() for name in names]).sum()
        for name in names:
            pooled[name].copy_(slopes[name] if each else total)
    return pooled
