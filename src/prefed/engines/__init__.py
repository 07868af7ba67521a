"""Engines run any method: rounds of tasks, and backends that get the tasks done."""

from typing import TYPE_CHECKING

from prefed.core.lazy import attach

if TYPE_CHECKING:
    from prefed.engines.backends import (
        BACKENDS,
        Backend,
        BackendSettings,
        InProcess,
        JobFactory,
        WorkerError,
        check_devices,
        check_engine,
    )
    from prefed.engines.backends.processes import WorkerProcesses
    from prefed.engines.backends.ray import RayActors
    from prefed.engines.job import Job, RoundError, TrainerFactory
    from prefed.engines.neighbours import NeighbourRounds
    from prefed.engines.server_rounds import ServerRounds
    from prefed.engines.tasks import ClientStates, Task, TaskResult, run_task

__all__ = [
    "BACKENDS",
    "Backend",
    "BackendSettings",
    "ClientStates",
    "InProcess",
    "Job",
    "JobFactory",
    "NeighbourRounds",
    "RayActors",
    "RoundError",
    "ServerRounds",
    "Task",
    "TaskResult",
    "TrainerFactory",
    "WorkerError",
    "WorkerProcesses",
    "check_devices",
    "check_engine",
    "run_task",
]

attach(__name__, __file__)
