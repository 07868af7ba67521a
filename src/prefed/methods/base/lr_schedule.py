"""Learning rates over the rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from prefed.core import Plain, Round, State, Upload
from prefed.methods.base.settings import TrainingSettings

DECAY = 0.8
"""The plateau schedule's factor."""


def begin(settings: TrainingSettings) -> dict[str, Plain]:
    """The schedule's values in the server's first state."""
    return {"rate": 1.0, "last_loss": None} if settings.schedule == "plateau" else {}


def announce(server: State) -> dict[str, float]:
    """The schedule's numbers in a download: the plateau's factor, and none for other schedules."""
    factor = server.values.get("rate")
    return {"rate": factor} if isinstance(factor, float) else {}


def rate(
    first: float, settings: TrainingSettings, now: Round, rounds: int, scalars: Mapping[str, float]
) -> float:
    """This round's learning rate, where the first round's is ``first``.

    Cosine gives lr_min + ½ (first − lr_min)(1 + cos(π (t − 1) / T)) in round t of T. So the first round has
    ``first``, and a round after the last would have lr_min. A rate below lr_min does not change.

    Args:
        first: the rate of the shared or of the personal tensors.
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

    The loss is the mean of the uploads' ``loss``, weighted by n_i. It is compared with the loss of the round
    before. Uploads without a loss do not count.

    Args:
        server: the state after the merge.
        uploads: those that were merged.
        robust: take the median of the losses instead of their mean, so that less than half of the clients
            cannot choose everybody's rate.
    """
    factor, last = server.values.get("rate"), server.values.get("last_loss")
    losses = [(upload.weight, upload.scalars["loss"]) for upload in uploads if "loss" in upload.scalars]
    # Sums are exact: the order in which replies came must not change a bit of the rate.
    weight = math.fsum(weight for weight, _ in losses)
    if not isinstance(factor, float) or weight <= 0:
        return server
    if robust:
        # A client may send a whole number without a decimal point; the state holds a float.
        loss = float(statistics.median(value for _, value in losses))
    else:
        loss = math.fsum(weight * value for weight, value in losses) / weight
    rose = isinstance(last, float) and loss > last
    return server.update(values={"rate": factor * DECAY if rose else factor, "last_loss": loss})
