"""The objectives by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from prefed.losses.batch import Batch, Losses
from prefed.losses.kto import kto_pair
from prefed.losses.logistic import cdpo, dpo, odpo, robust
from prefed.losses.margin import hinge, ipo
from prefed.losses.pdpo import pdpo
from prefed.losses.reference_free import orpo, simpo
from prefed.losses.sft import sft
from prefed.losses.spec import ObjectiveSpec

__all__ = ["OBJECTIVES", "PPO", "Loss", "ObjectiveSpec", "objective", "recipe"]


@dataclass(frozen=True, kw_only=True)
class Loss(ObjectiveSpec):
    """An objective on preference pairs: a pure function of a batch's log-probabilities, and what it needs.

    Calling it checks the settings and fills in the defaults; the pure functions have none.

    Attributes:
        function: ``(batch, **settings, **memory) -> (per-pair loss [B], figures)``.
        needs_reference: it reads the reference's log-probabilities.
        needs_rejected: it reads the rejected responses at all.
        needs_margin: it reads the data's margin column.
        needs_reward: it reads the scores of an explicit reward head.
        batch_statistics: one pair's loss depends on the others of its batch, so that splitting a batch
            changes the loss.
        by_batch: those statistics are of one batch: where several make a step, each has its own.
        memory: values it carries from step to step, with their starts: each is a setting going in and a
            figure of the same name coming out.
    """

    function: Callable[..., Losses]
    needs_reference: bool = True
    needs_rejected: bool = True
    needs_margin: bool = False
    needs_reward: bool = False
    batch_statistics: bool = False
    by_batch: bool = False
    memory: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "memory", MappingProxyType(dict(self.memory)))

    def __call__(self, batch: Batch, settings: Mapping[str, float] | None = None) -> Losses:
        """Per-pair losses ``[B]`` and detached scalar figures.

        Args:
            batch: the pairs.
            settings: those that differ from the defaults, and what the last step left in memory.

        Raises:
            ValueError: a setting is unknown or outside its range, or the batch lacks what is needed.
        """
        given = {**self.memory, **(settings or {})}
        memory = {name: given.pop(name) for name in self.memory}
        return self.function(batch, **self.resolve(given), **memory)


OBJECTIVES: Mapping[str, Loss] = MappingProxyType(
    {
        loss.name: loss
        for loss in (
            Loss("dpo", "DPO, arXiv:2305.18290, eq. 7", {"beta": 0.1}, function=dpo),
            Loss("hinge", "SLiC, arXiv:2305.10425, and RSO, arXiv:2309.06657", {"beta": 0.1}, function=hinge),
            Loss("ipo", "IPO, arXiv:2310.12036, eq. 17", {"beta": 0.1}, function=ipo),
            Loss("cdpo", "cDPO, Mitchell 2023, eq. 3", {"beta": 0.1, "label_smoothing": 0.1}, function=cdpo),
            Loss(
                "robust",
                "robust DPO, arXiv:2403.00409",
                {"beta": 0.1, "label_smoothing": 0.1},
                function=robust,
            ),
            Loss(
                "odpo",
                "ODPO, arXiv:2402.10571",
                {"beta": 0.1, "alpha": 1.0, "log_margin": 1.0},
                function=odpo,
                needs_margin=True,
            ),
            Loss(
                "kto_pair",
                "KTO, arXiv:2402.01306, eq. 7",
                {"beta": 0.1, "desirable": 1.0, "undesirable": 1.0},
                function=kto_pair,
                batch_statistics=True,
                by_batch=True,
            ),
            Loss(
                "simpo",
                "SimPO, arXiv:2405.14734, eq. 6",
                {"beta": 2.0, "gamma": 1.0},
                function=simpo,
                needs_reference=False,
            ),
            Loss(
                "orpo",
                "ORPO, arXiv:2403.07691, eqs. 6 and 7",
                {"beta": 0.1},
                function=orpo,
                needs_reference=False,
            ),
            Loss(
                "sft",
                "next-token loss on the chosen response",
                function=sft,
                needs_reference=False,
                needs_rejected=False,
                batch_statistics=True,
            ),
            Loss(
                "pdpo",
                "FedPDPO, arXiv:2603.19741, eqs. 4 to 8",
                {
                    "beta": 0.1,
                    "weight": 0.8,
                    "exclude": 1.0,
                    "k": 2.0,
                    "most": 0.5,
                    "scale_least": 0.1,
                    "scale_most": 10.0,
                },
                function=pdpo,
                needs_reward=True,
                batch_statistics=True,
                by_batch=True,
                memory={"scale": 1.0},
            ),
        )
    }
)
"""Name → objective. β is 0.1 unless given, DPO's usual value; SimPO's, on averages per token, is 2."""

PPO = ObjectiveSpec(
    "ppo",
    "PPO, arXiv:1707.06347, offline on preference pairs: FedPDPO, arXiv:2603.19741, D.3.1",
    {
        "kl": 0.1,
        "clip": 0.2,
        "value": 0.5,
        "entropy": 0.01,
        "discount": 1.0,
        "trace": 0.95,
        "target_kl": 0.01,
        "scaled": 1.0,
        "sums": 0.0,
    },
)
"""Offline PPO, which is no function of a batch of pairs alone (see :mod:`prefed.losses.ppo`).

Its settings: ``kl``, the weight of log π_old − log π_ref in the token rewards; ``clip``, ε of both clipped
losses; ``value`` and ``entropy``, their coefficients; ``discount`` γ; ``trace`` λ of GAE; ``target_kl``: a
visit stops at 1.5 times it (0: never); ``scaled`` 1: advantages divided by the visit's standard deviation;
``sums`` 0: the mean over a batch's tokens, 1: the sum over a pair's tokens, averaged over pairs.
"""


def objective(name: str) -> Loss:
    """The objective of that name.

    Raises:
        ValueError: there is none; the error gives the nearest name.

    >>> objective("dpo").needs_reference, objective("sft").needs_rejected
    (True, False)
    """
    if name not in OBJECTIVES:
        close = difflib.get_close_matches(name, OBJECTIVES, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(OBJECTIVES)}"
        raise ValueError(f"no objective {name!r}; {hint}")
    return OBJECTIVES[name]


def recipe(name: str) -> ObjectiveSpec:
    """The settings of any objective, :data:`PPO` among them.

    Raises:
        ValueError: there is none of that name.

    >>> recipe("ppo").resolve({"kl": 0.2})["kl"]
    0.2
    """
    return PPO if name == PPO.name else objective(name)
