"""The rounds of one peer, which trains the model of its client and mixes it with those of its neighbours."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from prefed.core import Download, Exchange, Layout, Round, State, Tensors, Upload
from prefed.core.wire import encode
from prefed.engines.base_rounds import Course, Tally
from prefed.engines.cohorts import ScheduledRound
from prefed.engines.neighbours import in_proportion
from prefed.engines.tasks import Task
from prefed.engines.validation import read_upload
from prefed.merge.mixing_matrices import mix_row, neighbours, without_edges
from prefed.networks.peers.heartbeat import Watch
from prefed.networks.peers.links import Links, pack, unpack

TRANSFER = 600.0
"""Seconds allowed for the transfers of a round if ``visit_timeout`` is set."""


@dataclass(frozen=True)
class PeerRounds(Course):
    """The part of one client in :class:`~prefed.engines.NeighbourRounds`.

    The store holds the client's model as the server state. A commit is kept until all peers have a later one,
    so that all can return to their last common round.

    Attributes:
        visit_timeout: seconds that a visit, an evaluation or a commit may take; 0: no limit.
    """

    client: str
    links: Links
    watch: Watch
    visit_timeout: float = 0.0

    def run(self) -> State:
        """Run and commit the remaining rounds; return the client's final model."""
        # `limit` bounds a visit, an evaluation and a commit; this bounds all other waits.
        self.watch.limit_rounds(self.visit_timeout and 3 * self.visit_timeout + TRANSFER)
        self._expect(self.writer.round + 1)
        return super().run()

    @cached_property
    def _exchange(self) -> Exchange:
        (exchange,) = self.job.method.exchanges
        return exchange

    @cached_property
    def _node(self) -> int:
        return self.job.members.index(self.client)

    def _round(self, server: State, plan: ScheduledRound) -> State:
        started, job, own, number = time.perf_counter(), self.job, server, plan.number
        now, tally = job.round(number), Tally()
        self.watch.check()
        self.begin(number)
        if job.topology.config.order == "mix_train":
            own = self._mix(own, self._message(own, now), "", now, tally)
            own, _, reason = self._train(own, now, tally)
        else:
            own, message, reason = self._train(own, now, tally)
            own = self._mix(own, message, reason, now, tally)
        self.backend.accept([] if reason else [self.client])

        def publish(client: str) -> Download:
            return job.method.publish(own, client)

        with self.watch.limit(self.visit_timeout, "its evaluation"):
            evaluated = self.evaluate(own, publish, number)
        seconds = time.perf_counter() - started
        with self.watch.limit(self.visit_timeout, "its commit"):
            self.commit(own, [self.client], evaluated, tally, seconds, self.watch.least)
        self.watch.committed(number)
        return own

    def _train(self, own: State, now: Round, tally: Tally) -> tuple[State, bytes, str]:
        """Run the visit of this peer's client; return its new model, the message for neighbours and a reason.

        If the upload is withheld, the model is unchanged, the message is empty and the reason is not.
        """
        exchange = self._exchange
        message = encode(exchange.send(own, self.client, now))
        task = Task("visit", self.client, now.number, exchange.name, message)
        with self.watch.limit(self.visit_timeout, "its visit"):
            (result,) = self.ask(exchange.name, now.number, [task], 1)
        upload, reason = self.upload_of(result, exchange, now)
        if upload is not None:
            report = sorted(result.report.items())
            tally.figures |= {name: value for name, value in report if math.isfinite(value)}
            return _with(own, upload), result.message, ""
        text = tally.drop(exchange, self.client, reason)
        self.warn(now.number, f"{self.client!r} does not mix: {text}")
        return own, b"", reason

    def _mix(self, own: State, message: bytes, reason: str, now: Round, tally: Tally) -> State:
        """Exchange models with the neighbours of the round, and mix them.

        The weight of a missing or invalid model goes to this client's own.

        Args:
            reason: why ``message`` is empty. The client then does not mix with its neighbours, or they with
            it.
        """
        job, matrix, started = self.job, self.job.topology.matrix(now.number), time.perf_counter()
        frame = pack(message, reason, self._length(self.client, now))
        frames = self.links.swap(now.number, frame)
        if now.number < job.rounds:
            self._expect(now.number + 1)
        models = {self.client: own}
        for client, arrived in frames.items():
            model = None if reason else self._read(own, client, arrived, now, tally)
            if model is not None:
                models[client] = model
        cut = [self._edge(client) for client in frames if client not in models]
        around = neighbours(without_edges(matrix, cut), self._node)
        rows = [_flat(models[job.members[node]]) for node, _ in around]
        mixed = mix_row([weight for _, weight in around], rows)
        tally.bytes_up, tally.bytes_down = len(frame) * len(frames), sum(map(len, frames.values()))
        tally.communicated = self._layout(now).size
        ((group, before),) = own.tensors.items()
        after = own.update({group: Tensors(before.layout, mixed.to(before.flat.dtype))})
        # Including the wait for slower neighbours.
        seconds = time.perf_counter() - started
        tally.figures |= {"merged": len(around), "rho": job.topology.rho, "mix_seconds": seconds}
        return after

    def _read(self, own: State, client: str, frame: bytes, now: Round, tally: Tally) -> State | None:
        """A neighbour's model: ``own`` with its upload. ``None`` if it must not be mixed."""
        upload, (message, reason) = None, unpack(frame)
        if not reason:
            upload, reason = read_upload(self.job, message, client, self._exchange, now)
        if upload is None:
            text = tally.drop(self._exchange, client, reason)
            self.warn(now.number, f"the model of {client!r} is not mixed: {text}")
            return None
        model = _with(own, upload)
        lengths = {self.client: _length_of(own), client: _length_of(model)}
        mixes = in_proportion(self._exchange, lengths, tally, lambda text: self.warn(now.number, text))
        return model if mixes else None

    def _expect(self, number: int) -> None:
        if number > self.job.rounds:
            return
        now = self.job.round(number)
        around = neighbours(self.job.topology.matrix(number), self._node)
        clients = [self.job.members[node] for node, _ in around if node != self._node]
        self.links.expect(number, {client: self._length(client, now) for client in clients})

    def _length(self, client: str, now: Round) -> int:
        """Bytes of a client's message; within a round only the client's name changes it."""
        return _message_length(client, now.number, self._group, self._layout(now), self._dtype)

    def _message(self, own: State, now: Round) -> bytes:
        ((group, tensors),) = own.tensors.items()
        return encode(
            Upload(self.client, 1.0, {group: tensors.select(self._layout(now).names)}, {}, now.number)
        )

    def _layout(self, now: Round) -> Layout:
        assert self._exchange.groups is not None
        return self._exchange.groups(self.client, now)[self._group]

    @cached_property
    def _group(self) -> str:
        (group,) = self.job.method.init_server(self.job.trainers.initial).tensors
        return group

    @cached_property
    def _dtype(self) -> torch.dtype:
        return self.job.trainers.initial.dtype

    def _edge(self, client: str) -> tuple[int, int]:
        left, right = sorted((self._node, self.job.members.index(client)))
        return left, right


@cache
def _message_length(client: str, number: int, group: str, layout: Layout, dtype: torch.dtype) -> int:
    return len(encode(Upload(client, 1.0, {group: Tensors.zeros(layout, dtype)}, {}, number)))


def _with(own: State, upload: Upload) -> State:
    ((group, tensors),) = own.tensors.items()
    return own.update({group: tensors.replace(upload.tensors[group])})


def _flat(state: State) -> torch.Tensor:
    (tensors,) = state.tensors.values()
    return tensors.flat


def _length_of(state: State) -> float:
    return float(torch.linalg.vector_norm(_flat(state).double()))
