"""Frames of bytes between neighbours, over ``torch.distributed``."""

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
"""Seconds after which a wait for a frame asks whether there is a verdict."""
_WITHHELD = bytes(8)
"""How a frame begins that holds a reason instead of a message: no message has a header of length 0."""


def pack(message: bytes, reason: str, length: int) -> bytes:
    """A frame of ``length`` bytes: the message, or why there is none.

    >>> unpack(pack(b"", "diverged", 64)), unpack(pack(b"message", "", 7))
    ((b'', 'diverged'), (b'message', ''))
    """
    if not reason and len(message) != length:
        reason = f"its message has {len(message):,} bytes, not {length:,}"
    if reason:
        return (_WITHHELD + reason.encode())[:length].ljust(length, b"\0")
    return message


def unpack(frame: bytes) -> tuple[bytes, str]:
    """The message of a frame, or none and the reason that its sender gives."""
    if frame[:8] == _WITHHELD:
        return b"", frame[8:].rstrip(b"\0").decode(errors="replace") or "withheld"
    return frame, ""


class Links:
    """Connections with the neighbours of each round.

    Frames are awaited before they are sent, so that a neighbour that ends is noticed at once, also while this
    peer trains.

    Args:
        watch: receives which neighbour's connection closes, and ends a wait that is in vain.
        ranks: client → its peer.
    """

    def __init__(self, watch: Watch, ranks: Mapping[str, int]) -> None:
        self._watch, self._ranks = watch, ranks
        # NCCL has no receive that can wait during a computation.
        self._ahead = dist.get_backend() == "gloo"
        self._device = torch.device("cpu" if self._ahead else "cuda")
        self._frames: dict[str, torch.Tensor] = {}
        self._done: queue.Queue[str] = queue.Queue()

    def expect(self, number: int, lengths: Mapping[str, int]) -> None:
        """Await a frame of each of these clients in round ``number``, with so many bytes."""
        self._frames = {
            # Zeros: of a frame that is too short, the rest must not be what lay in this peer's memory.
            client: torch.zeros(length, dtype=torch.uint8, device=self._device)
            for client, length in lengths.items()
        }
        if self._ahead:
            for client, frame in self._frames.items():
                self._await(dist.irecv, frame, client, number)

    def swap(self, number: int, frame: bytes) -> dict[str, bytes]:
        """Send ``frame`` to all whose frames of round ``number`` are awaited; their frames, by client.

        Raises:
            PeerError: a peer is at fault, this neighbour or another.
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
        """Start a transfer, and wait for it in its own thread: the library hears no verdict."""
        rank = self._ranks[client]
        try:
            work = begin(frame, rank, tag=number)
        except RuntimeError:
            # The first transfer makes the connection.
            self._watch.accuse(rank, GONE)
            return

        def wait() -> None:
            try:
                # As long as a slow neighbour takes: the watch sees whether it lives.
                work.wait(YEAR)
            except RuntimeError:
                self._watch.accuse(rank, GONE)
            else:
                self._done.put(client)

        threading.Thread(target=wait, daemon=True).start()
