"""The run of one peer, which has only the pairs of its own client and the names of the others."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from prefed.config import Experiment
from prefed.core import Callback, files
from prefed.core.records import Summary
from prefed.core.strict_settings import flatten
from prefed.core.text import did_you_mean
from prefed.data import FederatedDataset
from prefed.engines import InProcess
from prefed.merge.mixing_matrices import Topology
from prefed.networks.peers.heartbeat import PeerError
from prefed.networks.peers.links import Links
from prefed.networks.peers.rendezvous import Meeting, Place
from prefed.networks.peers.rounds import PeerRounds
from prefed.runs.build import assemble_job, build_data, build_trainers, unseen_clients
from prefed.runs.data_notices import announce, left_out_table
from prefed.runs.finished_run import read_summary
from prefed.runs.rounds import conclude, round_answers
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
"""Version of the messages between peers. All peers must have the same."""
_OWN = ("engine.", "align.", "data.partition.", "graph.file", "track.", "model.checkpointing")
"""Prefixes of settings in which peers may differ, in addition to paths."""


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
    """Run one peer; its run directory is :func:`peer_folder`.

    Call it in the main thread. All peers run at the same time with the same experiment.

    Args:
        client: the client whose pairs this peer trains on; see :func:`~prefed.networks.peers.run.choose`.
        resume: resume from the last round that all peers have; one without a checkpoint starts from scratch.
        callbacks: receive the events of this peer.

    Returns:
        The contents of ``summary.json``.

    Raises:
        PeerError: another peer failed, hangs or disconnected, or the peers do not agree.
        ValueError: the experiment needs a server, or the clients do not match the peers.
        StoreError, OSError, DataError, ModelError, RoundError: see :func:`prefed.run`.
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
            callback.on_warning("[evaluate] diagnose needs the gradients of all clients: peers ignore it")
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
    meeting.agree("settings", {"prefed": version("prefed"), "format": FORMAT, **_shared(experiment)})
    _go_back(meeting, writer)
    alone = of_peer(experiment)
    pairs = dataset.renamed({source: name}).among(sorted(ranks), 0)
    job = assemble_job(alone, build_trainers(alone, pairs, writer.path / "cache" / "reference"))
    digests = digests_of(experiment, job)
    common = {what: digest for what, digest in digests.items() if what != "data"}
    meeting.agree("models or graphs", {**common, "mixing": _mixing(job.topology, writer.round + 1)})
    digests |= {"peer": name, "peers": files.digest(json.dumps(job.members).encode())}
    commit_start(experiment, job, writer, digests)
    meeting.watch.committed(writer.round)
    answers = round_answers(alone, job, writer.path)
    announce(alone, job, callback)
    meeting.connect()
    links, engine = Links(meeting.watch, ranks), experiment.engine
    with InProcess(job, writer.states, engine.threads or 1) as backend:
        limit = engine.visit_timeout
        watch = meeting.watch
        own = PeerRounds(job, writer, backend, callback, name, links, watch, limit, answers=answers).run()
        profiles = read_profiles(job, backend.states)
    sizes = {name: pairs.sizes[name]._asdict()}
    about = {"clients": sizes, "data": left_out_table(dataset)}
    conclude(job, writer, own, profiles, callback, peer=name, peers=list(job.members), **about)
    return read_summary(writer.path / "summary.json")


def _check(experiment: Experiment) -> None:
    """Reject an experiment that needs a server."""
    if experiment.whole_graph is None:
        raise ValueError(
            f"{experiment.method.name} needs a server, and peers have none: add [graph], or use decdpo"
        )
    if experiment.align is not None:
        raise ValueError("[align] needs a server, and peers have none: remove it")
    if experiment.report is not None:
        raise ValueError(
            "[report] needs the models of several clients, and a peer has only its own: remove it"
        )
    if experiment.checkpoint is not None:
        raise ValueError("[checkpoint]: peers keep the commits that they need: remove it")
    if experiment.stop is not None:
        raise ValueError("[stop] needs the metrics of all clients, and a peer has only its own: remove it")


def _introduce(meeting: Meeting, name: str, present: Sequence[str]) -> dict[str, int]:
    """Announce this peer's client to all peers; return client → rank.

    Raises:
        PeerError: two peers have the same client, or the data does not contain a peer's client.
    """
    ranks: dict[str, int] = {}
    names = meeting.watch.names
    for rank, client in enumerate(meeting.share("client", name)):
        if client in ranks:
            raise PeerError(
                f"{names[ranks[client]]} and {names[rank]} both have client {client!r}: set --client"
            )
        if len(present) > 1 and client not in present:
            raise PeerError(
                f"{names[rank]} has client {client!r}, which is not in this peer's data: set --client"
            )
        ranks[client] = rank
    for client, rank in ranks.items():
        names[rank] = names[rank].replace("(", f"({client!r} ", 1)
    return ranks


def _shared(experiment: Experiment) -> dict[str, Any]:
    """The settings that must be the same for all peers, by dotted name."""
    flat = flatten(experiment.tables()).items()
    return {name: value for name, value in flat if not (is_place(name) or name.startswith(_OWN))}


def _go_back(meeting: Meeting, writer: RunWriter) -> None:
    """Return to the last round that all peers have.

    Raises:
        PeerError: there is none; the message names the peer that is furthest behind.
    """
    own = sorted(writer.kept) if writer.commit is not None else [0]
    all_rounds = [set(rounds) for rounds in meeting.share("rounds", own)]
    common = set.intersection(*all_rounds)
    if not common:
        last = min(range(len(all_rounds)), key=lambda rank: max(all_rounds[rank]))
        ahead = max(min(rounds) for rounds in all_rounds)
        raise PeerError(
            f"{meeting.watch.names[last]} has no commit after round {max(all_rounds[last])}, and others have "
            f"none before round {ahead}: restore its run directory, or start again with another --out"
        )
    if writer.commit is not None and max(common) < writer.round:
        writer.go_back(max(common))


def _mixing(topology: Topology, number: int) -> str:
    """Digest of the mixing matrix of a round."""
    matrix = topology.matrix(number)
    matrix.sort_indices()
    parts = (matrix.indptr.astype("<i8"), matrix.indices.astype("<i8"), matrix.data.astype("<f8"))
    return files.digest(b"".join(part.tobytes() for part in parts))


def choose(members: Sequence[str], rank: int, peers: int, asked: str | None) -> tuple[str, str]:
    """Select this peer's client: its name in the data, and its name among the peers.

    If the data has one client, this peer has it under the name ``asked``, if given. Otherwise it has the
    client ``asked`` or the one of its rank.

    Args:
        members: the training clients in the data.
        asked: a client's name.

    Raises:
        ValueError: the client does not exist, or the number of clients is not that of peers.

    >>> choose(["a", "b", "c"], 1, 3, None), choose(["c"], 1, 3, "ward-7")
    (('b', 'b'), ('c', 'ward-7'))
    """
    ordered = sorted(members)
    if len(ordered) == 1:
        return ordered[0], asked or ordered[0]
    if len(ordered) != peers:
        raise ValueError(
            f"{len(ordered)} clients train, but there are {peers} peers: start one peer per client, or give "
            "each peer a file with only its client's pairs"
        )
    if asked is None:
        return ordered[rank], ordered[rank]
    if asked not in ordered:
        raise ValueError(f"--client {asked!r}: no such client in the data{did_you_mean(asked, ordered)}")
    return asked, asked


def of_peer(experiment: Experiment) -> Experiment:
    """The experiment of one peer. It evaluates only its own client, whose metrics stay with the peer.

    Raises:
        ValueError: privacy noise would be drawn from the seed, which all peers know.
    """
    changes = {"unseen": 0, "clients": None, "diagnose": None}
    evaluate = experiment.evaluate.model_copy(update=changes)
    privacy = experiment.privacy.federated().model_copy(update={"minimum_pairs": 0})
    return experiment.model_copy(update={"evaluate": evaluate, "privacy": privacy})
