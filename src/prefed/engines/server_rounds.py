"""Rounds with a server: sample a cohort, collect uploads, merge, evaluate and commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from prefed.core import Download, Exchange, Plain, Round, State, Upload
from prefed.core.wire import decode_state, encode
from prefed.engines.aggregation import Aggregation, aggregate
from prefed.engines.base_rounds import NO_ANSWER, Course, Tally
from prefed.engines.cohorts import ScheduledRound, Visit
from prefed.engines.job import RoundError
from prefed.engines.tasks import Task
from prefed.merge import from_newest

if TYPE_CHECKING:
    from prefed.core.records import FederatedMetric


class Asked(NamedTuple):
    """A client and the round in which it is asked, which is an earlier one if its upload is late."""

    client: str
    round: int


@dataclass(frozen=True)
class ServerRounds(Course):
    """The rounds of a run with a server.

    A late visit is computed in the round that merges its upload, from the earlier server state that the
    client had received. No visit is therefore in progress when a run stops.

    Raises:
        RoundError: (from :meth:`run`) no client answered in an exchange, no client has valid metrics after
            the last round, or all clients are set aside.
        FleetError: (from :meth:`run`) all clients of the fleet have left for good.
    """

    def aside(self) -> frozenset[str]:
        """The clients that are set aside."""
        if self.job.cohort.offences is None:
            return frozenset()
        from prefed.engines.offences import set_aside

        return set_aside(self.writer.last)

    def _round(self, server: State, plan: ScheduledRound) -> State:
        started, job, number = time.perf_counter(), self.job, plan.number
        now, tally = job.round(number), Tally()
        aside, visits = self.aside(), plan.visits
        if aside:
            from prefed.engines.offences import visits_without

            visits = visits_without(job, plan, aside)
        cohort = [Asked(visit.client, visit.started_from + 1) for visit in visits]
        everybody = [Asked(client, number) for client in job.members if client not in aside]
        if not everybody:
            raise RoundError(
                f"round {number}: all clients are set aside after {job.cohort.offences} bad uploads each "
                '([cohort] offences): see "dropped" in rounds.jsonl for the reasons'
            )
        self.begin(number)
        for exchange in job.method.exchanges:
            if exchange.due(number):
                asked = cohort if exchange.to == "cohort" else everybody
                server = self._exchange(server, exchange, asked, now, tally)
        evaluated = self.evaluate(server, partial(job.method.publish, server), number)
        self.diagnose(server, now, tally)
        if job.fleet is not None:
            tally.figures |= _schedule_record(plan)
        if job.cohort.offences is not None:
            from prefed.engines.offences import offences_after, set_aside

            tally.figures |= offences_after(job.cohort.offences, self.writer.last, tally.bad)
            for client in sorted(set_aside(tally.figures) - aside):
                offences = f"[cohort] offences = {job.cohort.offences} bad uploads"
                self.warn(number, f"{client!r} is set aside after {offences}")
        clients = list(dict.fromkeys(client for client, _ in cohort))
        self.commit(server, clients, evaluated, tally, time.perf_counter() - started, plan.keep)
        return server

    def _exchange(
        self, server: State, exchange: Exchange, asked: Sequence[Asked], now: Round, tally: Tally
    ) -> State:
        # A late client received the state after the round before the one in which it was asked.
        late = {number for _, number in asked if number < now.number}
        starts = {number: decode_state(self.writer.server(number - 1)) for number in sorted(late)}
        starts[now.number] = server
        waves = _waves(asked)
        if self.job.privacy.kind == "distributed":
            merged, invalid = self._summed(server, exchange, now, waves, tally)
        else:
            uploads, invalid = self._collect(exchange, now, waves, starts, tally)
            if exchange.late == "delta":
                # Uploads that are not late remain bit-identical.
                uploads = [
                    u if u.sent_at == now.number else from_newest(u, starts[u.sent_at], server)
                    for u in uploads
                ]
            merged = self._merged(server, uploads, exchange, now)
        # A client whose upload is not merged keeps its previous private state.
        last = {asked for wave in waves[-1:] for asked in wave}
        self.backend.accept(u.client for u in merged.uploads if (u.client, u.sent_at) in last)
        tally.bad += [client for client, _ in merged.dropped]
        for client, reason in sorted([*invalid, *merged.dropped]):
            text = tally.drop(exchange, client, reason)
            self.warn(now.number, f"dropped an upload of {client!r}: {text}")
        if merged.uploads:
            tally.add(exchange, merged.uploads, merged.report)
        elif merged.reason:
            self.warn(now.number, f"{merged.reason}; the server keeps its state")
        return merged.server

    def _merged(
        self, server: State, uploads: Sequence[Upload], exchange: Exchange, now: Round
    ) -> Aggregation:
        if self.job.privacy.kind != "central":
            return aggregate(server, uploads, exchange, now)
        from prefed.engines.privacy import merge_noised

        return merge_noised(self.job, server, uploads, exchange, now)

    def _summed(
        self, server: State, exchange: Exchange, now: Round, waves: Sequence[Sequence[Asked]], tally: Tally
    ) -> tuple[Aggregation, list[tuple[str, str]]]:
        """Merge the sum of an exchange's uploads under distributed noise, here of simulated sites.

        Returns:
            The merge; and the client and reason of each upload that is not in the sum.
        """
        uploads, invalid = self._collect(exchange, now, waves, {now.number: server}, tally)
        from prefed.engines.privacy import merge_noised, simulated_sum

        total = simulated_sum(self.job, uploads, exchange, now)
        return merge_noised(self.job, server, uploads, exchange, now, total), invalid

    def measure(
        self, publish: Callable[[str], Download], number: int
    ) -> tuple[dict[str, Any], Mapping[str, FederatedMetric]]:
        """Under distributed noise, means of the clients' metrics from a sum with noise; no single metric."""
        job = self.job
        if job.privacy.kind != "distributed":
            return super().measure(publish, number)
        means, deviation, reasons = self.sum_metrics(publish, number)
        count = len(job.evaluation_clients) - len(reasons)
        metrics: dict[str, FederatedMetric] = {
            name: {"mean": mean, "per_client": {}, "mean_alone": count, "noise": deviation}
            for name, mean in means.items()
        }
        evaluation: dict[str, Any] = {**metrics, **({"not_evaluated": reasons} if reasons else {})}
        left_out = len(job.trainers.clients) - len(job.evaluation_clients)
        return evaluation | {
            "split": job.evaluate.split,
            "clients": count,
            "left_out": left_out,
        }, metrics

    def sum_metrics(
        self, publish: Callable[[str], Download], number: int
    ) -> tuple[dict[str, float], float, dict[str, str]]:
        """The metrics of an evaluation under distributed noise, here of simulated sites.

        A client without valid metrics counts as ½ in each mean, as at a site, which does not say so.

        Returns:
            Metric → its mean, empty without a sum; the standard deviation of the noise in each; and client →
            why it is not in the sum.
        """
        from prefed.engines.privacy import simulated_means

        asked = self.job.evaluation_clients
        answers, _ = self.ask_metrics(publish, number, asked)
        means, deviation = simulated_means(self.job, answers, len(asked), self.job.round(number))
        return means, deviation, {}

    def _collect(
        self,
        exchange: Exchange,
        now: Round,
        waves: Sequence[Sequence[Asked]],
        starts: Mapping[int, State],
        tally: Tally,
    ) -> tuple[list[Upload], list[tuple[str, str]]]:
        """Run the visits of an exchange and validate the uploads.

        Private states remain staged for the caller to accept, except that valid states of a wave are accepted
        before the next wave, which starts from them.

        Returns:
            The valid uploads, sorted by client and by the round in which it was asked, so that results do not
            depend on the order of arrival; and the client and reason of each invalid, withheld or missing
            upload.

        Raises:
            RoundError: no client answered.
        """
        uploads: list[Upload] = []
        dropped: list[tuple[str, str]] = []
        silent = {asked for wave in waves for asked in wave}
        count = len(silent)

        def tasks(wave: Sequence[Asked]) -> Iterator[Task]:
            for client, number in wave:
                # A late client trains as in the round in which it was asked.
                message = encode(exchange.send(starts[number], client, self.job.round(number)))
                tally.bytes_down += len(message)
                asked = number if number < now.number else 0
                yield Task("visit", client, now.number, exchange.name, message, asked)

        for wave in waves:
            valid = []
            done = count - len(silent)
            for result in self.ask(exchange.name, now.number, tasks(wave), count, done):
                asked = Asked(result.client, result.asked or now.number)
                silent.remove(asked)
                tally.bytes_up += len(result.message)
                upload, reason = self.upload_of(result, exchange, self.job.round(asked.round))
                if upload is None:
                    dropped.append((result.client, reason))
                    tally.bad += [result.client] if result.broken or not result.withheld else []
                else:
                    valid.append(upload)
            uploads += valid
            if wave is not waves[-1]:
                self.backend.accept(upload.client for upload in valid)
        if count and len(silent) == count:
            raise RoundError(
                f"round {now.number}: none of {count} clients answered in {exchange.name!r}. Complete rounds "
                "are kept: resume the run when clients can be reached"
            )
        dropped += [(client, NO_ANSWER) for client, _ in silent]
        return sorted(uploads, key=lambda upload: (upload.client, upload.sent_at)), dropped


def _waves(asked: Sequence[Asked]) -> list[list[Asked]]:
    """Split visits into waves with one visit per client; each client's last visit is in the last wave."""
    waves: list[list[Asked]] = []
    seen: dict[str, int] = {}
    for each in sorted(asked, reverse=True):
        place = seen[each.client] = seen.get(each.client, 0) + 1
        if place > len(waves):
            waves.insert(0, [])
        waves[-place].append(each)
    return [wave[::-1] for wave in waves]


def _schedule_record(plan: ScheduledRound) -> dict[str, Plain]:
    """Fields of the round log about the schedule. Times are virtual seconds since the start of the run."""

    def entry(visit: Visit) -> dict[str, Any]:
        return {
            "client": visit.client,
            "late": plan.late(visit),
            "asked": visit.asked,
            "at": visit.at,
        }

    return {
        "time": plan.at,
        "staleness": plan.staleness,
        "visits": [entry(visit) for visit in plan.visits],
        "lost": [entry(visit) for visit in plan.lost],
    }
