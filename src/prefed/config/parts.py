"""The parts that an experiment's model must have, and what ``[model] train = "full"`` goes together with."""

from __future__ import annotations

from prefed.config.align import AlignConfig
from prefed.merge import MergeConfig
from prefed.merge import lora as rules
from prefed.merge.lora import LORA
from prefed.methods import MethodKind, TrainingSettings
from prefed.methods.base import VALUE
from prefed.models import ModelConfig


def model_parts(
    model: ModelConfig, kind: MethodKind, settings: TrainingSettings, merge: MergeConfig
) -> frozenset[str]:
    """The parts that the method and the merge rule need, where every weight trains ``weights`` for ``lora``.

    >>> from prefed.methods import METHODS
    >>> full, kind = ModelConfig(name="model", train="full"), METHODS["feddpo"]
    >>> sorted(model_parts(full, kind, kind.Settings(), MergeConfig()))
    ['weights']
    """
    needs = kind.needs(settings) | rules.needs(merge.lora)
    return needs - {LORA} | {"weights"} if model.train == "full" else needs


def check_every_weight(
    kind: MethodKind, settings: TrainingSettings, merge: MergeConfig, align: AlignConfig | None
) -> None:
    """See that an experiment can train every weight.

    Raises:
        ValueError: it asks for a LoRA, or the method has parts of its own over a frozen model.
    """
    if merge.lora != "fedit":
        raise ValueError(
            f"[merge] lora = {merge.lora!r} is about the factors of a LoRA, and with [model] train = 'full' "
            "there is none: leave one of them out"
        )
    if own := sorted(kind.needs(settings) - {LORA, VALUE}):
        raise ValueError(
            f"[model] train = 'full' trains every weight, and {kind.name} puts parts of its own on a frozen "
            f"model ({', '.join(own)}): take another method, or train = 'lora'"
        )
    if align is not None and align.model is None:
        raise ValueError(
            "[align] trains a LoRA, and [model] has train = 'full': give the alignment an [align.model] of "
            "its own"
        )
