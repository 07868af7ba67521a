"""One peer of a run, from its start to its end, with its own client's pairs and the names of all others."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from prefed.config import Experiment
from prefed.core import Callback, files
from prefed.core.records import Summary
from prefed.core.strict_settings import flatten
from prefed.core.text import did_you_mean
from prefed.data import ClientSizes, FederatedDataset
from prefed.engines import InProcess
from prefed.merge.mixing import Topology
from prefed.networks.peers.heartbeat import PeerError
from prefed.networks.peers.links import Links
from prefed.networks.peers.rendezvous import Meeting, Place
from prefed.networks.peers.rounds import PeerRounds
from prefed.runs.build import assemble_job, build_data, build_trainers, unseen_clients
from prefed.runs.data_notices import announce, left_out_table
from prefed.runs.run import conclude
from prefed.runs.start_or_resume import (
    build_in_cache,
    commit_start,
    digests_of,
    is_place,
    open_run,
    reconcile,
)
from prefed.runs.summary import read_profiles
from prefed.store import RunWriter

FORMAT = 1
"""Of what peers send each other; peers of two formats do not agree."""
_OWN = ("engine.", "align.", "data.partition.", "graph.file", "track.", "model.checkpointing")
"""Beginnings of settings, besides places of files, in which peers may differ."""


def peer_folder(out: Path, rank: int) -> Path:
    """The run directory of a peer."""
    return out / f"peer-{rank}"


def run_peer(
    experiment: Experiment,
    out: Path,
    place: Place,
    *,
    client: str | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Summary:
    """Run one peer to its end; its run directory is :func:`peer_folder`.

    It runs in the main thread of a process. All peers run at the same time, with the same experiment.

    Args:
        client: whose pairs it trains on; see :func:`~prefed.networks.peers.run.choose`.
        resume: go on from the last round that all peers have. A peer whose folder holds nothing begins.
        callbacks: receive the events of this peer.

    Returns:
        What ``summary.json`` holds.

    Raises:
        PeerError: another peer is gone, hangs or failed, or the peers do not agree.
        ValueError: the experiment needs a server, or the clients do not fit the peers.
        StoreError, OSError, DataError, ModelError, RoundError: as :func:`prefed.run`.
    """
    _check(experiment)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    path = peer_folder(out, place.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    resume = resume and (path / "checkpoint").is_dir()
    with (
        Meeting(place) as meeting,
        open_run(experiment, path, callbacks, resume=resume, returnable=True) as (writer, callback),
    ):
        if experiment.evaluate.diagnose is not None:
            callback.on_warning("[evaluate] diagnose needs all clients' gradients: peers are not diagnosed")
        return _run(reconcile(experiment, writer), writer, meeting, client, callback)


def _run(
    experiment: Experiment, writer: RunWriter, meeting: Meeting, client: str | None, callback: Callback
) -> Summary:

    def read(cache: Path) -> FederatedDataset:
        files.private_folder(cache)
        return build_data(experiment, cache / "data")

    dataset = build_in_cache(writer, read)
    unseen = unseen_clients(experiment, dataset)
    present = [name for name in dataset.clients if name not in unseen]
    source, name = choose(present, meeting.place.rank, meeting.place.peers, client)
    ranks = _introduce(meeting, name, present)
    meeting.agree("settings", {"format": FORMAT, **_shared(experiment)})
    _go_back(meeting, writer)
    alone = of_peer(experiment)
    pairs = among(own_pairs(dataset, source, name), sorted(ranks))
    job = assemble_job(alone, build_trainers(alone, pairs, writer.path / "cache" / "reference"))
    digests = digests_of(experiment, job)
    common = {what: digest for what, digest in digests.items() if what != "data"}
    meeting.agree("models or graphs", {**common, "mixing": _mixing(job.topology, writer.round + 1)})
    digests |= {"peer": name, "peers": files.digest(json.dumps(job.members).encode())}
    commit_start(experiment, job, writer, digests)
    meeting.watch.committed(writer.round)
    announce(alone, job, callback)
    meeting.connect()
    links, engine = Links(meeting.watch, ranks), experiment.engine
    with InProcess(job, writer.states, engine.threads or 1) as backend:
        limit = engine.visit_timeout
        own = PeerRounds(job, writer, backend, callback, name, links, meeting.watch, limit).run()
        profiles = read_profiles(job, backend.states)
    sizes = {name: pairs.sizes[name]._asdict()}
    about = {"clients": sizes, "data": left_out_table(dataset.row_counts)}
    conclude(job, writer, own, profiles, callback, peer=name, peers=list(job.members), **about)
    summary: Summary = json.loads((writer.path / "summary.json").read_text("utf-8"))
    return summary


def _check(experiment: Experiment) -> None:
    """Refuse an experiment that needs a server."""
    if experiment.whole_graph is None:
        raise ValueError(
            f"peers have no server, and {experiment.method.name} has one: add a table [graph], or take decdpo"
        )
    if experiment.align is not None:
        raise ValueError("[align] trains a server's own model, and peers have no server: remove it")
    if experiment.stop is not None:
        raise ValueError("[stop] judges by all clients' metrics, and a peer has only its own: remove it")


def _introduce(meeting: Meeting, name: str, present: Sequence[str]) -> dict[str, int]:
    """Tell all peers whose pairs this one has. Gives each client's peer.

    Raises:
        PeerError: two peers have one client, or a peer has one that is not in the data.
    """
    ranks: dict[str, int] = {}
    names = meeting.watch.names
    for rank, client in enumerate(meeting.share("client", name)):
        if client in ranks:
            raise PeerError(
                f"{names[ranks[client]]} and {names[rank]} both have client {client!r}: see --client"
            )
        if len(present) > 1 and client not in present:
            raise PeerError(
                f"{names[rank]} has client {client!r}, who is not in this peer's data: see --client"
            )
        ranks[client] = rank
    for client, rank in ranks.items():
        names[rank] = names[rank].replace("(", f"({client!r} ", 1)
    return ranks


def _shared(experiment: Experiment) -> dict[str, Any]:
    """The settings that all peers must have alike, by dotted name."""
    flat = flatten(experiment.tables()).items()
    return {name: value for name, value in flat if not (is_place(name) or name.startswith(_OWN))}


def _go_back(meeting: Meeting, writer: RunWriter) -> None:
    """Go back to the last round that all peers have.

    Raises:
        PeerError: there is none; the message names the peer that has gone on the least.
    """
    own = sorted(writer.kept) if writer.commit is not None else [0]
    all_rounds = [set(rounds) for rounds in meeting.share("rounds", own)]
    common = set.intersection(*all_rounds)
    if not common:
        last = min(range(len(all_rounds)), key=lambda rank: max(all_rounds[rank]))
        ahead = max(min(rounds) for rounds in all_rounds)
        raise PeerError(
            f"{meeting.watch.names[last]} has nothing after round {max(all_rounds[last])}, and others have "
            f"nothing before round {ahead}: put its run directory back, or start again with another --out"
        )
    if writer.commit is not None and max(common) < writer.round:
        writer.go_back(max(common))


def _mixing(topology: Topology, number: int) -> str:
    """A digest of the mixing matrix of a round."""
    matrix = topology.matrix(number)
    matrix.sort_indices()
    parts = (matrix.indptr.astype("<i8"), matrix.indices.astype("<i8"), matrix.data.astype("<f8"))
    return files.digest(b"".join(part.tobytes() for part in parts))


def own_pairs(dataset: FederatedDataset, client: str, name: str) -> FederatedDataset:
    """The pairs of ``client`` alone, as those of a client called ``name``."""
    data, sizes = replace(dataset.clients[client], id=name), dataset.sizes[client]
    return replace(dataset, clients={name: data}, sizes={name: sizes})


def among(dataset: FederatedDataset, members: Sequence[str]) -> FederatedDataset:
    """``dataset``, of one client, with the names of all members of the federation.

    How many pairs the others have is nobody's business: each counts as one that trains, and is evaluated
    elsewhere.
    """
    strangers = {name: ClientSizes(1, 0, 0) for name in members}
    return replace(dataset, sizes={**strangers, **dataset.sizes})


def choose(members: Sequence[str], rank: int, peers: int, asked: str | None) -> tuple[str, str]:
    """Whose pairs this peer trains on, and the name that it has among the peers.

    A client that is alone in the data belongs to this peer, whatever it is called there. Of several clients
    a peer has the one that it asks for, or that of its rank.

    Args:
        members: the clients in the data that train.
        asked: a client by its name.

    Raises:
        ValueError: there is no such client, or not one client for each peer.

    >>> choose(["a", "b", "c"], 1, 3, None), choose(["c"], 1, 3, "ward-7")
    (('b', 'b'), ('c', 'ward-7'))
    """
    ordered = sorted(members)
    if len(ordered) == 1:
        return ordered[0], asked or ordered[0]
    if len(ordered) != peers:
        raise ValueError(
            f"the data have {len(ordered)} clients that train, and there are {peers} peers: start one for "
            "each, or give each peer a file with its own client's pairs"
        )
    if asked is None:
        return ordered[rank], ordered[rank]
    if asked not in ordered:
        raise ValueError(f"--client {asked!r}: the data have no such client{did_you_mean(asked, ordered)}")
    return asked, asked


def of_peer(experiment: Experiment) -> Experiment:
    """The experiment as one peer carries it out: its client is evaluated, and its figures stay with it.

    Raises:
        ValueError: noise is to be drawn from the seed, which all peers know.
    """
    changes = {"unseen": 0, "clients": None, "diagnose": None}
    evaluate = experiment.evaluate.model_copy(update=changes)
    privacy = experiment.privacy.federated().model_copy(update={"minimum_pairs": 0})
    return experiment.model_copy(update={"evaluate": evaluate, "privacy": privacy})
