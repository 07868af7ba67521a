"""Faster forwards for modules of a loaded model, with equal results."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from prefed.models.matmul import matmul


class _LoraLinear(torch.autograd.Function):
    """y = x Wᵀ + b + s (z Aᵀ) Bᵀ with a frozen W, in one pass over y; z is x, or x after dropout.

    Products with a factor have the rank as rows, a fast shape for BLAS.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        z: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        y = matmul(x, weight.t(), bias)
        a, bt = a.to(x.dtype), b.t().to(x.dtype).contiguous()
        source = x if z is None else z
        u = (a @ source.t()).t()
        y.addmm_(u, bt, alpha=scale)
        ctx.save_for_backward(source, weight, a, bt, u)
        ctx.scale, ctx.dropped = scale, z is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy,) = grads
        source, weight, a, bt, u = ctx.saved_tensors
        need_x, need_z, _, _, need_a, need_b, _ = ctx.needs_input_grad
        du = (dy @ bt.t()).mul_(ctx.scale) if need_a or need_x or need_z else None
        dx = dz = da = db = None
        if need_x:
            dx = matmul(dy, weight)
            if not ctx.dropped and du is not None:
                dx.addmm_(du, a)
        if need_z and du is not None:
            dz = du @ a
        if need_a and du is not None:
            da = (du.t() @ source).float()
        if need_b:
            db = (u.t() @ dy).mul_(ctx.scale).t().float()
        return dx, dz, None, None, da, db, None


def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    dropped: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply a frozen linear layer with a low-rank adapter (LoRA, Hu et al. 2022, section 4.1).

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``, frozen.
        bias: ``[out]`` or ``None``, frozen.
        a: factor A, ``[rank, in]``.
        b: factor B, ``[out, rank]``.
        scale: alpha / rank.
        dropped: ``x`` after dropout, the adapter's input; ``None`` uses ``x``.

    Returns:
        ``[..., out]``: x Wᵀ + b + scale · (dropped Aᵀ) Bᵀ.

    >>> x, w, a, b = torch.ones(1, 2), torch.eye(2), torch.ones(1, 2), torch.ones(2, 1)
    >>> lora_linear(x, w, None, a, b, scale=0.5)
    tensor([[2., 2.]])
    """
    flat = x.reshape(-1, x.shape[-1])
    z = None if dropped is None else dropped.reshape(-1, x.shape[-1])
    y: torch.Tensor = _LoraLinear.apply(flat, z, weight, bias, a, b, scale)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], y.shape[-1])


def lora_factors(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B of a PEFT LoRA layer, including its gated personal branch.

    Two branches are one of twice the rank: s (B_g A_g + m B_p A_p) = s [B_g, m B_p] [A_g; A_p] (FedSDG, eq.
    3).
    """
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    personal = getattr(layer, "personal", None)
    if personal is None:
        return a, b
    gate, own_a, own_b = (each.to(a.device) for each in (personal.gate.sigmoid(), personal.a, personal.b))
    if personal.factors:
        return a + gate * own_a, b + gate * own_b
    return torch.cat([a, own_a]), torch.cat([b, gate * own_b], 1)


def _lora_forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if layer.disable_adapters or layer.merged or args or kwargs:
        return type(layer).forward(layer, x, *args, **kwargs)  # type: ignore[no-any-return]
    base = layer.base_layer
    weight = base.weight if isinstance(base, nn.Linear) else base.weight.t()
    dropout = layer.lora_dropout["default"]
    active = isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0
    a, b = lora_factors(layer)
    return lora_linear(x, weight, base.bias, a, b, layer.scaling["default"], dropout(x) if active else None)


def fuse_lora(layer: Any) -> None:
    """Fuse the forward of a PEFT LoRA layer, including a gated personal branch."""
    layer.forward = functools.partial(_lora_forward, layer)


class _RmsNorm(torch.autograd.Function):
    """y = w · x / √(mean x² + ε), computed in at least fp32 and rounded to the dtype of x before w.

    The backward pass needs x and one number per row.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_()[..., None]
        ctx.save_for_backward(x, weight, scale)
        y: torch.Tensor = (wide * scale).to(x.dtype) * weight
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        unit = x * scale
        dw = (grads[0] * unit.to(x.dtype)).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        slope = (grads[0] * weight).to(scale.dtype)
        shift = torch.linalg.vecdot(slope, unit).div_(x.shape[-1])[..., None]
        return slope.sub_(unit.mul_(shift)).mul_(scale).to(x.dtype), dw, None


def _rms_forward(norm: Any, eps: float, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = _RmsNorm.apply(x, norm.weight, eps)  # type: ignore[no-untyped-call]
    return y


def fuse(model: nn.Module) -> None:
    """Fuse the forwards of supported modules, with equal results.

    LoRA linear layers use :func:`lora_linear`, GPT-2's tanh GELU (eight operations in transformers) uses
    PyTorch's, and RMS norms of the Llama type keep only their input for the backward pass.
    """
    for module in model.modules():
        for name, child in list(module.named_children()):
            if type(child).__name__ == "NewGELUActivation":
                setattr(module, name, nn.GELU(approximate="tanh"))
        if hasattr(module, "lora_A") and type(module).__name__ == "Linear":
            fuse_lora(module)
        eps = getattr(module, "variance_epsilon", None)
        plain = type(module).__name__ in {"LlamaRMSNorm", "Qwen2RMSNorm", "MistralRMSNorm", "Qwen3RMSNorm"}
        if plain and eps is not None:
            module.forward = functools.partial(_rms_forward, module, eps)
