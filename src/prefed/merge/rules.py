"""The merge rules and weights of the ``[merge]`` table.

Robust rules tolerate some bad uploads. They ignore the sizes of the clients' data, which dishonest clients
can misreport. Tensors are given in the order of client ids. Fair weights favour the clients that the model
serves worst; the loss F_k of a client is the mean training loss of its visit, ``loss`` of its upload.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from prefed.core import Plain, Round, Tensors, Upload
from prefed.core.lazy import np, torch
from prefed.core.text import listed
from prefed.merge.config import MERGE_RULES, MergeConfig
from prefed.merge.means_distances import chunks, squared_distances, weighted_mean
from prefed.merge.uploads import TooFewUploads

if TYPE_CHECKING:
    from torch import Tensor


LOSS = "loss"
MIXTURE = "mixture"
"""The value of a server's state with AFL's λ."""


def can_merge(config: MergeConfig, uploads: int) -> bool:
    """Whether the rule can merge this number of uploads."""
    try:
        check_upload_count(config.rule, uploads, liars=config.liars, trim=config.trim)
    except TooFewUploads:
        return False
    return True


def select(
    config: MergeConfig, current: Tensors, values: Sequence[Tensors], max_norm: float | None
) -> tuple[list[int], list[Tensors], dict[str, float]]:
    """Return the tensors for the mean: selected by ``krum``, clipped by ``norm_clip``, or all.

    Args:
        current: the tensors that the clients started from.
        max_norm: bound of ``norm_clip``; ``None`` for the median norm of the updates.

    Returns:
        The indices of the selected clients, their tensors, and the metrics ``merged`` and ``clipped``.
    """
    indices, chosen, figures = list(range(len(values))), list(values), dict[str, float]()
    if config.rule == "norm_clip":
        chosen = clip_norms(values, current, max_norm)
        shortened = sum(new is not old for new, old in zip(chosen, values, strict=True))
        figures["clipped"] = shortened / len(values)
    elif config.rule in ("krum", "multi_krum"):
        keep = 1 if config.rule == "krum" else None
        indices = multi_krum(values, current, config.liars, keep)
        chosen = [values[k] for k in indices]
    return indices, chosen, {**figures, "merged": len(chosen)}


def center(config: MergeConfig, values: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """Return what a rule that replaces the mean computes, or else the weighted mean."""
    if (rule := config.kind).function is not None:
        return rule.function(values, weights, **{**rule.defaults, **config.rule_settings})
    if config.rule == "median":
        return coordinate_median(values, config.liars)
    if config.rule == "trimmed_mean":
        return trimmed_mean(values, config.trim)
    return weighted_mean(values, weights)


def weights(config: MergeConfig, uploads: Sequence[Upload], now: Round) -> list[float]:
    """Return one unnormalised weight per upload; under ``mass``, its share of the pairs of all clients."""
    if config.weights == "qffl":
        return qffl_weights(uploads, config.q)
    if config.weights == "uniform":
        return [1.0] * len(uploads)
    total = sum(now.weights.values()) if config.weights == "mass" else 1.0
    return [upload.weight / total for upload in uploads]


def absent_mass(masses: Sequence[float]) -> float:
    """Return 1 − Σ p_m, the share of all pairs that belongs to clients without an upload.

    Raises:
        ValueError: the masses sum to more than 1.
    """
    rest = 1 - sum(masses)
    if rest < -1e-9:
        raise ValueError(f"the uploads report {sum(masses):.6g} times the data of all clients")
    return max(rest, 0.0)


def check_upload_count(rule: str, uploads: int, *, liars: int = 0, trim: float = 0.0) -> None:
    """Check that ``rule`` can merge this number of uploads.

    Args:
        liars: bad uploads that ``median``, ``krum`` and ``multi_krum`` must tolerate.
        trim: share dropped by ``trimmed_mean`` at each end.

    Raises:
        TooFewUploads: there are too few uploads; the message contains the minimum.

    >>> check_upload_count("krum", 5, liars=1)
    >>> check_upload_count("median", 2, liars=1)
    Traceback (most recent call last):
    ...
    prefed.merge.uploads.TooFewUploads: median needs at least 3 uploads to tolerate liars = 1, got 2
    """
    if rule == "trimmed_mean" and uploads <= 2 * _cut(uploads, trim):
        raise TooFewUploads(
            f"trimming {_cut(uploads, trim)} of {uploads} uploads at each end leaves none; use a smaller "
            "trim or a larger cohort"
        )
    least = {"median": 2 * liars + 1, "krum": 2 * liars + 3, "multi_krum": 2 * liars + 3}.get(rule, 0)
    if uploads < least:
        raise TooFewUploads(
            f"{rule} needs at least {least} uploads to tolerate liars = {liars}, got {uploads}"
        )
    if uploads < (least := MERGE_RULES[rule].least):
        raise TooFewUploads(f"{rule} needs at least {least} uploads, got {uploads}")


def coordinate_median(values: Sequence[Tensors], liars: int = 0) -> Tensors:
    """Coordinate-wise median (Yin et al. 2018, arXiv:1803.01498, definition 1).

    If more than half of the uploads are honest, each coordinate lies between those of two honest uploads.

    Raises:
        TooFewUploads: there are at most 2 · ``liars`` uploads.
    """
    n = len(values)
    check_upload_count("median", n, liars=liars)
    flat = torch.empty_like(values[0].flat)
    for columns, rows in chunks(values):
        ranked = _ranked(rows)
        low, high = ranked[(n - 1) // 2], ranked[n // 2]
        flat[columns] = (low + (high - low) / 2).to(flat.dtype)
    return Tensors(values[0].layout, flat)


def trimmed_mean(values: Sequence[Tensors], trim: float) -> Tensors:
    """Coordinate-wise mean without the ⌈trim · n⌉ smallest and largest (arXiv:1803.01498, definition 2).

    Args:
        values: one per client.
        trim: share dropped at each end, between 0 and ½: the tolerated share of bad uploads.

    Raises:
        TooFewUploads: nothing would be left.
    """
    n = len(values)
    check_upload_count("trimmed_mean", n, trim=trim)
    cut = _cut(n, trim)
    flat = torch.empty_like(values[0].flat)
    for columns, rows in chunks(values):
        middle = _ranked(rows)[cut : n - cut]
        flat[columns] = (middle[0] + (middle - middle[0]).mean(dim=0)).to(flat.dtype)
    return Tensors(values[0].layout, flat)


def krum_scores(values: Sequence[Tensors], current: Tensors, liars: int) -> Tensor:
    """Return the sums of squared distances to the n − f − 2 nearest others (Blanchard et al. 2017), ``[n]``.

    Args:
        values: one per client.
        current: the model that the clients started from.
        liars: f.

    Raises:
        TooFewUploads: n < 2 f + 3, for which the rule has no guarantee.
    """
    n = len(values)
    check_upload_count("krum", n, liars=liars)
    distances = squared_distances(values, current)
    distances.fill_diagonal_(math.inf)
    return distances.sort(dim=1).values[:, : n - liars - 2].sum(dim=1)


def multi_krum(values: Sequence[Tensors], current: Tensors, liars: int, keep: int | None = None) -> list[int]:
    """Return the ascending indices of the ``keep`` (default: n − f) uploads with the lowest scores."""
    scores = krum_scores(values, current, liars)
    order = torch.sort(scores, stable=True).indices[: len(values) - liars if keep is None else keep]
    return sorted(order.tolist())


def clip_norms(values: Sequence[Tensors], current: Tensors, max_norm: float | None = None) -> list[Tensors]:
    """Clip updates φ_i − φ to ``max_norm`` (Sun et al. 2019, arXiv:1911.07963).

    Args:
        values: the φ_i.
        current: φ.
        max_norm: bound on the Euclidean norm; ``None`` for the median norm of the updates.

    Returns:
        The clipped φ_i. Those within the bound are the same objects.
    """
    norms = update_norms(values, current)
    bound = max_norm if max_norm is not None else median_norm(norms)
    return [
        value if norm <= bound else weighted_mean([current, value], [1 - bound / norm, bound / norm])
        for value, norm in zip(values, norms, strict=True)
    ]


def update_norms(values: Sequence[Tensors], current: Tensors) -> list[float]:
    """Return the Euclidean norms of the updates φ_i − φ."""
    return [float(torch.linalg.vector_norm(v.flat.double() - current.flat.double())) for v in values]


def median_norm(norms: Sequence[float]) -> float:
    """Return the median, or the lower of the two middle norms."""
    return sorted(norms)[(len(norms) - 1) // 2]


def _cut(uploads: int, trim: float) -> int:
    return math.ceil(trim * uploads - 1e-9)


def _ranked(rows: Tensor) -> Tensor:
    """Sort each column of ``[n, columns]``."""
    # NumPy sorts short contiguous rows several times faster than torch.
    return torch.from_numpy(np.sort(rows.T.contiguous().cpu().numpy(), axis=1)).T


def qffl_weights(uploads: Sequence[Upload], q: float) -> list[float]:
    """n_k F_k^q, up to a common factor: q-FFL (Li et al. 2020, arXiv:1905.10497), eq. 4.

    Steps with these weights descend on Σ n_k F_k^(q + 1). A client that may not send its loss counts with the
    mean loss of the others, and a negative loss as 0.

    >>> qffl_weights([Upload("a", 1, {}, {"loss": 4.0}), Upload("b", 3, {}, {"loss": 2.0})], 2)
    [1.0, 0.75]
    """
    losses = _losses(uploads)
    usual = sum(losses.values()) / max(len(losses), 1)
    values = [losses.get(upload.client, usual) for upload in uploads]
    most = max(values)
    return [
        upload.weight * (value / most if most else 1.0) ** q
        for upload, value in zip(uploads, values, strict=True)
    ]


def afl(
    mixture: Plain, uploads: Sequence[Upload], now: Round, lr: float
) -> tuple[list[float], dict[str, Plain]]:
    """The weights λ_k of the uploads, and λ ← Π(λ + η F): AFL (Mohri et al. 2019, arXiv:1902.00146), alg. 1.

    λ weights all clients, and descent on Σ λ_k F_k alternates with this ascent. Π is the Euclidean projection
    on the simplex. Clients without a loss in this round have F_k = 0. The weights are uniform if λ is 0 for
    every upload.

    Args:
        mixture: the last λ, client → weight; ``None`` before the first round, for λ_k = n_k / n.
        lr: η.

    >>> from prefed.core import Key
    >>> uploads = [Upload("a", 1, {}, {"loss": 1.0}), Upload("b", 1, {}, {"loss": 0.5})]
    >>> afl(None, uploads, Round(1, 9, Key(0), {"a": 1, "b": 1}), 0.5)
    ([0.5, 0.5], {'a': 0.625, 'b': 0.375})
    """
    pairs = sum(now.weights.values())
    start = {client: size / pairs for client, size in now.weights.items()}
    known = start if mixture is None else cast("dict[str, float]", mixture)
    if missing := [upload.client for upload in uploads if upload.client not in known]:
        raise ValueError(
            f"[merge] weights = 'afl': the server has no weight for {listed(missing)}; the clients of "
            "the run changed, so start a new run"
        )
    losses = _losses(uploads)
    raised = {client: weight + lr * losses.get(client, 0.0) for client, weight in known.items()}
    # Π ignores a common term. Less the largest, sums do not cancel if a client claims an enormous loss.
    top = max(raised.values())
    raised = {client: weight - top for client, weight in raised.items()}
    sums = itertools.accumulate(sorted(raised.values(), reverse=True))
    surplus = max((total - 1) / count for count, total in enumerate(sums, 1))
    weights = [known[upload.client] for upload in uploads]
    return (
        weights if any(weights) else [1.0] * len(uploads),
        {client: max(weight - surplus, 0.0) for client, weight in raised.items()},
    )


def _losses(uploads: Sequence[Upload]) -> dict[str, float]:
    return {upload.client: max(upload.scalars[LOSS], 0.0) for upload in uploads if LOSS in upload.scalars}
