"""Whole runs of a real, tiny language model from Python."""

import json
import shutil
import tomllib
from html import unescape

import numpy as np
import pytest

import toy
from finished import small_experiment
from prefed import Experiment, run
from prefed.config import ConfigError
from prefed.core import Key
from prefed.models import ModelError
from prefed.models.tiny import make_tiny
from prefed.runs.build import build_data, build_job
from prefed.runs.finished_run import RunError, read_run
from prefed.runs.loaded_run import load_run
from prefed.runs.reference_cache import reference_folder
from prefed.runs.start_or_resume import fitted
from prefed.store import RunReader, StoreError
from prefed.train.forward_passes import ReferenceLogprobs
from prefed.train.pair_cache import PairScoreCache
from prefed.train.tastes import ResponseFeatures
from prefed.ui.pages.page import render
from toy import Warned, left


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model of two small blocks and 60 pairs of three workers, one of whom has nothing to be tested on."""
    folder = tmp_path_factory.mktemp("place")
    draw, lines = np.random.default_rng(0), []
    for number in range(60):
        worker, good = f"w{number % 3}", ["yes please", "no thanks"]
        chosen, rejected = good if number % 2 else good[::-1]
        lines.append(
            {
                "prompt": f"Question {draw.integers(1000)}?",
                "chosen": f" {chosen} {number}",
                "rejected": f" {rejected} {number}",
                "worker": worker,
            }
        )
    tests = [dict(line, prompt=f"Test {k}?") for k, line in enumerate(lines) if line["worker"] != "w2"][:12]
    for name, rows in (("train", lines), ("test", tests)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [line["prompt"] + line["chosen"] for line in lines]
    make_tiny(folder / "model", texts, Key(0), layers=2, width=32, heads=2, vocabulary=280, steps=2)
    return folder


def experiment(place, method="feddpo", **changes):
    tree = small_experiment(
        place,
        rounds=3,
        model={"name": str(place / "model"), "lora": {"rank": 2, "dropout": 0.1}},
        cohort={"size": 2},
        method={"name": method, "lr": 0.01, "local_steps": 2, "batch_size": 4},
    )
    return Experiment.model_validate({**tree, **changes})


@pytest.fixture(scope="module")
def whole(place, tmp_path_factory):
    """An undisturbed run; to be read only."""
    return run(experiment(place), tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def started(place, first, tmp_path):
    """A copy of a run that has ended after one round."""
    return shutil.copytree(first, tmp_path / "run")


@pytest.fixture(scope="module")
def first(place, tmp_path_factory):
    return run(experiment(place, rounds=1), tmp_path_factory.mktemp("first") / "run").path


def test_the_reference_is_asked_for_what_is_used_alone(place, tmp_path):
    """One client judged, two steps of four of twenty pairs in each of two visits: kept for scoring are the
    test pairs of the judged one, and for training at most sixteen of any client and none of the tests."""
    judged = experiment(place, rounds=2, evaluate={"clients": 1}, cohort={"size": 3})
    run(judged, tmp_path / "run")
    folder = tmp_path / "run/cache"
    job, data = build_job(judged, folder), build_data(judged, folder / "data")
    (client,) = job.evaluation_clients

    def cached_rows(*, training):
        (path,) = (
            path
            for path in (folder / "reference").glob("reference-*.f32")
            if path.stem.endswith("-training") == training
        )
        values = PairScoreCache(len(data.tokens), folder / "reference", path.stem)
        return {row for row in range(len(data.tokens)) if not values.missing(np.array([row]))}

    assert cached_rows(training=False) == set(data.clients[client].test.tolist())
    trained = cached_rows(training=True)
    for own in data.clients.values():
        assert 8 <= len(trained & set(own.train.tolist())) <= 16
        assert not trained & set(own.test.tolist())


def test_alike_runs_share_the_reference_and_no_other_does(place, tmp_path, monkeypatch):
    """A rate, rounds and a cohort leave the frozen model's numbers as they are: such a run asks it nothing
    and ends as alone, bit for bit. Another seed trains on other pairs first, but scores the same, and another
    method may group them otherwise."""
    second = experiment(place, rounds=2, cohort={"size": 3}, evaluate={"every": 0})
    first = second.model_copy(update={"rounds": 3})
    reseeded = second.model_copy(update={"seed": 8})
    run(second, tmp_path / "alone")
    run(reseeded, tmp_path / "reseeded-alone")
    monkeypatch.setenv("PREFED_REFERENCE", str(tmp_path / "shared"))
    run(first, tmp_path / "first")
    (folder,) = (tmp_path / "shared").iterdir()
    compute = ReferenceLogprobs._compute

    def no_scores(reference, cache, blocks):
        assert cache is reference.training
        compute(reference, cache, blocks)

    with monkeypatch.context() as watched:
        watched.setattr(ReferenceLogprobs, "_compute", no_scores)
        run(reseeded, tmp_path / "reseeded")
    monkeypatch.setattr(ReferenceLogprobs, "_compute", lambda *_: pytest.fail("the reference was asked"))
    run(second, tmp_path / "second")
    assert left(tmp_path / "second") == left(tmp_path / "alone")
    assert not (tmp_path / "second/cache/reference").exists()
    assert left(tmp_path / "reseeded") == left(tmp_path / "reseeded-alone")
    tables = fitted(second).tables()
    tables["method"]["lr"] = 0.5
    assert reference_folder(Experiment.from_tables(tables, "tables"), tmp_path) == folder
    for other in ({"evaluate": {"every": 1}}, {"engine": {"max_tokens": 512}}):
        alone = fitted(experiment(place, **{"evaluate": {"every": 0}, **other}))
        assert reference_folder(alone, tmp_path) != folder
    assert reference_folder(fitted(experiment(place, "fedper", evaluate={"every": 0})), tmp_path) != folder


def test_selectors_share_hidden_states_whatever_the_method_and_seed(place, tmp_path, monkeypatch):
    """A run of another method with another seed reads no response again, and ends as alone, bit for bit. One
    with other pairs, splits or batches reads its own."""

    def selectors(method, **changes):
        return experiment(place, method, **{"rounds": 1, "evaluate": {"every": 0}, **changes})

    other = selectors("fedvpl", seed=5)
    run(other, tmp_path / "alone")
    monkeypatch.setenv("PREFED_REFERENCE", str(tmp_path / "shared"))
    run(selectors("lore", cohort={"size": 3}), tmp_path / "first")
    known = {path.parent for path in (tmp_path / "shared").rglob("responses-*.f32")}
    with monkeypatch.context() as frozen:
        frozen.setattr(ResponseFeatures, "_hidden", lambda *_: pytest.fail("a response was read"))
        run(other, tmp_path / "second")
    assert left(tmp_path / "second") == left(tmp_path / "alone")
    drawn, fewer = (other.data.model_copy(update=change) for change in ({"test": None}, {"limit": 8}))
    for number, one in enumerate(
        (
            other.model_copy(update={"data": fewer}),
            selectors("lore", engine={"threads": 1, "max_tokens": 512}),
            *(other.model_copy(update={"data": drawn, "seed": seed}) for seed in (5, 6)),
        )
    ):
        run(one, tmp_path / f"other-{number}")
    assert len({path.parent for path in (tmp_path / "shared").rglob("responses-*.f32")} - known) == 4


def test_a_run_leaves_what_it_returns(place, whole):
    """Its adapter is one that PEFT loads; w2, who has no test pair, is left out and counted."""
    result = whole
    assert result.path.name == "run"
    assert result.summary == json.loads((result.path / "summary.json").read_text())
    assert [record["round"] for record in result.rounds] == [1, 2, 3]
    assert set(result.summary["preference_accuracy"]["per_client"]) == {"w0", "w1"}
    assert result.summary["left_out"] == 1
    assert result.summary["parameters"]["trainable"] == result.server.tensors["model"].layout.size
    assert result.summary["bytes"]["up"] > 2 * 3 * 4 * result.summary["parameters"]["communicated"]
    seen = RunReader(result.path)
    assert seen.server().tensors["model"].equal(result.server.tensors["model"])

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(place / "model")
    loaded = PeftModel.from_pretrained(base, result.adapter).state_dict()
    factors = [value for name, value in loaded.items() if "lora_B" in name]
    sums = sorted(float(value.abs().sum()) for value in factors)
    ours = result.server.tensors["model"]
    assert sums == pytest.approx(sorted(float(ours[n].abs().sum()) for n in ours if n.endswith("/B")))
    assert sums[0] > 0


@pytest.mark.parametrize("steps", [1, 5])
def test_interrupted_and_resumed_it_ends_the_same(place, whole, tmp_path, steps):
    """Stopped in the first round and in the second; dropout and batches are drawn alike."""
    with pytest.raises(KeyboardInterrupt):
        run(experiment(place), tmp_path / "parts", callbacks=[toy.InterruptAt(steps)])
    run(experiment(place), tmp_path / "parts", resume=True)
    assert left(tmp_path / "parts") == left(whole.path)


@pytest.mark.usefixtures("forked_workers")
def test_worker_processes_change_no_bit(place, whole, tmp_path):
    """Two of them. Fresh interpreters do in ``test_workers.py`` and ``test_taste_run.py``."""
    shared_out = experiment(place, engine={"threads": 1, "workers": 2, "visit_timeout": 600})
    run(shared_out, tmp_path / "there")
    here, there = left(whole.path), left(tmp_path / "there")
    configs = [tomllib.loads(tree.pop("config.toml").decode()) for tree in (here, there)]
    assert here == there
    assert [config["engine"].pop("workers") for config in configs] == [0, 2]
    assert [config["engine"].pop("visit_timeout") for config in configs] == [0, 600]
    assert configs[0] == configs[1]


def test_local_only_shares_no_model(place, tmp_path):
    """Nothing but the loss travels, so there is no shared adapter; clients' models differ from it."""
    result = run(experiment(place, "local"), tmp_path / "run")
    assert result.adapter is None
    assert result.summary["parameters"]["communicated"] == 0
    assert result.summary["shared_accuracy"] == result.summary["baseline_accuracy"]
    states = [RunReader(tmp_path / "run").client(client) for client in ("w0", "w1", "w2")]
    assert any(state is not None for state in states)


@pytest.mark.parametrize(
    "method",
    [
        "fedrep",
        "perfedavg",
        *(pytest.param(name, marks=pytest.mark.rare) for name in ("feddpo", "centralized", "fedsdg")),
    ],
)
def test_newcomers_never_train_and_are_judged_apart(place, tmp_path, method):
    """w1 is in no cohort and weighs nothing; with k = 0 it has what was published and nothing else, not even
    the steps or the random parts with which a client of the method would predict: its accuracy is the
    published model's. k steps change its model, not the run's."""
    summaries = {}
    for name, steps in (("none", [0]), ("some", [0, 6])):
        asked = experiment(
            place, method, evaluate={"unseen": ["w1"], "unseen_steps": steps}, cohort={}, rounds=1
        )
        result = run(asked, tmp_path / name)
        summaries[name] = result.summary
        assert all("w1" not in record["cohort"] for record in result.rounds)
    assert list(summaries["some"]["preference_accuracy"]["per_client"]) == ["w0"]
    assert set(summaries["some"]["unseen_accuracy"]) == {"0", "6"}
    assert summaries["some"]["unseen_accuracy"]["0"] == summaries["none"]["unseen_accuracy"]["0"]
    assert summaries["some"]["preference_accuracy"] == summaries["none"]["preference_accuracy"]
    opened = load_run(tmp_path / "none", data=True)
    scores = opened.trainers.score("w1", opened.published_model, opened.job.evaluate.split)
    shared = scores.metrics(0.1)["preference_accuracy"]
    assert summaries["none"]["unseen_accuracy"]["0"]["per_client"] == {"w1": shared}


def test_newcomers_must_exist_and_leave_somebody(place, tmp_path):
    with pytest.raises(ValueError, match="'w7'"):
        run(experiment(place, evaluate={"unseen": ["w7"]}), tmp_path / "a")
    with pytest.raises(ConfigError, match="there are only 3 clients; lower it"):
        run(experiment(place, evaluate={"unseen": 3}), tmp_path / "b")


def test_a_rule_that_no_cohort_can_serve_is_refused_before_the_first_round(place, tmp_path):
    """The median withstands a liar among 3, not among 2; 3 clients there are. Nobody merges in ``local``."""
    folder, two, median = tmp_path / "cache", {"size": 2}, {"rule": "median"}
    with pytest.raises(ConfigError, match=r"rule = 'median' .*\[cohort\] size.* at least 3") as caught:
        build_job(experiment(place, cohort=two, merge=median), folder)
    assert "a cohort of 2 clients ([cohort] size; 3 clients train)" in str(caught.value)
    assert build_job(experiment(place, cohort={}, merge=median), folder).members == ("w0", "w1", "w2")
    assert build_job(experiment(place, "local", cohort=two, merge=median), folder).cohort_size == 2


def test_what_no_adapter_can_hold_is_said(place, tmp_path):
    """FedEx-LoRA changes base weights: the run ends well, and warns."""
    listener = Warned()
    result = run(experiment(place, merge={"lora": "fedex"}, rounds=1), tmp_path / "run", callbacks=[listener])
    assert result.adapter is None
    assert any("no adapter was saved" in text for text in listener.texts)


def test_other_data_or_settings_are_not_resumed(place, started):
    with pytest.raises(StoreError, match="already contains a run: resume it"):
        run(experiment(place), started)
    with pytest.raises(ConfigError, match="seed: 3 → 4"):
        run(experiment(place, seed=4), started, resume=True)


@pytest.mark.usefixtures("started")
def test_the_settings_that_a_run_started_with_are_in_its_commit(place, whole, tmp_path):
    """Without its ``config.toml`` it continues only with its own settings, and writes them again. An edited
    file is refused, except for the places of data and model, which are identified by their content."""
    file = tmp_path / "run/config.toml"
    text = file.read_text()
    file.unlink()
    tree = experiment(place).model_dump(exclude_none=True)
    other = Experiment.model_validate({**tree, "method": {**tree["method"], "lr": 0.02}})
    with pytest.raises(StoreError, match=r"config.toml is missing, and .* not the original ones"):
        run(other, tmp_path / "run", resume=True)
    assert not file.exists()
    file.write_text(text.replace("lr = 0.01", "lr = 0.02"))
    with pytest.raises(StoreError, match=r"config.toml was edited.* not the original ones either; restore"):
        run(other, tmp_path / "run", resume=True)
    with pytest.raises(StoreError, match=r"config.toml was edited.*\n  method.lr: 0.01 → 0.02\n"):
        run(experiment(place), tmp_path / "run", resume=True)
    shutil.copytree(place, tmp_path / "moved")
    file.write_text(text.replace(str(place), str(tmp_path / "moved")))
    run(experiment(tmp_path / "moved", rounds=2), tmp_path / "run", resume=True)
    file.unlink()
    run(experiment(place), tmp_path / "run", resume=True)
    assert left(tmp_path / "run") == left(whole.path)


@pytest.mark.usefixtures("started")
def test_a_run_whose_data_and_model_moved_continues_and_notes_their_place(place, whole, tmp_path):
    """Its ``config.toml`` names the new places. Other data at a new place are refused, after the last round
    too, and then the file does not change."""
    moved = shutil.copytree(place, tmp_path / "moved")
    run(experiment(moved, rounds=2), tmp_path / "run", resume=True)
    config = tomllib.loads((tmp_path / "run/config.toml").read_text())
    assert config == fitted(experiment(moved, rounds=2)).tables()
    run(experiment(place), tmp_path / "run", resume=True)
    assert left(tmp_path / "run") == left(whole.path)
    with (moved / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "More?", "chosen": " a", "rejected": " b", "worker": "w0"}) + "\n")
    for rounds in (3, 4):
        shutil.rmtree(tmp_path / "run/cache")
        with pytest.raises(StoreError, match="its data changed since it started"):
            run(experiment(moved, rounds=rounds), tmp_path / "run", resume=True)
        assert tomllib.loads((tmp_path / "run/config.toml").read_text()) == fitted(experiment(place)).tables()


@pytest.mark.usefixtures("started")
def test_settings_that_are_no_experiment_are_named(place, tmp_path):
    """As of another version, or cut short: both resuming and loading name the file and the key."""
    file = tmp_path / "run/config.toml"
    file.write_text(file.read_text() + "\n[other]\n")
    remedy = r"run/config.toml: other: no such key(.|\n)*\nrestore config.toml from a backup"
    with pytest.raises(StoreError, match=remedy):
        run(experiment(place, rounds=2), tmp_path / "run", resume=True)
    with pytest.raises(RunError, match=remedy):
        load_run(tmp_path / "run")
    file.write_text("rounds =")
    with pytest.raises(StoreError, match=r"run/config.toml is damaged: .*; restore it from a copy"):
        run(experiment(place, rounds=2), tmp_path / "run", resume=True)


def test_resuming_a_run_that_is_not_there_starts_none(place, tmp_path):
    """``resume=out.exists()`` starts it, and continues with it."""
    out = tmp_path / "run"
    with pytest.raises(StoreError, match="contains no run to resume"):
        run(experiment(place, rounds=1), out, resume=True)
    for _ in range(2):
        run(experiment(place, rounds=1), out, resume=out.exists())


def test_a_start_that_was_interrupted_stays_to_be_gone_on_with(place, tmp_path, monkeypatch):
    """Unlike one that failed, whose message says what to change first; a folder that was there stays too."""

    def stopped(*arguments, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("prefed.runs.build.build_trainers", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(experiment(place, rounds=1), tmp_path / "run")
    assert (tmp_path / "run/cache/data").is_dir()
    run(experiment(place, rounds=1), tmp_path / "run", resume=True)
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match=r"\[cohort\] size = 9"):
        run(experiment(place, cohort={"size": 9}), tmp_path / "mine")
    assert (tmp_path / "mine").is_dir()


def test_what_is_private_in_a_run_is_its_owners_to_read(place, tmp_path):
    """All clients' texts, the reference's log-probabilities, and states; what describes only the run is for
    whoever the umask allows."""
    run(experiment(place, "fedper", rounds=1), tmp_path / "run")
    public = {"", "checkpoint", "adapters"}
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        name = path.relative_to(tmp_path / "run").as_posix()
        private = name.startswith(("cache", "checkpoint/clients", "checkpoint/server@", "checkpoint/COMMIT"))
        assert (path.stat().st_mode & 0o077 == 0) == private, name
        assert not path.is_dir() or private or name in {*public, ".", "adapters/shared"}


def test_a_start_that_came_to_no_round_is_started_again(place, whole, tmp_path):
    """Neither a setting that shows itself wrong in the first visit nor a file that is repaired where it lies
    blocks the run that follows: it ends as one in a folder of its own does."""
    wrong = {"name": "feddpo", "local_steps": 2, "objective": "ppo", "reward_model": "no/such/model"}
    tree = experiment(place).model_dump(exclude_none=True)
    with pytest.raises(ModelError, match="no/such/model"):
        run(Experiment.model_validate({**tree, "method": wrong}), tmp_path / "again")
    run(experiment(place), tmp_path / "again")
    assert left(tmp_path / "again") == left(whole.path)
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_bytes((place / f"{name}.jsonl").read_bytes())
    data = {**experiment(place).data.model_dump(exclude_none=True), "train": str(tmp_path / "train.jsonl")}
    with pytest.raises(ValueError, match="'zz'"):
        run(experiment(place, data=data, evaluate={"unseen": ["zz"]}), tmp_path / "edited")
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[:-3]))
    result = run(experiment(place, data=data), tmp_path / "edited")
    assert sum(sizes["train"] for sizes in result.summary["clients"].values()) == 57


def test_a_loss_that_does_not_move_is_warned_of(place, whole, tmp_path):
    """At a rate that AdamW trains at, SCAFFOLD's plain SGD stays at log 2 = 0.6931, where DPO starts. The
    run's page says so too."""
    hears = Warned()
    stays = run(experiment(place, "scaffold"), tmp_path / "run", callbacks=[hears])
    (warning,) = hears.texts
    assert warning.startswith("the training loss hardly moved, from 0.6931 in the first round")
    assert "T" + warning[1:] in unescape(render(read_run(stays.path)))
    assert "hardly moved" in (stays.path / "run.log").read_text()
    assert "hardly moved" not in (whole.path / "run.log").read_text() + render(read_run(whole.path))
