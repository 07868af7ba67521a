"""The latent taste z in a model: the selector that reads it, and the map that lets a policy take it.

The selector works on frozen hidden states (FedVPA-GP, arXiv:2605.30873). h is the hidden state of a response
after the final norm, the mean over its tokens unless ``pool = "end"``. e = MLP(h)::

    pair in the context   x = e(chosen) − e(rejected)
    posterior of z        x of each pair → encoder's MLP → attention over the pairs → mean → μ, log σ²
    pair to be judged     log-odds = base model's log-odds + w(z) · [e(first) − e(second)]

Every pair is given in its canonical order, and a sign says which response is chosen. So exchanging the labels
of a pair changes a sign and nothing else, and every function of the label is antisymmetric bit for bit.
Weights are named tensors, those of the part ``"variational"``: nothing here holds any.

A policy takes a taste as e(z) = W z + b, which is added to the input embedding of every token (stage 2 of the
same paper).
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
from prefed.models.config import VariationalSettings
from prefed.models.random_init import orthogonal_rows, uniform

VARIATIONAL = "variational"
"""The part that holds the MLPs, the attention, the heads and the decoder."""
PROTOTYPES = "prototypes"
"""The part that holds the prototypes P ``[M, d_z]``."""
POSTERIOR = "posterior"
"""The part of what a client sends of its taste: the mean μ̄ and log σ̄² ``[d_z]`` of its posterior."""
LATENT = "latent"
"""The part that holds the taste z ``[d_z]`` with which a client judges."""

DECODER = (f"{VARIATIONAL}/decoder/weight", f"{VARIATIONAL}/decoder/bias")
"""The tensors without which z and the responses make no difference."""

CAP = -2.0
"""The highest log σ² of a posterior with a cap."""
CAPPED_START = -3.0
"""Where the bias of log σ² starts below the cap: at the cap itself a hard cap has no gradient."""

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class VariationalSelector:
    """The variational selector's tensors and its functions of them.

    In all of them n is a number of pairs, d the width of the model, k the last of ``settings.widths``.

    Attributes:
        dim: d.
    """

    settings: VariationalSettings
    dim: int

    def starts(self, key: Key, *, capped: bool) -> dict[str, dict[str, torch.Tensor]]:
        """Part → name → start of every tensor.

        Args:
            key: the randomness; each tensor draws at a key with its name.
            capped: log σ² will have a cap, so its bias starts below it.
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
        """MLP(h): ``[..., d]`` hidden states → ``[..., k]``.

        Args:
            generator: dropout's randomness; ``None`` for no dropout.
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
        """``[n, k]`` features of context pairs.

        They are antisymmetric in the label, but with ``feature = "difference"``: MLP(h_w − h_l), as the paper
        prints it, is not, since the MLP has biases.

        Args:
            hidden: ``[n, 2, d]`` of the pairs' responses, in canonical order.
            signs: ``[n]``, 1 where the first response is the chosen one, else −1.
            generator: dropout's randomness; ``None`` for no dropout.
        """
        if self.settings.feature == "difference":
            return self.embed(weights, signs[:, None] * (hidden[:, 0] - hidden[:, 1]), generator)
        first, second = self.embed(weights, hidden, generator).unbind(1)
        return signs[:, None] * (first - second)

    def posterior(
        self, weights: Weights, features: torch.Tensor, *, cap: float | None = None, soft: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """μ and log σ², each ``[d_z]``, of the posterior after one context of at least one pair.

        Args:
            features: ``[n, k]`` from :meth:`pair_features`; their order makes no difference.
            cap: the highest log σ²; ``None`` for no cap.
            soft: approach the cap by a softplus. Then the gradient fades, but does not end, at the cap.

        Raises:
            ValueError: the context is empty; z is then the prior's mean.
        """
        if len(features) == 0:
            raise ValueError("a posterior needs a context pair; without any, z is the prior's mean")
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
        """``[n, 2]`` log-odds that the first response is better, where it is shown first and second.

        The labels of these pairs are no argument. With ``decoder = "residual"``, as the paper prints it, z
        adds the same numbers to both letters' logits whatever the responses are. So it prefers a letter, and
        the mean over both orders does not depend on z at all.

        Args:
            hidden: ``[n, 2, d]`` of the pairs' responses, in canonical order.
            z: ``[d_z]``, or ``[n, d_z]`` for a taste per pair.
            base: ``[n, 2]`` the frozen selector's log-odds of the same meaning.
            keep: ``[n]``, 0 where the base's log-odds are dropped, else 1; ``None`` keeps all. The others are
                not scaled up.
            generator: dropout's randomness; ``None`` for no dropout.
        """
        logits = base if keep is None else base * keep[:, None]
        decoded = _linear(weights, "decoder", z)
        if self.settings.decoder == "residual":
            lead = decoded[..., 0] - decoded[..., 1]
            return logits + torch.stack([lead, -lead], -1)
        first, second = self.embed(weights, hidden, generator).unbind(1)
        return logits + ((first - second) * decoded).sum(-1, keepdim=True)


def trainable_share(entries: Iterable[Entry], frozen: int) -> float:
    """Elements of ``entries`` over those of the frozen model. The source reports 0.18%.

    >>> trainable_share([Entry("w", (3, 3), "variational")], 900)
    0.01
    """
    return sum(entry.size for entry in entries) / frozen


def _chain(start: int, widths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Input and output width of each layer of an MLP."""
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
    """Linear layers with ReLU between them, and dropout after each ReLU."""
    for layer in range(depth):
        x = _linear(weights, f"{name}/{layer}", x)
        if layer < depth - 1:
            x = torch.relu(x)
            if dropout:
                drawn = torch.rand(x.shape, generator=generator, device=x.device)
                x = x * (drawn >= dropout) / (1 - dropout)
    return x


TASTE_MAP = "taste_map"
"""The part that holds W ``[d, d_z]`` and b ``[d]``."""
START = 1e-3
"""Standard deviation of W at the start; b starts at 0."""


class TasteMap:
    """The map of a model, and the forward hook that adds e(z) to what its input embeddings give.

    It is added after any scale that the embedding module applies, as Gemma's does. Outside of :func:`tasting`
    the model is as it would be without the map.

    Attributes:
        embeddings: the input embeddings.
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
        """``[..., d_z]`` tastes → ``[..., d]`` e(z), differentiable in W and b."""
        weight = self.weight
        if tastes.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"a taste of this model has {weight.shape[1]} numbers, and this one {tastes.shape[-1]}: give "
                "the policy the selectors' [model.variational] latent"
            )
        return F.linear(tastes.to(weight.device, weight.dtype), weight, self.bias)

    @contextmanager
    def adding(self, added: torch.Tensor) -> Iterator[None]:
        """Forward passes inside this block add ``added``, which is laid over ``[rows, tokens, d]``."""
        self._added = added
        try:
            yield
        finally:
            self._added = None

    def _add(self, module: Any, args: Any, embedded: torch.Tensor) -> torch.Tensor | None:
        return None if self._added is None else (embedded + self._added).to(embedded.dtype)


@contextmanager
def tasting(
    taste_map: TasteMap | None, tastes: torch.Tensor | None, lengths: Sequence[int] | None = None
) -> Iterator[None]:
    """Forward passes inside this block are at given tastes.

    Args:
        taste_map: the model's map; ``None`` if it has none.
        tastes: ``[rows, d_z]``, one for each row of token ids; ``None`` leaves the model as it is.
        lengths: the token ids are one row; each taste applies to this many tokens of it, in order.

    Raises:
        ValueError: the model has no map, or tastes of another width.
    """
    if tastes is None:
        yield
        return
    if taste_map is None:
        raise ValueError(f"a taste is given, and the model has no part {TASTE_MAP!r} to take it")
    added = taste_map(tastes)
    if lengths is None:
        added = added[:, None]
    else:
        counts = torch.tensor(lengths, device=added.device)
        added = added.repeat_interleave(counts, 0, output_size=sum(lengths))[None]
    with taste_map.adding(added):
        yield
