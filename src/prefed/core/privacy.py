"""The ``[privacy]`` table: figures that must not leave a client, whatever the method."""

from pydantic import Field

from prefed.core.strict import StrictModel


class Privacy(StrictModel):
    """Which figures of one client may be sent or shown.

    A mean over few pairs reveals much about each of them; over one pair it is that pair's figure.

    >>> four = Privacy(minimum_pairs=4)
    >>> four.may_report(4), four.may_report(3), Privacy().may_report(1)
    (True, False, True)
    """

    minimum_pairs: int = Field(
        0,
        ge=0,
        description="a client with fewer training pairs sends no loss, and one judged on fewer pairs counts "
        "in means alone; 0: no bound, for simulations; 4 is a start where clients are people",
    )

    def may_report(self, pairs: float) -> bool:
        """Whether a mean over so many pairs of one client may be sent or shown for that client.

        All code that sends or shows such a mean asks this, at the client and at the server.
        """
        return pairs >= self.minimum_pairs


NO_MINIMUM = Privacy()
"""No bound: the default of a simulation."""
