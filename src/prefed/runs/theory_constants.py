"""Estimate the constants of the theory of distributed DPO from a finished run with diagnostics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from prefed.core import POOLED, Key, Owner, Tensors
from prefed.runs.finished_run import RunError, RunRecord, read_run
from prefed.runs.loaded_run import LoadedRun, load_run

CLIENTS, PAIRS, STEPS = 5, 8, 10
"""For L: most clients to probe, pairs per client, and steps of power iteration."""
_PROBE = 1e-2
"""Euclidean length of the finite-difference steps."""


@dataclass(frozen=True)
class Estimate:
    """Estimated constants of the theory.

    Attributes:
        constants: fields of :class:`prefed.theory.Constants`, from the settings and the log of the run.
        measured: the left-hand side of the bounds, (1/R) Σ‖∇ℒ(θ^r)‖² over the diagnosed rounds; its value in
            the last of them; and the gap of the paper.
        notes: for the reader, one sentence each.
    """

    constants: dict[str, float]
    measured: dict[str, float]
    notes: tuple[str, ...]


def estimate(path: str | Path) -> Estimate:
    """Estimate the constants of a run from its log, and L from its models.

    κ² and ζ_g² are the maxima over the diagnosed rounds, since the assumptions bound them for all θ; negative
    estimates from few pairs are replaced by 0. A run does not determine ℒ*, so the initial gap stays log 2,
    from the first loss of DPO to 0.

    Raises:
        RunError: the run is not finished, was not diagnosed, shares no tensor, or did not train on DPO; or
            its model or its pairs are missing.
    """
    record = read_run(path)
    diagnosed = [each for each in record.rounds if "gradient_norm" in each]
    if not diagnosed:
        raise RunError(
            f"{path} has no diagnostics of a shared model: run a method that shares one, with [evaluate] "
            "diagnose = 5"
        )
    run = load_run(path, data=True)
    job, settings = run.job, run.experiment.method.settings
    goal = settings.goal()
    if goal.name != "dpo":
        raise RunError(f"{path} trained on {goal.name!r}, but the theory is about 'dpo': choose another run")
    late = [visit["late"] for each in record.rounds for visit in each.get("visits", ())]
    steps = settings.local_steps or round(fmean(_steps(run, count) for count in job.weights.values()))
    constants: dict[str, float] = {
        "beta": float(goal.settings["beta"]),
        "horizon": _longest(run),
        "smoothness": smoothness(run),
        "zeta_g2": max(0.0, *(each["zeta2"] for each in diagnosed)),
        "kappa2": max(0.0, *(each["kappa2"] for each in diagnosed)),
        "clients": len(job.members),
        "cohort": job.cohort_size,
        "local_steps": steps,
        "rounds": record.summary["rounds"],
        "lr": settings.lr,
        "max_delay": max(late, default=0),
        **({"rho": record.rounds[-1]["rho"]} if job.graph is not None else {}),
    }
    squares = squared_gradients(record)
    measured = {
        "mean_squared_gradient": fmean(squares),
        "last_squared_gradient": squares[-1],
        "paper_gap": record.summary["paper_gap"],
    }
    return Estimate(constants, measured, tuple(_notes(run, len(diagnosed))))


def squared_gradients(run: RunRecord) -> list[float]:
    """Return ‖∇ℒ‖² in each diagnosed round, minus the variance from sampling pairs; may be negative.

    If a batch has variance ζ², a mean over N clients with m pairs each has variance ζ² · batch/(m N).
    """
    method, drawn = run.config["method"], run.config.get("evaluate", {}).get("diagnostic_pairs")
    measured = [record for record in run.rounds if "gradient_norm" in record]
    if drawn is None:
        return [record["gradient_norm"] ** 2 for record in measured]
    unseen = run.config["evaluate"].get("unseen", 0)
    clients = sum(sizes["train"] > 0 for sizes in run.summary["clients"].values())
    clients -= unseen if isinstance(unseen, int) else len(unseen)
    if run.rounds[-1]["cohort"] == [POOLED]:
        clients = 1
    share = method["batch_size"] * method.get("accumulate", 1) / (drawn * clients)
    return [record["gradient_norm"] ** 2 - share * record["zeta2"] for record in measured]


def _steps(run: LoadedRun, pairs: float) -> int:
    settings = run.experiment.method.settings
    return settings.passes(settings.local_epochs or 1) * math.ceil(pairs / settings.step_pairs())


def _longest(run: LoadedRun) -> int:
    dataset = run.trainers.dataset
    return max(int(dataset.tokens.lengths[client.train, 1:].max()) for client in dataset.clients.values())


def _notes(run: LoadedRun, diagnosed: int) -> Iterator[str]:
    settings, evaluate = run.experiment.method.settings, run.experiment.evaluate
    drawn = f"{evaluate.diagnostic_pairs} pairs of each client" if evaluate.diagnostic_pairs else "all pairs"
    yield (
        f"κ² and ζ_g² are maxima over {diagnosed} diagnosed rounds, on {drawn}; L is a maximum over the "
        f"losses of {min(CLIENTS, len(run.job.members))} clients at the first and the last model, and may be "
        "larger elsewhere"
    )
    if evaluate.diagnostic_pairs:
        yield "the variance from sampling pairs is subtracted from ‖∇ℒ‖², which may then be negative"
    if settings.optimizer != "sgd" or settings.momentum or settings.schedule != "constant":
        how = f"{settings.optimizer}, schedule {settings.schedule!r}"
        yield f"the run used {how}; the theorems assume plain gradient descent with constant η"
    if settings.clip:
        yield f"gradients were clipped at {settings.clip:g}; the theorems assume unclipped gradients"


def smoothness(run: LoadedRun) -> float:
    """Estimate L as the largest ‖∇²F_i‖ over some clients, at the first and the last model of the run.

    Power iteration with finite differences of gradients in the shared tensors; a lower bound.
    """
    job, key = run.job, Key(run.experiment.seed).at("theory")
    drawn = key.numpy().permutation(len(job.members))[:CLIENTS]
    found = 0.0
    for client in (job.members[index] for index in sorted(drawn)):
        for last in (False, True):
            found = max(found, hessian_norm(run, client, key.at("client", client), last=last))
    return found


def hessian_norm(run: LoadedRun, client: str, key: Key, *, last: bool) -> float:
    """Estimate the Hessian norm of a client's loss on :data:`PAIRS` pairs, at its first or last model."""
    job, method = run.job, run.method
    start = run.backbone.initial
    published = run.published(client) if last else method.publish(method.init_server(start), client)
    private = run.reader.client(client) if last else None
    if private is None:
        private = method.init_client(start, client)
    trainer = job.trainer(client, run.reader.commit.round, "theory")
    parts = (*published.tensors.values(), private.tensors.get("personal"))
    model = trainer.assemble(*(part for part in parts if part is not None))
    names, goal = method.ownership.names(Owner.SHARED), run.experiment.method.settings.goal()
    shared = model.select(names)

    def slope(away: torch.Tensor) -> torch.Tensor:
        moved = model.replace(Tensors(shared.layout, (shared.flat.double() + away).to(shared.flat.dtype)))
        # The fixed name gives the same pairs and dropout in each call.
        gradient, _ = trainer.gradient(moved, goal, batch_size=PAIRS, name="curvature")
        return gradient.select(names).flat.double()

    along = torch.from_numpy(key.numpy().standard_normal(shared.flat.numel()))
    norm = 0.0
    for _ in range(STEPS):
        along = along / torch.linalg.vector_norm(along) * _PROBE
        along = (slope(along) - slope(-along)) / 2
        norm = float(torch.linalg.vector_norm(along)) / _PROBE
        if not norm:
            break
    return norm
