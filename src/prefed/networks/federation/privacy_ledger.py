"""What a site's clients have given away under local noise, and the answers that gave it away.

Noise is the operating system's, so a visit that is done again draws other noise: a second release of the same
numbers. Therefore an answer is on the disk before it leaves, and the same request gets the same bytes, also
after this machine or the hub was killed.

Several Gaussian releases are as good as one. With noise multipliers z₁, z₂, …, of any runs, their Rényi
divergences add up to that of a single release with 1/z² = 1/z₁² + 1/z₂² + … (Mironov 2017, arXiv:1702.07476,
propositions 1 and 7). So one number for each client is the whole account.
"""

from __future__ import annotations

from pathlib import Path

from prefed.core import Privacy, files
from prefed.networks.federation.config import Limits
from prefed.networks.federation.limits import RefusalError
from prefed.privacy import Guarantee
from prefed.privacy.accountant import AccountantError
from prefed.store import StoreError

_SPENT = "spent.json"


class Releases:
    """The account of a site, over all runs, and the answers of each run's last round.

    Args:
        folder: the site's state.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def answer(self, run: str, number: int, key: str) -> bytes | None:
        """The answer that a request of round ``number`` has had; ``None`` if it has had none.

        Args:
            key: of the request; see :func:`prefed.core.files.digest`.
        """
        path = self._path(run, number, key)
        return path.read_bytes() if path.exists() else None

    def count(self, client: str, privacy: Privacy) -> None:
        """Enter a release of a client into the account, before its visit.

        So one whose upload is withheld, or whose process dies, is counted too: that also says something of
        the pairs.

        Raises:
            WriteError: the visit must not be.
            StoreError: as :meth:`spent`.
        """
        spent = {**self.spent(), client: self._after(client, privacy)}
        files.write(self._folder / _SPENT, files.dumps_with_digest({"spent": spent}), mode=0o600)

    def keep(self, run: str, number: int, key: str, answer: bytes) -> None:
        """Keep the answer of a release that was counted; then it may leave.

        Raises:
            WriteError: it must not leave.
        """
        path = self._path(run, number, key)
        files.private_folder(path.parent)
        files.write(path, answer, mode=0o600)
        for other in path.parent.iterdir():
            if other.name < f"{number:06d}":
                files.remove(other)

    def check(self, client: str, privacy: Privacy, limits: Limits) -> None:
        """Refuse one more release of a client that would spend more than it may.

        Raises:
            RefusalError: it would, or nothing says what it spends.
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
                f"[limits] epsilon: with this upload the client would have spent {epsilon:.3g} in all runs, "
                f"and may spend {limits.epsilon:g} at delta {limits.delta:g}"
            )

    def spent(self) -> dict[str, float]:
        """Client → Σ 1/z² over all that it has released.

        Raises:
            StoreError: the file is damaged.
        """
        path = self._folder / _SPENT
        if not path.exists():
            return {}
        try:
            content = files.loads_with_digest(path.read_bytes())
            return {str(client): float(value) for client, value in content["spent"].items()}
        except (files.DamagedError, KeyError, AttributeError, TypeError, ValueError) as error:
            raise StoreError(
                f"{path} is damaged: {error}; without it nobody knows what clients have given away: put a "
                "copy of it back"
            ) from error

    def _after(self, client: str, privacy: Privacy) -> float:
        assert privacy.noise_multiplier
        return self.spent().get(client, 0.0) + privacy.noise_multiplier**-2

    def _path(self, run: str, number: int, key: str) -> Path:
        return self._folder / "runs" / run / "answers" / f"{number:06d}-{key}"


def epsilon_of(spent: float, delta: float) -> float:
    """ε of releases that together come to ``spent``, for clients any of whose pairs are replaced.

    Raises:
        AccountantError: ``dp-accounting`` is not installed.
    """
    if not spent:
        return 0.0
    # One client is the whole cohort of its release: nothing is drawn, and the hub sees each upload.
    epsilon = Guarantee(spent**-0.5, replaced=True, sampling="none", clients=1, cohort=1).epsilon(1, delta)
    assert epsilon is not None
    return epsilon
