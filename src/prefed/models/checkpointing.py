"""Gradient checkpointing: what a block computes is not kept for the backward pass, but computed again there.

Of each block a step then holds the input alone. Source: Chen et al. 2016 (arXiv:1604.06174).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from prefed.models.pretrained import ModelError


def recompute_blocks(causal: Any) -> None:
    """Let every block of a model compute its inner values again in the backward pass.

    The second pass has the inputs, the weights and the random state of the first, so the gradients are equal
    to the bit. Without gradients, as in an evaluation, a block runs once as before.

    Raises:
        ModelError: it is not known which modules are the blocks.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks = [module for module in causal.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise ModelError(
            f"[model] checkpointing: it is not known which modules of a model of type "
            f"{causal.config.model_type!r} are its blocks: leave it out, and lower [engine] max_tokens"
        )
    for block in blocks:
        block.forward = functools.partial(_recomputed, block.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``forward``, whose inner values are not kept where a gradient will be taken."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
