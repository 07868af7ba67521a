"""Peers that die, hang or are accused, at any point: the others end, say why, and resume."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import DistNetworkError, HashStore, TCPStore

import prefed.store.writer
from peering import Fails, end_of, experiment, free_port, meet, peers, started, whole
from prefed.core import Callback
from prefed.engines import validation
from prefed.engines.base_rounds import Course
from prefed.networks.peers import heartbeat, links, rounds
from prefed.networks.peers.heartbeat import STOP, Beat, PeerError, Watch, beat_key
from prefed.networks.peers.links import Links
from prefed.networks.peers.rendezvous import Place
from prefed.networks.peers.rounds import PeerRounds
from prefed.networks.peers.run import peer_folder
from prefed.store import RunWriter
from prefed.ui.cli import federation as peer
from prefed.ui.cli import output
from toy import records
from waiting import WATCHDOG, until
from workers import place as place


@pytest.fixture
def brief(monkeypatch):
    """For a watch without others that it could wait for."""
    monkeypatch.setattr(heartbeat, "GRACE", 0.1)


def watching(store, rank=0):
    """A watch of one of two peers, of which the other has sent a heartbeat; a verdict ends no process."""
    store.set(beat_key(1 - rank), Beat().text())
    watch = Watch(store, rank, ["peer 0", "peer 1"], 0, WATCHDOG)
    watch.start()
    watch.hush()
    return watch


def test_a_peer_that_dies_or_hangs_is_named_and_the_run_goes_on(place, tmp_path):
    """Killed or stopped: an end, and peer 0, which keeps the store. All others end with one error, and the
    run in two or three sittings is the run in one, bit for bit, its private states too."""
    made = experiment(place, "fedper", optimizer_state="kept")
    expected = whole(tmp_path / "whole", [made] * 3)

    def begin(name, rank, visits, what, patience=WATCHDOG, resume=False):
        end = started(
            tmp_path / name, [made] * 3, resume=resume, fails={rank: Fails(visits, what)}, patience=patience
        )

        def check(why):
            ended = end()
            for other in {0, 1, 2} - {rank}:
                named = f"PeerError: peer {rank} ('w{rank}' on {socket.gethostname()}) {why}; complete rounds"
                assert named in ended[other].text
                assert ended[other].status == 1

        return check

    silent = "has sent no heartbeat for 10 seconds"
    stopped = begin("two", 2, 2, signal.SIGSTOP, 10.0)
    begin("three", 0, 2, signal.SIGKILL)("closed its connection")
    begin("three", 0, 1, signal.SIGSTOP, 10.0, resume=True)(silent)
    stopped(silent)
    for parts in ("two", "three"):
        assert all(map(torch.equal, expected, whole(tmp_path / parts, [made] * 3, resume=True)))
        for rank in range(3):
            one, other = (records(peer_folder(tmp_path / name, rank)) for name in ("whole", parts))
            clocked = {"seconds", "mix_seconds"}
            assert [{k: r[k] for k in r.keys() - clocked} for r in one] == [
                {k: r[k] for k in r.keys() - clocked} for r in other
            ]


class Sleeps(Callback):
    """A visit that takes long."""

    def on_task_end(self, what, done, of):
        time.sleep(WATCHDOG)


@pytest.mark.parametrize(
    ("fails", "limit", "why"),
    [
        (Fails(1, signal.SIGTERM), 0.0, "was terminated"),
        (Sleeps(), 0.5, "exceeded [engine] visit_timeout = 0.5 seconds in its visit"),
    ],
)
def test_a_peer_that_gives_up_notifies_the_others(place, tmp_path, fails, limit, why):
    """It lives, but does not continue. Peer 2 is not connected to it. Visits of the others have no limit."""
    made = experiment(place)
    own = made.model_copy(update={"engine": made.engine.model_copy(update={"visit_timeout": limit})})
    ended = peers(tmp_path / "peers", [own, made, made], fails={0: fails})
    assert [each.status for each in ended] == [1, 1, 1]
    for each in ended[1:]:
        assert f"PeerError: peer 0 ('w0' on {socket.gethostname()}) {why}" in each.text


@pytest.mark.parametrize(
    ("key", "word", "verdict"),
    [
        (beat_key(1), "1 2", "peer 1 sent an invalid heartbeat"),
        (beat_key(1), b"\xff", "peer 1 sent an invalid heartbeat"),
        (STOP, "[9, 'gone']", "a peer failed, but the report in the store is invalid"),
        (STOP, '[9, "gone"]', "a peer failed, but the report in the store is invalid"),
        (STOP, "7", "a peer failed, but the report in the store is invalid"),
    ],
)
def test_words_that_cannot_be_read_end_the_run_of_all(brief, key, word, verdict):
    """They do not end the thread that reads them: then a watch would find the store silent, and name its
    keeper, peer 0."""
    watch = watching(store := HashStore())
    store.set(key, word)
    assert watch.wait_for_verdict(WATCHDOG).startswith(verdict)
    watch.leave("left")


class Dies(Callback):
    """A peer that is killed before, or after, a function is called for the ``count``-th time."""

    def __init__(self, owner, name, when, count=2):
        self.owner, self.name, self.when, self.left = owner, name, when, count

    def on_run_begin(self, done, of):
        real = getattr(self.owner, self.name)

        def call(*arguments, **named):
            self.left -= 1
            if self.when == "before" and not self.left:
                os.kill(os.getpid(), signal.SIGKILL)
            given = real(*arguments, **named)
            if self.when == "after" and not self.left:
                os.kill(os.getpid(), signal.SIGKILL)
            return given

        setattr(self.owner, self.name, call)


POINTS = [
    (1, Course, "begin", "before"),
    (0, PeerRounds, "_train", "after"),
    (2, rounds, "pack", "after"),
    (1, Links, "swap", "after"),
    (0, rounds, "read_upload", "before", 1),
    (2, rounds, "mix_row", "after"),
    (1, Course, "evaluate", "after"),
    (0, prefed.store.writer, "write_commit", "before"),
    (1, RunWriter, "finish_round", "after"),
]
"""Which peer is killed, and where: in the order of a round; at the second call, or the one given."""


@pytest.mark.rare
def test_a_peer_may_die_at_any_point_of_a_round(place, tmp_path):
    """After each death the others end and name the dead one. No round is committed without a neighbour's
    model: the ends of the path mix two, the middle three. The last sitting ends as a run left alone does, bit
    for bit."""
    made = experiment(place).model_copy(update={"rounds": 12})
    expected = whole(tmp_path / "whole", [made] * 3)
    for number, (rank, *point) in enumerate(POINTS):
        ended = peers(tmp_path / "parts", [made] * 3, resume=number > 0, fails={rank: Dies(*point)})
        assert ended[rank].status == -signal.SIGKILL, (point, ended[rank].text)
        for other in {0, 1, 2} - {rank}:
            assert ended[other].status == 1, (point, ended[other])
            assert (
                f"peer {rank} ('w{rank}' on {socket.gethostname()}) closed its connection"
                in ended[other].text
            )
    assert all(map(torch.equal, expected, whole(tmp_path / "parts", [made] * 3, resume=True)))
    for rank, count in enumerate((2, 3, 2)):
        found = records(peer_folder(tmp_path / "parts", rank))
        assert [(each["merged"], each["dropped"]) for each in found] == [(count, [])] * 12


class ReadsUntilTheVerdict(Callback):
    """A peer that is inside the reading of a neighbour's model, in round 2, when another is found dead."""

    def on_run_begin(self, done, of):
        read, decode, reading = PeerRounds._read, validation.decode_upload, []

        def note(peer, own, client, frame, now, tally):
            reading[:] = [peer.watch] * (now.number == 2)
            return read(peer, own, client, frame, now, tally)

        def slow(message, most):
            if reading:
                assert reading[0].wait_for_verdict(WATCHDOG)
            return decode(message, most)

        PeerRounds._read, validation.decode_upload = note, slow


def test_a_verdict_while_a_model_is_read_neither_drops_the_model_nor_is_lost(place, tmp_path):
    """Peer 2 dies once its model of round 2 has arrived, and peer 1 hears of it inside ``read_upload``, which
    takes any exception for a fault of the message. All models are there, so the round is a whole one."""
    made = experiment(place)
    fails = {1: ReadsUntilTheVerdict(), 2: Dies(Links, "swap", "after")}
    ended = peers(tmp_path / "peers", [made] * 3, fails=fails)
    assert [each.status for each in ended] == [1, 1, -signal.SIGKILL]
    for each in ended[:2]:
        assert f"peer 2 ('w2' on {socket.gethostname()}) closed its connection" in each.text
    found = records(peer_folder(tmp_path / "peers", 1))
    assert [(each["merged"], each["dropped"]) for each in found[:2]] == [(3, [])] * len(found)


def test_a_model_that_cannot_come_is_not_awaited(monkeypatch):
    """No connection with peer 1, so nothing ever arrives."""

    def refused(*arguments, **named):
        raise RuntimeError("connection refused")

    monkeypatch.setattr(links.dist, "get_backend", lambda: "gloo")
    for name in ("isend", "irecv"):
        monkeypatch.setattr(links.dist, name, refused)
    watch = watching(HashStore())
    connected = Links(watch, {"w1": 1})
    connected.expect(1, {"w1": 8})
    with pytest.raises(PeerError, match=r"^peer 1 closed its connection"):
        connected.swap(1, bytes(8))
    watch.leave("left")


class Closes(HashStore):
    """The store of a peer 0 that ends as soon as it has read that peer 1 leaves."""

    closed = False

    def set(self, key, value):
        super().set(key, value)
        self.closed = value.endswith(("done", "left"))

    def check(self, keys):
        if self.closed:
            raise DistNetworkError("connection reset by peer")
        return super().check(keys)


def test_a_store_that_ends_after_the_last_heartbeat_of_a_peer_is_no_failure(brief):
    """Peer 0 waits for no more than that, so another heartbeat may find nobody."""
    watch = watching(store := Closes(), rank=1)
    watch.leave("done")
    assert store.closed
    assert watch.verdict == ""


def test_peers_that_live_but_do_not_finish_a_round_are_named(brief):
    """With a limit for rounds no wait is without end, whatever the reason."""
    store = HashStore()
    store.set(beat_key(1), Beat(round=3).text())
    store.set(beat_key(2), Beat(round=2).text())
    watch = Watch(store, 0, ["peer 0", "peer 1", "peer 2"], 0, WATCHDOG)
    watch.committed(3)
    watch.start()
    watch.hush()
    until(lambda: watch.least == 2, "the heartbeats")
    watch.limit_rounds(0.1)
    verdict = watch.wait_for_verdict(WATCHDOG)
    assert verdict.startswith("round 3 was not committed within 0.1 seconds by peer 2;")
    watch.leave("left")


def test_a_peer_0_that_is_stopped_before_all_have_come_is_named(tmp_path):
    """The library's client of the store waits for it without a limit."""
    port, host = free_port(), os.fork()
    if host == 0:
        store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(store is None)
    try:
        os.waitpid(host, os.WUNTRACED)
        (text,) = meet(tmp_path, [Place(1, 2, "127.0.0.1", port, patience=0.5, join=0.5)])
    finally:
        os.kill(host, signal.SIGKILL)
        os.waitpid(host, 0)
    assert text.startswith("PeerError: peer 0 is stopped")


def test_a_signal_that_is_swallowed_ends_the_process_all_the_same(monkeypatch):
    monkeypatch.setattr(peer, "GRACE", 0.5)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, peer.stop)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException:
            time.sleep(WATCHDOG)
        os._exit(0)
    assert end_of(child) == 143


@pytest.mark.parametrize("what", ["verdict", "main"])
def test_a_peer_ends_though_nothing_of_it_can_be_written(brief, what):
    """As with a log on a full disk."""
    child = os.fork()
    if child == 0:
        try:
            sys.stdout = sys.stderr = Path("/dev/full").open("w")  # noqa: SIM115
            if what == "main":
                peer.ends_at_once(lambda: print("done"))()
            watch = Watch(HashStore(), 0, ["peer 0"], 0, WATCHDOG)
            watch.start()
            watch.accuse(None, "a peer is at fault")
            time.sleep(WATCHDOG)
        finally:
            os._exit(0)
    assert end_of(child) == 1


def test_the_verdict_that_ends_a_peer_is_in_its_log_in_json(brief, tmp_path):
    """It is written by a thread, where the main one does not look."""
    child = os.fork()
    if child == 0:
        try:
            sys.stderr = (tmp_path / "err").open("w")

            def hangs() -> None:
                watch = Watch(HashStore(), 0, ["peer 0"], 0, WATCHDOG)
                watch.start()
                watch.accuse(None, "a peer is at fault")
                time.sleep(WATCHDOG)

            output.command(hangs, trains=False, settings=False)(log="json")
        finally:
            os._exit(0)
    assert end_of(child) == 1
    (entry,) = map(json.loads, (tmp_path / "err").read_text().splitlines())
    assert entry["level"] == "error"
    assert entry["message"].startswith("error: a peer is at fault; ")
