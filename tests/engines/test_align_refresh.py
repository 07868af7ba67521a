"""Clients that judge the current policy's completions: refreshed selectors, and votes as labels."""

import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from alignments import align_killed, content, rows
from alignments import place as place
from finished import small_experiment
from liking import LikingJudge, install
from prefed import run
from prefed.align import AlignError
from prefed.align.judge import JudgeError, Verdict
from prefed.align.labels import won
from prefed.align.tastes import Generation
from prefed.config import AlignConfig, ConfigError, Experiment
from prefed.config.align import align_settings
from prefed.core import Callback
from prefed.data import Record
from prefed.runs.align import _alignment, _Source, align
from prefed.runs.finished_run import read_run
from prefed.runs.forget import plan
from prefed.runs.labels import JUDGES, selectors_of
from prefed.runs.loaded_run import load_run
from prefed.store import RunReader
from prefed.ui.collect.pairs import recorded_pairs
from preferences import jsonl

SIGNS = {"left": 1, "right": -1}


def liking(client, text):
    """What ``left`` likes, from 0 to 2, ``right`` dislikes."""
    return SIGNS[client] * (sum(text.encode()) % 3)


class Liking(LikingJudge):
    def liking(self, text):
        return liking(self.client, text)


@pytest.fixture(autouse=True)
def judge(monkeypatch):
    install(monkeypatch, Liking)


@pytest.fixture(scope="module")
def finished(place, tmp_path_factory):
    """A run of FedBiscuit with two selectors, one for each client."""
    method = {"name": "fedbiscuit", "selectors": 2, "warmup_rounds": 1, "lr": 0.02, "batch_size": 4}
    tables = small_experiment(place, rounds=3, method={**method, "local_steps": 2})
    tables["data"] |= {"max_length": 64}
    path = tmp_path_factory.mktemp("runs") / "run"
    run(Experiment.from_tables(tables, "x.toml"), path)
    return path


def config(place, **changes):
    keys = {"completions": 3, "max_new_tokens": 6, "temperature": 1.0, "generate": 5, "batch_size": 4}
    keys |= {
        "pairs": "all",
        "lr": 0.03,
        "epochs": 1,
        "held_out": 0.25,
        "generations": 3,
        "client_judge": "liking",
    }
    table = {"prompts": str(place / "prompts.jsonl"), **keys, **changes}
    return align_settings({name: value for name, value in table.items() if value is not None}, [], place)


REFRESH = {"every": 2, "pairs": 5, "rounds": 2}


def alignment_of(path, settings):
    return _alignment(read_run(path), settings, _Source(path, settings, Callback()))


@pytest.fixture(scope="module")
def whole(finished, place, tmp_path_factory):
    """A loop of three generations that was not stopped, with a refresh in the second one."""
    path = tmp_path_factory.mktemp("whole") / "run"
    shutil.copytree(finished, path)
    with pytest.MonkeyPatch.context() as patch:
        install(patch, Liking)
        summary = align(path, config(place, refresh=REFRESH))
    return path, summary


def test_clients_judge_what_the_policy_says_at_this_generation(whole):
    """Each client judges five pairs of completions of generation 2, as it likes them, and there are no
    other refreshes. Pairs to train on are those that are no tie. The accuracy is the run's selectors'."""
    path, summary = whole
    folder = path / "align/generations"
    assert [each.name for each in sorted(folder.rglob("judged.jsonl"))] == ["judged.jsonl"]
    judged = rows(folder, "2/judged.jsonl")
    made = {(json.dumps(row["prompt"]), row["completion"]) for row in rows(folder, "2/completions.jsonl")}
    assert Counter(row["client"] for row in judged) == {"left": 5, "right": 5}
    assert {(row["chosen"], row["rejected"]) for row in judged if row["client"] == "left"} != {
        (row["chosen"], row["rejected"]) for row in judged if row["client"] == "right"
    }
    for row in judged:
        assert {(json.dumps(row["prompt"]), row[name]) for name in ("chosen", "rejected")} <= made
        likings = [liking(row["client"], row[name]) for name in ("chosen", "rejected")]
        assert (likings[0] > likings[1]) == (row["score"] == 1)
        assert (likings[0] == likings[1]) == (row["score"] == 0)
    clear = [row for row in judged if row["score"]]
    assert 0 < len(clear) < len(judged)
    names = ("client", "prompt", "chosen", "rejected")
    assert rows(folder, "2/pairs.jsonl") == [{name: row[name] for name in names} for row in clear]
    (refresh,) = summary["refresh"]["refreshes"]
    pairs = [Record(row["prompt"], row["chosen"], row["rejected"]) for row in clear]
    right = won(alignment_of(path, config_of(path)), selectors_of(load_run(path)), pairs)
    assert refresh["accuracy"] == pytest.approx(right.mean())
    assert (refresh["generation"], refresh["judged"], refresh["pairs"]) == (2, 10, len(clear))


def config_of(path):
    return AlignConfig.model_validate(json.loads((path / "align/settings.json").read_text()))


def test_a_refresh_is_rounds_of_the_run_on_other_pairs(whole, place, tmp_path):
    """Its first rounds are the run's; the last two train both clients on the pairs that they judged."""
    path, _ = whole
    refreshed = path / "align/generations/2/refresh"
    before, after = RunReader(path), RunReader(refreshed)
    assert (before.commit.round, after.commit.round) == (3, 5)
    assert after.rounds()[:3] == before.rounds()
    assert [set(record["cohort"]) for record in after.rounds()[3:]] == [set(SIGNS)] * 2
    assert after.commit.fingerprint["data"] != before.commit.fingerprint["data"]
    own = load_run(refreshed, data=True)
    counts = Counter(row["client"] for row in rows(path / "align/generations/2", "pairs.jsonl"))
    assert {name: sizes.train for name, sizes in own.trainers.clients.items()} == counts
    old = load_run(path).published_models
    assert not any(own.published_models[name].equal(old[name]) for name in old)


def test_labels_are_the_newest_selectors(whole):
    """Generation 1 has the run's selectors, 2 and 3 those of the refresh in 2."""
    path, _ = whole
    alignment, folder = alignment_of(path, config_of(path)), path / "align/generations"
    for number, origin in ((1, path), (2, folder / "2/refresh"), (3, folder / "2/refresh")):
        made = rows(folder, f"{number}/completions.jsonl")
        texts = {(row["index"], row["sample"]): row["completion"] for row in made}
        prompts = {row["index"]: row["prompt"] for row in made}
        selectors = selectors_of(load_run(origin))
        for row in rows(folder, f"{number}/scores.jsonl"):
            pair = Record(prompts[row["index"]], *(texts[row["index"], k] for k in row["samples"]))
            assert row["scores"] == pytest.approx(selectors.scores([pair])[1][:, 0].tolist(), abs=1e-5)
    assert Generation(3).refreshed(alignment) == alignment.folder / "generations/2/refresh"


def test_epochs_are_compared_by_the_newest_selectors(whole):
    """Win rates of all generations are by the refreshed selectors, on the answers that the epochs wrote."""
    path, summary = whole
    alignment, selectors = (
        alignment_of(path, config_of(path)),
        selectors_of(load_run(path / "align/generations/2/refresh")),
    )
    prompts = rows(path / "align", "prompts.jsonl")
    for epoch in summary["train"]["epochs"]:
        answers = rows(path / "align", f"generations/{epoch['generation']}/checkpoints/answers-1.jsonl")
        wins = [
            0.5
            if row["answer"].strip() == row["initial"].strip()
            else won(
                alignment,
                selectors,
                [Record(prompts[row["prompt"]]["prompt"], row["answer"], row["initial"])],
            )[0]
            for row in answers
        ]
        assert epoch["win_rate"] == pytest.approx(np.mean(wins))
    shown = rows(path / "align", "answers.jsonl")
    files = [path / f"align/generations/{k}/checkpoints" for k in (1, 2, 3)]
    for number, row in enumerate(shown):
        each = [rows(file, "answers-1.jsonl")[number] for file in files]
        assert row["answers"] == [each[0]["initial"], *(own["answer"] for own in each)]
        assert row["prompt"] == prompts[each[0]["prompt"]]["prompt"]
    assert len(shown) == min(3, len(answers)) > 0


def test_killed_at_any_write_a_loop_ends_in_the_same_bytes(whole, finished, place, tmp_path, monkeypatch):
    """Also in the rounds of a refresh, whose clocks differ."""
    path = tmp_path / "run"
    shutil.copytree(finished, path)
    alignment = alignment_of(path, config(place, refresh=REFRESH))
    # The lock of a process that ends is released.
    monkeypatch.setattr("prefed.store.directory.lock", lambda *_: os.open(os.devnull, os.O_RDONLY))
    processes = align_killed(alignment, monkeypatch, at=13, most=60)
    assert 8 < processes < 60
    mine, theirs = (own / "align" for own in (path, whole[0]))
    states = [RunReader(own / "generations/2/refresh").commit.digests for own in (mine, theirs)]
    assert (states[0].server, states[0].clients) == (states[1].server, states[1].clients)
    mine, theirs = (
        {name: data for name, data in content(own).items() if "/refresh/" not in name}
        for own in (mine, theirs)
    )
    assert mine == theirs


def test_a_client_that_judged_only_ties_sits_a_refresh_out(place, tmp_path, monkeypatch):
    """Though the run's cohort and its ranks count it, and it has no pair to evaluate on."""
    monkeypatch.setitem(SIGNS, "left", 0)
    method = {"name": "fedbis", "lr": 0.02, "batch_size": 4, "local_steps": 2}
    tables = small_experiment(place, rounds=1, method=method)
    lines = (place / "test.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "test.jsonl").write_text("".join(line for line in lines if "right" in line))
    tables["data"] |= {"max_length": 64, "test": str(tmp_path / "test.jsonl"), "encoding": "latin-1"}
    tables |= {"cohort": {"fraction": 1.0}, "merge": {"ranks": {"left": 1, "right": 2}}}
    path = tmp_path / "run"
    run(Experiment.from_tables(tables, "x.toml"), path)
    align(path, config(place, refresh={"pairs": 4}, generations=1))
    folder = path / "align/generations/1"
    assert {row["client"] for row in rows(folder, "pairs.jsonl")} == {"right"}
    assert [record["cohort"] for record in RunReader(folder / "refresh").rounds()[1:]] == [["right"]]
    # The run's encoding is that of its own files.
    tokens, written = (
        load_run(folder / "refresh", data=True).trainers.dataset.tokens,
        rows(folder, "pairs.jsonl"),
    )
    assert not "".join(row["chosen"] for row in written).isascii()
    assert {tokens.record(row).chosen for row in range(len(written))} == {row["chosen"] for row in written}


def test_clients_vote(finished, place, tmp_path, monkeypatch):
    """A pair has one vote per client, 0 for a tie, and the sign of their sum labels it; no selector does."""
    path = tmp_path / "run"
    shutil.copytree(finished, path)
    monkeypatch.setattr("prefed.runs.align.selectors_of", None)
    monkeypatch.setitem(SIGNS, "right", 1)
    real = liking
    monkeypatch.setitem(
        globals(), "liking", lambda who, text: len(text) if who == "right" else real(who, text)
    )
    align(path, config(place, labels="clients", generations=None))
    made = rows(path / "align", "completions.jsonl")
    texts = {(row["index"], row["sample"]): row["completion"] for row in made}
    scores, expected = rows(path / "align", "scores.jsonl"), Counter()
    for row in scores:
        one, other = (texts[row["index"], sample] for sample in row["samples"])
        votes = [np.sign(liking(who, one) - liking(who, other)) for who in ("left", "right")]
        assert row["scores"] == votes
        expected[abs(sum(votes))] += 1
    assert len(expected) == 3
    summary = json.loads((path / "align/summary.json").read_text())["labels"]
    assert summary["ties"] == expected[0]
    assert {sum(row["votes"]) for row in rows(path / "align", "labels.jsonl")} == {1, 2}


def test_votes_of_opposed_clients_cancel_out(finished, place, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(finished, path)
    with pytest.raises(AlignError, match=r"ties\); votes for opposite tastes cancel out: .*fedvpa"):
        align(path, config(place, labels="clients", generations=None))


def test_a_judge_without_a_taste_is_made_once_and_asked_once(finished, place, tmp_path, monkeypatch):
    """Its two clients have one vote each, the same, so no pair is asked about twice."""
    path, made, asked = tmp_path / "run", list[str](), Counter()

    class Longer:
        def __init__(self, folder, options):
            made.append(folder)
            self.identity = {"folder": folder}

        def compare(self, questions):
            for each in questions:
                asked[each.prompt, each.first, each.second] += 1
                first, second = len(each.first), len(each.second)
                yield Verdict((float(first > second) + float(first >= second)) / 2, "")

    shutil.copytree(finished, path)
    monkeypatch.setitem(JUDGES.builtin, "reward", Longer)
    align(path, config(place, client_judge="reward:model", labels="clients", generations=None))
    assert made == ["model"]
    pairs = rows(path / "align", "scores.jsonl")
    assert set(asked.values()) == {1}
    assert {tuple(row["scores"]) for row in pairs} <= {(1.0, 1.0), (0.0, 0.0), (-1.0, -1.0)}


def test_people_judge_with_prefed_collect(finished, place, tmp_path):
    """A refresh asks all clients' people and stops; their choices, a neither apart, are its verdicts. To
    forget one of them leaves the folder, which the plan names, and no alignment that they judged."""
    path, folder = tmp_path / "run", tmp_path / "people"
    folder.mkdir(mode=0o755)
    shutil.copytree(finished, path)
    settings = config(place, client_judge=f"people:{folder}", refresh={"every": 1, "pairs": 4}, generations=1)
    for _ in range(2):
        with pytest.raises(AlignError, match=r"(?s)'left' .*--from.*left.*'right' .*--client right --out"):
            align(path, settings)
    chosen = {}
    for name in SIGNS:
        asked = recorded_pairs(str(folder / f"{name}.questions.jsonl"), None)
        assert len(asked.numbers()) == 4
        questions = rows(folder, f"{name}.questions.jsonl")
        # The second response each time, and neither of the last.
        chosen[name] = [{**q, "chosen": q["rejected"], "rejected": q["chosen"]} for q in questions[:-1]]
        jsonl(folder / f"{name}.jsonl", [{**row, "client": name, "side": "left"} for row in chosen[name]])
    align(path, settings)
    judged = rows(path / "align/generations/1", "judged.jsonl")
    for name, own in chosen.items():
        mine = [row for row in judged if row["client"] == name]
        assert [row["score"] for row in mine] == [1, 1, 1, None]
        assert [{key: row[key] for key in own[0]} for row in mine[:-1]] == own
    assert folder.stat().st_mode & 0o777 == 0o755
    due = {each.where: each.action for each in plan(path, ["left"]).descendants}
    assert due["align"] == "deleted"
    assert {Path(place).name for place in due if place.startswith(str(folder))} == {
        "left.jsonl",
        "left.questions.jsonl",
    }
    (folder / "left.jsonl").write_text("{}\n")
    assert (path / "align/generations/1/held-out.jsonl").stat().st_size > 0
    with pytest.raises(JudgeError, match=r"left.jsonl, line 1 is no choice"):
        align(path, settings, stage="refresh-1")
    assert not (path / "align/generations/1/held-out.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"client_judge": None, "labels": "clients"}, "name the judge that each of them uses: client_judge"),
        ({}, r"client_judge requires labels = 'clients' or \[align.refresh\]"),
        ({"refresh": {}, "generations": None}, "set generations"),
        ({"refresh": {}, "labels": "judge:utility"}, "remove it or labels = 'judge:utility'"),
        ({"refresh": {}, "labels": "clients"}, "remove it or labels = 'clients'"),
        ({"labels": "clients", "client_judge": "people:x"}, "which people do not give"),
        ({"judge": {"taste": "x"}, "client_judge": None}, "requires client_judge or labels = 'judge:NAME'"),
        ({"refresh": {}, "client_judge": "own.judge:J"}, "client_judge = 'own.judge:J'.*does not load"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(place, changes, words):
    with pytest.raises(ConfigError, match=words):
        config(place, **changes)


def test_a_judge_has_the_taste_of_its_client(finished, place):
    """So nobody else's can be set, and the clients must be on this machine. A refresh is not in epsilon."""
    settings = config(place, refresh={}, judge={"taste": "left"})
    with pytest.raises(AlignError, match=r"leave out \[align.judge\] taste"):
        alignment_of(finished, settings)
    record = read_run(finished)
    private = {"kind": "central", "clip": 0.1, "noise_multiplier": 2.0, "delta": 1e-5}
    noised = {**record.config, "privacy": private, "merge": {"weights": "uniform"}}
    noised["method"] = {"name": "fedbis", "lr": 0.02, "local_steps": 2, "batch_size": 4}
    settings = config(place, refresh={})
    with pytest.raises(AlignError, match=r"leave out \[privacy\] or \[align.refresh\]"):
        _alignment(replace(record, config=noised), settings, _Source(finished, settings, Callback()))
    record = replace(record, summary={**record.summary, "peer": "left"})
    settings = config(place, refresh={})
    with pytest.raises(AlignError, match="the clients of this run are not on this machine"):
        _alignment(record, settings, _Source(finished, settings, Callback()))


def test_a_client_whose_taste_judged_takes_the_alignment_with_it(finished, place, tmp_path):
    """To label again by the taste of a forgotten client would not be the run that never had it."""
    path = tmp_path / "run"
    shutil.copytree(finished, path)
    align(
        path,
        config(place, generations=None, labels="judge:liking", client_judge=None, judge={"taste": "left"}),
    )
    due = {name: {each.where: each.action for each in plan(path, [name]).descendants} for name in SIGNS}
    assert (due["left"]["align"], due["right"]["align"]) == ("deleted", "made again")
