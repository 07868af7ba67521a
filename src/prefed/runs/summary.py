"""The content of ``summary.json``, and the models that a finished run publishes."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from prefed.core import Owner, State, Tensors
from prefed.core.plugins import Code, version_of
from prefed.core.wire import decode_state
from prefed.data import FederatedDataset
from prefed.data.statistics import dataset_statistics
from prefed.engines import ClientStates, Job
from prefed.engines.backends import peak_memory_mb
from prefed.engines.cohorts import ASIDE, OFFENCES
from prefed.merge import lora
from prefed.methods import METHODS
from prefed.runs.data_notices import left_out_table
from prefed.store import RunWriter
from prefed.train import metrics
from prefed.train.metrics import ACCURACY_METRICS, MEAN_METRICS

if TYPE_CHECKING:
    from prefed.core.records import RoundRecord, Summary

Profiles: TypeAlias = dict[str, dict[str, dict[str, float]]]
"""Metric → client → block → value."""


def summarize(job: Job, writer: RunWriter, rounds: Sequence[RoundRecord], profiles: Profiles) -> Summary:
    """Return the content of ``summary.json`` after the last round.

    Args:
        rounds: the records of all rounds.
        profiles: from :func:`read_profiles`; the summary has their public part.
    """
    assert writer.commit is not None
    public = _public(job, profiles)
    last: Mapping[str, Any] = rounds[-1]
    totals = writer.commit.totals
    summary = {
        "method": job.method.name,
        "rounds": writer.round,
        **({"selectors": list(job.jury)} if job.jury else {}),
        "seed": job.seed,
        **_evaluated(job, last["evaluation"]),
        "loss": last["loss"],
        **({"time": last["time"]} if "time" in last else {}),
        **_stationarity(rounds),
        **_privacy(job, writer),
        **_best(job, writer, rounds),
        **({"personal": public} if public else {}),
        "parameters": {"trainable": trainable(job), "communicated": int(totals["communicated"])},
        "bytes": {"up": int(totals["bytes_up"]), "down": int(totals["bytes_down"])},
        "seconds": totals["seconds"],
        "peak_memory_mb": max(totals["peak_memory_mb"], peak_memory_mb()),
        "dropped": int(totals["dropped"]),
        **({ASIDE: {c: last[OFFENCES][c] for c in last[ASIDE]}} if ASIDE in last else {}),
        "clients": {
            client: {"train": sizes.train, "validation": sizes.validation, "test": sizes.test}
            for client, sizes in job.trainers.clients.items()
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version_of(name) for name in ("prefed", "torch", "transformers", "peft")},
        },
    }
    return cast("Summary", summary)  # evaluations and engines may add keys


def _evaluated(job: Job, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an evaluation that a summary contains, in its order."""
    counts = ("split", "left_out", "not_evaluated", "not_finite")
    own = (metric.name for metric in job.metrics)
    accuracies = (*ACCURACY_METRICS, *(metrics.selector_metrics(len(job.jury)) if job.jury else ()), *own)
    names = (*accuracies, "unseen_accuracy", "unseen_selectors", *MEAN_METRICS, "text", *counts)
    return {name: evaluation[name] for name in names if name in evaluation}


def _best(job: Job, writer: RunWriter, rounds: Sequence[RoundRecord]) -> dict[str, Any]:
    """Return the best round on validation pairs, with the metrics of its evaluation."""
    best = writer.commit.best if writer.commit else None
    if job.stop is None or best is None:
        return {}
    stop: dict[str, Any] = {
        "metric": job.stop.measured(rounds[-1].get("evaluation", {})),
        "over": job.stop.over,
        "split": "validation",
        "stopped": writer.stopped,
        "last": {"round": best["last_round"], "value": best["last"]},
    }
    if best["round"]:
        figures = {"round": best["round"], "value": best["value"]}
        stop["best"] = {**figures, **_evaluated(job, rounds[best["round"] - 1]["evaluation"])}
    return {"stop": stop}


def trainable(job: Job) -> int:
    """Count the trainable parameters."""
    layout, ownership = job.trainers.initial.layout, job.method.ownership
    moving = (layout[name] for name in ownership.names(Owner.SHARED, Owner.PERSONAL))
    # The residual of FedEx-LoRA and the posterior of a taste are sent, but not trained.
    return sum(entry.size for entry in moving if entry.part not in (lora.RESIDUAL, "posterior"))


def _privacy(job: Job, writer: RunWriter) -> dict[str, Any]:
    if job.privacy.kind is None:
        return {}
    from prefed.engines.privacy import privacy_record

    return {"privacy": privacy_record(job, writer.round, writer.starts.times())}


def _stationarity(rounds: Sequence[RoundRecord]) -> dict[str, float]:
    """Return the last ``gradient_norm`` of a diagnosed run, if any, and its final stationarity gap.

    The gap is the mean of the last five ``paper_gap``, as in Distributed DPO.
    """
    diagnosed = [record for record in rounds if "paper_gap" in record][-5:]
    if not diagnosed:
        return {}
    gap = sum(record["paper_gap"] for record in diagnosed) / len(diagnosed)
    norm = {"gradient_norm": diagnosed[-1]["gradient_norm"]} if "gradient_norm" in diagnosed[-1] else {}
    return {**norm, "paper_gap": gap}


def read_profiles(job: Job, states: ClientStates | None) -> Profiles:
    """Compute profiles from the private states of clients; see ``profile`` of :class:`~prefed.core.Method`.

    Args:
        states: read one at a time; ``None`` if they are not on this machine, which gives no profiles.
    """
    profiles: Profiles = {}
    profile = job.method.profile
    if profile is None or states is None:
        return profiles
    for client in job.members:
        state = states.read(client)
        if state is None:
            continue
        for name, blocks in profile(decode_state(state)).items():
            if blocks:
                values = {str(block): value for block, value in blocks.items()}
                profiles.setdefault(name, {})[client] = values
    return profiles


def _public(job: Job, profiles: Profiles) -> Profiles:
    """Round ``profiles`` to two digits, and remove clients with too few pairs.

    At full precision, a value such as the gate of FedSDG reveals the private tensor.
    """
    sizes, may_report = job.trainers.clients, job.privacy.may_report
    return {
        name: {
            client: {block: round(value, 2) for block, value in blocks.items()}
            for client, blocks in clients.items()
            if may_report(sizes[client].train)
        }
        for name, clients in profiles.items()
    }


def published_models(job: Job, server: State) -> list[tuple[Mapping[str, Tensors], int]]:
    """Return the published models: pairs of name → model (full layout), and number of receiving clients.

    The name is ``"shared"``, or that of a selector. The list is empty if the method shares no model; two
    entries may be equal.
    """
    models: dict[tuple[int, ...], tuple[Mapping[str, Tensors], int]] = {}
    for client in job.trainers.clients:
        published = job.method.publish(server, client)
        if not published.tensors:
            return []
        # Usually all clients get the same tensors: count them instead of copying.
        place = tuple(group.flat.data_ptr() for group in published.tensors.values())
        own, count = models[place] if place in models else (job.shared_models(published), 0)
        models[place] = (own, count + 1)
    return list(models.values())


def mean_models(job: Job, server: State) -> dict[str, Tensors]:
    """Return name → published model (full layout), averaged over clients if these get different models.

    It is empty if the method shares no model.
    """
    models = published_models(job, server)
    if len(models) < 2:
        return dict(models[0][0]) if models else {}
    return {name: _mean([(own[name], count) for own, count in models]) for name in models[0][0]}


def _mean(models: Sequence[tuple[Tensors, int]]) -> Tensors:
    first = models[0][0]
    total = torch.zeros_like(first.flat, dtype=torch.float64)
    for model, count in models:
        total += model.flat.double() * count
    return Tensors(first.layout, (total / sum(count for _, count in models)).to(first.flat.dtype))


_DATA = (
    "category_distance",
    "random_category_distance",
    "token_distance",
    "random_token_distance",
    "shared_prompts",
    "contradictions",
)
"""Statistics over all clients; none is about a single client."""


def describe_data(dataset: FederatedDataset) -> dict[str, Any]:
    """Return counts of used and left-out rows, and statistics on the heterogeneity of clients.

    The statistics are those of :class:`~prefed.data.statistics.DatasetStatistics`.
    """
    statistics = dataset_statistics(dataset)
    differ = {name: getattr(statistics, name) for name in _DATA}
    return {**left_out_table(dataset), **differ}


def describe_origin(code: Mapping[str, Code], method: str = "") -> dict[str, Any]:
    """Return the current time, the command of this process, the hardware, and ``code`` by name.

    Args:
        code: name → code from outside prefed.
        method: name of the method. If it is in ``code``, its title and source are recorded, too.
    """
    used = {name: own.record() for name, own in code.items()}
    kind = METHODS[method] if method in code else None
    return {
        **({"code": used} if used else {}),
        **({"method": {"title": kind.title, "source": kind.source}} if kind else {}),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(sys.argv),
        "hardware": {
            "processor": _processor(),
            "cores": cores(),
            "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
            "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
            "system": f"{platform.system()} {platform.machine()}",
        },
    }


def cores() -> int:
    """Return the number of cores that this process may use; outside Linux, of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def command(words: Sequence[str]) -> str:
    """Format the command of a process for a shell.

    For programs other than prefed, only the name: the arguments may be confidential.

    >>> command(["/venv/bin/prefed", "run", "my file.toml"]), command(["train.py", "--token", "x"])
    ("prefed run 'my file.toml'", 'train.py')
    """
    program = Path(words[0])
    ours = program.name == "prefed" or program.parts[-2:] == ("prefed", "__main__.py")
    return shlex.join(["prefed", *words[1:]]) if ours else program.name


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
