"""What ``summary.json`` says of a finished run, and the model that it shares."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from prefed.core import Owner, State, Tensors
from prefed.engines import Job
from prefed.engines.backend import peak_memory_mb
from prefed.merge import lora
from prefed.metrics import ACCURACY_METRICS, MEAN_METRICS
from prefed.store import RunWriter

__all__ = ["published_model", "summarize"]


def summarize(job: Job, store: RunWriter, profiles: Mapping[str, Any]) -> dict[str, Any]:
    assert store.last is not None
    assert store.commit is not None
    last, totals, evaluation = store.last, store.commit.totals, store.last["evaluation"]
    layout, ownership = job.trainers.initial.layout, job.method.ownership
    moving = (layout[name] for name in ownership.names(Owner.SHARED, Owner.PERSONAL))
    names = (*ACCURACY_METRICS, "unseen_accuracy", *MEAN_METRICS, "split", "left_out", "not_finite")
    return {
        "method": job.method.name,
        "rounds": store.round,
        "seed": job.seed,
        **{name: evaluation[name] for name in names if name in evaluation},
        "loss": last["loss"],
        **({"personal": profiles} if profiles else {}),
        "parameters": {
            # What FedEx-LoRA adds to the base travels, but nobody trains it.
            "trainable": sum(entry.size for entry in moving if entry.part != lora.RESIDUAL),
            "communicated": int(totals["communicated"]),
        },
        "bytes": {"up": int(totals["bytes_up"]), "down": int(totals["bytes_down"])},
        "seconds": totals["seconds"],
        "peak_memory_mb": max(totals["peak_memory_mb"], peak_memory_mb()),
        "dropped": int(totals["dropped"]),
        "clients": {
            client: {"train": sizes.train, "validation": sizes.validation, "test": sizes.test}
            for client, sizes in job.trainers.clients.items()
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("prefed", "torch", "transformers", "peft")},
        },
    }


def published_model(job: Job, server: State) -> Tensors | None:
    """The model that the server publishes; the clients' mean where it publishes one to each."""
    sums: dict[tuple[int, ...], tuple[Tensors, int]] = {}
    for client in job.trainers.clients:
        published = job.method.publish(server, client)
        if not published.tensors:
            return None
        # Usually everybody is given the one model in the server's state: count it, do not copy it.
        same = tuple(group.flat.data_ptr() for group in published.tensors.values())
        if same not in sums:
            sums[same] = (job.shared(published), 0)
        sums[same] = (sums[same][0], sums[same][1] + 1)
    models = list(sums.values())
    if len(models) == 1:
        return models[0][0]
    total = torch.zeros_like(job.trainers.initial.flat, dtype=torch.float64)
    for model, count in models:
        total += model.flat.double() * count
    mean = total / len(job.trainers.clients)
    return Tensors(job.trainers.initial.layout, mean.to(job.trainers.initial.flat.dtype))
