"""What carries messages between a hub and its sites."""

from __future__ import annotations

from collections.abc import Set
from contextlib import AbstractContextManager
from typing import Protocol


class UnreachableError(RuntimeError):
    """A site did not answer in time, or cannot be reached."""


class FederationError(RuntimeError):
    """The federation cannot go on; the message says why and what to do. Whole rounds are kept."""


class TooLongError(RuntimeError):
    """A request is longer than the site takes in."""


class LongAnswerError(RuntimeError):
    """An answer is longer than may come. It is not taken in."""


class Transport(AbstractContextManager["Transport"], Protocol):
    """Carries requests to sites and their answers back, between parties that know each other by certificates.

    It may deliver one request several times: sites answer each repetition alike. Several threads may call it.
    """

    def connected(self) -> Set[str]:
        """The sites that can be reached at the moment.

        Raises:
            FederationError: the transport itself is gone and cannot be started again.
        """

    def call(self, site: str, request: bytes, timeout: float, most: int) -> bytes:
        """A site's answer.

        Args:
            most: bytes of the longest that is taken in.

        Raises:
            LongAnswerError: its answer is longer.
            UnreachableError: there is none within ``timeout`` seconds.
            TooLongError: the site takes in no request of this length.
            FederationError: as :meth:`connected`.
        """
