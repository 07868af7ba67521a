"""Named randomness: random numbers depend on the name of their purpose, not on the order of draws."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from prefed.core.lazy import np, torch


@dataclass(frozen=True)
class Key:
    """Name of a stream of random numbers.

    Equal seeds and paths give equal numbers, wherever and in whatever order they are drawn. Different paths
    give independent streams.

    >>> key = Key(42).at("round", 3).at("client", "ward-7")
    >>> int(key.at("batches").numpy().integers(100)) == int(key.at("batches").numpy().integers(100))
    True
    >>> key.at("batches").number() == key.at("dropout").number()
    False
    """

    seed: int
    path: tuple[str, ...] = ()

    def at(self, name: str, value: int | str | None = None) -> Key:
        """Return the key with one more step in its path: ``key.at("round", 3)`` or ``key.at("batches")``."""
        step = repr(name) if value is None else f"{name!r}={value!r}"
        return Key(self.seed, (*self.path, step))

    def number(self) -> int:
        """Return a 63-bit seed: the first bits of SHA-256 over seed and path."""
        text = "\x1f".join((str(self.seed), *self.path))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def numpy(self) -> np.random.Generator:
        """Return a new NumPy generator at the start of this stream."""
        return np.random.Generator(np.random.Philox(self.number()))

    def torch(self, device: str = "cpu") -> torch.Generator:
        """Return a new PyTorch generator at the start of this stream."""
        return torch.Generator(device).manual_seed(self.number())

    def seed_device(self, device: str) -> None:
        """Seed PyTorch's global generators of devices of this type."""
        # torch.manual_seed formats the call stack for each kind of device that is not in use.
        seed = torch.default_generator.manual_seed if device == "cpu" else torch.manual_seed
        seed(self.number())


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
