"""Objectives by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from prefed.core.plugins import Registry
from prefed.core.text import did_you_mean
from prefed.train.feedback import CHOICES, KINDS, PAIRS, THUMBS, Feedback, choices, thumbs
from prefed.train.feedback.kind import LossOutput
from prefed.train.losses import preference

if TYPE_CHECKING:
    from prefed.data import TokenSet
    from prefed.train.pair_cache import Rows


_NOT_NEGATIVE: tuple[str, Callable[[float], bool]] = ("at least 0", lambda value: value >= 0)
_RANGES: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    **dict.fromkeys(("beta", "k", "clip", "temperature"), ("above 0", lambda value: value > 0)),
    **dict.fromkeys(("discount", "trace"), ("from 0 to 1", lambda value: 0 <= value <= 1)),
    **dict.fromkeys(("log_margin", "exclude", "scaled", "sums"), ("0 or 1", lambda value: value in (0, 1))),
    **dict.fromkeys(("prior", "capped"), ("0, 1 or 2", lambda value: value in (0, 1, 2))),
    **dict.fromkeys(("most", "logit_dropout"), ("at least 0 and below 1", lambda value: 0 <= value < 1)),
    "label_smoothing": ("at least 0 and below 0.5", lambda value: 0 <= value < 0.5),
    "samples": ("a whole number above 0", lambda value: value >= 1 and value == int(value)),
    **dict.fromkeys(
        ("label", "own"), ("−1 or a whole number above", lambda value: value >= -1 and value == int(value))
    ),
}
"""Setting → its range in words, and whether a value is in it. All other settings must be at least 0."""


@dataclass(frozen=True)
class ObjectiveSpec:
    """Name, source and settings of an objective, and how models are trained on it.

    Attributes:
        name: as in an experiment file.
        source: paper and equation.
        defaults: setting → default.
        feedback: the kind of feedback that it trains on.
        trainer: module of ``prefed.train`` and class of its :class:`~prefed.train.trainers.ObjectiveTrainer`.
        tensor: a tensor of models that only this trainer can score; empty if a forward pass does.

    >>> plain = ObjectiveSpec("plain", "a paper", {"beta": 0.1})
    >>> plain.resolve({"beta": 0.2})
    {'beta': 0.2}
    >>> plain.resolve({"bta": 0.2})
    Traceback (most recent call last):
    ...
    ValueError: objective 'plain' has no setting 'bta'; did you mean 'beta'?
    """

    name: str
    source: str
    defaults: Mapping[str, float] = field(default_factory=dict)
    feedback: Feedback = PAIRS
    trainer: str = "loss_trainer:LossTrainer"
    tensor: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "defaults", MappingProxyType(dict(self.defaults)))

    def resolve(self, settings: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return all settings: the defaults, overridden by ``settings``.

        Raises:
            ValueError: a setting is unknown or out of range.
        """
        for name, value in (settings or {}).items():
            if name not in self.defaults:
                known = ", ".join(self.defaults) or "none"
                hint = did_you_mean(name, self.defaults) or f"; it has: {known}"
                raise ValueError(f"objective {self.name!r} has no setting {name!r}{hint}")
            allowed, contains = _RANGES.get(name, _NOT_NEGATIVE)
            if not (isinstance(value, int | float) and math.isfinite(value) and contains(value)):
                raise ValueError(f"objective {self.name!r}: {name} must be {allowed}, not {value!r}")
        return {**self.defaults, **(settings or {})}


@dataclass(frozen=True, kw_only=True)
class PairLoss(ObjectiveSpec):
    """An objective that is a pure function of a batch of feedback, and the inputs it needs.

    A call validates the settings and fills in defaults; the pure functions do neither.

    Attributes:
        function: ``(batch, **settings, **memory) -> (loss per pair [B], metrics)``.
        needs_reference: uses log-probabilities of the reference.
        needs_rejected: uses the rejected responses.
        needs_margin: uses the margin column of the data.
        needs_reward: uses scores of an explicit reward head.
        batch_statistics: the loss of a pair depends on the other pairs of its batch.
        by_batch: with gradient accumulation, each batch has its own statistics.
        memory: initial values of the state carried from step to step. The function takes each as an argument
            and returns its next value as a metric of the same name.
    """

    function: Callable[..., LossOutput]
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

    def __call__(self, batch: Any, settings: Mapping[str, float] | None = None) -> LossOutput:
        """Return losses per pair ``[B]`` and detached scalar metrics.

        Args:
            batch: a result of ``feedback.batch``.
            settings: settings that differ from the defaults, and the memory after the last step.

        Raises:
            ValueError: a setting is unknown or out of range, or the batch lacks a required tensor.
        """
        values = {**self.memory, **(settings or {})}
        memory = {name: values.pop(name) for name in self.memory}
        return self.function(batch, **self.resolve(values), **memory)


def _entry(function: Callable[..., LossOutput], source: str, **options: Any) -> PairLoss:
    return PairLoss(function.__name__, source, function=function, **options)


_LOSSES = (
    _entry(preference.dpo, "DPO, arXiv:2305.18290, eq. 7", defaults={"beta": 0.1}),
    _entry(preference.rpo, "RPO, arXiv:2404.19733, eq. 2", defaults={"beta": 0.1, "alpha": 1.0}),
    _entry(preference.dpop, "DPO-positive, arXiv:2402.13228", defaults={"beta": 0.1, "penalty": 50.0}),
    _entry(preference.dpo_norm, "length-normalised DPO, Tülu 3, arXiv:2411.15124", defaults={"beta": 5.0}),
    _entry(preference.grpo, "GRPO, arXiv:2402.03300, on wins", defaults={"beta": 0.1}),
    _entry(preference.par, "PAR, arXiv:2502.18770, by grpo", defaults={"beta": 0.1}, needs_margin=True),
    _entry(preference.hinge, "SLiC, arXiv:2305.10425, and RSO, arXiv:2309.06657", defaults={"beta": 0.1}),
    _entry(preference.ipo, "IPO, arXiv:2310.12036, eq. 17", defaults={"beta": 0.1}),
    _entry(preference.cdpo, "cDPO, Mitchell 2023, eq. 3", defaults={"beta": 0.1, "label_smoothing": 0.1}),
    _entry(preference.robust, "robust DPO, arXiv:2403.00409", defaults={"beta": 0.1, "label_smoothing": 0.1}),
    _entry(
        preference.odpo,
        "ODPO, arXiv:2402.10571",
        defaults={"beta": 0.1, "alpha": 1.0, "log_margin": 1.0},
        needs_margin=True,
    ),
    _entry(
        preference.kto_pair,
        "KTO, arXiv:2402.01306, eq. 7",
        defaults={"beta": 0.1, "desirable": 1.0, "undesirable": 1.0},
        batch_statistics=True,
        by_batch=True,
    ),
    _entry(
        thumbs.kto,
        "KTO, arXiv:2402.01306, eq. 7, on thumbs",
        defaults={"beta": 0.1, "desirable": 1.0, "undesirable": 1.0},
        feedback=THUMBS,
        batch_statistics=True,
        by_batch=True,
    ),
    _entry(
        preference.simpo,
        "SimPO, arXiv:2405.14734, eq. 6",
        defaults={"beta": 2.0, "gamma": 1.0},
        needs_reference=False,
    ),
    _entry(
        preference.orpo, "ORPO, arXiv:2403.07691, eqs. 6 and 7", defaults={"beta": 0.1}, needs_reference=False
    ),
    _entry(
        preference.sft,
        "next-token loss on the chosen response",
        needs_reference=False,
        needs_rejected=False,
        batch_statistics=True,
    ),
    _entry(
        preference.pdpo,
        "FedPDPO, arXiv:2603.19741, eqs. 4 to 8",
        defaults={"beta": 0.1, "weight": 0.8, "exclude": 1.0, "k": 2.0, "most": 0.5}
        | {"scale_least": 0.1, "scale_most": 10.0},
        needs_reward=True,
        batch_statistics=True,
        by_batch=True,
        memory={"scale": 1.0},
    ),
)

OBJECTIVES = Registry("objectives", {loss.name: loss for loss in _LOSSES}, "OBJECTIVE", PairLoss)
"""Name → objective. β defaults to 0.1, as usual for DPO; with averages per token it is larger:
2 for SimPO, 5 for length-normalised DPO."""

PPO = ObjectiveSpec(
    "ppo",
    "PPO, arXiv:1707.06347, offline on preference pairs: FedPDPO, arXiv:2603.19741, D.3.1",
    {"kl": 0.1, "clip": 0.2, "value": 0.5, "entropy": 0.01, "discount": 1.0, "trace": 0.95}
    | {"target_kl": 0.01, "scaled": 1.0, "sums": 0.0},
    trainer="ppo:PPOTrainer",
)
"""Offline PPO. It is not in :data:`OBJECTIVES`, because its loss needs more than a batch of pairs.

See :mod:`prefed.train.losses.ppo`. Settings: ``kl``, weight of log π_old − log π_ref in the token rewards;
``clip``, ε of both clipped losses; ``value`` and ``entropy``, coefficients of these terms; ``discount`` γ and
``trace`` λ of GAE; ``target_kl``: a phase stops at 1.5 times this value (0: never); ``scaled``: 1 divides
advantages by their standard deviation over the visit; ``sums``: 0 averages over the tokens of a batch, 1 sums
over the tokens of a pair and averages over pairs.
"""

LATENT = ObjectiveSpec(
    "latent",
    "FedVPL and FedVPA-GP, arXiv:2605.30873",
    {"beta": 0.1, "pull": 1.0, "orthogonality": 0.1, "capped": 0.0, "logit_dropout": 0.0}
    | {"prior": 0.0, "samples": 4.0, "temperature": 1.0, "label": -1.0, "own": -1.0},
    feedback=CHOICES,
    trainer="tastes:LatentTrainer",
    tensor="latent/z",
)
"""Objective of selectors with a latent taste z. It is not in :data:`OBJECTIVES`, because it needs contexts.

See :mod:`prefed.train.losses.tastes`. Settings: ``beta``, ``pull`` and ``orthogonality``, weights β, λ and γ
of the terms; ``capped``, index into :data:`~prefed.train.losses.tastes.CAPS`; ``prior``, index into
:data:`~prefed.train.losses.tastes.PRIORS`; ``logit_dropout``, share of pairs whose base log-odds are dropped
in a step; ``samples``, K of the estimate of a mixture's KL; ``temperature``, τ of the mixture weights;
``label``, index of the client's prototype, and ``own``, index of the client among its peers, −1 for none.
"""

MIXED = ObjectiveSpec(
    "mixed",
    "LoRe, arXiv:2504.14439, and PAL, arXiv:2406.08469",
    {"pairs": 0.0},
    feedback=CHOICES,
    trainer="mixed_rewards:MixedRewardTrainer",
    tensor="mixture/logits",
)
"""Objective of rewards that clients mix. It is not in :data:`OBJECTIVES`, because it reads hidden states.

See :mod:`prefed.train.mixed_rewards`. ``pairs``: train on so many of the client's pairs; 0 for all.
"""

CHOICE = _entry(choices.choice, "FedBiscuit, ICLR 2025, eq. 3", needs_reference=False, feedback=CHOICES)
"""Objective of selectors. It is not in :data:`OBJECTIVES`, because it uses log-odds of choices."""

FIXED = {spec.name: spec for spec in (PPO, LATENT, MIXED, CHOICE)}
"""Objectives that belong to methods, by name."""


def objective(name: str) -> PairLoss:
    """Return the objective with the given name.

    Raises:
        ValueError: there is none; the message suggests the nearest name.

    >>> objective("dpo").needs_reference, objective("sft").needs_rejected
    (True, False)
    """
    loss = OBJECTIVES.get(name)
    if loss is None:
        raise ValueError(f"unknown objective {name!r}{OBJECTIVES.hint(name)}")
    return loss


def find_objective(name: str) -> ObjectiveSpec:
    """Return the objective with the given name, also one that belongs to a method.

    >>> [find_objective(name).feedback.name for name in ("kto", "dpo", "ppo", "latent")]
    ['thumbs', 'pairs', 'pairs', 'choices']
    """
    return FIXED.get(name) or objective(name)


def feedback_of(tokens: TokenSet, rows: Rows, first: Feedback = PAIRS) -> Feedback:
    """Return the kind of ``rows``: ``first`` if possible, else one of :data:`~prefed.train.feedback.KINDS`.

    Raises:
        ValueError: they are of several kinds.
    """
    kinds = list(dict.fromkeys((first, *KINDS)))
    for kind in kinds:
        if kind.owns(tokens, rows).all():
            return kind
    some = " and some ".join(kind.name for kind in kinds if kind.owns(tokens, rows).any())
    raise ValueError(f"some of the rows are {some}; score them separately")


def check_feedback(what: str, kind: Feedback, tokens: TokenSet, rows: Rows) -> None:
    """Check that what trains on feedback of a kind can train on ``rows``.

    Args:
        what: the method or objective, for messages.

    Raises:
        ValueError: some rows are of another kind.
    """
    other = rows[~kind.owns(tokens, rows)]
    if len(other):
        got = feedback_of(tokens, other[:1])
        raise ValueError(f"{what} trains on {kind.name}, but the training data are {got.name}; {got.remedy}")
