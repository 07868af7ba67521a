"""The best round in a run directory: kept next to the last, whole, private, and through any crash."""

import contextlib
from pathlib import Path

import pytest
import torch

from crashes import content, crashed
from prefed.core import State
from prefed.core.wire import encode
from prefed.store import RunReader, RunWriter, StoreError

BEST = (1, 1, 3, 3, 3)
"""Which round is the best after each of five."""


def state(value):
    return encode(State({}, {"value": value}))


def best(number):
    return {"round": BEST[number - 1], "value": 0.5, "stopped": False}


def play(path, rounds=5, resume=False):
    """Two clients visited in turn, and the states of three nodes; every value says in which round it was
    written. Rounds 2 and 5 have no evaluation."""
    with RunWriter(path, resume=resume) as store:
        store.write_config("seed = 1\n")
        store.begin(state(0), {"data": "x"})
        for number in range(store.round + 1, rounds + 1):
            for client in ("both", "odd" if number % 2 else "even"):
                store.states.stage(client, state(number))
            store.states.accept(["both", "odd", "even"])
            node_file = store.nodes.create("next", 3, 2, torch.float32)
            for node in range(3):
                node_file.put(node, torch.full((2,), 10.0 * number + node))
            got = None if number in (2, 5) else best(number)
            store.finish_round(state(number), {"round": number}, {}, best=got)


def values(reader):
    """Of the server, of each client, and of node 2."""
    clients = [reader.client(name) for name in ("both", "odd", "even")]
    kept = [None if each is None else each.values["value"] for each in clients]
    return reader.server().values["value"], *kept, float(reader.node(2)[0])


def test_the_best_is_what_the_run_was_after_its_round(tmp_path):
    """After rounds 2 and 3 of five: round 1 was the best until round 3 was better."""
    play(tmp_path / "run", 2)
    assert values(RunReader(tmp_path / "run", best=True)) == (1, 1, 1, None, 12.0)
    assert values(RunReader(tmp_path / "run")) == (2, 2, 1, 2, 22.0)
    play(tmp_path / "run", resume=True)
    reader = RunReader(tmp_path / "run", best=True)
    assert values(reader) == (3, 3, 3, 2, 32.0)
    assert (reader.commit.round, reader.rounds()[-1]) == (3, {"round": 3})
    assert values(RunReader(tmp_path / "run")) == (5, 5, 5, 4, 52.0)
    assert sorted(content(tmp_path / "run")) == [
        "checkpoint/COMMIT.json",
        "checkpoint/COMMIT@000003.json",
        *(f"checkpoint/clients/{name}.safetensors" for name in ("both@000003", "both@000005")),
        *(f"checkpoint/clients/{name}.safetensors" for name in ("even@000002", "even@000004")),
        *(f"checkpoint/clients/{name}.safetensors" for name in ("odd@000003", "odd@000005")),
        *(f"checkpoint/nodes/nodes@00000{number}.safetensors" for number in (3, 5)),
        *(f"checkpoint/server@00000{number}.safetensors" for number in (3, 5)),
        "config.toml",
        "rounds.jsonl",
    ]


def test_nobody_else_may_read_the_best(tmp_path):
    play(tmp_path / "run")
    for path in (tmp_path / "run/checkpoint").rglob("*@*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_crash_at_any_file_operation_loses_neither_the_best_nor_the_last(tmp_path, monkeypatch):
    """Every file operation of a run is failed in turn. After each a reader finds the best that belongs to the
    last committed round; resumed, each run ends with the same bytes."""
    play(tmp_path / "whole", 4)
    expected = content(tmp_path / "whole")
    for at, run in enumerate(crashed(tmp_path, monkeypatch, lambda path: play(path, 4)), 1):
        with contextlib.suppress(StoreError):  # before the first commit there is no run
            last = RunReader(run).commit.round
            if last:
                assert RunReader(run, best=True).commit.round == BEST[last - 1]
                assert values(RunReader(run, best=True))[:2] == (BEST[last - 1], BEST[last - 1])
        play(run, 4, resume=True)
        assert content(run) == expected, f"after a crash at operation {at}"
    assert at > 90


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("COMMIT@000003.json", r"commit of its best round 3 is missing; restore .*COMMIT@000003\.json"),
        ("server@000003.safetensors", "server's state of round 3 is missing"),
        ("clients/even@000002.safetensors", "private state of round 2 is missing"),
        ("nodes/nodes@000003.safetensors", "nodes' state of round 3 is missing"),
    ],
)
def test_a_lost_file_of_the_best_is_named_and_nothing_is_removed(tmp_path, file, words):
    play(tmp_path / "run")
    lost = tmp_path / "run/checkpoint" / file
    data, before = lost.read_bytes(), content(tmp_path / "run")
    lost.unlink()
    with pytest.raises(StoreError, match=words):
        RunWriter(tmp_path / "run", resume=True)
    lost.write_bytes(data)
    play(tmp_path / "run", resume=True)
    assert content(tmp_path / "run") == before


def test_a_damaged_file_of_the_best_is_refused(tmp_path):
    play(tmp_path / "run")
    path: Path = tmp_path / "run/checkpoint/clients/even@000002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(StoreError, match=r"even@000002.safetensors is damaged"):
        RunReader(tmp_path / "run", best=True).client("even")


def test_a_run_that_is_not_judged_keeps_no_best(tmp_path):
    """Its commit has no word of it, as in earlier versions."""
    with RunWriter(tmp_path / "run") as store:
        store.begin(state(0), {})
        store.finish_round(state(1), {"round": 1}, {})
    assert b'"best"' not in (tmp_path / "run/checkpoint/COMMIT.json").read_bytes()
    with pytest.raises(StoreError, match=r"has no best round: its experiment has no \[stop\] table"):
        RunReader(tmp_path / "run", best=True)
