"""FedAvg with supervised fine-tuning on the chosen responses (McMahan et al. 2017, arXiv:1602.05629).

Algorithm 1 of FedAvg, with the next-token loss of y_w. Clients never read the rejected responses::

    server   samples a cohort S and broadcasts φ
    client   φ_i ← φ; local training on −log π(y_w | x)
    server   φ ← Σ_{i∈S} p_i φ_i
"""

from __future__ import annotations

from prefed.core import Layout, Method, Objective
from prefed.merge import Aggregator
from prefed.methods.base import FedAvgBase, TrainingSettings, lora_parts

SOURCE = "FedAvg (arXiv:1602.05629), algorithm 1, on the chosen responses"


class Settings(TrainingSettings):
    """Settings of FedAvg with SFT."""

    def goal(self) -> Objective:
        """The next-token loss of the chosen response."""
        return Objective("sft")


needs = lora_parts


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedAvg with SFT over ``layout``."""
    fedavg = FedAvgBase.of(settings, aggregator, rounds)
    return fedavg.method("fedsft", SOURCE, fedavg.exchange())
