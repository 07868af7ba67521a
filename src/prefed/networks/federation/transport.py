"""The interface of transports between a hub and its sites."""

from __future__ import annotations

from collections.abc import Collection, Set
from contextlib import AbstractContextManager
from typing import Protocol


class UnreachableError(RuntimeError):
    """A site cannot be reached or did not answer in time."""


class FederationError(RuntimeError):
    """The federation cannot continue. Complete rounds are kept."""


class TooLongError(RuntimeError):
    """A request is longer than the site accepts."""


class LongAnswerError(RuntimeError):
    """An answer is longer than allowed. It is not read."""


class Transport(AbstractContextManager["Transport"], Protocol):
    """Sends requests to sites and returns their answers. Certificates authenticate both sides.

    A request may be delivered several times; sites answer each repetition alike. Methods are thread-safe.
    """

    def restrict(self, sites: Collection[str]) -> None:
        """Exchange messages only with these sites. Others are not connected."""

    def connected(self) -> Set[str]:
        """The reachable sites.

        Raises:
            FederationError: the transport failed and cannot be restarted.
        """

    def call(self, site: str, request: bytes, timeout: float, most: int) -> bytes:
        """Send a request to a site and return its answer.

        Args:
            timeout: seconds to wait for the answer.
            most: maximum bytes of the answer.

        Raises:
            LongAnswerError: the answer is longer than ``most``.
            UnreachableError: there is no answer in time.
            TooLongError: the request is longer than the site accepts.
            FederationError: as :meth:`connected`.
        """
