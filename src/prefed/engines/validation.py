"""What may leave a client, and what a server lets in: one rule, asked on both sides."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from prefed.core import Exchange, Layout, Owner, Ownership, Round, Tensors, Upload
from prefed.core.text import printable
from prefed.merge import BadUpload, check_upload

__all__ = ["expected", "reduced", "refusal", "said"]

MOST = 300
"""Characters of a reason for which an upload is dropped."""
NAMED = 5
"""How many names a reason lists."""


def expected(
    client: str, exchange: Exchange, ownership: Ownership, model: Layout, now: Round
) -> Mapping[str, Layout]:
    """The groups of tensors that ``client``'s upload of round ``now`` must hold, each with its layout."""
    if exchange.groups is not None:
        return exchange.groups(client, now)
    return {"model": model.select(ownership.names(Owner.SHARED))}


def reduced(upload: Upload, client: str, exchange: Exchange, now: Round) -> Upload:
    """``upload`` without the numbers that ``client`` has too few pairs to send; see ``[privacy]``."""
    silent = exchange.scalars - exchange.numbers(client, now)
    kept = {name: value for name, value in upload.scalars.items() if name not in silent}
    return replace(upload, scalars=kept) if silent else upload


def refusal(
    upload: Upload, client: str, exchange: Exchange, ownership: Ownership, model: Tensors, now: Round
) -> str:
    """Why ``upload`` must not leave its client, and why a server does not merge it; empty if all is well.

    It must hold exactly the tensors and the numbers that the exchange expects of this client in this round.
    What others send has no say in that. The reason quotes no free text of the upload's.

    Args:
        upload: as it was made, or as it arrived.
        client: who was asked for it.
        exchange: the exchange it answers.
        ownership: the method's.
        model: what every client starts from (full layout).
        now: the current round.
    """
    if upload.client != client:
        return f"calls itself somebody else than {client!r}"
    size = now.weights[client]
    if not _number(upload.weight) or upload.weight != size:
        return f"weighs {_value(upload.weight)}, not its {size:g} training pairs"
    if not isinstance(upload.sent_at, int) or not 0 <= now.number - upload.sent_at <= exchange.late:
        return f"started from round {_value(upload.sent_at)}, and this is round {now.number}"
    # A method that asks for what stays with clients does not get it.
    stays = set(ownership.names(Owner.PERSONAL, Owner.FROZEN))
    groups = expected(client, exchange, ownership, model.layout, replace(now, number=upload.sent_at))
    held = {name for group in upload.tensors.values() for name in group}
    untold = (set(upload.scalars) & exchange.scalars) - exchange.numbers(client, now)
    if untold:
        return (
            f"holds numbers over {size:g} training pairs, fewer than [privacy] minimum_pairs = "
            f"{now.privacy.minimum_pairs}: {_names(untold)}"
        )
    reason = (
        _surplus("what is not shared", held & stays)
        or _differ("groups", "the exchange", upload.tensors, groups)
        or _differ("numbers", "the exchange", upload.scalars, exchange.numbers(client, now))
        or next(
            (
                reason
                for name, layout in groups.items()
                if (reason := _differ("tensors", f"group {name!r}", upload.tensors[name], layout.names))
            ),
            "",
        )
    )
    if reason:
        return reason
    odd = [name for name, value in upload.scalars.items() if not _number(value)]
    if odd:
        return f"holds under {odd[0]!r} a {type(upload.scalars[odd[0]]).__name__}, not a number"
    try:
        check_upload(upload, groups, model.flat.dtype)
    except BadUpload as error:
        return error.reason
    for group, tensors in upload.tensors.items():
        if tensors.layout != groups[group]:
            return f"group {group!r} is laid out otherwise than the model"
    return ""


def said(reason: str) -> str:
    """A reason as logs and terminals take it: hidden characters written out, and of a few lines at most.

    It may quote what a client sent, which must neither fill the one nor steer the other.
    """
    text = printable(reason[: MOST + 1])
    return text if len(text) <= MOST else f"{text[: MOST - 1]}…"


def _differ(what: str, of: str, held: Collection[str], wanted: Collection[str]) -> str:
    """Why ``held`` is not ``wanted``; empty if it is."""
    lacking = set(wanted) - set(held)
    if lacking:
        return f"lacks {what} that {of} expects: {_names(lacking)}"
    return _surplus(f"{what} that {of} does not expect", set(held) - set(wanted))


def _surplus(what: str, names: Collection[str]) -> str:
    return f"holds {what}: {_names(names)}" if names else ""


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _value(value: object) -> str:
    return str(value) if _number(value) else f"a {type(value).__name__}"


def _names(found: Iterable[object]) -> str:
    """Names as code has them; anything longer may be a client's text, and reasons go to the round log."""
    texts = sorted(str(name) for name in found)
    shown = [
        t if re.fullmatch(r"[\w./-]{1,80}", t, re.ASCII) else f"a text of {len(t)} characters"
        for t in texts[:NAMED]
    ]
    return ", ".join(shown) + (f" and {len(texts) - NAMED} more" if len(texts) > NAMED else "")
