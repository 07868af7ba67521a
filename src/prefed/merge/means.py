"""Weights of uploads, and their order: in which replies came never changes a bit, they are sorted first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from prefed.core import Upload

__all__ = ["ordered", "remainder", "shares"]


def ordered(uploads: Sequence[Upload]) -> tuple[Upload, ...]:
    """The uploads sorted by client id, then by the round they started from.

    Raises:
        ValueError: a client sent two uploads that started from one round.
    """
    result = tuple(sorted(uploads, key=lambda upload: (upload.client, upload.sent_at)))
    for first, second in itertools.pairwise(result):
        if (first.client, first.sent_at) == (second.client, second.sent_at):
            raise ValueError(
                f"client {first.client!r} sent two uploads that started from round {first.sent_at}"
            )
    return result


def shares(weights: Sequence[float]) -> list[float]:
    """Weights made to sum to 1.

    Raises:
        ValueError: one is negative or none is above 0.
    """
    total = sum(weights)
    if not (total > 0 and min(weights) >= 0):
        raise ValueError(f"weights must be at least 0 and not all 0, got {list(weights)}")
    return [weight / total for weight in weights]


def remainder(masses: Sequence[float]) -> float:
    """1 − Σ p_m, the share of the data that did not take part.

    Raises:
        ValueError: the masses sum to more than 1.
    """
    rest = 1 - sum(masses)
    if rest < -1e-9:
        raise ValueError(f"the uploads hold {sum(masses):.6g} of all clients' data: more than there is")
    return max(rest, 0.0)
