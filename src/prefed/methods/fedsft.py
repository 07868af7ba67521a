"""FedAvg with supervised fine-tuning on the chosen responses (McMahan et al. 2017, arXiv:1602.05629).

Algorithm 1 of FedAvg, with the next-token loss of y_w; rejected responses are never read::

    server   samples a cohort S and broadcasts φ
    client   φ_i ← φ; local training on −log π(y_w | x)
    server   φ ← Σ_{i∈S} p_i φ_i
"""

from __future__ import annotations

from prefed.core import ClientTrainer, Download, Exchange, Layout, Method, Objective, State, Upload
from prefed.merge import Aggregator
from prefed.methods.base.fedavg import FedAvgBase, TrainingSettings, lora_only

__all__ = ["SOURCE", "Settings", "build", "needs"]

SOURCE = "FedAvg (arXiv:1602.05629), algorithm 1, on the chosen responses"


class Settings(TrainingSettings):
    """Settings of FedAvg with SFT."""

    def goal(self) -> Objective:
        """The next-token loss of the chosen response."""
        return Objective("sft")


needs = lora_only


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedAvg with SFT over ``layout``."""
    fedavg = FedAvgBase.of(settings, aggregator, rounds)

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        start = fedavg.start(trainer, private, download)
        trained = trainer.train(start, fedavg.phase(trainer, download))
        return fedavg.upload(trainer, trained), fedavg.keep(private, trained.tensors)

    return fedavg.method(
        "fedsft", SOURCE, Exchange("train", fedavg.send, work, fedavg.merge, figures=fedavg.figures)
    )
