"""Engines run any method; this one runs on one machine."""

from prefed.engines.backend import Backend, InProcess
from prefed.engines.job import POOLED, Job, Sizes, TrainerFactory
from prefed.engines.processes import JobFactory, WorkerError, WorkerProcesses
from prefed.engines.server_round import ServerRounds
from prefed.engines.tasks import Task, TaskResult, run_task

__all__ = [
    "POOLED",
    "Backend",
    "InProcess",
    "Job",
    "JobFactory",
    "ServerRounds",
    "Sizes",
    "Task",
    "TaskResult",
    "TrainerFactory",
    "WorkerError",
    "WorkerProcesses",
    "run_task",
]
