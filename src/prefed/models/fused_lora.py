"""Faster forwards for modules of a loaded model, with equal results."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from prefed.models.matmul import matmul

_FOUR_BITS = "Linear4bit"
"""PEFT's class of LoRA layers over 4-bit weights."""


class Dropout:
    """A draw of dropout, which the backward pass can repeat.

    Args:
        p: probability that a number becomes 0.
        counts: number of rows that each of ``generators`` draws for, one after the other.
        generators: sources of the draw; ``None``: the device's own.

    Attributes:
        scale: factor of the numbers that remain, 1 / (1 - p).
    """

    def __init__(self, p: float, counts: Sequence[int], generators: Sequence[torch.Generator | None]) -> None:
        self._p, self._counts, self._generators = p, counts, generators
        self._states = [each and each.clone_state() for each in generators] if p else []
        self.scale = 1 / (1 - p)

    def mask(self, x: torch.Tensor, *, again: bool = False) -> torch.Tensor | None:
        """Draw zeros and ones like ``[rows, in]``, or draw them ``again``; ``None`` without dropout."""
        if not self._p:
            return None
        sources = [each and each.clone_state() for each in self._states] if again else self._generators
        parts = [
            x.new_empty(count, x.shape[1]).bernoulli_(1 - self._p, generator=source)
            for count, source in zip(self._counts, sources, strict=True)
        ]
        return torch.cat(parts) if parts[1:] else parts[0]


def redraws(x: torch.Tensor) -> bool:
    """Return whether the backward pass repeats a draw instead of keeping it.

    A CPU draws slowly, and the state of an Apple GPU's generator cannot be copied.
    """
    return x.device.type not in ("cpu", "mps")


def _generator(device: torch.device) -> torch.Generator | None:
    """Return the generator of a device whose draws are repeated, and ``None`` on an Apple GPU."""
    if device.type == "cuda" and torch.cuda.default_generators:
        return torch.cuda.default_generators[device.index or 0]
    return None if device.type == "mps" else torch.default_generator


def _product(left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``scale`` times a matrix product, in one kernel."""
    return left.new_empty(len(left), right.shape[1]).addmm_(left, right, beta=0, alpha=scale)


class _LoraLinear(torch.autograd.Function):
    """y = x Wᵀ + b + s (z Aᵀ) Bᵀ with a frozen W or none, in one pass over y; z is x, or x after dropout.

    Products with a factor have the rank as rows, a fast shape for BLAS. z is not kept: layers that read the
    same x, such as projections to queries, keys and values, keep it once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
        dropout: Dropout,
    ) -> torch.Tensor:
        y = x.new_zeros(len(x), len(b)) if weight is None else matmul(x, weight.t(), bias)
        a, b = a.to(x.dtype), b.to(x.dtype)
        mask = dropout.mask(x)
        z = x if mask is None else mask * x
        u = a @ z.t()
        ctx.scale, ctx.dropout = scale * dropout.scale, dropout
        y.addmm_(u.t(), b.t(), alpha=ctx.scale)
        ctx.save_for_backward(x, weight, a, b, u, None if redraws(x) else mask)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy,) = grads
        x, weight, a, b, u, mask = ctx.saved_tensors
        need_x, _, _, need_a, need_b, *_ = ctx.needs_input_grad
        if mask is None:
            mask = ctx.dropout.mask(x, again=True)
        du = _product(b.t(), dy.t(), ctx.scale)
        dx = da = db = None
        if need_x:
            dx = torch.zeros_like(x) if weight is None else matmul(dy, weight)
            if mask is None:
                dx.addmm_(du.t(), a)
            else:
                dx.addcmul_(du.t() @ a, mask)
        if need_a:
            da = du @ (x if mask is None else mask * x)
        if need_b and x.is_cpu:  # which is slow if the rank is the number of columns
            db = _product(u, dy, ctx.scale).t()
        elif need_b:
            db = _product(dy.t(), u.t(), ctx.scale)
        return dx, None, None, da, db, None, None


def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Apply a frozen linear layer with a low-rank adapter (LoRA, Hu et al. 2022, section 4.1).

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``, frozen; ``None`` for the adapter only.
        bias: ``[out]`` or ``None``, frozen.
        a: factor A, ``[rank, in]``.
        b: factor B, ``[out, rank]``.
        scale: alpha / rank.
        dropout: probability that a number of the adapter's input becomes 0.

    Returns:
        ``[..., out]``: x Wᵀ + b + scale · (dropout(x) Aᵀ) Bᵀ.

    >>> x, w, a, b = torch.ones(1, 2), torch.eye(2), torch.ones(1, 2), torch.ones(2, 1)
    >>> lora_linear(x, w, None, a, b, scale=0.5)
    tensor([[2., 2.]])
    """
    flat = x.reshape(-1, x.shape[-1])
    drawn = Dropout(dropout, [len(flat)], [_generator(x.device)])
    y: torch.Tensor = _LoraLinear.apply(flat, weight, bias, a, b, scale, drawn)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], y.shape[-1])


def dropout_of(layer: Any) -> float:
    """Return the probability of a PEFT LoRA layer's dropout; 0 while it is off."""
    dropout = layer.lora_dropout["default"]
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


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


class _Converted(torch.autograd.Function):
    """Parameters in another dtype, converted together; their gradients are added together to existing ones.

    One by one, conversions and additions would be most of a step's kernels.
    """

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters
        flat = torch.cat([each.reshape(-1) for each in parameters]).to(dtype)
        parts = _parts(flat, parameters)
        trains = zip(parts, ctx.needs_input_grad[1:], strict=True)
        ctx.mark_non_differentiable(*(part for part, trained in trains if not trained))
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        trained = [p for p, grad in zip(ctx.parameters, grads, strict=True) if grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads if grad is not None]).to(trained[0].dtype)
        parts = _parts(flat, trained)
        into = [parameter.grad for parameter in trained if parameter.grad is not None]
        if into:
            torch._foreach_add_(into, parts)
            return (None,) * (1 + len(grads))
        found = iter(parts)
        return None, *(None if grad is None else next(found) for grad in grads)


def _parts(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Split a flat tensor into views with the shapes of ``like``."""
    parts = torch.split(flat, [each.numel() for each in like])
    return tuple(part.view(each.shape) for part, each in zip(parts, like, strict=True))


def convert_together(
    trunk: nn.Module, layers: Sequence[Any], factors: Sequence[nn.Parameter], dtype: torch.dtype
) -> None:
    """Convert the factors of fused LoRA ``layers`` at the start of each pass of ``trunk``.

    Args:
        factors: A and B of each layer, with gradients, in one dtype.
    """

    def convert(*_: Any) -> None:
        if layers[0].idle:  # as all are
            return
        # Recomputed blocks belong to a pass with gradients, whatever pass came since.
        with torch.enable_grad():
            found = _Converted.apply(dtype, *factors)  # type: ignore[no-untyped-call]
        for layer, *converted in zip(layers, found[::2], found[1::2], strict=True):
            layer.converted = converted

    trunk.register_forward_pre_hook(convert)


def _lora_forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if layer.disable_adapters or layer.merged or args or kwargs:
        return type(layer).forward(layer, x, *args, **kwargs)  # type: ignore[no-any-return]
    base, four_bits = layer.base_layer, type(layer).__name__ == _FOUR_BITS
    weight = base.weight if four_bits or isinstance(base, nn.Linear) else base.weight.t()
    if layer.idle:
        if four_bits:
            return base(x)  # type: ignore[no-any-return]
        # As with factors of zeros, bit for bit.
        return matmul(x.reshape(-1, x.shape[-1]), weight.t(), base.bias).view(*x.shape[:-1], len(weight))
    a, b = getattr(layer, "converted", None) or lora_factors(layer)
    options = (layer.scaling["default"], dropout_of(layer))
    if four_bits:
        # The product with 4-bit weights keeps no input.
        return base(x) + lora_linear(x, None, None, a, b, *options)  # type: ignore[no-any-return]
    return lora_linear(x, weight, base.bias, a, b, *options)


def fuse_lora(layer: Any) -> None:
    """Fuse the forward of a PEFT LoRA layer, including a gated personal branch."""
    layer.idle = False
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
        if hasattr(module, "lora_A") and type(module).__name__ in ("Linear", _FOUR_BITS):
            fuse_lora(module)
        eps = getattr(module, "variance_epsilon", None)
        plain = type(module).__name__ in {"LlamaRMSNorm", "Qwen2RMSNorm", "MistralRMSNorm", "Qwen3RMSNorm"}
        if plain and eps is not None:
            module.forward = functools.partial(_rms_forward, module, eps)
