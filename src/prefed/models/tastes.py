"""Latent taste z: the selector that uses it, and the taste map of a policy.

The selector works on frozen hidden states (FedVPA-GP, arXiv:2605.30873). h is the hidden state of a response
after the final norm, averaged over its tokens unless ``pool = "end"``. With e = MLP(h)::

    context pair      x = e(chosen) − e(rejected)
    posterior of z    x of each pair → encoder MLP → attention over the pairs → mean → μ, log σ²
    pair to judge     log-odds = base model's log-odds + w(z) · [e(first) − e(second)]

Pairs are in canonical order, with a sign for the chosen response. Swapping labels changes only the sign, so
functions of the label are antisymmetric bit for bit. Weights are passed in as named tensors.

A policy adds e(z) = W z + b to the input embedding of every token (stage 2 of the same paper).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from prefed.core import Entry, Key
from prefed.core.random_keys import orthogonal_rows, uniform
from prefed.models.config import LATENT, POSTERIOR, PROTOTYPES, TASTE_MAP, VARIATIONAL, VariationalSettings

Z = f"{LATENT}/z"
"""The tensor with that taste."""

CAP = -2.0
"""Maximum log σ² of a capped posterior."""
CAPPED_START = -3.0
"""Initial bias of a capped log σ²: at the cap itself a hard cap has no gradient."""

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class VariationalSelector:
    """Tensors and functions of the variational selector.

    Shapes use n for the number of pairs, d for the width of the model, and k for the last of
    ``settings.widths``.

    Attributes:
        dim: d.
    """

    settings: VariationalSettings
    dim: int

    def starts(self, key: Key, *, capped: bool) -> dict[str, dict[str, torch.Tensor]]:
        """Return part → name → initial value of every tensor.

        Args:
            key: random key; each tensor is drawn at its name.
            capped: log σ² has a cap, so its bias starts below it.
        """
        s, last = self.settings, self.settings.widths[-1]
        layers = {f"response/{k}": ends for k, ends in enumerate(_chain(self.dim, s.widths))}
        layers |= {f"encoder/{k}": ends for k, ends in enumerate(_chain(last, s.widths))}
        layers |= {f"attention/{name}": (last, last) for name in ("query", "key", "value")}
        layers |= {"mean": (last, s.latent), "log_variance": (last, s.latent)}
        layers["decoder"] = (s.latent, last if s.decoder == "conditioned" else 2)
        networks: dict[str, torch.Tensor] = {}
        for layer, (wide, narrow) in layers.items():
            for kind, shape in (("weight", (narrow, wide)), ("bias", (narrow,))):
                name = f"{VARIATIONAL}/{layer}/{kind}"
                networks[name] = uniform(key.at(VARIATIONAL, name), shape, wide)
        if capped:
            networks[f"{VARIATIONAL}/log_variance/bias"].fill_(CAPPED_START)
        prototypes = orthogonal_rows(key.at(PROTOTYPES), s.prototypes, s.latent, s.scale)
        zero = torch.zeros(s.latent)
        return {
            VARIATIONAL: networks,
            PROTOTYPES: {PROTOTYPES: prototypes},
            POSTERIOR: {f"{POSTERIOR}/mean": zero.clone(), f"{POSTERIOR}/log_variance": zero.clone()},
            LATENT: {f"{LATENT}/z": zero},
        }

    def embed(
        self, weights: Weights, hidden: torch.Tensor, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Apply the MLP to hidden states ``[..., d]``; the result is ``[..., k]``.

        Args:
            generator: random numbers for dropout; ``None`` for no dropout.
        """
        share = self.settings.dropout if generator is not None else 0.0
        return _mlp(weights, "response", hidden, len(self.settings.widths), share, generator)

    def pair_features(
        self,
        weights: Weights,
        hidden: torch.Tensor,
        signs: torch.Tensor,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Return ``[n, k]`` features of context pairs.

        They are antisymmetric in the label, except with ``feature = "difference"``: MLP(h_w − h_l), as
        printed in the paper, is not, because the MLP has biases.

        Args:
            hidden: ``[n, 2, d]`` of the responses, in canonical order.
            signs: ``[n]``, 1 if the first response is the chosen one, else −1.
            generator: random numbers for dropout; ``None`` for no dropout.
        """
        if self.settings.feature == "difference":
            return self.embed(weights, signs[:, None] * (hidden[:, 0] - hidden[:, 1]), generator)
        first, second = self.embed(weights, hidden, generator).unbind(1)
        return signs[:, None] * (first - second)

    def posterior(
        self, weights: Weights, features: torch.Tensor, *, cap: float | None = None, soft: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return μ and log σ², each ``[d_z]``, of the posterior given one context of at least one pair.

        Args:
            features: ``[n, k]`` from :meth:`pair_features`, in any order.
            cap: maximum log σ²; ``None`` for no cap.
            soft: approach the cap by a softplus, so that the gradient fades without reaching 0.

        Raises:
            ValueError: the context is empty; z is then the prior's mean.
        """
        if len(features) == 0:
            raise ValueError("a posterior requires at least one context pair")
        x = _mlp(weights, "encoder", features, len(self.settings.widths))
        query, key, value = (_linear(weights, f"attention/{name}", x) for name in ("query", "key", "value"))
        attention = torch.softmax(query @ key.T / math.sqrt(x.shape[1]), -1)
        pooled = (attention @ value).mean(0)
        mean, log_variance = _linear(weights, "mean", pooled), _linear(weights, "log_variance", pooled)
        if cap is not None:
            log_variance = cap - F.softplus(cap - log_variance) if soft else log_variance.clamp(max=cap)
        return mean, log_variance

    def log_odds(
        self,
        weights: Weights,
        hidden: torch.Tensor,
        z: torch.Tensor,
        base: torch.Tensor,
        keep: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Return ``[n, 2]`` log-odds that the first response is better, when shown first and second.

        Labels of these pairs are not used. With ``decoder = "residual"``, as printed in the paper, z adds the
        same numbers to the letters' logits for all responses: it prefers a letter, and the mean over both
        orders does not depend on z.

        Args:
            hidden: ``[n, 2, d]`` of the responses, in canonical order.
            z: ``[d_z]``, or ``[n, d_z]`` for one taste per pair.
            base: ``[n, 2]`` log-odds of the frozen selector.
            keep: ``[n]``, 0 to drop a pair's base log-odds, else 1, without rescaling; ``None`` keeps all.
            generator: random numbers for dropout; ``None`` for no dropout.
        """
        logits = base if keep is None else base * keep[:, None]
        decoded = _linear(weights, "decoder", z)
        if self.settings.decoder == "residual":
            lead = decoded[..., 0] - decoded[..., 1]
            return logits + torch.stack([lead, -lead], -1)
        first, second = self.embed(weights, hidden, generator).unbind(1)
        return logits + ((first - second) * decoded).sum(-1, keepdim=True)


def trainable_share(entries: Iterable[Entry], frozen: int) -> float:
    """Return elements of ``entries`` divided by those of the frozen model. The paper reports 0.18%.

    >>> trainable_share([Entry("w", (3, 3), "variational")], 900)
    0.01
    """
    return sum(entry.size for entry in entries) / frozen


def _chain(start: int, widths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return input and output width of each layer of an MLP."""
    return list(zip((start, *widths), widths, strict=False))


def _linear(weights: Weights, layer: str, x: torch.Tensor) -> torch.Tensor:
    name = f"{VARIATIONAL}/{layer}"
    return F.linear(x, weights[f"{name}/weight"], weights[f"{name}/bias"])


def _mlp(
    weights: Weights,
    name: str,
    x: torch.Tensor,
    depth: int,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Apply linear layers with ReLU between them, and dropout after each ReLU."""
    for layer in range(depth):
        x = _linear(weights, f"{name}/{layer}", x)
        if layer < depth - 1:
            x = torch.relu(x)
            if dropout:
                drawn = torch.rand(x.shape, generator=generator, device=x.device)
                x = x * (drawn >= dropout) / (1 - dropout)
    return x


START = 1e-3
"""Initial standard deviation of W; b starts at 0."""


class TasteMap:
    """Taste map of a model, and the forward hook that adds e(z) to its input embeddings.

    e(z) is added after any scale that the embedding module applies, as in Gemma. Outside :func:`tasting` it
    has no effect.

    Attributes:
        weight: W.
        bias: b.
    """

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, embeddings: Any) -> None:
        self.embeddings = embeddings
        self._added: torch.Tensor | None = None
        embeddings.register_forward_hook(self._add)

    def __call__(self, tastes: torch.Tensor) -> torch.Tensor:
        """Map ``[..., d_z]`` tastes to ``[..., d]`` e(z), differentiable in W and b."""
        weight = self.weight
        if tastes.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"a taste has {tastes.shape[-1]} numbers, but the policy expects {weight.shape[1]}; set its "
                "[model.variational] latent to that of the selectors"
            )
        return F.linear(tastes.to(weight.device, weight.dtype), weight, self.bias)

    @contextmanager
    def adding(self, added: torch.Tensor) -> Iterator[None]:
        """Add ``added``, broadcast to ``[rows, tokens, d]``, in forward passes within the block."""
        self._added = added
        try:
            yield
        finally:
            self._added = None

    def _add(self, module: Any, args: Any, embedded: torch.Tensor) -> torch.Tensor | None:
        if self._added is None:
            return None
        return (embedded + self._added.to(embedded.device)).to(embedded.dtype)


@contextmanager
def tasting(
    taste_map: TasteMap | None, tastes: torch.Tensor, lengths: Sequence[int] | None = None
) -> Iterator[None]:
    """Apply tastes in forward passes within the block.

    Args:
        taste_map: the model's map; ``None`` if it has none.
        tastes: ``[rows, d_z]``, one per row of token ids.
        lengths: for token ids in a single row: number of consecutive tokens of each taste.

    Raises:
        ValueError: the model has no map, or tastes have another width.
    """
    if taste_map is None:
        raise ValueError(f"tastes are given, but the model has no part {TASTE_MAP!r}")
    added = taste_map(tastes)
    if lengths is None:
        added = added[:, None]
    else:
        counts = torch.tensor(lengths, device=added.device)
        added = added.repeat_interleave(counts, 0, output_size=sum(lengths))[None]
    with taste_map.adding(added):
        yield
