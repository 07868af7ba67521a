"""FedALA: each client learns layer-wise weights between the shared and its own model (Zhang et al. 2023).

Algorithm 1 of arXiv:2212.01197, in every round, for a client with its own model φ_i::

    server   samples a cohort S and broadcasts φ
    client   learns weights W in [0, 1]:  W ← clip(W − η ∇_W L_i(φ_i + (φ − φ_i) ⊙ W))         eqs. 4 and 5
             φ_i ← φ_i + (φ − φ_i) ⊙ W; local training on L_i(φ_i)
    server   φ ← Σ_{i∈S} p_i φ_i;  W and φ_i stay with the client
    to predict, a client learns W on the published φ and uses φ_i + (φ − φ_i) ⊙ W

W is initially 1 (the shared model), and clients keep it between visits. It applies to the LoRA factors A and
B, not to their product. By default, all factors of a block share one weight w, and ∂L/∂w is the sum of
∇L(φ̂) ⊙ (φ − φ_i) over the block.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from pydantic import Field

from prefed.core import ClientTrainer, Download, Layout, Method, State, Tensors, Upload
from prefed.core.lazy import torch
from prefed.merge import Aggregator
from prefed.methods.base import FedAvgBase, LocalSettings, PersonalSettings, lora_parts

SOURCE = "FedALA (arXiv:2212.01197), algorithm 1"


class Settings(PersonalSettings, LocalSettings):
    """Settings of FedALA."""

    adaptive_layers: int | None = Field(
        None,
        ge=1,
        description="number of last blocks with learned weights; the others are shared; default: all",
    )
    grain: Literal["block", "tensor", "element"] = Field(
        "block", description="granularity of the weights; element: as in the paper, for dense layers"
    )
    weight_lr: float = Field(1.0, gt=0, description="step size of the weights")
    weight_steps: int = Field(
        5, ge=0, description="steps of the weights per visit, each on a different batch"
    )
    first_weight_steps: int = Field(
        20, ge=0, description="steps of the weights when a client learns them for the first time"
    )
    relearn: bool = Field(
        True,
        description="before predictions, learn the weights for the published model; otherwise use those of "
        "the last visit",
    )


needs = lora_parts


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedALA over ``layout``."""
    fedavg = FedAvgBase.of(settings, aggregator, rounds)
    groups = _groups(settings, layout.select(fedavg.shared))
    each = settings.grain == "element"

    def mixed(private: State, received: Tensors) -> Tensors:
        """Replace φ in ``received`` with φ_i + (φ − φ_i) ⊙ W if the client has a φ_i."""
        if "own" not in private.tensors:
            return received
        own, weights = private.tensors["own"], private.tensors["weights"]
        # lerp is exact at both ends: a weight of 1 is the received model bit for bit.
        inside = torch.lerp(own.flat, received.select(own).flat, weights.flat)
        return received.replace(Tensors(own.layout, inside))

    def learn(trainer: ClientTrainer, private: State, received: Tensors) -> State:
        """Fit the weights in the private state to the client's pairs."""
        if "own" not in private.tensors:
            return private
        gap = received.select(fedavg.shared) - private.tensors["own"]
        first, pairs = "weighed" not in private.values, settings.step_pairs()
        for step in range(settings.first_weight_steps if first else settings.weight_steps):
            model, name = mixed(private, received), f"weights/{step}"
            slope, _ = trainer.gradient(model, settings.goal(), batch_size=pairs, name=name)
            step_down = _pooled(slope.select(gap) * gap, groups, each) * settings.weight_lr
            weights = private.tensors["weights"] - step_down
            private = private.update({"weights": Tensors(weights.layout, weights.flat.clamp(0, 1))})
        return private.update(values={"weighed": True})

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        received = fedavg.start(trainer, private, download)
        private = learn(trainer, private, received)
        result = trainer.train(mixed(private, received), fedavg.phase(trainer, download))
        state = fedavg.keep_own(private, result.tensors)
        own = state.tensors["own"]
        weights = private.tensors.get("weights", Tensors(own.layout, torch.ones_like(own.flat)))
        return fedavg.upload(trainer, result.tensors, result.loss), state.update({"weights": weights})

    def predict(trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        received = fedavg.start(trainer, private, published)
        # The new weights are not kept, since the client's state changes only in visits.
        state = learn(trainer, private, received) if settings.relearn and trainer.size else private
        return mixed(state, received)

    return fedavg.method(
        "fedala",
        SOURCE,
        fedavg.exchange(work=work),
        predict=predict,
        personal=True,
        profile=lambda private: {"weight": block_weights(private)},
    )


def block_weights(private: State) -> dict[int, float]:
    """Return block → mean of W over its elements, or no weights before the first visit.

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
    return {block: float(torch.cat(values).mean()) for block, values in sorted(blocks.items())}


def _groups(settings: Settings, layout: Layout) -> list[list[str]]:
    """Return groups of names of tensors that share a weight, unless ``grain`` is ``element``."""
    blocks = sorted({entry.block for entry in layout.entries if entry.block is not None})
    weighed = blocks if settings.adaptive_layers is None else blocks[-settings.adaptive_layers :]
    groups: dict[object, list[str]] = defaultdict(list)
    for entry in layout.entries:
        if entry.block is None or entry.block in weighed:
            groups[entry.block if settings.grain == "block" else entry.name].append(entry.name)
    return list(groups.values())


def _pooled(slopes: Tensors, groups: list[list[str]], each: bool) -> Tensors:
    """Return the slopes, summed over each group unless ``each``; 0 outside the groups."""
    pooled = Tensors.zeros(slopes.layout, slopes.flat.dtype)
    for names in groups:
        total = torch.stack([slopes[name].sum() for name in names]).sum()
        for name in names:
            pooled[name].copy_(slopes[name] if each else total)
    return pooled
