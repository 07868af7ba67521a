"""The backend that sends tasks to the sites of a federation.

Private states stay at the sites. The hub stores receipts, which name the valid version of each state. They
are staged, accepted and committed like the private states of a simulation, so one commit at the hub completes
a round on all machines.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, replace
from itertools import chain, groupby
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from pydantic import ValidationError

from prefed.core import Plain
from prefed.core.text import printable
from prefed.engines import Backend, ClientStates, Task, TaskResult
from prefed.networks.federation.messages import (
    Answer,
    Done,
    Forget,
    Forgotten,
    Hello,
    Join,
    Joined,
    Judged,
    Keys,
    Leave,
    Publish,
    Request,
    SiteError,
    Start,
    Started,
    Sum,
    Summed,
    Visit,
    order_digest,
    read_answer,
    settings_of,
    statement_of,
    what_is_wrong,
)
from prefed.networks.federation.silent_sites import Silence
from prefed.networks.federation.transport import (
    FederationError,
    LongAnswerError,
    TooLongError,
    Transport,
    UnreachableError,
)
from prefed.networks.federation.unix_socket import HEADER, MOST, pack, unpack
from prefed.privacy.secure import (
    SecureError,
    Session,
    check_key,
    check_upload,
    fingerprint,
    signed,
    sum_words,
)
from prefed.store.states import receipt_in, receipt_state

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger("prefed")
A = TypeVar("A", bound=Answer)

HELLO = 10.0
"""Seconds to wait for a site's answer to a greeting or a farewell."""

LONGEST_REASON = 2000
"""Characters kept of a reason that a site gives."""


@dataclass(frozen=True)
class Attempt:
    """An attempt at the secure sum of an exchange.

    Attributes:
        exchange: empty for an evaluation.
        sites: those to ask, unless they are away.
        size: number of words.
        clients: site → its clients of the cohort → the receipts of their private states.
    """

    number: Literal[1, 2]
    exchange: str
    sites: Sequence[str]
    size: int
    clients: Mapping[str, Mapping[str, str | None]]


class Sites:
    """Requests from the hub to the sites of one run.

    Args:
        timeout: seconds to wait for an answer that needs no training.
        code: the code from outside prefed that the experiment uses; see :class:`Join`.
        judged: for the further rounds of a refresh.

    Attributes:
        most: client, exchange, round → the maximum bytes of an answer. The exchange of an evaluation is
            ``""``. Longer answers are not read.
        secure: whether the run has secure sums.
        keys: site → its keys for them.
        unevaluated: the sites whose limits let no metrics leave.
    """

    def __init__(
        self,
        transport: Transport,
        federation: str,
        run: str,
        timeout: float,
        code: Mapping[str, dict[str, str]] | None = None,
        judged: Judged | None = None,
    ) -> None:
        self.most: Callable[[str, str, int], int] = lambda client, exchange, number: MOST
        self._transport, self._timeout = transport, timeout
        self._common: dict[str, Any] = {"federation": federation, "run": run}
        self._code, self._judged = dict(code or {}), judged
        self._experiment, self._members, self._unseen = "", list[str](), list[str]()
        self._order, self._model = "", ""
        self.secure, self.keys = False, dict[str, Keys]()
        self.unevaluated = set[str]()

    def connected(self) -> frozenset[str]:
        """The reachable sites."""
        return frozenset(self._transport.connected())

    def join(self, site: str, experiment: str, timeout: float | None = None) -> Joined:
        """Send the experiment to a site; return its clients, their pair counts and its package versions.

        Args:
            timeout: seconds to wait for the answer (default: the timeout of this object).

        Raises:
            SiteError: the site refuses or fails.
            UnreachableError: the site does not answer.
        """
        self._experiment = experiment
        request = Join(**self._common, experiment=experiment, code=self._code, judged=self._judged)
        return self._agreed(site, request, Joined, timeout)

    def start(
        self,
        site: str,
        members: Sequence[str],
        unseen: Sequence[str],
        model: str,
        timeout: float | None = None,
    ) -> None:
        """Make a site build its job.

        Args:
            model: the fingerprint of the base model that the site must have.

        Raises:
            SiteError: the site refuses, fails or has another base model.
            UnreachableError: the site does not answer.
        """
        self.know(self._experiment, members, unseen, model)
        request = Start(**self._common, members=self._members, unseen=self._unseen)
        started = self._agreed(site, request, Started, timeout)
        if started.fingerprint.get("model") != model:
            raise SiteError(
                f"site {site!r} has a different base model or revision: install the hub's model there"
            )
        if started.keys is not None:
            member = replace(started.keys.member, site=site)
            try:
                check_key(member, self._common["federation"], self._common["run"])
            except SecureError as error:
                raise SiteError(f"{error}: it was changed") from error
            self.keys[site] = Keys.of(member)
        elif self.secure:
            raise SiteError(f"site {site!r} sent no key for secure sums: install the same version of prefed")
        if not started.evaluates:
            self.unevaluated.add(site)

    def know(self, experiment: str, members: Sequence[str], unseen: Sequence[str], model: str) -> None:
        """Set what a finished run was started with; a site that does not know it any more is sent it."""
        self._experiment, self._members, self._unseen = experiment, list(members), list(unseen)
        self._order, self._model = order_digest(experiment, self._members, self._unseen), model

    def hello(self, site: str) -> str:
        """Greet a site. Return why it does not answer; empty if it does."""
        try:
            self._agreed(site, Hello(**self._common), Answer, HELLO)
        except (UnreachableError, FederationError) as error:
            return str(error)
        return ""

    def leave(self, site: str) -> None:
        """Notify a site that the run has ended. No answer is required."""
        try:
            self._agreed(site, Leave(**self._common), Answer, HELLO)
        except (UnreachableError, FederationError):
            return

    def do(self, site: str, task: Task, receipt: str | None, timeout: float) -> tuple[dict[str, Any], bytes]:
        """Send a task to a site and return its answer: header and message.

        If the site does not know the run, for example after a restart, the run is sent again first. If the
        site then refuses it, the answer says that the upload is withheld.
        """
        fields = {name: value for name, value in vars(task).items() if name != "message"}
        fields |= {**self._common, "receipt": receipt}
        answer, message = self._ask(site, Visit(**fields, order=self._order), timeout, task.message)
        if answer.get("unknown") is True:
            try:
                self._send_run(site, timeout)
            except SiteError as error:
                return {"withheld": str(error)}, b""
            answer, message = self._ask(site, Visit(**fields, order=self._order), timeout, task.message)
        return answer, message

    def request_sum(
        self, attempt: Attempt, sites: Sequence[str], number: int, message: bytes
    ) -> dict[str, Sum]:
        """The request of an attempt at a secure sum to each of its sites."""
        members = [self.keys[site] for site in sorted(sites)]
        about: dict[str, Any] = {"round": number, "exchange": attempt.exchange, "attempt": attempt.number}
        requests = dict[str, Sum]()
        for site in sites:
            request = Sum(
                **self._common,
                **about,
                size=attempt.size,
                members=members,
                clients=dict(attempt.clients.get(site, {})),
                order=self._order,
            )
            requests[site] = request.bound(message)
        return requests

    def session(self, request: Sum, message: bytes) -> Session:
        """The session of a secure sum."""
        return request.of(settings_of(self._experiment, self._members, self._unseen), message)

    def sum(self, site: str, request: Sum, message: bytes, timeout: float) -> tuple[Summed, bytes]:
        """Send a request of a secure sum to a site; return its answer and its masked words.

        If the site does not know the run, the run is sent again, and it gives new keys for the next attempt.

        Raises:
            UnreachableError: the site does not answer.
        """
        try:
            header, words = self._ask(site, request, timeout, message)
            answer = read_answer(site, header, Summed)
            if answer.unknown:
                self._send_run(site, timeout)
            if answer.signature:
                session, signature = self.session(request, message), bytes.fromhex(answer.signature)
                check_upload(words, answer.receipts, signature, session, self.keys[site].member)
            elif not (answer.refused or answer.failed or answer.unknown or answer.used):
                return Summed(failed="its upload has no signature"), b""
        except (SiteError, SecureError) as error:
            return Summed(failed=str(error)), b""
        return answer, words

    def publish(
        self, site: str, number: int, receipts: Mapping[str, str | None], message: bytes, timeout: float
    ) -> None:
        """Send a site the download of the last round for some of its clients.

        Args:
            receipts: client → the receipt of its valid private state; ``None`` for the initial state.
            message: the encoded download, which these clients share.

        Raises:
            SiteError: the site refuses or cannot store it.
            UnreachableError: the site does not answer.
        """
        fields: dict[str, Any] = {
            **self._common,
            "round": number,
            "clients": dict(receipts),
            "model": self._model,
        }
        for again in (True, False):
            request = Publish(**fields, order=self._order).bound(message)
            if not self._agreed(site, request, Answer, timeout, message).unknown:
                return
            if again:
                self._send_run(site, timeout)
        raise SiteError(f"site {site!r} does not know the run")

    def forget(self, site: str, clients: Sequence[str]) -> dict[str, str]:
        """Make a site delete everything of the run; return its statement, and its signature if it has a key.

        Raises:
            SiteError: a client of the site did not withdraw, or the answer does not confirm the deletion.
            UnreachableError: the site does not answer.
        """
        request = Forget(**self._common, clients=list(clients))
        answer = self._agreed(site, request, Forgotten)
        about = json.loads(statement_of(request.federation, request.run, site, request.clients))
        try:
            stated = json.loads(answer.statement)
            confirmed = {key: stated[key] for key in about} == about
        except (LookupError, RecursionError, TypeError, ValueError):
            confirmed = False
        if not confirmed:
            raise SiteError(f"the statement of site {site!r} is about something else")
        if not answer.signature:
            return {"statement": answer.statement}
        identity = bytes.fromhex(answer.identity)
        if not signed(identity, bytes.fromhex(answer.signature), answer.statement.encode()):
            raise SiteError(f"the statement of site {site!r} is not signed by its key")
        keys = {"key": fingerprint(identity), "identity": answer.identity, "signature": answer.signature}
        return {"statement": answer.statement, **keys}

    def _send_run(self, site: str, timeout: float) -> None:
        self.join(site, self._experiment, timeout)
        self.start(site, self._members, self._unseen, self._model, timeout)

    def _agreed(
        self, site: str, request: Request, kind: type[A], timeout: float | None = None, body: bytes = b""
    ) -> A:
        header, _ = self._ask(site, request, self._timeout if timeout is None else timeout, body)
        for how in ("refused", "failed"):
            if how in header:
                verb = "refuses" if how == "refused" else "cannot take part"
                raise SiteError(f"site {site!r} {verb}: {_reason(header[how])}")
        return read_answer(site, header, kind)

    def _ask(self, site: str, request: Request, timeout: float, body: bytes) -> tuple[dict[str, Any], bytes]:
        most = HEADER
        if isinstance(request, Sum):
            most += 4 * request.size
        elif isinstance(request, Visit):
            most += self.most(request.client, request.exchange, request.asked or request.round)
        try:
            answer = self._transport.call(site, pack(body, **request.model_dump()), timeout, most)
        except TooLongError as error:
            return {"refused": str(error)}, b""
        except LongAnswerError as error:
            return _broken(str(error)).model_dump(exclude_defaults=True), b""
        try:
            return unpack(answer)
        except ValueError:
            return _broken("its answer is not a message").model_dump(exclude_defaults=True), b""


class FederationBackend(Backend):
    """Runs each task at its client's site. Sites work in parallel, each on one task at a time.

    A site that does not answer in time is skipped for some rounds, more after each time-out; see
    :class:`~prefed.networks.federation.silent_sites.Silence`.

    Args:
        receipts: receipts of the valid private states, stored instead of the states.
        homes: client → its site.
        timeout: seconds that one visit or evaluation may take.
        warn: called with a message when a site leaves or returns.
    """

    states = None

    def __init__(
        self,
        sites: Sites,
        receipts: ClientStates,
        homes: Mapping[str, str],
        timeout: float,
        warn: Callable[[str], None],
    ) -> None:
        self._sites, self._receipts, self._homes = sites, receipts, homes
        self._timeout, self._warn = timeout, warn
        self.away = set[str]()
        self._silences = {site: Silence() for site in sorted({*homes.values()})}
        self._returning = dict[str, Future[str | None]]()
        self._pool = ThreadPoolExecutor(2 * len(set(homes.values())) or 1, thread_name_prefix="site")

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def run(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
        """Yield results as they arrive; clients whose site is away yield none."""
        source, busy = iter(tasks), dict[Future[Any], tuple[str, Task]]()
        first = next(source, None)
        if first is None:
            return
        self._welcome_back(first.round)
        waiting: dict[str, deque[Task]] = {site: deque() for site in self._homes.values()}
        source, more = chain([first], source), True
        while True:
            working = {site for site, _ in busy.values()}
            while more and any(not waiting[s] for s in waiting if s not in working and s not in self.away):
                task = next(source, None)
                more = task is not None
                if task is not None and self._homes[task.client] not in self.away:
                    waiting[self._homes[task.client]].append(task)
            for site, queue in waiting.items():
                if queue and site not in working:
                    task = queue.popleft()
                    stored = self._receipts.read(task.client)
                    busy[self._pool.submit(self._do, site, task, stored)] = site, task
            if not busy:
                return
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                site, task = busy.pop(future)
                try:
                    result, receipt = future.result()
                except UnreachableError as error:
                    waiting[site].clear()
                    self.silent(site, task.round, str(error))
                    continue
                self._silences[site].answer(task.round)
                if receipt is not None:
                    self._receipts.stage(task.client, receipt)
                yield result

    def sum(
        self, number: int, message: bytes, attempt: Attempt, least: int
    ) -> tuple[list[str], NDArray[np.int64] | None, dict[str, str]]:
        """Ask all sites for one attempt at a secure sum.

        Args:
            least: the fewest sites.

        Returns:
            The sites that took part, or can in another attempt; the sum, or ``None``; and site → why it
            prevented the sum, if it did.
        """
        if attempt.number == 1:
            self._welcome_back(number)
        sites = [site for site in attempt.sites if site not in self.away and site in self._sites.keys]
        if len(sites) < least:
            return sites, None, {}
        requests = self._sites.request_sum(attempt, sites, number, message)
        asked = {}
        for site, request in requests.items():
            seconds = self._timeout * max(1, len(request.clients))
            asked[self._pool.submit(self._sites.sum, site, request, message, seconds)] = site
        uploads: dict[str, NDArray[np.uint32]] = {}
        reasons, again = dict[str, str](), list[str]()
        for future in as_completed(asked):
            site = asked[future]
            try:
                answer, words = future.result()
            except UnreachableError as error:
                self.silent(site, number, str(error))
                reasons[site] = str(error)
                continue
            self._silences[site].answer(number)
            if answer.unknown or answer.used:
                reasons[site] = "it was restarted" if answer.unknown else "it took part in another sum"
                again.append(site)
            elif reason := answer.refused or answer.failed:
                reasons[site] = _reason(f"its site reports: {reason}")
            else:
                uploads[site] = np.frombuffer(words, "<u4")
                again.append(site)
                for client, receipt in answer.receipts.items():
                    if client in requests[site].clients:
                        self._receipts.stage(client, receipt_state(site, receipt))
        total = None if reasons else sum_words([uploads[site] for site in sites])
        return sorted(again), total, reasons

    @property
    def unevaluated(self) -> Set[str]:
        """The sites whose limits let no metrics leave."""
        return self._sites.unevaluated

    def sites_of(self, clients: Iterable[str]) -> dict[str, dict[str, str | None]]:
        """Site → each of these clients that it has → the receipt of its private state."""
        found = {site: dict[str, str | None]() for site in sorted({*self._homes.values()})}
        for client in clients:
            stored = self._receipts.read(client)
            found[self._homes[client]][client] = None if stored is None else receipt_in(stored)
        return found

    def silent(self, site: str, number: int, why: str) -> None:
        """Count and report a site's silence in a round, and leave the site out for some rounds."""
        self.away.add(site)
        self._silences[site].note(number, why)
        self._warn(f"site {site!r} is away: {why}; {self._silences[site].what_follows()}")

    def accept(self, clients: Iterable[str]) -> None:
        """Accept the staged receipts of ``clients``."""
        self._receipts.accept(clients)

    def set_aside(self) -> frozenset[str]:
        """The clients of sites that get no more requests until the run is resumed."""
        return frozenset(c for c, site in self._homes.items() if self._silences[site].again is None)

    def figures(self) -> dict[str, Plain]:
        """Time-outs of each site, for the record of the round."""
        silent: dict[str, Plain] = {s: each.figures() for s, each in self._silences.items() if each.count}
        return {"silent_sites": silent} if silent else {}

    def _do(self, site: str, task: Task, stored: bytes | None) -> tuple[TaskResult, bytes | None]:
        receipt = None if stored is None else receipt_in(stored)
        try:
            header, message = self._sites.do(site, task, receipt, self._timeout)
            answer = Done.model_validate(header)
        except ValidationError as error:
            answer, message = _broken(f"its answer is invalid: {what_is_wrong(error)}"), b""
        except (LookupError, RecursionError, TypeError, ValueError) as error:
            # A malformed answer must not stop the other sites.
            _log.exception("cannot read the answer of site %r", site)
            answer, message = _broken(f"its answer cannot be read: {error!r}"), b""
        reason = answer.refused or answer.failed
        reason = _reason(f"its site reports: {reason}" if reason else answer.withheld)
        kept = None if reason or answer.receipt is None else receipt_state(site, answer.receipt)
        message = b"" if reason else message
        return TaskResult(task.client, message, reason, task.asked, broken=answer.broken), kept

    def publish(self, number: int, message_to: Callable[[str], bytes]) -> None:
        """Send each site the downloads of the last round and the receipts of its clients' private states.

        A failure causes a warning, since the run itself is complete.

        Args:
            message_to: client → the encoded download.
        """
        clients = dict[str, list[str]]()
        for client, site in sorted(self._homes.items()):
            clients.setdefault(site, []).append(client)
        one_at_a_time = Lock()

        def message_of(client: str) -> bytes:
            with one_at_a_time:
                return message_to(client)

        def give(site: str) -> None:
            if site in self.away and (self._silences[site].again is None or self._greet(site) != ""):
                raise UnreachableError("it is away")
            # Usually all clients get the same message.
            for message, group in groupby(clients[site], message_of):
                receipts = dict[str, str | None]()
                for client in group:
                    stored = self._receipts.read(client)
                    receipts[client] = None if stored is None else receipt_in(stored)
                self._sites.publish(site, number, receipts, message, self._timeout)

        giving = {self._pool.submit(give, site): site for site in clients}
        for future in as_completed(giving):
            try:
                future.result()
            except (UnreachableError, FederationError) as error:
                self._warn(
                    f"site {giving[future]!r} did not receive the models of its clients ({error}): run the "
                    "same command with --resume to send them again"
                )

    def _welcome_back(self, number: int) -> None:
        """Readmit absent sites that are due in this round and have answered a greeting.

        Sites that are due next round are greeted in the background. One that is connected and does not
        answer is silent again.
        """
        for site in sorted(self.away):
            again, greeting = self._silences[site].again, self._returning.get(site)
            if again is None or number < again - 1:
                continue
            if greeting is not None and greeting.done() and number >= again:
                del self._returning[site]
                if (why := greeting.result()) == "":
                    self.away.discard(site)
                    self._warn(f"site {site!r} is back")
                    continue
                if why is not None:
                    self.silent(site, number, why)
                    continue
            if site not in self._returning:
                self._returning[site] = self._pool.submit(self._greet, site)

    def _greet(self, site: str) -> str | None:
        """Why a site does not answer; empty if it does, ``None`` if it is not connected."""
        return self._sites.hello(site) if site in self._sites.connected() else None


def _broken(reason: str) -> Done:
    """The replacement for an answer that no correct site sends."""
    return Done(failed=reason, broken=True)


def _reason(value: object) -> str:
    return printable(value[:LONGEST_REASON]) if isinstance(value, str) else "the reason is not a string"
