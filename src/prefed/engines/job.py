"""What an engine runs, a method on clients' data, and what it asks of these and of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol

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
from prefed.engines.diagnostics import DIAGNOSE, Diagnostics
from prefed.engines.simulated_fleet import FleetConfig, ScheduledRound, Visit, schedule
from prefed.engines.stopping import Stopping
from prefed.merge.graphs import GraphConfig
from prefed.merge.mixing import Topology
from prefed.train.metrics import ChoiceScores, PairScores

PAIRS = "pairs/"
"""What begins the name of a figure of a newcomer whose taste is inferred from so many pairs."""


class JobError(ValueError):
    """A job cannot be run.

    Attributes:
        field: the field of :class:`Job` that has to change.
        problem: continues a sentence that begins with the field's name.
        split: the pairs that are too few, if it is about these; else empty.
    """

    def __init__(self, field: str, problem: str, split: str = "") -> None:
        super().__init__(f"{field} {problem}")
        self.field, self.problem, self.split = field, problem, split


@dataclass(frozen=True)
class Job:
    """A run, apart from where it runs and where its results go.

    Attributes:
        cohort: clients sampled in each round, without replacement; ``None`` for all.
        sampling: ``"poisson"`` draws each client for itself, so that ``cohort`` is what to expect.
        evaluate_every: rounds from one evaluation to the next; 0 for one after only the last round.
        split: the pairs that evaluations use.
        evaluation_cohort: at most so many clients are evaluated, the same ones each time; ``None`` for all.
        beta: of the DPO loss that evaluations report.
        state_dtype: dtype of clients' private tensors on disk; ``None`` keeps the dtype they have.
        unseen: clients that never train; they are evaluated apart, as newcomers.
        unseen_steps: numbers of local steps after each of which a newcomer is evaluated.
        unseen_pairs: numbers of pairs from each of which a newcomer's taste is inferred before an evaluation;
            see ``infer`` of :class:`~prefed.core.Method`.
        untouched: the tensors (full layout) with which the model equals its base model; ``None`` where
            clients start from that model.
        privacy: what must not leave a client, and who adds noise to the rest.
        fleet: a simulated fleet, by whose clock clients are asked and reply; ``None``: a round's cohort
            replies in the round.
        work: client → the work of its visits, as a multiple of the usual; see
            :func:`prefed.engines.simulated_fleet.schedule`.
        graph: who mixes with whom where the method has no server; ``None`` where it has one.
        diagnostics: how the rounds are diagnosed; ``None``: they are not.
        stop: how the best round is found, and when the run stops; ``None``: all rounds are run, and only
            the last is kept.
        offences: bad uploads of a client after which the server asks it no more; ``None``: any number.

    Raises:
        FleetError: the fleet cannot do what is asked of it.
        JobError: a field does not go with the clients or with another field.
        ValueError: the ownership does not cover the model, or no client has a training pair.
    """

    trainers: TrainerFactory
    method: Method
    seed: int
    rounds: int
    cohort: int | None = None
    evaluate_every: int = 1
    split: Literal["validation", "test"] = "test"
    evaluation_cohort: int | None = None
    beta: float = 0.1
    state_dtype: torch.dtype | None = None
    unseen: tuple[str, ...] = ()
    unseen_steps: tuple[int, ...] = ()
    unseen_pairs: tuple[int, ...] = ()
    untouched: Tensors | None = None
    privacy: Privacy = NO_MINIMUM
    fleet: FleetConfig | None = None
    work: Mapping[str, float] | None = None
    graph: GraphConfig | None = None
    diagnostics: Diagnostics | None = None
    sampling: Literal["fixed", "poisson"] = "fixed"
    stop: Stopping | None = None
    offences: int | None = None

    def __post_init__(self) -> None:
        self.method.ownership.check(self.trainers.initial.layout)
        if self.method.pooled and POOLED in self.trainers.clients and len(self.trainers.clients) > 1:
            # Its pairs would be taken for everybody's.
            raise JobError(
                "method",
                f"{self.method.name} trains on all clients' pairs as one client named {POOLED!r}, and a "
                "client of the data has that name: rename it",
            )
        if not self.weights:
            raise ValueError("no client has a training pair")
        if self.cohort is not None and not self.method.pooled and self.cohort > len(self.members):
            raise JobError(
                "cohort", f"= {self.cohort}, but only {len(self.members)} clients have training pairs"
            )
        strangers = [client for client in self.unseen if client not in self.trainers.clients]
        if strangers:
            raise JobError("unseen", f"names {strangers[0]!r}, and there is no such client")
        if not self.evaluation_clients:
            raise JobError(
                "split", f"= {self.split!r}: no client has such a pair to be evaluated on", self.split
            )
        if self.privacy.minimum_pairs:
            self._check_minimum_pairs(self.evaluation_clients, "client", self.split)
            self._check_minimum_pairs(self.newcomers, "newcomer", self.split)
        if self.stop is not None:
            if not self.validation_clients:
                raise JobError("stop", "judges rounds by validation pairs, and no client has one")
            self._check_minimum_pairs(self.validation_clients, "client", "validation")
        if self.fleet is not None:
            self._check_late(self.fleet)
            self.schedule(0)
        self._check_graph()
        self._check_diagnostics()

    def _check_graph(self) -> None:
        """Refuse a graph that cannot serve, and a server's ways where there is none."""
        if self.graph is None:
            return
        if self.cohort is not None or self.fleet is not None:
            raise JobError("graph", "has all clients train in every round, without a cohort or a fleet")
        self.topology.check()

    def _check_diagnostics(self) -> None:
        """Refuse diagnostics of several models, and means over fewer pairs than may be told."""
        if self.diagnostics is None:
            return
        if self.jury:
            raise JobError(
                "diagnostics",
                f"would need the gradient of one objective, and {self.method.name} has several models",
            )
        pairs = self.diagnostics.least
        if pairs is not None and not self.privacy.may_report(pairs):
            raise JobError(
                "diagnostics",
                f"would give means over {pairs} pairs, and minimum_pairs is {self.privacy.minimum_pairs}: "
                f"draw at least {2 * self.privacy.minimum_pairs} pairs",
            )

    @cached_property
    def diagnosis(self) -> Exchange:
        """What a diagnosis asks of a client."""
        assert self.diagnostics is not None
        return self.diagnostics.exchange(self.method, self.trainers.initial.layout)

    @cached_property
    def topology(self) -> Topology:
        """Who mixes with whom in each round; only where there is a graph."""
        assert self.graph is not None
        return Topology(self.graph, self.members, Key(self.seed))

    def _check_late(self, fleet: FleetConfig) -> None:
        """Refuse late uploads where the method takes none."""
        strict = [e.name for e in self.method.exchanges if e.to == "cohort" and e.late == "refused"]
        if strict and (fleet.max_delay or fleet.server == "buffered"):
            raise JobError(
                "fleet",
                f"may have late uploads, and {self.method.name}, with these settings and merge rule, takes "
                f"none in {strict[0]!r}",
            )

    def _check_minimum_pairs(self, clients: tuple[str, ...], what: str, split: str) -> None:
        """Refuse clients of whom none has enough pairs of a split for a figure of its own."""
        most = max((getattr(self.trainers.clients[client], split) for client in clients), default=None)
        if most is not None and not self.privacy.may_report(most):
            raise JobError(
                "privacy",
                f"minimum_pairs = {self.privacy.minimum_pairs}: no {what} is judged on so many {split} pairs "
                f"(the most are {most}), so no metric could be reported",
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

    @property
    def cohort_size(self) -> int:
        """How many members a round's cohort has."""
        return len(self.members) if self.cohort is None or self.method.pooled else self.cohort

    @cached_property
    def evaluation_clients(self) -> tuple[str, ...]:
        """The clients that are evaluated, sorted. They have pairs in the split, and none is unseen."""
        return self._evaluated(self.split)

    @cached_property
    def validation_clients(self) -> tuple[str, ...]:
        """The clients on whose validation pairs rounds are judged, sorted."""
        return self._evaluated("validation")

    def _evaluated(self, split: str) -> tuple[str, ...]:
        clients = [client for client in self._clients_with_pairs(split) if client not in self.unseen]
        if self.evaluation_cohort is None or self.evaluation_cohort >= len(clients):
            return tuple(clients)
        key = Key(self.seed).at("judges")
        draw = key.numpy().choice(len(clients), self.evaluation_cohort, replace=False)
        return tuple(clients[index] for index in sorted(draw))

    def _clients_with_pairs(self, split: str) -> list[str]:
        clients = self.trainers.clients
        return [client for client in sorted(clients) if getattr(clients[client], split)]

    @cached_property
    def newcomers(self) -> tuple[str, ...]:
        """The unseen clients that have pairs in the split, sorted."""
        return tuple(client for client in self._clients_with_pairs(self.split) if client in self.unseen)

    @property
    def newcomer_figures(self) -> Mapping[str, int]:
        """Name of a newcomer's figure → its number of steps, or of pairs where the name is ``pairs/…``."""
        pairs = self.unseen_pairs if self.method.infer is not None else ()
        return {str(steps): steps for steps in self.unseen_steps} | {
            f"{PAIRS}{count}": count for count in pairs
        }

    def round(self, number: int) -> Round:
        """Round ``number``, 1 for the first."""
        key = Key(self.seed).at("round", number)
        return Round(number, self.rounds, key, self.weights, self.privacy, self._held_out)

    @cached_property
    def _held_out(self) -> Mapping[str, float]:
        sizes = ((client, self.trainers.clients.get(client)) for client in self.members)
        return {client: float(size.validation) for client, size in sizes if size and size.validation}

    def sample(self, now: Round) -> tuple[str, ...]:
        """The round's cohort, sorted: a function of only the seed and the round. Poisson's may be empty."""
        drawn = draw_cohort(now.key, len(self.members), self.cohort_size, self.sampling)
        return tuple(self.members[index] for index in drawn)

    def schedule(self, after: int) -> Iterator[ScheduledRound]:
        """The rounds after round ``after``, to the last: a function of only the seed and the fleet."""
        if self.fleet is None:
            return map(self._sampled_round, range(after + 1, self.rounds + 1))
        rounds = schedule(self.fleet, self.members, self.cohort_size, Key(self.seed), self.work)
        return islice(rounds, after, self.rounds)

    def _sampled_round(self, number: int) -> ScheduledRound:
        """Round ``number`` without a clock: its cohort starts from the newest model."""
        visits = (Visit(client, number - 1, 0.0, 0.0) for client in self.sample(self.round(number)))
        return ScheduledRound(number, 0.0, tuple(visits), (), number)

    def evaluates(self, number: int) -> bool:
        """Whether round ``number`` ends with an evaluation."""
        every = self.evaluate_every
        return number == self.rounds or (every > 0 and number % every == 0)

    def exchange(self, name: str) -> Exchange:
        """The method's exchange of that name, or that of a diagnosis."""
        if name == DIAGNOSE and self.diagnostics is not None:
            return self.diagnosis
        return next(exchange for exchange in self.method.exchanges if exchange.name == name)

    def shared(self, published: Download) -> Tensors:
        """The model (full layout) that was published, with nothing of any client's own.

        Where nothing was published, this is the base model. Personal tensors that start at random, such as
        a small LoRA, are no part of a shared model.

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
        """The names of the published models that vote on a pair; none where the method publishes only one."""
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
        """The turn of ``client`` in round ``number``; ``what`` it is for and its ``name`` name its key.

        Args:
            merged: the round that takes its upload, if that is a later one. A client may be given one model
                twice, and it does not draw the same batches then.
        """
        now = self.round(number)
        key = now.key.at(what, name)
        key = (key.at("merged", merged) if merged > number else key).at("client", client)
        return self.trainers.trainer(client, now, key, self.method.ownership)


def draw_cohort(key: Key, clients: int, size: int, sampling: Literal["fixed", "poisson"]) -> list[int]:
    """The indices of a cohort, in ascending order, of so many clients.

    Args:
        key: that of the round.
        size: of the cohort, or with ``"poisson"`` what to expect.

    >>> draw_cohort(Key(1), 9, 9, "poisson") == draw_cohort(Key(1), 9, 9, "fixed") == [*range(9)]
    True
    """
    generator = key.at("cohort").numpy()
    if sampling == "poisson":
        return [index for index, coin in enumerate(generator.random(clients)) if coin * clients < size]
    return sorted(generator.choice(clients, size, replace=False).tolist())


class Sizes(Protocol):
    """How many pairs a client holds."""

    @property
    def train(self) -> int:
        """Pairs it trains on."""

    @property
    def validation(self) -> int:
        """Pairs set apart for choosing settings."""

    @property
    def test(self) -> int:
        """Pairs set apart for evaluation."""


class TrainerFactory(Protocol):
    """The clients' data with a frozen model: one factory in each process, for any number of clients."""

    @property
    def initial(self) -> Tensors:
        """The tensors that every client starts from (full layout)."""

    @property
    def clients(self) -> Mapping[str, Sizes]:
        """Every client of the federation, and how many pairs it holds."""

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Digests of what numbers depend on: the data and the initial model."""

    def trainer(self, client: str, now: Round, key: Key, ownership: Ownership) -> ClientTrainer:
        """A client's turn in a round; the client :data:`POOLED` holds the pairs of all clients."""

    def score(
        self, client: str, tensors: Tensors, split: Literal["validation", "test"]
    ) -> PairScores | ChoiceScores:
        """What a model (full layout) gives to a client's pairs of one split: see ``reads`` of a method."""

    def save_adapter(self, tensors: Tensors, folder: Path) -> None:
        """Write ``tensors`` (full layout) as an adapter folder that PEFT loads."""
