"""A transport over NVIDIA FLARE. Each session is a job of FLARE's Collab API.

Each site joins a session when its process is ready, so a slow one delays only its own requests. A session
ends if the hub's process is killed, and a killed site cannot rejoin it. The transport then submits a new job
and repeats unanswered requests. Sites answer repeated requests alike.
"""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
import time
from collections.abc import Collection, Set
from contextlib import redirect_stdout, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from threading import Condition, Lock
from typing import Any

from prefed.core import files
from prefed.networks.federation.flare.kits import HEARTBEAT, Kits, address, settle
from prefed.networks.federation.flare.process import (
    ACCOUNT,
    HUB_DOOR,
    SERVER,
    FlareProcess,
    check_port,
    longest,
    write_job,
)
from prefed.networks.federation.flare.relays import PART
from prefed.networks.federation.transport import (
    FederationError,
    LongAnswerError,
    TooLongError,
    UnreachableError,
)
from prefed.networks.federation.unix_socket import Door, ask, pack, unpack, when_gone
from prefed.store.directory import lock

_log = logging.getLogger("prefed")

LAUNCH = 180.0
"""Seconds in which FLARE's server, or the hub's side of a session, must start. A busy machine takes over a
minute, and FLARE waits up to a minute for sites that do not reply.
"""
JOIN = 120.0
"""Seconds after the opening of a session for which a request waits for a connected site to join."""
LATE = 600.0
"""Seconds after which a site that has not joined is invited again, in a new session."""
FRESH = 4 * HEARTBEAT
"""Seconds without a heartbeat after which a site counts as disconnected."""
PATIENCE = 30.0
"""Seconds that a site may be disconnected before a request fails."""
STARTS = 3
"""Attempts to open a session or to reach the server."""
TRIES = 5
"""Sessions that may fail during one request."""
TOO_LONG = "streaming_max_blob_size"
"""Part of FLARE's error message if a site refuses a request for its length."""
LOOK = 5.0
"""Seconds between two checks whether an answer can still arrive."""
SLOW = 1 << 21
"""Minimum transfer rate in bytes per second. Heartbeats are delayed by long messages."""
PAUSE = 0.5


class FlareTransport:
    """A transport over FLARE. Entering it starts the hub's server, leaving it stops the server.

    Args:
        kits: the hub's kits, from `prefed federation init`.

    Raises:
        StoreError: (on entering) another process uses the hub's folder.
        FederationError: (on entering) the hub's port is in use; (at any time) the server cannot be started or
            no session can be opened.
    """

    def __init__(self, kits: Kits) -> None:
        self._kits = kits
        self._door = Door(self._opened)
        self._held: int | None = None
        self._server: FlareProcess | None = None
        self._admin: Any = None
        self._asking = Lock()
        self._opening = Lock()
        self._changed = Condition()
        self._members = frozenset(kits.sites)
        self._session: Path | None = None
        self._name = ""
        self._opened_at = 0.0
        self._invited = self._inside = frozenset[str]()
        self._job = ""
        self._stopping = False

    def __enter__(self) -> FlareTransport:
        try:
            self._hold()
            self._start_server()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def restrict(self, sites: Collection[str]) -> None:
        """Open sessions only with these sites."""
        self._members = frozenset(sites) & {*self._kits.sites}

    def connected(self) -> Set[str]:
        """The sites of the run with a recent heartbeat, without those that are late to join the session."""
        with self._changed:
            late = self._invited if JOIN < self._age() < LATE else frozenset()
        return self._present() - late

    def _present(self) -> frozenset[str]:
        with self._asking:
            return self._connected()

    def _age(self) -> float:
        """Seconds since the session was opened."""
        return time.monotonic() - self._opened_at

    def call(self, site: str, request: bytes, timeout: float, most: int) -> bytes:
        """Send a request to a site and return its answer, opening new sessions if necessary."""
        end, tries, most = time.monotonic() + timeout, 0, min(most, self._kits.message_mb << 20)
        while (left := end - time.monotonic()) > 0:
            started = time.monotonic()
            session = self._session_with(site, min(timeout, PATIENCE))
            end += time.monotonic() - started  # the timeout is for the answer
            look = partial(self._look, session, site, [time.monotonic()], 2 * len(request) / SLOW)
            try:
                about = {"site": site, "timeout": left, "most": most}
                answer = ask(session, pack(request, **about), left + LOOK, look, LOOK)
                header, body = unpack(answer)
            except TimeoutError:
                break
            except (OSError, ValueError):
                if self._session != session or site in self._inside:  # the session has ended, for all sites
                    time.sleep(PAUSE)
                    continue
                header, body = {"error": "its process has ended"}, b""
            if "long" in header:
                raise LongAnswerError(
                    f"its answer has {header['long']:,} bytes, at most {most:,} are allowed"
                )
            if "error" not in header:
                return body
            error, tries = str(header["error"]), tries + 1
            _log.debug("site %s: %s", site, error)
            if TOO_LONG in error:
                size = f"{len(request):,} bytes"
                raise TooLongError(f"a message of {size} is longer than [limits] message_mb allows")
            self._without(session, site)
            if tries == TRIES:
                raise UnreachableError(f"{TRIES} sessions failed before it answered: {error}")
        raise UnreachableError(f"no answer within {timeout:g} seconds")

    def _look(self, session: Path, site: str, seen: list[float], slack: float) -> None:
        """Check that an answer can still arrive: the session is open, and the site's process in it lives.

        Args:
            seen: one element, the time of the last sign of life, which is updated.
            slack: additional seconds that a connected site may be silent.

        Raises:
            ConnectionResetError: the request must be repeated in another session.
            UnreachableError: the site has disconnected.
        """
        if self._session != session:
            raise ConnectionResetError
        try:
            header, _ = unpack(ask(session, pack(site=site, timeout=LOOK), 2 * LOOK + slack))
            if header.get("alive"):
                seen[0] = time.monotonic()
        except (OSError, ValueError):
            self._lose(session)
            raise ConnectionResetError from None
        silent = time.monotonic() - seen[0]
        if silent > PATIENCE / 2 and site in self._present():
            if silent > PATIENCE / 2 + slack:
                # The site has reconnected, and its process in this session has ended.
                self._without(session, site)
                raise ConnectionResetError
        elif silent > PATIENCE:
            raise UnreachableError("it has disconnected")

    def _without(self, session: Path, site: str) -> None:
        """Exclude a site from the session, so that its next request opens a new one."""
        with self._changed:
            if self._session == session:
                self._inside -= {site}

    def _session_with(self, site: str, patience: float) -> Path:
        """The socket of a session that this site has joined. A session is opened if necessary.

        Args:
            patience: seconds that the site may be disconnected.

        Raises:
            UnreachableError: the site is not connected, or does not join the session.
        """
        seen, tries = time.monotonic(), 0
        while True:
            with self._opening:
                with self._changed:
                    if self._stopping:
                        raise UnreachableError("the hub is stopping")
                    if self._session is not None and site in self._inside:
                        return self._session
                    invited = self._session is not None and site in self._invited and self._age() < LATE
                    if invited and self._age() > JOIN:
                        raise UnreachableError(f"it has not joined the session within {JOIN:g} seconds")
                present = self._present()
                if site in present and not invited:
                    if tries == TRIES:
                        raise UnreachableError(f"{TRIES} sessions ended before it joined")
                    tries += 1
                    self._open(present)
                    continue
            seen = time.monotonic() if site in present else seen
            if time.monotonic() > seen + patience:
                raise UnreachableError("it is not connected")
            with self._changed:
                pause = LOOK if invited else PAUSE
                self._changed.wait_for(lambda: site in self._inside or self._stopping, pause)

    def _open(self, sites: Set[str]) -> None:
        """Submit a job for these sites and wait until the hub's relay is ready."""
        for _ in range(STARTS):
            self._close()
            with self._changed:
                self._name = name = secrets.token_hex(8)
            with self._asking, tempfile.TemporaryDirectory(prefix="prefed-job-") as folder:
                write_job(Path(folder, "job"), sorted(sites), name)
                try:
                    self._job = self._admin_session().submit_job(str(Path(folder, "job")))
                except Exception as error:  # FLARE raises many types: retry after any of them
                    self._again(error)
                    continue
            with self._changed:
                if self._changed.wait_for(lambda: self._session is not None, LAUNCH):
                    self._invited, self._opened_at = frozenset(sites) - self._inside, time.monotonic()
                    return
            sites = self._present()
        raise FederationError(
            f"cannot open a session of NVIDIA FLARE with {', '.join(sorted(sites)) or 'any site'}: see "
            f"process.log and log.txt in {self._kits.server}. Complete rounds are kept: use --resume to "
            "continue"
        )

    def _opened(self, request: bytes) -> bytes:
        """Handle a relay's message: with its socket when it is ready, then with each site that joins."""
        header, _ = unpack(request)
        door = Path(header["door"])
        with self._changed:
            if header["session"] != self._name:
                return b""  # a session that was closed before it was ready
            if new := self._session is None:
                self._session = door
            if "joined" in header:
                self._inside |= {header["joined"]}
                self._invited -= self._inside
            self._changed.notify_all()
        if new:
            when_gone(door, lambda: self._lose(door))
        return b""

    def _lose(self, session: Path) -> None:
        with self._changed:
            if self._session == session:
                self._forget()

    def _forget(self) -> None:
        """Forget the session. The caller holds ``_changed``."""
        self._session, self._name = None, ""
        self._invited = self._inside = frozenset()
        self._changed.notify_all()

    def _close(self) -> None:
        """End the current session."""
        with self._changed:
            job, self._job = self._job, ""
            self._forget()
        if job:
            with self._asking, suppress(Exception):
                self._admin_session().abort_job(job)

    def _connected(self) -> frozenset[str]:
        for _ in range(STARTS):
            try:
                clients = self._admin_session().get_connected_client_list()
                # Certificates are not revoked: a site that left the project can still connect.
                return frozenset(each.name for each in clients if _is_fresh(each)) & self._members
            except Exception as error:  # as above
                self._again(error)
        raise FederationError(f"NVIDIA FLARE's server does not answer: see {self._kits.server}/log.txt")

    def _admin_session(self) -> Any:
        if self._admin is None:
            from nvflare.fuel.flare_api.flare_api import new_secure_session

            # Errors are raised as exceptions; FLARE's log messages are for its own console.
            logging.getLogger("nvflare").setLevel(logging.CRITICAL)
            with redirect_stdout(StringIO()):
                self._admin = new_secure_session(
                    self._kits.user, str(self._kits.admin), timeout=10.0, auto_login_max_tries=1
                )
        return self._admin

    def _again(self, error: Exception) -> None:
        """Prepare another attempt: restart the server if it has ended, and log in again."""
        _log.debug("NVIDIA FLARE's server: %s", error)
        with suppress(Exception):
            if self._admin is not None:
                self._admin.close()
        self._admin = None
        if self._server is not None and not self._server.alive:
            self._start_server()
        time.sleep(PAUSE)

    def _hold(self) -> None:
        """Lock the hub's folder and check that its port is free."""
        folder = self._kits.server.parent
        files.private_folder(folder / "checkpoint")
        self._held = lock(folder, remedy="wait for it or stop it: only one run at a time may use the folder")
        _, host, port = address(self._kits.server / "startup")
        check_port(host, port)

    def _start_server(self) -> None:
        if self._stopping:
            raise FederationError("the hub is stopping")
        settle(self._kits.server)
        with self._changed:
            self._forget()
        environment = {HUB_DOOR: str(self._door.path), ACCOUNT: self._kits.user, **longest(PART >> 20)}
        self._server = FlareProcess(
            SERVER, self._kits.server, [f"org={self._kits.organisation}"], environment
        )
        end, last = time.monotonic() + LAUNCH, Exception("its process ended")
        while time.monotonic() < end and self._server.alive:
            try:
                self._admin_session()
                return
            except Exception as error:  # the server is not ready
                last = error
                time.sleep(PAUSE)
        raise FederationError(
            f"NVIDIA FLARE's server does not start ({last}): see {self._kits.server}/process.log"
        )

    def _stop(self) -> None:
        # Requests in other threads fail from here on, and do not open a new session.
        self._stopping = True
        self._close()
        with suppress(Exception):
            if self._admin is not None:
                self._admin.close()
        if self._server is not None:
            self._server.stop()
        self._door.__exit__()
        if self._held is not None:
            os.close(self._held)
            self._held = None


def _is_fresh(client: Any) -> bool:
    return client.last_connect_time is not None and client.last_connect_time > time.time() - FRESH
