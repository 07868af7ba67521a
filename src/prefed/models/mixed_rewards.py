"""Rewards on frozen hidden states, of which each client has its own mixture.

h is the hidden state of a response, as in :mod:`prefed.models.tastes`. All clients share the parameters of
one of two rewards, and each client has its own K logits, with w = softmax(logits) on the simplex::

    LoRe    r(h) = w · B h                       B ``[K, d]``: K rewards          (arXiv:2504.14439)
    PAL-A   r(h) = −‖f(h) − f(Σ_k w_k p_k)‖      f: an MLP to ``[width]``,        (arXiv:2406.08469)
                                                 p_k ``[d]``: prototypical ideal points
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from prefed.core import Key
from prefed.core.random_keys import uniform
from prefed.models.config import BASIS, IDEAL, MIXTURE, MixtureSettings

LOGITS = f"{MIXTURE}/logits"


def starts(part: str, settings: MixtureSettings, dim: int, key: Key) -> dict[str, torch.Tensor]:
    """Return name → initial value of the tensors of ``part``; all clients start with equal weights.

    Args:
        dim: width d of the hidden states.
        key: random key; each tensor is drawn at its name.
    """
    count, width = settings.count, settings.width
    if part == MIXTURE:
        return {LOGITS: torch.zeros(count)}

    def layer(name: str, rows: int, fan_in: int) -> dict[str, torch.Tensor]:
        ends = {f"{name}/weight": (rows, fan_in), f"{name}/bias": (rows,)}
        return {end: uniform(key.at(end), shape, fan_in) for end, shape in ends.items()}

    if part == BASIS:
        return {f"{BASIS}/weight": uniform(key.at(f"{BASIS}/weight"), (count, dim), dim)}
    points = f"{IDEAL}/prototypes"
    projection = layer(f"{IDEAL}/0", width, dim) | layer(f"{IDEAL}/1", width, width)
    return projection | {points: torch.randn((count, dim), generator=key.at(points).torch())}


def rewards(weights: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    """Map hidden states ``[..., d]`` to rewards ``[...]``, of LoRe or PAL by the parts in ``weights``."""
    mixture = torch.softmax(weights[LOGITS], -1)
    if f"{BASIS}/weight" in weights:
        mixed: torch.Tensor = F.linear(hidden, weights[f"{BASIS}/weight"]) @ mixture
        return mixed
    ideal = mixture @ weights[f"{IDEAL}/prototypes"]
    away = _project(weights, hidden) - _project(weights, ideal)
    distance: torch.Tensor = torch.linalg.vector_norm(away, dim=-1)
    return -distance


def _project(weights: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Map ``[..., d]`` to ``[..., width]``: f of PAL."""
    inner = F.gelu(F.linear(x, weights[f"{IDEAL}/0/weight"], weights[f"{IDEAL}/0/bias"]))
    return F.linear(inner, weights[f"{IDEAL}/1/weight"], weights[f"{IDEAL}/1/bias"])
