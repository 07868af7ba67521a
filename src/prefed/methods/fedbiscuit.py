"""FedBiscuit: several selectors, each trained by a cluster of like-minded clients (arXiv:2407.03038).

Section 5.1 and algorithm 1, with selectors φ_1 … φ_U that start alike, T warm-up rounds each and W = U T::

    rounds 1 … W: warm-up of the selectors in turn                                         lines 1-14
        FedBis with φ_u in rounds (u − 1) T + 1 … u T
    rounds W + 1, W + 1 + τ, …: client grouping, before the round's training               lines 18-20
        server   sends all selectors to all clients
        client   sends its mean validation loss under each
        server   gives each client the selector with its least loss, clusters balanced     eqs. 4, 5
    rounds W + 1 …: training by clusters                                                   lines 21-27
        server   samples a cohort S and sends each i ∈ S its cluster's selector alone
        client   φ_u^i ← φ_u; K local steps
        server   φ_u ← (1 − Σ_{i∈S_u} p_i) φ_u + Σ_{i∈S_u} p_i φ_u^i,  p_i = n_i / Σ_m n_m    eq. 6

All selectors vote on the server's pairs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, cast

from pydantic import Field

from prefed.core import (
    ClientTrainer,
    Download,
    Exchange,
    Layout,
    Method,
    Owner,
    Plain,
    Round,
    State,
    Tensors,
    Upload,
)
from prefed.merge import Aggregator, MergeConfig, clusters, merge_groups, sort_uploads
from prefed.methods.base import CHOICE, FedAvgBase, SelectorSettings, lora_parts, schedule

SOURCE = "FedBiscuit (arXiv:2407.03038), algorithm 1"
Split: TypeAlias = Literal["train", "validation"]
_log = logging.getLogger("prefed")


class Settings(SelectorSettings):
    """Settings of FedBiscuit. The paper (tables 3 and 4): the defaults, 500 rounds, 5 of 53 or 10 of 200 clients."""

    selectors: int = Field(
        3, ge=1, description="selectors and clusters, U; the paper takes odd numbers, 3 and 5"
    )
    warmup_rounds: int = Field(
        50, ge=0, description="rounds in which each selector in turn is trained by all clients"
    )
    regroup_every: int = Field(
        50, ge=1, description="rounds from one grouping of the clients to the next (the paper: 50 or 100)"
    )
    cluster_mean: Literal["eq6", "normalised"] = Field(
        "eq6",
        description="how a cluster's uploads merge: eq6, each counts by its share of all clients' pairs, and the "
        "selector keeps the rest; normalised, their mean by pairs, as in FedBis",
    )
    balance: Literal["greedy", "exact"] = Field(
        "greedy",
        description="how clients are grouped: greedy, the paper's rule; exact, the balanced clusters with the least "
        "sum of losses",
    )


needs = lora_parts


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedBiscuit over ``layout``.

    Raises:
        ValueError: the weights of ``[merge]`` or its rule contradict ``cluster_mean``.
    """
    by_cluster = replace(aggregator, config=_cluster_config(settings, aggregator.config))
    fedavg = FedAvgBase.of(settings, aggregator, rounds)
    count, warmup = settings.selectors, settings.selectors * settings.warmup_rounds
    selectors = [f"selector-{u}" for u in range(count)]
    if warmup >= rounds:
        _log.warning(
            "fedbiscuit: %d rounds have no clusters, as warm-up takes %d; raise rounds or lower "
            "method.warmup_rounds",
            rounds,
            warmup,
        )

    def init_server(initial: Tensors) -> State:
        shared = fedavg.ownership.select(initial, Owner.SHARED)
        groups = [aggregator.init(shared, selector).tensors for selector in selectors]
        values = {**schedule.begin(settings), "round": 0, "clusters": {}, "trained": [], "too_few": {}}
        return State({name: tensors for group in groups for name, tensors in group.items()}, values)

    def selector(server: State, client: str, number: int) -> int:
        """Which selector the client has in round ``number``: the one that warms up, else its cluster's."""
        members = _clusters(server)
        if number <= warmup and not members:
            return (number - 1) // settings.warmup_rounds
        return members.get(client, clusters.place([client], members, count)[client])

    def one(published: Download, u: int) -> Download:
        """As a client receives it for training: selector ``u`` alone."""
        return Download({"model": published.tensors[selectors[u]]}, published.scalars)

    # Client grouping

    def send_all(server: State, client: str) -> Download:
        return Download({name: server.tensors[name] for name in selectors})

    def losses(trainer: ClientTrainer, private: State, download: Download, split: Split) -> list[float]:
        models = (fedavg.start(trainer, private, one(download, u)) for u in range(count))
        return [clusters.cut(trainer.loss(model, CHOICE, split)) for model in models]

    def score(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        numbers = losses(trainer, private, download, "validation")
        return trainer.upload({}, {f"loss_{u}": loss for u, loss in enumerate(numbers)}), private

    def group(server: State, uploads: Sequence[Upload], now: Round) -> State:
        """Those who report are grouped anew. The others keep their clusters, or go where fewest are."""
        reports = {
            upload.client: [clusters.cut(upload.scalars[f"loss_{u}"]) for u in range(count)]
            for upload in sort_uploads(uploads)
            if upload.scalars
        }
        assigned = (clusters.greedy if settings.balance == "greedy" else clusters.exact)(reports)
        before = _clusters(server)
        after = clusters.place(list(now.weights), {**before, **assigned}, count)
        means = [math.fsum(column) / len(reports) for column in zip(*reports.values(), strict=True)]
        report = {
            "clusters": after,
            "moved": [client for client in after if before.get(client, after[client]) != after[client]],
            "selector_losses": means,
            "balance_gap": clusters.gap(reports),
        }
        return server.update(values=report)

    def grouping(server: State) -> dict[str, Plain]:
        members = _clusters(server)
        lists: list[Plain] = [[c for c in sorted(members) if members[c] == u] for u in range(count)]
        return {
            "clusters": lists,
            **{name: server.values[name] for name in ("moved", "selector_losses", "balance_gap")},
        }

    # Training

    def send(server: State, client: str) -> Download:
        u = selector(server, client, _round(server) + 1)
        return Download({"model": server.tensors[selectors[u]]}, {**schedule.announce(server), "cluster": u})

    def merge(server: State, uploads: Sequence[Upload], now: Round) -> State:
        # What a client says of its cluster counts for nothing: the server knows what it sent.
        number = _round(server) + 1
        groups = {upload.client: selectors[selector(server, upload.client, number)] for upload in uploads}
        warming = number <= warmup and not _clusters(server)
        names = fedavg.trainable(now, Owner.SHARED)
        merged, short = merge_groups(
            aggregator if warming else by_cluster, server, uploads, groups, now, names
        )
        trained: list[Plain] = [name for name in selectors if name in groups.values() and name not in short]
        report = {"round": now.number, "trained": trained, "too_few": dict(short)}
        return fedavg.advance(merged.update(values=report), uploads)

    def figures(server: State) -> dict[str, Plain]:
        trained = [name for name in selectors if name in cast("list[str]", server.values["trained"])]
        short = server.values["too_few"]
        return {
            "selectors": {name: {**aggregator.figures(server, name)} for name in trained},
            **({"too_few": short} if short else {}),
            **schedule.announce(server),
        }

    # Predictions

    def publish(server: State, client: str) -> Download:
        u = selector(server, client, max(1, _round(server)))
        return Download(send_all(server, client).tensors, {"cluster": u})

    def predict(trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        return fedavg.start(trainer, private, one(published, int(published.scalars["cluster"])))

    def nearest(trainer: ClientTrainer, published: Download) -> Download:
        """A newcomer's cluster is that of its least loss on its training pairs, if it has any."""
        u = int(published.scalars["cluster"])
        if trainer.size:
            own = losses(trainer, State(), published, "train")
            u = min(range(count), key=own.__getitem__)
        return one(published, u)

    def newcomer(trainer: ClientTrainer, published: Download) -> Tensors:
        return fedavg.start(trainer, State(), nearest(trainer, published))

    def adapt(trainer: ClientTrainer, published: Download, steps: int) -> Tensors:
        return fedavg.adapt(trainer, nearest(trainer, published), steps)

    def shared_models(untouched: Tensors, published: Download) -> dict[str, Tensors]:
        return {name: untouched.replace(published.tensors[name]) for name in selectors}

    regroup = Exchange(
        "score",
        send_all,
        score,
        group,
        to="all",
        due=lambda number: number > warmup and (number - warmup - 1) % settings.regroup_every == 0,
        scalars=frozenset(f"loss_{u}" for u in range(count)),
        over="validation",
        groups=lambda client, now: {},
        figures=grouping,
    )
    train = fedavg.exchange(send=send, merge=merge, figures=figures)
    return fedavg.method(
        "fedbiscuit",
        SOURCE,
        regroup,
        train,
        reads="choice",
        init_server=init_server,
        publish=publish,
        predict=predict,
        newcomer=newcomer,
        adapt=adapt,
        shared_models=shared_models,
    )


def _cluster_config(settings: Settings, config: MergeConfig) -> MergeConfig:
    """How the uploads of a cluster merge."""
    if config.weights == "mass":
        raise ValueError("weights 'mass' in [merge] is cluster_mean = 'eq6' here: leave weights at 'samples'")
    if settings.cluster_mean == "normalised":
        return config
    if config.weights != "samples" or config.rule not in ("mean", "norm_clip"):
        setting = f"rule {config.rule!r}" if config.weights == "samples" else f"weights {config.weights!r}"
        raise ValueError(
            "cluster_mean = 'eq6' moves a selector by each client's share of all pairs, for which "
            f"{setting} in [merge] leaves no place: set cluster_mean = 'normalised'"
        )
    return config.model_copy(update={"weights": "mass"})


def _clusters(server: State) -> Mapping[str, int]:
    """Client → its cluster; empty before the first grouping."""
    return cast("Mapping[str, int]", server.values["clusters"])


def _round(server: State) -> int:
    """The last round whose training was merged."""
    return cast("int", server.values["round"])
