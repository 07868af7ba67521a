"""FedPDPO: shared LoRA, personal bottleneck and heads, explicit reward in the loss (arXiv:2603.19741).

Algorithm 1, in round t, Θ_i = (W0 ∥ LoRA) ∘ M_i ∘ (h1_i ∥ h2_i)::

    server   broadcasts the LoRA φ                                                     line 7
    client   φ_i ← φ; loads its own M_i, h1_i, h2_i                                 lines 9-10
             (1) LoRA frozen: trains M_i, h1_i, h2_i on the PDPO loss                  lines 12-15
             (2) M_i, h1_i, h2_i frozen: trains φ_i on the PDPO loss                   lines 16-17
    server   φ ← Σ_i p_i φ_i, by default A and B separately                            lines 20-22

The PDPO loss is −log σ(β (Δ_ir + w_r s Δ_er)), eqs. 4 to 8, with w_r(t) = 0.5 + (t − 1) / (T − 1). Clients
keep s between steps and visits.
"""

from __future__ import annotations

from functools import partial

from pydantic import Field, model_validator

from prefed.core import ClientTrainer, Download, Layout, Method, Objective, State, Upload
from prefed.merge import Aggregator
from prefed.methods.base import FedAvgBase, TwoPhaseSettings, lora_parts

SOURCE = "FedPDPO (arXiv:2603.19741), algorithm 1"
PERSONAL = ("bottleneck", "head", "reward")
"""The personal parts."""


class Settings(TwoPhaseSettings):
    """Settings of FedPDPO.

    The paper's cross-domain experiments use local_epochs 3. Ablations A1 and A2 of its table 3 are
    bottleneck = false and reward_head = false.
    """

    lr: float = Field(5e-5, gt=0, description="learning rate of the shared LoRA")
    beta: float = Field(0.1, gt=0, description="strength of the pull towards the reference")
    bottleneck: bool = Field(True, description="personal bottleneck adapter instead of the final norm")
    personal_head: bool = Field(True, description="personal language model head, untied from the embeddings")
    reward_head: bool = Field(True, description="personal reward head and PDPO loss; if off, the DPO loss")
    reward_schedule: bool = Field(
        True,
        description="increase the weight of the explicit reward from 0.5 to 1.5 over the rounds; if off, "
        "reward_weight",
    )
    reward_weight: float = Field(
        0.8, ge=0, description="weight w_r of the explicit reward if reward_schedule is off"
    )
    scale_least: float = Field(0.1, ge=0, description="lower bound on the ratio tracked by s; 0: none")
    scale_most: float = Field(
        10.0, ge=0, description="upper bound on this ratio; 0: none; both 0: eq. 7 as printed"
    )
    exclude: bool = Field(True, description="exclude pairs with margins far from the mean of their batch")
    exclude_k: float = Field(2.0, gt=0, description="number of standard deviations that count as far")
    exclude_most: float = Field(0.5, ge=0, lt=1, description="maximum excluded share of a batch")

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Settings:
        if 0 < self.scale_most < self.scale_least:
            raise ValueError(
                f"scale_most {self.scale_most:g} is below scale_least {self.scale_least:g}; raise it, or set "
                "it to 0 for no upper bound"
            )
        return self

    def weight(self, number: int, rounds: int) -> float:
        """w_r in round ``number`` of ``rounds``.

        >>> [Settings().weight(number, 5) for number in (1, 3, 5)], Settings().weight(1, 1)
        ([0.5, 1.0, 1.5], 0.5)
        """
        if not self.reward_schedule:
            return self.reward_weight
        return 0.5 + (number - 1) / max(rounds - 1, 1)

    def goal(self, weight: float | None = None) -> Objective:
        """The loss that clients minimise, with w_r = ``weight`` (default: ``reward_weight``)."""
        if not self.reward_head:
            return Objective("dpo", {"beta": self.beta})
        weight = self.reward_weight if weight is None else weight
        rest = {"exclude": float(self.exclude), "k": self.exclude_k, "most": self.exclude_most}
        bounds = {"scale_least": self.scale_least, "scale_most": self.scale_most}
        return Objective("pdpo", {"beta": self.beta, "weight": weight, **rest, **bounds})


def needs(settings: Settings) -> frozenset[str]:
    """The LoRA and the enabled personal parts."""
    s = settings
    return lora_parts(s, bottleneck=s.bottleneck, head=s.personal_head, reward=s.reward_head)


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedPDPO over ``layout``."""
    fedavg = FedAvgBase.of(settings, aggregator, rounds, personal=lambda entry: entry.part in PERSONAL)

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        objective = settings.goal(settings.weight(trainer.round.number, rounds))
        memory = {"scale": private.number("scale", 1.0)} if settings.reward_head else {}
        model, trainable = fedavg.start(trainer, private, download), fedavg.trainable(trainer.round)
        personal = [name for name in trainable if layout[name].part in PERSONAL]
        shared = [name for name in trainable if layout[name].part not in PERSONAL]
        if personal:
            changes = {"objective": objective, "memory": memory, **settings.personal_phase()}
            first = fedavg.phase(trainer, download, "personal", train=personal, **changes)
            fitted = trainer.train(model, first)
            model, memory = fitted.tensors, dict(fitted.memory)
        second = fedavg.phase(trainer, download, train=shared, objective=objective, memory=memory)
        result = trainer.train(model, second)
        state = fedavg.keep(private, result.tensors).update(values=dict(result.memory))
        return fedavg.upload(trainer, result.tensors, result.loss), state

    rates = fedavg.rates(**dict.fromkeys(PERSONAL, settings.personal_lr))
    last = settings.goal(settings.weight(rounds, rounds))
    return fedavg.method(
        "fedpdpo",
        SOURCE,
        fedavg.exchange(work=work),
        adapt=partial(fedavg.adapt, objective=last, rates=rates),
        reward_weight=lambda private, number: settings.weight(number, rounds) * private.number("scale", 1.0),
    )
