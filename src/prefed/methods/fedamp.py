"""FedAMP: the server sends each client its own mixture of all client models (Huang et al. 2021).

Algorithm 1 of arXiv:2007.03797, in every round. The server keeps the last φ_i of each client::

    server   samples a cohort S and sends each i ∈ S  u_i = Σ_j a_ij φ_j
    client   φ_i ← u_i; local training on L_i(φ), or on L_i(φ) + λ/2α ‖φ − u_i‖²
             sends φ_i and predicts with it
    server   keeps φ_i; computes the attention a among all φ_j

``cosine`` is the baseline of FedPDPO (arXiv:2603.19741): a_i = softmax_j(cos(Δφ_i, Δφ_j) / τ), raised to a
floor, with Δφ = φ − φ_init and no proximal term. ``distance`` is that of the FedAMP paper:
a_ij = α A'(‖φ_i − φ_j‖²) for j ≠ i and a_ii the rest, with A(x) = 1 − e^(−x/σ) and the proximal term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, cast

from pydantic import Field

from prefed.core import (
    ClientTrainer,
    Download,
    Layout,
    Merged,
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
    mean_squared_distance,
    similarity_attention,
    sort_uploads,
)
from prefed.methods.base import BaselineSettings, FedAvgBase, PersonalSettings, lora_parts, lr_schedule

SOURCE = "FedAMP (arXiv:2007.03797), algorithm 1"
SINGLE_UPLOADS = "its server mixes the clients' individual models for every client"
COUNTS_CLIENTS = "its server mixes a model for every client"
CLIENT = "client/"
"""Prefix of the server groups with the models of clients."""


class Settings(PersonalSettings, BaselineSettings):
    """Settings of FedAMP."""

    lr: float = Field(5e-5, gt=0, description="learning rate of the LoRA")
    attention: Literal["cosine", "distance"] = Field(
        "cosine",
        description="attention between clients: by cosine of updates, or by distance as in the paper",
    )
    temperature: float = Field(0.5, gt=0, description="for cosine: temperature of the softmax")
    floor: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="for cosine: minimum weight; default: the lesser of 0.05 and 1 / clients",
    )
    sigma: float | None = Field(
        None,
        gt=0,
        description="for distance: squared distance at which attention falls to 1/e; default: mean squared "
        "distance between client models",
    )
    alpha: float | None = Field(
        None,
        gt=0,
        description="for distance: step of the server, lowered in rounds in which it would make a weight "
        "negative; default: sigma / clients",
    )
    lam: float = Field(
        0.1, ge=0, description="for distance: strength of the pull towards the mixture, times alpha"
    )


needs = lora_parts


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedAMP over ``layout``.

    Raises:
        ValueError: ``[merge]`` sets a rule, weights or an optimiser that attention replaces.
    """
    config = aggregator.config
    if config.rule != "mean" or not config.plain_weights or config.optimizer.name != "none":
        raise ValueError(
            "fedamp computes one mixture per client; in [merge], use rule 'mean', weights 'samples' or "
            "'uniform', and optimizer 'none'"
        )
    fedavg = FedAvgBase.of(settings, aggregator, rounds)

    def mixture(server: State, client: str) -> Tensors:
        """u_i, or the mean of all models for a client without a model on the server."""
        row = _attention(server).get(client)
        if row is None:
            return server.tensors["model"]
        senders = sorted(row)
        return aggregator.blend([server.tensors[CLIENT + j] for j in senders], [row[j] for j in senders])

    def init_server(initial: Tensors) -> State:
        start = fedavg.init_server(initial)
        return start.update({"initial": start.tensors["model"]}, {"attention": {}, "alpha": None})

    def send(server: State, client: str, now: Round) -> Download:
        alpha = server.values["alpha"]
        scalars = {"alpha": alpha} if isinstance(alpha, float) else {}
        return Download({"model": mixture(server, client)}, {**lr_schedule.announce(server), **scalars})

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        start, pull = fedavg.start(trainer, private, download), None
        if settings.lam and "alpha" in download.scalars:
            strength = settings.lam / download.scalars["alpha"]
            pull = Proximal(strength, to=fedavg.share(start, trainer.round))
        result = trainer.train(start, fedavg.phase(trainer, download, proximal=pull))
        return fedavg.upload(trainer, result.tensors, result.loss), fedavg.keep_own(private, result.tensors)

    def merge(server: State, uploads: Sequence[Upload], now: Round) -> Merged:
        # The model of a client is its mixture with the trained tensors replaced.
        news = {
            CLIENT + upload.client: mixture(server, upload.client).replace(upload.tensors["model"])
            for upload in sort_uploads(uploads)
        }
        groups = {name: group for name, group in server.tensors.items() if name.startswith(CLIENT)} | news
        models = {name.removeprefix(CLIENT): model for name, model in sorted(groups.items())}
        sizes = [now.weights[client] if config.weights == "samples" else 1.0 for client in models]
        mean = aggregator.blend(list(models.values()), sizes)
        trained = {client: model.select(fedavg.shared_trainable) for client, model in models.items()}
        alpha = None
        if settings.attention == "cosine":
            origin = server.tensors["initial"].select(fedavg.shared_trainable)
            attention = similarity_attention(
                trained, origin, temperature=settings.temperature, floor=settings.floor
            )
        else:
            sigma = settings.sigma or mean_squared_distance(trained) or 1.0
            alpha = settings.alpha or sigma / len(now.weights)
            if settings.alpha:
                # The largest α depends on the client models, and no upload may end a run.
                alpha = min(alpha, largest_alpha(trained, sigma))
            attention = distance_attention(trained, alpha=alpha, sigma=sigma)
        rows: dict[str, Plain] = {i: {**row} for i, row in attention.items()}
        after = server.update({**news, "model": mean}, {"attention": rows, "alpha": alpha})
        after, own = fedavg.advance(after, uploads), [row[client] for client, row in attention.items()]
        return after, {**lr_schedule.announce(after), "own_weight": sum(own) / len(own)}

    train = fedavg.exchange(send=send, work=work, merge=merge, late=fedavg.late(averages=False))
    return fedavg.method(
        "fedamp", SOURCE, train, init_server=init_server, predict=fedavg.predict_own, personal=True
    )


def _attention(server: State) -> Mapping[str, Mapping[str, float]]:
    """Return receiver → sender → weight, for clients that have sent a model."""
    return cast("Mapping[str, Mapping[str, float]]", server.values["attention"])
