"""Robust merging: an upload with which a merge fails is identified and dropped."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prefed.core import Exchange, Merged, Plain, Round, State, Upload
from prefed.engines.job import RoundError
from prefed.merge import BadUpload, TooFewUploads, update_norm

_MISTAKES = (AttributeError, NameError, TypeError)
"""Errors of code. If each upload alone causes one, the method is at fault, and dropping uploads hides it."""


@dataclass(frozen=True)
class Aggregation:
    """The result of merging the uploads of an exchange.

    Attributes:
        server: the server's next state; its previous state if no upload was merged.
        uploads: the merged uploads.
        dropped: client and reason for each dropped upload.
        reason: why no upload was merged; empty if one was.
        report: entries for the round log.
    """

    server: State
    uploads: Sequence[Upload]
    dropped: Sequence[tuple[str, str]]
    reason: str = ""
    report: Mapping[str, Plain] = field(default_factory=dict)


def aggregate(server: State, uploads: Sequence[Upload], exchange: Exchange, now: Round) -> Aggregation:
    """Merge ``uploads`` and drop those with which the merge fails. A client's uploads are dropped together.

    Uploads that are valid individually may still be incompatible, of very different size, or merge to
    infinity.

    Raises:
        RoundError: the merge returns no state and report, or has a mistake that no upload causes.
    """
    dropped: list[tuple[str, str]] = []
    while uploads:
        try:
            merged, reason, client = _merge(server, uploads, exchange, now)
        except TooFewUploads as error:
            return Aggregation(server, (), dropped, str(error))
        if merged is not None:
            return Aggregation(merged[0], uploads, dropped, report=merged[1])
        if client not in {upload.client for upload in uploads}:
            if not dropped and len(uploads) > 1:
                _check_code(server, uploads, exchange, now)
            culprit = _culprit(server, uploads, exchange, now)
            client = culprit.client
            reason = f"{reason} after merging it; its update has norm {_size(culprit, server):.3g}"
        dropped.append((client, reason))
        uploads = [upload for upload in uploads if upload.client != client]
    return Aggregation(server, (), dropped, f"nothing to merge in {exchange.name!r}")


def _merge(
    server: State, uploads: Sequence[Upload], exchange: Exchange, now: Round
) -> tuple[Merged | None, str, str]:
    """The result of the merge; or ``None``, a reason, and the client at fault if it is known.

    Raises:
        TooFewUploads: the merge rule needs more uploads.
        RoundError: the merge returns no state and report.
    """
    try:
        merged: object = exchange.merge(server, uploads, now)
    except (TooFewUploads, MemoryError):
        raise
    except BadUpload as error:
        return None, error.reason, error.client
    except Exception as error:
        # Uploads are untrusted: no error that they cause may end the run.
        return None, f"the merge fails with {_cause(error)}", ""
    match merged:
        case State() as after, Mapping() as report:
            broken = _broken(server, after, report)
            reason = f"the server's {broken!r} is NaN or infinite"
            return ((after, report), "", "") if broken is None else (None, reason, "")
    raise RoundError(
        f"the merge of exchange {exchange.name!r} returns {type(merged).__name__}, not the server's next "
        "state with entries for the round log; see docs/adding-a-method.md"
    )


def _check_code(server: State, uploads: Sequence[Upload], exchange: Exchange, now: Round) -> None:
    """Raise ``RoundError`` if merging each upload alone fails with one of :data:`_MISTAKES`."""
    cause = ""
    for upload in uploads:
        try:
            exchange.merge(server, [upload], now)
        except _MISTAKES as error:
            cause = _cause(error)
        except Exception:
            return
        else:
            return
    raise RoundError(
        f"the merge of exchange {exchange.name!r} fails for each upload alone, at last with {cause}; see "
        "docs/adding-a-method.md"
    )


def _cause(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})"


def _culprit(server: State, uploads: Sequence[Upload], exchange: Exchange, now: Round) -> Upload:
    """The first upload with which the merge fails when uploads are added in order of size."""

    def rank(upload: Upload) -> tuple[float, float]:
        return _size(upload, server), max(map(abs, upload.scalars.values()), default=0.0)

    ranked = sorted(uploads, key=rank)

    def fails(count: int) -> bool:
        some = sorted(ranked[:count], key=lambda upload: (upload.client, upload.sent_at))
        try:
            return _merge(server, some, exchange, now)[0] is None
        except TooFewUploads:
            return False

    # Invariant: merging the first `good` uploads succeeds, merging the first `bad` fails.
    good, bad = 0, len(ranked)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if fails(middle) else (middle, bad)
    return ranked[bad - 1]


def _broken(before: State, after: State, report: Mapping[str, Plain]) -> str | None:
    """The first changed group or value, or entry of the report, that is not finite."""
    for name, group in after.tensors.items():
        if group is not before.tensors.get(name) and not group.isfinite():
            return name
    for name, value in after.values.items():
        if value is not before.values.get(name) and not _finite(value):
            return name
    return next((name for name, value in report.items() if not _finite(value)), None)


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
    """The largest L2 norm of an upload's groups, relative to the server's groups of the same name."""
    groups = upload.tensors.items()
    return max((update_norm(group, server.tensors.get(name)) for name, group in groups), default=0.0)
