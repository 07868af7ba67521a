"""The rule and the weights that the ``[merge]`` table names, applied to uploads."""

from __future__ import annotations

from collections.abc import Sequence

from prefed.core import Round, Tensors, Upload
from prefed.merge import robust
from prefed.merge.config import MergeConfig
from prefed.merge.flat import weighted_mean
from prefed.merge.uploads import TooFewUploads


def can_merge(config: MergeConfig, uploads: int) -> bool:
    """Whether the rule can merge so many uploads."""
    try:
        robust.check_upload_count(config.rule, uploads, liars=config.liars, trim=config.trim)
    except TooFewUploads:
        return False
    return True


def select(
    config: MergeConfig, current: Tensors, values: Sequence[Tensors], max_norm: float | None
) -> tuple[list[int], list[Tensors], dict[str, float]]:
    """The clients' tensors that go into the mean: chosen by ``krum``, shortened by ``norm_clip``, or all.

    Args:
        current: the tensors that the clients started from.
        max_norm: bound of ``norm_clip``; ``None`` takes the median length of the updates.

    Returns:
        The indices of the chosen clients, their tensors, and the figures ``merged`` and ``clipped``.
    """
    indices, chosen, figures = list(range(len(values))), list(values), dict[str, float]()
    if config.rule == "norm_clip":
        chosen = robust.clip_norms(values, current, max_norm)
        shortened = sum(new is not old for new, old in zip(chosen, values, strict=True))
        figures["clipped"] = shortened / len(values)
    elif config.rule in ("krum", "multi_krum"):
        keep = 1 if config.rule == "krum" else None
        indices = robust.multi_krum(values, current, config.liars, keep)
        chosen = [values[k] for k in indices]
    return indices, chosen, {**figures, "merged": len(chosen)}


def center(config: MergeConfig, values: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """The median or the trimmed mean, if the rule is one of these; else the weighted mean."""
    if config.rule == "median":
        return robust.coordinate_median(values, config.liars)
    if config.rule == "trimmed_mean":
        return robust.trimmed_mean(values, config.trim)
    return weighted_mean(values, weights)


def weights(config: MergeConfig, uploads: Sequence[Upload], now: Round) -> list[float]:
    """One weight per upload, not normalised; under ``mass`` each is a share of all clients' pairs."""
    if config.weights == "uniform":
        return [1.0] * len(uploads)
    total = sum(now.weights.values()) if config.weights == "mass" else 1.0
    return [upload.weight / total for upload in uploads]


def absent_mass(masses: Sequence[float]) -> float:
    """1 − Σ p_m: the share of all pairs that belongs to clients without an upload.

    Raises:
        ValueError: the masses sum to more than 1.
    """
    rest = 1 - sum(masses)
    if rest < -1e-9:
        raise ValueError(f"the uploads hold {sum(masses):.6g} of all clients' data: more than there is")
    return max(rest, 0.0)
