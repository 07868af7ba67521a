"""What a merge can do nothing with."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from prefed.core import Layout, Tensors, Upload
from prefed.core.lazy import torch

__all__ = ["BadUpload", "TooFewUploads", "check", "length", "proportion"]

LARGEST = 3.4028234663852886e38
"""The largest number that an upload may carry beside its tensors, float32's: sums of such do not overflow."""


class BadUpload(ValueError):  # noqa: N818
    """An upload that must not be merged.

    Attributes:
        client: who sent it.
        reason: what is wrong with it, naming the tensor or number.
    """

    def __init__(self, client: str, reason: str) -> None:
        super().__init__(f"upload of client {client!r}: {reason}")
        self.client = client
        self.reason = reason


class TooFewUploads(ValueError):  # noqa: N818
    """Fewer uploads than a rule needs to keep its promise; the message says how many it needs."""


def check(upload: Upload, groups: Mapping[str, Layout], dtype: torch.dtype | None = None) -> None:
    """Confirm that ``upload`` can be merged with others that hold ``groups`` of tensors.

    They are of ``dtype``, float32 if not given.

    Raises:
        BadUpload: its weight is not a number above 0, it holds a NaN or an infinity, a number beyond what
            float32 holds, or a tensor that is not asked for, or one of another shape or dtype.

    >>> from prefed.core import Entry, Tensors
    >>> layout = Layout((Entry("lora/0/q/A", (2,), "lora", 0, "A"),))
    >>> check(Upload("d7", 3, {"model": Tensors(layout, torch.tensor([1.0, torch.nan]))}), {"model": layout})
    Traceback (most recent call last):
    ...
    prefed.merge.checks.BadUpload: upload of client 'd7': lora/0/q/A in group 'model' holds NaN or infinity
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
            right = layout[entry.name].shape
            if entry.shape != right:
                raise BadUpload(upload.client, f"{where} has shape {entry.shape}, not {right}")
            # A number that is finite in a wider dtype may be infinite once it is the model's.
            if tensors.flat.dtype != dtype:
                raise BadUpload(upload.client, f"{where} holds {tensors.flat.dtype}, not {dtype}")
        if not tensors.isfinite():
            name = next(name for name in tensors if not bool(tensors[name].isfinite().all()))
            raise BadUpload(upload.client, f"{name} in group {group!r} holds NaN or infinity")


def proportion(
    uploads: Sequence[Upload],
    origins: Mapping[str, Tensors],
    most: float,
    steps: Collection[str] = (),
) -> None:
    """Confirm that no upload is out of all proportion to the others.

    An update is the step from where the server stands to what a client sends, a group of tensors at a time.
    One passes if it is at most ``most`` times as long as the median of the round's. It also passes if it is
    no longer than the server's own tensors of that group: where nearly everybody has all but stopped, an
    honest client need not have. If more than half of the updates have no length at all, all pass.

    Where the number of uploads is even the upper one of the two middle lengths is the median, so that half of
    the clients, were they to send next to nothing, could not have the others refused. But where that is
    more than ``most`` times as long as the lower one and as the server's own tensors, if they have a length
    at all, it is half of the clients that lie: then the longer of these two takes its place.

    Args:
        uploads: of one exchange, each checked on its own.
        origins: the server's groups; a group that the server does not have starts from zero.
        most: how many times the median; 0 lets everything pass.
        steps: the groups in which clients send the update itself.

    Raises:
        BadUpload: of the longest one, if it does not pass.
    """
    for group in sorted({name for upload in uploads for name in upload.tensors}) if most else ():
        held = {upload.client: upload.tensors[group] for upload in uploads if group in upload.tensors}
        origin = origins.get(group, Tensors.empty())
        start = None if group in steps else origin
        lengths = {client: length(tensors, start) for client, tensors in held.items()}
        ranked = sorted(lengths.values())
        low, middle = ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2]
        client = max(sorted(lengths), key=lengths.__getitem__)
        longest = lengths[client]
        own = length(origin.select(name for name in held[client] if name in origin), None)
        of = "the median of the round's"
        if own and middle > most * max(low, own):
            middle, of = max(low, own), "what the server has and half of the round send"
        if not middle or (longest <= most * middle and math.isfinite(longest)):
            continue
        if longest > own:
            raise BadUpload(
                client,
                f"its update of group {group!r} has length {longest:.3g}, {longest / middle:.3g} times "
                f"{of}, {middle:.3g}; [merge] max_ratio = {most:g} is the most",
            )


def length(tensors: Tensors, origin: Tensors | None = None) -> float:
    """Euclidean length of the step to ``tensors`` from ``origin``, or from zero where that lacks a tensor."""
    start = Tensors.zeros(tensors.layout, tensors.flat.dtype)
    if origin is not None:
        start = start.replace(origin.select(name for name in tensors if name in origin))
    # A difference that overflows has an infinite length, which is no honest one.
    return float(torch.linalg.vector_norm(tensors.flat - start.flat, dtype=torch.float64))


def _finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        # An integer, which JSON allows any length, beyond the floats.
        return False
