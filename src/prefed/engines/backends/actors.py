"""The backend that spreads tasks over actors of a Ray cluster.

Private states stay in a store of this process. A task's state goes to the actor with the task, and the next
state comes back with the result. So an actor holds nothing that a run would miss: whether its process dies,
its machine goes or it answers too late, its task is given to another, and another actor is hired.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from prefed.engines.backend import Backend, BackendSettings
from prefed.engines.backends import cluster
from prefed.engines.backends.actor import JobActor, identity
from prefed.engines.backends.shipment import pack
from prefed.engines.backends.worker import WorkerError
from prefed.engines.job import Job
from prefed.engines.job_factory import JobFactory
from prefed.engines.tasks import ClientStates, Task, TaskResult

_log = logging.getLogger("prefed")

INLINE = 100 * 1024
"""Bytes of the longest message that goes along with its task; Ray stores what is longer as an object."""
ATTEMPTS = 3
"""Actors that a task may lose, and that may fail to start in a row for each that is asked for."""

LOOK, PATIENCE, FAREWELL = 2.0, 30.0, 10.0
"""Seconds: between looks at deadlines; until a wait for the first actor is told of; for removing files."""
HEADLESS = 30.0
"""Seconds without the cluster's head after which the run ends. After 60, Ray ends the process."""


@dataclass
class _Order:
    """A task, and how many actors it has lost."""

    task: Task
    lost: int = 0


@dataclass(eq=False)
class _Actor:
    """An actor, as the run sees it.

    Attributes:
        awaited: the reference of the answer that it owes.
        order: the task that it does; ``None`` if it builds its job, or if nobody waits for the result.
        deadline: when the answer is too late, on the monotonic clock.
        built: whether it has built its job.
    """

    handle: Any
    awaited: Any
    order: _Order | None = None
    deadline: float = inf
    built: bool = False
    memory_mb: float = 0.0


class RayActors(Backend):
    """Spreads tasks over actors.

    Args:
        job: the run's job, which each actor's must equal.
        factory: builds the job, once in each actor. A machine beyond this one gets what it ships.
        settings: ``workers`` actors; 0 for as many as the cluster has room for.

    Raises:
        WorkerError: (on entering) there is no cluster, or no room for so many actors. (From :meth:`run`) a
            machine builds another job, a task raised or lost :data:`ATTEMPTS` actors, or no actor is left
            and none can be started.
    """

    states: ClientStates

    def __init__(
        self, job: Job, factory: JobFactory, states: ClientStates, settings: BackendSettings
    ) -> None:
        self.states = states
        self._job, self._factory, self._settings = job, factory, settings
        self._name = secrets.token_hex(8)
        self._joined = False
        self._wanted = 0
        self._failures = 0
        self._since, self._told = 0.0, False
        self._packed: list[Any] = []
        self._head, self._looked = "", 0.0
        self._stored: tuple[bytes, Any] | None = None
        self._folders: dict[str, str] = {}
        self._idle: list[_Actor] = []
        self._busy: list[_Actor] = []

    def __enter__(self) -> RayActors:
        self._joined = cluster.join(self._settings)
        import ray

        try:
            self._head = cluster.head_address()
            self._wanted = cluster.count_actors(self._settings)
            # A cluster that was started here is this machine, which has the files themselves.
            if self._factory.shipped and (not self._joined or self._settings.address is not None):
                self._packed = [ray.put(pack(self._factory.shipped))]
            self._since = time.monotonic()
            for _ in range(self._wanted):
                self._hire()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._leave()

    def run(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
        """The results, as they come."""
        for actor in self._busy:
            actor.order = None  # of a run that was left early
        source, lost = map(_Order, tasks), list[_Order]()
        while True:
            while self._idle and (order := lost.pop() if lost else next(source, None)) is not None:
                self._give(self._idle.pop(), order)
            if self._idle and not any(actor.order for actor in self._busy):
                return
            for actor in self._answered():
                order = actor.order
                fields = self._take(actor)
                if fields is None:
                    lost += [] if order is None else [order]
                elif order is not None:
                    state: bytes | None = fields.pop("state")
                    result = TaskResult(**fields)
                    if state is not None:
                        self.states.stage(result.client, state)
                    yield result

    def memory_mb(self) -> float:
        """The peak of each actor's process, added up, in MiB."""
        return sum(actor.memory_mb for actor in (*self._idle, *self._busy))

    def _hire(self) -> None:
        """Ask for an actor. It joins the others when it has built its job."""
        import ray

        settings, factory = self._settings, self._factory
        hired = ray.remote(JobActor).options(
            num_cpus=settings.threads, num_gpus=settings.gpus, max_restarts=0
        )
        handle = hired.remote()
        awaited = handle.build.remote(
            factory.builder, factory.text, settings.threads, self._name, self._packed
        )
        self._busy.append(_Actor(handle, awaited))

    def _give(self, actor: _Actor, order: _Order) -> None:
        task = order.task
        fields = {name: value for name, value in vars(task).items() if name != "message"}
        message, state = self._message(task.message), self.states.read(task.client)
        actor.awaited = actor.handle.do.remote(fields, message, state)
        actor.order = order
        timeout = self._settings.timeout
        actor.deadline = time.monotonic() + timeout if timeout else inf
        self._busy.append(actor)

    def _message(self, message: bytes) -> Any:
        """A task's message for its actor: a long one is stored once for all tasks in a row that have it."""
        import ray

        if len(message) <= INLINE:
            return message
        if self._stored is None or self._stored[0] != message:
            self._stored = message, ray.put(message)
        return self._stored[1]

    def _answered(self) -> list[_Actor]:
        """The busy actors that have an answer, are gone or are late; waits for a while if there are none."""
        import ray

        if time.monotonic() > self._looked + LOOK:
            self._look_for_head()
        owed = {actor.awaited: actor for actor in self._busy}
        ready, _ = ray.wait(list(owed), num_returns=len(owed), timeout=0)
        if not ready:
            ready, _ = ray.wait(list(owed), num_returns=1, timeout=LOOK)
        late = [actor for actor in self._busy if actor.deadline < time.monotonic()]
        if not ready and not late and not self._idle and not any(actor.built for actor in self._busy):
            self._look_for_room()
        return list(dict.fromkeys([*(owed[reference] for reference in ready), *late]))

    def _take(self, actor: _Actor) -> dict[str, Any] | None:
        """The answer of an actor, which is idle from here on; ``None`` if it is lost."""
        import ray

        self._busy.remove(actor)
        try:
            fields: dict[str, Any] = ray.get(actor.awaited, timeout=0)
        except ray.exceptions.GetTimeoutError:
            self._lose(actor, f"took longer than [engine] visit_timeout = {self._settings.timeout:g} seconds")
            return None
        except ray.exceptions.RayError as error:
            self._lose(actor, f"lost the actor that did it: {_first_lines(error)}")
            return None
        if "error" in fields:
            ray.kill(actor.handle)
            raise WorkerError(f"an actor of the Ray cluster failed:\n{fields['error']}")
        actor.memory_mb = fields.pop("memory_mb")
        if not actor.built:
            self._welcome(actor, fields)
        actor.deadline = inf
        actor.order = None
        self._idle.append(actor)
        return fields

    def _welcome(self, actor: _Actor, fields: dict[str, Any]) -> None:
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
        actor.built, self._failures = True, 0

    def _lose(self, actor: _Actor, reason: str) -> None:
        """Let go of an actor, and hire another.

        Raises:
            WorkerError: its task has lost too many, or there is none left and too many could not start.
        """
        import ray

        self._look_for_head()
        ray.kill(actor.handle)
        if actor.order is not None:
            actor.order.lost += 1
            task = actor.order.task
            what = f"the visit of client {task.client!r}"
            if actor.order.lost >= ATTEMPTS:
                raise WorkerError(
                    f"{what} {reason}; {ATTEMPTS} actors were lost to it. Whole rounds are kept: resume with "
                    "fewer [engine] workers if memory ran out, with a larger visit_timeout if it is too short"
                )
            _log.warning("%s %s; another actor does it", what, reason)
        if not actor.built:
            self._failures += 1
            if self._failures >= ATTEMPTS * self._wanted:
                if self._idle or self._busy:
                    return
                raise WorkerError(f"no actor of the Ray cluster could be started: its start {reason}")
        self._hire()

    def _look_for_head(self) -> None:
        """See that the cluster's head answers; where it does not, wait for it.

        Raises:
            WorkerError: it does not come back.
        """
        end = time.monotonic() + HEADLESS
        while not cluster.answers(self._head):
            if time.monotonic() > end:
                head, self._head = self._head, ""
                raise WorkerError(
                    f"the head of the Ray cluster, {head}, has not answered for {HEADLESS:g} seconds. Whole "
                    "rounds are kept: start the cluster again, and continue with --resume; or without it, "
                    "with --resume --set engine.name=local"
                )
            time.sleep(LOOK / 4)
        self._looked = time.monotonic()

    def _look_for_room(self) -> None:
        """Tell why no actor is ready, if the reason is a want of room.

        Raises:
            WorkerError: the cluster has lost the machines that had room for one.
        """
        if not any(cluster.room(self._settings).values()):
            raise WorkerError(
                "no machine is left in the Ray cluster that has room for an actor; whole rounds are kept: "
                "resume the run when machines have joined again"
            )
        if not self._told and time.monotonic() - self._since > PATIENCE:
            self._told = True
            _log.warning("waiting for an actor of the Ray cluster; free are %s", cluster.free())

    def _leave(self) -> None:
        """End the actors, remove their files, and leave the cluster if it was joined here."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actors, self._idle, self._busy = [*self._idle, *self._busy], [], []
        if not self._head:  # each call would wait for the head, until Ray ends the process
            return
        for actor in actors:
            ray.kill(actor.handle)
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


def _first_lines(error: Exception, most: int = 3) -> str:
    """The beginning of what Ray says: the rest repeats it, and names files of Ray's own."""
    return " ".join(str(error).split("\n")[:most])
