"""Constants of the theory of distributed DPO, estimated from a finished run that was diagnosed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from prefed.core import POOLED, Key, Owner, Tensors
from prefed.runs.loaded_run import LoadedRun, load_run
from prefed.runs.record import RunError, RunRecord, read_run

CLIENTS, PAIRS, STEPS = 5, 8, 10
"""How many clients' losses are probed for L at most, on how many pairs each, and steps of power iteration."""
_PROBE = 1e-2
"""Euclidean length of the steps whose gradients are compared."""


@dataclass(frozen=True)
class Estimate:
    """The theory's constants, as far as a run has them.

    Attributes:
        constants: those of :class:`prefed.theory.Constants` that the run has or that its log estimates.
        measured: the left side of the statements, (1/R) Σ‖∇ℒ(θ^r)‖² over the diagnosed rounds; the same at
            the last of them; and the paper's own gap.
        notes: sentences on what a reader must know.
    """

    constants: dict[str, float]
    measured: dict[str, float]
    notes: tuple[str, ...]


def estimate(path: str | Path) -> Estimate:
    """Estimate the constants from the run in a directory: from its log, and L from its models.

    κ² and ζ_g² are the largest that the diagnostics found, as the paper's assumptions bound them for all θ.
    A round's κ² may be below 0 where few pairs were drawn; the least is 0. ℒ* is not known from a run: its
    gap stays log 2, from DPO's first loss to 0.

    Raises:
        RunError: the run is not finished, was not diagnosed, shares no tensor, or trained on another loss
            than DPO; or its model or its pairs are not there.
    """
    record = read_run(path)
    told = [each for each in record.rounds if "gradient_norm" in each]
    if not told:
        raise RunError(
            f"{path} was not diagnosed at a model that its clients share: run a method that shares one with "
            "[evaluate] diagnose = 5"
        )
    run = load_run(path, data=True)
    job, settings = run.job, run.experiment.method.settings
    goal = settings.goal()
    if goal.name != "dpo":
        raise RunError(f"{path} trained on {goal.name!r}, and the theory is of DPO: name another run")
    late = [visit["late"] for each in record.rounds for visit in each.get("visits", ())]
    steps = settings.local_steps or round(fmean(_steps(run, count) for count in job.weights.values()))
    constants: dict[str, float] = {
        "beta": float(goal.settings["beta"]),
        "horizon": _longest(run),
        "smoothness": smoothness(run),
        "zeta_g2": max(0.0, *(each["zeta2"] for each in told)),
        "kappa2": max(0.0, *(each["kappa2"] for each in told)),
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
    return Estimate(constants, measured, tuple(_notes(run, len(told))))


def squared_gradients(run: RunRecord) -> list[float]:
    """‖∇ℒ‖² in each diagnosed round, less what the draw of few pairs adds to it; so it may be below 0.

    A mean over N clients of m pairs each has the variance ζ² · batch/(m N), where a batch has ζ².
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
    """Optimiser steps of a visit of a client with so many pairs, where the visit is given in passes."""
    settings = run.experiment.method.settings
    return settings.passes(settings.local_epochs or 1) * math.ceil(pairs / settings.step_pairs())


def _longest(run: LoadedRun) -> int:
    """Tokens of the longest response that is trained on."""
    dataset = run.trainers.dataset
    return max(int(dataset.tokens.lengths[client.train, 1:].max()) for client in dataset.clients.values())


def _notes(run: LoadedRun, diagnosed: int) -> Iterator[str]:
    settings, evaluate = run.experiment.method.settings, run.experiment.evaluate
    drawn = f"{evaluate.diagnostic_pairs} pairs of each client" if evaluate.diagnostic_pairs else "all pairs"
    yield (
        f"κ² and ζ_g² are the largest of {diagnosed} diagnosed rounds, on {drawn}; L is the largest of the "
        f"losses of {min(CLIENTS, len(run.job.members))} clients, at the first and at the last model, and "
        "the loss may bend more elsewhere"
    )
    if evaluate.diagnostic_pairs:
        yield "what the draw of few pairs adds is taken off ‖∇ℒ‖², which may be below 0"
    if settings.optimizer != "sgd" or settings.momentum or settings.schedule != "constant":
        how = f"{settings.optimizer}, schedule {settings.schedule!r}"
        yield f"the run's optimiser: {how}; the statements are about plain gradient descent at a constant η"
    if settings.clip:
        yield f"gradients were clipped at {settings.clip:g}; the statements are about gradients as they are"


def smoothness(run: LoadedRun) -> float:
    """L: the largest ‖∇²F_i‖ of some clients' losses, at the run's first and last model.

    Power iteration, with differences of gradients in the shared tensors in place of the Hessian. It comes
    from below.
    """
    job, key = run.job, Key(run.experiment.seed).at("theory")
    drawn = key.numpy().permutation(len(job.members))[:CLIENTS]
    found = 0.0
    for client in (job.members[index] for index in sorted(drawn)):
        for last in (False, True):
            found = max(found, hessian_norm(run, client, key.at("client", client), last=last))
    return found


def hessian_norm(run: LoadedRun, client: str, key: Key, *, last: bool) -> float:
    """The norm of the Hessian of a client's loss, on :data:`PAIRS` of its pairs at most, at its first or last
    model.
    """
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
        # One name: the same pairs each time, and the same dropout.
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
