"""Ditto: beside the shared model each client trains one of its own, held near it (Li et al. 2021).

Algorithm 1 of arXiv:2012.04221, in every round::

    server   samples a cohort S and broadcasts φ
    client   φ_i ← φ; local training of φ_i on L_i
             local training of its own v_i, at first φ, on L_i(v) + λ/2 ‖v − φ‖²
    server   φ ← Σ_{i∈S} p_i φ_i;  v_i stays with the client, who predicts with it
"""

from __future__ import annotations

from functools import partial

from pydantic import Field

from prefed.core import Download, Exchange, Layout, Method, Owner, Proximal, State, Tensors, Upload, Visit
from prefed.merge import Merger
from prefed.methods.common import LocalSettings, Plan, lora_only
from prefed.methods.settings import TwoPhaseSettings

__all__ = ["SOURCE", "Settings", "build", "needs"]

SOURCE = "Ditto (arXiv:2012.04221), algorithm 1"


class Settings(TwoPhaseSettings, LocalSettings):
    """Settings of Ditto; its personal phase is the training of a client's own model."""

    lam: float = Field(0.1, ge=0, description="strength of the own model's pull towards the shared one")


needs = lora_only


def build(settings: Settings, layout: Layout, merger: Merger, rounds: int) -> Method:
    """Ditto over ``layout``."""
    plan = Plan.of(settings, merger, rounds)
    moving = (*plan.learnt, *plan.parts.names(Owner.PERSONAL))
    own = (*plan.common, *plan.parts.names(Owner.PERSONAL))

    def mine(private: State, common: Tensors) -> Tensors:
        """v_i put into the model ``common``; that itself before the client's first visit."""
        return common.replace(private.tensors["own"]) if "own" in private.tensors else common

    def work(visit: Visit, private: State, download: Download) -> tuple[Upload, State]:
        received = plan.start(visit, private, download)
        trained = visit.train(received, plan.phase(visit, download))
        steps, epochs = settings.personal_length()
        second = plan.phase(
            visit,
            download,
            "personal",
            train=moving,
            lr=settings.personal_lr,
            steps=steps,
            epochs=epochs,
            proximal=Proximal(settings.lam, to=received.select(plan.learnt)) if settings.lam else None,
        )
        after = visit.train(mine(private, received), second)
        kept = plan.keep(private, trained.tensors).update({"own": after.tensors.select(own)})
        return plan.upload(visit, trained), kept

    def predict(visit: Visit, private: State, published: Download) -> Tensors:
        return mine(private, plan.start(visit, private, published))

    adapt = partial(plan.adapt, lr=settings.personal_lr, pull=settings.lam)
    train = Exchange("train", plan.send, work, plan.merge, figures=plan.figures)
    return plan.method("ditto", SOURCE, train, predict=predict, adapt=adapt, personal=True)
