r"""Distributed noise: updates as whole numbers, and discrete Gaussian noise that each site adds to its share.

With n sites, of which at most c collude, m clients, clip C and noise multiplier z, site s sends (masked)::

    Σ_i trunc(Δ_i / γ)  +  N_Z(0, 4^k)        γ = z C / (√(n − c) 2^k)        modulo 2^32

Δ_i is a clipped update of one of its clients, ‖Δ_i‖ ≤ C. Truncation towards 0 makes no update longer, so one
client changes the sum by at most Δ = C/γ = 2^k √(n − c) / z in the 2-norm, exactly. N_Z is the discrete
Gaussian. With the noise of the n − c honest sites a release of d numbers is ½ε²-concentrated differentially
private, ε² ≤ 1/z² + τ d/2, τ = 10 Σ_{j=1}^{n−c−1} exp(−2π² 4^k j/(j+1)) (Kairouz, Liu and Steinke 2021,
arXiv:2102.06387, theorem 1, first term). With k ≥ 4 the second term is below 10^-1000 for any number of sites
and numbers, so ε is that of the continuous Gaussian with multiplier z. Reducing a sum modulo 2^32 reveals
nothing more.

Metrics are sums, too (:class:`MetricSum`): k shares of a client, each less ½, are an update with C = √k/2, so
with the same z they have the same ε.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefed.core import Key, Privacy
from prefed.core.lazy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Source = Callable[[int], bytes]
"""Number of bytes → so many random bytes."""

TAIL = 12.0
"""Standard deviations of noise for which there is room in a word: a number exceeds them with probability
below 2 exp(−72) < 10^-31, and then only its value is wrong."""
_FINEST, _COARSEST = 24, 4
"""Bounds on k. Above 24 the sampler's numbers would exceed 63 bits, below 4 noise would not be Gaussian."""
_CHUNK = 1 << 16
_LEAST_WORDS = 64


@dataclass(frozen=True)
class Grid:
    """The fixed-point numbers of a sum.

    Attributes:
        step: γ, the difference between two neighbouring numbers.
        bits: k; a site's noise has a standard deviation of 2^k steps.
        length: C/γ, the largest norm of a client's update in steps.
        sites: n.
        clients: m.
    """

    step: float
    bits: int
    length: float
    sites: int
    clients: int

    @classmethod
    def of(cls, privacy: Privacy, sites: int, clients: int) -> Grid:
        """The finest grid on which no honest sum leaves 32 bits.

        Args:
            sites: number of sites that add noise.
            clients: number of clients that may be in a sum.

        Raises:
            ValueError: too few sites for the colluders, or so many clients that sums could wrap around.
        """
        honest = sites - privacy.colluding(sites)
        if honest < 2 or sites < 3:
            raise ValueError(
                f"with {sites} sites and {privacy.colluding(sites)} colluders fewer than two are honest, or "
                "there are fewer than three sites: lower [privacy] colluders or add sites"
            )
        noise = privacy.noise_multiplier or 0.0
        room = clients * math.sqrt(honest) / noise + TAIL * math.sqrt(sites)
        bits = min(_FINEST, math.floor(math.log2((2**31 - 1) / room)))
        if bits < _COARSEST:
            raise ValueError(
                f"a sum over {clients} clients would not fit into 32 bits with noise_multiplier = {noise:g}: "
                "raise noise_multiplier"
            )
        step = privacy.noise / (math.sqrt(honest) * 2**bits)
        return cls(step, bits, (privacy.clip or 0.0) / step, sites, clients)

    def words(self, update: NDArray[np.float64]) -> NDArray[np.int64]:
        """A client's clipped update in steps, rounded towards 0, with a norm of at most :attr:`length`."""
        scaled = update / self.step
        if not np.isfinite(scaled).all():
            raise ValueError("the update is NaN or infinite")
        while True:
            scaled *= min(1.0, self.length / (float(np.linalg.norm(scaled)) or 1.0))
            words = np.trunc(scaled).astype(np.int64)
            # The norm is now below 2^31 but for rounding, so the sum of squares is exact.
            if int(words @ words) <= self.length**2:
                return words
            scaled *= 1 - 2.0**-40

    def noise(self, size: int, source: Source) -> NDArray[np.int64]:
        """A site's noise: ``[size]`` draws of the discrete Gaussian, in steps."""
        return discrete_gaussian(size, self.bits, source)

    def plausible(self, total: NDArray[np.int64]) -> bool:
        """Return whether a sum can be one of honest sites; masks that do not cancel give one that cannot.

        The norm of the noise exceeds √n 2^k √(d + 2 √(72 d) + 144) with probability below exp(−72) (Hsu,
        Kakade and Zhang 2012, theorem 2.1; a discrete Gaussian is subgaussian with its own parameter).
        """
        size = len(total)
        most = math.sqrt(self.sites * (size + 2 * math.sqrt(72 * size) + 144)) * 2**self.bits
        return bool(np.linalg.norm(total) <= self.clients * self.length + most)

    def numbers(self, total: NDArray[np.int64]) -> NDArray[np.float64]:
        """A sum in the unit of updates."""
        numbers: NDArray[np.float64] = total.astype(np.float64) * self.step
        return numbers

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise of all sites on a number of a sum, in the unit of updates."""
        return self.step * float(2**self.bits * math.sqrt(self.sites))


class MetricError(ValueError):
    """A client's metric cannot be in a sum. The message names it."""


@dataclass(frozen=True)
class MetricSum:
    """Clients' metrics as a sum: a client adds each of its k shares less ½, and 0 without valid ones.

    Attributes:
        names: the metrics, which every client has.
    """

    names: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of words. Some are only noise, because a sum of few random words is often plausible."""
        return max(_LEAST_WORDS, len(self.names))

    def grid(self, privacy: Privacy, sites: int, clients: int) -> Grid:
        """The fixed-point numbers of the sum; as :meth:`Grid.of`."""
        return Grid.of(privacy.model_copy(update={"clip": math.sqrt(len(self.names)) / 2}), sites, clients)

    def steps(self, metrics: Mapping[str, float]) -> NDArray[np.float64]:
        """What a client adds.

        Raises:
            MetricError: a metric is missing, or not between 0 and 1.
        """
        for name in self.names:
            if not 0 <= metrics.get(name, math.nan) <= 1:
                raise MetricError(f"{name!r} is missing or not between 0 and 1")
        steps = np.zeros(self.size)
        steps[: len(self.names)] = [metrics[name] - 0.5 for name in self.names]
        return steps

    def means(self, total: NDArray[np.float64], clients: int) -> dict[str, float]:
        """Metric → its mean over clients, within [0, 1]; ``total`` is a sum in the unit of steps."""
        means = np.clip(0.5 + total[: len(self.names)] / clients, 0.0, 1.0)
        return dict(zip(self.names, means.tolist(), strict=True))


@dataclass(frozen=True)
class VoteSum:
    """Clients' votes on pairs of completions as a sum: each is between −1 and 1, so C = √pairs."""

    pairs: int

    @property
    def size(self) -> int:
        """Number of words; as :attr:`MetricSum.size`."""
        return max(_LEAST_WORDS, self.pairs)

    def grid(self, privacy: Privacy, sites: int, clients: int) -> Grid:
        """The fixed-point numbers of the sum; as :meth:`Grid.of`."""
        return Grid.of(privacy.model_copy(update={"clip": math.sqrt(self.pairs)}), sites, clients)

    def steps(self, votes: NDArray[np.floating]) -> NDArray[np.float64]:
        """What a client adds."""
        steps = np.zeros(self.size)
        steps[: self.pairs] = np.clip(votes, -1, 1)
        return steps

    def votes(self, total: NDArray[np.float64]) -> NDArray[np.int64]:
        """A sum in the unit of steps, in whole votes."""
        return np.rint(total[: self.pairs]).astype(np.int64)


def source_of(key: Key | None) -> Source:
    """The random bytes of a key, for simulations; without one, the operating system's secure ones."""
    return secrets.token_bytes if key is None else key.numpy().bytes


def discrete_gaussian(size: int, bits: int, source: Source) -> NDArray[np.int64]:
    """``[size]`` exact draws of the discrete Gaussian with parameter σ = 2^bits: P(x) ∝ exp(−x²/(2 σ²)).

    Canonne, Kamath and Steinke 2020 (arXiv:2004.00010), algorithms 1 to 3, on arrays. All probabilities are
    ratios of whole numbers that are compared with random bits, so no rounding makes the draws inexact.
    """
    draw = _Draws(source)
    parts, missing = [], size
    while missing:
        found = draw.gaussian(min(_CHUNK, 2 * missing + 64), bits)[:missing]
        parts.append(found)
        missing -= len(found)
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


class _Draws:
    """Exact random draws on arrays."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def gaussian(self, count: int, bits: int) -> NDArray[np.int64]:
        """At most ``count`` draws: a discrete Laplace draw x is kept with exp(−(|x| − σ)²/(2 σ²))."""
        drawn = self.laplace(count, bits)
        return drawn[self.decays((np.abs(drawn) - (1 << bits)) ** 2, 2 * bits + 1)]

    def laplace(self, count: int, bits: int) -> NDArray[np.int64]:
        """At most ``count`` draws of P(x) ∝ exp(−|x|/2^bits)."""
        rest = self.uniform(count, bits)
        rest = rest[self.decays(rest, bits)]
        whole = np.zeros(len(rest), np.int64)
        active = np.arange(len(rest))
        while len(active):
            active = active[self.decays(np.ones(len(active), np.int64), 0)]
            whole[active] += 1
        drawn = rest + (whole << bits)
        negative = self.uniform(len(drawn), 1) == 1
        keep = ~(negative & (drawn == 0))
        signed: NDArray[np.int64] = np.where(negative, -drawn, drawn)[keep]
        return signed

    def decays(self, numerator: NDArray[np.int64], bits: int) -> NDArray[np.bool_]:
        """True with probability exp(−numerator/2^bits)."""
        whole = numerator >> bits
        result = self._decays_within_one(numerator - (whole << bits), bits)
        active = np.flatnonzero(result & (whole > 0))
        passed = 0
        while len(active):
            one = self._decays_within_one(np.ones(len(active), np.int64), 0)
            result[active[~one]] = False
            passed += 1
            active = active[one]
            active = active[whole[active] > passed]
        return result

    def _decays_within_one(self, numerator: NDArray[np.int64], bits: int) -> NDArray[np.bool_]:
        """True with probability exp(−numerator/2^bits), for numerators of at most 2^bits.

        The first K at which a coin of probability γ/K fails is odd with probability exp(−γ).
        """
        result = np.ones(len(numerator), np.bool_)
        active, trial = np.arange(len(numerator)), 1
        while len(active):
            active = active[self.uniform(len(active), bits) < numerator[active]]
            active = active[self.below(len(active), trial) == 0]
            trial += 1
            result[active] = trial % 2 == 1
        return result

    def uniform(self, count: int, bits: int) -> NDArray[np.int64]:
        """Draws of 0, …, 2^bits − 1."""
        if bits == 0:
            return np.zeros(count, np.int64)
        words = np.frombuffer(self._source(8 * count), "<u8")
        return (words >> np.uint64(64 - bits)).astype(np.int64)

    def below(self, count: int, most: int) -> NDArray[np.int64]:
        """Draws of 0, …, most − 1: those of 32 bits that are not below a multiple of ``most`` are redrawn."""
        if most == 1:
            return np.zeros(count, np.int64)
        limit = 2**32 - 2**32 % most
        drawn = self.uniform(count, 32)
        while len(again := np.flatnonzero(drawn >= limit)):
            drawn[again] = self.uniform(len(again), 32)
        return drawn % most
