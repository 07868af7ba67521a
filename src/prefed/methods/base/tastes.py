"""The steps of a round with a variational selector: clients also send posteriors of their tastes.

Clients send their posterior N(μ̄, σ̄²) of the latent taste z. The server keeps the last posterior of each
client, and publishes the mean or median of the μ̄ as the population taste. The z of a model is one of its
tensors, which is set and never trained.

The server state contains the posteriors as the group :data:`PEERS`, and the values ``"members"``, all clients
by index, and ``"sent"``, client → the round of its last posterior.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import Field, model_validator

from prefed.core import (
    ClientTrainer,
    Download,
    Entry,
    Exchange,
    Layout,
    Merged,
    Method,
    Owner,
    PhaseResult,
    Round,
    State,
    Tensors,
    Upload,
)
from prefed.core.lazy import torch
from prefed.core.privacy import check_noise
from prefed.merge import Aggregator, WeightFunction, lora
from prefed.merge.posteriors import CENTER, Posterior, active_units, bound_posteriors, privatize, summarize
from prefed.methods.base.fedavg import FedAvgBase
from prefed.methods.base.settings import SelectorSettings


class TasteSettings(SelectorSettings):
    """Settings of variational selectors."""

    lr: float = Field(3e-3, gt=0, description="learning rate of the local optimiser")
    local_steps: int | None = Field(
        2, ge=1, description=SelectorSettings.model_fields["local_steps"].description
    )
    beta: float = Field(0.001, gt=0, description="weight of the KL between a posterior and its prior")
    lora: bool = Field(False, description="also train a LoRA of the base model, as in the paper")
    posterior_clip: float = Field(
        0.0, ge=0, description="bound on the norm of the posterior that a client sends; 0: none"
    )
    posterior_noise: float = Field(
        0.0,
        ge=0,
        description="standard deviation of the Gaussian noise on the posterior, relative to posterior_clip; "
        "0: none",
    )

    @model_validator(mode="after")
    def _bounded_noise(self) -> TasteSettings:
        if self.posterior_noise and not self.posterior_clip:
            raise ValueError("posterior_noise requires posterior_clip above 0")
        if self.posterior_noise:
            check_noise(self.posterior_clip * self.posterior_noise, "posterior_clip times posterior_noise")
        return self


PEERS = "peers"
"""The group with the last posteriors of all clients, in the order of their ids."""


def newest(server: State, received: Mapping[str, Posterior], longest: float) -> dict[str, Posterior]:
    """Return the last posterior of each client, sorted by client, with those just received bounded.

    ``longest`` is an argument of :func:`~prefed.merge.posteriors.bound_posteriors`.
    """
    known = {**posteriors(server), **received}
    bounded = bound_posteriors(known, longest)
    return {client: bounded[client] if client in received else known[client] for client in sorted(known)}


def keep(server: State, known: Mapping[str, Posterior], senders: Collection[str], now: Round) -> State:
    """Store the posteriors ``known``, of which those of ``senders`` were sent in this round."""
    members = sorted(now.weights)
    sent = {**rounds_of(server), **dict.fromkeys(senders, now.number)}
    return server.update(
        {PEERS: _table(known, members)},
        {"members": cast("list[Any]", members), "sent": {c: sent[c] for c in sorted(sent)}},
    )


def posteriors(server: State) -> dict[str, Posterior]:
    """Return the last posterior of each client, sorted by client."""
    if PEERS not in server.tensors:
        return {}
    peers, members = server.tensors[PEERS], cast("list[str]", server.values["members"])
    rows = zip(members, peers["peers/mean"], peers["peers/log_variance"], strict=True)
    return {client: Posterior(*row) for client, *row in rows if client in rounds_of(server)}


def rounds_of(server: State) -> Mapping[str, int]:
    """Return client → the round of its last posterior."""
    return cast("Mapping[str, int]", server.values.get("sent", {}))


def peers_of(server: State, client: str, *, latest: bool) -> Tensors | None:
    """Return :data:`PEERS` without the posterior of ``client``; ``None`` before the first posterior.

    ``latest`` selects only the posteriors of the last round with posteriors.
    """
    if PEERS not in server.tensors:
        return None
    sent, peers = rounds_of(server), server.tensors[PEERS]
    last, others = max(sent.values()), Tensors(peers.layout, peers.flat.clone())
    for index, name in enumerate(cast("list[str]", server.values["members"])):
        if name == client or (latest and sent.get(name) != last):
            for rows in others.values():
                rows[index] = 0
    return others


def _table(known: Mapping[str, Posterior], members: Sequence[str]) -> Tensors:
    """Return the posteriors as rows, with zeros and ``present`` = 0 for members without one."""
    mean = next(iter(known.values())).mean
    rows = [Entry(f"peers/{name}", (len(members), len(mean)), PEERS) for name in Posterior._fields]
    layout = Layout((*rows, Entry("peers/present", (len(members),), PEERS)))
    table = Tensors.zeros(layout, mean.dtype)
    for index, client in enumerate(members):
        if client in known:
            table["peers/present"][index] = 1
            for name, value in known[client]._asdict().items():
                table[f"peers/{name}"][index] = value
    return table


POSTERIOR, TASTE, PROTOTYPES = "posterior", "latent", "prototypes"
"""The parts of the posterior, of the taste of a model, and of the prototypes."""
Z = f"{TASTE}/z"
POPULATION = "taste"
"""The group with the population taste."""


def taste_parts(settings: TasteSettings, **optional: bool) -> frozenset[str]:
    """Return the parts and flags of a variational selector, including true ``optional`` ones."""
    optional = {**optional, lora.LORA: settings.lora}
    return frozenset(
        {"variational", POSTERIOR, TASTE, *(part for part, needed in optional.items() if needed)}
    )


@dataclass(frozen=True)
class Tastes(FedAvgBase):
    """The steps of a FedAvg round, with posteriors.

    The server state also contains the group :data:`POPULATION`, the center of the μ̄, and the posteriors.
    """

    @classmethod
    def over(cls, settings: TasteSettings, aggregator: Aggregator, rounds: int) -> Tastes:
        """Return the steps over the layout of the aggregator."""

        def owner(entry: Entry) -> Owner:
            return Owner.FROZEN if entry.part == TASTE else Owner.SHARED

        return cls(settings, aggregator, rounds, aggregator.ownership(owner), apart=frozenset({POSTERIOR}))

    # The client

    def visit(
        self, trainer: ClientTrainer, private: State, download: Download, **changes: Any
    ) -> tuple[Upload, PhaseResult]:
        """Train φ_i ← φ; send φ_i and, unless there are too few pairs, the posterior under φ.

        Posteriors are comparable under φ, which all clients received, but not under φ_i, since local steps
        may transform z.
        """
        start = self.start(trainer, private, download)
        result = trainer.train(start, self.phase(trainer, download, **changes))
        groups = {self.group: self.share(result.tensors, trainer.round)}
        if self.may_report(trainer.client, trainer.round):
            groups[POSTERIOR] = self.posterior(trainer, start)
        return trainer.upload(groups, {"loss": result.loss}), result

    def work(
        self, trainer: ClientTrainer, private: State, download: Download, **changes: Any
    ) -> tuple[Upload, State]:
        """Visit, and keep the personal tensors, if any."""
        upload, result = self.visit(trainer, private, download, **changes)
        return upload, self.keep(private, result.tensors)

    def may_report(self, client: str, now: Round) -> bool:
        """Whether the client has enough pairs to send a posterior."""
        return now.privacy.may_report(now.weights[client])

    def posterior(self, trainer: ClientTrainer, tensors: Tensors) -> Tensors:
        """Return the posterior to send, 2 · d_z numbers, clipped and with noise if configured."""
        settings = cast("TasteSettings", self.settings)
        summary = summarize(*trainer.posteriors(tensors, settings.goal()))
        sent = privatize(
            summary, settings.posterior_clip, settings.posterior_noise, trainer.key.at(POSTERIOR)
        )
        return Tensors.gather(
            self._posterior_layout, {f"{POSTERIOR}/{name}": value for name, value in sent._asdict().items()}
        )

    def groups(self, client: str, now: Round) -> dict[str, Layout]:
        """Return the group of φ and, if the client may send one, that of its posterior."""
        more = {POSTERIOR: self._posterior_layout} if self.may_report(client, now) else {}
        return {**super().groups(client, now), **more}

    @property
    def _posterior_layout(self) -> Layout:
        layout = self.aggregator.layout
        return layout.select(entry.name for entry in layout.entries if entry.part == POSTERIOR)

    def predict(self, trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        """Return φ with μ̄ of the client's training pairs, or with the population taste without pairs."""
        return self._infer(trainer, self._published(trainer, private, published))

    def infer(self, trainer: ClientTrainer, published: Download, pairs: int) -> Tensors:
        """Return φ with μ̄ inferred from ``pairs`` training pairs of a newcomer, without training."""
        return self._infer(trainer, self._published(trainer, State(), published), pairs)

    def adapt(
        self, trainer: ClientTrainer, published: Download, steps: int, *, pull: float = 0.0, **changes: Any
    ) -> Tensors:
        """Return the model of a newcomer after ``steps`` steps, with the taste inferred from its pairs.

        Its prior is N(0, I), and it has no prototype.
        """
        model = super().adapt(trainer, published, steps, pull=pull, **changes)
        return self._infer(trainer, model.replace(published.tensors[POPULATION]))

    def _published(self, trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        return self.start(trainer, private, published).replace(published.tensors[POPULATION])

    def _infer(self, trainer: ClientTrainer, model: Tensors, pairs: int | None = None) -> Tensors:
        goal = self.settings.goal()
        means, log_variances = trainer.posteriors(model, goal, pairs=pairs)
        return model.replace({Z: summarize(means, log_variances).mean}) if len(means) else model

    # The server

    def late(self, averages: bool = False) -> Literal["refused", "model", "delta"]:
        """Refuse late uploads by default: a posterior belongs to the φ of its round."""
        return super().late(averages)

    def init_server(self, initial: Tensors) -> State:
        """Initialise φ⁰, and the population taste with the mean of N(0, I)."""
        taste = initial.select(entry.name for entry in initial.layout.entries if entry.part == TASTE)
        return (
            super().init_server(initial).update({POPULATION: Tensors.zeros(taste.layout, taste.flat.dtype)})
        )

    def merge(
        self, server: State, uploads: Sequence[Upload], now: Round, weigh: WeightFunction | None = None
    ) -> Merged:
        """Merge the φ_i into φ, and store the new posteriors.

        The population taste is the mean of the last μ̄ of all clients or, under robust rules, their median.
        With two or more posteriors, the report has the number of active units.
        """
        merged, report = super().merge(server, uploads, now, weigh)
        received = {
            upload.client: Posterior(*upload.tensors[POSTERIOR].values())
            for upload in uploads
            if POSTERIOR in upload.tensors
        }
        # Prototypes before the merge, so that clients cannot influence the bound on their own posteriors.
        prototypes = server.tensors[self.group].get(PROTOTYPES)
        longest = 0.0 if prototypes is None else float(prototypes.norm(dim=1).max())
        known = newest(merged, received, longest)
        if not known:
            return merged, report
        means = torch.stack([posterior.mean for posterior in known.values()]).double()
        robust = self.aggregator.config.rule != "mean"
        center = torch.quantile(means, 0.5, dim=0) if robust else means.mean(0)
        taste = server.tensors[POPULATION].replace({Z: center})
        merged = keep(merged, known, received, now).update({POPULATION: taste})
        kept = [posterior.mean for posterior in posteriors(merged).values()]
        active = {"active_units": active_units(torch.stack(kept))} if len(kept) > 1 else {}
        return merged, {**report, **active}

    def exchange(self, name: str = "train", *, steps: Collection[str] = (), **changes: Any) -> Exchange:
        """Return an exchange in which clipping measures log σ̄² from ``CENTER``."""
        return super().exchange(name, steps=steps, origins={f"{POSTERIOR}/log_variance": CENTER}, **changes)

    def publish(self, server: State, client: str) -> Download:
        """Return φ and the population taste."""
        return Download({self.group: server.tensors[self.group], POPULATION: server.tensors[POPULATION]})

    def taste_method(self, name: str, source: str, *exchanges: Exchange, **changes: Any) -> Method:
        """Return the method of these steps, with the fields of :class:`Method` in ``changes`` replaced."""
        moves = {"personal": True, "predict": self.predict, "infer": self.infer, "tastes": True}
        return self.method(name, source, *exchanges, **{**moves, **changes})
