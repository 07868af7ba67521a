"""Peers as forked processes on the loopback."""

import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass

import torch
from torch.distributed import TCPStore

import federating
from prefed import Experiment, run
from prefed.core import Callback
from prefed.networks.peers.rendezvous import Meeting, Place
from prefed.networks.peers.run import peer_folder, run_peer
from prefed.store import RunReader
from prefed.ui.cli.federation import stop
from waiting import WATCHDOG, until
from workers import CLIENTS
from workers import make_place as make_workers


def make_place(folder):
    """As in :mod:`workers`, and a run whose forked processes then spend no time on imports."""
    make_workers(folder)
    run(experiment(folder).model_copy(update={"rounds": 1}), folder / "imports")
    return folder


def experiment(place, method="decdpo", graph=None, data="pairs", **changes):
    tables = federating.experiment(place, method, rounds=4, **changes).tables()
    tables["data"]["train"] = str(place / f"{data}.jsonl")
    return Experiment.model_validate({**tables, "graph": {"name": "path", **(graph or {})}})


class Fails(Callback):
    """After the visit that is the ``left``-th of the process, it gets a signal."""

    def __init__(self, left, what):
        self.left, self.what = left, what

    def on_task_end(self, what, done, of):
        self.left -= what == "train"
        if not self.left:
            os.kill(os.getpid(), self.what)
            time.sleep(5)


@dataclass
class Ended:
    """How a peer ended: its exit status, and what it said."""

    status: int
    text: str


def peers(out, experiments, **options):
    """Run all peers in forked processes; how each ended. ``options``: see :func:`started`."""
    return started(out, experiments, **options)()


def started(out, experiments, *, resume=False, fails=None, patience=WATCHDOG, clients=CLIENTS):
    """Start all peers; gives what waits for them and returns how each ended. ``fails``: peer → callback.

    A peer that stopped itself is killed once the others have ended.
    """
    port = free_port()
    out.mkdir(exist_ok=True)
    children, fails = [], fails or {}
    for rank, each in enumerate(experiments):
        child = os.fork()
        if child == 0:
            place = Place(rank, len(experiments), "127.0.0.1", port, patience=patience, join=WATCHDOG)
            one(each, out, place, clients[rank], resume, fails)
        children.append(child)
    stopped = {rank for rank, callback in fails.items() if getattr(callback, "what", 0) == signal.SIGSTOP}

    def end():
        ended = {}
        for rank in sorted(range(len(children)), key=lambda rank: rank in stopped):
            if rank in stopped:
                os.kill(children[rank], signal.SIGKILL)
            ended[rank] = Ended(end_of(children[rank]), (out / f"said-{rank}").read_text())
        return [ended[rank] for rank in range(len(children))]

    return end


def end_of(child):
    """The exit status of a forked process."""
    _, status = until(lambda: (ended := os.waitpid(child, os.WNOHANG))[0] and ended, "the end of a peer")
    return os.waitstatus_to_exitcode(status)


def one(experiment, out, place, client=None, resume=False, fails=None):
    """Run a peer, and end the process."""
    status = 1
    sys.stderr = said = (out / f"said-{place.rank}").open("w", buffering=1)
    signal.signal(signal.SIGTERM, stop)
    torch.set_num_threads(1)  # makes torch's pool anew before threads that load a model race for it
    try:
        callbacks = [fails[place.rank]] if fails and place.rank in fails else []
        run_peer(experiment, out, place, client=client, resume=resume, callbacks=callbacks)
        status = 0
    except BaseException:
        traceback.print_exc(file=said)
    finally:
        os._exit(status)


def whole(out, experiments, **options):
    for each in peers(out, experiments, **options):
        assert each.status == 0, each.text
    return models(out, len(experiments))


def models(out, count=3):
    """Each peer's model and private tensors after its last round."""
    found = []
    for rank in range(count):
        reader = RunReader(peer_folder(out, rank))
        private = reader.client(CLIENTS[rank])
        groups = [*reader.server().tensors.values(), *(private.tensors.values() if private else ())]
        found.append(torch.cat([group.flat for group in groups]))
    return found


def meet(out, places):
    """Come to one meeting from forked processes, each after the one before; what each said of it."""
    children = []
    for number, place in enumerate(places):
        child = os.fork()
        if child == 0:
            text = "met"
            try:
                with Meeting(place):
                    pass
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            (out / f"met-{number}").write_text(text)
            os._exit(0)
        children.append(child)
        if place is not places[-1]:
            store, came = TCPStore(place.host, place.port, None, False), places[: number + 1].count(place)
            until(lambda store=store, key=f"turn/{place.rank}", n=came: store.add(key, 0) == n, "a peer")
    for child in children:
        end_of(child)
    return [(out / f"met-{number}").read_text() for number in range(len(places))]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
