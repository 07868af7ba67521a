"""The run directory: complete rounds, one process, nothing left over."""

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import signal
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crashes import Crash, Failing, content, crashed
from prefed.core import State, files
from prefed.core.wire import encode
from prefed.store import NodeFile, RunReader, RunWriter, StoreError, client_file, writer
from waiting import WATCHDOG


def state(value):
    return encode(State({}, {"value": value}))


def play(path, rounds, resume=False):
    """Two clients visited in turn; every value says the round it was written in."""
    with RunWriter(path, resume=resume) as store:
        store.write_config("seed = 1\n")
        store.begin(state(0), {"data": "x"})
        for number in range(store.round + 1, rounds + 1):
            store.states.stage("both", state(number))
            store.states.stage("odd" if number % 2 else "even", state(number))
            store.states.stage("refused", state(number))
            store.states.accept(["both", "odd", "even"])
            store.finish_round(state(number), {"round": number}, {"bytes_up": 2 * number})
        store.write_summary({"rounds": rounds})


def test_only_the_last_versions_stay(tmp_path):
    play(tmp_path / "run", 3)
    assert sorted(content(tmp_path / "run")) == [
        "checkpoint/COMMIT.json",
        "checkpoint/clients/both@000003.safetensors",
        "checkpoint/clients/even@000002.safetensors",
        "checkpoint/clients/odd@000003.safetensors",
        "checkpoint/server@000003.safetensors",
        "config.toml",
        "rounds.jsonl",
        "summary.json",
    ]
    reader = RunReader(tmp_path / "run")
    assert reader.server().values["value"] == 3
    assert reader.client("even").values["value"] == 2
    assert reader.client("nobody") is None
    assert reader.rounds() == [{"round": 1}, {"round": 2}, {"round": 3}]
    assert (reader.commit.round, reader.commit.totals) == (3, {"bytes_up": 6})
    assert json.loads((tmp_path / "run/summary.json").read_text()) == {"rounds": 3}


def test_a_crash_at_any_file_operation_loses_at_most_the_round(tmp_path, monkeypatch):
    """Every single file operation of a run is failed in turn; resumed, each run ends the same."""
    play(tmp_path / "whole", 3)
    expected = content(tmp_path / "whole")
    for at, run in enumerate(crashed(tmp_path, monkeypatch, lambda path: play(path, 3)), 1):
        # A reader between the crash and the repair sees a whole round.
        if (run / "checkpoint/COMMIT.json").exists():
            reader = RunReader(run)
            number = reader.commit.round
            assert reader.server().values["value"] == number
            assert [record["round"] for record in reader.rounds()] == list(range(1, number + 1))
            assert number == 0 or reader.client("both").values["value"] == number
        play(run, 3, resume=True)
        assert content(run) == expected, f"after a crash at operation {at}"
    assert at > 80


def test_a_crash_while_repairing_is_repaired(tmp_path, monkeypatch):
    """Operations of the resumed run are failed too: crash, crash again while resuming, resume."""
    play(tmp_path / "whole", 3)
    expected = content(tmp_path / "whole")
    for first in range(20, 90, 15):
        for second in range(1, 12):
            run = tmp_path / f"{first}-{second}"
            for at, resume in ((first, False), (second, True)):
                monkeypatch.setattr(files, "os", Failing(at))
                with pytest.raises(Crash):
                    play(run, 3, resume)
                monkeypatch.setattr(files, "os", os)
            play(run, 3, resume=True)
            assert content(run) == expected


def test_a_full_directory_is_refused_with_advice(tmp_path):
    play(tmp_path / "run", 1)
    with pytest.raises(StoreError, match=r"already contains a run: resume it .*--resume, or resume=True"):
        RunWriter(tmp_path / "run")


def test_somebody_elses_directory_is_left_alone(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/dear.txt").write_text("hello")
    for resume in (False, True):
        with pytest.raises(StoreError, match="of a run; choose another --out"):
            RunWriter(tmp_path / "letters", resume=resume)
    assert list((tmp_path / "letters").iterdir()) == [tmp_path / "letters/dear.txt"]


def test_a_start_that_failed_may_be_started_again(tmp_path):
    """Before the first commit there is an experiment and a cache, and a page if the run is watched; an
    experiment alone may be anybody's."""
    for resume in (False, True):
        run = tmp_path / str(resume)
        with RunWriter(run) as store:
            store.write_config("seed = 2\n")
        (run / "cache").mkdir()
        (run / "report.html").write_text("round 0")
        play(run, 1, resume)
        assert (run / "config.toml").read_text() == "seed = 1\n"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.toml").write_text("seed = 2\n")
    for resume in (False, True):
        with pytest.raises(StoreError, match=r"'config\.toml' instead of a run.*; choose another"):
            RunWriter(tmp_path / "mine", resume=resume)


def test_the_page_of_a_start_that_was_taken_back_is_no_obstacle(tmp_path):
    """A start that fails leaves nothing behind, but who watches it writes its page, even afterwards."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/report.html").write_text("round 0")
    with pytest.raises(StoreError, match="contains no run to resume"):
        RunWriter(tmp_path / "run", resume=True)
    play(tmp_path / "run", 1)


def test_resuming_nothing_is_refused_with_the_runs_next_to_it(tmp_path):
    """A mistyped directory, one that is empty, and one among runs of other names; nothing is made there."""
    with pytest.raises(StoreError, match=r"mine contains no run to resume; to start a new run, omit"):
        RunWriter(tmp_path / "mine", resume=True)
    play(tmp_path / "ward-a", 1)
    (tmp_path / "ward").mkdir()
    with pytest.raises(
        StoreError,
        match=rf"no run to resume; did you mean {tmp_path}/ward-a\?; to start a new run, omit --resume",
    ):
        RunWriter(tmp_path / "ward", resume=True)
    with pytest.raises(StoreError, match=r"no run to resume \(runs next to it: ward-a\)"):
        RunWriter(tmp_path / "mine", resume=True)
    assert {path.name for path in tmp_path.iterdir()} == {"ward", "ward-a"}
    assert not list((tmp_path / "ward").iterdir())


def test_a_process_killed_as_it_made_its_directory_is_resumed(tmp_path):
    """All that it may leave under the run's name is a checkpoint/ with nothing or clients/ or LOCK in it."""
    for name, left in (("a", "checkpoint"), ("b", "checkpoint/clients"), ("c", "checkpoint/clients")):
        (tmp_path / name / left).mkdir(parents=True)
    (tmp_path / "c/checkpoint/LOCK").touch()
    for name in "abc":
        play(tmp_path / name, 1, resume=True)
    (tmp_path / "d/checkpoint").mkdir(parents=True)
    (tmp_path / "d/dear.txt").write_text("hello")
    with pytest.raises(StoreError, match=r"'dear\.txt' instead of a run \(runs next"):
        RunWriter(tmp_path / "d", resume=True)


def test_a_file_system_without_locks_is_not_said_to_be_in_use(tmp_path, monkeypatch):
    """flock(2) gives EWOULDBLOCK where another process holds the lock, and ENOLCK where none can be had."""

    def none(handle, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(StoreError, match=r"cannot lock .*/run \(No locks available\)"):
        RunWriter(tmp_path / "run")


def test_the_error_says_that_a_run_lost_its_checkpoint(tmp_path):
    play(tmp_path / "run", 1)
    (tmp_path / "run/checkpoint").rename(tmp_path / "elsewhere")
    for resume in (False, True):
        with pytest.raises(StoreError, match="has no checkpoint/, which is needed to continue the run"):
            RunWriter(tmp_path / "run", resume=resume)


def test_killed_before_the_first_commit_it_is_still_a_run(tmp_path, monkeypatch):
    """Without a config.toml too: what lies there is the store's own."""
    monkeypatch.setattr(files, "os", Failing(8))
    with RunWriter(tmp_path / "run") as store, pytest.raises(Crash):
        store.begin(state(0), {})
    monkeypatch.setattr(files, "os", os)
    assert list((tmp_path / "run/checkpoint").glob("server@*.safetensors"))
    assert not (tmp_path / "run/checkpoint/COMMIT.json").exists()
    play(tmp_path / "run", 2, resume=True)


def test_two_stores_in_one_directory(tmp_path):
    play(tmp_path / "run", 1)
    ours = f"in use by process {os.getpid()} on "
    with RunWriter(tmp_path / "run", resume=True), pytest.raises(StoreError, match=ours):
        RunWriter(tmp_path / "run", resume=True)
    play(tmp_path / "run", 2, resume=True)


def hold(path, ready):
    with RunWriter(path, resume=True):
        ready.set()
        signal.pause()


def test_a_killed_process_holds_nothing(tmp_path):
    """The lock is the kernel's: it goes with the process, however that ends."""
    play(tmp_path / "run", 1)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=hold, args=(tmp_path / "run", ready))
    holder.start()
    assert ready.wait(WATCHDOG)
    with pytest.raises(StoreError, match=f"process {holder.pid}"):
        RunWriter(tmp_path / "run", resume=True)
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    play(tmp_path / "run", 2, resume=True)


def test_other_data_is_not_resumed(tmp_path):
    play(tmp_path / "run", 1)
    with (
        RunWriter(tmp_path / "run", resume=True) as store,
        pytest.raises(StoreError, match="its data changed"),
    ):
        store.begin(state(0), {"data": "y"})


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("rounds.jsonl", lambda p: p.write_text('{"round": 1}\n'), "no record of round 2"),
        ("checkpoint/COMMIT.json", lambda p: p.write_text("{"), "damaged"),
        (
            "checkpoint/COMMIT.json",
            lambda p: p.write_text('{"format": 99, "prefed": "2.1.0", "digest": "of another kind"}'),
            r"has format 99, and prefed .* reads format 1: use the prefed that wrote it, 2\.1\.0",
        ),
        ("checkpoint/server@000002.safetensors", Path.unlink, "server's state of round 2 is missing"),
        # The odd client was last visited in round 1; without its state it would start over.
        ("checkpoint/clients/odd@000001.safetensors", Path.unlink, r"missing; .*odd@000001\.safetensors"),
    ],
)
def test_damage_is_named(tmp_path, file, damage, words):
    play(tmp_path / "run", 2)
    damage(tmp_path / "run" / file)
    with pytest.raises(StoreError, match=words):
        RunWriter(tmp_path / "run", resume=True)


def test_damage_takes_nothing_else_away(tmp_path):
    """What is left is left for whoever repairs it; put back, the run continues."""
    play(tmp_path / "run", 2)
    lost = tmp_path / "run/checkpoint/clients/even@000002.safetensors"
    data, before = lost.read_bytes(), content(tmp_path / "run")
    lost.rename(lost.with_name("even@000001.safetensors"))
    for _ in range(2):
        with pytest.raises(StoreError, match="is missing; restore "):
            RunWriter(tmp_path / "run", resume=True)
    assert lost.with_name("even@000001.safetensors").read_bytes() == data
    with pytest.raises(StoreError, match=r"even@000002.safetensors is missing"):
        RunReader(tmp_path / "run").client("even")
    lost.write_bytes(data)
    RunWriter(tmp_path / "run", resume=True).close()
    assert content(tmp_path / "run") == before


def test_a_reader_follows_a_run_that_goes_on(tmp_path):
    """Versions that it knows of are deleted under it: it reads the newer ones."""
    play(tmp_path / "run", 2)
    reader = RunReader(tmp_path / "run")
    play(tmp_path / "run", 5, resume=True)
    assert reader.client("both").values["value"] == 5
    assert reader.client("even").values["value"] == 4
    assert reader.server().values["value"] == 5


def test_one_record_is_in_memory_at_a_time(tmp_path):
    """40 records of some 25 kB, of which an open store holds the last alone: far less than their 1 MB."""
    with RunWriter(tmp_path / "run") as store:
        store.begin(state(0), {})
        for number in range(1, 41):
            store.finish_round(state(number), {"round": number, "figures": [0.1 + number] * 5000}, {})
        assert store.last["round"] == 40
    tracemalloc.start()
    with RunWriter(tmp_path / "run", resume=True) as store:
        most = tracemalloc.get_traced_memory()[1]
        assert store.last["round"] == 40
    tracemalloc.stop()
    assert (tmp_path / "run/rounds.jsonl").stat().st_size > 800_000
    assert most < 500_000


def test_a_client_is_found_without_listing_the_folder(tmp_path, monkeypatch):
    play(tmp_path / "run", 2)
    monkeypatch.setattr(os, "scandir", lambda path: pytest.fail(f"{path} is listed"))
    assert RunReader(tmp_path / "run").client("odd").values["value"] == 1


@given(st.lists(st.text(max_size=300), unique=True, min_size=2, max_size=5))
def test_client_files_differ_even_where_case_is_ignored(clients):
    names = [client_file(client) for client in clients]
    assert len({name.lower() for name in names}) == len(clients)
    for name in names:
        assert len(name) <= 151
        assert not set(name) & set('/\\:*?"<>|. ')


def test_records_are_strict_json(tmp_path):
    """JSON has no NaN: a number that is not finite becomes null."""
    with RunWriter(tmp_path / "run") as store:
        store.begin(state(0), {})
        store.finish_round(state(1), {"round": 1, "loss": float("nan"), "x": [float("inf"), 1.5]}, {})
    line = (tmp_path / "run/rounds.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"round": 1, "loss": None, "x": [None, 1.5]}


def test_private_states_are_their_owners_to_read(tmp_path):
    """Also where a copy left their folder open."""
    play(tmp_path / "run", 1)
    private = [*(tmp_path / "run/checkpoint").rglob("*.safetensors"), tmp_path / "run/checkpoint/clients"]
    assert len(private) == 4
    for path in private:
        assert path.stat().st_mode & 0o077 == 0
    private[-1].chmod(0o755)
    play(tmp_path / "run", 2, resume=True)
    assert private[-1].stat().st_mode & 0o777 == 0o700


def test_a_run_that_lost_its_commit_is_damaged_and_not_started_again(tmp_path):
    """Round 0 is committed before the log's first line: a log without a commit was not left by a kill."""
    play(tmp_path / "run", 2)
    before = content(tmp_path / "run")
    (tmp_path / "run/checkpoint/COMMIT.json").unlink()
    with pytest.raises(StoreError, match=r"COMMIT\.json is missing; restore it"):
        RunWriter(tmp_path / "run", resume=True)
    before.pop("checkpoint/COMMIT.json")
    assert content(tmp_path / "run") == before


def test_a_link_in_a_run_directory_is_not_written_through(tmp_path):
    """A directory from elsewhere may name another file LOCK, or what is written next."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for number, name in enumerate(("checkpoint/LOCK", "config.toml.partial", "rounds.jsonl")):
        run = tmp_path / str(number)
        with RunWriter(run) as store:
            store.begin(b"", {})
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(mine)
        with contextlib.suppress(OSError, StoreError), RunWriter(run, resume=True) as store:
            store.write_config("seed = 1")
            store.finish_round(b"", {"round": 1}, {})
        assert mine.read_text() == "mine"


def test_after_a_failed_commit_the_writer_refuses_another(tmp_path, monkeypatch):
    """A line too many is in the log by then: opening the directory again removes it."""
    play(tmp_path / "whole", 2)
    with RunWriter(tmp_path / "run") as store:
        store.write_config("seed = 1\n")
        store.begin(state(0), {"data": "x"})
        with monkeypatch.context() as patch:
            patch.setattr(writer, "write_commit", lambda *arguments: (_ for _ in ()).throw(OSError("full")))
            with pytest.raises(OSError, match="full"):
                store.finish_round(state(1), {"round": 1}, {})
        for again in (store.begin_round, lambda: store.finish_round(state(1), {"round": 1}, {})):
            with pytest.raises(StoreError, match="open the run directory again"):
                again()
    play(tmp_path / "run", 2, resume=True)
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_a_round_begins_from_what_is_committed(tmp_path):
    """What an abandoned round staged and accepted is gone, in memory and on the disk."""
    play(tmp_path / "run", 1)
    with RunWriter(tmp_path / "run", resume=True) as store:
        store.begin(state(0), {"data": "x"})
        before = content(tmp_path / "run")
        for client in ("both", "new"):
            store.states.stage(client, state(9))
        store.states.accept(["both", "new"])
        store.states.stage("odd", state(9))
        assert store.states.read("new") == state(9)
        store.begin_round()
        assert content(tmp_path / "run") == before
        assert [store.states.read(client) for client in ("both", "new")] == [state(1), None]
        store.states.accept(["odd"])
        assert store.states.read("odd") == state(1)


def test_the_commit_is_its_owners_to_read(tmp_path):
    """It holds digests of private states."""
    play(tmp_path / "run", 1)
    assert (tmp_path / "run/checkpoint/COMMIT.json").stat().st_mode & 0o777 == 0o600


def test_a_row_comes_in_as_many_pieces_as_the_system_gives(tmp_path, monkeypatch):
    """Linux gives at most 2 GiB at a time, which is 5 bytes here. A file that ends too early is damaged."""
    nodes = NodeFile.create(tmp_path / "nodes", 2, 3, torch.float32)
    nodes.put(1, torch.tensor([1.0, 2.0, 3.0]))
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda file, count, place: pread(file, min(count, 5), place))
    monkeypatch.setattr(os, "preadv", lambda file, into, place: preadv(file, [into[0][:5]], place))
    assert nodes.row(1).tolist() == [1.0, 2.0, 3.0]
    os.truncate(tmp_path / "nodes", (tmp_path / "nodes").stat().st_size - 1)
    with pytest.raises(StoreError, match="nodes is damaged: it ends before row 1 does"):
        nodes.row(1)
    nodes.close()


def test_a_run_that_fails_leaves_no_file_open(tmp_path):
    """A round of nodes that is not committed, and the committed one."""

    def opened():
        return len(list(Path("/proc/self/fd").iterdir()))

    before = opened()
    with RunWriter(tmp_path / "run") as store:
        for name in ("mixed", "next"):
            store.nodes.create(name, 2, 3, torch.float32)
        assert opened() > before + 2
    assert opened() == before


def test_nodes_that_are_closed_twice_close_no_other_file(tmp_path):
    """The next file gets the number of the one that was closed."""
    nodes = NodeFile.create(tmp_path / "nodes", 2, 3, torch.float32)
    nodes.close()
    with (tmp_path / "other").open("wb") as other:
        nodes.close()
        other.write(b"whole")
    assert (tmp_path / "other").read_bytes() == b"whole"
