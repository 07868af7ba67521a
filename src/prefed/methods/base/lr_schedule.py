"""Learning-rate schedules over rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from prefed.core import Plain, Round, State, Upload
from prefed.methods.base.settings import TrainingSettings

DECAY = 0.8
"""The factor of the plateau schedule."""


def begin(settings: TrainingSettings) -> dict[str, Plain]:
    """Return the initial state of the schedule."""
    return {"rate": 1.0, "last_loss": None} if settings.schedule == "plateau" else {}


def announce(server: State) -> dict[str, float]:
    """Return the scalars of a download: the factor of a plateau schedule, otherwise nothing."""
    factor = server.values.get("rate")
    return {"rate": factor} if isinstance(factor, float) else {}


def rate(
    first: float, settings: TrainingSettings, now: Round, rounds: int, scalars: Mapping[str, float]
) -> float:
    """Return the learning rate of this round.

    For ``cosine`` it is lr_min + ½ (first − lr_min)(1 + cos(π (t − 1) / T)) in round t of T, or ``first`` if
    that is below lr_min.

    Args:
        first: learning rate of the first round.
        now: the round t.
        rounds: T.
        scalars: scalars of the download, from :func:`announce`.
    """
    if settings.schedule == "cosine":
        low = min(settings.lr_min, first)
        return low + (first - low) * (1 + math.cos(math.pi * (now.number - 1) / rounds)) / 2
    return first * scalars.get("rate", 1.0)


def advance(server: State, uploads: Sequence[Upload], *, robust: bool = False) -> State:
    """Lower the factor of a plateau schedule if the loss increased since the last round.

    The loss is the mean over uploads with a ``loss``, weighted by n_i.

    Args:
        robust: use the median of the losses, which a minority of clients cannot control.
    """
    factor, last = server.values.get("rate"), server.values.get("last_loss")
    losses = [(upload.weight, upload.scalars["loss"]) for upload in uploads if "loss" in upload.scalars]
    # Exact sums do not depend on the order of the uploads.
    weight = math.fsum(weight for weight, _ in losses)
    if not isinstance(factor, float) or weight <= 0:
        return server
    if robust:
        # Clients may send an integer, but the state contains a float.
        loss = float(statistics.median(value for _, value in losses))
    else:
        loss = math.fsum(weight * value for weight, value in losses) / weight
    rose = isinstance(last, float) and loss > last
    return server.update(values={"rate": factor * DECAY if rose else factor, "last_loss": loss})
