"""Packed pairs through unmodified Hugging Face models.

An attention function and a mask function of our own are registered with transformers' public
``AttentionInterface`` and ``AttentionMaskInterface``; position ids carry the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from prefed.data import Pair
from prefed.models import Backbone
from prefed.models.families import Family
from prefed.models.taste_map import tasting
from prefed.train.logprobs import token_logprobs
from prefed.train.packing import Packing, Segment

NAME = "prefed_packed"
Attend = Callable[..., torch.Tensor]
_NOT_FOR_ATTENTION = frozenset({"past_key_values", "attention_mask", "encoder_attention_mask", "use_cache"})


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packing: Packing | None = None,
    packing_tail: str = "",
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention ``[1, heads, T, width]`` → ``[1, T or K, heads, width]``, pair by pair.

    Input that is not packed goes to transformers' own SDPA attention.
    """
    if packing is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    attend = functools.partial(
        F.scaled_dot_product_attention, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    by_parts = _by_parts if query.device.type == "cpu" else _at_once
    results = []
    lengths = [segment.length for segment in packing.segments]
    parts = zip(*(torch.split(t, lengths, 2) for t in (query, key, value)), strict=True)
    for segment, (q, k, v) in zip(packing.segments, parts, strict=True):
        if packing_tail and packing.ends:
            result = _at_ends(attend, packing, segment, q, k, v)
            if packing_tail == "fill":
                rows = zip(torch.split(result, 1, 2), (segment.ends[0], segment.rejected - 1), strict=True)
                result = torch.cat([F.pad(row, (0, 0, before, 0)) for row, before in rows], 2)
        else:
            first = segment.prompt - 1 if packing_tail and not packing.whole else 0
            result = by_parts(attend, packing, segment, q[:, :, first:], k, v)
            if packing_tail == "fill":
                result = F.pad(result, (0, 0, first, 0))
        results.append(result.transpose(1, 2))
    return torch.cat(results, 1), None


def _at_once(
    attend: Attend, packing: Packing, segment: Segment, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """One call for a pair, with a mask; ``q`` holds the pair's last rows."""
    return attend(q, k, v, attn_mask=packing.mask(segment, q.dtype)[-q.shape[2] :])


def _at_ends(
    attend: Attend, packing: Packing, segment: Segment, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """One call for the last positions of a pair's two branches."""
    return attend(q[:, :, segment.ends], k, v, attn_mask=packing.ends_mask(segment, q.dtype))


def _by_parts(
    attend: Attend, packing: Packing, segment: Segment, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """One call each for prompt, chosen and rejected rows, with the keys that they attend to.

    That is half of the products. It does not pay on a GPU, where most of a call's time is its launch.
    """
    prompt, sizes = segment.prompt, [segment.prompt, segment.chosen, segment.rejected]
    first = q.shape[2] - segment.chosen - segment.rejected
    qp, *queries = torch.split(q, [first, *sizes[1:]], 2)
    (kp, *keys), (vp, *values) = (torch.split(t, sizes, 2) for t in (k, v))
    # PyTorch aligns a causal mask with the upper left corner. If ``qp`` is the prompt's last row alone, it
    # attends to the whole prompt and needs no mask.
    results = [attend(qp, kp, vp, is_causal=first == prompt)]
    for q, k, v in zip(queries, keys, values, strict=True):
        if count := q.shape[2]:
            mask = packing.causal(prompt, count, q.dtype)
            results.append(attend(q, torch.cat([kp, k], 2), torch.cat([vp, v], 2), attn_mask=mask))
    return torch.cat(results, 2)


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask for packed input, and SDPA's mask for any other."""
    from transformers.masking_utils import sdpa_mask

    return None if kwargs.get("attention_mask") is None else sdpa_mask(*args, **kwargs)


def _tail(block: Any, original: Any, family: Family, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The last block's forward: keys and values at all rows, everything else at completion rows only.

    Some attention modules must return as many rows as they were given. They get zeros for the other rows.
    """
    packing = kwargs.get("packing")
    if packing is None:
        return original(hidden, *args, **kwargs)
    norm1, attention = getattr(block, family.norm1), getattr(block, family.attention)
    norm2, mlp = getattr(block, family.norm2), getattr(block, family.mlp)
    options = {name: value for name, value in kwargs.items() if name not in _NOT_FOR_ATTENTION}
    tail = "shorten" if family.shortens else "fill"
    mixed = attention(norm1(hidden), attention_mask=None, packing_tail=tail, **options)[0]
    rows = hidden[:, packing.rows] + (mixed if family.shortens else mixed[:, packing.rows])
    packing.hidden = rows + mlp(norm2(rows))
    return hidden.detach()


def enable_packing(backbone: Backbone) -> bool:
    """Change the backbone's model so that it takes packed input; ``False`` where that is not possible."""
    from transformers import AttentionInterface, AttentionMaskInterface

    family, config = backbone.family, backbone.causal.config
    if family is None or not getattr(backbone.causal, "_supports_attention_backend", False):
        return False
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    backbone.causal.set_attn_implementation(NAME)
    if config._attn_implementation != NAME:
        return False
    block = getattr(backbone.trunk, family.blocks)[-1]
    block.forward = functools.partial(_tail, block, block.forward, family)
    return True


def trunk_hidden(backbone: Backbone, packing: Packing, tastes: torch.Tensor | None = None) -> torch.Tensor:
    """The last block's output at the packing's rows, before the final norm.

    Args:
        backbone: its model takes packed input, see :func:`enable_packing`.
        tastes: ``[B, d_z]``, of each pair; ``None`` for a model that takes none.

    Returns:
        ``[K, d]``, in the model's dtype.
    """
    assert backbone.final is not None
    backbone.final.bypass = True
    lengths = [segment.length for segment in packing.segments]
    try:
        with tasting(backbone.taste_map, tastes, lengths):
            backbone.trunk(
                input_ids=packing.ids, position_ids=packing.positions, use_cache=False, packing=packing
            )
    finally:
        backbone.final.bypass = False
    hidden, packing.hidden = packing.hidden, None
    assert hidden is not None
    return hidden[0]


def top_outputs(backbone: Backbone, packing: Packing, hidden: torch.Tensor) -> torch.Tensor:
    """From the last block's output to the numbers that losses read.

    Args:
        backbone: its final norm or bottleneck, its head, and its reward head if the packing is ``whole``.
        hidden: ``[K, d]``, see :func:`trunk_hidden`.

    Returns:
        ``[B, 2]`` fp32: log π(y_w|x) and log π(y_l|x), in nats, end-of-text included. With a ``whole``
        packing ``[B, 4]``: the reward head's h2(x, y_w) and h2(x, y_l) follow.
    """
    assert backbone.final is not None
    final = backbone.final.norm(hidden)
    weight = backbone.causal.get_output_embeddings().weight
    into = weight.grad if weight.requires_grad else None
    states, pick = final, packing.pick
    if packing.whole:
        # The reward head reads every row. The output embedding is applied to the predicting rows only.
        rows, pick = torch.unique(pick, return_inverse=True)
        states = final[rows]
    tokens = token_logprobs(states, weight, pick, packing.targets, into)
    count = 2 * len(packing.segments)
    sums = torch.zeros(count, device=tokens.device).index_add(0, packing.response, tokens)
    if not packing.whole:
        return sums.view(-1, 2)
    assert backbone.reward is not None
    rows, responses = packing.pooling(backbone.config.reward.pool == "completion")
    total = torch.zeros(count, final.shape[1], device=tokens.device)
    total = total.index_add(0, responses, final[rows].float())
    sizes = torch.bincount(responses, minlength=count).clamp(min=1)
    rewards = backbone.reward(total / sizes[:, None])
    return torch.cat([sums.view(-1, 2), rewards.view(-1, 2)], 1)


class PackedForward:
    """Packed batches through a model that takes packed input, see :func:`enable_packing`.

    A call runs the trunk and then the top. Both can be run apart: :meth:`features` once, :meth:`top` often.
    """

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    def __call__(
        self,
        pairs: Sequence[Pair],
        *,
        rejected: bool = True,
        rewards: bool = False,
        tastes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """From B pairs to ``[B, 2]``, or ``[B, 4]`` with ``rewards``; see :func:`top_outputs`.

        ``rejected=False`` leaves the rejected responses out; their columns are 0. ``tastes`` is ``[B, d_z]``.
        """
        packing = self._pack(pairs, rejected, rewards)
        return self._read(packing, trunk_hidden(self.backbone, packing, tastes))

    def features(
        self, pairs: Sequence[Pair], *, rejected: bool = True, rewards: bool = False
    ) -> list[torch.Tensor]:
        """Each pair's rows of the last block's output, ``[K_i, d]``, for :meth:`top`."""
        packing = self._pack(pairs, rejected, rewards)
        return list(torch.split(trunk_hidden(self.backbone, packing), list(packing.counts)))

    def top(
        self,
        pairs: Sequence[Pair],
        features: Sequence[torch.Tensor],
        *,
        rejected: bool = True,
        rewards: bool = False,
    ) -> torch.Tensor:
        """The result of a call, from the ``features`` of the same pairs."""
        packing = self._pack(pairs, rejected, rewards)
        return self._read(packing, torch.cat(list(features)))

    def _pack(self, pairs: Sequence[Pair], rejected: bool, rewards: bool) -> Packing:
        return Packing.of(pairs, rejected=rejected, whole=rewards, device=self.backbone.device)

    def _read(self, packing: Packing, hidden: torch.Tensor) -> torch.Tensor:
        return top_outputs(self.backbone, packing, hidden)
