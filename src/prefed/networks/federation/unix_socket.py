"""Messages of a JSON header and bytes, and requests over a Unix socket that only its owner can reach.

What carries messages between machines runs in other processes. Those processes relay bytes: they know
neither methods nor models, and losing one loses nothing.
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
"""A first frame after which a connection is kept open, as a sign that its other end lives."""
MOST = 1 << 34
"""Bytes of the longest frame that is read."""
HEADER = 1 << 24
"""Bytes of the longest header of a message that is read: a hundred thousand clients' names fit."""


def pack(body: bytes = b"", **header: Any) -> bytes:
    """A JSON header and bytes, as one message.

    >>> unpack(pack(b"tensors", kind="visit", round=3))
    ({'kind': 'visit', 'round': 3}, b'tensors')
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + body


def unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    """What :func:`pack` made.

    Raises:
        ValueError: it is no such message.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < max(8, end):
        raise ValueError(f"not a message: {len(data):,} bytes")
    if end > 8 + HEADER:
        raise ValueError(f"not a message: {end:,} bytes of header")
    try:
        header = json.loads(data[8:end])
    except RecursionError as error:
        raise ValueError("not a message: its header is nested too deep") from error
    if not isinstance(header, dict):
        raise ValueError("not a message: its header is no object")
    return header, data[end:]


class Door:
    """Answers requests at a Unix socket, each in its own thread.

    Args:
        answer: request → answer. What it raises is logged, and the caller gets no answer.
        path: the socket; left out: one in a new folder of this user alone, since a socket's path is short.
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
                connection.recv_bytes(1)  # ends with the other end
                return
            try:
                answer = self._answer(request)
            except Exception:
                _log.exception("a request got no answer")
                return
            connection.send_bytes(answer)


def ask(
    path: str | Path,
    request: bytes,
    timeout: float = inf,
    look: Callable[[], Any] = lambda: None,
    every: float = 3600.0,
) -> bytes:
    """The answer to a request.

    Args:
        look: called every so many seconds while there is no answer; what it raises ends the wait.

    Raises:
        OSError: nobody listens, or whoever did is gone.
        TimeoutError: there is no answer in time.
    """
    over = time.monotonic() + timeout
    with Client(str(path), family="AF_UNIX") as connection:
        connection.send_bytes(request)
        del request  # it may be long, and the answer may be hours away
        while not connection.poll(max(0.0, min(every, over - time.monotonic()))):
            if time.monotonic() >= over:
                raise TimeoutError(f"no answer within {timeout:g} seconds")
            look()
        try:
            return connection.recv_bytes(MOST)
        except EOFError as error:
            raise ConnectionResetError("the other process ended") from error


def when_gone(path: str | Path, act: Callable[[], Any]) -> None:
    """Call ``act``, in another thread, when the process that listens at ``path`` is gone.

    Raises:
        OSError: nobody listens.
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
