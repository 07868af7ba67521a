"""Peers: separate processes on the loopback, compared with the same run in one process."""

import json
import re
import shutil
import signal
import socket

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

import toy
from peering import Fails, experiment, free_port, meet, models, peers, whole
from prefed import run
from prefed.core import Callback
from prefed.core.wire import decode_upload, encode
from prefed.engines.tasks import Task, run_task
from prefed.networks.peers import rounds
from prefed.networks.peers.heartbeat import PeerError, Watch
from prefed.networks.peers.rendezvous import Meeting, Place
from prefed.networks.peers.run import peer_folder
from prefed.runs.build import build_job
from prefed.store import RunReader
from toy import records
from workers import CLIENTS
from workers import place as place


def in_process(out, made):
    run(made, out)
    reader = RunReader(out)
    found = []
    for number, client in enumerate(CLIENTS):
        private = reader.client(client)
        rest = [group.flat for group in private.tensors.values()] if private else []
        found.append(torch.cat([reader.node(number), *rest]))
    return found


@pytest.mark.parametrize(
    ("method", "graph", "exact"),
    [
        ("decdpo", {"name": "complete"}, True),
        ("fedpdpo", {"name": "path", "order": "mix_train"}, False),
        pytest.param("fedper", {"name": "complete", "changes": "matching"}, False, marks=pytest.mark.rare),
    ],
)
def test_peers_have_the_numbers_of_one_process(place, tmp_path, method, graph, exact):
    """Twin: the run in one process. A row is summed in float64, around the first model of the neighbourhood
    here, and around the first of all there; on the complete graph these are one, and all bits agree.
    Elsewhere SGD leaves a difference of rounding as small as it is: AdamW divides by gradients near zero.
    So a peer's own model answers its prompts as its client's does in the run in one process."""
    made = experiment(place, method, graph, **({} if exact else {"optimizer": "sgd", "lr": 0.5}))
    text = made.evaluate.model_copy(update={"text": 6 * exact})
    made = made.model_copy(update={"rounds": 2, "evaluate": text})
    ours, theirs = whole(tmp_path / "peers", [made] * 3), in_process(tmp_path / "run", made)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other) if exact else torch.allclose(one, other, rtol=0, atol=1e-6)
    log = records(tmp_path / "run")
    logs = [records(peer_folder(tmp_path / "peers", rank)) for rank in range(3)]
    for record, *own in zip(log, *logs, strict=True):
        assert (
            record["bytes_up"] == sum(each["bytes_up"] for each in own) == sum(e["bytes_down"] for e in own)
        )
        assert record["loss"] == pytest.approx(np.mean([each["loss"] for each in own]), abs=1e-6)
        got = record["evaluation"]["preference_accuracy"]["per_client"]
        for client, each in zip(CLIENTS, own, strict=True):
            assert each["evaluation"]["preference_accuracy"]["per_client"] == {client: got[client]}
            if exact:
                text = each["evaluation"]["text"]["own"]["per_client"]
                assert text == {client: record["evaluation"]["text"]["own"]["per_client"][client]}
                assert text[client]["answers"] == 2


@pytest.fixture(scope="module")
def left_alone(place, tmp_path_factory):
    """What the peers of :func:`experiment` end with."""
    return whole(tmp_path_factory.mktemp("alone") / "run", [experiment(place)] * 3)


def test_all_go_back_to_the_last_round_that_all_have(place, tmp_path, left_alone):
    """A path of three: peer 2 dies in round 3, and the others may be ahead of it by two rounds. A peer
    whose folder is lost is named, and the others keep theirs."""
    made = experiment(place)
    ended = peers(tmp_path / "parts", [made] * 3, fails={2: Fails(3, signal.SIGKILL)})
    assert [each.status for each in ended] == [1, 1, -signal.SIGKILL]
    assert f"peer 2 ('w2' on {socket.gethostname()}) closed its connection" in ended[0].text
    rounds = [RunReader(peer_folder(tmp_path / "parts", rank)).commit.round for rank in range(3)]
    assert (rounds[2], max(rounds) - 2) in {(2, 0), (2, 1)}
    lost = peer_folder(tmp_path / "parts", 2).rename(tmp_path / "lost")
    for each in peers(tmp_path / "parts", [made] * 3, resume=True):
        assert each.status == 1
        assert "peer 2 ('w2'" in each.text
        assert "has no commit after round 0, and others have none before round" in each.text
    shutil.rmtree(peer_folder(tmp_path / "parts", 2), ignore_errors=True)
    lost.rename(peer_folder(tmp_path / "parts", 2))
    assert all(map(torch.equal, left_alone, whole(tmp_path / "parts", [made] * 3, resume=True)))


def test_each_with_a_file_of_its_own(place, tmp_path, left_alone):
    """A peer whose data hold its client alone has the numbers that it has where they hold all clients."""
    apart = [experiment(place, data=client) for client in CLIENTS]
    assert all(map(torch.equal, left_alone, whole(tmp_path / "own", apart, clients=(None, None, "w2"))))
    summary = json.loads((peer_folder(tmp_path / "own", 1) / "summary.json").read_text())
    assert (summary["peer"], summary["peers"]) == ("w1", list(CLIENTS))
    assert summary["clients"] == {"w1": {"train": 8, "validation": 0, "test": 2}}
    assert summary["origin"]["finished"]
    log = (peer_folder(tmp_path / "own", 1) / "run.log").read_text()
    assert re.findall(r" (\d rounds|round \d/4|done)\b", log) == [
        *("4 rounds", "round 1/4", "round 2/4", "round 3/4", "round 4/4", "done")
    ]


def test_peers_that_do_not_agree_are_refused(place, tmp_path):
    """The error of every peer names the odd one."""
    made = [experiment(place), experiment(place, lr=0.02), experiment(place)]
    for each in peers(tmp_path / "settings", made):
        assert "peer 1 ('w1' on" in each.text
        assert "have different settings: method.lr is 0.02, not 0.01; start all peers with the" in each.text
    for each in peers(tmp_path / "clients", [experiment(place)] * 3, clients=("w0", "w1", "w0")):
        assert "both have client 'w0'" in each.text


def test_two_peers_with_one_rank_are_refused(tmp_path):
    """Two that both beat as peer 1 would wait for each other's neighbours for ever."""
    port = free_port()
    ranks = [Place(rank, 3, "127.0.0.1", port) for rank in (0, 1, 1, 2)]
    first, old, new, last = meet(tmp_path, ranks)
    assert (first, new, last) == ("met", "met", "met")
    assert old == "PeerError: another process has started as peer 1: give each peer its own --rank"


def come(store, place):
    """To a meeting that waits no longer."""
    meeting = Meeting(place)
    meeting._store = store
    return meeting._wait_for_all(0.0)


def test_another_number_of_peers_is_refused():
    store = HashStore()
    with pytest.raises(PeerError, match="of 2 peers, 1 did not start"):
        come(store, Place(0, 2))
    with pytest.raises(PeerError, match="peer 1 has --peers 3, peer 0 has --peers 2: use one number"):
        come(store, Place(1, 3))


def test_who_comes_after_all_have_come_is_sent_away():
    store = HashStore()
    come(store, Place(0, 1))
    with pytest.raises(PeerError, match="the run has already started with a peer 0: give each peer its own"):
        come(store, Place(0, 1))


def test_what_a_peer_sends_must_be_of_its_kind():
    """The peer is named: an error of another kind would be laid at the door of whoever reads it."""
    meeting = Meeting(Place(0, 2))
    meeting._store = store = HashStore()
    meeting.watch = Watch(store, 0, ["peer 0", "peer 1"], 0, 1.0)
    for what, own, other in (("client", "a", '["b"]'), ("rounds", [1], "[]"), ("settings", {}, "{")):
        store.set(f"{what}/1", other)
        with pytest.raises(PeerError, match=f"peer 1 sent an invalid value of '{what}'"):
            meeting.share(what, own)


class Tampers(Callback):
    """A peer whose messages end in NaN."""

    def on_run_begin(self, done, rounds_):
        pack, nan = rounds.pack, np.float32("nan").tobytes()
        rounds.pack = lambda *words: pack(*words)[: -len(nan)] + nan


def test_a_model_that_is_not_valid_is_left_out_by_its_receiver(place, tmp_path):
    """Peer 0 has no other neighbour, so its own model keeps all weight: after the round it is what the visit
    gave, which a visit outside of any run gives too."""
    made = experiment(place).model_copy(update={"rounds": 1})
    for each in peers(tmp_path / "peers", [made] * 3, fails={1: Tampers()}):
        assert each.status == 0, each.text
    job = build_job(made, tmp_path / "cache")
    (exchange,), now = job.method.exchanges, job.round(1)
    start = job.method.init_server(job.trainers.initial)
    task = Task("visit", "w0", 1, "train", encode(exchange.send(start, "w0", now)))
    upload = decode_upload(run_task(job, task, toy.MemoryStates()).message)
    assert torch.equal(models(tmp_path / "peers")[0], upload.tensors["model"].flat)
    (record,) = records(peer_folder(tmp_path / "peers", 0))
    (dropped,) = record["dropped"]
    assert (dropped["client"], record["merged"]) == ("w1", 1)
    assert "has NaN or infinity" in dropped["reason"]
    (middle,) = records(peer_folder(tmp_path / "peers", 1))
    assert (middle["dropped"], middle["merged"]) == ([], 3)
