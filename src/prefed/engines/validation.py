"""Validation of uploads and metrics. Clients and server apply the same rules."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from prefed.core import Exchange, Layout, Owner, Ownership, Round, Tensors, Upload
from prefed.core.text import printable
from prefed.core.wire import WireError, decode_upload, upload_limits
from prefed.engines.job import Job
from prefed.merge import BadUpload, check_upload
from prefed.merge.uploads import LARGEST
from prefed.train.metrics import ACCURACY_METRICS, COMPARED_METRICS, MEAN_METRICS, TABLE, selector_metrics

if TYPE_CHECKING:
    from prefed.privacy import MetricSum

MAX_REASON = 300
"""Maximum characters of a reason."""
MAX_NAMES = 5
"""Maximum number of names in a reason."""
MAX_FIGURE = 1e100
"""Maximum magnitude of a metric, so that sums over clients stay finite."""


def expected_groups(
    client: str, exchange: Exchange, ownership: Ownership, model: Layout, now: Round
) -> Mapping[str, Layout]:
    """Group of tensors → its layout, for the upload of ``client`` in round ``now``."""
    if exchange.groups is not None:
        return exchange.groups(client, now)
    return {"model": model.select(ownership.names(Owner.SHARED))}


def withhold_scalars(upload: Upload, client: str, exchange: Exchange, now: Round) -> Upload:
    """Remove the scalars for which ``client`` has fewer pairs than ``[privacy] minimum_pairs``.

    Neighbours, and servers under differential privacy, get neither scalars nor the number of pairs, because
    these have no noise.
    """
    if exchange.to == "neighbours" or now.privacy.kind is not None:
        return replace(upload, weight=1.0, scalars={})
    withheld = exchange.scalars - exchange.numbers(client, now)
    scalars = {name: value for name, value in upload.scalars.items() if name not in withheld}
    return replace(upload, scalars=scalars) if withheld else upload


def read_upload(
    job: Job, message: bytes, client: str, exchange: Exchange, now: Round
) -> tuple[Upload | None, str]:
    """Decode and validate an untrusted upload; return it, or ``None`` and the reason. Raises no exception.

    Args:
        client: the client that was asked.
        now: the round in which it was asked.
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
    """The maximum bytes of a valid answer.

    Args:
        exchange: name of the exchange; empty for an evaluation.
        number: the round in which the client was asked.
    """
    if not exchange:
        return _longest_figures(job, client)
    asked, model = job.exchange(exchange), job.trainers.initial
    groups = expected_groups(client, asked, job.method.ownership, model.layout, job.round(number))
    return upload_limits(client, groups, model.dtype, asked.scalars)[1]


def _longest_figures(job: Job, client: str) -> int:
    # Of other feedback than pairs, a client may send other metrics.
    return 64 * (len(_expected_figures(job, client)) + 3)


def read_figures(
    job: Job, message: bytes, client: str, split: str | None = None
) -> tuple[dict[str, float], str]:
    """Decode and validate the untrusted metrics of a client; return them and an empty reason, or a reason.

    The names must be those of an evaluation of this client, plus ``not_finite`` if its model diverged, in
    which case losses and margins may be NaN. Raises no exception. The reason quotes no free text of the
    message.

    Args:
        split: split of the evaluation (default: that of the job).
    """
    most = _longest_figures(job, client)
    if len(message) > most:
        return {}, f"has {len(message):,} bytes; at most {most:,} are allowed"
    try:
        content = json.loads(message)
    except (ValueError, RecursionError) as error:
        return {}, f"cannot be read: {type(error).__name__}"
    if not isinstance(content, dict):
        return {}, f"is a {type(content).__name__}, not an object"
    names = _expected_figures(job, client, content)
    count = content.pop("not_finite", None) if client not in job.unseen else None
    reason = _difference("metrics", "an evaluation", content, names)
    if reason:
        return {}, reason
    figures: dict[str, float] = {}
    for name in names:
        value = content[name]
        if not _is_number(value):
            return {}, f"{name!r} is a {type(value).__name__}, not a number"
        if name not in MEAN_METRICS:
            if not 0 <= value <= 1:
                return {}, f"{name!r} is not between 0 and 1"
        elif not abs(value) <= MAX_FIGURE:
            # A reward head may diverge while log-probabilities stay finite.
            diverged = count is not None or TABLE[name].of == "reward heads"
            if not diverged or isinstance(value, int) or math.isfinite(value):
                return {}, f"{name!r} is not finite or exceeds {MAX_FIGURE:g}"
            value = math.nan
        figures[name] = float(value)
    if count is None:
        return figures, ""
    pairs = getattr(job.trainers.clients[client], split or job.evaluate.split)
    if not _is_number(count) or not 1 <= count <= pairs:
        return {}, f"'not_finite' is not a number from 1 to {pairs}, its number of pairs"
    return figures | {"not_finite": float(count)}, ""


def _expected_figures(job: Job, client: str, content: Collection[str] = ()) -> list[str]:
    """The names of the metrics of ``client``, except ``not_finite``.

    Args:
        content: the names that it sent. They decide whether its feedback is pairs or of the kind that clients
            train on, and which metrics of thumbs it lacks.
    """
    single = selector_metrics(len(job.jury))
    if client in job.unseen:
        vote = ["majority_accuracy", *single] if job.jury else []
        return [*job.newcomer_figures, *vote]
    sent = {TABLE[name].of for name in content if name in TABLE}
    kind = job.feedback.name
    if "pairs" in sent and kind not in sent and job.method.reads != "choice":
        kind = "pairs"
    who = {kind, f"some {kind}"} | _models(job)
    own = [metric.name for metric in job.metrics]

    def expected(name: str) -> bool:
        return (of := TABLE[name].of) in who and (not of.startswith("some ") or name in content)

    return [*filter(expected, ACCURACY_METRICS), *single, *own, *filter(expected, MEAN_METRICS)]


def _models(job: Job) -> set[str]:
    """What has metrics in this run, whatever a client's feedback: ``of`` of rows of the table of metrics."""
    rewards = any(entry.part == "reward" for entry in job.trainers.initial.layout.entries)
    who = {"all", "reward heads"} if rewards and job.method.reads != "choice" else {"all"}
    # Several published models form a jury; there is no single shared model.
    return who | (
        {"several selectors"} if job.jury else {"personal models"} if job.method.personal else set()
    )


def summed_metrics(job: Job) -> MetricSum:
    """The metrics of which a server gets a sum under ``distributed``: those that runs are compared by."""
    from prefed.privacy import MetricSum

    names = [name for name in COMPARED_METRICS if TABLE[name].of in _models(job)]
    return MetricSum((*names, *(metric.name for metric in job.metrics)))


def validate_upload(
    upload: Upload, client: str, exchange: Exchange, ownership: Ownership, model: Tensors, now: Round
) -> str:
    """The reason why ``upload`` is invalid; empty if it is valid.

    An upload must have exactly the tensors and scalars that the exchange expects of this client in this
    round. The result does not depend on other clients. The reason quotes no free text of the upload.

    Args:
        client: the client that was asked.
        exchange: the exchange that the upload belongs to.
        model: the initial model (full layout).
        now: the round in which the client was asked, even if the upload is late.
    """
    if upload.client != client:
        return f"is from a client other than {client!r}"
    alone, hidden = exchange.to == "neighbours", now.privacy.kind is not None
    size = 1.0 if alone or hidden else now.weights[client]
    if not _is_number(upload.weight) or upload.weight != size:
        why = "1, as among neighbours" if alone else "1, as under [privacy] kind"
        rather = why if alone or hidden else f"its {size:g} training pairs"
        return f"has weight {_shown(upload.weight)}, not {rather}"
    if not isinstance(upload.sent_at, int) or upload.sent_at != now.number:
        return f"is of round {_shown(upload.sent_at)}, not round {now.number}"
    # Even a method that declares private tensors in its groups must not get them.
    private = set(ownership.names(Owner.PERSONAL, Owner.FROZEN))
    groups = expected_groups(client, exchange, ownership, model.layout, now)
    names = {name for group in upload.tensors.values() for name in group}
    numbers = frozenset[str]() if alone else exchange.numbers(client, now)
    unreported = set[str]() if alone or hidden else (set(upload.scalars) & exchange.scalars) - numbers
    if unreported:
        return (
            f"has numbers over {size:g} training pairs, fewer than [privacy] minimum_pairs = "
            f"{now.privacy.minimum_pairs}: {_listed(unreported)}"
        )
    by_group = (
        _difference("tensors", f"group {name!r}", upload.tensors[name], layout.names)
        for name, layout in groups.items()
    )
    reason = (
        _surplus("tensors that are not shared", names & private)
        or _difference("groups", "the exchange", upload.tensors, groups)
        or _difference("numbers", "the exchange", upload.scalars, numbers)
        or next(filter(None, by_group), "")
    )
    if reason:
        return reason
    odd = [name for name, value in upload.scalars.items() if not _is_number(value)]
    if odd:
        return f"{odd[0]!r} is a {type(upload.scalars[odd[0]]).__name__}, not a number"
    try:
        check_upload(upload, groups, model.dtype)
    except BadUpload as error:
        return error.reason
    for group, tensors in upload.tensors.items():
        if tensors.layout != groups[group]:
            return f"group {group!r} has a different layout than the model"
        if alone and float(tensors.flat.abs().amax()) > LARGEST:
            # Mixtures must stay finite.
            return f"group {group!r} has a number beyond the range of float32"
    return ""


def printable_reason(reason: str) -> str:
    """Escape and truncate a reason, which may quote a client, for logs and terminals."""
    text = printable(reason[: MAX_REASON + 1])
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 1]}…"


def _difference(what: str, whose: str, names: Collection[str], expected: Collection[str]) -> str:
    """A description of how ``names`` differ from ``expected``; empty if they are the same."""
    missing = set(expected) - set(names)
    if missing:
        return f"lacks {what} that {whose} expects: {_listed(missing)}"
    return _surplus(f"{what} that {whose} does not expect", set(names) - set(expected))


def _surplus(what: str, names: Collection[str]) -> str:
    return f"has {what}: {_listed(names)}" if names else ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return str(value) if _is_number(value) else f"a {type(value).__name__}"


def _listed(names: Iterable[object]) -> str:
    """List names for a reason. Only identifiers are quoted, because other text may be a client's data."""
    texts = sorted(str(name) for name in names)
    shown = [
        t if re.fullmatch(r"[\w./-]{1,80}", t, re.ASCII) else f"a text of {len(t)} characters"
        for t in texts[:MAX_NAMES]
    ]
    return ", ".join(shown) + (f" and {len(texts) - MAX_NAMES} more" if len(texts) > MAX_NAMES else "")
