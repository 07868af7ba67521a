"""Peers: processes of their own on the loopback, beside the same run in one process."""

import json
import os
import re
import shutil
import signal
import socket
import time
import traceback
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

import toy
from prefed import Experiment, run
from prefed.core import Callback, Key
from prefed.engines.tasks import Task, run_task
from prefed.models.tiny import make_tiny
from prefed.peer import rounds
from prefed.peer.__main__ import stop
from prefed.peer.meeting import Meeting, Place
from prefed.peer.run import peer_folder, run_peer
from prefed.peer.watch import STOP, Beat, PeerError, Watch, beat_key
from prefed.runs.build import build_job
from prefed.store import RunReader
from prefed.wire import decode_upload, encode

CLIENTS = ("w0", "w1", "w2")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model of two small blocks, 30 pairs of three workers in one file, and each worker's alone in one."""
    folder = tmp_path_factory.mktemp("place")
    draw, rows = np.random.default_rng(0), {client: [] for client in CLIENTS}
    for number in range(30):
        good = ["yes please", "no thanks"][:: 1 if number % 2 else -1]
        prompt = f"Question {draw.integers(1000)}?"
        row = {"prompt": prompt, "chosen": f" {good[0]} {number}", "rejected": f" {good[1]} {number}"}
        rows[f"w{number % 3}"].append({**row, "worker": f"w{number % 3}"})
    for name, lines in {
        "pairs": [line for k in range(10) for line in (rows[c][k] for c in CLIENTS)],
        **rows,
    }.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = [row["prompt"] + row["chosen"] for lines in rows.values() for row in lines]
    make_tiny(folder / "model", texts, Key(0), layers=2, width=32, heads=2, vocabulary=280, steps=2)
    # So that no forked process spends its time on imports.
    run(experiment(folder).model_copy(update={"rounds": 1}), folder / "imports")
    return folder


def experiment(place, method="decdpo", graph=None, data="pairs", **changes):
    return Experiment.model_validate(
        {
            "seed": 3,
            "rounds": 4,
            "data": {
                "train": str(place / f"{data}.jsonl"),
                "test_fraction": 0.2,
                "partition": {"by": "column", "column": "worker"},
            },
            "model": {"name": str(place / "model"), "lora": {"rank": 2, "dropout": 0.1}},
            "method": {"name": method, "lr": 0.01, "local_steps": 2, "batch_size": 4, **changes},
            "graph": {"name": "path", **(graph or {})},
            "engine": {"threads": 1},
        }
    )


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


def peers(out, experiments, *, resume=False, fails=None, patience=20.0, clients=CLIENTS):
    """Run all peers in forked processes; how each ended. ``fails``: peer → callback.

    A peer that stopped itself is killed once the others have ended.
    """
    port = free_port()
    out.mkdir(exist_ok=True)
    children, fails = [], fails or {}
    for rank, each in enumerate(experiments):
        child = os.fork()
        if child == 0:
            place = Place(rank, len(experiments), "127.0.0.1", port, patience=patience, join=60)
            one(each, out, place, clients[rank], resume, fails)
        children.append(child)
    stopped = {rank for rank, callback in fails.items() if getattr(callback, "what", 0) == signal.SIGSTOP}
    ended = {}
    for rank in sorted(range(len(children)), key=lambda rank: rank in stopped):
        if rank in stopped:
            os.kill(children[rank], signal.SIGKILL)
        status = os.waitpid(children[rank], 0)[1]
        ended[rank] = Ended(os.waitstatus_to_exitcode(status), (out / f"said-{rank}").read_text())
    return [ended[rank] for rank in range(len(children))]


def one(experiment, out, place, client=None, resume=False, fails=None):
    """Run a peer, and end the process."""
    said, status = out / f"said-{place.rank}", 1
    said.write_text("")
    signal.signal(signal.SIGTERM, stop)
    torch.set_num_threads(1)  # makes torch's pool anew before threads that load a model race for it
    try:
        callbacks = [fails[place.rank]] if fails and place.rank in fails else []
        run_peer(experiment, out, place, client=client, resume=resume, callbacks=callbacks)
        status = 0
    except BaseException:
        said.write_text(traceback.format_exc())
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


def in_process(out, made):
    run(made, out)
    reader = RunReader(out)
    found = []
    for number, client in enumerate(CLIENTS):
        private = reader.client(client)
        rest = [group.flat for group in private.tensors.values()] if private else []
        found.append(torch.cat([reader.node(number), *rest]))
    return found


def records(path):
    return [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("method", "graph", "exact"),
    [
        ("decdpo", {"name": "complete"}, True),
        ("fedpdpo", {"name": "path", "order": "mix_train"}, False),
        ("fedper", {"name": "complete", "changes": "matching"}, False),
    ],
)
def test_peers_have_the_numbers_of_one_process(place, tmp_path, method, graph, exact):
    """Twin: the run in one process. A row is summed in float64, around the first model of the neighbourhood
    here, and around the first of all there; on the complete graph these are one, and all bits agree.
    Elsewhere SGD leaves a difference of rounding as small as it is: AdamW divides by gradients near zero."""
    made = experiment(place, method, graph, **({} if exact else {"optimizer": "sgd", "lr": 0.5}))
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
        told = record["evaluation"]["preference_accuracy"]["per_client"]
        for client, each in zip(CLIENTS, own, strict=True):
            assert each["evaluation"]["preference_accuracy"]["per_client"] == {client: told[client]}


def test_a_peer_that_dies_or_hangs_is_named_and_the_run_goes_on(place, tmp_path):
    """Killed or stopped: an end, and peer 0, which keeps the store. All others end with one
    error, and the run in four sittings is the run in one, to the bit, its private states too."""
    made = experiment(place, "fedper", optimizer_state="kept")
    expected = whole(tmp_path / "whole", [made] * 3)
    faults = [
        (2, signal.SIGSTOP, "has given no sign of life for 4 seconds"),
        (0, signal.SIGKILL, "is gone: its connection closed"),
        (0, signal.SIGSTOP, "has given no sign of life for 4 seconds"),
    ]
    for number, (rank, what, why) in enumerate(faults):
        fails = {rank: Fails(2 if number == 0 else 1, what)}
        patience = 4.0 if what == signal.SIGSTOP else 20.0
        ended = peers(tmp_path / "parts", [made] * 3, resume=number > 0, fails=fails, patience=patience)
        for other in {0, 1, 2} - {rank}:
            named = f"PeerError: peer {rank} ('w{rank}' on {socket.gethostname()}) {why}; whole rounds"
            assert named in ended[other].text
        assert {each.status for k, each in enumerate(ended) if k != rank} == {1}
    assert all(map(torch.equal, expected, whole(tmp_path / "parts", [made] * 3, resume=True)))
    for rank in range(3):
        one, other = (records(peer_folder(tmp_path / name, rank)) for name in ("whole", "parts"))
        clocked = {"seconds", "mix_seconds"}
        assert [{k: r[k] for k in r.keys() - clocked} for r in one] == [
            {k: r[k] for k in r.keys() - clocked} for r in other
        ]


class Sleeps(Callback):
    """A visit that takes long."""

    def on_task_end(self, what, done, of):
        time.sleep(60)


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        (Fails(1, signal.SIGTERM), "was ended from outside"),
        (Sleeps(), "has taken longer for its visit than [engine] visit_timeout, 5 seconds"),
    ],
)
def test_a_peer_that_gives_up_tells_the_others(place, tmp_path, fails, why):
    """It lives, but does not go on. Peer 2 has no connection with it."""
    made = experiment(place)
    limit = {"visit_timeout": 5.0 if isinstance(fails, Sleeps) else 0.0}
    made = made.model_copy(update={"engine": made.engine.model_copy(update=limit)})
    ended = peers(tmp_path / "peers", [made] * 3, fails={0: fails})
    assert [each.status for each in ended] == [1, 1, 1]
    for each in ended[1:]:
        assert f"PeerError: peer 0 ('w0' on {socket.gethostname()}) {why}" in each.text


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
    assert f"peer 2 ('w2' on {socket.gethostname()}) is gone: its connection closed" in ended[0].text
    rounds = [RunReader(peer_folder(tmp_path / "parts", rank)).commit.round for rank in range(3)]
    assert (rounds[2], max(rounds) - 2) in {(2, 0), (2, 1)}
    lost = peer_folder(tmp_path / "parts", 2).rename(tmp_path / "lost")
    for each in peers(tmp_path / "parts", [made] * 3, resume=True):
        assert each.status == 1
        assert "peer 2 ('w2'" in each.text
        assert "has nothing after round 0, and others have nothing before round" in each.text
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
        assert "has other settings than peer 0" in each.text
        assert "method.lr is 0.02, not 0.01" in each.text
    for each in peers(tmp_path / "clients", [experiment(place)] * 3, clients=("w0", "w1", "w0")):
        assert "both have client 'w0'" in each.text


def meet(out, places):
    """Come to one meeting from forked processes, one a place; what each said of it."""
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
        # Each has come before the next.
        time.sleep(1.0)
    for child in children:
        os.waitpid(child, 0)
    return [(out / f"met-{number}").read_text() for number in range(len(places))]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_peers_with_one_rank_or_another_number_of_peers_are_told(tmp_path):
    """Two that both beat as peer 1 would wait for each other's neighbours for ever."""
    port = free_port()
    ranks = [Place(rank, 3, "127.0.0.1", port, join=30) for rank in (0, 1, 1, 2)]
    first, old, new, last = meet(tmp_path, ranks)
    assert (first, new, last) == ("met", "met", "met")
    assert old == "PeerError: another process has come as peer 1: give each peer a --rank of its own"
    port = free_port()
    first, other = meet(tmp_path, [Place(0, 2, "127.0.0.1", port, join=4), Place(1, 3, "127.0.0.1", port)])
    assert "of 2 peers, 1 did not come" in first
    assert "PeerError: peer 1 has --peers 3, and peer 0 has 2: start all alike" in other


def test_who_comes_after_all_have_come_is_sent_away():
    store = HashStore()
    begun = Meeting(Place(0, 1))
    begun._store = store
    begun._wait_for_all(0.0)
    late = Meeting(Place(0, 1))
    late._store = store
    with pytest.raises(PeerError, match="peer 0 has come already"):
        late._wait_for_all(0.0)


@pytest.mark.parametrize(
    ("key", "word", "verdict"),
    [
        (beat_key(1), "1 2", "peer 1 has given a sign of life that cannot be read"),
        (beat_key(1), b"\xff", "peer 1 has given a sign of life that cannot be read"),
        (STOP, "[9, 'gone']", "a word about a peer at fault cannot be read"),
        (STOP, '[9, "gone"]', "a word about a peer at fault cannot be read"),
        (STOP, "7", "a word about a peer at fault cannot be read"),
    ],
)
def test_words_that_cannot_be_read_end_the_run_of_all(key, word, verdict):
    """They do not end the thread that reads them: then a watch would find the store silent, and name its
    keeper, peer 0."""
    store = HashStore()
    store.set(beat_key(1), Beat().text())
    watch = Watch(store, 0, ["peer 0", "peer 1"], 0, 1.0)
    watch.start()
    watch.hush()
    store.set(key, word)
    assert watch.wait_for_verdict(10.0).startswith(verdict)
    watch.leave("left")


def test_what_a_peer_tells_must_be_of_its_kind():
    """The peer is named: an error of another kind would be laid at the door of whoever reads it."""
    meeting = Meeting(Place(0, 2))
    meeting._store = store = HashStore()
    meeting.watch = Watch(store, 0, ["peer 0", "peer 1"], 0, 1.0)
    for what, own, other in (("client", "a", '["b"]'), ("rounds", [1], "[]"), ("settings", {}, "{")):
        store.set(f"{what}/1", other)
        with pytest.raises(PeerError, match=f"peer 1 tells of its {what} what cannot be read"):
            meeting.share(what, own)


class Tampers(Callback):
    """A peer whose messages change on their way, in round 1."""

    def __init__(self, old, new):
        self.old, self.new = old, new

    def on_run_begin(self, done, rounds_):
        pack = rounds.pack

        def change(message, reason, length):
            frame = pack(message, reason, length)
            return (
                frame[: -len(self.new)] + self.new if self.old is None else frame.replace(self.old, self.new)
            )

        rounds.pack = change


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (None, np.float32("nan").tobytes(), "holds NaN or infinity"),
        (b"lora/0/", b"lora/7/", "lacks tensors that group 'model' expects: lora/0/"),
    ],
)
def test_a_model_that_is_not_valid_is_left_out_by_its_receiver(place, tmp_path, old, new, why):
    """Peer 0 has no other neighbour, so its own model keeps all weight: after the round it is what the visit
    gave, which a visit outside of any run gives too."""
    made = experiment(place).model_copy(update={"rounds": 1})
    for each in peers(tmp_path / "peers", [made] * 3, fails={1: Tampers(old, new)}):
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
    assert why in dropped["reason"]
    (middle,) = records(peer_folder(tmp_path / "peers", 1))
    assert (middle["dropped"], middle["merged"]) == ([], 3)
