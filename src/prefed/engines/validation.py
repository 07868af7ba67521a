"""What may leave a client, and what a server merges: one rule, checked on both sides."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from prefed.core import Exchange, Layout, Owner, Ownership, Round, Tensors, Upload
from prefed.core.text import printable
from prefed.core.wire import WireError, decode_upload, upload_limits
from prefed.engines.job import Job
from prefed.merge import BadUpload, check_upload
from prefed.merge.uploads import LARGEST
from prefed.train.metrics import (
    ACCURACY_METRICS,
    CHOICE_METRICS,
    MEAN_METRICS,
    POLICY_METRICS,
    REWARD_METRICS,
    selector_metrics,
)

MAX_REASON = 300
"""Characters of a reason for which an upload is dropped."""
MAX_NAMES = 5
"""How many names a reason lists."""
MAX_FIGURE = 1e100
"""The largest figure of an evaluation. Sums over any number of clients stay finite."""


def expected_groups(
    client: str, exchange: Exchange, ownership: Ownership, model: Layout, now: Round
) -> Mapping[str, Layout]:
    """The groups of tensors that ``client``'s upload of round ``now`` must hold, each with its layout."""
    if exchange.groups is not None:
        return exchange.groups(client, now)
    return {"model": model.select(ownership.names(Owner.SHARED))}


def withhold_scalars(upload: Upload, client: str, exchange: Exchange, now: Round) -> Upload:
    """``upload`` without the numbers that ``client`` has too few pairs to send; see ``[privacy]``.

    Neighbours get no numbers at all, and do not learn how many pairs the client has. Nor does a server under
    differential privacy: no noise is put on these.
    """
    if exchange.to == "neighbours" or now.privacy.kind is not None:
        return replace(upload, weight=1.0, scalars={})
    withheld = exchange.scalars - exchange.numbers(client, now)
    scalars = {name: value for name, value in upload.scalars.items() if name not in withheld}
    return replace(upload, scalars=scalars) if withheld else upload


def read_upload(
    job: Job, message: bytes, client: str, exchange: Exchange, now: Round
) -> tuple[Upload | None, str]:
    """What arrived from a client, if it is valid; else ``None`` and the reason.

    The message comes from outside: nothing in it raises an exception here. The arguments are those of
    :func:`validate_upload`.
    """
    ownership, model = job.method.ownership, job.trainers.initial
    groups = expected_groups(client, exchange, ownership, model.layout, now)
    most = upload_limits(client, groups, model.dtype, exchange.scalars)
    try:
        upload = decode_upload(message, most)
        reason = validate_upload(upload, client, exchange, ownership, model, now)
    except WireError as error:
        return None, str(error)
    except Exception as error:
        return None, f"cannot be read: {type(error).__name__}: {error}"
    return (None, reason) if reason else (upload, "")


def longest_answer(job: Job, client: str, exchange: str, number: int) -> int:
    """The most bytes that a valid answer of a client has.

    Args:
        exchange: by name; empty for an evaluation.
        number: the round in which the client was asked.
    """
    if not exchange:
        return _longest_figures(_expected_figures(job, client))
    asked, model = job.exchange(exchange), job.trainers.initial
    groups = expected_groups(client, asked, job.method.ownership, model.layout, job.round(number))
    return upload_limits(client, groups, model.dtype, asked.scalars)[1]


def _longest_figures(names: Collection[str]) -> int:
    return 64 * (len(names) + 2)


def read_figures(
    job: Job, message: bytes, client: str, split: str | None = None
) -> tuple[dict[str, float], str]:
    """A client's evaluation metrics if they are valid; otherwise none, and the reason.

    They must be exactly those that an evaluation of this client has, and ``not_finite`` where its model
    diverged. Then a figure that is no share of pairs may be NaN. The message comes from outside: nothing in
    it raises an exception here, and the reason quotes no free text of it.

    Args:
        split: the pairs of the evaluation; left out: those of the job's.
    """
    names = _expected_figures(job, client)
    most = _longest_figures(names)
    if len(message) > most:
        return {}, f"has {len(message):,} bytes, and at most {most:,} are expected"
    try:
        content = json.loads(message)
    except (ValueError, RecursionError) as error:
        return {}, f"cannot be read: {type(error).__name__}"
    if not isinstance(content, dict):
        return {}, f"holds a {type(content).__name__}, not an object"
    count = content.pop("not_finite", None) if client not in job.unseen else None
    reason = _difference("figures", "an evaluation", content, names)
    if reason:
        return {}, reason
    figures: dict[str, float] = {}
    for name in names:
        value = content[name]
        if not _is_number(value):
            return {}, f"holds under {name!r} a {type(value).__name__}, not a number"
        if name not in MEAN_METRICS:
            if not 0 <= value <= 1:
                return {}, f"holds under {name!r} a number that is no share of pairs"
        elif not abs(value) <= MAX_FIGURE:
            # A reward head may diverge alone.
            diverged = count is not None or name in REWARD_METRICS
            if not diverged or isinstance(value, int) or math.isfinite(value):
                return {}, f"holds under {name!r} a number that is not finite, or beyond {MAX_FIGURE:g}"
            value = math.nan
        figures[name] = float(value)
    if count is None:
        return figures, ""
    pairs = getattr(job.trainers.clients[client], split or job.split)
    if not _is_number(count) or not 1 <= count <= pairs:
        return {}, f"holds under 'not_finite' what is no number of its {pairs} pairs"
    return figures | {"not_finite": float(count)}, ""


def _expected_figures(job: Job, client: str) -> list[str]:
    """The names of the figures that an evaluation of ``client`` has, apart from ``not_finite``."""
    single = selector_metrics(len(job.jury))
    if client in job.unseen:
        vote = ["majority_accuracy", *single] if job.jury else []
        return [*job.newcomer_figures, *vote]
    rewards = any(entry.part == "reward" for entry in job.trainers.initial.layout.entries)
    choices = job.method.reads == "choice"
    absent = {*POLICY_METRICS} if choices else {*CHOICE_METRICS}
    absent |= set() if rewards and not choices else {*REWARD_METRICS}
    # Several published models are a jury, and no shared model.
    absent |= set() if job.method.personal and not job.jury else {"shared_accuracy"}
    absent |= set() if job.jury else {"majority_accuracy"}
    return [name for name in (*ACCURACY_METRICS, *single, *MEAN_METRICS) if name not in absent]


def validate_upload(
    upload: Upload, client: str, exchange: Exchange, ownership: Ownership, model: Tensors, now: Round
) -> str:
    """Why ``upload`` must not leave its client, and why a server does not merge it; empty if it is valid.

    It must hold exactly the tensors and the numbers that the exchange expects of this client in this round.
    What other clients send makes no difference. The reason quotes no free text of the upload.

    Args:
        upload: as it was made, or as it arrived.
        client: who was asked for it.
        exchange: the exchange it answers.
        model: what every client starts from (full layout).
        now: the round in which the client was asked, also where its upload is late.
    """
    if upload.client != client:
        return f"calls itself somebody else than {client!r}"
    alone, hidden = exchange.to == "neighbours", now.privacy.kind is not None
    size = 1.0 if alone or hidden else now.weights[client]
    if not _is_number(upload.weight) or upload.weight != size:
        why = "1, as among neighbours" if alone else "1, as under [privacy] kind"
        rather = why if alone or hidden else f"its {size:g} training pairs"
        return f"weighs {_shown(upload.weight)}, not {rather}"
    if not isinstance(upload.sent_at, int) or upload.sent_at != now.number:
        return f"started from round {_shown(upload.sent_at)}, and this is round {now.number}"
    # Also a method that declares private tensors in its groups does not get them.
    private = set(ownership.names(Owner.PERSONAL, Owner.FROZEN))
    groups = expected_groups(client, exchange, ownership, model.layout, now)
    names = {name for group in upload.tensors.values() for name in group}
    numbers = frozenset[str]() if alone else exchange.numbers(client, now)
    untold = set[str]() if alone or hidden else (set(upload.scalars) & exchange.scalars) - numbers
    if untold:
        return (
            f"holds numbers over {size:g} training pairs, fewer than [privacy] minimum_pairs = "
            f"{now.privacy.minimum_pairs}: {_listed(untold)}"
        )
    reason = (
        _surplus("what is not shared", names & private)
        or _difference("groups", "the exchange", upload.tensors, groups)
        or _difference("numbers", "the exchange", upload.scalars, numbers)
        or next(
            (
                reason
                for name, layout in groups.items()
                if (reason := _difference("tensors", f"group {name!r}", upload.tensors[name], layout.names))
            ),
            "",
        )
    )
    if reason:
        return reason
    odd = [name for name, value in upload.scalars.items() if not _is_number(value)]
    if odd:
        return f"holds under {odd[0]!r} a {type(upload.scalars[odd[0]]).__name__}, not a number"
    try:
        check_upload(upload, groups, model.dtype)
    except BadUpload as error:
        return error.reason
    for group, tensors in upload.tensors.items():
        if tensors.layout != groups[group]:
            return f"group {group!r} is laid out otherwise than the model"
        if alone and float(tensors.flat.abs().amax()) > LARGEST:
            # What a neighbour mixes stays finite.
            return f"group {group!r} holds a number beyond what float32 holds"
    return ""


def printable_reason(reason: str) -> str:
    """A reason for logs and terminals: hidden characters are written out, and it has a few lines at most.

    It may quote what a client sent, which must neither fill a log nor control a terminal.
    """
    text = printable(reason[: MAX_REASON + 1])
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 1]}…"


def _difference(what: str, whose: str, names: Collection[str], expected: Collection[str]) -> str:
    """How ``names`` differ from those that are ``expected``; empty if they do not."""
    missing = set(expected) - set(names)
    if missing:
        return f"lacks {what} that {whose} expects: {_listed(missing)}"
    return _surplus(f"{what} that {whose} does not expect", set(names) - set(expected))


def _surplus(what: str, names: Collection[str]) -> str:
    return f"holds {what}: {_listed(names)}" if names else ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return str(value) if _is_number(value) else f"a {type(value).__name__}"


def _listed(names: Iterable[object]) -> str:
    """Names as code has them. Anything longer may be a client's text, and reasons go to the round log."""
    texts = sorted(str(name) for name in names)
    shown = [
        t if re.fullmatch(r"[\w./-]{1,80}", t, re.ASCII) else f"a text of {len(t)} characters"
        for t in texts[:MAX_NAMES]
    ]
    return ", ".join(shown) + (f" and {len(texts) - MAX_NAMES} more" if len(texts) > MAX_NAMES else "")
