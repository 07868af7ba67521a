"""Check, sort and align uploads before they are merged.

Averaging late models would move the server back towards older models. FedBuff (arXiv:2106.06639, algorithm 1)
adds the steps of the clients to the newest model instead::

    θ ← θ + (1/K) Σ_i s(q_i) (θ_i − θ^{start_i})
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from prefed.core import Layout, State, Tensors, Upload
from prefed.core.lazy import torch
from prefed.merge.lora import change_norm, first_rows, modules, without_residuals

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
        layout = groups.get(group, Layout(()))
        for entry in tensors.layout.entries:
            where = f"{entry.name} in group {group!r}"
            if entry.name not in layout:
                raise BadUpload(upload.client, f"unexpected tensor {where}")
            expected = layout[entry.name].shape
            if entry.shape != expected:
                raise BadUpload(upload.client, f"{where} has shape {entry.shape}, not {expected}")
            # A finite number of a wider dtype may be infinite in the dtype of the model.
            if tensors.flat.dtype != dtype:
                raise BadUpload(upload.client, f"{where} has dtype {tensors.flat.dtype}, not {dtype}")
        if not tensors.isfinite():
            name = next(name for name in tensors if not bool(tensors[name].isfinite().all()))
            raise BadUpload(upload.client, f"{name} in group {group!r} has NaN or infinity")


def check_update_sizes(
    uploads: Sequence[Upload],
    origins: Mapping[str, Tensors],
    most: float,
    steps: Collection[str] = (),
    scaling: float = 1.0,
) -> None:
    """Check that no update is far longer than the others of its round, separately for each group.

    The length of an update is the Euclidean norm of the step from the server's tensors to those of the
    client. An update passes if it is at most ``most`` times as long as the median of the round, or no longer
    than the server's tensors of that group, since an honest client may still move when most others have
    converged. All updates pass if more than half of them are zero.

    If clients send both factors of a LoRA, the change s (B A − B₀ A₀) of the weights must pass, too: as long
    a step of the factors can change their product much more. The server's own length is then that of s B₀ A₀
    and its residuals.

    For an even number of uploads, the median is the upper of the two middle lengths, so that half of the
    clients cannot exclude the others by sending tiny updates. If this upper length is more than ``most``
    times both the lower one and the norm of the server's tensors (which is not 0), half of the clients are
    dishonest, and the greater of these two replaces the median.

    Args:
        uploads: uploads of one exchange that passed :func:`check_upload`.
        origins: the groups of the server; missing groups start from zero.
        most: maximum multiple of the median; 0 disables the check.
        steps: groups in which clients send the update itself.
        scaling: s = α / rank of the LoRA.

    Raises:
        BadUpload: the longest update does not pass.
    """
    for group in sorted({name for upload in uploads for name in upload.tensors}) if most else ():
        sent = [upload for upload in uploads if group in upload.tensors]
        start = None if group in steps else origins.get(group, Tensors.empty())
        for measure in measures(sent[0].tensors[group], group, scaling)[: 1 if start is None else 2]:
            lengths = [measure.norm(upload.tensors[group], start) for upload in sent]
            longest = max(lengths)
            worst = min(
                (upload for upload, length in zip(sent, lengths, strict=True) if length == longest),
                key=lambda upload: (upload.client, upload.sent_at),
            )
            own = measure.own(worst.tensors[group], origins.get(group, Tensors.empty()))
            check_length(worst.client, longest, lengths, own, most, measure.what)


@dataclass(frozen=True)
class Measure:
    """How to measure updates.

    Attributes:
        what: what is measured, for errors.
        norm: the length of the step from the second tensors, or zero, to the first.
        whole: whether all of the server's tensors count for its own length, or only those that clients send.
    """

    what: str
    norm: Callable[[Tensors, Tensors | None], float]
    whole: bool = False

    def own(self, sent: Tensors, server: Tensors) -> float:
        """Return the server's own length, for an upload with the tensors ``sent``."""
        return self.norm(server if self.whole else server.select(n for n in sent if n in server), None)


def measures(tensors: Tensors, group: str, scaling: float) -> list[Measure]:
    """Return how to measure updates of a group like ``tensors``: themselves, and what a LoRA changes."""
    found = [Measure(f"update of group {group!r}", update_norm)]
    if modules(tensors.layout):
        change = partial(change_norm, scaling=scaling)
        found.append(Measure(f"change of s B A in group {group!r}", change, whole=True))
    return found


def check_length(
    client: str, length: float, lengths: Collection[float], own: float, most: float, what: str
) -> None:
    """Check the update of one client; see :func:`check_update_sizes`.

    Args:
        lengths: lengths of all updates of the round.
        own: norm of the server's tensors that the update starts from.
        most: maximum multiple of the median.

    Raises:
        BadUpload: the update does not pass.
    """
    ranked = sorted(lengths)
    low, middle = ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2]
    of = "the median of the round"
    if own and middle > most * max(low, own):
        middle, of = max(low, own), "the length of the server's model and of half of the updates"
    if not middle or (length <= most * middle and math.isfinite(length)):
        return
    if length > own:
        raise BadUpload(
            client,
            f"the {what} has length {length:.3g}, {length / middle:.3g} times {of}, "
            f"{middle:.3g}, but [merge] max_ratio = {most:g}",
        )


def update_norm(tensors: Tensors, origin: Tensors | None = None) -> float:
    """Return the Euclidean norm of the step from ``origin`` to ``tensors``.

    A tensor that ``origin`` lacks, or has with another shape, counts as a step from zero.
    """
    start = Tensors.zeros(tensors.layout, tensors.flat.dtype)
    if origin is not None:
        alike = [n for n in tensors if n in origin and origin[n].shape == tensors[n].shape]
        start = start.replace(origin.select(alike))
    # A step that overflows, which those of honest clients do not, has infinite length.
    return float(torch.linalg.vector_norm(tensors.flat - start.flat, dtype=torch.float64))


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
