"""FedAMP: the server sends each client its own mixture of all clients' models (Huang et al. 2021).

Algorithm 1 of arXiv:2007.03797, in every round, the server keeping the last φ_i of each client::

    server   samples a cohort S and sends each i ∈ S alone  u_i = Σ_j a_ij φ_j
    client   φ_i ← u_i; local training on L_i(φ), or on L_i(φ) + λ/2α ‖φ − u_i‖²
             sends φ_i and predicts with it
    server   keeps φ_i; computes the attention a among all φ_j

``cosine``: a_i = softmax_j(cos(Δφ_i, Δφ_j) / τ) raised to a floor, Δφ = φ − φ_init, no proximal term: the
baseline of FedPDPO (arXiv:2603.19741).  ``distance``: a_ij = α A'(‖φ_i − φ_j‖²) for j ≠ i, the rest being
a_ii, A(x) = 1 − e^(−x/σ), with the proximal term: FedAMP's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, cast

from pydantic import Field

from prefed.core import (
    ClientTrainer,
    Download,
    Exchange,
    Layout,
    Method,
    Plain,
    Proximal,
    Round,
    State,
    Tensors,
    Upload,
)
from prefed.merge import (
    Aggregator,
    distance_attention,
    largest_alpha,
    lora,
    ordered,
    similarity_attention,
    spread,
)
from prefed.methods.base import ppo, schedule
from prefed.methods.base.fedavg import FedAvgBase
from prefed.methods.base.settings import PersonalSettings

__all__ = ["SOURCE", "Settings", "build", "needs"]

SOURCE = "FedAMP (arXiv:2007.03797), algorithm 1"
KEPT = "client/"
"""Groups of the server's state that hold the clients' models."""


class Settings(PersonalSettings, ppo.BaselineSettings):
    """Settings of FedAMP."""

    lr: float = Field(5e-5, gt=0, description="learning rate of the LoRA")
    attention: Literal["cosine", "distance"] = Field(
        "cosine",
        description="of clients to each other: by the angle of their updates, or FedAMP's own by distance",
    )
    temperature: float = Field(0.5, gt=0, description="for cosine: temperature of the softmax")
    floor: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="for cosine: least weight; left out: 0.05, or 1 / clients if that is less",
    )
    sigma: float | None = Field(
        None,
        gt=0,
        description="for distance: squared distance at which attention falls to 1/e; left out: the mean of "
        "those between the clients' models",
    )
    alpha: float | None = Field(
        None,
        gt=0,
        description="for distance: the server's step, cut in rounds where it would make a weight negative; "
        "left out: sigma / clients, which always serves",
    )
    lam: float = Field(
        0.1, ge=0, description="for distance: strength of the pull to the mixture, times alpha"
    )


def needs(settings: Settings) -> frozenset[str]:
    """The LoRA."""
    return ppo.needs(settings, lora.LORA)


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedAMP over ``layout``.

    Raises:
        ValueError: the merge rules ask for what attention decides.
    """
    config = aggregator.config
    if config.rule != "mean" or config.weights == "mass" or config.optimizer.name != "none":
        raise ValueError(
            "fedamp gives each client a mixture of its own and merges nothing into one model: leave "
            "rule 'mean', weights 'samples' or 'uniform', and optimizer 'none' in [merge]"
        )
    fedavg = FedAvgBase.of(settings, aggregator, rounds)

    def mixture(server: State, client: str) -> Tensors:
        """u_i; the mean of all models for a client the server has none of."""
        row = _attention(server).get(client)
        if row is None:
            return server.tensors["model"]
        senders = sorted(row)
        return aggregator.blend([server.tensors[KEPT + j] for j in senders], [row[j] for j in senders])

    def init_server(initial: Tensors) -> State:
        start = fedavg.init_server(initial)
        return start.update({"initial": start.tensors["model"]}, {"attention": {}, "alpha": None})

    def send(server: State, client: str) -> Download:
        alpha = server.values["alpha"]
        told = {"alpha": alpha} if isinstance(alpha, float) else {}
        return Download({"model": mixture(server, client)}, {**schedule.announce(server), **told})

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        start, pull = fedavg.start(trainer, private, download), None
        if settings.lam and "alpha" in download.scalars:
            strength = settings.lam / download.scalars["alpha"]
            pull = Proximal(strength, to=fedavg.share(start, trainer.round))
        trained = trainer.train(start, fedavg.phase(trainer, download, proximal=pull))
        kept = fedavg.keep(private, trained.tensors).update({"own": trained.tensors.select(fedavg.common)})
        return fedavg.upload(trainer, trained), kept

    def merge(server: State, uploads: Sequence[Upload], now: Round) -> State:
        # A client's model is what it was sent, with what it trained put in.
        news = {
            KEPT + upload.client: mixture(server, upload.client).replace(upload.tensors["model"])
            for upload in ordered(uploads)
        }
        kept = {name: group for name, group in server.tensors.items() if name.startswith(KEPT)} | news
        models = {name.removeprefix(KEPT): model for name, model in sorted(kept.items())}
        sizes = [now.weights[client] if config.weights == "samples" else 1.0 for client in models]
        mean = aggregator.blend(list(models.values()), sizes)
        moved = {client: model.select(fedavg.learnt) for client, model in models.items()}
        alpha = None
        if settings.attention == "cosine":
            origin = server.tensors["initial"].select(fedavg.learnt)
            attention = similarity_attention(
                moved, origin, temperature=settings.temperature, floor=settings.floor
            )
        else:
            sigma = settings.sigma or spread(moved) or 1.0
            alpha = settings.alpha or sigma / len(now.weights)
            if settings.alpha:
                # Whether α is too long a step depends on what clients send, and no upload may end a run.
                alpha = min(alpha, largest_alpha(moved, sigma))
            attention = distance_attention(moved, alpha=alpha, sigma=sigma)
        rows: dict[str, Plain] = {i: {**row} for i, row in attention.items()}
        after = server.update({**news, "model": mean}, {"attention": rows, "alpha": alpha})
        return fedavg.advance(after, uploads)

    def predict(trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        model, own = fedavg.start(trainer, private, published), private.tensors.get("own")
        return model if own is None else model.replace(own)

    def figures(server: State) -> dict[str, float]:
        rows = _attention(server)
        own = [row[client] for client, row in rows.items()]
        return {**fedavg.figures(server), **({"own_weight": sum(own) / len(own)} if own else {})}

    train = Exchange("train", send, work, merge, figures=figures)
    return fedavg.method("fedamp", SOURCE, train, init_server=init_server, predict=predict, personal=True)


def _attention(server: State) -> Mapping[str, Mapping[str, float]]:
    """Receiver → sender → weight, among the clients that have sent a model."""
    return cast("Mapping[str, Mapping[str, float]]", server.values["attention"])
