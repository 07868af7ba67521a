"""What a server keeps of clients' tastes: the last posterior that each of them sent.

Its state holds them as the group :data:`PEERS`, with the values ``"members"``, all clients by index, and
``"sent"``, client → the round of its last posterior.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from prefed.core import Entry, Layout, Round, State, Tensors
from prefed.core.lazy import torch
from prefed.merge.posteriors import Posterior, bound_posteriors

PEERS = "peers"
"""The group with the last posteriors of all clients, in the order of their ids."""


def newest(server: State, told: Mapping[str, Posterior], longest: float) -> dict[str, Posterior]:
    """Client → its last posterior, sorted by client; those that clients have just told, bounded.

    Args:
        longest: as :func:`~prefed.merge.posteriors.bound_posteriors` takes it.
    """
    known = {**posteriors(server), **told}
    bounded = bound_posteriors(known, longest)
    return {client: bounded[client] if client in told else known[client] for client in sorted(known)}


def keep(server: State, known: Mapping[str, Posterior], told: Collection[str], now: Round) -> State:
    """``server`` with the posteriors ``known``, of which those of ``told`` were sent in this round."""
    members = sorted(now.weights)
    sent = {**rounds_of(server), **dict.fromkeys(told, now.number)}
    return server.update(
        {PEERS: _table(known, members)},
        {"members": cast("list[Any]", members), "sent": {c: sent[c] for c in sorted(sent)}},
    )


def posteriors(server: State) -> dict[str, Posterior]:
    """Client → its last posterior, sorted by client."""
    if PEERS not in server.tensors:
        return {}
    peers, members = server.tensors[PEERS], cast("list[str]", server.values["members"])
    rows = zip(members, peers["peers/mean"], peers["peers/log_variance"], strict=True)
    return {client: Posterior(*row) for client, *row in rows if client in rounds_of(server)}


def rounds_of(server: State) -> Mapping[str, int]:
    """Client → the round in which it sent its last posterior."""
    return cast("Mapping[str, int]", server.values.get("sent", {}))


def peers_of(server: State, client: str, *, latest: bool) -> Tensors | None:
    """:data:`PEERS` as ``client`` gets it, without its own; ``None`` before the first posterior.

    Args:
        latest: without those of clients that sent none in the last round in which any came.
    """
    if PEERS not in server.tensors:
        return None
    sent, members = rounds_of(server), cast("list[str]", server.values["members"])
    last = max(sent.values())
    others = {
        name: posterior
        for name, posterior in posteriors(server).items()
        if name != client and (not latest or sent[name] == last)
    }
    return _table(others, members, server.tensors[PEERS].layout)


def _table(known: Mapping[str, Posterior], members: Sequence[str], layout: Layout | None = None) -> Tensors:
    """The posteriors as rows; zeros for a member without one. ``present`` is 1 where there is one, else 0."""
    if layout is None:
        width = len(next(iter(known.values())).mean)
        rows = [Entry(f"peers/{name}", (len(members), width), PEERS) for name in Posterior._fields]
        layout = Layout((*rows, Entry("peers/present", (len(members),), PEERS)))
    dtype = next((posterior.mean.dtype for posterior in known.values()), torch.float32)
    table = Tensors.zeros(layout, dtype)
    for index, client in enumerate(members):
        if client in known:
            table["peers/present"][index] = 1
            for name, value in known[client]._asdict().items():
                table[f"peers/{name}"][index] = value
    return table
