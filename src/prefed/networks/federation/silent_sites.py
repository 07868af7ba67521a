"""Sites that do not answer: they are asked less and less often, and set aside after the third silence."""

from __future__ import annotations

from dataclasses import dataclass

from prefed.core import Plain

ASIDE = 3
"""Silences after which a site is asked no more, until the run is resumed."""
FORGIVEN = 10
"""Rounds with answers, one after the other, that make up for one silence."""


@dataclass
class Silence:
    """What a hub remembers of a site's silences.

    Attributes:
        count: requests without an answer, less those that are made up for.
        why: the reason of the last.
        again: the first round in which the site is asked again; ``None``: it is set aside.
    """

    count: int = 0
    why: str = ""
    again: int | None = 0
    _answered: int = 0
    _last: int = 0

    def note(self, number: int, why: str) -> None:
        """A request of a round had no answer. The first costs the site one round, the second three."""
        self.count, self.why, self._answered = self.count + 1, why, 0
        self.again = None if self.count >= ASIDE else number + 2**self.count

    def answer(self, number: int) -> None:
        """A request of a round had one."""
        if number > self._last:
            self._last, self._answered = number, self._answered + 1
        if self._answered >= FORGIVEN:
            self.count, self._answered = max(0, self.count - 1), 0

    def what_follows(self) -> str:
        """What becomes of the site, for a person.

        >>> silence = Silence()
        >>> silence.note(4, "no answer within 600 seconds")
        >>> silence.what_follows()
        'it is left out, and asked again from round 6 on, once it is back'
        """
        if self.again is not None:
            return f"it is left out, and asked again from round {self.again} on, once it is back"
        return (
            f"it is set aside for {self.count} requests without an answer: the same command with --resume "
            "asks it again, with a longer --visit if its visits take longer"
        )

    def figures(self) -> dict[str, Plain]:
        """For the round's record."""
        return {"silences": self.count, "why": self.why, "asked_again": self.again}
