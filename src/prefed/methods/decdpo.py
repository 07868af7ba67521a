"""DecDPO: clients without a server mix their models with those of their neighbours (arXiv:2605.20696).

Algorithm 2 of Distributed DPO, with the mixing matrix W of the round::

    client   θ_i^{½} ← θ_i; E local steps on its own pairs with the loss −log σ(β Δ_ir)
             sends θ_i^{½} to its neighbours
             θ_i ← Σ_j W_ij θ_j^{½}

With ``order = "mix_train"`` in ``[graph]``, mixing comes first, as in the paper's listing, which has one step
with the gradient at the model before mixing.
"""

from __future__ import annotations

from pydantic import Field

from prefed.core import Layout, Method
from prefed.merge import Aggregator
from prefed.methods.base import FedAvgBase, LocalSettings, lora_parts, to_neighbours

SOURCE = "Distributed DPO (arXiv:2605.20696), algorithm 2"


class Settings(LocalSettings):
    """Settings of DecDPO. The paper's experiments: batch_size 4, beta 0.2, optimizer_state 'kept'."""

    local_steps: int | None = Field(
        5, ge=1, description="optimiser steps per visit; set this or local_epochs"
    )
    local_epochs: int | None = Field(
        None, ge=1, description="passes over the client's pairs per visit; set this or local_steps"
    )


needs = lora_parts


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """DecDPO over ``layout``.

    Raises:
        ValueError: ``[merge]`` cannot be combined with a graph.
    """
    fedavg = FedAvgBase.of(settings, aggregator, rounds)
    return to_neighbours(fedavg.method("decdpo", SOURCE, fedavg.exchange()), settings, aggregator.config)
