"""Uploads that are clipped and have Gaussian noise: what one client trained is hidden among all.

The update of an upload is the step from what the client was sent to what it sends back, all its tensors laid
end to end. It is scaled down to at most C long. Then, with z the noise multiplier::

    local     the client sends  origin + Δ_i min(1, C/‖Δ_i‖) + N(0, (z C)² I)
    central   the server's mean is  origin + (Σ_i Δ_i min(1, C/‖Δ_i‖) + N(0, (z C)² I)) / m
    distributed  the same sum, in whole numbers, with noise from each site: prefed.privacy.distributed

m is the size of a cohort, whoever answers. An upload that is missing or refused counts as a step of 0. So the
sum changes by at most C if one client sends nothing, and by at most 2 C if it sends anything else
(Gaussian mechanism: Dwork and Roth 2014; of clients: McMahan et al. 2018, arXiv:1710.06963).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from prefed.core import Download, Exchange, Key, Layout, Privacy, Tensors, Upload
from prefed.core.lazy import np, torch
from prefed.merge.means_distances import weighted_mean

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


_ROUNDING = 1e-3
"""How much longer than ``clip`` an update may be, as a share of it, only for the rounding of its numbers."""


def privatize(
    upload: Upload, download: Download, exchange: Exchange, privacy: Privacy, key: Key | None
) -> Upload:
    """What leaves a client under ``kind = "local"``: ``upload`` with a clipped update, and noise.

    An upload that needs neither is returned as it is. One with a NaN or an infinity stays without a finite
    number, and is refused where it is validated. So is one whose download has numbers so large that float64
    cannot keep the bound next to them: whoever sends these could have a step grow to twice its length.

    Args:
        download: what the client was sent.
        key: of the noise; ``None`` for the operating system's secure random numbers.
    """
    origin = {name: _origin(download, exchange, name, group.layout) for name, group in upload.tensors.items()}
    clipped = _clip(upload.tensors, origin, privacy.clip)
    if privacy.clip is not None and _length(_steps(clipped, origin)) > privacy.clip * (1 + _ROUNDING):
        clipped = {name: group * math.nan for name, group in clipped.items()}
    if privacy.noise:
        clipped = _noised(clipped, privacy.noise, key)
    return replace(upload, tensors={name: _like(upload.tensors[name], clipped[name]) for name in clipped})


def noised_mean(
    uploads: Sequence[Upload],
    download: Download,
    exchange: Exchange,
    layouts: Mapping[str, Layout],
    cohort: int,
    privacy: Privacy,
    key: Key | None,
) -> dict[str, Tensors]:
    """The mean of the uploads under ``kind = "central"``: all clients alike, updates clipped, with noise.

    It is the only thing that a server may make of the uploads. Without noise, and with as many uploads as
    ``cohort`` says, of which none is clipped, it is their mean, bit for bit.

    Args:
        uploads: of one exchange; there may be none.
        download: what each client was sent.
        layouts: group → layout of the uploads.
        cohort: m, the size of a cohort, which is not the number of uploads.

    Returns:
        Group → mean, in the dtype of the download.
    """
    origin = {name: _origin(download, exchange, name, layout) for name, layout in layouts.items()}
    clipped = [_clip(upload.tensors, origin, privacy.clip) for upload in uploads]
    # An upload that is missing is a step of 0. More uploads than the cohort's size make its weight negative.
    weights = [1 - len(uploads) / cohort, *[1 / cohort] * len(uploads)]
    mean = {
        name: weighted_mean([origin[name], *(groups[name].to(torch.float64) for groups in clipped)], weights)
        for name in layouts
    }
    if privacy.noise:
        mean = _noised(mean, privacy.noise / cohort, key)
    like = next(iter(download.tensors.values()))
    return {name: _like(like, group) for name, group in mean.items()}


def noised_votes(votes: NDArray[np.floating], privacy: Privacy, key: Key | None) -> NDArray[np.int64]:
    """The sum of clients' votes on n pairs, with noise, in whole votes; 0 is a tie.

    A vote is between −1 and 1, so those of a client are at most C = √n long, whatever ``clip`` is. The sum
    is rounded after the noise; whole numbers have no digits that give away what the noise was added to.

    Args:
        votes: ``[M, n]``.
        key: of the noise, used for no other votes; ``None`` for the operating system's secure numbers.
    """
    total = torch.from_numpy(np.clip(votes, -1, 1).astype(np.float64).sum(0))
    names = ["sum"] if privacy.kind == "central" else range(len(votes))
    for name in names if privacy.noise_multiplier else ():
        deviation = vote_noise(privacy, 1, len(total))
        total += normal(len(total), key and key.at("noise", name)) * deviation
    rounded: NDArray[np.int64] = total.round().long().numpy()
    return rounded


def vote_noise(privacy: Privacy, clients: int, pairs: int, sites: int = 0) -> float:
    """Standard deviation of the noise on the sum of clients' votes on one pair, if all vote on so many pairs.

    Args:
        sites: number of sites that add noise, under ``distributed``.

    >>> private = Privacy(kind="central", clip=0.3, noise_multiplier=4.0, delta=1e-5)
    >>> vote_noise(private, 100, 25), vote_noise(private.model_copy(update={"kind": "local"}), 100, 25)
    (20.0, 200.0)
    """
    own = (privacy.noise_multiplier or 0.0) * math.sqrt(pairs)
    shares = {"local": clients, "distributed": sites / ((sites - privacy.colluding(sites)) or 1)}
    return own * math.sqrt(shares.get(privacy.kind or "", 1))


def clipped_steps(upload: Upload, download: Download, exchange: Exchange, clip: float | None) -> Upload:
    """The update of an upload as its tensors, clipped: what a client gives its site under ``distributed``."""
    origin = {name: _origin(download, exchange, name, group.layout) for name, group in upload.tensors.items()}
    steps = _steps(_clip(upload.tensors, origin, clip), origin)
    return replace(
        upload,
        tensors={
            name: _like(upload.tensors[name], Tensors(group.layout, steps[name]))
            for name, group in upload.tensors.items()
        },
    )


def flat_steps(upload: Upload) -> NDArray[np.float64]:
    """All numbers of an upload in float64, group after group in the order of their names."""
    parts = [upload.tensors[name].flat.double() for name in sorted(upload.tensors)]
    if not parts:
        return np.zeros(0)
    flat: NDArray[np.float64] = torch.cat(parts).cpu().numpy()
    return flat


def mean_of_sum(
    total: NDArray[np.float64],
    download: Download,
    exchange: Exchange,
    layouts: Mapping[str, Layout],
    cohort: int,
) -> dict[str, Tensors]:
    """The server's mean from a sum of :func:`flat_steps`; as :func:`noised_mean`."""
    names = sorted(layouts)
    parts = torch.split(torch.from_numpy(total) / cohort, [layouts[name].size for name in names])
    like = next(iter(download.tensors.values()))
    return {
        name: _like(
            like, Tensors(layouts[name], _origin(download, exchange, name, layouts[name]).flat + part)
        )
        for name, part in zip(names, parts, strict=True)
    }


def _clip(
    groups: Mapping[str, Tensors], origin: Mapping[str, Tensors], clip: float | None
) -> dict[str, Tensors]:
    """``groups`` with an update of at most ``clip``, in float64; within the bound they stay as they are."""
    if clip is None:
        return dict(groups)
    steps = _steps(groups, origin)
    norm = _length(steps)
    if norm <= clip:
        return dict(groups)
    # A NaN in the update, or an infinity, reaches every number.
    return {
        name: Tensors(origin[name].layout, origin[name].flat + step * (clip / norm))
        for name, step in steps.items()
    }


def _steps(groups: Mapping[str, Tensors], origin: Mapping[str, Tensors]) -> dict[str, Tensor]:
    return {name: group.flat.double() - origin[name].flat for name, group in groups.items()}


def _length(steps: Mapping[str, Tensor]) -> float:
    return math.sqrt(math.fsum(float(step.square().sum()) for step in steps.values()))


def _noised(groups: Mapping[str, Tensors], deviation: float, key: Key | None) -> dict[str, Tensors]:
    """``groups`` with noise, in float64: they are rounded once, after it."""
    draws = normal(sum(group.layout.size for group in groups.values()), key) * deviation
    parts = torch.split(draws, [groups[name].layout.size for name in sorted(groups)])
    return {
        name: Tensors(groups[name].layout, groups[name].flat.double() + part)
        for name, part in zip(sorted(groups), parts, strict=True)
    }


def _like(like: Tensors, group: Tensors) -> Tensors:
    """``group`` in the dtype and on the device of ``like``."""
    return Tensors(group.layout, group.flat.to(like.flat))


def _origin(download: Download, exchange: Exchange, group: str, layout: Layout) -> Tensors:
    """What the numbers of a group of an upload are measured from, in float64."""
    sent: Mapping[str, Tensor] = download.tensors.get(group, {})
    values = {}
    for entry in layout.entries:
        constant = exchange.origins.get(group, exchange.origins.get(entry.name))
        if constant is None and entry.name in sent:
            values[entry.name] = sent[entry.name].double()
        else:
            values[entry.name] = torch.full(entry.shape, constant or 0.0, dtype=torch.float64)
    return Tensors.gather(layout, values) if values else Tensors.zeros(layout, torch.float64)


_CHUNK = 1 << 16
_SUMMED = 4


def normal(size: int, key: Key | None) -> torch.Tensor:
    """``[size]`` draws of N(0, 1) in float64.

    Whoever knows a key knows its draws. So a key serves simulations alone, and hides nothing from a server
    that knows the run's seed.

    Without a key the bits are the operating system's secure random bits, and each draw is the sum of four
    normal draws over 2. A sum has no gaps between its possible values that would give away what was added to
    it, as a single draw of limited precision has (Holohan and Braghin 2021, arXiv:2107.10138).

    Args:
        key: names the stream; ``None`` for the operating system's secure random numbers.

    >>> normal(3, Key(1)).equal(normal(3, Key(1))), normal(3, None).equal(normal(3, None))
    (True, False)
    """
    if key is not None:
        return torch.randn(size, generator=key.torch(), dtype=torch.float64)
    result = np.empty(size)
    for start in range(0, size, _CHUNK):
        stop = min(start + _CHUNK, size)
        result[start:stop] = _secure(stop - start)
    return torch.from_numpy(result)


def _secure(size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    from scipy.special import ndtri

    bits = np.frombuffer(secrets.token_bytes(8 * _SUMMED * size), dtype=np.uint64)
    # 53 bits each, in the middle of their steps: 0 and 1, whose quantiles are infinite, are not among them.
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    draws: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = ndtri(uniform).reshape(_SUMMED, size)
    draws = draws.sum(axis=0)
    draws /= _SUMMED**0.5
    return draws
