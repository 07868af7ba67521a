"""FedVPA-GP: a variational selector with priors and prototypes learned across clients (arXiv:2605.30873).

The posteriors of FedVPL may collapse to N(0, I) for all clients. In FedVPA-GP, the prior of each client is a
mixture of the other clients' posteriors, and tastes are pulled towards prototypes P. In every round::

    server   samples a cohort S; sends i ∈ S: φ, the others' last posteriors N_j = N(μ̄_j, σ̄_j²), its label y*
    client   φ_i ← φ; K local steps with contexts disjoint from batches, z ~ q(z | context) = N(μ, σ²), on
                 −log σ(b + r_w − r_l) + β KL(q ‖ Σ_{j≠i} w_j N_j) + λ mean_d (z − p_y*)² + γ ‖P Pᵀ − s² I‖²
             w = softmax((log π_i + g) / τ), g Gumbel noise, τ decreasing over rounds; log π_i stays with i
             sends φ_i, which includes P, and its posterior under φ over contexts of all its pairs
    server   φ ← Σ_{i∈S} p_i φ_i;  y* ← balanced k-means of the μ̄_i, with clusters matched to prototypes

b is the log-odds of the chosen response under the frozen model. It is dropped for half of the pairs of each
step, and log σ² is capped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, cast

from pydantic import Field

from prefed.core import (
    ClientTrainer,
    Download,
    Entry,
    Layout,
    Merged,
    Method,
    Objective,
    Plain,
    Round,
    State,
    Tensors,
    Upload,
)
from prefed.core.lazy import torch
from prefed.merge import Aggregator
from prefed.merge.clustering import assign_prototypes
from prefed.methods.base.tastes import (
    PEERS,
    PROTOTYPES,
    Tastes,
    TasteSettings,
    peers_of,
    posteriors,
    taste_parts,
)
from prefed.train.losses import LATENT
from prefed.train.losses.tastes import CAPS, PRIORS, temperature

SOURCE = "FedVPA-GP (arXiv:2605.30873)"
SINGLE_UPLOADS = "its server stores each client's posterior and sends it to the others"
COUNTS_CLIENTS = "its server stores a posterior for every client"
TRUST = "trust"


class Settings(TasteSettings):
    """Settings of FedVPA-GP. With ``prior = "standard"`` and everything else off, it is FedVPL.

    >>> Settings().goal().settings["capped"], sorted(needs(Settings(prototypes=False, cap="off")))
    (1.0, ['latent', 'posterior', 'variational'])
    """

    prior: Literal["mixture", "standard", "bound"] = Field(
        "mixture",
        description="prior of z: mixture of the other clients' posteriors; standard, N(0, I); bound, the "
        "mixture with the convex upper bound on its KL",
    )
    prior_from: Literal["all", "last_round"] = Field(
        "all",
        description="clients in the mixture: all that ever sent a posterior, or, as in the paper, those of "
        "the last round",
    )
    samples: int = Field(4, ge=1, description="samples for estimating the KL to the mixture")
    trust_start: Literal["uniform", "sizes"] = Field(
        "uniform",
        description="initial weights of the mixture: uniform, or by numbers of pairs, which reveals these "
        "numbers to all clients",
    )
    trust_lr: float = Field(0.01, gt=0, description="learning rate of the mixture weights")
    first_temperature: float = Field(1.0, gt=0, description="temperature of the weights in the first round")
    last_temperature: float = Field(0.1, gt=0, description="temperature of the weights in the last round")
    prototypes: bool = Field(True, description="pull tastes towards prototypes")
    balanced: bool = Field(True, description="let numbers of clients per prototype differ by at most 1")
    pull: float = Field(0.01, ge=0, description="weight of the pull towards a client's prototype")
    orthogonality: float = Field(0.1, ge=0, description="weight of the orthogonality loss of the prototypes")
    cap: Literal["hard", "soft", "off"] = Field(
        "hard", description="upper bound of −2 on log σ² of a posterior"
    )
    logit_dropout: float = Field(
        0.5, ge=0, lt=1, description="share of the pairs of a step without the base model's log-odds"
    )

    def goal(self) -> Objective:
        """The loss that clients minimise, without the settings that depend on the visit."""
        kinds = {"prior": float(PRIORS.index(self.prior)), "capped": float(CAPS.index(self.cap))}
        names = ("beta", "pull", "orthogonality", "logit_dropout", "samples")
        values = {name: float(getattr(self, name)) for name in names}
        return Objective(LATENT.name, LATENT.resolve({**values, **kinds}))


def needs(settings: Settings) -> frozenset[str]:
    """The parts of a variational selector and, if enabled, prototypes and an initial value below the cap."""
    return taste_parts(settings, prototypes=settings.prototypes, cap=settings.cap != "off")


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedVPA-GP over ``layout``."""
    tastes = Tastes.over(settings, aggregator, rounds)
    mixture = settings.prior != "standard"

    def send(server: State, client: str, now: Round) -> Download:
        download = tastes.send(server, client, now)
        peers = peers_of(server, client, latest=settings.prior_from == "last_round") if mixture else None
        groups = {**download.tensors, **({} if peers is None else {PEERS: peers})}
        label = _labels(server).get(client)
        return Download(groups, {**download.scalars, **({} if label is None else {"label": float(label)})})

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        now, who = trainer.round, dict[str, float]()
        if settings.prototypes and "label" in download.scalars:
            who["label"] = download.scalars["label"]
        if not mixture or PEERS not in download.tensors:
            objective = Objective(LATENT.name, {**settings.goal().settings, **who})
            return tastes.work(trainer, private, download, objective=objective)
        if len(download.tensors[PEERS]["peers/present"]) != len(now.weights):
            raise ValueError(
                f"the server sent posteriors of {len(download.tensors[PEERS]['peers/present'])} clients, but "
                f"there are {len(now.weights)}"
            )
        who["own"] = float(sorted(now.weights).index(trainer.client))
        who["temperature"] = temperature(
            now.number, now.rounds, settings.first_temperature, settings.last_temperature
        )
        trust = private.tensors[TRUST] if TRUST in private.tensors else _first_trust(settings, now)
        upload, result = tastes.visit(
            trainer,
            private,
            download,
            objective=Objective(LATENT.name, {**settings.goal().settings, **who}),
            constants={PEERS: download.tensors[PEERS]},
            auxiliary=trust,
            rates=dict.fromkeys(trust, settings.trust_lr),
        )
        after = tastes.keep(private, result.tensors)
        return upload, after if result.auxiliary is None else after.update({TRUST: result.auxiliary})

    def merge(server: State, uploads: Sequence[Upload], now: Round) -> Merged:
        merged, report = tastes.merge(server, uploads, now)
        known = {client: posterior.mean for client, posterior in posteriors(merged).items()}
        if not settings.prototypes or not known:
            return merged, report
        prototypes = merged.tensors[tastes.group][PROTOTYPES]
        key = now.key.at(PROTOTYPES)
        labels = assign_prototypes(known, prototypes, key, balanced=settings.balanced)
        groups: dict[str, Plain] = {
            str(number): [client for client in labels if labels[client] == number]
            for number in range(len(prototypes))
        }
        return merged.update(values={"labels": {**labels}}), {**report, "prototypes": groups}

    def trust(private: State, server: State, client: str) -> dict[str, float]:
        peers = peers_of(server, client, latest=settings.prior_from == "last_round")
        if TRUST not in private.tensors or peers is None:
            return {}
        logits, present = private.tensors[TRUST].flat.float(), peers["peers/present"] > 0
        weights = torch.softmax(logits.masked_fill(~present, -math.inf), 0).tolist()
        members = cast("list[str]", server.values["members"])
        return {name: weight for name, weight in zip(members, weights, strict=True) if weight > 0}

    train = tastes.exchange(send=send, work=work, merge=merge)
    return tastes.taste_method("fedvpa", SOURCE, train, trust=trust if mixture else None)


def _labels(server: State) -> dict[str, int]:
    """Return client → index of its prototype; empty before the first merge."""
    return cast("dict[str, int]", server.values.get("labels", {}))


def _first_trust(settings: Settings, now: Round) -> Tensors:
    """Return the initial log π of a client: one number per client, including itself."""
    sizes = [now.weights[client] for client in sorted(now.weights)]
    uniform = settings.trust_start == "uniform"
    logits = [0.0 if uniform else math.log(size / sum(sizes)) for size in sizes]
    return Tensors(Layout((Entry("trust/logits", (len(sizes),), TRUST),)), torch.tensor(logits))
