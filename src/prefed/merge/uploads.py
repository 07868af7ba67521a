"""Uploads before they are merged: their order, their layout, and the checks that each must pass.

A late upload may count as a step, made from the newest model. A server that averages late models takes its
own model back towards older ones. FedBuff (arXiv:2106.06639, algorithm 1) adds up the clients' steps
instead::

    θ ← θ + (1/K) Σ_i s(q_i) (θ_i − θ^{start_i})
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from prefed.core import Layout, State, Tensors, Upload
from prefed.core.lazy import torch
from prefed.merge.lora import without_residuals

LARGEST = 3.4028234663852886e38
"""The largest float32, and the largest absolute value of an upload's scalars: their sums do not overflow."""


class BadUpload(ValueError):  # noqa: N818
    """An upload that must not be merged.

    Attributes:
        reason: the fault; it names the tensor or number.
    """

    def __init__(self, client: str, reason: str) -> None:
        super().__init__(f"upload of client {client!r}: {reason}")
        self.client = client
        self.reason = reason


class TooFewUploads(ValueError):  # noqa: N818
    """Fewer uploads than the merge rule needs; the message says how many it needs."""


def check_upload(upload: Upload, groups: Mapping[str, Layout], dtype: torch.dtype | None = None) -> None:
    """Check that ``upload`` can be merged with others.

    Args:
        groups: the layouts of the groups that the method expects.
        dtype: the dtype of their tensors; float32 unless given.

    Raises:
        BadUpload: its weight is not a number above 0; a tensor or scalar is NaN or infinite; a scalar is
            outside float32's range; a tensor is not in ``groups``, or has another shape or dtype.

    >>> from prefed.core import Entry, Tensors
    >>> layout = Layout((Entry("lora/0/q/A", (2,), "lora", 0, "A"),))
    >>> broken = Tensors(layout, torch.tensor([1.0, torch.nan]))
    >>> check_upload(Upload("d7", 3, {"model": broken}), {"model": layout})
    Traceback (most recent call last):
    ...
    prefed.merge.uploads.BadUpload: upload of client 'd7': lora/0/q/A in group 'model' holds NaN or infinity
    """
    dtype = dtype or torch.float32
    if not (_finite(upload.weight) and upload.weight > 0):
        raise BadUpload(upload.client, f"its weight is {upload.weight}, not a number above 0")
    for name, number in upload.scalars.items():
        if not _finite(number):
            raise BadUpload(upload.client, f"the number {name!r} is {number}")
        if abs(number) > LARGEST:
            raise BadUpload(upload.client, f"the number {name!r} is {number:.3g}, beyond what float32 holds")
    for group, tensors in upload.tensors.items():
        layout = groups.get(group, Layout(()))
        for entry in tensors.layout.entries:
            where = f"{entry.name} in group {group!r}"
            if entry.name not in layout:
                raise BadUpload(upload.client, f"{where} is no tensor that is asked for")
            expected = layout[entry.name].shape
            if entry.shape != expected:
                raise BadUpload(upload.client, f"{where} has shape {entry.shape}, not {expected}")
            # A number that is finite in a wider dtype may be infinite in the model's dtype.
            if tensors.flat.dtype != dtype:
                raise BadUpload(upload.client, f"{where} holds {tensors.flat.dtype}, not {dtype}")
        if not tensors.isfinite():
            name = next(name for name in tensors if not bool(tensors[name].isfinite().all()))
            raise BadUpload(upload.client, f"{name} in group {group!r} holds NaN or infinity")


def check_update_sizes(
    uploads: Sequence[Upload],
    origins: Mapping[str, Tensors],
    most: float,
    steps: Collection[str] = (),
) -> None:
    """Check that no update is far longer than the others of its round, one group of tensors at a time.

    An update is the step from the server's tensors to the client's. It passes if it is at most ``most`` times
    as long as the median of the round. It also passes if it is no longer than the server's own tensors of
    that group: where nearly all clients hardly move any more, an honest client may still move. If more than
    half of the updates have length zero, all pass.

    With an even number of uploads, the median is the upper one of the two middle lengths. So half of the
    clients cannot get the others refused by sending nearly nothing. There is one exception. Suppose that the
    upper middle length is more than ``most`` times as long as both the lower one and the server's own
    tensors, and these are not all zero. Then half of the clients lie, and the longer of these two lengths
    replaces the median.

    Args:
        uploads: of one exchange; each has passed :func:`check_upload`.
        origins: the server's groups; a group that the server does not have starts from zero.
        most: how many times the median; 0 lets everything pass.
        steps: the groups in which clients send the update itself.

    Raises:
        BadUpload: the longest update does not pass.
    """
    for group in sorted({name for upload in uploads for name in upload.tensors}) if most else ():
        sent = [upload for upload in uploads if group in upload.tensors]
        origin = origins.get(group, Tensors.empty())
        start = None if group in steps else origin
        lengths = [update_norm(upload.tensors[group], start) for upload in sent]
        longest = max(lengths)
        worst = min(
            (upload for upload, length in zip(sent, lengths, strict=True) if length == longest),
            key=lambda upload: (upload.client, upload.sent_at),
        )
        own = update_norm(origin.select(name for name in worst.tensors[group] if name in origin), None)
        check_length(worst.client, longest, lengths, own, most, group)


def check_length(
    client: str, length: float, lengths: Collection[float], own: float, most: float, group: str
) -> None:
    """:func:`check_update_sizes` for the update of one client.

    Args:
        length: of the update.
        lengths: of all updates of the round.
        own: the length of the server's own tensors that the update starts from.
        most: how many times the median.
        group: for the error.

    Raises:
        BadUpload: the update does not pass.
    """
    ranked = sorted(lengths)
    low, middle = ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2]
    of = "the median of the round's"
    if own and middle > most * max(low, own):
        middle, of = max(low, own), "what the server has and half of the round send"
    if not middle or (length <= most * middle and math.isfinite(length)):
        return
    if length > own:
        raise BadUpload(
            client,
            f"its update of group {group!r} has length {length:.3g}, {length / middle:.3g} times "
            f"{of}, {middle:.3g}; [merge] max_ratio = {most:g} is the most",
        )


def update_norm(tensors: Tensors, origin: Tensors | None = None) -> float:
    """Euclidean length of the step from ``origin`` to ``tensors``; what ``origin`` lacks starts at 0."""
    start = Tensors.zeros(tensors.layout, tensors.flat.dtype)
    if origin is not None:
        start = start.replace(origin.select(name for name in tensors if name in origin))
    # The step of an honest client does not overflow; one that does has an infinite length.
    return float(torch.linalg.vector_norm(tensors.flat - start.flat, dtype=torch.float64))


def sort_uploads(uploads: Iterable[Upload]) -> tuple[Upload, ...]:
    """The uploads sorted by client id, then by the round they started from.

    Merging them in this order gives the same bits in whatever order they arrive.

    Raises:
        ValueError: a client sent two uploads that started from one round.
    """
    result = tuple(sorted(uploads, key=lambda upload: (upload.client, upload.sent_at)))
    for first, second in itertools.pairwise(result):
        if (first.client, first.sent_at) == (second.client, second.sent_at):
            raise ValueError(
                f"client {first.client!r} sent two uploads that started from round {first.sent_at}"
            )
    return result


def align(uploads: Sequence[Upload], group: str, current: Tensors) -> list[Tensors]:
    """Each upload's tensors of ``group`` in the layout and dtype of ``current``, without residuals.

    Raises:
        BadUpload: an upload's tensors have other names or shapes than those of ``current``.
    """
    aligned = []
    for upload in uploads:
        value = without_residuals(upload.tensors[group])
        odd = sorted(set(value) ^ set(current))
        if odd:
            which = "lacks" if odd[0] in current else "holds"
            raise BadUpload(upload.client, f"group {group!r} {which} {odd[0]}")
        for entry in current.layout.entries:
            shape = value.layout[entry.name].shape
            if shape != entry.shape:
                raise BadUpload(upload.client, f"{entry.name} has shape {shape}, not {entry.shape}")
        if value.layout.names != current.layout.names:
            value = Tensors.gather(current.layout, value)
        aligned.append(Tensors(current.layout, value.flat.to(current.flat.dtype)))
    return aligned


def _finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        # JSON allows integers of any length, and this one is larger than any float.
        return False


def from_newest(upload: Upload, start: State, newest: State) -> Upload:
    """``upload`` with θ + (θ_i − θ^start) in place of each group θ_i.

    Args:
        start: the server's state that the client started from.
        newest: the server's state now; it has the groups that ``start`` has.

    >>> import torch
    >>> from prefed.core import Entry, Layout
    >>> def state(x): return State({"model": Tensors(Layout((Entry("a", (1,), "lora"),)), torch.tensor([x]))})
    >>> sent = Upload("ward-7", 3, state(2.5).tensors)
    >>> from_newest(sent, state(2.0), state(7.0)).tensors["model"].flat
    tensor([7.5000])
    """
    groups = {}
    for name, value in upload.tensors.items():
        before, after = (state.tensors[name].select(value).flat.double() for state in (start, newest))
        groups[name] = Tensors(value.layout, (after + (value.flat.double() - before)).to(value.flat.dtype))
    return replace(upload, tensors=groups)


def shorten(current: Tensors, value: Tensors, factor: float) -> Tensors:
    """``current`` moved by ``factor`` of the way to ``value``; with 1 that is ``value`` bit for bit."""
    return value if factor == 1 else current + (value - current) * factor
