"""A job: a method on clients' data, and the interfaces that it needs from the data and the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from prefed.core import (
    NO_MINIMUM,
    POOLED,
    ClientTrainer,
    Download,
    Exchange,
    Key,
    Method,
    Ownership,
    Privacy,
    Round,
    State,
    Tensors,
)
from prefed.engines.cohorts import ScheduledRound, Visit, draw_cohort
from prefed.engines.config import DIAGNOSE, CohortConfig, EvaluateConfig, FleetConfig, StopConfig
from prefed.merge.config import GraphConfig
from prefed.train import feedback as kinds
from prefed.train.feedback.kind import Feedback, Scores
from prefed.train.metrics import Metric, find_metrics

if TYPE_CHECKING:
    from prefed.engines.diagnostics import Diagnostics
    from prefed.merge.mixing_matrices import Topology
    from prefed.privacy import Grid

PAIRS = "pairs/"
"""Prefix of a newcomer's metrics for which its latent taste is inferred from a number of pairs."""


class RoundError(RuntimeError):
    """A round cannot be completed: no client answers, or the merge is broken. The run can be resumed."""


class JobError(ValueError):
    """A job is invalid.

    Attributes:
        field: the field of :class:`Job` to change.
        problem: the message without the field's name, with which it starts.
        split: the split that has too few pairs, if that is the problem; else empty.
    """

    def __init__(self, field: str, problem: str, split: str = "") -> None:
        super().__init__(f"{field} {problem}")
        self.field, self.problem, self.split = field, problem, split


class ClientAnswers(Protocol):
    """Lets a client's models answer its prompts, as :class:`prefed.runs.answers.SiteAnswers`."""

    def __call__(self, client: str, private: State, published: Download, number: int) -> str:
        """Write the answers that are due after round ``number``; return a line about them, or ``""``."""


@dataclass(frozen=True)
class Job:
    """A run, independent of where it runs and where its results are stored.

    Attributes:
        cohort: how clients are sampled in a round.
        evaluate: how clients are evaluated; ``unseen`` and ``beta`` are resolved below.
        beta: β of the DPO loss in evaluations.
        state_dtype: dtype of clients' private tensors on disk; ``None``: unchanged.
        unseen: clients that never train and are evaluated separately, as newcomers.
        absent: excluded clients. Cohorts are drawn as if they were members, and their places stay empty, so
            that the others take part in the same rounds as in a run with them.
        untouched: the tensors (full layout) with which the model equals its base model; ``None`` if clients
            start from that model.
        privacy: limits on what leaves a client, and noise.
        fleet: simulated fleet with a virtual clock; ``None``: every cohort replies within its round.
        work: client → the work of its visits relative to the default; see
            :func:`prefed.engines.simulated_fleet.schedule`.
        graph: the communication graph of a method without a server; ``None`` with a server.
        diagnostics: what is measured in diagnosed rounds; ``None``: nothing.
        stop: early stopping; ``None``: all rounds are run, and only the last is kept.
        feedback: the kind of feedback that clients train on; evaluations may have its metrics.
        answers: writes what a client's models answer when it is evaluated; ``None``: nothing.
        judges: client, pairs → its votes on them in a federation, or why it has none yet; ``None``: clients
            judge nothing.

    Raises:
        FleetError: the fleet cannot complete a round.
        JobError: a field is incompatible with the clients or with another field.
        ValueError: the ownership does not cover the model, or no client has a training pair.
    """

    trainers: TrainerFactory
    method: Method
    seed: int
    rounds: int
    cohort: CohortConfig = field(default_factory=CohortConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    beta: float = 0.1
    state_dtype: torch.dtype | None = None
    unseen: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    untouched: Tensors | None = None
    privacy: Privacy = NO_MINIMUM
    fleet: FleetConfig | None = None
    work: Mapping[str, float] | None = None
    graph: GraphConfig | None = None
    diagnostics: Diagnostics | None = None
    stop: StopConfig | None = None
    feedback: Feedback = kinds.PAIRS
    answers: ClientAnswers | None = None
    judges: Callable[[str, bytes], tuple[bytes, str]] | None = None

    def __post_init__(self) -> None:
        self.method.ownership.check(self.trainers.initial.layout)
        if self.method.pooled and POOLED in self.trainers.clients and len(self.trainers.clients) > 1:
            raise JobError(
                "method",
                f"{self.method.name} pools all pairs in one client named {POOLED!r}, and a client in the "
                "data has that name: rename it",
            )
        if not self.weights:
            raise ValueError("no client has a training pair")
        if self.cohort_size > len(self.seats):
            problem = f"= {self.cohort_size}, but only {len(self.members)} clients have training pairs"
            raise JobError("cohort", problem)
        unknown = [client for client in self.unseen if client not in self.trainers.clients]
        if unknown:
            raise JobError("unseen", f"names {unknown[0]!r}, but there is no such client")
        split = self.evaluate.split
        if not self.evaluation_clients:
            raise JobError("split", f"= {split!r}: no client has a {split} pair", split)
        if self.privacy.minimum_pairs:
            self._check_minimum_pairs(self.evaluation_clients, "client", split)
            self._check_minimum_pairs(self.newcomers, "newcomer", split)
        if self.stop is not None:
            if not self.validation_clients:
                raise JobError("stop", "needs validation pairs, but no client has one")
            self._check_minimum_pairs(self.validation_clients, "client", "validation")
        if self.fleet is not None:
            self._check_late(self.fleet)
            self.schedule(0)
        self._check_graph()
        self._check_diagnostics()
        if self.privacy.kind == "distributed":
            try:
                self.grid(self.privacy.sites or len(self.members))
            except ValueError as error:
                raise JobError("privacy", f"kind = 'distributed': {error}") from None

    def grid(self, sites: int) -> Grid:
        """The fixed-point numbers of a sum of this many sites, under ``distributed`` noise.

        Raises:
            ValueError: see :meth:`Grid.of`.
        """
        from prefed.privacy import Grid

        return Grid.of(self.privacy, sites, len(self.members))

    def _check_graph(self) -> None:
        if self.graph is None:
            return
        if self.cohort.of(1) is not None or self.fleet is not None:
            raise JobError("graph", "cannot be combined with a cohort or a fleet")
        self.topology.check()

    def _check_diagnostics(self) -> None:
        if self.diagnostics is None:
            return
        if self.jury:
            raise JobError(
                "diagnostics", f"needs a single global model, but {self.method.name} has several models"
            )
        pairs = self.diagnostics.least
        if pairs is not None and not self.privacy.may_report(pairs):
            raise JobError(
                "diagnostics",
                f"would report means over {pairs} pairs, fewer than minimum_pairs = "
                f"{self.privacy.minimum_pairs}: draw at least {2 * self.privacy.minimum_pairs} pairs",
            )

    @cached_property
    def diagnosis(self) -> Exchange:
        """The exchange in which clients send the diagnosed gradients."""
        assert self.diagnostics is not None
        return self.diagnostics.exchange(self.method, self.trainers.initial.layout)

    @cached_property
    def topology(self) -> Topology:
        """The topology of a job with a graph."""
        from prefed.merge.mixing_matrices import Topology

        assert self.graph is not None
        return Topology(self.graph, self.members, Key(self.seed))

    def _check_late(self, fleet: FleetConfig) -> None:
        strict = [e.name for e in self.method.exchanges if e.to == "cohort" and e.late == "refused"]
        if strict and (fleet.max_delay or fleet.server == "buffered"):
            raise JobError(
                "fleet",
                f"can produce late uploads, which {self.method.name} with these settings and merge rule does "
                f"not accept in {strict[0]!r}",
            )

    def _check_minimum_pairs(self, clients: tuple[str, ...], what: str, split: str) -> None:
        """Check that at least one client has enough pairs for metrics of its own."""
        most = max((getattr(self.trainers.clients[client], split) for client in clients), default=None)
        if most is not None and not self.privacy.may_report(most):
            raise JobError(
                "privacy",
                f"minimum_pairs = {self.privacy.minimum_pairs}: no metric could be reported, because no "
                f"{what} has more than {most} {split} pairs",
                split,
            )

    @cached_property
    def weights(self) -> Mapping[str, float]:
        """Member → number of training pairs n_i."""
        sizes = {
            client: float(size.train)
            for client, size in self.trainers.clients.items()
            if size.train and client not in self.unseen
        }
        if self.method.pooled and len(sizes) > 1:
            return {POOLED: sum(sizes.values())}
        return {client: sizes[client] for client in sorted(sizes)}

    @property
    def members(self) -> tuple[str, ...]:
        """The clients that train, sorted."""
        return tuple(self.weights)

    @cached_property
    def seats(self) -> tuple[str, ...]:
        """The clients that cohorts are drawn from, sorted: all members, and those that are absent."""
        if self.method.pooled or self.cohort.of(1) is None:
            return self.members
        return tuple(sorted({*self.members, *self.absent}))

    @property
    def cohort_size(self) -> int:
        """The number of places in a cohort."""
        clients = len(self.trainers.clients) - len(self.unseen) + len(self.absent)
        drawn = None if self.method.pooled else self.cohort.of(clients)
        return len(self.members) if drawn is None else drawn

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics from outside prefed, for every evaluation."""
        return find_metrics(self.evaluate.metrics)

    @cached_property
    def evaluation_clients(self) -> tuple[str, ...]:
        """The evaluated clients, sorted: those with pairs in the split that are not unseen."""
        return self._evaluated(self.evaluate.split)

    @cached_property
    def validation_clients(self) -> tuple[str, ...]:
        """The clients whose validation pairs decide early stopping, sorted."""
        return self._evaluated("validation")

    def _evaluated(self, split: str) -> tuple[str, ...]:
        clients = [client for client in self._clients_with_pairs(split) if client not in self.unseen]
        most = self.evaluate.clients
        if most is None or most >= len(clients):
            return tuple(clients)
        key = Key(self.seed).at("judges")
        draw = key.numpy().choice(len(clients), most, replace=False)
        return tuple(clients[index] for index in sorted(draw))

    def _clients_with_pairs(self, split: str) -> list[str]:
        clients = self.trainers.clients
        return [client for client in sorted(clients) if getattr(clients[client], split)]

    @cached_property
    def newcomers(self) -> tuple[str, ...]:
        """The unseen clients that have pairs in the split, sorted."""
        clients = self._clients_with_pairs(self.evaluate.split)
        return tuple(client for client in clients if client in self.unseen)

    @property
    def newcomer_figures(self) -> Mapping[str, int]:
        """Name of a newcomer's metric → its number of local steps, or of pairs if it is ``pairs/…``."""
        pairs = self.evaluate.unseen_pairs if self.method.infer is not None else ()
        steps = [steps for steps in self.evaluate.unseen_steps if not steps or self.method.adapt is not None]
        return {str(count): count for count in steps} | {f"{PAIRS}{count}": count for count in pairs}

    def round(self, number: int) -> Round:
        """Round ``number``, from 1."""
        key = Key(self.seed).at("round", number)
        return Round(number, self.rounds, key, self.weights, self.privacy, self._held_out)

    @cached_property
    def _held_out(self) -> Mapping[str, float]:
        sizes = ((client, self.trainers.clients.get(client)) for client in self.members)
        return {client: float(size.validation) for client, size in sizes if size and size.validation}

    def sample(self, now: Round) -> tuple[str, ...]:
        """The cohort of a round, sorted. It depends only on seed and round, and may be empty."""
        drawn = draw_cohort(now.key, len(self.seats), self.cohort_size, self.cohort.sampling)
        return tuple(self.seats[index] for index in drawn if self.seats[index] in self.weights)

    def schedule(self, after: int) -> Iterator[ScheduledRound]:
        """The rounds after ``after``. They depend only on the seed and the fleet."""
        if self.fleet is None:
            return map(self._sampled_round, range(after + 1, self.rounds + 1))
        from prefed.engines.simulated_fleet import schedule

        rounds = schedule(self.fleet, self.seats, self.cohort_size, Key(self.seed), self.work)
        return map(self._without_absent, islice(rounds, after, self.rounds))

    def _without_absent(self, plan: ScheduledRound) -> ScheduledRound:
        visits, lost = (
            tuple(visit for visit in each if visit.client in self.weights)
            for each in (plan.visits, plan.lost)
        )
        return replace(plan, visits=visits, lost=lost)

    def _sampled_round(self, number: int) -> ScheduledRound:
        visits = (Visit(client, number - 1, 0.0, 0.0) for client in self.sample(self.round(number)))
        return ScheduledRound(number, 0.0, tuple(visits), (), number)

    def evaluates(self, number: int) -> bool:
        """Return whether round ``number`` ends with an evaluation."""
        return self.evaluate.due(number, self.rounds)

    def exchange(self, name: str) -> Exchange:
        """The exchange with this name, of the method or of diagnostics."""
        if name == DIAGNOSE and self.diagnostics is not None:
            return self.diagnosis
        return next(exchange for exchange in self.method.exchanges if exchange.name == name)

    def shared(self, published: Download) -> Tensors:
        """The published model (full layout) without personal tensors.

        If nothing was published, this is the base model. Personal tensors that are initialised at random,
        such as a small LoRA, are left out.

        Raises:
            ValueError: several models were published.
        """
        models = self.shared_models(published)
        if len(models) != 1:
            raise ValueError(
                f"{self.method.name} publishes {len(models)} models, no single one: {', '.join(models)}"
            )
        return next(iter(models.values()))

    def shared_models(self, published: Download) -> Mapping[str, Tensors]:
        """Name → each model (full layout) that was published, with nothing of any client's own."""
        untouched = self.trainers.initial if self.untouched is None else self.untouched
        return self.method.shared_models(untouched, published)

    @cached_property
    def jury(self) -> tuple[str, ...]:
        """The names of the published models that vote on a pair; empty if there is only one."""
        if self.method.reads != "choice":
            return ()
        first = self.method.publish(self.method.init_server(self.trainers.initial), self.members[0])
        names = tuple(self.shared_models(first))
        return names if len(names) > 1 else ()

    def client_model(self, client: str, private: State, published: Download, number: int) -> Tensors:
        """The tensors (full layout) with which ``client`` predicts after round ``number``."""
        return self.method.predict(self.trainer(client, number, "predict"), private, published)

    def trainer(
        self, client: str, number: int, what: str, name: str | None = None, merged: int = 0
    ) -> ClientTrainer:
        """The trainer of ``client`` in round ``number``.

        Args:
            what: purpose of the visit, part of the random key.
            name: name of the exchange, part of the random key.
            merged: the round that merges the upload, if it is late. A client may get the same model twice and
                must then draw other batches.
        """
        now = self.round(number)
        key = now.key.at(what, name)
        key = (key.at("merged", merged) if merged > number else key).at("client", client)
        return self.trainers.trainer(client, now, key, self.method.ownership)


class Sizes(Protocol):
    """The number of pairs of a client."""

    @property
    def train(self) -> int:
        """Training pairs."""

    @property
    def validation(self) -> int:
        """Validation pairs."""

    @property
    def test(self) -> int:
        """Test pairs."""


class TrainerFactory(Protocol):
    """The clients' data and a frozen model. One factory per process serves all clients."""

    @property
    def initial(self) -> Tensors:
        """The tensors that every client starts from (full layout)."""

    @property
    def clients(self) -> Mapping[str, Sizes]:
        """Every client of the federation with its number of pairs."""

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Digests of the data and the initial model."""

    def trainer(self, client: str, now: Round, key: Key, ownership: Ownership) -> ClientTrainer:
        """The trainer of a client in a round. The client :data:`POOLED` has the pairs of all clients."""

    def score(self, client: str, tensors: Tensors, split: Literal["validation", "test"]) -> Scores:
        """Score a client's pairs of a split with a model (full layout); see ``reads`` of a method."""

    def save_adapter(self, tensors: Tensors, folder: Path) -> None:
        """Write ``tensors`` (full layout) to a folder as a PEFT adapter."""
