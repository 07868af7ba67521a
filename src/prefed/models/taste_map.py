"""A policy that takes a taste z: e(z) = W z + b is added to the input embedding of every token.

Source: FedVPA-GP (arXiv:2605.30873), stage 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

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
        lengths: the token ids are one row, with a stretch of so many tokens for each taste.

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
