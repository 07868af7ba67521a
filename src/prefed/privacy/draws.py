"""Gaussian noise: from the run's seed for simulations, from the operating system for federations."""

from __future__ import annotations

import secrets

from prefed.core import Key
from prefed.core.lazy import np, torch

_CHUNK = 1 << 16
_SUMMED = 4


def normal(size: int, key: Key | None) -> torch.Tensor:
    """``[size]`` draws of N(0, 1) in float64.

    Whoever knows a key knows its draws. So a key serves simulations alone, and hides nothing from a server
    that knows the run's seed.

    Without a key the bits are the operating system's secure random bits, and each draw is the sum of four
    normal draws over 2. A sum has no gaps between its possible values that would give away what was added to
    it, as a single draw of limited precision has (Holohan and Braghin 2021, arXiv:2107.10138).

    Args:
        key: names the stream; ``None`` for the operating system's secure random numbers.

    >>> normal(3, Key(1)).equal(normal(3, Key(1))), normal(3, None).equal(normal(3, None))
    (True, False)
    """
    if key is not None:
        return torch.randn(size, generator=key.torch(), dtype=torch.float64)
    result = np.empty(size)
    for start in range(0, size, _CHUNK):
        stop = min(start + _CHUNK, size)
        result[start:stop] = _secure(stop - start)
    return torch.from_numpy(result)


def _secure(size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    from scipy.special import ndtri

    bits = np.frombuffer(secrets.token_bytes(8 * _SUMMED * size), dtype=np.uint64)
    # 53 bits each, in the middle of their steps: 0 and 1, whose quantiles are infinite, are not among them.
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    draws: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = ndtri(uniform).reshape(_SUMMED, size)
    draws = draws.sum(axis=0)
    draws /= _SUMMED**0.5
    return draws
