"""Actors of a Ray cluster: how a run joins one, ships its files and has actors do its tasks.

Bytes, texts and numbers pass between an actor and the run, and nothing else. Whether an actor's process dies,
its machine goes or it answers too late: another actor does its task.

A machine beyond this one gets this one's files, packed into one array and unpacked once, into a folder of
the run below the system's temporary folder, which only its owner can read. The run's processes there hold a
lock on it as long as they live. So a folder that nobody holds is left over from a run that was killed, and
the next run removes it.
"""

from __future__ import annotations

import fcntl
import io
import logging
import os
import secrets
import shutil
import socket
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefed.engines.backend import BackendSettings, JobFactory
from prefed.engines.backends.worker_pool import (
    LOOK,
    LostError,
    Pool,
    PoolWorker,
    TaskServer,
    WorkerError,
    answer_of,
)
from prefed.engines.job import Job
from prefed.engines.tasks import ClientStates, Task

_log = logging.getLogger("prefed")

INLINE = 100 * 1024
"""Bytes of the longest message that goes along with its task; Ray stores what is longer as an object."""
PATIENCE, FAREWELL = 30.0, 10.0
"""Seconds: until a wait for the first actor is reported; for removing files."""
HEADLESS = 30.0
"""Seconds without the cluster's head after which the run ends. After 60, Ray ends the process."""
_HERE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}
"""Ray's variables for a cluster that is started here. It listens on the loopback interface alone, where Ray
would listen on all. Its processes do the run's work at the run's priority; Ray gives them a low one."""
_JOINED = {"RAY_AUTH_MODE": "token"}
"""For a cluster that is joined. Ray asks for a token by itself only where it starts one."""


def identity(job: Job) -> dict[str, str]:
    """What must be the same wherever a run's tasks are done: versions, data and model."""
    packages = {name: version(name).partition("+")[0] for name in ("prefed", "torch", "transformers")}
    return {**packages, **job.trainers.fingerprint}


class JobActor:
    """An actor on its own side. Ray makes it of this class, in a process on one of its machines."""

    def __init__(self) -> None:
        self._server = TaskServer()

    def build(self, builder: str, text: str, threads: int, name: str, packed: list[Any]) -> dict[str, Any]:
        """Build the job.

        Args:
            name: of the run, for the folder of its files on this machine.
            packed: the reference of the packed files; empty if this machine has the run's own files.

        Returns:
            ``identity`` of the job, ``node`` (the machine's id), ``folder`` of the files.
        """
        return answer_of(lambda: self._build(JobFactory(builder, text), threads, name, packed))

    def do(self, task: dict[str, Any], message: bytes, state: bytes | None) -> dict[str, Any]:
        """Do one task.

        Args:
            task: the other fields of a :class:`~prefed.engines.Task`.
            message: that of the task; Ray fetches it where it is stored as an object.
            state: the client's private state.
        """
        return answer_of(lambda: self._server.do(state, **task, message=message))

    def _build(self, factory: JobFactory, threads: int, name: str, packed: list[Any]) -> dict[str, Any]:
        import ray

        node, folder = ray.get_runtime_context().get_node_id(), None
        if packed:
            # Two nodes on one machine have a folder each, as two machines have.
            folder, self._held = unpack(f"{name}-{node[:16]}", lambda: ray.get(packed[0]))
        self._server.build(factory, threads, folder)
        return {"identity": identity(self._server.job), "node": node, "folder": str(folder or "")}


class _Actor(PoolWorker):
    """An actor, as the run sees it.

    Args:
        store: a long message → the reference of it that goes to the actor instead.
    """

    def __init__(self, handle: Any, built: Any, store: Callable[[bytes], Any]) -> None:
        self._handle, self._store = handle, store
        self.answer = built.future()

    def ask(self, task: Task, state: bytes | None) -> None:
        fields = {name: value for name, value in vars(task).items() if name != "message"}
        self.answer = self._handle.do.remote(fields, self._store(task.message), state).future()

    def fields(self, wait: float | None = 0.0) -> dict[str, Any]:
        import ray

        try:
            return super().fields(wait)
        except ray.exceptions.RayError as error:
            # The first lines: the rest repeats them, and names Ray's own files.
            raise LostError(" ".join(str(error).split("\n")[:3])) from error

    def kill(self) -> None:
        import ray

        ray.kill(self._handle)


class RayActors(Pool[_Actor]):
    """Spreads tasks over actors.

    Args:
        job: the run's job, which each actor's must equal.
        factory: builds the job, once in each actor. A machine beyond this one gets what it ships.
        settings: ``workers`` actors; 0 for as many as the cluster has room for.

    Raises:
        WorkerError: (on entering) there is no cluster, or no room for so many actors; (from :meth:`run`) as
            :class:`Pool`, or a machine builds another job.
    """

    def __init__(
        self, job: Job, factory: JobFactory, states: ClientStates, settings: BackendSettings
    ) -> None:
        super().__init__(factory, states, settings)
        self._job = job
        self._name = secrets.token_hex(8)
        self._joined = False
        self._since, self._reported = 0.0, False
        self._packed: list[Any] = []
        self._head = ""
        self._stored: tuple[bytes, Any] | None = None
        self._folders: dict[str, str] = {}

    def __enter__(self) -> RayActors:
        self._joined = join_cluster(self._settings)
        import ray

        try:
            self._head = _head_address()
            self._wanted = count_actors(self._settings)
            # A cluster that was started here is this machine, which has the files themselves.
            if self._factory.shipped and (not self._joined or self._settings.address is not None):
                self._packed = [ray.put(pack(self._factory.shipped))]
            self._since = time.monotonic()
            for _ in range(self._wanted):
                self._hire()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """End the actors, remove their files, and leave the cluster if it was joined here."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actors, self._idle, self._busy = [*self._idle, *self._busy], [], []
        if not self._head:  # each call would wait for the head, until Ray ends the process
            return
        for actor in actors:
            actor.kill()
        self._packed.clear()
        self._stored = None
        on = NodeAffinitySchedulingStrategy
        remove = ray.remote(shutil.rmtree)
        removed = [
            remove.options(num_cpus=0, scheduling_strategy=on(node, soft=False)).remote(folder, True)
            for node, folder in self._folders.items()
        ]
        self._folders.clear()
        if removed:
            ray.wait(removed, num_returns=len(removed), timeout=FAREWELL)
        if self._joined:
            ray.shutdown()

    def _start(self) -> _Actor:
        import ray

        settings, factory = self._settings, self._factory
        handle = (
            ray.remote(JobActor)
            .options(num_cpus=settings.threads, num_gpus=settings.gpus, max_restarts=0)
            .remote()
        )
        built = handle.build.remote(factory.builder, factory.text, settings.threads, self._name, self._packed)
        return _Actor(handle, built, self._message)

    def _message(self, message: bytes) -> Any:
        """A task's message for its actor: a long one is stored once for all tasks in a row that have it."""
        import ray

        if len(message) <= INLINE:
            return message
        if self._stored is None or self._stored[0] != message:
            self._stored = message, ray.put(message)
        return self._stored[1]

    def _welcome(self, worker: _Actor, fields: dict[str, Any]) -> None:
        """Check what an actor has built.

        Raises:
            WorkerError: it is another job than this process has.
        """
        if fields["folder"]:
            self._folders[fields["node"]] = fields["folder"]
        here, there = identity(self._job), fields["identity"]
        names = [name for name in here if there.get(name) != here[name]]
        if names:
            other = "; ".join(f"{name} {there.get(name)}, not {here[name]}" for name in names)
            raise WorkerError(
                f"node {fields['node'][:8]} of the Ray cluster would not compute what this machine does: it "
                f"has {other}. Install the same versions on each machine, and put the same model there"
            )

    def _lose(self, worker: _Actor, reason: str) -> None:
        self._wait_for_head()
        super()._lose(worker, reason)

    def _check(self) -> None:
        """Wait for the cluster's head if it does not answer, and for room if there is no actor.

        Raises:
            WorkerError: the head does not come back, or no machine is left that has room for an actor.
        """
        self._wait_for_head()
        if self._idle or any(actor.ready for actor in self._busy):
            return
        if not any(_room(self._settings).values()):
            raise WorkerError(
                "no machine is left in the Ray cluster that has room for an actor; complete rounds are kept: "
                "resume the run when machines have joined again"
            )
        if not self._reported and time.monotonic() - self._since > PATIENCE:
            self._reported = True
            _log.warning("waiting for an actor of the Ray cluster; free are %s", _free())

    def _wait_for_head(self) -> None:
        end = time.monotonic() + HEADLESS
        while not _head_answers(self._head):
            if time.monotonic() > end:
                head, self._head = self._head, ""
                raise WorkerError(
                    f"the head of the Ray cluster, {head}, has not answered for {HEADLESS:g} seconds. Whole "
                    "rounds are kept: start the cluster again, and continue with --resume; or without it, "
                    "with --resume --set engine.name=local"
                )
            time.sleep(LOOK / 4)


def join_cluster(settings: BackendSettings) -> bool:
    """Join the cluster at ``settings.address``, or start one of only this machine.

    A program that has already joined a cluster continues with that one.

    Returns:
        Whether a cluster was joined or started here, and is to be left again.

    Raises:
        WorkerError: it cannot be reached, or does not admit this machine.
    """
    # Set before Ray is first imported, for it reads them then. What the user has set stays.
    if "ray" not in sys.modules:
        wanted = {"RAY_USAGE_STATS_ENABLED": "0", **(_HERE if settings.address is None else _JOINED)}
        for name, value in wanted.items():
            os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if settings.address is None:
            # How many processes share the cores of this machine is the user's choice, as with workers.
            cores = max(os.cpu_count() or 1, settings.workers * settings.threads)
            ray.init("local", num_cpus=cores, include_dashboard=False, **quiet)
        else:
            ray.init(settings.address, **quiet)
    except Exception as error:
        raise WorkerError(_refused(settings.address, error)) from error
    return True


def _refused(address: str | None, error: Exception) -> str:
    if address is None:
        return f"no Ray cluster could be started on this machine: {error}"
    return (
        f"[engine.ray] address = {address!r}: no Ray cluster could be joined there: {error}\n"
        "(all machines need the same versions of Python and Ray, and the same token, in ~/.ray/auth_token or "
        "RAY_AUTH_TOKEN; a cluster without tokens is joined with RAY_AUTH_MODE=disabled in the environment)"
    )


def _head_address() -> str:
    """Where the head of the cluster listens, ``host:port``."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _head_answers(head: str) -> bool:
    """Whether anything listens at the address of the head."""
    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError:
        return False
    return True


def _room(settings: BackendSettings) -> dict[str, int]:
    """How many actors each living machine of the cluster has room for: a line that names it → a number."""
    import ray

    found = dict[str, int]()
    for node in ray.nodes():
        if node["Alive"]:
            resources: Mapping[str, float] = node["Resources"]
            cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
            count = int(cpus // settings.threads)
            if settings.gpus:
                count = min(count, int(gpus / settings.gpus + 1e-9))
            line = f"{node['NodeManagerAddress']} ({node['NodeID'][:8]}): {cpus:g} CPUs, {gpus:g} GPUs"
            found[line] = count
    return found


def count_actors(settings: BackendSettings) -> int:
    """How many actors to hire: ``settings.workers``, or as many as there is room for.

    Raises:
        WorkerError: there is not so much room. Ray itself would wait for it, without a word.
    """
    rooms = _room(settings)
    total = sum(rooms.values())
    if total >= max(1, settings.workers):
        return settings.workers or total
    asked = f"[engine] workers = {settings.workers}" if settings.workers else "an actor"
    need = f"{settings.threads} CPUs ([engine] threads)"
    if settings.gpus:
        need += f" and {settings.gpus:g} GPUs ([engine.ray] num_gpus)"
    lines = "\n".join(f"  {line}: room for {count}" for line, count in rooms.items())
    raise WorkerError(
        f"{asked}: the Ray cluster has room for {total}, each with {need}:\n{lines}\n"
        "lower what is asked for, or let more machines join (ray start --address=HOST:PORT on each)"
    )


def _free() -> str:
    """What nobody uses of the cluster at the moment, in words."""
    import ray

    resources = ray.available_resources()
    return f"{resources.get('CPU', 0.0):g} CPUs and {resources.get('GPU', 0.0):g} GPUs"


_HELD = "HELD"


def pack(shipped: Mapping[str, Path]) -> NDArray[np.uint8]:
    """Files and folders by name, as one array of bytes. For a link it holds what the link leads to."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", dereference=True) as archive:
        for name, path in shipped.items():
            archive.add(path, name)
    return np.frombuffer(stream.getbuffer(), np.uint8)


def unpack(name: str, fetch: Callable[[], NDArray[np.uint8]]) -> tuple[Path, int]:
    """The folder ``name`` of this machine, and a handle that holds it as long as it is open.

    Args:
        fetch: gives what :func:`pack` made. It is called if the folder is not there yet.

    Raises:
        PermissionError: somebody else owns the folder in which it would lie.
    """
    base = _base()
    with _locked(base):
        _remove_left_over(base)
        folder = base / name
        if not folder.exists():
            partial = folder.with_name(f"{name}.partial")
            partial.mkdir(mode=0o700)
            with tarfile.open(fileobj=io.BytesIO(fetch().data)) as archive:
                archive.extractall(partial, filter="data")
            (partial / _HELD).touch()
            partial.rename(folder)
        held = os.open(folder / _HELD, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_SH)
    return folder, held


def _base() -> Path:
    """The folder of this machine's copies, which only this user can read."""
    base = Path(tempfile.gettempdir(), f"prefed-ray-{os.getuid()}")
    base.mkdir(mode=0o700, exist_ok=True)
    status = base.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or base.is_symlink():
        raise PermissionError(
            f"{base}: copies of the run's data would lie here, and others can reach it; remove it"
        )
    return base


@contextmanager
def _locked(base: Path) -> Iterator[None]:
    """One process at a time is in here."""
    handle = os.open(base, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_left_over(base: Path) -> None:
    """Remove folders that no process holds."""
    for folder in base.iterdir():
        try:
            handle = os.open(folder / _HELD, os.O_RDONLY)
        except FileNotFoundError:  # whoever unpacked it was killed
            shutil.rmtree(folder, ignore_errors=True)
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(handle)
