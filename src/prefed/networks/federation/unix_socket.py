"""Requests over a Unix socket that only its owner can access, as messages of a JSON header and a body.

They connect `prefed federate` and `prefed site` with the processes of the transport, which only relay bytes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from threading import Thread
from typing import Any

_log = logging.getLogger("prefed")

STAY = b"stay"
"""First frame of a connection that stays open as long as both processes live."""
MOST = 1 << 34
"""Maximum bytes of a frame."""
HEADER = 1 << 24
"""Maximum bytes of the header of a message, enough for the names of 100,000 clients."""


def pack(body: bytes = b"", **header: Any) -> bytes:
    """Pack a JSON header and a body into one message.

    >>> unpack(pack(b"tensors", kind="visit", round=3))
    ({'kind': 'visit', 'round': 3}, b'tensors')
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + body


def unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Unpack a message of :func:`pack` into header and body.

    Raises:
        ValueError: it is not such a message.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < max(8, end):
        raise ValueError(f"not a message: {len(data):,} bytes")
    if end > 8 + HEADER:
        raise ValueError(f"not a message: {end:,} bytes of header")
    try:
        header = json.loads(data[8:end])
    except (RecursionError, ValueError) as error:
        raise ValueError("not a message: its header cannot be read as JSON") from error
    if not isinstance(header, dict):
        raise ValueError("not a message: its header is not a JSON object")
    return header, data[end:]


class Door:
    """Serves requests at a Unix socket, each in its own thread.

    Args:
        answer: request → answer. Exceptions are logged, and the caller gets no answer.
        path: path of the socket (default: in a new private temporary folder, because socket paths must be
            short).
    """

    def __init__(self, answer: Callable[[bytes], bytes | bytearray], path: Path | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="prefed-")) if path is None else None
        self.path = path or Path(self._folder or "", "door")
        self._answer = answer
        self._listener = Listener(str(self.path), family="AF_UNIX", backlog=64)
        self.path.chmod(0o600)
        self._open = True
        Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open = False
        with suppress(OSError):
            self._listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        while self._open:
            try:
                connection = self._listener.accept()
            except OSError:
                continue
            Thread(target=self._attend, args=[connection], daemon=True).start()

    def _attend(self, connection: Connection) -> None:
        with connection, suppress(EOFError, OSError):
            request = connection.recv_bytes(MOST)
            if request == STAY:
                connection.recv_bytes(1)  # returns when the other process ends
                return
            try:
                answer = self._answer(request)
            except Exception:
                _log.exception("cannot answer a request")
                return
            connection.send_bytes(answer)


def ask(
    path: str | Path,
    request: bytes,
    timeout: float = inf,
    look: Callable[[], Any] = lambda: None,
    every: float = 3600.0,
) -> bytes:
    """Send a request to the socket at ``path`` and return the answer.

    Args:
        timeout: seconds to wait for the answer.
        look: called every ``every`` seconds while waiting; an exception it raises ends the wait.

    Raises:
        OSError: no process listens, or it ended.
        TimeoutError: there is no answer in time.
    """
    over = time.monotonic() + timeout
    with Client(str(path), family="AF_UNIX") as connection:
        connection.send_bytes(request)
        del request  # it may be large, and the answer may take hours
        while not connection.poll(max(0.0, min(every, over - time.monotonic()))):
            if time.monotonic() >= over:
                raise TimeoutError(f"no answer within {timeout:g} seconds")
            look()
        try:
            return connection.recv_bytes(MOST)
        except EOFError as error:
            raise ConnectionResetError("the other process ended") from error


def when_gone(path: str | Path, act: Callable[[], Any]) -> None:
    """Call ``act`` from another thread when the process that listens at ``path`` ends.

    Raises:
        OSError: no process listens.
    """
    connection = Client(str(path), family="AF_UNIX")
    connection.send_bytes(STAY)

    def wait() -> None:
        with connection, suppress(EOFError, OSError):
            connection.recv_bytes(1)
        act()

    Thread(target=wait, daemon=True).start()


def end() -> None:
    """End this process at once."""
    os._exit(0)
