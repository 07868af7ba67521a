"""FedRep: each client fits its head to the shared representation, then improves it (Collins et al. 2021).

Algorithm 1 of arXiv:2102.07078, with the LoRA as representation φ and an untied language model head h_i::

    server   samples a cohort S and broadcasts φ
    client   h_i by local training on L_i(φ, h), φ held; then φ_i by local training on L_i(φ, h_i), h_i held
    server   φ ← Σ_{i∈S} p_i φ_i;  h_i stays with the client
"""

from __future__ import annotations

from functools import partial

from pydantic import Field

from prefed.core import Download, Exchange, Layout, Method, State, Upload, Visit
from prefed.merge import Merger, lora
from prefed.methods import ppo
from prefed.methods.common import Plan
from prefed.methods.settings import TwoPhaseSettings

__all__ = ["SOURCE", "Settings", "build", "needs"]

SOURCE = "FedRep (arXiv:2102.07078), algorithm 1"


class Settings(TwoPhaseSettings, ppo.BaselineSettings):
    """Settings of FedRep, as FedPDPO's experiments have them (arXiv:2603.19741, D.3.1)."""

    lr: float = Field(5e-5, gt=0, description="learning rate of the shared LoRA")


def needs(settings: Settings) -> frozenset[str]:
    """The LoRA and the head."""
    return ppo.needs(settings, lora.LORA, "head")


def build(settings: Settings, layout: Layout, merger: Merger, rounds: int) -> Method:
    """FedRep over ``layout``."""
    plan = Plan.of(settings, merger, rounds, personal=lambda entry: entry.part == "head")

    def work(visit: Visit, private: State, download: Download) -> tuple[Upload, State]:
        moving = plan.movable(visit.round)
        # PPO's critic follows whatever moves.
        head = [name for name in moving if layout[name].part in ("head", ppo.VALUE)]
        rest = [name for name in moving if layout[name].part != "head"]
        steps, epochs = settings.personal_length()
        first = plan.phase(
            visit, download, "personal", train=head, lr=settings.personal_lr, steps=steps, epochs=epochs
        )
        fitted = visit.train(plan.start(visit, private, download), first)
        trained = visit.train(fitted.tensors, plan.phase(visit, download, train=rest))
        return plan.upload(visit, trained), plan.keep(private, trained.tensors)

    rates = {entry.name: settings.personal_lr for entry in layout.entries if entry.part == "head"}
    train = Exchange("train", plan.send, work, plan.merge, figures=plan.figures)
    return plan.method("fedrep", SOURCE, train, adapt=partial(plan.adapt, rates=rates))
