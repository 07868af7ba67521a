"""FedProx: FedDPO whose clients are held near the model they received (Li et al. 2020, arXiv:1812.06127).

Algorithm 2, in every round::

    server   samples a cohort S and broadcasts φ
    client   φ_i ← φ; local training on L_i(φ_i) + μ/2 ‖φ_i − φ‖²
    server   φ ← Σ_{i∈S} p_i φ_i
"""

from __future__ import annotations

from functools import partial

from pydantic import Field

from prefed.core import Download, Exchange, Layout, Method, Proximal, State, Upload, Visit
from prefed.merge import Merger
from prefed.methods.common import LocalSettings, Plan, lora_only

__all__ = ["SOURCE", "Settings", "build", "needs"]

SOURCE = "FedProx (arXiv:1812.06127), algorithm 2"


class Settings(LocalSettings):
    """Settings of FedProx."""

    mu: float = Field(
        0.01, ge=0, description="strength of the pull towards the received model; 0 gives FedDPO"
    )


needs = lora_only


def build(settings: Settings, layout: Layout, merger: Merger, rounds: int) -> Method:
    """FedProx over ``layout``."""
    plan = Plan.of(settings, merger, rounds)

    def work(visit: Visit, private: State, download: Download) -> tuple[Upload, State]:
        start = plan.start(visit, private, download)
        received = plan.share(start, visit.round)
        pull = Proximal(settings.mu, to=received) if settings.mu else None
        trained = visit.train(start, plan.phase(visit, download, proximal=pull))
        return plan.upload(visit, trained), plan.keep(private, trained.tensors)

    train = Exchange("train", plan.send, work, plan.merge, figures=plan.figures)
    return plan.method("fedprox", SOURCE, train, adapt=partial(plan.adapt, pull=settings.mu))
