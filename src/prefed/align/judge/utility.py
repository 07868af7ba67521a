"""The known utility of a synthetic set as a judge."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from prefed.align.judge.base import JudgeError, Question, Verdict, by_score
from prefed.core.text import did_you_mean
from prefed.data import Record
from prefed.data.synthetic import ATTRIBUTES, Taste, attributes, utility

MEAN = "mean"
"""Names the mean taste of all clients."""

_TOLERANCE = 1e-6


class UtilityJudge:
    """The response with the larger utility to a taste is the better one (:mod:`prefed.data.synthetic`)."""

    def __init__(self, taste: Taste) -> None:
        self._taste = taste
        self.identity: Mapping[str, Any] = {"taste": {name: float(w) for name, w in taste.weights.items()}}

    def compare(self, questions: Iterable[Question]) -> Iterator[Verdict]:
        """A verdict for every question, in their order."""
        for question in questions:
            first, second = (utility(text, self._taste) for text in (question.first, question.second))
            yield by_score(first, second, f"utility {first:g} against {second:g}")


def read_taste(name: str, records: Iterable[Record], flipped: Collection[str] = ()) -> Taste:
    """The taste of one client, or the clients' mean, from the utilities that a synthetic set's rows have.

    A utility is the weighted sum of the signs of five attributes. So a client's weights are the solution of
    linear equations, one for each response.

    Args:
        name: a client, or ``"mean"``.
        records: pairs of the set, with ``utility_chosen`` and ``utility_rejected``.
        flipped: clients whose preferences the experiment turned round. Their taste is the opposite one.

    Raises:
        JudgeError: the records have no utilities, none of that client, or too few to tell its weights.
    """
    rows: dict[str, list[tuple[Sequence[int], float]]] = {}
    for record in records:
        utilities = [record.extra.get(column) for column in ("utility_chosen", "utility_rejected")]
        if record.client is None or not all(isinstance(value, int | float) for value in utilities):
            continue
        # A turned pair has its responses swapped, but not its columns.
        sign = -1.0 if record.client in flipped else 1.0
        texts = (record.chosen, record.rejected)[:: int(sign)]
        for text, value in zip(texts, utilities, strict=True):
            signs = attributes(text)
            row = [signs.get(attribute, 0) for attribute in ATTRIBUTES]
            rows.setdefault(record.client, []).append((row, sign * float(value or 0)))
    if not rows:
        raise JudgeError(
            "--judge utility: the run's pairs have no client with the columns utility_chosen and "
            "utility_rejected; only those of prefed.data.synthetic do"
        )
    names = sorted(rows) if name == MEAN else [name]
    if not set(names) <= set(rows):
        raise JudgeError(
            f"--taste {name!r}: no client of the run's data{did_you_mean(name, rows)}; the clients are "
            f"{', '.join(sorted(rows)[:8])}, and {MEAN} is the mean of all"
        )
    weights = np.mean([_weights(client, rows[client]) for client in names], axis=0)
    # Opposite tastes cancel; what rounding leaves of them is no taste.
    return Taste(name, {a: round(float(w), 6) for a, w in zip(ATTRIBUTES, weights, strict=True)})


def _weights(client: str, rows: Sequence[tuple[Sequence[int], float]]) -> Any:
    signs, values = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    weights, _, rank, _ = np.linalg.lstsq(signs, values, rcond=None)
    if rank < len(ATTRIBUTES) or not np.allclose(signs @ weights, values, atol=_TOLERANCE):
        raise JudgeError(
            f"--judge utility: the utilities of {client!r} are not those of prefed.data.synthetic, or are "
            "too few to tell its taste"
        )
    return weights
