"""A peer's part of a federation: its own client's pairs, and the names of all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prefed.config import Experiment
from prefed.core.text import did_you_mean
from prefed.data import ClientSizes, FederatedDataset


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
