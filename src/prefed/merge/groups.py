"""Merge uploads into several models, each into the model that the server assigned to the client."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from prefed.core import Round, State, Upload
from prefed.merge import rules
from prefed.merge.aggregator import Aggregator
from prefed.merge.lora import without_residuals
from prefed.merge.oversized_updates import check_length, measures
from prefed.merge.uploads import BadUpload, TooFewUploads, align

SENT = "model"
"""The group of tensors in every upload, regardless of the server's group."""


def by_mass(aggregator: Aggregator, setting: str) -> Aggregator:
    """Return ``aggregator`` with weights ``"mass"`` (FedBiscuit, eq. 6).

    Args:
        aggregator: the aggregator with the configured weights.
        setting: the setting that requires it, for the error.

    Raises:
        ValueError: ``[merge]`` sets uniform weights or another rule than mean and norm_clip.
    """
    config = aggregator.config
    other = config.weights not in ("samples", "mass")
    if other or config.rule not in ("mean", "norm_clip"):
        what = f"weights {config.weights!r}" if other else f"rule {config.rule!r}"
        raise ValueError(
            f"{setting} weighs each client by its share of all pairs and cannot be combined with {what} in "
            "[merge]; set it to 'normalised'"
        )
    return replace(aggregator, config=config.model_copy(update={"weights": "mass"}))


def merge_groups(
    aggregator: Aggregator,
    state: State,
    uploads: Sequence[Upload],
    groups: Mapping[str, str],
    now: Round,
    names: Collection[str],
) -> tuple[State, dict[str, dict[str, float]], dict[str, str]]:
    """Merge each upload into the server's group of its client.

    Groups without uploads, or with too few for the merge rule, keep their tensors.

    Args:
        aggregator: merges the uploads of one group.
        uploads: at least one upload, with tensors in the group :data:`SENT`.
        groups: client → group, as recorded by the server.

    Returns:
        The next state of the server; group → metrics of its merge, sorted; and group → reason, for groups
        with too few uploads.

    Raises:
        TooFewUploads: no group has enough uploads.
        BadUpload: an upload does not match its group, or its update is too large.
    """
    members: dict[str, list[Upload]] = {}
    for upload in uploads:
        group = groups[upload.client]
        members.setdefault(group, []).append(replace(upload, tensors={group: upload.tensors[SENT]}))
    _check_sizes(aggregator, state, uploads, groups, {name: len(own) for name, own in members.items()})
    aggregator = _with_one_bound(aggregator, state, members, names)
    reports: dict[str, dict[str, float]] = {}
    short: dict[str, str] = {}
    for group in sorted(members):
        try:
            state, reports[group] = aggregator.merge(state, members[group], now, group, names=names)
        except TooFewUploads as error:
            short[group] = str(error)
    if len(short) == len(members):
        raise TooFewUploads("; ".join(f"{group}: {reason}" for group, reason in short.items()))
    return state, reports, short


def _with_one_bound(
    aggregator: Aggregator, state: State, members: Mapping[str, Sequence[Upload]], names: Collection[str]
) -> Aggregator:
    """Set one bound of ``norm_clip`` for all groups: the median norm of the round.

    Otherwise, the only client of a group would set its own bound.
    """
    config = aggregator.config
    if config.rule != "norm_clip" or config.max_norm is not None:
        return aggregator
    norms: list[float] = []
    for group, own in members.items():
        current = without_residuals(state.tensors[group].select(names))
        norms += rules.update_norms(align(own, group, current), current)
    return replace(aggregator, config=config.model_copy(update={"max_norm": rules.median_norm(norms)}))


def _check_sizes(
    aggregator: Aggregator,
    state: State,
    uploads: Sequence[Upload],
    groups: Mapping[str, str],
    sizes: Mapping[str, int],
) -> None:
    """Check all uploads like :meth:`Aggregator.with_size_check`, each as a step from its group's tensors.

    Checking only the longest update is not enough: its group may be unable to merge without it.
    """
    most, sent = aggregator.config.max_ratio, {upload.client: upload.tensors[SENT] for upload in uploads}
    origins = {client: state.tensors[groups[client]] for client in sent}
    for measure in measures(uploads[0].tensors[SENT], SENT, aggregator.scaling) if most else ():
        lengths = {client: measure.norm(sent[client], origins[client]) for client in sorted(sent)}
        for client in sorted(lengths, key=lengths.__getitem__, reverse=True):
            try:
                own = measure.own(sent[client], origins[client])
                check_length(client, lengths[client], lengths.values(), own, most, measure.what)
            except BadUpload:
                # Otherwise, one client could stop every round of its group with a refused upload.
                if rules.can_merge(aggregator.config, sizes[groups[client]] - 1):
                    raise
