"""Heartbeats between peers: detects a dead or hanging peer, and stops all peers with the same error.

Each peer regularly writes a heartbeat to the store and reads those of the others. The first accusation in the
store becomes the verdict of all peers.

PyTorch 2.13 cannot replace this. Tested with three processes and ``monitored_barrier`` with a time-out of 4
seconds:

- gloo's time-outs do not distinguish a slow peer from a dead one, and a visit may take hours.
- If a peer is killed, no error names it. If it is stopped, only rank 0 learns which one it is, and the others
  are pointed to rank 0. If rank 0 is stopped, the others are still waiting after 25 seconds.
- A client of ``TCPStore`` waits without a time-out while the process with the store is stopped.
- torchrun detects processes that end on its own machine, but not stopped ones.

The main thread polls the verdict (:meth:`Watch.check`) wherever it waits for other peers. A signal handler
would not do, because code that catches all exceptions would swallow the error. Where the main thread cannot
poll, e.g. in a visit, the process is ended; the run directory stays consistent.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from prefed.core.text import listed, printable_lines

_log = logging.getLogger("prefed")

STOP = "stop"
"""The key of the verdict in the store."""
GONE = "closed its connection"
GRACE = 3.0
"""Seconds that the main thread has to stop after the verdict, before the process is ended."""


class PeerError(RuntimeError):
    """A peer failed, hangs or disconnected, or peers do not agree. All complete rounds are kept."""


@dataclass(frozen=True)
class Beat:
    """A heartbeat.

    Attributes:
        count: sequence number.
        round: the last round that the peer has committed.
        state: ``"here"``, ``"done"`` after the last round, or ``"left"`` after an error.
    """

    count: int = 0
    round: int = 0
    state: str = "here"

    def text(self) -> str:
        """Format the heartbeat for the store."""
        return f"{self.count} {self.round} {self.state}"

    @staticmethod
    def parse(text: str) -> Beat:
        """Parse the result of :meth:`text`."""
        count, number, state = text.split()
        return Beat(int(count), int(number), state)


def beat_key(rank: int) -> str:
    """The key of a peer's heartbeat in the store."""
    return f"beat/{rank}"


class Watch:
    """Two threads: one writes and reads heartbeats, the other checks that the store answers.

    After a verdict the process is ended, unless the main thread learns of it from :meth:`check` and stops.

    Args:
        names: names of all peers by rank, for messages.
        host: rank of the peer whose process runs the store; ``None`` if the store outlives all peers.
        patience: seconds without a heartbeat after which a peer counts as failed.

    Attributes:
        names: as above; may be changed.
        verdict: which peer failed and why; empty if none did.
    """

    def __init__(
        self, store: Store, rank: int, names: Sequence[str], host: int | None, patience: float
    ) -> None:
        self.names, self.verdict = list(names), ""
        self._store, self._rank, self._host, self._patience = store, rank, host, patience
        self._interval = min(0.5, patience / 10)
        self._count, self._round, self._state = 0, 0, "here"
        self._beats = [Beat()] * len(names)
        self._changed = [time.monotonic()] * len(names)
        self._answered = time.monotonic()
        self._accused: int | None = None
        self._judged = 0.0
        self._blames: list[tuple[int | None, str]] = []
        self._limit: tuple[float, str] | None = None
        self._wake, self._closed, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._stall: tuple[float, float] | None = None
        self._leaving, self._storeless, self._announced = False, False, False

    def start(self) -> None:
        """Start both threads."""
        self._threads = [
            threading.Thread(target=act, daemon=True) for act in (self._exchange_beats, self._look_after)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def least(self) -> int:
        """The last round that all peers are known to have committed."""
        return min(beat.round for beat in self._beats)

    def committed(self, number: int) -> None:
        """Announce that this peer has committed round ``number``."""
        self._round = number
        self._wake.set()

    def check(self) -> None:
        """Raise the verdict if there is one.

        Raises:
            PeerError: a peer failed.
        """
        if self.verdict:
            raise PeerError(self.verdict)

    def limit_rounds(self, seconds: float) -> None:
        """End the run if all peers do not commit another round within ``seconds``; 0: no limit."""
        self._stall = (time.monotonic(), seconds) if seconds else None

    def accuse(self, rank: int | None, why: str) -> None:
        """Stop all peers because peer ``rank``, or those named in ``why``, failed. The first call wins."""
        with self._lock:
            self._blames.append((rank, why))
        self._wake.set()

    @contextmanager
    def limit(self, seconds: float, what: str) -> Iterator[None]:
        """Accuse this peer if the block takes longer than ``seconds``; 0: no limit."""
        why = f"exceeded [engine] visit_timeout = {seconds:g} seconds in {what}"
        self._limit = (time.monotonic() + seconds, why) if seconds else None
        try:
            yield
        finally:
            self._limit = None

    def wait_for_verdict(self, seconds: float) -> str:
        """Wait up to ``seconds`` for a verdict; return it, or an empty string."""
        end = time.monotonic() + seconds
        while not self.verdict and time.monotonic() < end:
            time.sleep(self._interval / 5)
        return self.verdict

    def hush(self) -> None:
        """Note that the main thread is stopping, so that a verdict does not end the process."""
        if not self._begin_to_leave():
            # The other thread is already ending the process.
            self._threads[1].join()

    def leave(self, state: str) -> None:
        """Announce that this peer leaves as ``"done"`` or ``"left"``, and stop the threads.

        The peer that runs the store waits for the others first.
        """
        self._state, count = state, self._count
        end = time.monotonic() + GRACE
        # Two full cycles, because the current one may have written its heartbeat already.
        while self._count < count + 2 and not self._storeless and time.monotonic() < end:
            self._wake.set()
            time.sleep(0.01)
        end = time.monotonic() + min(self._patience, 2 * GRACE)
        while self._host == self._rank and not self._all_gone():
            # A peer that is done waits for the others as long as they live.
            if time.monotonic() > end and (state == "left" or self.verdict):
                break
            time.sleep(self._interval / 5)
        self._closed.set()
        self._wake.set()
        for thread in {*self._threads} - {threading.current_thread()}:
            thread.join(self._interval)

    def _begin_to_leave(self) -> bool:
        """Return whether this thread is the first to leave."""
        with self._lock:
            first, self._leaving = not self._leaving, True
        return first

    def _all_gone(self) -> bool:
        return all(
            beat.state != "here" or rank in (self._rank, self._accused)
            for rank, beat in enumerate(self._beats)
        )

    def _exchange_beats(self) -> None:
        keys = [beat_key(rank) for rank in range(len(self.names))]
        while not self._closed.is_set():
            state = self._state
            try:
                self._store.set(keys[self._rank], Beat(self._count + 1, self._round, state).text())
                self._announced = state != "here"
                if self._store.check([STOP]):
                    self._heed(self._store.get(STOP))
                self._read(self._store.multi_get(keys))
                self._speak()
            except RuntimeError:
                if not self._closed.is_set():
                    self._lost_store(GONE)
                return
            self._count += 1
            self._answered = time.monotonic()
            self._wake.wait(self._interval)
            self._wake.clear()

    def _read(self, texts: Sequence[bytes]) -> None:
        now, least = time.monotonic(), self.least
        for rank, text in enumerate(texts):
            try:
                beat = Beat.parse(text.decode())
            except ValueError:
                self.accuse(rank, "sent an invalid heartbeat")
                continue
            if beat != self._beats[rank]:
                self._beats[rank], self._changed[rank] = beat, now
            elif beat.state == "here" and now - self._changed[rank] > self._patience:
                self.accuse(rank, self._silence())
        if self._stall and self.least > least:
            self._stall = (now, self._stall[1])

    def _speak(self) -> None:
        """Write the first accusation to the store, unless it has one."""
        with self._lock:
            blames, self._blames = self._blames, []
        if blames and not self.verdict:
            self._heed(self._store.compare_set(STOP, "", json.dumps(blames[0])))

    def _heed(self, word: bytes) -> None:
        """Adopt the accusation in the store, which any peer may have written, as the verdict."""
        try:
            rank, why = json.loads(word)
            self._judge(rank if rank is None else range(len(self.names))[rank], str(why))
        except (ValueError, TypeError, IndexError, RecursionError):
            self._judge(None, "a peer failed, but the report in the store is invalid")

    def _look_after(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(self._interval):
            now = time.monotonic()
            if now - last > self._patience:
                self._judge(self._rank, f"was stopped for {now - last:.0f} seconds")
            last = now
            if now - self._answered > self._patience:
                self._lost_store(self._silence())
            limit = self._limit
            if limit is not None and now > limit[0]:
                self.accuse(self._rank, limit[1])
            if self._stall and now - self._stall[0] > self._stall[1]:
                self.accuse(None, self._stalled(self._stall[1]))
            if self.verdict and now - self._judged > GRACE and self._begin_to_leave():
                with suppress(OSError, ValueError):
                    _log.error("error: %s", printable_lines(self.verdict))
                self.leave("left")
                os._exit(1)

    def _stalled(self, seconds: float) -> str:
        late = [name for name, beat in zip(self.names, self._beats, strict=True) if beat.round == self.least]
        return f"round {self.least + 1} was not committed within {seconds:g} seconds by {listed(late, str)}"

    def _silence(self) -> str:
        return f"has sent no heartbeat for {self._patience:g} seconds"

    def _lost_store(self, why: str) -> None:
        self._storeless = True
        if self._announced:
            return  # This peer has announced that it leaves: it needs the store no longer.
        if self._host is None:
            self._judge(None, f"torchrun's store {why}")
        else:
            self._judge(self._host, why)

    def _judge(self, rank: int | None, why: str) -> None:
        with self._lock:
            if self.verdict:
                return
            who = why if rank is None else f"{self.names[rank]} {why}"
            self._accused, self._judged = rank, time.monotonic()
            self.verdict = f"{who}; complete rounds are kept: start all peers again with --auto-resume"
