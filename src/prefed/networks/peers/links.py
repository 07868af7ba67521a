"""Transfer of models between neighbours over ``torch.distributed``, as frames of bytes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from prefed.networks.peers.heartbeat import GONE, Watch

YEAR = timedelta(days=365)
_TURN = 0.05
"""Seconds between two checks for a verdict while waiting for frames."""
_WITHHELD = bytes(8)
"""Prefix of a frame with a reason instead of a message. No message starts with a header length of 0."""


def pack(message: bytes, reason: str, length: int) -> bytes:
    """Pack a message, or the reason why there is none, into a frame of ``length`` bytes.

    >>> unpack(pack(b"", "diverged", 64)), unpack(pack(b"message", "", 7))
    ((b'', 'diverged'), (b'message', ''))
    """
    if not reason and len(message) != length:
        reason = f"its message has {len(message):,} bytes, not {length:,}"
    if reason:
        return (_WITHHELD + reason.encode())[:length].ljust(length, b"\0")
    return message


def unpack(frame: bytes) -> tuple[bytes, str]:
    """Unpack a frame into message and reason, one of which is empty."""
    if frame[:8] == _WITHHELD:
        return b"", frame[8:].rstrip(b"\0").decode(errors="replace") or "withheld"
    return frame, ""


class Links:
    """Connections to the neighbours of each round.

    Receives are posted before training, so a neighbour that ends is detected at once.

    Args:
        watch: is notified when a connection closes, and ends waits after a verdict.
        ranks: client → the rank of its peer.
    """

    def __init__(self, watch: Watch, ranks: Mapping[str, int]) -> None:
        self._watch, self._ranks = watch, ranks
        # NCCL cannot wait for a receive during a computation.
        self._ahead = dist.get_backend() == "gloo"
        self._device = torch.device("cpu" if self._ahead else "cuda")
        self._frames: dict[str, torch.Tensor] = {}
        self._done: queue.Queue[str] = queue.Queue()

    def expect(self, number: int, lengths: Mapping[str, int]) -> None:
        """Post the receives of round ``number``.

        Args:
            lengths: client → bytes of its frame.
        """
        self._frames = {
            # Zeros, so that a short frame does not expose uninitialised memory.
            client: torch.zeros(length, dtype=torch.uint8, device=self._device)
            for client, length in lengths.items()
        }
        if self._ahead:
            for client, frame in self._frames.items():
                self._await(dist.irecv, frame, client, number)

    def swap(self, number: int, frame: bytes) -> dict[str, bytes]:
        """Send ``frame`` to all clients passed to :meth:`expect`; return their frames by client.

        Raises:
            PeerError: a peer failed.
        """
        out = torch.frombuffer(bytearray(frame), dtype=torch.uint8).to(self._device)
        clients = list(self._frames)
        if self._ahead:
            for client in clients:
                self._await(dist.isend, out, client, number)
        elif clients:
            ops = [dist.P2POp(dist.isend, out, self._ranks[client]) for client in clients]
            ops += [dist.P2POp(dist.irecv, self._frames[c], self._ranks[c]) for c in clients]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        left = 2 * len(clients) if self._ahead else 0
        while left:
            self._watch.check()
            with suppress(queue.Empty):
                self._done.get(timeout=_TURN)
                left -= 1
        return {client: data.cpu().numpy().tobytes() for client, data in self._frames.items()}

    def _await(self, begin: Callable[..., Any], frame: torch.Tensor, client: str, number: int) -> None:
        """Start a transfer and wait for it in a thread, because the library's wait cannot be interrupted."""
        rank = self._ranks[client]
        try:
            work = begin(frame, rank, tag=number)
        except RuntimeError:
            # The first transfer opens the connection.
            self._watch.accuse(rank, GONE)
            return

        def wait() -> None:
            try:
                # Practically unlimited: the watch detects a dead neighbour.
                work.wait(YEAR)
            except RuntimeError:
                self._watch.accuse(rank, GONE)
            else:
                self._done.put(client)

        threading.Thread(target=wait, daemon=True).start()
