"""Rounds with a server: it draws a cohort, asks, merges, evaluates and commits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from prefed.core import Exchange, Round, State
from prefed.engines.aggregation import aggregate
from prefed.engines.rounds import Rounds, RoundTally
from prefed.wire import decode_state

__all__ = ["ServerRounds"]


class ServerRounds(Rounds):
    """The rounds of a run with a server."""

    def run(self) -> State:
        """Run the rounds that are left and commit each. Gives the server's state after the last."""
        server = decode_state(self.writer.server())
        self.callback.on_run_begin(self.writer.round, self.job.rounds)
        try:
            for number in range(self.writer.round + 1, self.job.rounds + 1):
                server = self._round(server, number)
        finally:
            self.callback.on_run_end()
        return server

    def _round(self, server: State, number: int) -> State:
        started, job = time.perf_counter(), self.job
        now, tally, evaluation = job.round(number), RoundTally(), None
        cohort = job.sample(now)
        for exchange in job.method.exchanges:
            if exchange.due(number):
                clients = cohort if exchange.to == "cohort" else job.members
                server = self._exchange(server, exchange, clients, now, tally)
        if job.evaluates(number):
            evaluation = self.evaluate(partial(job.method.publish, server), number)
        self.commit(server, cohort, evaluation, tally, time.perf_counter() - started)
        return server

    def _exchange(
        self, server: State, exchange: Exchange, clients: Sequence[str], now: Round, tally: RoundTally
    ) -> State:
        uploads, invalid = self.collect(exchange, now, clients, partial(exchange.send, server), tally)
        merged = aggregate(server, uploads, exchange, now)
        # A client whose upload is not merged goes on from the private state that it had.
        self.backend.accept(upload.client for upload in merged.uploads)
        for client, reason in sorted([*invalid, *merged.dropped]):
            text = tally.drop(exchange, client, reason)
            self._warn(now, f"dropped an upload of {client!r}: {text}")
        if merged.uploads:
            tally.add(exchange, merged.uploads, merged.server)
        else:
            self._warn(now, f"{merged.reason}; the server keeps its state")
        return merged.server

    def _warn(self, now: Round, text: str) -> None:
        self.callback.on_warning(f"round {now.number}: {text}")
