"""Liger's Triton kernels for RMS norms, SwiGLU, GeGLU and rotary embedding (arXiv:2410.10989)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

from prefed.models.pretrained import LIGER_CLASSES, PROBE, ModelError, text_config


def use_liger(causal: Any, name: str) -> None:
    """Replace forwards of a model's modules, and of no other model, by ones with Liger's kernels.

    Gradients with respect to inputs are not computed in place of those with respect to outputs, as Liger does
    by default, since some parts of prefed read both. Afterwards the model must compute what it did before.

    Args:
        causal: a model on its device, without checkpointing.
        name: its name, for messages.

    Raises:
        ModelError: Liger has no kernels for this type of model, or they compute something else.
    """
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.transformers.geglu import LigerGEGLUMLP
    from liger_kernel.transformers.rope import liger_rotary_pos_emb
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP

    kind = text_config(causal.config).model_type
    if kind not in LIGER_CLASSES:
        raise ModelError(f"[model] kernels = 'liger' does not support model type {kind!r}: remove it")
    before, prefix = _response(causal), LIGER_CLASSES[kind]
    gated = {"SiLU": LigerSwiGLUMLP, "SiLUActivation": LigerSwiGLUMLP, "GELUTanh": LigerGEGLUMLP}
    for module in causal.modules():
        part = type(module).__name__.removeprefix(prefix)
        if part == "RMSNorm":
            # Gemma multiplies by 1 + w in float32; the others round before they multiply by w.
            form = (module.eps, 1.0, "gemma") if kind == "gemma" else (module.variance_epsilon, 0.0, "llama")
            module.forward = functools.partial(_norm, LigerRMSNormFunction.apply, module, *form)
        elif part == "MLP" and (liger := gated.get(type(module.act_fn).__name__)):
            module.forward = MethodType(liger.forward, module)
        elif part == "Attention":
            module.forward = MethodType(_with_rotary(type(module).forward, liger_rotary_pos_emb), module)
    most = 0.01 if causal.dtype == torch.float32 else 0.2
    for what, old, new in zip(("logits", "gradients"), before, _response(causal), strict=True):
        if not (apart := float((new - old).norm() / old.norm())) < most:
            raise ModelError(
                f"[model] kernels = 'liger' changes the {what} of {name!r} by {apart:.2%}, more than by "
                "rounding: set it to 'torch'"
            )


def _norm(
    apply: Callable[..., torch.Tensor], norm: Any, eps: float, offset: float, casting: str, x: torch.Tensor
) -> torch.Tensor:
    return apply(x, norm.weight, eps, offset, casting, False)


def _with_rotary(forward: Any, rotary: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of an attention class, but with its own rotary embedding.

    Liger itself replaces the function in the module of transformers, for all models of the process.
    """
    own = inspect.unwrap(forward)
    names = {**own.__globals__, "apply_rotary_pos_emb": rotary}
    made = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    return made


def _response(causal: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a model's logits for a few tokens, and the gradient with respect to their embeddings."""
    embeddings = causal.get_input_embeddings()
    ids = torch.arange(1, PROBE + 1, device=embeddings.weight.device)[None]
    embedded = embeddings(ids).detach().requires_grad_()
    with torch.enable_grad():
        logits = causal(inputs_embeds=embedded, use_cache=False).logits.float()
        (gradient,) = torch.autograd.grad(logits.logsumexp(-1).sum(), embedded)
    return logits.detach(), gradient.float()
