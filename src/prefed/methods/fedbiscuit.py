"""FedBiscuit: several selectors, each trained by a cluster of similar clients (arXiv:2407.03038).

Section 5.1 and algorithm 1, with initially equal selectors φ_1 … φ_U, T warm-up rounds each and W = U T::

    rounds 1 … W: warm-up of the selectors in turn                                         lines 1-14
        FedBis with φ_u in rounds (u − 1) T + 1 … u T
    rounds W + 1, W + 1 + τ, …: client grouping, before the round's training               lines 18-20
        server   sends all selectors to all clients
        client   sends its mean validation loss under each
        server   assigns each client to the selector of its lowest loss, balanced          eqs. 4, 5
    rounds W + 1 …: training by clusters                                                   lines 21-27
        server   samples a cohort S and sends each i ∈ S the selector of its cluster
        client   φ_u^i ← φ_u; K local steps
        server   φ_u ← (1 − Σ_{i∈S_u} p_i) φ_u + Σ_{i∈S_u} p_i φ_u^i,  p_i = n_i / Σ_m n_m    eq. 6

All selectors vote on the server's pairs.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast

from pydantic import Field

from prefed.core import (
    ClientTrainer,
    Download,
    Exchange,
    Layout,
    Merged,
    Method,
    Owner,
    Plain,
    Round,
    State,
    Tensors,
    Upload,
)
from prefed.merge import Aggregator, by_mass, clustering, merge_groups
from prefed.methods.base import ClusterSettings, FedAvgBase, Selectors, lora_parts, lr_schedule

SOURCE = "FedBiscuit (arXiv:2407.03038), algorithm 1"
NO_NOISE = "it groups clients by the losses that they report without noise"
SINGLE_UPLOADS = "its server groups clients by their losses and merges each group"
COUNTS_CLIENTS = "its server groups all clients by their losses"
_log = logging.getLogger("prefed")


class Settings(ClusterSettings):
    """Settings of FedBiscuit. Tables 3 and 4 of the paper: these defaults, 500 rounds, cohorts of 5 or 10."""

    cluster_mean: Literal["eq6", "normalised"] = Field(
        "eq6",
        description="weights of a cluster's uploads: eq6, their shares of the pairs of all clients, with the "
        "remaining weight on the current selector; normalised, as in FedBis",
    )
    balance: Literal["greedy", "exact"] = Field(
        "greedy",
        description="grouping of clients: greedy, as in the paper; exact, the lowest sum of losses",
    )


needs = lora_parts


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedBiscuit over ``layout``.

    Raises:
        ValueError: ``[merge]`` sets weights or a rule that cannot be combined with eq. 6.
    """
    eq6 = settings.cluster_mean == "eq6"
    by_cluster = by_mass(aggregator, "cluster_mean = 'eq6'") if eq6 else aggregator
    fedavg = FedAvgBase.of(settings, aggregator, rounds)
    selectors = Selectors(fedavg, settings.selectors)
    names, (each, every) = selectors.names, settings.intervals(rounds)
    if (warmup := len(names) * each) >= rounds:
        advice = f"no clients are grouped: raise rounds above {warmup}"
        if fitting := (rounds - 1) // len(names):
            advice += f", or lower method.warmup_rounds to {fitting} or fewer"
        if untrained := names[-(-rounds // each) :]:
            advice += f"; never trained, yet with a vote: {', '.join(untrained)}"
        _log.warning("fedbiscuit: warm-up takes %d rounds of %d, and %s", warmup, rounds, advice)

    def init_server(initial: Tensors) -> State:
        values = {**lr_schedule.begin(settings), "clusters": {}, "trained": []}
        return State(selectors.init(initial), values)

    def cluster(server: State, client: str, clients: Collection[str]) -> int:
        known = _clusters(server)
        # After a grouping without valid uploads, all clients are placed together, and thus evenly.
        return known[client] if client in known else clustering.place(clients, known, len(names))[client]

    def selector(server: State, client: str, now: Round) -> int:
        """The client's selector in this round: the one in warm-up, or that of its cluster."""
        warming = now.number <= warmup
        return (now.number - 1) // each if warming else cluster(server, client, now.weights)

    def send_all(server: State, client: str, now: Round) -> Download:
        return Download(selectors.all(server))

    def score(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        losses = map(clustering.cut, selectors.measure(trainer, private, download, "validation"))
        return trainer.upload({}, dict(zip(selectors.losses, losses, strict=True))), private

    def group(server: State, uploads: Sequence[Upload], now: Round) -> Merged:
        reports = {u.client: [u.scalars[name] for name in selectors.losses] for u in uploads if u.scalars}
        grouping = clustering.regroup(reports, _clusters(server), now.weights, len(names), settings.balance)
        server = server.update(values={"clusters": grouping["clusters"]})
        return server, {**grouping, "clusters": clustering.members(_clusters(server), len(names))}

    def send(server: State, client: str, now: Round) -> Download:
        own = selector(server, client, now)
        return Download(
            {"model": server.tensors[names[own]]}, {**lr_schedule.announce(server), "cluster": own}
        )

    def merge(server: State, uploads: Sequence[Upload], now: Round) -> Merged:
        # The server knows which selector each client received; the upload has no influence on it.
        warming = now.number <= warmup
        groups = {upload.client: names[selector(server, upload.client, now)] for upload in uploads}
        rule, trainable = aggregator if warming else by_cluster, fedavg.trainable(now, Owner.SHARED)
        merged, reports, short = merge_groups(rule, server, uploads, groups, now, trainable)
        placed = {} if warming else clustering.place(now.weights, _clusters(server), len(names))
        values: dict[str, Plain] = {"trained": [*reports], "clusters": {**placed}}
        after = fedavg.advance(merged.update(values=values), uploads)
        own: dict[str, Plain] = {name: {**report} for name, report in reports.items()}
        too_few: dict[str, Plain] = {"too_few": {**short}} if short else {}
        return after, {"selectors": own, **too_few, **lr_schedule.announce(after)}

    def publish(server: State, client: str) -> Download:
        known, trained = _clusters(server), cast("list[str]", server.values["trained"])
        # During warm-up, all clients use the selector that was trained last.
        last = names.index(trained[0]) if trained else 0
        own = cluster(server, client, [client]) if known else last
        return Download(selectors.all(server), {"cluster": own})

    grouping = Exchange(
        "score",
        send_all,
        score,
        group,
        to="all",
        due=lambda number: number > warmup and (number - warmup - 1) % every == 0,
        scalars=frozenset(selectors.losses),
        over="validation",
        groups=lambda client, now: {},
    )
    # merge_groups checks the sizes of updates, each relative to its own selector. Late uploads are refused
    # because clusters change.
    train = replace(fedavg.exchange(send=send), merge=merge, late="refused")
    return fedavg.method(
        "fedbiscuit",
        SOURCE,
        grouping,
        train,
        init_server=init_server,
        publish=publish,
        predict=selectors.predict,
        newcomer=selectors.newcomer,
        adapt=selectors.adapt,
        shared_models=selectors.models,
    )


def _clusters(server: State) -> Mapping[str, int]:
    """Return client → its cluster; empty during warm-up."""
    return cast("Mapping[str, int]", server.values["clusters"])
