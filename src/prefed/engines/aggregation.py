"""A merge that no single upload can end: an upload that cannot be merged is found, named and left out."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefed.core import Exchange, Plain, Round, State, Upload
from prefed.merge import BadUpload, TooFewUploads, update_norm


@dataclass(frozen=True)
class Aggregation:
    """What came of merging the uploads of an exchange.

    Attributes:
        server: the server's next state; its state before where no upload is merged.
        uploads: those that are merged.
        dropped: client and reason, of those that are not.
        reason: why no upload is merged; empty if one is.
    """

    server: State
    uploads: Sequence[Upload]
    dropped: Sequence[tuple[str, str]]
    reason: str = ""


def aggregate(server: State, uploads: Sequence[Upload], exchange: Exchange, now: Round) -> Aggregation:
    """Merge ``uploads``, and drop those that cannot be merged. Those of one client stand and fall together.

    Each upload is valid on its own. It may still not fit the others, be out of all proportion to them, or be
    finite and merge to infinity.
    """
    dropped: list[tuple[str, str]] = []
    while uploads:
        try:
            merged, reason, client = _merge(server, uploads, exchange, now)
        except TooFewUploads as error:
            return Aggregation(server, (), dropped, str(error))
        if merged is not None:
            return Aggregation(merged, uploads, dropped)
        if client not in {upload.client for upload in uploads}:
            culprit = _culprit(server, uploads, exchange, now)
            client = culprit.client
            reason = f"merged with it, {reason}; its update has length {_size(culprit, server):.3g}"
        dropped.append((client, reason))
        uploads = [upload for upload in uploads if upload.client != client]
    return Aggregation(server, (), dropped, f"nothing to merge in {exchange.name!r}")


def _merge(
    server: State, uploads: Sequence[Upload], exchange: Exchange, now: Round
) -> tuple[State | None, str, str]:
    """The server's next state; or ``None``, the reason, and whose upload does not fit, if that is known.

    Raises:
        TooFewUploads: the merge rule needs more.
    """
    try:
        merged = exchange.merge(server, uploads, now)
        exchange.figures(merged)
    except (TooFewUploads, MemoryError):
        raise
    except BadUpload as error:
        return None, error.reason, error.client
    except Exception as error:
        # An upload comes from outside: no error that it causes may end the run of all clients.
        where = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})"
        return None, f"the merge fails with {cause}", ""
    broken = _broken(server, merged)
    return (merged, "", "") if broken is None else (None, f"the server's {broken!r} is NaN or infinite", "")


def _culprit(server: State, uploads: Sequence[Upload], exchange: Exchange, now: Round) -> Upload:
    """The upload with which a merge first fails, where uploads join it one by one, the smallest first."""

    def rank(upload: Upload) -> tuple[float, float]:
        return _size(upload, server), max(map(abs, upload.scalars.values()), default=0.0)

    ranked = sorted(uploads, key=rank)

    def fails(count: int) -> bool:
        some = sorted(ranked[:count], key=lambda upload: (upload.client, upload.sent_at))
        try:
            return _merge(server, some, exchange, now)[0] is None
        except TooFewUploads:
            return False

    # The merge of the first `good` uploads does not fail, that of the first `bad` does.
    good, bad = 0, len(ranked)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if fails(middle) else (middle, bad)
    return ranked[bad - 1]


def _broken(before: State, after: State) -> str | None:
    """The first group or value that a merge changed and that is not finite."""
    for name, group in after.tensors.items():
        if group is not before.tensors.get(name) and not group.isfinite():
            return name
    for name, value in after.values.items():
        if value is not before.values.get(name) and not _finite(value):
            return name
    return None


def _finite(value: Plain) -> bool:
    match value:
        case float():
            return math.isfinite(value)
        case list():
            return all(map(_finite, value))
        case dict():
            return all(map(_finite, value.values()))
    return True


def _size(upload: Upload, server: State) -> float:
    """Euclidean length of an upload's largest group, as a step from the server's group where it has one."""
    groups = upload.tensors.items()
    return max((update_norm(group, server.tensors.get(name)) for name, group in groups), default=0.0)
