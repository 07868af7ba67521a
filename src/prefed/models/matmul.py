"""Matrix products of frozen weights, by the fastest of PyTorch's libraries."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

ROWS = 32
"""oneDNN compiles code for every number of rows, about 1 ms and 0.3 MiB, so rows are padded to a multiple."""

SMALLEST = 1 << 24
"""Number of multiplications from which a product of this kind gains more than compiling it takes."""


@functools.cache
def _prefers_onednn() -> bool:
    """Return whether oneDNN multiplies fp32 matrices faster than MKL on this CPU.

    On AMD processors MKL uses AVX2, where oneDNN uses AVX-512.
    """
    mkl, mkldnn = torch.backends.mkl, torch.backends.mkldnn
    libraries = mkl.is_available() and mkldnn.is_available()  # type: ignore[no-untyped-call]
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if not (libraries and wide and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text()


def matmul(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply matrices ``[m, k]`` and ``[k, n]``, and add a bias ``[n]``; not differentiable.

    >>> matmul(torch.ones(1, 2), torch.ones(2, 1))
    tensor([[2.]])
    """
    fp32 = left.device.type == "cpu" and left.dtype == right.dtype == torch.float32
    if fp32 and left.numel() * right.shape[1] >= SMALLEST and _prefers_onednn():
        padded = torch.cat([left, left.new_zeros(-len(left) % ROWS, left.shape[1])])
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(padded, right.t(), bias, "none", [], "")
        return result[: len(left)]
    return left @ right if bias is None else torch.addmm(bias, left, right)
