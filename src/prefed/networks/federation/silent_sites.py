"""Backoff for sites that do not answer. A site is set aside after its third time-out."""

from __future__ import annotations

from dataclasses import dataclass

from prefed.core import Plain

ASIDE = 3
"""Time-outs after which a site gets no more requests until the run is resumed."""
FORGIVEN = 10
"""Consecutive rounds with answers that cancel one time-out."""


@dataclass
class Silence:
    """Backoff state of one site.

    Attributes:
        count: unanswered requests, minus those cancelled by later answers.
        why: the reason of the last one.
        again: the first round in which the site gets requests again; ``None`` if it is set aside.
    """

    count: int = 0
    why: str = ""
    again: int | None = 0
    _answered: int = 0
    _last: int = 0

    def note(self, number: int, why: str) -> None:
        """Record an unanswered request. The first costs the site one round, the second three."""
        self.count, self.why, self._answered = self.count + 1, why, 0
        self.again = None if self.count >= ASIDE else number + 2**self.count

    def answer(self, number: int) -> None:
        """Record an answered request."""
        if number > self._last:
            self._last, self._answered = number, self._answered + 1
        if self._answered >= FORGIVEN:
            self.count, self._answered = max(0, self.count - 1), 0

    def what_follows(self) -> str:
        """The consequence for the site, as part of a warning.

        >>> silence = Silence()
        >>> silence.note(4, "no answer within 600 seconds")
        >>> silence.what_follows()
        'it can rejoin from round 6'
        """
        if self.again is not None:
            return f"it can rejoin from round {self.again}"
        return (
            f"it is set aside after {self.count} unanswered requests: run the same command with --resume to "
            "include it again, with a longer --visit if its visits take longer"
        )

    def figures(self) -> dict[str, Plain]:
        """Fields for the record of the round."""
        return {"silences": self.count, "why": self.why, "asked_again": self.again}
