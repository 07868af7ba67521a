"""Check, sort and align uploads before they are merged.

Averaging late models would move the server back towards older models. FedBuff (arXiv:2106.06639, algorithm 1)
adds the steps of the clients to the newest model instead::

    θ ← θ + (1/K) Σ_i s(q_i) (θ_i − θ^{start_i})
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from prefed.core import Layout, State, Tensors, Upload
from prefed.core.lazy import torch
from prefed.merge.lora import first_rows, without_residuals

LARGEST = 3.4028234663852886e38
"""The largest float32, and the bound on the scalars of an upload, so that their sums do not overflow."""


class BadUpload(ValueError):  # noqa: N818
    """An upload that must not be merged.

    Attributes:
        reason: what is wrong with the tensor or scalar.
    """

    def __init__(self, client: str, reason: str) -> None:
        super().__init__(f"upload of client {client!r}: {reason}")
        self.client = client
        self.reason = reason


class TooFewUploads(ValueError):  # noqa: N818
    """Fewer uploads than the merge rule needs."""


def check_upload(upload: Upload, groups: Mapping[str, Layout], dtype: torch.dtype | None = None) -> None:
    """Check the weight, scalars and tensors of an upload.

    Args:
        dtype: dtype of their tensors, by default float32.

    Raises:
        BadUpload: the weight is not positive; a tensor or scalar is NaN or infinite; a scalar is outside the
            range of float32; a tensor is not in ``groups``, or has another shape or dtype.

    >>> from prefed.core import Entry, Tensors
    >>> layout = Layout((Entry("lora/0/q/A", (2,), "lora", 0, "A"),))
    >>> broken = Tensors(layout, torch.tensor([1.0, torch.nan]))
    >>> check_upload(Upload("d7", 3, {"model": broken}), {"model": layout})
    Traceback (most recent call last):
    ...
    prefed.merge.uploads.BadUpload: upload of client 'd7': lora/0/q/A in group 'model' has NaN or infinity
    """
    dtype = dtype or torch.float32
    if not (_finite(upload.weight) and upload.weight > 0):
        raise BadUpload(upload.client, f"weight must be a positive number, not {upload.weight}")
    for name, number in upload.scalars.items():
        if not _finite(number):
            raise BadUpload(upload.client, f"scalar {name!r} is {number}")
        if abs(number) > LARGEST:
            raise BadUpload(upload.client, f"scalar {name!r} is {number:.3g}, outside the range of float32")
    for group, tensors in upload.tensors.items():
        shapes = {entry.name: entry.shape for entry in groups.get(group, Layout(())).entries}
        for entry in tensors.layout.entries:
            where = f"{entry.name} in group {group!r}"
            if entry.name not in shapes:
                raise BadUpload(upload.client, f"unexpected tensor {where}")
            if entry.shape != shapes[entry.name]:
                raise BadUpload(upload.client, f"{where} has shape {entry.shape}, not {shapes[entry.name]}")
            # A finite number of a wider dtype may be infinite in the dtype of the model.
            if tensors.flat.dtype != dtype:
                raise BadUpload(upload.client, f"{where} has dtype {tensors.flat.dtype}, not {dtype}")
        if not tensors.isfinite():
            name = next(name for name in tensors if not bool(tensors[name].isfinite().all()))
            raise BadUpload(upload.client, f"{name} in group {group!r} has NaN or infinity")


def sort_uploads(uploads: Iterable[Upload]) -> tuple[Upload, ...]:
    """Sort uploads by client id and starting round, so that merging does not depend on their arrival.

    Raises:
        ValueError: a client sent two uploads that started from the same round.
    """
    result = tuple(sorted(uploads, key=lambda upload: (upload.client, upload.sent_at)))
    for first, second in itertools.pairwise(result):
        if (first.client, first.sent_at) == (second.client, second.sent_at):
            raise ValueError(
                f"client {first.client!r} sent two uploads that started from round {first.sent_at}"
            )
    return result


def align(uploads: Sequence[Upload], group: str, current: Tensors) -> list[Tensors]:
    """Return the tensors of ``group`` in the layout and dtype of ``current``, without residuals.

    Raises:
        BadUpload: the tensors of an upload have other names or shapes than those of ``current``.
    """
    aligned = []
    for upload in uploads:
        value = without_residuals(upload.tensors[group])
        odd = sorted(set(value) ^ set(current))
        if odd:
            which = "missing" if odd[0] in current else "unexpected"
            raise BadUpload(upload.client, f"{which} tensor {odd[0]} in group {group!r}")
        shapes = {entry.name: entry.shape for entry in value.layout.entries}
        for entry in current.layout.entries:
            if (shape := shapes[entry.name]) != entry.shape:
                raise BadUpload(upload.client, f"{entry.name} has shape {shape}, not {entry.shape}")
        if value.layout.names != current.layout.names:
            value = Tensors.gather(current.layout, value)
        aligned.append(Tensors(current.layout, value.flat.to(current.flat.dtype)))
    return aligned


def _finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        # JSON allows integers larger than any float.
        return False


def from_newest(upload: Upload, start: State, newest: State) -> Upload:
    """Replace each group θ_i of ``upload`` by θ + (θ_i − θ^start).

    Args:
        start: server state that the client started from.
        newest: current server state, with the groups of ``start``.

    >>> import torch
    >>> from prefed.core import Entry, Layout
    >>> def state(x): return State({"model": Tensors(Layout((Entry("a", (1,), "lora"),)), torch.tensor([x]))})
    >>> sent = Upload("ward-7", 3, state(2.5).tensors)
    >>> from_newest(sent, state(2.0), state(7.0)).tensors["model"].flat
    tensor([7.5000])
    """
    groups = {}
    for name, value in upload.tensors.items():
        before, after = (
            first_rows(state.tensors[name], value.layout).flat.double() for state in (start, newest)
        )
        groups[name] = Tensors(value.layout, (after + (value.flat.double() - before)).to(value.flat.dtype))
    return replace(upload, tensors=groups)


def shorten(current: Tensors, value: Tensors, factor: float) -> Tensors:
    """Interpolate from ``current`` (factor 0) to ``value`` (factor 1, exact)."""
    return value if factor == 1 else current + (value - current) * factor
