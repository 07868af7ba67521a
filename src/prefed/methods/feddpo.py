"""FedDPO: federated averaging with DPO as the clients' loss (Distributed DPO, arXiv:2605.20696).

Algorithm 1, in round r::

    server   samples a cohort S and broadcasts θ^r                                line 11
    client   θ_i ← θ^r; E local steps on its own pairs with the loss −log σ(β Δ_ir)   lines 13-18
    server   θ^{r+1} ← Σ_{i∈S} λ_i θ_i,  λ_i = n_i / Σ_{m∈S} n_m                   line 20
"""

from __future__ import annotations

from pydantic import Field

from prefed.core import Layout, Method
from prefed.merge import Aggregator
from prefed.methods.base import BaselineSettings, FedAvgBase, lora_parts

SOURCE = "Distributed DPO (arXiv:2605.20696), algorithm 1"


class Settings(BaselineSettings):
    """Settings of FedDPO. Table 1 of the paper: local_steps 3, batch_size 4, beta 0.2, lr 1e-4, clip 1."""

    beta: float = Field(
        0.1,
        gt=0,
        description="strength of the pull towards the reference (the paper's experiments: 0.2); default: "
        "that of the objective",
    )


needs = lora_parts


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedDPO over ``layout``."""
    fedavg = FedAvgBase.of(settings, aggregator, rounds)
    return fedavg.method("feddpo", SOURCE, fedavg.exchange())
