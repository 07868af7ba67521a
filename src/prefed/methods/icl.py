"""In-context learning: a client's own pairs as examples in the prompt, without training, as a baseline.

Few-shot prompts of Brown et al. 2020 (arXiv:2005.14165), section 2. With examples e_1, …, e_n, training pairs
of the client, a pair (x, y_w, y_l) is judged by::

    log π_ref(y_w | e_1 … e_n x) > log π_ref(y_l | e_1 … e_n x),  e_j = prompt and chosen response of pair j

Nothing is communicated, and nothing is trained: the model of a client is the number of its examples.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from prefed.core import (
    ClientTrainer,
    Download,
    Exchange,
    Layout,
    Merged,
    Method,
    Objective,
    Owner,
    Ownership,
    Round,
    State,
    Tensors,
    Upload,
)
from prefed.core.lazy import torch
from prefed.merge import Aggregator
from prefed.methods.base import TrainingSettings
from prefed.train.losses import objective

SOURCE = "in-context learning (arXiv:2005.14165), section 2, with each client's own pairs"
NO_NOISE = "its clients send nothing to protect"
PART = "examples"


class Settings(TrainingSettings):
    """Settings of in-context learning. Those of training have no effect."""

    examples: int = Field(8, ge=0, description="examples in a prompt, at most; fewer if they do not fit")

    def goal(self) -> Objective:
        """DPO, for the diagnostics; nothing is trained."""
        return Objective("dpo", objective("dpo").resolve())


def needs(settings: Settings) -> frozenset[str]:
    """The number of examples."""
    return frozenset({PART})


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """In-context learning over ``layout``, regardless of the merge rule."""
    names = [entry.name for entry in layout.entries if entry.part == PART]

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        return trainer.upload({}), private

    def merge(server: State, uploads: Sequence[Upload], now: Round) -> Merged:
        return server, {}

    def shown(trainer: ClientTrainer, count: int) -> Tensors:
        start = trainer.assemble()
        return start.replace({name: torch.full_like(start[name], count) for name in names})

    nothing = Exchange(
        "train",
        send=lambda server, client, now: Download(),
        work=work,
        merge=merge,
        scalars=frozenset(),
        groups=lambda client, now: {},
    )
    return Method(
        name="icl",
        source=SOURCE,
        ownership=Ownership.of(layout, lambda entry: Owner.FROZEN),
        init_server=lambda initial: State(),
        init_client=lambda initial, client: State(),
        exchanges=(nothing,),
        publish=lambda server, client: Download(),
        predict=lambda trainer, private, published: shown(trainer, settings.examples),
        infer=lambda trainer, published, pairs: shown(trainer, pairs),
        personal=True,
    )
