"""FedSDG: a shared LoRA, a personal LoRA of the same shape, and a gate per block between them.

With shared θ_g, personal θ_p and logits a, and m = sigmoid(a), the output of a block is
W0 x + s (B_g A_g + m B_p A_p) x. In every round (FedSDG, sections 3.2 and 3.3)::

    server   samples a cohort S and broadcasts θ_g
    client   loads its own θ_p and a; trains all three together on
             L_k + λ1 Σ_l |m_l| + λ2 ‖θ_p‖²                                   eqs. 5 to 8
             sends θ_g^k, which is θ_g + Δ_k                                   eq. 9
    server   α_k = max(0, cos(Δ_k, mean Δ)),  w_k = α_k / (Σ_j α_j + ε)        eq. 10
             θ_g ← θ_g + Σ_k w_k Δ_k                                           eq. 11
    to predict, a client uses the new θ_g with its own m θ_p
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field

from prefed.core import Entry, Layout, Merged, Method, Penalty, Round, State, Tensors, Upload
from prefed.merge import Aggregator, alignment_weights
from prefed.methods.base import FedAvgBase, LocalSettings, lora_parts

SOURCE = "FedSDG, section 3"


class Settings(LocalSettings):
    """Settings of FedSDG: Adam with a constant learning rate and without weight decay."""

    lr: float = Field(1e-3, gt=0, description="learning rate of the shared LoRA")
    personal_lr: float | None = Field(
        None, gt=0, description="learning rate of the personal LoRA and of a personal head; default: lr"
    )
    gate_lr: float = Field(5e-3, gt=0, description="learning rate of the gate logits")
    gate_penalty: float = Field(1e-3, ge=0, description="lambda1, on the sum of the gates")
    personal_penalty: float = Field(
        1e-4, ge=0, description="lambda2, on the squared Euclidean norm of the personal LoRA"
    )
    personal: bool = Field(True, description="personal LoRA and gates; if off, only the shared LoRA")
    branch: Literal["products", "factors"] = Field(
        "products",
        description="combination of the shared and the personal LoRA: products adds m B_p A_p to the shared "
        "product; factors is (B_g + m B_p)(A_g + m A_p), exactly as in eq. 4",
    )
    alignment: Literal["mean", "leave_one_out", "off"] = Field(
        "mean",
        description="weights of uploads by their cosine with the mean update, or with the mean of the others",
    )
    head: Literal["frozen", "shared", "personal"] = Field(
        "frozen",
        description="language model head: frozen as pretrained; or untied, trained, and shared or personal",
    )
    optimizer: Literal["adamw", "adam", "sgd", "rmsprop"] = Field("adam", description="local optimiser")
    weight_decay: float = Field(
        0.0, ge=0, description="weight decay of the local optimiser, which pulls gates towards 1/2"
    )


def needs(settings: Settings) -> frozenset[str]:
    """The LoRA on output projections and, if enabled, the personal LoRA, gates and head."""
    own, factors = settings.personal, settings.branch == "factors"
    parts = {"personal_lora": own, "gate": own, "factors": own and factors, "head": settings.head != "frozen"}
    return lora_parts(settings, "outputs", **parts)


def gates(state: State, layout: Layout) -> dict[int, float]:
    """Return the gates of a client: block → m, from 0 to 1. They are never sent.

    >>> import torch
    >>> from prefed.core import Tensors
    >>> layout = Layout((Entry("gate/0", (1,), "gate", 0), Entry("gate/1", (1,), "gate", 1)))
    >>> own = Tensors(layout, torch.tensor([0.0, 100.0]))
    >>> gates(State({"personal": own}), layout)
    {0: 0.5, 1: 1.0}
    """
    own = state.tensors.get("personal", Tensors.empty())
    entries = [layout[name] for name in own if layout[name].part == "gate"]
    return {entry.block: float(own[entry.name].sigmoid()) for entry in entries if entry.block is not None}


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedSDG over ``layout``.

    Raises:
        ValueError: alignment cannot be combined with ``[merge]``.
    """
    config = aggregator.config
    other = not config.plain_weights
    if settings.alignment != "off" and (other or not config.kind.weighted):
        setting = f"weights {config.weights!r}" if other else f"rule {config.rule!r}"
        raise ValueError(
            f"{setting} in [merge] cannot be combined with the weights of FedSDG; set alignment to 'off'"
        )

    def personal(entry: Entry) -> bool:
        return entry.part in ("personal_lora", "gate") or (
            entry.part == "head" and settings.head == "personal"
        )

    fedavg = FedAvgBase.of(settings, aggregator, rounds, personal)
    second = tuple(entry.name for entry in layout.entries if entry.part == "personal_lora")
    logits = tuple(entry.name for entry in layout.entries if entry.part == "gate")
    penalties = (
        Penalty("gate", settings.gate_penalty, logits),
        Penalty("l2", settings.personal_penalty, second),
    )
    slow = settings.lr if settings.personal_lr is None else settings.personal_lr
    rates = {entry.name: slow for entry in layout.entries if personal(entry)}
    rates |= fedavg.rates(gate=settings.gate_lr)
    changes: dict[str, Any] = {"rates": rates, "penalties": penalties if second else ()}

    def merge(server: State, uploads: Sequence[Upload], now: Round) -> Merged:
        if settings.alignment == "off":
            return fedavg.merge(server, uploads, now)
        weights: dict[str, float] = {}

        def weigh(updates: Mapping[str, Tensors]) -> Mapping[str, float]:
            weights.update(alignment_weights(updates, leave_one_out=settings.alignment == "leave_one_out"))
            return weights

        merged, report = fedavg.merge(server, uploads, now, weigh)
        aligned = sum(weight > 0 for weight in weights.values()) / max(len(weights), 1)
        return merged, {**report, "aligned": aligned}

    # The cosine is only defined for updates from a common starting point.
    late = fedavg.late(averages=settings.alignment == "off")
    train = fedavg.exchange(
        work=partial(fedavg.work, **changes),
        merge=merge,
        late=late,
    )
    profile = (lambda private: {"gate": gates(private, layout)}) if logits else None
    return fedavg.method("fedsdg", SOURCE, train, adapt=partial(fedavg.adapt, **changes), profile=profile)
