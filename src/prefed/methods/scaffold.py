"""SCAFFOLD: local steps corrected for each client's drift (Karimireddy et al. 2020, arXiv:1910.06378).

Algorithm 1 with option II, in every round, K local steps of rate η::

    server   samples a cohort S and broadcasts φ and the control variate c
    client   φ_i ← φ; K times φ_i ← φ_i − η (∇L_i(φ_i) − c_i + c)
             c_i⁺ ← c_i − c + (φ − φ_i) / (K η)
             sends φ_i and Δc_i = c_i⁺ − c_i;  c_i ← c_i⁺ stays with the client
    server   φ ← the mean of the φ_i,  c ← c + Σ_{i∈S} p_i Δc_i,  p_i = n_i / Σ_{all clients} n, or 1/N

Robust merge rules also apply to the Δc_i (:meth:`Aggregator.robust_steps`):

- ``median`` and ``trimmed_mean`` compute one step from the Δc_i, and c moves by it times Σ_{i∈S} p_i.
- ``krum`` and ``multi_krum`` select some of the Δc_i and scale their p_i up to the sum Σ_{i∈S} p_i.
- ``norm_clip`` clips the Δc_i to their median norm, and keeps the p_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from prefed.core import ClientTrainer, Download, Layout, Merged, Method, Owner, Round, State, Tensors, Upload
from prefed.merge import Aggregator, sort_uploads
from prefed.methods.base import FedAvgBase, LocalSettings, lora_parts

SOURCE = "SCAFFOLD (arXiv:1910.06378), algorithm 1, option II"
COUNTS_CLIENTS = "its server's control variate is a mean over all clients"


class Settings(LocalSettings):
    """Settings of SCAFFOLD. Control variates require plain SGD.

    (φ − φ_i) / (K η) is the mean gradient of the visit only without momentum, weight decay and clipping. The
    first two are refused, and clipping is off by default.
    """

    lr: float = Field(0.1, gt=0, description="learning rate η of the local SGD")
    optimizer: Literal["sgd"] = Field(
        "sgd", description="local optimiser; control variates require plain SGD"
    )
    weight_decay: float = Field(0.0, ge=0, description="must be 0; control variates require plain SGD")
    clip: float = Field(
        0.0,
        ge=0,
        description="bound on the Euclidean norm of the corrected gradient; 0 for none, as in the paper",
    )

    @model_validator(mode="after")
    def _plain(self) -> Settings:
        if self.momentum or self.weight_decay:
            raise ValueError("control variates require plain SGD: set momentum and weight_decay to 0")
        return self


needs = lora_parts


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """SCAFFOLD over ``layout``.

    Raises:
        ValueError: the weights of ``[merge]`` change with the losses, or its LoRA rule replaces A.
    """
    aggregator.config.same_a("the control variates")
    if aggregator.config.by_loss:
        raise ValueError(
            f"weights {aggregator.config.weights!r} in [merge] change with the losses, but the server's "
            "control variate is a mean with constant weights; use weights 'samples' or 'uniform'"
        )
    fedavg = FedAvgBase.of(settings, aggregator, rounds)

    def zero(initial: Tensors) -> Tensors:
        return initial.select(fedavg.shared_trainable) * 0.0

    def init_server(initial: Tensors) -> State:
        return fedavg.init_server(initial).update({"control": zero(initial)})

    def init_client(initial: Tensors, client: str) -> State:
        return fedavg.init_client(initial, client).update({"control": zero(initial)})

    def send(server: State, client: str, now: Round) -> Download:
        broadcast = fedavg.send(server, client, now)
        return Download({**broadcast.tensors, "control": server.tensors["control"]}, broadcast.scalars)

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        trainable = fedavg.trainable(trainer.round, Owner.SHARED)
        c, c_i = download.tensors["control"].select(trainable), private.tensors["control"].select(trainable)
        start = fedavg.start(trainer, private, download)
        phase = fedavg.phase(trainer, download, correction=c - c_i)
        result = trainer.train(start, phase)
        before, after = start.select(trainable), result.tensors.select(trainable)
        c_next = c_i - c + (before - after) / (result.steps * phase.optimizer.lr)
        control = private.tensors["control"].replace(c_next)
        upload = trainer.upload({"model": after, "control": c_next - c_i}, {"loss": result.loss})
        return upload, fedavg.keep(private, result.tensors).update({"control": control})

    def merge(server: State, uploads: Sequence[Upload], now: Round) -> Merged:
        # c is the mean Σ p_i c_i over all N clients, with p_i = 1/N for uniform weights.
        replies, everyone = sort_uploads(uploads), sum(now.weights.values())
        if aggregator.config.weights == "uniform":
            shares = [1 / len(now.weights)] * len(replies)
        else:
            shares = [now.weights[upload.client] / everyone for upload in replies]
        control = server.tensors["control"]
        for change, share in aggregator.robust_steps(
            [upload.tensors["control"] for upload in replies], shares
        ):
            control = control.replace(control.select(change) + change * share)
        merged, report = fedavg.merge(server, uploads, now)
        return merged.update({"control": control}), report

    def groups(client: str, now: Round) -> dict[str, Layout]:
        (model,) = fedavg.groups(client, now).values()
        return {"model": model, "control": model}

    # A control variate is only valid for the model at which it was computed.
    late = fedavg.late(averages=False)
    train = fedavg.exchange(send=send, work=work, merge=merge, groups=groups, steps={"control"}, late=late)
    return fedavg.method("scaffold", SOURCE, train, init_server=init_server, init_client=init_client)
