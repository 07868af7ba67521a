"""What the models of before and after forgetting disclose about the removed pairs, as a membership test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prefed.data import DataError
from prefed.models import ModelError
from prefed.runs.finished_run import RunError
from prefed.runs.loaded_run import load_run
from prefed.train.feedback.pairs import PairScores

LEAST = 10
"""Pairs of either kind from which on it is measured."""
DOCUMENTED = (
    "docs/forgetting.md, What before and after disclose: AUC 0.95 to 0.97 by the difference of both models, "
    "for 100 pairs of one of eight clients, FedDPO without noise, tiny-lm (benchmarks/forget.py disclosure)"
)
"""What is known where it is not measured."""


def membership(inside: npt.ArrayLike, outside: npt.ArrayLike) -> dict[str, float]:
    """The area under the ROC curve of the scores of members against others.

    Returns:
        ``auc``, and its standard ``error`` (DeLong et al. 1988).

    >>> membership([1.0, 2.0], [0.0, 3.0])
    {'auc': 0.5, 'error': 0.5}
    """
    one, other = np.asarray(inside, float), np.asarray(outside, float)
    above = np.sign(one[:, None] - other[None, :]) / 2 + 0.5
    variance = above.mean(1).var(ddof=1) / len(one) + above.mean(0).var(ddof=1) / len(other)
    return {"auc": float(above.mean()), "error": float(np.sqrt(variance))}


def unknown(why: str) -> dict[str, str]:
    """What a certificate says where it was not measured."""
    return {"unknown": why, "documented": DOCUMENTED}


def disclosure(before: Path, after: Path, removed: Sequence[int], held_out: Sequence[int]) -> dict[str, Any]:
    """How well an observer of both shared models tells removed pairs from held-out pairs of the same clients.

    The score of a pair is its margin, relative to the base model.

    Args:
        before, after: run directories.
        removed, held_out: rows of the pairs in the tokens of ``before``.

    Returns:
        :func:`membership` by the models of ``before`` and ``after``, and by the ``difference`` of both;
        ``pairs``, the number of either kind; or :func:`unknown`.
    """
    if min(len(removed), len(held_out)) < LEAST:
        return unknown(f"fewer than {LEAST} of the removed pairs, or of held-out ones to compare with")
    try:
        models = {"after": load_run(after).published_model}
        run = load_run(before, data=True)
        models["before"] = run.published_model
    except (RunError, DataError, ModelError) as error:
        return unknown(str(error))
    margins = dict[str, npt.NDArray[np.float64]]()
    for name, model in models.items():
        scores = run.trainers.pair_trainer.score(model, np.array([*removed, *held_out]))
        if not isinstance(scores, PairScores):
            return unknown("the model is trained on other feedback than pairs")
        margins[name] = np.subtract(*(scores.policy - scores.reference).astype(float).T)
    margins["difference"] = margins["before"] - margins["after"]
    count = len(removed)
    measured = {name: membership(own[:count], own[count:]) for name, own in sorted(margins.items())}
    return {"pairs": [count, len(held_out)], **measured}
