"""Several models in one round: each upload goes into the one that the server names for its client."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from prefed.core import Round, State, Upload
from prefed.merge import rules
from prefed.merge.aggregator import Aggregator
from prefed.merge.lora import without_residuals
from prefed.merge.uploads import BadUpload, TooFewUploads, align, check_length, update_norm

SENT = "model"
"""The group in which every client sends its tensors, whichever of the server's groups they belong to."""


def by_mass(aggregator: Aggregator, setting: str) -> Aggregator:
    """``aggregator`` with weights ``"mass"``: FedBiscuit's eq. 6.

    Args:
        setting: what asks for it, for the error.

    Raises:
        ValueError: ``[merge]`` asks for other weights, or for a rule that has no place for these.
    """
    config = aggregator.config
    if config.weights == "uniform" or config.rule not in ("mean", "norm_clip"):
        what = "weights 'uniform'" if config.weights == "uniform" else f"rule {config.rule!r}"
        raise ValueError(
            f"{setting} moves a model by each client's share of all pairs, and {what} in [merge] leaves no "
            "place for that: set it to 'normalised'"
        )
    return replace(aggregator, config=config.model_copy(update={"weights": "mass"}))


def merge_groups(
    aggregator: Aggregator,
    state: State,
    uploads: Sequence[Upload],
    groups: Mapping[str, str],
    now: Round,
    names: Collection[str],
) -> tuple[State, dict[str, str]]:
    """Merge each upload into the server's group of its client. A group without uploads keeps its tensors.

    Args:
        aggregator: merges the uploads of one group.
        uploads: at least one, each with its tensors in the group :data:`SENT`.
        groups: client → the server's group. It is the server's own account: nothing in an upload decides it.
        names: the tensors that are merged.

    Returns:
        The server's next state; and each group that has too few uploads for the merge rule, with the reason.
        Such a group keeps its tensors.

    Raises:
        TooFewUploads: this holds for every group that has uploads.
        BadUpload: an upload does not fit its group, or its update is out of all proportion to the others'.
    """
    members: dict[str, list[Upload]] = {}
    for upload in uploads:
        group = groups[upload.client]
        members.setdefault(group, []).append(replace(upload, tensors={group: upload.tensors[SENT]}))
    _check_sizes(aggregator, state, uploads, groups, {name: len(own) for name, own in members.items()})
    aggregator = _with_one_bound(aggregator, state, members, names)
    short: dict[str, str] = {}
    for group in sorted(members):
        try:
            state = aggregator.merge(state, members[group], now, group, names=names)
        except TooFewUploads as error:
            short[group] = str(error)
    if len(short) == len(members):
        raise TooFewUploads("; ".join(f"{group}: {reason}" for group, reason in short.items()))
    return state, short


def _with_one_bound(
    aggregator: Aggregator, state: State, members: Mapping[str, Sequence[Upload]], names: Collection[str]
) -> Aggregator:
    """``aggregator``, in which ``norm_clip`` has one bound for all groups: the median length of the round.

    By the median of its group alone, a client that is by itself there would set its own bound.
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
    """As :meth:`Aggregator.with_size_check` over all uploads, each as a step from its own group's tensors.

    Each of them is checked: the longest may be one that its group cannot do without.
    """
    most, sent = aggregator.config.max_ratio, {upload.client: upload.tensors[SENT] for upload in uploads}
    origins = {client: state.tensors[groups[client]].select(sent[client]) for client in sent}
    lengths = {client: update_norm(sent[client], origins[client]) for client in sorted(sent)}
    for client in sorted(lengths, key=lengths.__getitem__, reverse=True) if most else ():
        try:
            own = update_norm(origins[client])
            check_length(client, lengths[client], lengths.values(), own, most, SENT)
        except BadUpload:
            # Otherwise one client could stop its group's every round by an upload that is refused.
            if rules.can_merge(aggregator.config, sizes[groups[client]] - 1):
                raise
