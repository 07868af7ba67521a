"""Updates that are far longer than the others of their round are refused (``[merge] max_ratio``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prefed.core import Tensors, Upload
from prefed.core.lazy import torch
from prefed.merge.lora import change_norm, modules
from prefed.merge.uploads import BadUpload


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
        uploads: uploads of one exchange that passed :func:`~prefed.merge.check_upload`.
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
