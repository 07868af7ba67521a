"""Rounds without a server: each client trains its model and mixes it with those of its neighbours."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from prefed.core import Download, Exchange, Layout, Plain, Round, State, Tensors
from prefed.core.wire import encode
from prefed.engines.base_rounds import NO_ANSWER, Course, Tally
from prefed.engines.cohorts import ScheduledRound
from prefed.engines.job import RoundError
from prefed.engines.tasks import Task
from prefed.merge.mixing_matrices import Matrix, Mixed, matrix_graph, mean_row, mix, row_norms, without_edges
from prefed.store import NodeFile


@dataclass
class _Answers:
    """The answers of clients in an exchange.

    Attributes:
        reports: client with a valid model → its numbers for the round log.
        silent: client without a valid model → reason.
        lengths: client → bytes of its message to one neighbour.
        norms: client → L2 norm of its model.
    """

    reports: dict[str, Mapping[str, float]] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class NeighbourRounds(Course):
    """The rounds of a run without a server.

    The models of all clients are rows of a file, which is mixed in blocks of columns, so memory does not grow
    with the number of clients. The store holds the mean of the clients' models as the server state.

    Raises:
        RoundError: (from :meth:`run`) no client answered in an exchange, or no client's metrics can be used
            in the evaluation after the last round.
    """

    @cached_property
    def _first(self) -> Tensors:
        """The initial state of every node."""
        (group,) = self.job.method.init_server(self.job.trainers.initial).tensors.values()
        return group

    @cached_property
    def _group(self) -> str:
        (name,) = self.job.method.init_server(self.job.trainers.initial).tensors
        return name

    def _round(self, server: State, plan: ScheduledRound) -> State:
        started, job, number = time.perf_counter(), self.job, plan.number
        now, tally = job.round(number), Tally()
        self.begin(number)
        (exchange,) = job.method.exchanges
        after = self._exchange(exchange, now, tally)
        mean = self._state(mean_row(after.nodes, after.size, after.block).to(self._first.flat.dtype))
        rows = {client: node for node, client in enumerate(job.members)}

        def publish(client: str) -> Download:
            own = self._state(after.row(rows[client])) if client in rows else mean
            return job.method.publish(own, client)

        evaluated = self.evaluate(mean, publish, number)
        self.diagnose(mean, now, tally)
        self.commit(mean, job.members, evaluated, tally, time.perf_counter() - started)
        return mean

    def _exchange(self, exchange: Exchange, now: Round, tally: Tally) -> NodeFile:
        """Train and mix in the order of ``[graph] order``; return the next states of the nodes."""
        topology = self.job.topology
        matrix, mix_first = topology.matrix(now.number), topology.config.order == "mix_train"
        start = self.writer.nodes.current()
        degrees = dict(zip(self.job.members, matrix_graph(matrix).degrees.tolist(), strict=True))
        if mix_first:
            start, middle, after = start or self._first_file(), self._file("mixed"), self._file("next")
            norms = row_norms(start.nodes, start.size, start.block)
            mixed, edges = self._mix(exchange, matrix, start, middle, norms, now, tally)
            answers = self._train(exchange, now, middle, after)
        else:
            before, after = self._file("sent"), self._file("next")
            answers = self._train(exchange, now, start, before)
            matrix = without_edges(matrix, self._cut_off(matrix, answers.silent))
            norms = [answers.norms.get(client, 0.0) for client in self.job.members]
            mixed, edges = self._mix(exchange, matrix, before, after, norms, now, tally)
        # Each neighbour gets a copy of the message.
        tally.bytes_up = sum(length * degrees[client] for client, length in answers.lengths.items())
        tally.communicated = self._groups(exchange, now).size
        for client, reason in sorted(answers.silent.items()):
            text = tally.drop(exchange, client, reason)
            self.warn(now.number, f"{client!r} does not mix: {text}")
        self.backend.accept(answers.reports)
        tally.figures |= _means(exchange, answers.reports)
        tally.figures |= {
            "merged": len(answers.reports),
            "consensus_before": mixed.before,
            "consensus_after": mixed.after,
            "rho": topology.rho,
            "edges": edges,
        }
        return after

    def _train(self, exchange: Exchange, now: Round, start: NodeFile | None, sent: NodeFile) -> _Answers:
        """Train the models of all clients and write them into ``sent``.

        A client without a valid answer keeps its model.

        Args:
            start: the states of the nodes; ``None``: the initial one.
        """
        job, answers = self.job, _Answers()
        node_of = {client: node for node, client in enumerate(job.members)}

        def state(client: str) -> State:
            return self._state(self._first.flat if start is None else start.row(node_of[client]))

        def tasks() -> Iterator[Task]:
            for client in job.members:
                message = encode(exchange.send(state(client), client, now))
                yield Task("visit", client, now.number, exchange.name, message)

        answers.silent = dict.fromkeys(job.members, NO_ANSWER)
        for result in self.ask(exchange.name, now.number, tasks(), len(job.members)):
            client = result.client
            upload, reason = self.upload_of(result, exchange, now)
            if upload is None:
                answers.silent[client] = reason
                continue
            del answers.silent[client]
            row = state(client).tensors[self._group].replace(upload.tensors[self._group]).flat
            sent.put(node_of[client], row)
            expected, report = exchange.numbers(client, now), result.report.items()
            answers.reports[client] = {n: v for n, v in report if n in expected and math.isfinite(v)}
            answers.lengths[client] = len(result.message)
            answers.norms[client] = float(torch.linalg.vector_norm(row.double()))
        if set(answers.silent.values()) == {NO_ANSWER} and len(answers.silent) == len(job.members):
            raise RoundError(
                f"round {now.number}: none of {len(job.members)} clients answered in {exchange.name!r}. "
                "Complete rounds are kept: resume the run when clients can be reached"
            )
        for client in answers.silent:
            sent.put(node_of[client], state(client).tensors[self._group].flat)
        return answers

    def _mix(
        self,
        exchange: Exchange,
        matrix: Matrix,
        before: NodeFile,
        after: NodeFile,
        norms: Sequence[float],
        now: Round,
        tally: Tally,
    ) -> tuple[Mixed, int]:
        """Mix the models in ``before`` into ``after``; return statistics and the number of edges used.

        Edges between models of very different norm are left out. Both ends see both norms, so they need not
        communicate about it.
        """
        cut = []
        for left, right in matrix_graph(matrix).edges.tolist():
            lengths = {self.job.members[node]: norms[node] for node in (left, right)}
            if not in_proportion(exchange, lengths, tally, lambda text: self.warn(now.number, text)):
                cut.append((left, right))
        matrix = without_edges(matrix, cut)
        mixed = mix(matrix, before.size, before.block, after.put_block)
        return mixed, len(matrix_graph(matrix).edges)

    def _cut_off(self, matrix: Matrix, silent: Mapping[str, str]) -> list[tuple[int, int]]:
        """The edges of clients without a valid model."""
        nodes = {node for node, client in enumerate(self.job.members) if client in silent}
        return [(a, b) for a, b in matrix_graph(matrix).edges.tolist() if a in nodes or b in nodes]

    def _state(self, flat: torch.Tensor) -> State:
        return State({self._group: Tensors(self._first.layout, flat)})

    def _file(self, name: str) -> NodeFile:
        first = self._first.flat
        return self.writer.nodes.create(name, len(self.job.members), first.numel(), first.dtype)

    def _first_file(self) -> NodeFile:
        file = self._file("first")
        for node in range(file.nodes):
            file.put(node, self._first.flat)
        return file

    def _groups(self, exchange: Exchange, now: Round) -> Layout:
        """The layout of a message to a neighbour."""
        assert exchange.groups is not None
        return exchange.groups(self.job.members[0], now)[self._group]


def in_proportion(
    exchange: Exchange, lengths: Mapping[str, float], tally: Tally, warn: Callable[[str], None]
) -> bool:
    """Return whether the norms of two neighbours' models permit mixing; if not, record and log it.

    Args:
        lengths: client → L2 norm of its model, for both neighbours.
    """
    (other, small), (one, large) = sorted(lengths.items(), key=lambda item: item[1])
    if not exchange.max_ratio or not 0 < small * exchange.max_ratio < large:
        return True
    reason = (
        f"its model has norm {large:.3g}, that of its neighbour {other!r} {small:.3g}: more than [merge] "
        f"max_ratio = {exchange.max_ratio:g}"
    )
    warn(f"{one!r} and {other!r} do not mix: {tally.drop(exchange, one, reason)}")
    return False


def _means(exchange: Exchange, reports: Mapping[str, Mapping[str, float]]) -> dict[str, Plain]:
    """Unweighted means over clients of the numbers that they report."""
    means: dict[str, Plain] = {}
    for name in sorted(exchange.scalars):
        values = [report[name] for report in reports.values() if name in report]
        if values:
            means[name] = math.fsum(values) / len(values)
    return means
