"""A site of a federation: answers the hub's requests within the limits that its administrator sets."""

from __future__ import annotations

import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from prefed.config import ConfigError, Experiment
from prefed.config.align import PEOPLE, judge_kind
from prefed.core import files
from prefed.core.text import is_ours, one_line, pluralize, printable
from prefed.core.wire import decode_upload
from prefed.engines import WorkerError
from prefed.engines.backends.processes import Worker
from prefed.engines.tasks import Task
from prefed.networks.federation.approvals_withdrawals import (
    check_approved,
    check_may_forget,
    check_withdrawn,
    delete_run,
    run_digest,
    withdrawn,
)
from prefed.networks.federation.audit_log import SentLog, contents
from prefed.networks.federation.config import SiteConfig, SiteJudge, check_places
from prefed.networks.federation.experiment import (
    check_code,
    own_dataset,
    own_experiment,
    reported_names,
    site_factory,
    started_experiment,
)
from prefed.networks.federation.final_models import take_in
from prefed.networks.federation.judging import Votes, config_of, keep_pairs, read_pairs, write_judged
from prefed.networks.federation.messages import (
    FORMAT,
    VERSION,
    BoundRequest,
    Forget,
    Join,
    Judged,
    Keys,
    Leave,
    Publish,
    Start,
    Sum,
    Visit,
    check_download,
    is_run,
    order_digest,
    read_request,
    settings_of,
    statement_of,
)
from prefed.networks.federation.privacy_ledger import Releases
from prefed.networks.federation.site_limits import (
    RefusalError,
    check_experiment,
    check_members,
    check_same,
    check_task,
)
from prefed.networks.federation.unix_socket import pack, unpack
from prefed.networks.federation.vault import Vault, site_secret
from prefed.networks.federation.versions import PACKAGES, own_version
from prefed.privacy import Grid, MetricError, MetricSum, VoteSum, flat_steps, source_of
from prefed.privacy.secure import Identity, Participant, SecureError
from prefed.privacy.secure import check_members as check_sites
from prefed.runs.build import code_digests
from prefed.runs.data_notices import data_notices
from prefed.runs.refresh import ENDED
from prefed.store.directory import lock

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger("prefed")

REMEMBERED = 4
"""Number of recent answers kept for repeated requests."""
LARGE = 1 << 26
"""Maximum bytes of the kept answers together. The last answer is always kept."""
LONGEST_REASON = 1000
"""Characters of a refusal or failure that are printed and logged."""
WITHHELD = "the upload was withheld: see the site's log"
CHANGED = "this site's data changed since the run started: restore them"


class Site:
    """Answers requests. Training runs in a child process; if that process dies, only its request fails.

    Args:
        report: called with each line to print.

    Raises:
        StoreError: another process uses the state folder.
    """

    def __init__(self, config: SiteConfig, report: Callable[[str], None] = lambda text: None) -> None:
        self.config, self._report = config, report
        self._state = Path(config.state)
        files.private_folder(self._state / "checkpoint")
        self._held: int | None = lock(self._state, remedy="stop it first: only one process may use it")
        self._secret = site_secret(self._state)
        self.log = SentLog.of(config)
        self._withdrawn = withdrawn(config)
        self._turn = Lock()
        self._run, self._order, self._fingerprint = "", "", ""
        self._exchanges: list[str] = []
        self._metrics: list[str] = []
        self._experiment: Experiment | None = None
        self._worker: Worker | None = None
        self._answers: OrderedDict[str, bytes] = OrderedDict()
        self._releases = Releases(self._state)
        self._participants: dict[str, Participant] = {}
        # The updates of the last sum's clients, for a second attempt.
        self._steps: tuple[str, dict[str, tuple[bytes, str | None]]] = "", {}

    def close(self) -> None:
        """Stop the training process and release the lock on the state folder."""
        self._stop()
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def answer(self, request: bytes) -> bytes:
        """Return the answer to a request of the hub. Errors are returned as answers, never raised."""
        what: dict[str, Any] = {}
        try:
            if len(request) > self.config.limits.message_mb * 2**20:
                size = f"{len(request):,} bytes"
                raise RefusalError(f"a message of {size} is longer than [limits] message_mb allows")
            try:
                header, body = unpack(request)
            except ValueError as error:
                raise RefusalError(str(error)) from error
            kinds = {"run": str, "round": int, "client": str}
            what = {name: header[name] for name in kinds if isinstance(header.get(name), kinds[name])}
            return self._answer(header, body)
        except RefusalError as refusal:
            reason = printable(one_line(refusal))
            self._note("refused", reason, **what)
            return pack(refused=reason)
        except WorkerError as error:
            self._note("failed", _reason(error), **what)
            if error.trace:
                _log.error("%s", error)
            return pack(failed="the training process died or failed: see the site's log")
        except Exception as error:
            # The text may quote the site's files, so it is not sent.
            self._note("failed", printable(f"{type(error).__name__}: {one_line(error)}"), **what)
            if not (is_ours(error) or isinstance(error, OSError)) or os.environ.get("PREFED_TRACEBACK"):
                _log.exception("cannot answer a request")
            return pack(failed=f"{type(error).__name__}: see the site's log")

    def _note(self, what: str, reason: str, **fields: Any) -> None:
        """Print and log that a request was refused or failed."""
        fields[what] = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]} …"
        self._say(fields[what])
        # The hub must get its answer even if the log cannot be written, e.g. on a full disk.
        with suppress(Exception):
            self.log.add(what, **{name: value for name, value in fields.items() if _is_short(value)})

    def _say(self, text: str) -> None:
        with suppress(Exception):
            self._report(printable(text))

    def _answer(self, header: dict[str, Any], body: bytes) -> bytes:
        kind = header.get("kind")
        if kind == "foreign":
            raise RefusalError(f"message in NVIDIA FLARE: {header.get('asked')}")
        theirs = header.get("prefed"), header.get("format")
        if theirs != (VERSION, FORMAT):
            raise RefusalError(
                "the hub has prefed {} (message format {})".format(*theirs)
                + f" and this site prefed {VERSION} (message format {FORMAT}): install the same version"
            )
        if kind == "hello":
            return pack(site=self.config.name)
        run = header.get("run")
        if not isinstance(run, str) or not is_run(run):
            raise RefusalError("the request does not name its run")
        if header.get("federation") != self.config.federation:
            raise RefusalError(f"this site belongs to the federation {self.config.federation!r}")
        request = read_request(header)
        if isinstance(request, BoundRequest) and request != request.bound(body):
            raise RefusalError("the request was changed on its way: its digest is another")
        with self._turn:
            match request:
                case Join():
                    return self._join(run, request.experiment, request.code, request.judged)
                case Start():
                    return self._start(run, request.members, request.unseen)
                case Visit(kind="judge"):
                    return self._vote(run, request, body)
                case Visit():
                    return self._do(run, request, body)
                case Sum():
                    return self._sum(run, request, body)
                case Publish():
                    return self._keep(run, request, body)
                case Forget():
                    return self._forget(run, request.clients)
                case Leave():
                    self._stop()
        return pack()

    def _join(
        self, run: str, text: str, code: dict[str, dict[str, str]], judged: Judged | None = None
    ) -> bytes:
        """Read the experiment of a run and report the site's clients."""
        try:
            known = self._read_order(run)
            check_withdrawn(self._withdrawn, known and known["names"])
            about = {"judged": judged and judged.model_dump()}
            if known is not None and known.get("judged") != about["judged"]:
                raise RefusalError(f"run {run} started here with other pairs: start a new run")
            experiment = own_experiment(text, self.config, self._withdrawn)
            check_experiment(experiment, self.config)
            check_code(experiment, code)
            asked = run_digest(text, experiment), code_digests(experiment)
            check_approved(text, experiment, self.config)
            if known is not None:
                check_same(run, own_experiment(known["experiment"], self.config, self._withdrawn), experiment)
            if judged is not None and known is None:
                self._take_judged(run, judged, experiment)
            experiment = own_experiment(text, self._config_of(run, about), self._withdrawn)
        except ConfigError as error:
            raise RefusalError(str(error)) from error
        dataset = own_dataset(experiment, self._state / "cache")
        notes, warnings = data_notices(dataset)
        for noted in (*notes, *(f"warning: {warning}" for warning in warnings)):
            self._say(noted)
            self.log.add("data", run=run, noted=printable(noted)[:LONGEST_REASON])
        names = reported_names(dataset, self.config, self._secret)
        if known is not None and known["data"] != dataset.fingerprint:
            raise RefusalError(CHANGED)
        clients = {reported: list(dataset.sizes[name]) for name, reported in names.items()}
        order = known or {"data": dataset.fingerprint, "round": 0, **about}
        self._write_order(run, {**order, "experiment": text, "code": code, "names": names, "pairs": clients})
        reported = ", ".join(f"{name} {sum(n)} pairs" for name, n in clients.items())
        self.log.add("join", run=run, reported=reported, digest=asked[0], code=asked[1])
        return pack(clients=clients, versions={name: own_version(name) for name in PACKAGES})

    def _take_judged(self, run: str, judged: Judged, asked: Experiment) -> None:
        """Take over the pairs that clients judged in an alignment, and the private states of its run.

        Raises:
            RefusalError: no client judged, or the private states are of a run with other settings.
        """
        runs = self._state / "runs"
        order, after = self._read_order(judged.run), self._read_order(judged.after)
        if order is None or after is None or not self.config.limits.judgements:
            raise RefusalError("[limits] judgements: no client of this site judged for these rounds")
        if judged.after != judged.run and (after.get("judged") or {}).get("run") != judged.run:
            raise RefusalError(f"run {judged.after} is no refresh of run {judged.run}")
        experiment = self._experiment_of(judged.run, order)
        # Clients without pairs have no rank any more.
        merge = asked.merge.model_copy(update={"ranks": experiment.merge.ranks})
        asked = asked.model_copy(update={"merge": merge})
        check_same(judged.run, experiment, asked, ("data", "evaluate", "cohort", *ENDED))
        dataset, split = own_dataset(experiment, self._state / "cache"), experiment.evaluate.split
        write_judged(runs / judged.run, judged.refreshes, dataset, split, runs / run)
        Vault(runs / run / "clients", self._secret).copy_from(runs / judged.after / "clients")

    def _config_of(self, run: str, order: Mapping[str, Any]) -> SiteConfig:
        return config_of(self.config, order, self._state / "runs" / run)

    def _start(self, run: str, members: list[str], unseen: list[str]) -> bytes:
        """Start or continue a run with the members that the hub lists."""
        order = self._read_order(run)
        if order is None:
            raise RefusalError("this site does not know the run")
        order |= {"members": members, "unseen": unseen}
        order |= {"order": order_digest(order["experiment"], members, unseen)}
        self._begin(run, order)
        order |= {"exchanges": self._exchanges, "metrics": self._metrics}
        self._write_order(run, order)
        keys = None
        if self._experiment is not None and self._experiment.privacy.kind == "distributed":
            keys = Keys.of(self._participant(run).member).model_dump()
        evaluates = self.config.limits.evaluate
        return pack(fingerprint={"model": self._fingerprint}, keys=keys, evaluates=evaluates)

    def _participant(self, run: str) -> Participant:
        """This process in the secure sums of a run. A new process has new keys."""
        if run not in self._participants:
            try:
                identity = Identity.at(self.config.identity)
            except SecureError as error:
                raise RefusalError(str(error)) from error
            self._participants[run] = Participant(identity, self.config.federation, run, self.config.name)
        return self._participants[run]

    def _experiment_of(self, run: str, order: dict[str, Any]) -> Experiment:
        """The experiment of a started run, checked against the limits."""
        if self._experiment is not None and (self._run, self._order) == (run, _digest(order)):
            return self._experiment
        check_withdrawn(self._withdrawn, order["names"])
        experiment = started_experiment(order, self._config_of(run, order), self._withdrawn)
        check_experiment(experiment, self.config)
        check_approved(order["experiment"], experiment, self.config)
        check_members(experiment, self.config, len({*order["members"]} - {*order["unseen"]}))
        return experiment

    def _begin(self, run: str, order: dict[str, Any]) -> None:
        """Start the training process of a run unless it is running."""
        digest = _digest(order)
        if (self._run, self._order) == (run, digest) and self._worker is not None:
            return
        experiment = self._experiment_of(run, order)
        check_places(self._config_of(run, order))
        self._stop()
        folder = self._state / "runs" / run
        names, judge = order["names"], self.config.judge
        factory = site_factory(experiment, self._state / "cache", folder, names, order["members"], judge)
        worker = Worker()
        try:
            worker.build(factory, experiment.engine.threads or 1)
            fields = worker.receive()
            if fields["fingerprint"]["data"] != order["data"]:
                raise RefusalError(CHANGED)
        except BaseException:
            worker.stop()
            raise
        self._run, self._order, self._experiment, self._worker = run, digest, experiment, worker
        self._fingerprint, self._exchanges = fields["fingerprint"]["model"], fields["exchanges"]
        self._metrics = fields["metrics"]
        rounds = pluralize(experiment.rounds, "round", "rounds")
        self._say(f"run {run[:8]}: {experiment.method.name}, {rounds}")

    def _do(self, run: str, request: Visit, body: bytes) -> bytes:
        """Run a visit or an evaluation of one client."""
        key = files.digest(pack(**request.model_dump())) + files.digest(body)
        if key in self._answers:
            return self._answers[key]
        order = self._read_order(run) or {}
        if not ("exchanges" in order and "pairs" in order) or _digest(order) != request.order:
            return pack(unknown=True)
        receipt, task = request.receipt, request.task(body)
        own = _own_client(order, task.round, task.client)
        # Settings that may change on resuming, e.g. the number of rounds, must not cause a second noise draw.
        lasting = request.model_dump(exclude={"order", "prefed"})
        release = files.digest(pack(**lasting)) + files.digest(body)
        released = self._releases.answer(run, task.round, release)
        if released is not None:
            return released
        # Invalid requests are refused before a process is started.
        experiment = self._experiment_of(run, order)
        check_task(task, experiment, self.config, order["pairs"][task.client], order["exchanges"])
        check_download(body, "the task's download")
        privacy = experiment.privacy
        if privacy.kind == "distributed":
            raise RefusalError(
                "[privacy] kind = 'distributed': no upload and no metrics of a single client leave this site"
            )
        noisy = task.kind == "visit" and privacy.kind == "local" and privacy.noise > 0
        if noisy:
            self._releases.check(own, privacy, self.config.limits)
        vault = Vault(self._state / "runs" / run / "clients", self._secret)
        before = vault.read(task.client, receipt)
        self._begin(run, order)
        if noisy:
            self._releases.count([own], privacy)
        fields, kept = self._visited(run, order, task, receipt, vault, before)
        if task.round > order["round"]:
            self._write_order(run, {**order, "round": task.round})
        message: bytes = fields["message"]
        what = task.exchange or "evaluation"
        sent = {"bytes": len(message), **contents(task.kind, message), "withheld": fields["withheld"]}
        self.log.add(what, run=run, round=task.round, client=task.client, **sent)
        self._say(f"run {run[:8]}: round {task.round}, {what}, {task.client}")
        new = kept if kept != receipt else None
        # The reason is free of noise and may depend on the training data.
        withheld = WITHHELD if noisy and fields["withheld"] else fields["withheld"]
        answer = pack(message, client=task.client, withheld=withheld, asked=task.asked, receipt=new)
        if noisy:
            self._releases.keep(run, task.round, release, answer)
        self._answers[key] = answer
        while len(self._answers) > REMEMBERED or (
            len(self._answers) > 1 and sum(map(len, self._answers.values())) > LARGE
        ):
            self._answers.popitem(last=False)
        return answer

    def _vote(self, run: str, request: Visit, body: bytes) -> bytes:
        """Let a client judge pairs of completions, and answer with its votes."""
        order = self._read_order(run) or {}
        if not ("exchanges" in order and "pairs" in order) or _digest(order) != request.order:
            return pack(unknown=True)
        own = _own_client(order, request.round, request.client)
        judge = self._judge(bool(request.refreshes))
        if self._experiment_of(run, order).privacy.kind is not None:
            raise RefusalError("[privacy]: votes have no noise, and this run promises noise")
        records, asked = read_pairs(body), files.digest(request.exchange.encode() + body)
        folder, pairs = self._state / "runs" / run, len(records)
        given = self._given(run, order, request.task(body), asked, pairs)
        about: dict[str, Any] = {"run": run, "round": request.round, "client": request.client}
        about |= {"judge": judge.name, "request": asked}
        if request.refreshes:
            total = keep_pairs(folder, request.refreshes, own, records, given)
            sent = json.dumps(total).encode()
            self.log.add("refresh", **about, bytes=len(sent), figures={"pairs": total})
            self._say(f"run {run[:8]}: {request.client} judged {pluralize(pairs, 'pair', 'pairs')}")
            return pack(sent)
        self.log.add("judge", **about, bytes=pairs, votes=given)
        self._say(f"run {run[:8]}: {request.client}, {pluralize(pairs, 'vote', 'votes')}")
        return pack(np.array(given, np.int8).tobytes())

    def _judge(self, refreshes: bool) -> SiteJudge:
        """How clients of this site judge completions, if they do."""
        judge = self.config.judge
        if judge is None or not self.config.limits.judgements:
            raise RefusalError("[limits] judgements = 0: clients of this site judge no completions")
        if judge_kind(judge.name) == PEOPLE and not refreshes:
            raise RefusalError("[judge]: people do not vote on every pair: use [align.refresh]")
        return judge

    def _votes(self, run: str, client: str, asked: str, pairs: int) -> Votes:
        """A client's votes, after a check that it may vote on these pairs."""
        assert self.config.judge is not None
        votes = Votes(self._state / "runs" / run, client, self.config.judge)
        most = self.config.limits.judgements
        if asked not in votes.given and (total := votes.count + pairs) > most:
            raise RefusalError(
                f"[limits] judgements: {total:,} pairs of the client requested in this run, at most "
                f"{most:,} allowed"
            )
        return votes

    def _given(self, run: str, order: dict[str, Any], task: Task, asked: str, pairs: int) -> list[int]:
        """The votes of a task's client on pairs of completions, by the name ``asked``."""
        votes = self._votes(run, task.client, asked, pairs)
        if asked not in votes.given:
            self._begin(run, order)
            fields = self._work(run, order, task, None)
            if fields["withheld"]:
                # The hub learns that people are asked, and nothing of the commands.
                self._say(fields["withheld"])
                raise RefusalError(f"people have not judged yet: {task.client}; continue with --resume")
            votes.keep(asked, fields["message"])
        return votes.given[asked]

    def _visited(
        self,
        run: str,
        order: dict[str, Any],
        task: Task,
        receipt: str | None,
        vault: Vault,
        before: bytes | None,
    ) -> tuple[dict[str, Any], str | None]:
        """Run a task on a client's private state; return its result and the receipt of the next state."""
        fields = self._work(run, order, task, before)
        state: bytes | None = fields["state"]
        kept = receipt if state is None else vault.keep(task.client, task.round, state)
        if task.kind == "visit":
            vault.tidy(task.client, receipt, task.round)
        if note := fields["note"]:
            self.log.add("text", run=run, round=task.round, client=task.client, noted=note)
            self._say(f"run {run[:8]}: round {task.round}, text of {task.client}: {note}")
        return fields, kept

    def _sum(self, run: str, request: Sum, body: bytes) -> bytes:
        """Train or evaluate clients, and answer with the masked and noised sum of their updates or metrics.

        Before the answer is sent, the disk has that this attempt is used, what it costs each client, and the
        answer. A request that is repeated gets the same answer; any other under this attempt gets none.
        """
        order = self._read_order(run) or {}
        release = files.digest(pack(**request.model_dump(exclude={"prefed", "digest"}))) + files.digest(body)
        answered = self._releases.answer(run, request.round, release)
        if answered is not None:
            return answered
        known = {"exchanges", "metrics", "pairs"} <= order.keys() and _digest(order) == request.order
        if not known or run not in self._participants:
            return pack(unknown=True)
        experiment, participant = self._experiment_of(run, order), self._participants[run]
        privacy = experiment.privacy
        if privacy.kind != "distributed":
            raise RefusalError(f"[privacy] kind = {privacy.kind!r}: this run has no secure sums")
        # There may be no client of this site in the cohort, and then no task to check.
        votes = VoteSum(len(read_pairs(body))) if request.votes else None
        metrics = None if request.exchange else MetricSum(tuple(order["metrics"]))
        known = request.votes or request.exchange in (*order["exchanges"], "")
        # Other requests are tasks, whose round is checked.
        last = experiment.rounds if request.votes else request.round
        if not known or not order["round"] <= request.round <= last:
            raise RefusalError(f"there is no sum in {request.exchange!r} in round {request.round}")
        if 4 * request.size > self.config.limits.message_mb * 2**20:
            raise RefusalError(f"a sum of {request.size:,} numbers is longer than [limits] message_mb allows")
        names = {client: _own_client(order, request.round, client) for client in sorted(request.clients)}
        exchange = "" if votes else request.exchange
        task = Task(
            "judge" if votes else "evaluate" if metrics else "visit", "", request.round, exchange, body
        )
        if votes:
            self._check_votes(run, order, request, votes, body)
        else:
            for client in names:
                visit, pairs = replace(task, client=client), order["pairs"][client]
                check_task(visit, experiment, self.config, pairs, order["exchanges"])
            check_download(body, "the task's download")
        session = request.of(settings_of(order["experiment"], order["members"], order["unseen"]), body)
        sites, clients = len(session.members), len({*order["members"]} - {*order["unseen"]})
        try:
            check_sites(session, participant.member, self.config.sites, privacy.colluding(sites) + 2)
            parts = votes or metrics
            grid = parts.grid(privacy, sites, clients) if parts else Grid.of(privacy, sites, clients)
        except (SecureError, ValueError) as error:
            raise RefusalError(str(error)) from error
        for own in names.values():
            self._releases.check(own, privacy, self.config.limits)
        what = request.exchange or "evaluation"
        if not self._releases.claim(run, request.round, f"{what}-{request.attempt}", release):
            return pack(used=True)
        self._begin(run, order)
        self._releases.count(names.values(), privacy)
        if votes:
            total, receipts = self._voted(run, order, task, request, grid, votes), dict[str, str]()
        else:
            total, receipts = self._summed(run, order, task, request, grid, metrics)
        total += grid.noise(request.size, source_of(None))
        words = participant.mask(total.astype(np.uint32), session).tobytes()
        if request.round > order["round"]:
            self._write_order(run, {**order, "round": request.round})
        about: dict[str, Any] = {
            "run": run,
            "round": request.round,
            "bytes": len(words),
            "numbers": request.size,
        }
        about |= {"sites": [each.site for each in session.members], "clients": sorted(request.clients)}
        if votes and self.config.judge:
            about |= {"judge": self.config.judge.name, "request": files.digest(body)}
        self.log.add("sum", **about, attempt=request.attempt)
        self._say(f"run {run[:8]}: round {request.round}, {what}, a sum of {sites} sites")
        answer = pack(words, receipts=receipts, signature=participant.sign(words, receipts, session).hex())
        self._releases.keep(run, request.round, release, answer)
        return answer

    def _check_votes(
        self, run: str, order: dict[str, Any], request: Sum, votes: VoteSum, body: bytes
    ) -> None:
        """Check that clients of this site may vote on so many pairs."""
        self._judge(False)
        if request.attempt != 1:
            raise RefusalError(
                f"{request.exchange}: one number is one sum of votes, so there is no attempt 2"
            )
        if request.size != votes.size:
            raise RefusalError(f"a sum of votes has {votes.size:,} numbers, not {request.size:,}")
        if unseen := sorted({*request.clients} & {*order["unseen"]}):
            raise RefusalError(f"{unseen[0]} does not train in this run, so it has no vote")
        for client in request.clients:
            self._votes(run, client, files.digest(body), votes.pairs)

    def _voted(
        self, run: str, order: dict[str, Any], task: Task, request: Sum, grid: Grid, votes: VoteSum
    ) -> NDArray[np.int64]:
        """The sum of the clients' votes without noise; repeated pairs get the same votes.

        A client whose judge fails has no votes in this sum; only the site's log says so.
        """
        total = np.zeros(request.size, np.int64)
        for client in sorted(request.clients):
            visit = replace(task, client=client)
            try:
                given = self._given(run, order, visit, files.digest(task.message), votes.pairs)
            except WorkerError as error:
                self._note("failed", _reason(error), run=run, round=task.round, client=client)
                continue
            total += grid.words(votes.steps(np.array(given)))
        return total

    def _summed(
        self, run: str, order: dict[str, Any], task: Task, request: Sum, grid: Grid, metrics: MetricSum | None
    ) -> tuple[NDArray[np.int64], dict[str, str]]:
        """The sum of the clients' updates without noise, and the receipts of their next private states.

        A client whose task fails, or whose metrics are not valid, counts as an update of 0; only the site's
        log says so. The log has each client's metrics as well.

        Args:
            metrics: those to sum; ``None`` for updates.
        """
        visits = files.digest(pack(**request.model_dump(include={"run", "round", "exchange", "clients"})))
        if self._steps[0] != visits + files.digest(task.message):
            self._steps = visits + files.digest(task.message), {}
        steps = self._steps[1]
        vault = Vault(self._state / "runs" / run / "clients", self._secret)
        total, receipts = np.zeros(request.size, np.int64), dict[str, str]()
        for client, receipt in sorted(request.clients.items()):
            if client not in steps:
                visit = replace(task, client=client)
                about: dict[str, Any] = {"run": run, "round": task.round, "client": client}
                try:
                    before = vault.read(client, receipt)
                    fields, kept = self._visited(run, order, visit, receipt, vault, before)
                except WorkerError as error:
                    self._note("failed", _reason(error), **about)
                    continue
                if fields["withheld"]:
                    self._note("withheld", fields["withheld"], **about)
                    continue
                steps[client] = fields["message"], kept if kept != receipt else None
                if metrics:
                    self.log.add("metrics", **about, **contents(task.kind, fields["message"]))
            message, new = steps[client]
            try:
                step = metrics.steps(json.loads(message)) if metrics else flat_steps(decode_upload(message))
            except MetricError as error:
                self._note("failed", f"its metrics are left out: {error}", run=run, client=client)
                continue
            words = grid.words(step)
            if len(words) != request.size:
                raise RefusalError(f"an update has {len(words):,} numbers, the hub asks for {request.size:,}")
            total += words
            if new is not None:
                receipts[client] = new
        return total, receipts

    def _keep(self, run: str, request: Publish, body: bytes) -> bytes:
        """Store the download of the last round for clients of this site."""
        order = self._read_order(run) or {}
        if "order" not in order or _digest(order) != request.order:
            return pack(unknown=True)
        check_withdrawn(self._withdrawn, order["names"])
        rounds = own_experiment(order["experiment"], self._config_of(run, order)).rounds
        number = take_in(self._state / "runs" / run, order, rounds, self._secret, request, body)
        self.log.add("published", run=run, round=number)
        self._say(f"run {run[:8]}: ended after round {number}; export its models with `prefed site export`")
        return pack()

    def _forget(self, run: str, clients: list[str]) -> bytes:
        """Delete everything of a run but that it was deleted, and confirm it. A repeated request is answered
        alike.
        """
        path = self._order_path(run)
        order = files.loads_with_digest(path.read_bytes()) if path.exists() else {"names": {}}
        check_may_forget(self.config, self._withdrawn, order["names"], clients)
        if "forgotten" not in order:
            if self._run == run:
                self._stop()
            self._participants.pop(run, None)
            self._answers.clear()
            self._steps = "", {}
            order = {"names": order["names"], "forgotten": delete_run(self.config, run)}
            for refresh in self._refreshes(run):
                if self._run == refresh:
                    self._stop()
                delete_run(self.config, refresh)
                self._order_path(refresh).unlink()
            if path.exists():
                self._write_order(run, order)
        self._say(f"run {run[:8]}: deleted, because clients withdrew")
        statement = statement_of(self.config.federation, run, self.config.name, clients, **order["forgotten"])
        if not self.config.identity.exists():
            return pack(statement=statement)
        own = Identity.at(self.config.identity)
        return pack(
            statement=statement, identity=own.public.hex(), signature=own.sign(statement.encode()).hex()
        )

    def _refreshes(self, run: str) -> list[str]:
        """The runs that continue a run on what its clients judged."""
        found = list[str]()
        for path in (self._state / "runs").glob("*/order.json"):
            with suppress(files.DamagedError):
                order = files.loads_with_digest(path.read_bytes())
                if (order.get("judged") or {}).get("run") == run:
                    found.append(path.parent.name)
        return found

    def _work(self, run: str, order: dict[str, Any], task: Task, state: bytes | None) -> dict[str, Any]:
        """Run a task in the training process. If the process dies, it is restarted once."""
        for last in (False, True):
            try:
                if self._worker is None:
                    self._begin(run, order)
                assert self._worker is not None
                self._worker.give(task, state, self.config.limits.visit_seconds)
                return self._worker.receive()
            except WorkerError as error:
                self._stop()
                if last:
                    raise
                self.log.add("restart", run=run, round=task.round, failed=_reason(error)[:300])
        raise AssertionError

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        self._run, self._order, self._experiment, self._worker = "", "", None, None

    def _read_order(self, run: str) -> dict[str, Any] | None:
        path = self._order_path(run)
        order: dict[str, Any] | None = files.loads_with_digest(path.read_bytes()) if path.exists() else None
        if order is not None and "forgotten" in order:
            raise RefusalError("this site deleted what it had of this run, because clients withdrew")
        return order

    def _write_order(self, run: str, order: dict[str, Any]) -> None:
        files.private_folder(self._order_path(run).parent)
        files.write(self._order_path(run), files.dumps_with_digest(order), mode=0o600)

    def _order_path(self, run: str) -> Path:
        return self._state / "runs" / run / "order.json"


def _own_client(order: dict[str, Any], number: int, client: str) -> str:
    """The site's name of a client that the hub asks in a round.

    Raises:
        RefusalError: the round is over, or the client is not at this site.
    """
    if number < order["round"]:
        raise RefusalError(f"round {number} is over: this site already answered in round {order['round']}")
    own = next((name for name, reported in order["names"].items() if reported == client), None)
    if own is None:
        raise RefusalError("the client is not at this site")
    return str(own)


def _digest(order: dict[str, Any]) -> str:
    return order_digest(order["experiment"], order["members"], order["unseen"])


def _reason(error: WorkerError) -> str:
    """The failure of the training process in one line: the exception of a trace."""
    if error.trace:
        lines = error.trace.strip().splitlines()
        # The exception is below the last frame and its code, and above its notes.
        last = max((n for n, line in enumerate(lines) if line.startswith("  File ")), default=-1)
        raised = next((line for line in lines[last + 1 :] if not line.startswith("    ")), lines[-1])
        return printable(f"a worker process failed: {raised}")
    return printable(one_line(error))


def _is_short(value: object) -> bool:
    return len(json.dumps(value, default=str, ensure_ascii=False)) <= 2 * LONGEST_REASON + 4
