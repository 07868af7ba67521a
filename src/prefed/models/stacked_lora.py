"""LoRA layers with the factors of several clients: one product with the frozen weights for all of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from prefed.models.backbone import Backbone
from prefed.models.fused_lora import Dropout, dropout_of, redraws
from prefed.models.matmul import matmul
from prefed.models.trainable_parts import lora_layers


@dataclass(frozen=True)
class ClientRows:
    """The rows of each client in a pass, one client after the other.

    Attributes:
        counts: number of rows of each client.
        ends: ``[N]`` int32, the end of each client's rows.
    """

    counts: list[int]
    ends: torch.Tensor

    @staticmethod
    def of(counts: Sequence[int], device: torch.device) -> ClientRows:
        """Return rows with these counts."""
        ends = torch.tensor([*accumulate(counts)], dtype=torch.int32, device=device)
        return ClientRows(list(counts), ends)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each client's rows of ``[T, K]``."""
        return torch.split(x, self.counts)


def _one_kernel(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether PyTorch's grouped product of these operands is one kernel, without a host sync.

    It is for bfloat16 in rows of 16 bytes, on NVIDIA GPUs of compute capability 9.0 or later.
    """
    if left.device.type == "cpu" or left.dtype != torch.bfloat16 or not hasattr(F, "grouped_mm"):
        return False
    return left.shape[-1] % 8 == right.shape[-1] % 8 == 0 and _has_grouped_kernel(left.device)


@functools.cache
def _has_grouped_kernel(device: torch.device) -> bool:
    if device.type == "meta":  # of a GPU whose memory is estimated
        return True
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def _own_products(
    rows: ClientRows,
    x: torch.Tensor,
    matrices: torch.Tensor,
    into: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Multiply each client's rows of ``[T, K]`` by its own matrix in ``[N, K, M]``: ``[T, M]``.

    A single product over all clients' factors, with zeros at others' rows, would cost a CPU more and would
    spread values that are not finite to other clients.

    Args:
        into: ``[T, M]``; ``scale`` times the result is added to it.
    """
    if _one_kernel(x, matrices):
        result = F.grouped_mm(x, matrices, offs=rows.ends)
        return result if into is None else into.add_(result, alpha=scale)
    if into is None:
        # Few columns, hence the transposed products, as in ``_LoraLinear``.
        parts = zip(rows.split(x), matrices, strict=True)
        return torch.cat([(matrix.t() @ part.t()).t() for part, matrix in parts])
    for result, part, matrix in zip(rows.split(into), rows.split(x), matrices, strict=True):
        result.addmm_(part, matrix, alpha=scale)
    return into


def _own_sums(rows: ClientRows, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return Σ l rᵀ over each client's rows of ``[T, K]`` and ``[T, M]``: ``[N, K, M]``."""
    if _one_kernel(left, right):
        return F.grouped_mm(left.t(), right, offs=rows.ends)
    parts = zip(rows.split(left), rows.split(right), strict=True)
    return torch.stack([first.t() @ second for first, second in parts])


class _StackedLoraLinear(torch.autograd.Function):
    """:class:`prefed.models.fused_lora._LoraLinear` with separate factors for each client's rows.

    Gradients of the factors are added to ``into``, since autograd would copy these strided views.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        into: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        rows: ClientRows,
        dropout: Dropout,
    ) -> torch.Tensor:
        y = matmul(x, weight.t(), bias)
        ctx.into, ctx.rows, ctx.dropout, ctx.scale = into, rows, dropout, scale * dropout.scale
        a, bt = a.to(x.dtype), b.transpose(1, 2).to(x.dtype).contiguous()
        mask = dropout.mask(x)
        z = x if mask is None else mask * x
        u = _own_products(rows, z, a.transpose(1, 2))
        _own_products(rows, u, bt, into=y, scale=ctx.scale)
        ctx.save_for_backward(x, weight, a, bt, u, None if redraws(x) else mask)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy,), rows = grads, ctx.rows
        x, weight, a, bt, u, mask = ctx.saved_tensors
        need_x, _, _, need_a, need_b, *_ = ctx.needs_input_grad
        if mask is None:
            mask = ctx.dropout.mask(x, again=True)
        du = _own_products(rows, dy, bt.transpose(1, 2)).mul_(ctx.scale)
        dx = None
        if need_x:
            dx = matmul(dy, weight)
            if mask is None:
                _own_products(rows, du, a, into=dx)
            else:
                dx.addcmul_(_own_products(rows, du, a), mask)
        if need_a:
            ctx.into[0].add_(_own_sums(rows, du, x if mask is None else mask * x))
        if need_b:
            ctx.into[1].add_(_own_sums(rows, u, dy).transpose(1, 2), alpha=ctx.scale)
        return dx, *(None for _ in ctx.needs_input_grad[1:])


def why_not_stacked(backbone: Backbone) -> str:
    """Return why several clients cannot share a pass over this model; ``""`` if they can."""
    if parts := sorted({entry.part for entry in backbone.layout.entries} - {"lora"}):
        return f"clients differ in more than their LoRA ({', '.join(parts)})"
    if not all(type(layer).__name__ == "Linear" for _, _, layer in lora_layers(backbone.causal)):
        return "the model has adapted layers other than plain linear ones"
    return ""


class Stack:
    """The tensors of N clients on one backbone, for passes over consecutive rows of each.

    Attributes:
        members: a backbone for each client, with that client's tensors and gradient and the common model.
        grad: ``[N, size]``, the gradients of all members.
    """

    def __init__(self, backbone: Backbone, count: int) -> None:
        self._backbone = backbone
        self._flat = backbone.flat.new_zeros(count, backbone.layout.size)
        self.grad = torch.zeros_like(self._flat)
        self.members = [
            replace(backbone, flat=flat, grad=grad) for flat, grad in zip(self._flat, self.grad, strict=True)
        ]
        self._layers = [(layer, stem) for stem, _, layer in lora_layers(backbone.causal)]
        self._rows: dict[int, ClientRows] = {}
        self._generators: list[torch.Generator] = []
        self._parameters: dict[str, nn.Parameter] = {}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block, adapted layers use the members' factors at the rows given to :meth:`place`."""
        before = [layer.forward for layer, _ in self._layers]
        for layer, stem in self._layers:
            layer.forward = functools.partial(self._forward, layer, stem)
        try:
            yield
        finally:
            for (layer, _), forward in zip(self._layers, before, strict=True):
                layer.forward = forward

    def train_first(self, count: int, names: Sequence[str], seeds: Sequence[int]) -> None:
        """Prepare a step of the first ``count`` members on ``names``, with seeds if there is dropout."""
        self.grad.zero_()
        self._generators = [torch.Generator(self._backbone.device).manual_seed(seed) for seed in seeds]
        first = next(iter(self._parameters.values()), None)
        if first is not None and len(first) == count:
            return
        trained, layout = set(names), self._backbone.layout
        for entry in layout.entries:
            span, shape = slice(*layout.span(entry.name)), (count, *entry.shape)
            parameter = nn.Parameter(self._flat[:count, span].view(shape), entry.name in trained)
            parameter.grad = self.grad[:count, span].view(shape)
            self._parameters[entry.name] = parameter

    def place(self, *counts: Sequence[int]) -> None:
        """Set the rows of each member in the next pass, for every number of rows that layers receive."""
        self._rows = {sum(each): ClientRows.of(each, self._backbone.device) for each in counts}

    def _forward(self, layer: Any, stem: str, x: torch.Tensor) -> torch.Tensor:
        base = layer.base_layer
        weight = base.weight if isinstance(base, nn.Linear) else base.weight.t()
        a, b = (self._parameters[f"lora/{stem}/{factor}"] for factor in "AB")
        flat = x.reshape(-1, x.shape[-1])
        rows = self._rows[len(flat)]
        dropout = Dropout(dropout_of(layer), rows.counts, self._generators)
        fixed = (a.grad, b.grad), layer.scaling["default"], rows, dropout
        y: torch.Tensor = _StackedLoraLinear.apply(flat, weight, base.bias, a, b, *fixed)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], y.shape[-1])
