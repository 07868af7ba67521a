"""How far from a stationary point a diagnosed run ended, by two measures."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from prefed.core import POOLED
from prefed.runs.record import RunRecord

LAST = 5
"""A final figure is the mean of the last so many rounds in which it was measured."""


def paper_gap(run: RunRecord) -> float:
    """The paper's gap: local batches' squared gradients, clipped at 1, at the end of a run."""
    return fmean(measured(run, "paper_gap")[-LAST:])


def squared_gradient(run: RunRecord) -> float:
    """Ours: the squared gradient of the global objective, before any clip, at the end of a run."""
    return fmean(squared_gradients(run)[-LAST:])


GAPS: dict[str, Callable[[RunRecord], float]] = {
    "the paper's gap": paper_gap,
    "squared gradient norm": squared_gradient,
}
"""Both measures of how far from a stationary point a run ended, by which claims are judged."""


def squared_gradients(run: RunRecord) -> list[float]:
    """‖∇ℒ‖² in each diagnosed round, less what the draw of few pairs adds to it; so it may be below 0.

    A mean over N clients of m pairs each has the variance ζ² · batch/(m N), where a batch has ζ².
    """
    method, drawn = run.config["method"], run.config.get("evaluate", {}).get("diagnostic_pairs")
    told = [record for record in run.rounds if "gradient_norm" in record]
    if drawn is None:
        return [record["gradient_norm"] ** 2 for record in told]
    unseen = run.config["evaluate"].get("unseen", 0)
    clients = sum(sizes["train"] > 0 for sizes in run.summary["clients"].values())
    clients -= unseen if isinstance(unseen, int) else len(unseen)
    if run.rounds[-1]["cohort"] == [POOLED]:
        clients = 1
    share = method["batch_size"] * method.get("accumulate", 1) / (drawn * clients)
    return [record["gradient_norm"] ** 2 - share * record["zeta2"] for record in told]


def measured(run: RunRecord, name: str) -> list[float]:
    """A number of the round log, in the rounds that have it."""
    return [float(record[name]) for record in run.rounds if isinstance(record.get(name), int | float)]
