"""Rules that withstand some clients sending nonsense.

All take the uploads' tensors in one order (the aggregator sorts by client id) and treat clients alike,
whatever the size of their data: a liar also chooses what size to claim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefed.core import Tensors
from prefed.core.lazy import np, torch
from prefed.merge.checks import TooFewUploads
from prefed.merge.flat import combine, gram, pieces

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "clip_norms",
    "coordinate_median",
    "enough",
    "krum",
    "krum_scores",
    "multi_krum",
    "trimmed_mean",
]


def enough(rule: str, uploads: int, *, liars: int = 0, trim: float = 0.0) -> None:
    """Confirm that ``rule``, as ``[merge]`` names it, can serve over so many uploads.

    Raises:
        TooFewUploads: it cannot; the message says what it needs.

    >>> enough("krum", 5, liars=1)
    >>> enough("median", 2, liars=1)
    Traceback (most recent call last):
    ...
    prefed.merge.checks.TooFewUploads: median over 2 uploads does not withstand 1 liars: it needs at least 3
    """
    if rule == "trimmed_mean" and uploads <= 2 * _cut(uploads, trim):
        raise TooFewUploads(
            f"trimming {_cut(uploads, trim)} of {uploads} uploads at either end leaves none: "
            "use a smaller trim or a larger cohort"
        )
    least = {"median": 2 * liars + 1, "krum": 2 * liars + 3, "multi_krum": 2 * liars + 3}.get(rule, 0)
    if uploads < least:
        raise TooFewUploads(
            f"{rule} over {uploads} uploads does not withstand {liars} liars: it needs at least {least}"
        )


def coordinate_median(values: Sequence[Tensors], liars: int = 0) -> Tensors:
    """The median of each number (Yin et al. 2018, arXiv:1803.01498, definition 1).

    With an even number of uploads, the mean of the two middle ones. Every number of the result lies
    within the range of the honest uploads' as long as these are more than half.

    Raises:
        TooFewUploads: there are too few uploads to outvote ``liars``.
    """
    n = len(values)
    enough("median", n, liars=liars)
    flat = torch.empty_like(values[0].flat)
    for columns, rows in pieces(values):
        ranked = _ranked(rows)
        low, high = ranked[(n - 1) // 2], ranked[n // 2]
        flat[columns] = (low + (high - low) / 2).to(flat.dtype)
    return Tensors(values[0].layout, flat)


def trimmed_mean(values: Sequence[Tensors], trim: float) -> Tensors:
    """The mean of each number without its ⌈trim · n⌉ smallest and largest (arXiv:1803.01498, definition 2).

    Args:
        values: one per client.
        trim: share dropped at either end, above 0 and below ½; it withstands that share of liars.

    Raises:
        TooFewUploads: nothing would be left.
    """
    n = len(values)
    enough("trimmed_mean", n, trim=trim)
    cut = _cut(n, trim)
    flat = torch.empty_like(values[0].flat)
    for columns, rows in pieces(values):
        kept = _ranked(rows)[cut : n - cut]
        flat[columns] = (kept[0] + (kept - kept[0]).mean(dim=0)).to(flat.dtype)
    return Tensors(values[0].layout, flat)


def krum_scores(values: Sequence[Tensors], current: Tensors, liars: int) -> Tensor:
    """``[n]`` Σ over an upload's n − f − 2 nearest others of the squared distance (Blanchard et al. 2017).

    Args:
        values: one per client.
        current: the model they started from; distances are measured between updates, where float64
            keeps the digits that tell honest ones apart however far out a liar is.
        liars: f.

    Raises:
        TooFewUploads: n < 2 f + 3, where the rule's guarantee ends.
    """
    n = len(values)
    enough("krum", n, liars=liars)
    inner = gram(values, current)
    squares = inner.diagonal()
    distances = (squares[:, None] + squares[None, :] - 2 * inner).clamp(min=0)
    distances.fill_diagonal_(math.inf)
    return distances.sort(dim=1).values[:, : n - liars - 2].sum(dim=1)


def krum(values: Sequence[Tensors], current: Tensors, liars: int) -> int:
    """Which upload is the most central: that of the least score, the first among equals."""
    return multi_krum(values, current, liars, 1)[0]


def multi_krum(values: Sequence[Tensors], current: Tensors, liars: int, keep: int | None = None) -> list[int]:
    """Which ``keep`` uploads (n − f unless given) have the least scores, in their order."""
    scores = krum_scores(values, current, liars)
    order = torch.sort(scores, stable=True).indices[: len(values) - liars if keep is None else keep]
    return sorted(order.tolist())


def clip_norms(
    values: Sequence[Tensors], current: Tensors, max_norm: float | None = None
) -> tuple[list[Tensors], list[float]]:
    """Updates φ_i − φ shortened to at most ``max_norm`` (Sun et al. 2019, arXiv:1911.07963).

    Args:
        values: the φ_i.
        current: φ.
        max_norm: bound on the Euclidean norm; ``None`` takes the median of the norms at hand, which moves
            with the updates and which less than half of the clients cannot raise at will.

    Returns:
        The φ_i, those within the bound untouched, and their norms before.
    """
    norms = [_distance(value, current) for value in values]
    bound = max_norm if max_norm is not None else sorted(norms)[(len(norms) - 1) // 2]
    clipped = [
        value if norm <= bound else combine([current, value], [1 - bound / norm, bound / norm])
        for value, norm in zip(values, norms, strict=True)
    ]
    return clipped, norms


def _cut(uploads: int, trim: float) -> int:
    return math.ceil(trim * uploads - 1e-9)


def _ranked(rows: Tensor) -> Tensor:
    """Each column of ``[n, columns]`` in ascending order."""
    # NumPy sorts short contiguous rows with vector instructions, several times faster than torch.
    return torch.from_numpy(np.sort(rows.T.contiguous().cpu().numpy(), axis=1)).T


def _distance(value: Tensors, current: Tensors) -> float:
    return float(torch.linalg.vector_norm(value.flat.double() - current.flat.double()))
