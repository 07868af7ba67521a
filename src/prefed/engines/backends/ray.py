"""Backend for Ray clusters: joins or starts a cluster, ships the run's files and runs tasks in actors.

Only bytes, strings and numbers pass between actors and the run. If an actor dies, its machine disconnects or
a task exceeds its time limit, another actor repeats the task.

Other machines get the run's files packed into one array. Each unpacks them once, into a private folder below
the system's temporary folder. Processes of the run hold a shared lock on it while they live, so a folder
without a lock is left over from a killed run and is removed by the next run.
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

from prefed.engines.backends import BackendSettings, JobFactory, WorkerError
from prefed.engines.backends.worker_pool import (
    LOOK,
    LostError,
    Pool,
    PoolWorker,
    TaskServer,
    answer_of,
)
from prefed.engines.job import Job
from prefed.engines.tasks import ClientStates, Task

_log = logging.getLogger("prefed")

INLINE = 100 * 1024
"""Maximum bytes of a message that is passed with its task; longer ones are stored as Ray objects."""
PATIENCE, FAREWELL = 30.0, 10.0
"""Seconds before a wait for the first actor is reported; seconds to wait for the removal of files."""
HEADLESS = 30.0
"""Seconds without the head of the cluster after which the run ends. After 60, Ray ends the process."""
_HERE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}
"""Environment variables for a cluster on this machine: it listens only on the loopback interface, and its
processes have the priority of the run. Ray's defaults are all interfaces and a low priority."""
_JOINED = {"RAY_AUTH_MODE": "token"}
"""Environment variables for joining a cluster. Ray uses tokens by default only when it starts one."""


def identity(job: Job) -> dict[str, str]:
    """Package versions and digests of data and model, which must be the same on all machines."""
    packages = {name: version(name).partition("+")[0] for name in ("prefed", "torch", "transformers")}
    return {**packages, **job.trainers.fingerprint}


class JobActor:
    """The class of the actors, which runs in processes of the cluster."""

    def __init__(self) -> None:
        self._server = TaskServer()

    def build(self, builder: str, text: str, threads: int, name: str, packed: list[Any]) -> dict[str, Any]:
        """Build the job.

        Args:
            name: name of the run, for the folder of its files on this machine.
            packed: a reference to the packed files; empty if this machine has the original files.

        Returns:
            ``identity`` of the job, ``node`` (the machine's ID) and ``folder`` of the files.
        """
        return answer_of(lambda: self._build(JobFactory(builder, text), threads, name, packed))

    def do(self, task: dict[str, Any], message: bytes, state: bytes | None) -> dict[str, Any]:
        """Run a task.

        Args:
            task: the other fields of a :class:`~prefed.engines.Task`.
            message: the task's message; Ray fetches it if it is stored as an object.
            state: the client's private state.
        """
        return answer_of(lambda: self._server.do(state, **task, message=message))

    def _build(self, factory: JobFactory, threads: int, name: str, packed: list[Any]) -> dict[str, Any]:
        import ray

        node, folder = ray.get_runtime_context().get_node_id(), None
        if packed:
            # Nodes on the same machine have separate folders.
            folder, self._held = unpack(f"{name}-{node[:16]}", lambda: ray.get(packed[0]))
        self._server.build(factory, threads, folder)
        return {"identity": identity(self._server.job), "node": node, "folder": str(folder or "")}


class _Actor(PoolWorker):
    """The handle of an actor.

    Args:
        store: message → the message or a Ray reference to it.
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
            # The other lines repeat the first ones and list Ray's files.
            raise LostError(" ".join(str(error).split("\n")[:3])) from error

    def kill(self) -> None:
        import ray

        ray.kill(self._handle)


class RayActors(Pool[_Actor]):
    """Distributes tasks over the actors of a cluster.

    Args:
        job: the run's job, which the job of each actor must match.
        factory: builds the job in each actor. Its shipped files are sent to other machines.
        settings: ``workers`` is the number of actors; 0: as many as the cluster has room for.

    Raises:
        WorkerError: (on entering) the cluster cannot be joined or has no room for the actors; (from
            :meth:`run`) as :class:`Pool`, or the job of an actor differs.
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
            self._head = str(ray.get_runtime_context().gcs_address)
            self._wanted = count_actors(self._settings)
            # A cluster that was started here runs on this machine, which has the files.
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
        """Kill the actors, remove their files, and leave the cluster if this object joined it."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actors, self._idle, self._busy = [*self._idle, *self._busy], [], []
        if not self._head:  # calls would block on the lost head until Ray ends the process
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
        """A task's message, or a reference if it is long. Consecutive equal messages are stored once."""
        import ray

        if len(message) <= INLINE:
            return message
        if self._stored is None or self._stored[0] != message:
            self._stored = message, ray.put(message)
        return self._stored[1]

    def _welcome(self, worker: _Actor, fields: dict[str, Any]) -> None:
        """Check that an actor has built the same job.

        Raises:
            WorkerError: versions, data or model differ.
        """
        if fields["folder"]:
            self._folders[fields["node"]] = fields["folder"]
        here, there = identity(self._job), fields["identity"]
        names = [name for name in here if there.get(name) != here[name]]
        if names:
            other = "; ".join(f"{name} {there.get(name)}, not {here[name]}" for name in names)
            raise WorkerError(
                f"node {fields['node'][:8]} of the Ray cluster differs from this machine: it has {other}. "
                "Install the same package versions and the same model on all machines"
            )

    def _lose(self, worker: _Actor, reason: str) -> None:
        self._wait_for_head()
        super()._lose(worker, reason)

    def _check(self) -> None:
        """Check that the head answers and that there is an actor or room for one.

        Raises:
            WorkerError: the head does not return, or no machine has room for an actor.
        """
        import ray

        self._wait_for_head()
        if self._idle or any(actor.ready for actor in self._busy):
            return
        if not any(_room(self._settings).values()):
            raise WorkerError(
                "no machine of the Ray cluster has room for an actor. Complete rounds are kept: add machines "
                "and resume the run"
            )
        if not self._reported and time.monotonic() - self._since > PATIENCE:
            self._reported = True
            free = ray.available_resources()
            cpus, gpus = free.get("CPU", 0.0), free.get("GPU", 0.0)
            _log.warning("waiting for an actor of the Ray cluster; free: %g CPUs, %g GPUs", cpus, gpus)

    def _wait_for_head(self) -> None:
        end = time.monotonic() + HEADLESS
        while not _head_answers(self._head):
            if time.monotonic() > end:
                head, self._head = self._head, ""
                raise WorkerError(
                    f"the head of the Ray cluster, {head}, has not answered for {HEADLESS:g} seconds. "
                    "Complete rounds are kept: restart the cluster and use --resume to continue, or continue "
                    "without it with --resume --set engine.name=local"
                )
            time.sleep(LOOK / 4)


def join_cluster(settings: BackendSettings) -> bool:
    """Join the cluster at ``settings.address``, or start one on this machine.

    If this process has already joined a cluster, that one is used.

    Returns:
        Whether the caller must leave the cluster, because this call joined or started it.

    Raises:
        WorkerError: the cluster cannot be joined or started.
    """
    # Ray reads these variables when it is first imported. The user's values take precedence.
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
            # As with worker processes, the user may choose more processes than there are cores.
            cores = max(os.cpu_count() or 1, settings.workers * settings.threads)
            ray.init("local", num_cpus=cores, include_dashboard=False, **quiet)
        else:
            ray.init(settings.address, **quiet)
    except Exception as error:
        raise WorkerError(_refused(settings.address, error)) from error
    return True


def _refused(address: str | None, error: Exception) -> str:
    if address is None:
        return f"cannot start a Ray cluster on this machine: {error}"
    return (
        f"[engine.ray] address = {address!r}: cannot join the Ray cluster: {error}\n"
        "(all machines need the same versions of Python and Ray and the same token, in ~/.ray/auth_token or "
        "RAY_AUTH_TOKEN; to join a cluster without tokens, set RAY_AUTH_MODE=disabled in the environment)"
    )


def _head_answers(head: str) -> bool:
    """Return whether a process listens at the address of the head."""
    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError:
        return False
    return True


def _room(settings: BackendSettings) -> dict[str, int]:
    """Description of each live machine of the cluster → the number of actors it has room for."""
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
    """The number of actors to start: ``settings.workers``, or as many as there is room for.

    Raises:
        WorkerError: there is too little room. Ray would wait silently.
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
        f"{asked}: the Ray cluster has room for only {total}, each with {need}:\n{lines}\n"
        "Request less, or add machines (ray start --address=HOST:PORT on each)"
    )


_HELD = "HELD"


def pack(shipped: Mapping[str, Path]) -> NDArray[np.uint8]:
    """Pack files and folders by name into one array of bytes. Links are followed."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", dereference=True) as archive:
        for name, path in shipped.items():
            archive.add(path, name)
    return np.frombuffer(stream.getbuffer(), np.uint8)


def unpack(name: str, fetch: Callable[[], NDArray[np.uint8]]) -> tuple[Path, int]:
    """Unpack files into folder ``name`` of this machine; return the folder and a handle that locks it.

    Args:
        fetch: returns the result of :func:`pack`; called if the folder does not exist.

    Raises:
        PermissionError: another user can access the parent folder.
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
    """The parent folder of all copies on this machine, accessible only for this user."""
    base = Path(tempfile.gettempdir(), f"prefed-ray-{os.getuid()}")
    base.mkdir(mode=0o700, exist_ok=True)
    status = base.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or base.is_symlink():
        raise PermissionError(
            f"{base}: other users can access this folder, which would contain the run's data: remove it"
        )
    return base


@contextmanager
def _locked(base: Path) -> Iterator[None]:
    """Hold an exclusive lock on the folder."""
    handle = os.open(base, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_left_over(base: Path) -> None:
    """Remove folders that no process has locked."""
    for folder in base.iterdir():
        try:
            handle = os.open(folder / _HELD, os.O_RDONLY)
        except FileNotFoundError:  # unpacking was interrupted
            shutil.rmtree(folder, ignore_errors=True)
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(handle)
