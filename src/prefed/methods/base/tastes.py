"""The moves of a round with a variational selector: clients also send what they infer of their own taste.

Next to its visit's tensors a client sends its posterior N(μ̄, σ̄²) of the latent taste z. The server keeps the
last posterior of each client, and publishes the mean of the μ̄, or their median, as the population's taste.
The z with which a model judges is one tensor of it, which is filled in and never trained.

The server's state holds the posteriors as the group :data:`PEERS`, with the values ``"members"``, all clients
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
from prefed.merge.tastes import CENTER, Posterior, active_units, bound_posteriors, privatize, summarize
from prefed.methods.base.fedavg import FedAvgBase
from prefed.methods.base.settings import SelectorSettings


class TasteSettings(SelectorSettings):
    """How a client trains a variational selector."""

    lr: float = Field(3e-3, gt=0, description="learning rate of the local optimiser")
    local_steps: int | None = Field(
        2, ge=1, description=SelectorSettings.model_fields["local_steps"].description
    )
    beta: float = Field(0.001, gt=0, description="weight of the KL between a posterior and its prior")
    lora: bool = Field(False, description="train a LoRA of the base model too, which the paper does")
    posterior_clip: float = Field(
        0.0, ge=0, description="bound on the length of the posterior that a client sends; 0: none"
    )
    posterior_noise: float = Field(
        0.0, ge=0, description="standard deviation of the Gaussian noise on it, over posterior_clip; 0: none"
    )

    @model_validator(mode="after")
    def _bounded_noise(self) -> TasteSettings:
        if self.posterior_noise and not self.posterior_clip:
            raise ValueError("posterior_noise needs a bound on what it hides: set posterior_clip above 0")
        if self.posterior_noise:
            check_noise(self.posterior_clip * self.posterior_noise, "posterior_clip times posterior_noise")
        return self


PEERS = "peers"
"""The group with the last posteriors of all clients, in the order of their ids."""


def newest(server: State, told: Mapping[str, Posterior], longest: float) -> dict[str, Posterior]:
    """Client → its last posterior, sorted by client; those that clients have just told, bounded.

    Args:
        longest: as :func:`~prefed.merge.tastes.bound_posteriors` takes it.
    """
    known = {**posteriors(server), **told}
    bounded = bound_posteriors(known, longest)
    return {client: bounded[client] if client in told else known[client] for client in sorted(known)}


def keep(server: State, known: Mapping[str, Posterior], told: Collection[str], now: Round) -> State:
    """``server`` with the posteriors ``known``, of which those of ``told`` were sent in this round."""
    members = sorted(now.weights)
    sent = {**rounds_of(server), **dict.fromkeys(told, now.number)}
    return server.update(
        {PEERS: _table(known, members)},
        {"members": cast("list[Any]", members), "sent": {c: sent[c] for c in sorted(sent)}},
    )


def posteriors(server: State) -> dict[str, Posterior]:
    """Client → its last posterior, sorted by client."""
    if PEERS not in server.tensors:
        return {}
    peers, members = server.tensors[PEERS], cast("list[str]", server.values["members"])
    rows = zip(members, peers["peers/mean"], peers["peers/log_variance"], strict=True)
    return {client: Posterior(*row) for client, *row in rows if client in rounds_of(server)}


def rounds_of(server: State) -> Mapping[str, int]:
    """Client → the round in which it sent its last posterior."""
    return cast("Mapping[str, int]", server.values.get("sent", {}))


def peers_of(server: State, client: str, *, latest: bool) -> Tensors | None:
    """:data:`PEERS` as ``client`` gets it, without its own; ``None`` before the first posterior.

    Args:
        latest: without those of clients that sent none in the last round in which any came.
    """
    if PEERS not in server.tensors:
        return None
    sent, members = rounds_of(server), cast("list[str]", server.values["members"])
    last = max(sent.values())
    others = {
        name: posterior
        for name, posterior in posteriors(server).items()
        if name != client and (not latest or sent[name] == last)
    }
    return _table(others, members, server.tensors[PEERS].layout)


def _table(known: Mapping[str, Posterior], members: Sequence[str], layout: Layout | None = None) -> Tensors:
    """The posteriors as rows; zeros for a member without one. ``present`` is 1 where there is one, else 0."""
    if layout is None:
        width = len(next(iter(known.values())).mean)
        rows = [Entry(f"peers/{name}", (len(members), width), PEERS) for name in Posterior._fields]
        layout = Layout((*rows, Entry("peers/present", (len(members),), PEERS)))
    dtype = next((posterior.mean.dtype for posterior in known.values()), torch.float32)
    table = Tensors.zeros(layout, dtype)
    for index, client in enumerate(members):
        if client in known:
            table["peers/present"][index] = 1
            for name, value in known[client]._asdict().items():
                table[f"peers/{name}"][index] = value
    return table


POSTERIOR, TASTE, PROTOTYPES = "posterior", "latent", "prototypes"
"""The parts of a client's posterior, of the taste with which a model judges, and of the prototypes."""
Z = f"{TASTE}/z"
POPULATION = "taste"
"""The group with the population's taste."""


def taste_parts(settings: TasteSettings, **optional: bool) -> frozenset[str]:
    """The parts and flags that a variational selector needs, with those of ``optional`` that are true."""
    optional = {**optional, lora.LORA: settings.lora}
    return frozenset(
        {"variational", POSTERIOR, TASTE, *(part for part, needed in optional.items() if needed)}
    )


@dataclass(frozen=True)
class Tastes(FedAvgBase):
    """The usual moves of a round, with posteriors.

    The server's state also holds the group :data:`POPULATION`, the center of the clients' μ̄, and after the
    first merge what :mod:`prefed.methods.base.tastes` keeps.
    """

    @classmethod
    def over(cls, settings: TasteSettings, aggregator: Aggregator, rounds: int) -> Tastes:
        """The moves over the aggregator's layout; the LoRA rule decides about a LoRA."""

        def owner(entry: Entry) -> Owner:
            return Owner.FROZEN if entry.part == TASTE else Owner.SHARED

        return cls(settings, aggregator, rounds, aggregator.ownership(owner), apart=frozenset({POSTERIOR}))

    # The client

    def visit(
        self, trainer: ClientTrainer, private: State, download: Download, **changes: Any
    ) -> tuple[Upload, PhaseResult]:
        """Train φ_i ← φ; send φ_i, and the posterior under φ unless it is one over too few pairs.

        Under φ, which all clients got, their posteriors can be compared. A client's own steps may turn z its
        own way: under φ_i two clients of one taste can lie far apart.
        """
        start = self.start(trainer, private, download)
        result = trainer.train(start, self.phase(trainer, download, **changes))
        groups = {self.group: self.share(result.tensors, trainer.round)}
        if self.tells(trainer.client, trainer.round):
            groups[POSTERIOR] = self.posterior(trainer, start)
        return trainer.upload(groups, {"loss": result.loss}), result

    def work(
        self, trainer: ClientTrainer, private: State, download: Download, **changes: Any
    ) -> tuple[Upload, State]:
        """A visit whose private state is the personal tensors, if any."""
        upload, result = self.visit(trainer, private, download, **changes)
        return upload, self.keep(private, result.tensors)

    def tells(self, client: str, now: Round) -> bool:
        """Whether the client has enough pairs to send a posterior, which is a mean over them."""
        return now.privacy.may_report(now.weights[client])

    def posterior(self, trainer: ClientTrainer, tensors: Tensors) -> Tensors:
        """What the client tells of its taste: 2 · d_z numbers, clipped and with noise where asked."""
        settings = cast("TasteSettings", self.settings)
        summary = summarize(*trainer.posteriors(tensors, settings.goal()))
        told = privatize(
            summary, settings.posterior_clip, settings.posterior_noise, trainer.key.at(POSTERIOR)
        )
        return Tensors.gather(
            self._posterior_layout, {f"{POSTERIOR}/{name}": value for name, value in told._asdict().items()}
        )

    def groups(self, client: str, now: Round) -> dict[str, Layout]:
        """φ's group, and the posterior's of a client that may send one."""
        more = {POSTERIOR: self._posterior_layout} if self.tells(client, now) else {}
        return {**super().groups(client, now), **more}

    @property
    def _posterior_layout(self) -> Layout:
        layout = self.aggregator.layout
        return layout.select(entry.name for entry in layout.entries if entry.part == POSTERIOR)

    def predict(self, trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        """φ with the client's μ̄, from its training pairs; with the population's taste if it has none."""
        return self._infer(trainer, self._published(trainer, private, published))

    def infer(self, trainer: ClientTrainer, published: Download, pairs: int) -> Tensors:
        """φ with what ``pairs`` of a newcomer's training pairs tell of its taste; no step is taken."""
        return self._infer(trainer, self._published(trainer, State(), published), pairs)

    def adapt(
        self, trainer: ClientTrainer, published: Download, steps: int, *, pull: float = 0.0, **changes: Any
    ) -> Tensors:
        """A newcomer's model after ``steps`` steps, with the taste that it then infers of its pairs.

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
        """Refused: a posterior belongs to the φ of its round, and the server keeps each client's last one."""
        return super().late(averages)

    def init_server(self, initial: Tensors) -> State:
        """φ⁰, and the mean of N(0, I) as the population's taste."""
        taste = initial.select(entry.name for entry in initial.layout.entries if entry.part == TASTE)
        return (
            super().init_server(initial).update({POPULATION: Tensors.zeros(taste.layout, taste.flat.dtype)})
        )

    def merge(
        self, server: State, uploads: Sequence[Upload], now: Round, weigh: WeightFunction | None = None
    ) -> State:
        """φ ← the merge of the φ_i; a client's last posterior is put in the place of the one before.

        The population's taste is the mean of all last μ̄, under every rule but ``mean`` their median.
        """
        merged = super().merge(server, uploads, now, weigh)
        told = {
            upload.client: Posterior(*upload.tensors[POSTERIOR].values())
            for upload in uploads
            if POSTERIOR in upload.tensors
        }
        # Of the φ that was sent: a client has no say in the bound on its own posterior.
        prototypes = server.tensors[self.group].get(PROTOTYPES)
        longest = 0.0 if prototypes is None else float(prototypes.norm(dim=1).max())
        known = newest(merged, told, longest)
        if not known:
            return merged
        means = torch.stack([posterior.mean for posterior in known.values()]).double()
        robust = self.aggregator.config.rule != "mean"
        center = torch.quantile(means, 0.5, dim=0) if robust else means.mean(0)
        taste = server.tensors[POPULATION].replace({Z: center})
        return keep(merged, known, told, now).update({POPULATION: taste})

    def figures(self, server: State) -> dict[str, float]:
        """As of the base, and the active units of the μ̄ that clients sent last, if two or more did."""
        means = [posterior.mean for posterior in posteriors(server).values()]
        active = {"active_units": active_units(torch.stack(means))} if len(means) > 1 else {}
        return {**super().figures(server), **active}

    def exchange(self, name: str = "train", *, steps: Collection[str] = (), **changes: Any) -> Exchange:
        """As of the base. Where updates are clipped, log σ̄² counts from CENTER: the download holds none."""
        return super().exchange(name, steps=steps, origins={f"{POSTERIOR}/log_variance": CENTER}, **changes)

    def publish(self, server: State, client: str) -> Download:
        """φ, and the taste of the population."""
        return Download({self.group: server.tensors[self.group], POPULATION: server.tensors[POPULATION]})

    def taste_method(self, name: str, source: str, *exchanges: Exchange, **changes: Any) -> Method:
        """The method of these moves, but for the fields of :class:`Method` that ``changes`` names."""
        moves = {"personal": True, "predict": self.predict, "infer": self.infer}
        return self.method(name, source, *exchanges, **{**moves, **changes})
