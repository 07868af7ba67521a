"""Packed pairs through unmodified Hugging Face models.

An attention function and a mask function of our own are registered with transformers' public
``AttentionInterface`` and ``AttentionMaskInterface``; position ids carry the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from prefed.models import Backbone
from prefed.models.families import Family
from prefed.train.logprobs import token_logprobs
from prefed.train.packing import Packing, Segment

__all__ = ["attach", "top_outputs", "trunk_hidden"]

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
    """Attention ``[1, heads, T, width]`` → ``[1, T or K, heads, width]``, pair by pair."""
    if packing is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    run_task = functools.partial(
        F.scaled_dot_product_attention, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    by_parts = _by_parts if query.device.type == "cpu" else _at_once
    results = []
    pieces = zip(*(torch.split(t, packing.lengths, 2) for t in (query, key, value)), strict=True)
    for segment, (q, k, v) in zip(packing.segments, pieces, strict=True):
        first = segment.prompt - 1 if packing_tail and not packing.whole else 0
        result = by_parts(run_task, packing, segment, q[:, :, first:], k, v)
        if packing_tail == "fill":
            result = F.pad(result, (0, 0, first, 0))
        results.append(result.transpose(1, 2))
    return torch.cat(results, 1), None


def _at_once(
    run_task: Attend, packing: Packing, segment: Segment, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """One call for a pair, its mask saying what each row may see; ``q`` are the last rows."""
    return run_task(q, k, v, attn_mask=packing.mask(segment, q.dtype)[-q.shape[2] :])


def _by_parts(
    run_task: Attend, packing: Packing, segment: Segment, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Prompt, chosen and rejected rows apart, each against the keys it may see: half of the products.

    Three calls do not pay on a GPU, where one is mostly its launch.
    """
    prompt, sizes = segment.prompt, [segment.prompt, segment.chosen, segment.rejected]
    known = q.shape[2] - segment.chosen - segment.rejected
    qp, *queries = torch.split(q, [known, *sizes[1:]], 2)
    (kp, *keys), (vp, *values) = (torch.split(t, sizes, 2) for t in (k, v))
    # A causal mask is drawn from the upper left; a prompt's last row alone sees all of it.
    results = [run_task(qp, kp, vp, is_causal=known == prompt)]
    for q, k, v in zip(queries, keys, values, strict=True):
        if count := q.shape[2]:
            mask = packing.causal(prompt, count, q.dtype)
            results.append(run_task(q, torch.cat([kp, k], 2), torch.cat([vp, v], 2), attn_mask=mask))
    return torch.cat(results, 2)


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask for packed input; what SDPA would get for anything else."""
    from transformers.masking_utils import sdpa_mask

    return None if kwargs.get("attention_mask") is None else sdpa_mask(*args, **kwargs)


def _tail(block: Any, original: Any, family: Family, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A last block that computes keys and values everywhere and all else at completion rows only.

    An attention module that insists on as many rows out as in is given zeros for the others.
    """
    packing = kwargs.get("packing")
    if packing is None:
        return original(hidden, *args, **kwargs)
    norm1, attention = getattr(block, family.norm1), getattr(block, family.attention)
    norm2, mlp = getattr(block, family.norm2), getattr(block, family.mlp)
    passed = {name: value for name, value in kwargs.items() if name not in _NOT_FOR_ATTENTION}
    tail = "shorten" if family.shortens else "fill"
    mixed = attention(norm1(hidden), attention_mask=None, packing_tail=tail, **passed)[0]
    rows = hidden[:, packing.rows] + (mixed if family.shortens else mixed[:, packing.rows])
    packing.hidden = rows + mlp(norm2(rows))
    return hidden.detach()


def attach(backbone: Backbone) -> bool:
    """Teach the backbone's model to take packed input; ``False`` where its family does not allow it."""
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


def trunk_hidden(backbone: Backbone, packing: Packing) -> torch.Tensor:
    """What comes out of the last block at the packing's rows, before the final norm.

    Args:
        backbone: a backbone that :func:`attach` accepted.
        packing: B pairs.

    Returns:
        ``[K, d]``, in the model's dtype.
    """
    assert backbone.final is not None
    backbone.final.bypass = True
    try:
        backbone.trunk(
            input_ids=packing.ids, position_ids=packing.positions, use_cache=False, packing=packing
        )
    finally:
        backbone.final.bypass = False
    hidden, packing.hidden = packing.hidden, None
    assert hidden is not None
    return hidden[0]


def top_outputs(backbone: Backbone, packing: Packing, hidden: torch.Tensor) -> torch.Tensor:
    """From the last block's rows to what losses read.

    Args:
        backbone: gives the final norm or bottleneck, the head, and the reward head if the packing is
            ``whole``.
        packing: B pairs.
        hidden: ``[K, d]``, see :func:`trunk_hidden`.

    Returns:
        ``[B, 2]`` fp32: log π(y_w|x) and log π(y_l|x), in nats, end-of-text included; with a ``whole``
        packing ``[B, 4]``, followed by the reward head's h2(x, y_w) and h2(x, y_l).
    """
    assert backbone.final is not None
    final = backbone.final.norm(hidden)
    weight = backbone.causal.get_output_embeddings().weight
    into = weight.grad if weight.requires_grad else None
    predicting, pick = final, packing.pick
    if packing.whole:
        # The reward head looks at every row; the head's products are for those that predict.
        rows, pick = torch.unique(pick, return_inverse=True)
        predicting = final[rows]
    tokens = token_logprobs(predicting, weight, pick, packing.targets, into)
    count = 2 * len(packing.segments)
    sums = torch.zeros(count, device=tokens.device).index_add(0, packing.owner, tokens)
    if not packing.whole:
        return sums.view(-1, 2)
    assert backbone.reward is not None
    rows, whose = packing.pooling(backbone.config.reward.pool == "completion")
    total = torch.zeros(count, final.shape[1], device=tokens.device)
    total = total.index_add(0, whose, final[rows].float())
    sizes = torch.bincount(whose, minlength=count).clamp(min=1)
    rewards = backbone.reward(total / sizes[:, None])
    return torch.cat([sums.view(-1, 2), rewards.view(-1, 2)], 1)
