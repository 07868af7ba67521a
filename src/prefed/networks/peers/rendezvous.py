"""Rendezvous: peers find each other through a store of ``torch.distributed`` and compare settings."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import TimeoutError
from multiprocessing.pool import ThreadPool
from typing import Annotated, Any, Literal

import torch.distributed as dist
from pydantic import Field, TypeAdapter
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from prefed.networks.peers.heartbeat import Beat, PeerError, Watch, beat_key

_KINDS: Mapping[type, TypeAdapter[Any]] = {
    str: TypeAdapter(str),
    dict: TypeAdapter(dict[str, Any]),
    list: TypeAdapter(Annotated[list[int], Field(min_length=1)]),
}

CONNECT = timedelta(seconds=60)
"""Time-out of each of gloo's five attempts to connect to a neighbour."""


@dataclass(frozen=True)
class Place:
    """The rank of this peer and the address of the rendezvous.

    Attributes:
        rank: rank of this peer, from 0.
        host: host name of peer 0 as seen by the others; empty under torchrun, which provides the store.
        port: port at which peer 0 runs the store.
        backend: backend that transfers models: ``"gloo"``, or ``"nccl"`` if each peer has its own GPU.
        patience: seconds without a heartbeat after which a peer counts as failed.
        join: seconds to wait for all peers at the start.
    """

    rank: int
    peers: int
    host: str = ""
    port: int = 0
    backend: Literal["gloo", "nccl"] = "gloo"
    patience: float = 30.0
    join: float = 600.0

    @staticmethod
    def of(environment: Mapping[str, str], at: str | None, rank: int | None, peers: int | None) -> Place:
        """Create a place from command-line options, with defaults from torchrun or a scheduler.

        Args:
            environment: environment variables: ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``.
            at: ``"HOST:PORT"``.

        Raises:
            ValueError: an option is missing or invalid.

        >>> Place.of({}, "10.0.0.1:29500", 2, 5).port
        29500
        """
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and at is None
        given = {
            "--rank": rank if rank is not None else environment.get("RANK"),
            "--peers": peers if peers is not None else environment.get("WORLD_SIZE"),
        }
        address = at or ":".join(environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        host, _, port = address.rpartition(":")
        if not agent:
            given["--at"] = address if host and port else None
        missing = [name for name, value in given.items() if value is None]
        if missing:
            raise ValueError(
                f"missing {' and '.join(missing)}: start all peers with torchrun --nproc-per-node=N -m "
                "prefed.networks.peers FILE, or each peer with --rank K --peers N --at HOST:PORT (HOST: the "
                "machine of peer 0)"
            )
        for name in ("--rank", "--peers"):
            if not str(given[name]).removeprefix("-").isdecimal():
                raise ValueError(f"{name} = {given[name]!r}: must be a whole number")
        place = Place(int(given["--rank"] or 0), int(given["--peers"] or 0))
        if not 0 <= place.rank < place.peers:
            raise ValueError(
                f"--rank = {place.rank}: the ranks of {place.peers} peers are 0 to {place.peers - 1}"
            )
        if agent:
            return place
        if not (port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ValueError(
                f"--at = {address!r}: must be HOST:PORT with a port from 1 to 65535, e.g. 10.0.0.1:29500"
            )
        return Place(place.rank, place.peers, host.strip("[]"), int(port))


class Meeting:
    """Context in which all peers of a run are connected.

    Entering waits for all peers. Leaving with an error reports it to the others.

    Raises:
        PeerError: (on entering) a peer did not start; (on leaving) a peer failed.
    """

    def __init__(self, place: Place) -> None:
        self.place = place

    def __enter__(self) -> Meeting:
        place = self.place
        # Connect only to neighbours, and only on first use.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        end = time.monotonic() + place.join
        host = None if not place.host else 0
        # In a daemon thread: the store's client waits without a time-out if peer 0 is stopped.
        pool, limit = ThreadPool(1), place.join + place.patience
        try:
            names = pool.apply_async(self._come, (end,)).get(limit)
        except TimeoutError:
            who = "peer 0" if place.host else "torchrun's store"
            raise PeerError(f"{who} is stopped or unreachable: no answer within {limit:g} seconds") from None
        finally:
            pool.close()
        self.watch = Watch(self._store, place.rank, names, host, place.patience)
        self.watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.watch.hush()
        if kind is None:
            self.watch.leave("done")
            if self.watch.verdict:
                raise PeerError(self.watch.verdict)
            if dist.is_initialized():
                dist.destroy_process_group()
            return
        if isinstance(error, PeerError):
            self.watch.leave("left")
            # Without notes: they describe this peer, not the one that failed.
            raise PeerError(str(error)) from None
        ours = isinstance(error, Exception)
        # If another peer failed, torchrun may end this one, or a library call may fail: wait for the verdict.
        library = isinstance(error, RuntimeError) and not type(error).__module__.startswith("prefed.")
        verdict = self.watch.wait_for_verdict(2.0 if library or not ours else 0.0)
        if not verdict:
            self.watch.accuse(self.place.rank, f"failed: {error}" if ours else "was terminated")
            self.watch.wait_for_verdict(2.0)
        self.watch.leave("left")
        if verdict:
            raise PeerError(verdict) from error

    def share(self, what: str, value: Any) -> list[Any]:
        """Gather the values of all peers, by rank.

        Args:
            what: key of the value, also for messages.
            value: a string, a mapping or a list of round numbers. All peers must send the same type.

        Raises:
            PeerError: a peer sends another type.
        """
        values, kind = [], _KINDS[type(value)]
        self._store.set(f"{what}/{self.place.rank}", json.dumps(value))
        keys = [f"{what}/{rank}" for rank in range(self.place.peers)]
        while not self._store.check(keys):
            self.watch.check()
            time.sleep(0.02)
        for rank, text in enumerate(self._store.multi_get(keys)):
            try:
                values.append(kind.validate_json(text, strict=True))
            except ValueError:
                raise PeerError(
                    f"{self.watch.names[rank]} sent an invalid value of {what!r}: start all peers with the "
                    "same version of prefed"
                ) from None
        return values

    def agree(self, what: str, tables: Mapping[str, Any]) -> None:
        """Check that all peers have the same values.

        Args:
            what: description of the values.
            tables: name → JSON value.

        Raises:
            PeerError: the values of a peer differ from those of peer 0; the message names up to three.
        """
        first, *others = self.share(what, tables)
        for rank, other in enumerate(others, 1):
            odd = [name for name in sorted({*first, *other}) if first.get(name) != other.get(name)]
            if odd:
                listed = "; ".join(f"{n} is {other.get(n)!r}, not {first.get(n)!r}" for n in odd[:3])
                raise PeerError(
                    f"{self.watch.names[rank]} and {self.watch.names[0]} have different {what}: {listed}; "
                    "start all peers with the same"
                )

    def connect(self) -> None:
        """Set up ``torch.distributed`` for transfers between peers."""
        place = self.place
        dist.init_process_group(
            place.backend,
            store=PrefixStore("models", self._store),
            rank=place.rank,
            world_size=place.peers,
            timeout=CONNECT,
        )

    def _come(self, end: float) -> list[str]:
        self._store = self._open()
        return self._wait_for_all(end)

    def _open(self) -> Store:
        place, wait = self.place, timedelta(seconds=self.place.join)
        if not place.host:
            store: Store = next(rendezvous("env://", timeout=wait))[0]
            return store
        try:
            return TCPStore(
                place.host, place.port, None, place.rank == 0, timeout=wait, wait_for_workers=False
            )
        except RuntimeError as error:
            where = f"{place.host}:{place.port}"
            if place.rank == 0:
                raise PeerError(
                    f"cannot listen at {where}: {error}; choose another port in --at, or another --rank if "
                    "peer 0 is already running"
                ) from None
            raise PeerError(
                f"peer 0 did not answer at {where} within {place.join:g} seconds: start it, or correct --at"
            ) from None

    def _wait_for_all(self, end: float) -> list[str]:
        """Wait for all peers and return their names."""
        place, store = self.place, self._store
        ranks = range(place.peers)
        try:
            if place.rank == 0:
                store.set("peers", str(place.peers))
            turn = store.add(f"turn/{place.rank}", 1)
            if store.check(["started"]):
                raise PeerError(
                    f"the run has already started with a peer {place.rank}: give each peer its own --rank, "
                    "or stop all peers and restart them with --auto-resume"
                )
            self._check_place(turn)
            store.set(f"host/{place.rank}", socket.gethostname())
            store.set(beat_key(place.rank), Beat().text())
            while not store.check([beat_key(rank) for rank in ranks]):
                if time.monotonic() > end:
                    raise PeerError(_missing([k for k in ranks if not store.check([beat_key(k)])], place))
                self._check_place(turn)
                time.sleep(0.05)
            # In this order, at least one of two peers with the same rank detects the other.
            store.set("started", "")
            self._check_place(turn)
            hosts = store.multi_get([f"host/{rank}" for rank in ranks])
        except dist.DistError:
            raise PeerError("peer 0 ended before all peers had started: see its output") from None
        return [f"peer {rank} (on {host.decode(errors='replace')})" for rank, host in enumerate(hosts)]

    def _check_place(self, turn: int) -> None:
        """Check that peer 0 expects the same number of peers, and that no other process has this rank.

        Raises:
            PeerError: the number differs or the rank is taken.
        """
        place, store = self.place, self._store
        count = int(store.get("peers")) if store.check(["peers"]) else place.peers
        if count != place.peers:
            raise PeerError(
                f"peer {place.rank} has --peers {place.peers}, peer 0 has --peers {count}: use one number"
            )
        if int(store.get(f"turn/{place.rank}")) != turn:
            raise PeerError(
                f"another process has started as peer {place.rank}: give each peer its own --rank"
            )


def _missing(ranks: Sequence[int], place: Place) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return (
        f"of {place.peers} peers, {listed} did not start within {place.join:g} seconds (--join): start each "
        "with the same --at and --peers"
    )
