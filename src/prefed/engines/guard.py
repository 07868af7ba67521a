"""What may leave a client, and what a server lets in."""

from __future__ import annotations

from prefed.core import Exchange, Owner, Parts, Round, Tensors, Upload
from prefed.merge import BadUpload, check

__all__ = ["refusal", "undeclared"]


def undeclared(upload: Upload, exchange: Exchange, parts: Parts) -> str:
    """Why ``upload`` must not leave its client; empty if it may.

    It may hold tensors that the method shares and numbers that the exchange declares: nothing else.
    """
    shared = set(parts.names(Owner.SHARED))
    kept = sorted({name for group in upload.tensors.values() for name in group} - shared)
    if kept:
        return f"holds what is not shared: {', '.join(kept)}"
    numbers = sorted(set(upload.scalars) - exchange.scalars)
    if numbers:
        return f"holds numbers that the exchange does not declare: {', '.join(numbers)}"
    return ""


def refusal(upload: Upload, client: str, exchange: Exchange, parts: Parts, model: Tensors, now: Round) -> str:
    """Why a server does not merge ``upload``; empty if it does.

    Args:
        upload: as it arrived.
        client: who was asked for it.
        exchange: the exchange it answers.
        parts: the method's.
        model: what every client starts from (full layout).
        now: the current round.
    """
    if upload.client != client:
        return f"calls itself {upload.client!r}"
    if upload.weight != now.weights[client]:
        return f"weighs {upload.weight}, not its {now.weights[client]:g} training pairs"
    if not 0 <= upload.sent_at <= now.number:
        return f"started from round {upload.sent_at}"
    reason = undeclared(upload, exchange, parts)
    if reason:
        return reason
    try:
        check(upload, model.layout, model.flat.dtype)
    except BadUpload as error:
        return error.reason
    for group, tensors in upload.tensors.items():
        if tensors.layout != model.layout.select(tensors.layout.names):
            return f"group {group!r} is laid out otherwise than the model"
    return ""
