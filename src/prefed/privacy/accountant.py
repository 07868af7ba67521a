"""Privacy accounting with the package ``dp-accounting``.

Its Rényi accountant expects noise relative to the *sensitivity*, the maximum change of the sum by one client.
It does not double the sensitivity if neighbouring data sets replace a client; this module does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from prefed.core import Privacy

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from dp_accounting.rdp import RdpAccountant

Sampling = Literal["none", "fixed", "poisson"]

_ORDERS = (*range(2, 33), 40, 48, 64, 128)
"""Rényi orders for sampled cohorts. For other orders the accountant takes minutes or does not converge."""


class AccountantError(RuntimeError):
    """The accountant is not installed, or no noise satisfies the target."""


@dataclass(frozen=True)
class Guarantee:
    """The differential privacy guarantee of one release.

    Attributes:
        noise_multiplier: standard deviation of the noise divided by the clip C.
        replaced: neighbouring data sets replace one client (sensitivity 2 C); otherwise one client sends
            nothing (sensitivity C).
        sampling: amplification by sampling: none, a fixed number of clients without replacement, or Poisson.
        clients: number of clients from which a cohort is drawn.
        cohort: the size of a cohort, or its expectation.
        colluders: sites whose noise does not count, under ``distributed``, where noise is discrete and has
            the Gaussian's divergences (:mod:`prefed.privacy.distributed`); ``None`` for other kinds.
    """

    noise_multiplier: float
    replaced: bool
    sampling: Sampling
    clients: int
    cohort: int
    colluders: int | None = None

    @property
    def adjacency(self) -> str:
        """Description of neighbouring data sets."""
        return "one client's pairs are replaced" if self.replaced else "one client sends nothing"

    @property
    def bound(self) -> str:
        """Description of the composition of releases."""
        drawn = {
            "none": "Gaussian, cohorts known",
            "fixed": f"Gaussian on {self.cohort} of {self.clients} clients drawn without replacement",
            "poisson": f"Gaussian on each client with probability {self.cohort}/{self.clients}",
        }
        discrete = "" if self.colluders is None else f"discrete, hub and {self.colluders} sites colluding, "
        return f"Rényi: {discrete}{drawn[self.sampling]}"

    def epsilon(self, releases: int, delta: float, votes: int = 0) -> float | None:
        """ε after ``releases`` releases; ``None`` without noise.

        Args:
            votes: further releases with the same noise, of all clients, so that no sampling amplifies them.

        Raises:
            AccountantError: ``dp-accounting`` is not installed.
        """
        if not releases + votes:
            return 0.0
        return _epsilon(self, releases, delta, votes) if self.noise_multiplier else None

    def noise_for(self, epsilon: float, releases: int, delta: float) -> float:
        """The smallest noise multiplier for ``epsilon`` after ``releases`` releases, rounded up to four
        digits.

        :attr:`noise_multiplier` is ignored.

        Raises:
            AccountantError: ``dp-accounting`` is not installed, or no noise multiplier below 2^30 suffices.
        """
        accounting = require()

        def event(noise: float) -> DpEvent:
            return accounting.SelfComposedDpEvent(self._event(noise), releases)

        with _quiet():
            try:
                found = accounting.calibrate_dp_mechanism(
                    lambda: _accountant(self),
                    event,
                    epsilon,
                    delta,
                    accounting.LowerEndpointAndGuess(0.01, 1.0),
                    tol=1e-4,
                )
            except accounting.mechanism_calibration.NoBracketIntervalFoundError as error:
                raise AccountantError(
                    f"no noise gives epsilon {epsilon:g} at delta {delta:g}: raise epsilon or delta"
                ) from error
        return math.ceil(float(found) * 1e4) / 1e4

    def _event(self, noise: float, sampled: bool = True) -> DpEvent:
        accounting = require()
        gaussian = accounting.GaussianDpEvent(noise / (2 if self.replaced else 1))
        if not sampled:
            return gaussian
        if self.sampling == "fixed":
            # Theorem 27 of arXiv:1808.00087 with the χ-divergences of normal distributions, less than those
            # of other mechanisms. The proof is in tests/unit/test_accountant.py.
            return accounting.SampledWithoutReplacementDpEvent(self.clients, self.cohort, gaussian)
        if self.sampling == "poisson":
            return accounting.PoissonSampledDpEvent(self.cohort / self.clients, gaussian)
        return gaussian


def guarantee_of(
    privacy: Privacy, clients: int, cohort: int, sampling: Literal["fixed", "poisson"] = "fixed"
) -> Guarantee:
    """The guarantee of ``[privacy]``.

    With ``kind = "local"`` the server sees each upload, so neighbouring data sets replace a client. For
    sampling without replacement a bound is known only for replaced clients; it also covers clients that send
    nothing.

    >>> central = Privacy(kind="central", clip=1.0, noise_multiplier=1.0, delta=1e-5, secret_cohorts=True)
    >>> guarantee_of(central, 100, 10).adjacency, guarantee_of(central, 100, 10, "poisson").adjacency
    ("one client's pairs are replaced", 'one client sends nothing')
    """
    drawn: Sampling = sampling if privacy.secret_cohorts and cohort < clients else "none"
    replaced = privacy.kind == "local" or drawn == "fixed"
    colluders = privacy.colluding(privacy.sites or clients) if privacy.kind == "distributed" else None
    return Guarantee(privacy.noise_multiplier or 0.0, replaced, drawn, clients, cohort, colluders)


@lru_cache(maxsize=4096)
def _epsilon(guarantee: Guarantee, releases: int, delta: float, votes: int) -> float:
    one = _one(guarantee)
    require()
    from dp_accounting.rdp import compute_epsilon

    # Rényi divergences of releases add up; computing those of one release is slow and cached.
    divergences = one.rdp * releases + (_one(guarantee, sampled=False).rdp * votes if votes else 0.0)
    epsilon, _ = compute_epsilon(one.orders, divergences, delta)
    return float(epsilon)


@lru_cache(maxsize=64)
def _one(guarantee: Guarantee, sampled: bool = True) -> RdpAccountant:
    """The accountant after one release."""
    accountant = _accountant(guarantee)
    with _quiet():
        return accountant.compose(guarantee._event(guarantee.noise_multiplier, sampled))


def _accountant(guarantee: Guarantee) -> RdpAccountant:
    relation = require().NeighboringRelation
    neighbors = relation.REPLACE_ONE if guarantee.replaced else relation.REPLACE_SPECIAL
    from dp_accounting.rdp import RdpAccountant

    return RdpAccountant(None if guarantee.sampling == "none" else _ORDERS, neighbors)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the accountant's messages about skipped orders."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def require() -> ModuleType:
    """Import the package ``dp_accounting``.

    Raises:
        AccountantError: it is not installed.
    """
    try:
        import dp_accounting
    except ImportError as error:
        raise AccountantError(
            "[privacy] with noise needs the package dp-accounting: install it with pip install "
            "'prefed[privacy]'"
        ) from error
    module: ModuleType = dp_accounting
    return module
