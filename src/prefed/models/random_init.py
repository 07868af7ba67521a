"""Random initial values of tensors, as functions of a key."""

from __future__ import annotations

import torch

from prefed.core import Key


def uniform(key: Key, shape: tuple[int, ...], fan_in: int) -> torch.Tensor:
    """Draw U(−1/√fan_in, 1/√fan_in), the initialization of a linear layer and of PEFT's A."""
    bound = fan_in**-0.5
    return torch.rand(shape, generator=key.torch()).mul_(2 * bound).sub_(bound)


def orthogonal_rows(key: Key, count: int, width: int, length: float) -> torch.Tensor:
    """Draw ``[count, width]`` orthogonal vectors of equal length in uniformly random directions.

    They come from the QR decomposition of a normal draw in float64, with corrected signs.

    Raises:
        ValueError: there are more vectors than dimensions.

    >>> rows = orthogonal_rows(Key(0), 2, 32, 5.0).double()
    >>> torch.allclose(rows @ rows.T, torch.tensor([[25.0, 0.0], [0.0, 25.0]]).double(), atol=1e-5)
    True
    """
    if count > width:
        raise ValueError(f"{count} vectors cannot be orthogonal in {width} dimensions")
    draw = torch.randn((width, count), generator=key.torch(), dtype=torch.float64)
    q, r = torch.linalg.qr(draw)
    rows: torch.Tensor = (length * q * r.diagonal().sign()).T
    return rows.float().contiguous()
