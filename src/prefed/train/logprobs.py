"""Log-probabilities of target tokens and entropies of next tokens, without storing all logits."""

from __future__ import annotations

import math
from typing import Any

import torch

from prefed.models.matmul import matmul

BLOCK = 2048
"""Vocabulary entries per block on a CPU; their rows of the head stay in the cache for both products."""

GPU_BLOCK = 1 << 15
"""Maximum number of vocabulary entries per block on other devices, where each block costs launches."""

GPU_LOGITS = 1 << 26
"""Maximum number of fp32 logits in a block on other devices, unless a block has :data:`BLOCK` entries."""

KEEP = 1 << 27
"""Maximum number of probabilities to store for a trainable head; beyond it they are recomputed."""


def block_size(rows: int, device: torch.device) -> int:
    """Return the number of vocabulary entries per block.

    >>> [block_size(rows, torch.device("cuda")) for rows in (1, 4096, 10**6)]
    [32768, 16384, 2048]
    """
    return BLOCK if device.type == "cpu" else max(BLOCK, min(GPU_BLOCK, GPU_LOGITS // max(rows, 1)))


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply 2-D matrices. On an NVIDIA GPU the product of 16-bit matrices is fp32, without rounding."""
    known = hasattr(torch.ops.aten.mm, "dtype") and not torch.version.hip  # PyTorch 2.8 and later
    if known and left.device.type == "cuda" and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=torch.float32)
    return matmul(left, right)


def update_scores(
    scores: torch.Tensor, logits: torch.Tensor, start: int, pick: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Update ``scores`` with the logits of the targets in one block of the vocabulary.

    16-bit products may round logits to a few hundredths. Scores must come from the same logits as the
    normalizer, or they could exceed it.

    Args:
        scores: ``[M]``.
        logits: ``[K, v]``, of the vocabulary entries from ``start`` on.
        pick: ``[M]`` row of ``logits`` that predicts each target.
        targets: ``[M]`` token ids.
    """
    place = targets - start
    inside = (place >= 0) & (place < logits.shape[1])
    return torch.where(inside, logits[pick, place.clamp(0, logits.shape[1] - 1)], scores)


class _TokenLogprobs(torch.autograd.Function):
    """Online softmax over blocks of the vocabulary.

    d log p(t) / d h = W[t] − Σ_v p(v) W[v] does not depend on the loss, so the forward pass accumulates it
    and the backward pass only scales its rows. This takes two products with a frozen head and three with a
    trainable one (d log p(t) / d W[v] = (1[v = t] − p(v)) h).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        pick: torch.Tensor,
        targets: torch.Tensor,
        into: torch.Tensor | None,
    ) -> torch.Tensor:
        rows, dim = hidden.shape
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        keep = need_weight and rows * weight.shape[0] <= KEEP
        blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
        peak = torch.full((rows, 1), -math.inf, device=hidden.device)
        total = torch.zeros(rows, 1, device=hidden.device)
        mean = torch.zeros(rows, dim, device=hidden.device) if need_hidden else None
        own = weight[targets].to(hidden.dtype)
        score = (hidden[pick].float() * own.float()).sum(1)
        size = block_size(rows, hidden.device)
        for start in range(0, weight.shape[0], size):
            block = weight[start : start + size].to(hidden.dtype)
            logits = product(hidden, block.t()).float()
            if hidden.dtype != torch.float32:
                score = update_scores(score, logits, start, pick, targets)
            top = torch.maximum(peak, logits.amax(1, keepdim=True))
            fade = (peak - top).exp_()
            logits.sub_(top).exp_()
            total.mul_(fade).add_(logits.sum(1, keepdim=True))
            if mean is not None:
                mean.mul_(fade)
                mean.add_(product(logits.to(block.dtype), block))
            if keep:
                blocks.append((logits, top))
            peak = top
        normalizer = (peak + total.log())[:, 0]
        if mean is not None:
            mean.div_(total)
        if need_hidden or need_weight:
            ctx.save_for_backward(hidden, weight, pick, targets)
            ctx.mean, ctx.own, ctx.blocks, ctx.normalizer, ctx.into = mean, own, blocks, normalizer, into
        return score - normalizer[pick]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (upstream,) = grads
        hidden, weight, pick, targets = ctx.saved_tensors
        weights = torch.zeros(hidden.shape[0], device=hidden.device).index_add_(0, pick, upstream)
        grad_hidden = grad_weight = None
        if ctx.mean is not None:
            grad = ctx.mean.mul(-weights[:, None])
            grad_hidden = grad.index_add_(0, pick, ctx.own.float() * upstream[:, None]).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            into = torch.zeros_like(weight) if ctx.into is None else ctx.into
            rows, size = torch.empty_like(hidden), block_size(len(hidden), hidden.device)
            for number, start in enumerate(range(0, weight.shape[0], size)):
                part = slice(start, start + size)
                if ctx.blocks:
                    scaled, top = ctx.blocks[number]
                    share = (top[:, 0] - ctx.normalizer).exp_()
                else:
                    scaled = product(hidden, weight[part].to(hidden.dtype).t()).float()
                    scaled.sub_(ctx.normalizer[:, None]).exp_()
                    share = torch.ones_like(weights)
                # Scaling ``hidden`` is cheaper than scaling the block.
                torch.mul(hidden, (-weights * share)[:, None], out=rows)
                if into.dtype == hidden.dtype:
                    into[part].addmm_(scaled.to(hidden.dtype).t(), rows)
                else:
                    into[part].add_(product(scaled.to(hidden.dtype).t(), rows))
            toward = hidden[pick].float() * upstream[:, None]
            into.index_add_(0, targets, toward.to(into.dtype))
            grad_weight = into if ctx.into is None else None
        return grad_hidden, grad_weight, None, None, None


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    pick: torch.Tensor,
    targets: torch.Tensor,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute log softmax(hidden[pick] · weightᵀ)[targets], differentiable in ``hidden`` and ``weight``.

    Args:
        hidden: ``[K, d]``, after the final norm.
        weight: ``[V, d]``, the output embedding.
        pick: ``[M]`` row of ``hidden`` that predicts each target.
        targets: ``[M]`` token ids.
        into: ``[V, d]``; accumulates the gradient of ``weight``, which autograd then does not receive.
            ``None``: autograd receives it, at the cost of another array of this size.

    Returns:
        ``[M]`` fp32, in nats.

    >>> h, w = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    >>> token_logprobs(h, w, torch.tensor([0]), torch.tensor([1])).exp()
    tensor([0.7500])
    """
    result: torch.Tensor = _TokenLogprobs.apply(hidden, weight, pick, targets, into)  # type: ignore[no-untyped-call]
    return result


class _TokenTerms(torch.autograd.Function):
    """Online softmax over blocks of the vocabulary; the backward pass recomputes the blocks.

    With H = −Σ p log p, d log p(t) / dz_v = 1[v = t] − p_v and dH / dz_v = −p_v (log p_v + H). This takes
    three products with a frozen head and four with a trainable one.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        peak = torch.full((len(hidden), 1), -1e30, device=hidden.device)
        total, moment = torch.zeros_like(peak), torch.zeros_like(peak)
        rows = torch.arange(len(hidden), device=hidden.device)
        own = (hidden.float() * weight[targets].float()).sum(1)
        size = block_size(len(hidden), hidden.device)
        for start in range(0, len(weight), size):
            z = product(hidden, weight[start : start + size].to(hidden.dtype).t()).float()
            if hidden.dtype != torch.float32:
                own = update_scores(own, z, start, rows, targets)
            top = torch.maximum(peak, z.amax(1, keepdim=True))
            fade, fall = (peak - top).exp(), peak - top
            share = z.sub_(top).exp()
            # Σ e^(z − peak) (z − peak), moved to the new peak.
            moment = fade * (moment + fall * total)
            total = fade * total + share.sum(1, keepdim=True)
            moment += share.mul_(z).sum(1, keepdim=True)
            peak = top
        normalizer, entropy = peak + total.log(), total.log() - moment / total
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        return own - normalizer[:, 0], entropy[:, 0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        to_logprob, to_entropy = (grad[:, None] for grad in grads)
        dtype = hidden.dtype
        grad_hidden = to_logprob * weight[targets].float() if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        size = block_size(len(hidden), hidden.device)
        for start in range(0, len(weight), size):
            block = weight[start : start + size].to(dtype)
            slope = product(hidden, block.t()).float().sub_(normalizer)
            share = slope.exp()
            slope = slope.add_(entropy).mul_(-to_entropy).sub_(to_logprob).mul_(share).to(dtype)
            if grad_hidden is not None:
                grad_hidden += product(slope, block)
            if grad_weight is not None:
                grad_weight[start : start + size] = product(slope.t(), hidden)
        if grad_weight is not None:
            grad_weight.index_add_(0, targets, (to_logprob * hidden.float()).to(weight.dtype))
        return None if grad_hidden is None else grad_hidden.to(dtype), grad_weight, None


def token_terms(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-probability and entropy at every row.

    Args:
        hidden: ``[M, d]``, after the final norm.
        weight: ``[V, d]``, the output embedding.
        targets: ``[M]`` token ids.

    Returns:
        log softmax(hidden · weightᵀ)[targets] and −Σ p log p, each ``[M]`` fp32, in nats, differentiable in
        ``hidden`` and ``weight``.

    >>> import math
    >>> h, w = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    >>> [round(float(part), 4) for part in token_terms(h, w, torch.tensor([1]))]
    [-0.2877, 0.5623]
    """
    logprobs, entropies = _TokenTerms.apply(hidden, weight, targets)  # type: ignore[no-untyped-call]
    return logprobs, entropies
