"""Privacy ledger of a site: the loss of each client under local or distributed noise, and earlier answers.

Noise comes from the operating system, so repeating a visit would release the same values with new noise.
Therefore each answer is stored before it is sent, and a repeated request gets the same bytes, even after the
site or the hub was killed.

Gaussian releases with noise multipliers z₁, z₂, …, of any runs, compose to one release with
1/z² = 1/z₁² + 1/z₂² + … (Mironov 2017, arXiv:1702.07476, propositions 1 and 7). The ledger stores this sum
for each client.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prefed.core import Privacy, files
from prefed.networks.federation.config import Limits
from prefed.networks.federation.site_limits import RefusalError
from prefed.privacy import Guarantee
from prefed.privacy.accountant import AccountantError
from prefed.store import StoreError

_SPENT = "spent.json"


class Releases:
    """The ledger of a site over all runs, and the answers of each run's last round.

    Args:
        folder: the site's state folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def answer(self, run: str, number: int, key: str) -> bytes | None:
        """The stored answer to a request of round ``number``, or ``None``.

        Args:
            key: digest of the request; see :func:`prefed.core.files.digest`.
        """
        path = self._path(run, number, key)
        return path.read_bytes() if path.exists() else None

    def claim(self, run: str, number: int, name: str, key: str) -> bool:
        """Record that a request takes part in a sum; return whether no other request has under this name.

        Args:
            name: the exchange and the attempt.
            key: as for :meth:`answer`.

        Raises:
            WriteError: it cannot be recorded; the site must not take part.
        """
        path = self._path(run, number, name)
        if path.exists():
            return path.read_bytes() == key.encode()
        files.private_folder(path.parent)
        files.write(path, key.encode(), mode=0o600)
        return True

    def count(self, clients: Iterable[str], privacy: Privacy) -> None:
        """Record a release of each client before its visit.

        Visits that fail or are withheld count too, because a failure also depends on the pairs.

        Raises:
            WriteError: the ledger cannot be written; the visit must not take place.
            StoreError: as :meth:`spent`.
        """
        spent = {**self.spent(), **{client: self._after(client, privacy) for client in clients}}
        files.write(self._folder / _SPENT, files.dumps_with_digest({"spent": spent}), mode=0o600)

    def keep(self, run: str, number: int, key: str, answer: bytes) -> None:
        """Store the answer of a recorded release, before it is sent.

        Raises:
            WriteError: it cannot be stored and must not be sent.
        """
        path = self._path(run, number, key)
        files.private_folder(path.parent)
        files.write(path, answer, mode=0o600)
        for other in path.parent.iterdir():
            if other.name < f"{number:06d}":
                files.remove(other)

    def check(self, client: str, privacy: Privacy, limits: Limits) -> None:
        """Check another release of a client against ``[limits] epsilon``.

        Raises:
            RefusalError: it would exceed the budget, or ε cannot be computed.
            StoreError: as :meth:`spent`.
        """
        if limits.epsilon is None:
            return
        try:
            epsilon = epsilon_of(self._after(client, privacy), limits.delta)
        except AccountantError as error:
            raise RefusalError(f"[limits] epsilon: {error}") from error
        if epsilon > limits.epsilon:
            raise RefusalError(
                f"[limits] epsilon: with this upload the client would reach epsilon {epsilon:.3g} over all "
                f"runs; at most {limits.epsilon:g} is allowed at delta {limits.delta:g}"
            )

    def spent(self) -> dict[str, float]:
        """Client → Σ 1/z² over all its releases.

        Raises:
            StoreError: the ledger is damaged.
        """
        path = self._folder / _SPENT
        if not path.exists():
            return {}
        try:
            content = files.loads_with_digest(path.read_bytes())
            return {str(client): float(value) for client, value in content["spent"].items()}
        except (files.DamagedError, KeyError, AttributeError, TypeError, ValueError) as error:
            raise StoreError(
                f"{path} is damaged: {error}; without it the privacy loss of the clients is unknown: restore "
                "it from a copy"
            ) from error

    def _after(self, client: str, privacy: Privacy) -> float:
        assert privacy.noise_multiplier
        return self.spent().get(client, 0.0) + privacy.noise_multiplier**-2

    def _path(self, run: str, number: int, key: str) -> Path:
        return self._folder / "runs" / run / "answers" / f"{number:06d}-{key}"


def epsilon_of(spent: float, delta: float) -> float:
    """ε of releases with Σ 1/z² = ``spent``; neighbouring data sets replace all pairs of one client.

    This covers releases of both kinds: a replaced update changes an upload, or a sum, by at most 2 C.

    Raises:
        AccountantError: ``dp-accounting`` is not installed.
    """
    if not spent:
        return 0.0
    # The hub sees each upload: a cohort of one client, without amplification by sampling.
    epsilon = Guarantee(spent**-0.5, replaced=True, sampling="none", clients=1, cohort=1).epsilon(1, delta)
    assert epsilon is not None
    return epsilon
