"""Votes of clients as labels under ``[privacy]``: the labeller sees their noised sum, and ε counts it."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tomli_w
import torch
from tests.engines.test_align_refresh import alignment_of, config
from typer.testing import CliRunner

from alignments import align_killed, content, rows
from alignments import place as place
from finished import small_experiment
from liking import LikingJudge, install
from prefed import run
from prefed.align import AlignError
from prefed.config import Experiment
from prefed.core import Key, Privacy
from prefed.data import Record
from prefed.privacy import guarantee_of
from prefed.runs.align import align
from prefed.runs.export import Export
from prefed.runs.finished_run import read_run
from prefed.runs.loaded_run import recorded_experiment
from prefed.ui.cli import app
from prefed.ui.pages.card import model_card
from prefed.ui.pages.page import render
from toy import Warned

PRIVACY = {"clip": 0.1, "noise_multiplier": 2.0, "delta": 1e-5}
Z = 2.0


def liking(client, text):
    return len(text) if client == "right" else sum(text.encode()) % 3


class Liking(LikingJudge):
    def liking(self, text):
        return liking(self.client, text)


@pytest.fixture(autouse=True)
def judge(monkeypatch):
    install(monkeypatch, Liking)


def finished(place, path, privacy):
    """A run of FedBis over two rounds."""
    method = {"name": "fedbis", "lr": 0.02, "batch_size": 4, "local_steps": 2}
    tables = small_experiment(place, rounds=2, method=method)
    tables["data"] |= {"max_length": 64}
    tables |= {"merge": {"weights": "uniform"}, **({"privacy": privacy} if privacy else {})}
    run(Experiment.from_tables(tables, "x.toml"), path)
    return path


@pytest.fixture(scope="module")
def runs(place, tmp_path_factory):
    """``[privacy]`` → a finished run."""
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def make(**privacy):
        name = json.dumps(privacy)
        if name not in made:
            made[name] = finished(place, folder / str(len(made)), privacy)
        return made[name]

    return make


@pytest.fixture
def copy(runs, tmp_path):
    def make(name="run", **privacy):
        shutil.copytree(runs(**privacy), tmp_path / name)
        return tmp_path / name

    return make


VOTES = {"labels": "clients", "generations": None}


def sums(path):
    """The answers of an alignment, each after the row with its number."""
    written = rows(path / "align", "votes.jsonl")
    assert [row["number"] for row in written[::2]] == list(range(1, len(written) // 2 + 1))
    assert [row["request"] for row in written[::2]] == [row["request"] for row in written[1::2]]
    return written[1::2]


def true_votes(folder, name="scores.jsonl"):
    """The two clients' votes on each pair of the labels, ``[2, n]``."""
    made = rows(folder, "completions.jsonl")
    texts = {(row["index"], row["sample"]): row["completion"] for row in made}
    asked = [[texts[row["index"], sample] for sample in row["samples"]] for row in rows(folder, name)]
    each = [[np.sign(liking(who, a) - liking(who, b)) for a, b in asked] for who in ("left", "right")]
    return np.array(each)


@pytest.mark.parametrize("kind", ["central", "local"])
def test_the_labeller_sees_the_sum_of_votes_with_noise(copy, place, kind):
    """z √n on each of n pairs, from the run's key and the request, drawn for all clients or for each; the
    sign of the sum labels, and its size over the number of clients is the margin."""
    path, heard = copy(kind=kind, **PRIVACY), Warned()
    align(path, config(place, **VOTES), callbacks=[heard])
    folder = path / "align"
    votes, answers = true_votes(folder), sums(path)
    key = Key(read_run(path).config["seed"]).at("align").at("votes", answers[0]["request"]).at("noise", "sum")
    keys = [key] if kind == "central" else [Key(key.seed, key.path[:-1]).at("noise", k) for k in (0, 1)]
    draws = [torch.randn(votes.shape[1], generator=own.torch(), dtype=torch.float64).numpy() for own in keys]
    noised = np.rint(votes.sum(0) + Z * np.sqrt(votes.shape[1]) * sum(draws))
    assert answers[0]["sum"] == noised.tolist()
    assert np.abs(noised - votes.sum(0)).max() > 2
    assert [row["scores"] for row in rows(folder, "scores.jsonl")] == [[each / 2] for each in noised]
    made = {(row["index"], row["completion"]): row["sample"] for row in rows(folder, "completions.jsonl")}
    pairs = [(row["index"], tuple(row["samples"])) for row in rows(folder, "scores.jsonl")]
    for row in rows(folder, "labels.jsonl"):
        chosen, rejected = (made[row["index"], row[name]] for name in ("chosen", "rejected"))
        total = noised[pairs.index((row["index"], tuple(sorted((chosen, rejected)))))]
        assert (total > 0) == (chosen < rejected)
        assert row["margin"] == abs(total) / 2
    assert any("most labels are random" in text for text in heard.texts)


def test_each_answer_is_a_release_that_epsilon_counts(copy, place):
    """One for the labels and one for the win rate of each epoch; a repeated request, of a stage that runs
    again, is none. The terminal, the page and the card have the total."""
    path = copy(kind="central", **PRIVACY)
    summary = align(path, config(place, **VOTES, epochs=2))
    answers = sums(path)
    assert len({row["request"] for row in answers}) == len(answers) == 3
    promised = guarantee_of(Privacy(kind="central", **PRIVACY), 2, 2)
    spent = summary["privacy"]
    assert (spent["releases"], spent["votes"], spent["delta"]) == (2, 3, 1e-5)
    assert spent["epsilon"] == pytest.approx(promised.epsilon(5, 1e-5))
    assert spent["epsilon_without_votes"] == pytest.approx(promised.epsilon(2, 1e-5))
    labels = rows(path / "align", "labels.jsonl")
    align(path, config(place, **VOTES, epochs=2), stage="labels")
    assert sums(path) == answers
    assert rows(path / "align", "labels.jsonl") == labels
    line = f"epsilon {spent['epsilon']:.3g} at delta 1e-05"
    shown = CliRunner().invoke(app, ["align", str(path), "--resume"])
    table = config(place, **VOTES, epochs=2).model_dump(mode="json", exclude_none=True)
    text = tomli_w.dumps({**read_run(path).config, "align": table})
    (path.parent / "again.toml").write_text(text)
    again = CliRunner().invoke(app, ["run", str(path.parent / "again.toml"), "--out", str(path), "--resume"])
    assert (shown.exit_code, again.exit_code) == (0, 0), shown.output + again.output
    record = read_run(path)
    for text in (shown.output, again.output, render(record)):
        assert line in text
        assert f"2 releases and 3 of votes, {spent['epsilon_without_votes']:.3g} without them" in text
    assert f"margin {labels[0]['margin']:.2f}" in render(record)
    export = Export(None, None, True, None, False, (), recorded_experiment(record).model)
    card = model_card(record, export)
    assert f"epsilon {spent['epsilon']:.3g}" in card
    assert "and 3 of votes on completions" in card
    # Other labels take nothing back.
    again = align(path, config(place, labels="majority", client_judge=None, generations=None), stage="labels")
    assert again["privacy"] == spent


def test_with_little_noise_the_labels_are_those_without(copy, place, tmp_path):
    """Also ties, as a sum is rounded to whole votes. Without [privacy] each client has its column."""
    path = copy(kind="central", **PRIVACY | {"noise_multiplier": 1e-6})
    align(path, config(place, **VOTES, held_out=0))
    plain = copy("plain")
    summary = align(plain, config(place, **VOTES, held_out=0))
    assert "privacy" not in summary
    assert not (plain / "align/votes.jsonl").exists()
    columns = [row["scores"] for row in rows(plain / "align", "scores.jsonl")]
    assert columns == true_votes(plain / "align").T.tolist()
    mine, theirs = (
        [{**row, "votes": 0} for row in rows(own / "align", "labels.jsonl")] for own in (path, plain)
    )
    counts = [json.loads((own / "align/summary.json").read_text())["labels"]["ties"] for own in (path, plain)]
    assert mine == theirs
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("draws", ["seed", "system"])
def test_killed_at_any_write_a_stored_answer_is_used_again(copy, place, draws, monkeypatch):
    """Whatever its noise was drawn from; from the seed, all files are those of an alignment that was not
    killed. Half an answer was not used, and is no release."""
    settings = config(place, **{**VOTES, "generations": 2})
    whole = copy("whole", kind="central", draws="seed", **PRIVACY)
    align(whole, settings)
    path = copy("killed", kind="central", draws=draws, **PRIVACY)
    monkeypatch.setattr("prefed.store.directory.lock", lambda *_: os.open(os.devnull, os.O_RDONLY))
    assert 4 < align_killed(alignment_of(path, settings), monkeypatch, at=13, most=60) < 60
    mine, theirs = (content(own / "align") for own in (path, whole))
    differing = [name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)]
    assert bool(differing) == (draws == "system"), differing
    answers = [row["sum"] for row in sums(path)]
    for number in (1, 2):
        scores = rows(path / f"align/generations/{number}", "scores.jsonl")
        assert [2 * row["scores"][0] for row in scores] in answers
    assert json.loads((path / "align/summary.json").read_text())["privacy"]["votes"] == len(answers)


def test_a_damaged_file_of_votes_is_named(copy, place):
    """Half a row at its end was not used; any other damage would take back what was spent, as would a file
    that is gone."""
    path = copy(kind="central", **PRIVACY)
    align(path, config(place, **VOTES, held_out=0))
    file = path / "align/votes.jsonl"
    whole = file.read_bytes()
    with file.open("ab") as stream:
        stream.write(whole[:20])
    align(path, config(place, **VOTES, held_out=0), stage="labels")
    assert file.read_bytes() == whole
    file.write_bytes(whole.replace(b'"number": 1', b'"number": 2'))
    with pytest.raises(AlignError, match=r"votes.jsonl is damaged: .*what votes have spent is unknown"):
        align(path, config(place, **VOTES, held_out=0), stage="labels")
    file.unlink()
    with pytest.raises(AlignError, match=r"votes.jsonl lacks sums .*restore a copy"):
        align(path, config(place, **VOTES, held_out=0), stage="policy")


class Others:
    """The same votes by other judges."""

    def __init__(self, clients):
        self.names, self.noised, self.noise = clients.names, clients.noised, clients.noise
        self.identity = {**clients.identity, "left": {"client": "right"}}


def test_other_pairs_judges_and_noise_have_other_draws(copy, place):
    """Two sums with the same noise would give away the votes in which they differ. All votes are ties here,
    so a sum is its noise; √200 times a correlation of 200 independent draws is about normal."""
    pairs, noises = [Record(f"Case {k}:", "ab", "ba") for k in range(200)], []
    for number, changes in enumerate(({}, {"noise_multiplier": 3.0}, {"draws": "system"})):
        path = copy(str(number), **{"kind": "central", **PRIVACY, **changes})
        (path / "align").mkdir()
        votes = alignment_of(path, config(place, **VOTES)).judge
        asked = [votes.scores(own)[1][0] for own in (pairs, pairs[::-1], [*pairs[:-1], pairs[0]])]
        asked.append(replace(votes, clients=Others(votes.clients)).scores(pairs)[1][0])
        assert np.array_equal(votes.scores(pairs)[1][0], asked[0])
        assert len(sums(path)) == 4
        noises += [*asked, asked[1][::-1]]
    assert len(noises) == 15
    assert np.abs(np.corrcoef(noises) - np.eye(15)).max() < 0.4
