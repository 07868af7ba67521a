"""Learning rates over the rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from prefed.core import Plain, Round, State, Upload
from prefed.methods.base.settings import TrainingSettings

__all__ = ["DECAY", "advance", "announce", "begin", "rate"]

DECAY = 0.8
"""The plateau schedule's factor."""


def begin(settings: TrainingSettings) -> dict[str, Plain]:
    """What the server remembers of the schedule before the first round."""
    return {"rate": 1.0, "last_loss": None} if settings.schedule == "plateau" else {}


def announce(server: State) -> dict[str, float]:
    """What the server must tell clients of the schedule: the plateau's factor, else nothing."""
    told = server.values.get("rate")
    return {"rate": told} if isinstance(told, float) else {}


def rate(
    first: float, settings: TrainingSettings, now: Round, rounds: int, scalars: Mapping[str, float]
) -> float:
    """This round's learning rate, where the first round's is ``first``.

    Cosine gives lr_min + ½ (first − lr_min)(1 + cos(π (t − 1) / T)) in round t of T, so that the first round
    has ``first`` and a round after the last would have lr_min; a rate below lr_min stays.

    Args:
        first: the shared tensors' rate, or that of what is personal.
        settings: name the schedule.
        now: the round t.
        rounds: T.
        scalars: those of the download, in which :func:`announce` put the plateau's factor.
    """
    if settings.schedule == "cosine":
        low = min(settings.lr_min, first)
        return low + (first - low) * (1 + math.cos(math.pi * (now.number - 1) / rounds)) / 2
    return first * scalars.get("rate", 1.0)


def advance(server: State, uploads: Sequence[Upload], *, robust: bool = False) -> State:
    """The server's state after a round: the plateau's factor falls if the loss rose.

    The loss is the mean of the uploads' ``loss`` by n_i, compared with that of the round before. Uploads
    without a loss have no say.

    Args:
        server: the state after the merge.
        uploads: those that were merged.
        robust: take the median of the losses in the place of their mean, so that less than half of the
            clients cannot choose everybody's rate.
    """
    told, last = server.values.get("rate"), server.values.get("last_loss")
    given = [(upload.weight, upload.scalars["loss"]) for upload in uploads if "loss" in upload.scalars]
    # Exact sums: the order in which replies came must not move a bit of what clients are told.
    weight = math.fsum(weight for weight, _ in given)
    if not isinstance(told, float) or weight <= 0:
        return server
    if robust:
        # A client may send a whole number as one without a point, and what is kept is a float.
        loss = float(statistics.median(value for _, value in given))
    else:
        loss = math.fsum(weight * value for weight, value in given) / weight
    rose = isinstance(last, float) and loss > last
    return server.update(values={"rate": told * DECAY if rose else told, "last_loss": loss})
