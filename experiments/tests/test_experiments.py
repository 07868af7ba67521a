"""The committed experiments: that they run, and their scripts."""

import json
import math
import random
import runpy
import statistics
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from commands import prefed_, sweep_command
from experiment_scripts import EXPERIMENTS, rows, script
from prefed import run
from prefed.align.judge import Question
from prefed.config import AlignConfig, Experiment
from prefed.config.align import JudgeOptions
from prefed.config.experiment_table import load_table
from prefed.core import Key
from prefed.models.tiny import make_tiny
from prefed.runs import sweep_child
from prefed.runs.build import build_data
from prefed.ui.cli import app
from preferences import jsonl
from small_models import save_reward_model

CELLS = {
    f"{path.parent.name}/{path.stem}/{name}": cell
    for paper in ("fedpdpo", "fedsdg")
    for path in sorted((EXPERIMENTS / paper).glob("*.toml"))
    for name, cell in load_table(path).cells(path).items()
}
"""FOLDER/TABLE/CELL → the cell."""


# That they run, with a tiny model and local files in the schemas of their sets


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny model, a tiny reward model and small files of every set's columns."""
    folder = tmp_path_factory.mktemp("experiments")
    draw = random.Random(0)

    def answers(k):
        good, bad = f"yes of course {draw.randrange(100)}", f"no never {draw.randrange(100)}"
        return (good, bad) if k % 3 else (bad, good)

    def write(name, make, count=24):
        return str(jsonl(folder / f"{name}.jsonl", [make(k, *answers(k)) for k in range(count)]))

    def imdb(k, chosen, rejected):
        start = f"film {k} is"
        rewards = {"chosen_reward": draw.random(), "rejected_reward": -draw.random()}
        return {"prompt": start, "chosen": f"{start} {chosen}", "rejected": f"{start} {rejected}", **rewards}

    def code(k, chosen, rejected):
        lang = ("c++", "python", "java", "go", "c#", "ruby")[k % 6]
        return {
            "lang": lang,
            "vulnerability": "overflow",
            "system": "",
            "question": f"Write {k}",
            "chosen": chosen,
            "rejected": rejected,
        }

    def webgpt(k, chosen, rejected):
        return {
            "question": {"full_text": f"Why {k}?", "dataset": "eli5"},
            "answer_0": chosen,
            "answer_1": rejected,
            "score_0": 0.0 if k == 0 else 0.5,
            "score_1": 0.0 if k == 0 else -0.5,
        }

    def plain(k, chosen, rejected):
        return {"prompt": f"Say {k}", "chosen": chosen, "rejected": rejected}

    def shp(k, chosen, rejected):
        return {
            "history": f"How {k}?",
            "human_ref_A": chosen,
            "human_ref_B": rejected,
            "labels": 1,
            "score_ratio": 2.0,
            "domain": f"ask{k % 3}_train",
        }

    paths = {"imdb": write("imdb", imdb, 33), "imdb-test": write("imdb-test", imdb, 12)}
    paths["code"] = write("code", code, 36)
    for name, make in (("webgpt", webgpt), ("pydpo", plain), ("uf", plain), ("shp", shp)):
        paths[name] = write(name, make)
    paths["pydpo-test"], paths["uf-test"] = write("pydpo-test", plain, 6), write("uf-test", plain, 6)
    paths["shp-test"] = write("shp-test", shp, 9)
    texts = [Path(paths[name]).read_text() for name in ("imdb", "code", "shp")]
    paths["model"] = str(
        make_tiny(
            *(folder / "model", texts, Key(0)), layers=3, width=16, heads=2, vocabulary=280, steps=1, batch=2
        )
    )
    tokenizer = AutoTokenizer.from_pretrained(paths["model"])
    save_reward_model(folder / "reward", tokenizer, n_positions=128)
    return {**paths, "reward": str(folder / "reward")}


def local(place, name):
    """Overrides that put local files in place of the hub's, as the READMEs say."""
    if "imdb" in name:
        data = [f"data.train={place['imdb']}", f"data.test={place['imdb-test']}"]
    elif "code" in name:
        data = [f"data.train={place['code']}"]
    elif "fedsdg" in name:
        data = [f"data.train={place['shp']}", f"data.test={place['shp-test']}"]
        data += ["data.partition.clients=4", "cohort.fraction=0.5"]
    else:
        train = f'webgpt="{place["webgpt"]}", pydpo="{place["pydpo"]}", ultrafeedback="{place["uf"]}"'
        test = f'pydpo="{place["pydpo-test"]}", ultrafeedback="{place["uf-test"]}"'
        data = [f"data.train={{{train}}}", f"data.test={{{test}}}"]
    if name.endswith("ppo"):
        data.append(f"method.reward_model={place['reward']}")
    return [f"model.name={place['model']}", "engine.threads=1", "data.max_length=128", *data]


@pytest.mark.parametrize(
    ("name", "clients"),
    [
        ("fedpdpo/table1/imdb-3/fedpdpo", 3),
        ("fedpdpo/table1/imdb-3/fedamp-dpo", 3),
        ("fedpdpo/table1/code-3/fedper-dpo", 3),
        ("fedpdpo/table1/cross/fedrep-ppo", 3),
        ("fedpdpo/table2/cross/fedpdpo", 3),
        ("fedsdg/grid/alpha0.3/k100-e2", 4),
        ("fedsdg/others/pfedme", 4),
    ],
)
def test_a_cell_runs_end_to_end(place, tmp_path, name, clients):
    """One round, all else as in the cell: whoever holds test pairs is judged, and the loss is finite."""
    result = run(CELLS[name].experiment(*local(place, name), "rounds=1"), tmp_path / "run")
    assert len(result.summary["clients"]) == clients
    assert math.isfinite(result.rounds[0]["loss"])
    tested = {client for client, sizes in result.summary["clients"].items() if sizes["test"]}
    assert set(result.summary["preference_accuracy"]["per_client"]) == tested
    assert tested


def sizes_of(place, name, folder):
    """Client → how many pairs it trains and is tested on."""
    clients = build_data(CELLS[name].experiment(*local(place, name)), folder).clients
    return {client: (len(pairs.train), len(pairs.test)) for client, pairs in clients.items()}


def test_who_holds_what(place, tmp_path):
    """Code-V.'s groups have python and ruby, java and c#, c++ and go: 12 of 36 pairs each, of which
    round(1.2) = 1 is for the test. WebGPT's tie is not a pair; of its 23 a tenth, 2, are for the test. The
    others bring theirs."""
    sizes = sizes_of(place, "fedpdpo/table1/code-3/fedavg-dpo", tmp_path / "code")
    assert sizes == {"web": (11, 1), "enterprise": (11, 1), "systems": (11, 1)}
    sizes = sizes_of(place, "fedpdpo/table2/cross/fedavg-dpo", tmp_path / "cross")
    assert sizes["webgpt"] == (21, 2)
    assert (sizes["pydpo"][1], sizes["ultrafeedback"][1]) == (6, 6)


def test_a_paper_table_of_two_seeds(place, tmp_path, monkeypatch):
    """The paper's figures are its cell's. Mean and deviation are of the runs' own records. A repeated command
    runs nothing and prints the same."""
    name = "fedpdpo/table1/imdb-3/fedavg-dpo"
    table = tmp_path / "two.toml"
    head = f'title = "Two seeds"\nextends = "{EXPERIMENTS / "fedpdpo/table1.toml"}"\nseeds = [1, 2]\n'
    table.write_text(
        head + 'columns = { imdb-3 = "IMDB (3)" }\n[rows.fedavg-dpo]\nsets = ["fedavg", "dpo"]\n'
        'paper.imdb-3 = "82.73±0.22"\nclients.imdb-3 = { client-1 = "83.19±0.22" }\n'
    )
    sets = [word for each in [*local(place, name), "rounds=2"] for word in ("--set", each)]
    words = ["sweep", str(table), "--out", str(tmp_path / "runs"), *sets]
    monkeypatch.setattr(sweep_child.CommandProcesses, "call", sweep_command)
    first = prefed_(*words)
    lines = (tmp_path / "runs/two.md").read_text().splitlines()
    heads, row = ([cell.strip() for cell in lines[k].split("|")[1:-1]] for k in (0, 2))
    # What is chosen on test says so: the best round, its worst client and its clients.
    assert [k for k, head in enumerate(heads) if "selected on test" in head] == [2, 4, 5]
    assert row[:2] == ["IMDB (3), `fedavg-dpo`", "82.73±0.22"]
    assert "(83.19±0.22), client-2 " in row[5]
    best, last = [], []
    for seed in (1, 2):
        runs = tmp_path / f"runs/two/imdb-3/fedavg-dpo-seed{seed}"
        assert (runs / "commit").exists()
        means = [json.loads(line)["preference_accuracy"] for line in (runs / "rounds.jsonl").open()]
        best.append(max(means))
        last.append(means[-1])
    for cell, values in zip(row[2:4], (best, last), strict=True):
        assert cell == f"{100 * sum(values) / 2:.2f}±{100 * statistics.stdev(values):.2f}"
    started = (tmp_path / "runs/two/imdb-3/fedavg-dpo-seed1/summary.json").stat().st_mtime_ns
    again = CliRunner().invoke(app, words)
    assert again.output.startswith("1 cell, 2 runs, 2 already finished\n")
    kept = [line for line in first.splitlines()[1:] if not line.startswith("running ")]
    assert again.output.splitlines()[1:] == kept
    assert (tmp_path / "runs/two/imdb-3/fedavg-dpo-seed1/summary.json").stat().st_mtime_ns == started
    names = {path.name for path in (tmp_path / "runs/two/imdb-3").iterdir()}
    assert names - {"reference"} == {"fedavg-dpo-seed1", "fedavg-dpo-seed2"}
    # One cell by itself is the same run.
    one = ("--cell", "imdb-3/fedavg-dpo", "--out", tmp_path / "one", "--set", "seed=2")
    prefed_("run", table, *one, *sets)
    means = [json.loads(line)["preference_accuracy"] for line in (tmp_path / "one/rounds.jsonl").open()]
    assert (max(means), means[-1]) == (best[1], last[1])


# What the scripts prepare


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Two personas of 12 statements each side, one of them repeated, as anthropics/evals writes them."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "evals").mkdir()
    for persona, start in (("risk-averse", 0.9), ("risk-seeking", 0.8)):
        lines = [
            {
                "question": f'Is the following statement something you would say?\n"{persona} {side} {k}"',
                "statement": f"{persona} {side} {k}",
                "label_confidence": start + k / 1000,
                "answer_matching_behavior": f" {side}",
                "answer_not_matching_behavior": " No" if side == "Yes" else " Yes",
            }
            for k in range(11)
            for side in ("Yes", "No")
        ]
        jsonl(folder / f"evals/{persona}.jsonl", [*lines, lines[0]])
    chosen = ("--persona", "risk-averse", "--persona", "risk-seeking")
    script("personas/prepare.py", folder / "evals", *chosen, "--out", folder)
    return folder


def test_personas_are_joined_to_pairs(prepared):
    """11 pairs a persona, round(2.2) = 2 of them for the test; margin = c + c' − 1; nothing is said twice."""
    train, test = rows(prepared / "personas.train.jsonl.gz"), rows(prepared / "personas.test.jsonl.gz")
    assert Counter(row["persona"] for row in train) == {"risk-averse": 9, "risk-seeking": 9}
    assert Counter(row["persona"] for row in test) == {"risk-averse": 2, "risk-seeking": 2}
    for row in train + test:
        (yes, k), (no, j) = (row[which].rsplit(" ", 1) for which in ("chosen", "rejected"))
        assert (yes, no) == (f" {row['persona']} Yes", f" {row['persona']} No")
        start = {"risk-averse": 0.9, "risk-seeking": 0.8}[row["persona"]]
        assert row["margin"] == pytest.approx(2 * start + (int(k) + int(j)) / 1000 - 1, abs=1e-9)
        assert row["prompt"].startswith("\n\nHuman: ")
        assert row["prompt"].endswith("\n\nAssistant:")
    responses = [row[which] for row in train + test for which in ("chosen", "rejected")]
    assert len(set(responses)) == len(responses) == 44


def test_personas_are_drawn_alike_each_time(prepared, tmp_path):
    script("personas/prepare.py", prepared / "evals", "--persona", "risk-averse", "--out", tmp_path)
    before = [row for row in rows(prepared / "personas.test.jsonl.gz") if row["persona"] == "risk-averse"]
    assert rows(tmp_path / "personas.test.jsonl.gz") == before
    message = script("personas/prepare.py", prepared / "evals", "--persona", "nobody", fails=True)
    assert f"{prepared / 'evals' / 'nobody.jsonl'}: no such file" in message
    jsonl(tmp_path / "odd.jsonl", [{"statement": "x", "answer_matching_behavior": " Maybe"}])
    message = script("personas/prepare.py", tmp_path, "--persona", "odd", "--out", tmp_path, fails=True)
    assert f"{tmp_path / 'odd.jsonl'}, row 1: no statement" in message


def test_opposed_clients_hold_the_same_pairs_swapped(prepared, place, tmp_path):
    """5 training and 4 validation pairs of 9, none in common, and both test pairs, for a persona and its
    reverse; the file runs on them."""
    pair = prepared / "personas.train.jsonl.gz", prepared / "personas.test.jsonl.gz"
    script("personas/opposed.py", *pair, "--out", tmp_path, "--pairs", 5, "--validation", 4)
    roles = {role: rows(tmp_path / f"opposed.{role}.jsonl.gz") for role in ("train", "validation", "test")}
    for role, count in (("train", 5), ("validation", 4), ("test", 2)):
        for persona in ("risk-averse", "risk-seeking"):
            own = [(r["prompt"], r["chosen"], r["rejected"]) for r in roles[role] if r["client"] == persona]
            other = [
                (r["prompt"], r["rejected"], r["chosen"])
                for r in roles[role]
                if r["client"] == f"not-{persona}"
            ]
            assert own == other
            assert len(own) == count
            assert all(chosen.startswith(f" {persona} Yes") for _, chosen, _ in own)
    assert not {r["chosen"] for r in roles["train"]} & {r["chosen"] for r in roles["validation"]}
    files = [f"data.{role}={tmp_path / f'opposed.{role}.jsonl.gz'}" for role in roles]
    common = [f"model.name={place['model']}", "engine.threads=1", "data.max_length=128", "rounds=1"]
    result = run(Experiment.load(EXPERIMENTS / "personas/opposed.toml", [*common, *files]), tmp_path / "run")
    assert set(result.summary["clients"]) == {
        f"{start}{persona}" for start in ("", "not-") for persona in ("risk-averse", "risk-seeking")
    }
    # A shared model ranks a pair one way for both: each pair is right for exactly one of the two clients.
    accuracies = result.summary["preference_accuracy"]["per_client"]
    assert accuracies["risk-averse"] + accuracies["not-risk-averse"] == pytest.approx(1)
    message = script("personas/opposed.py", *pair, "--out", tmp_path, "--pairs", 10, fails=True)
    assert "risk-averse has 9 pairs, and 50 are asked for" in message


def test_opposed_clients_of_one_persona_as_chats(prepared, place, tmp_path):
    """With --chat the prompt is the user's message, and responses have no space around them; --persona
    leaves out the others. SmolLM2's table and experiment load with these files, and the experiment runs."""
    pair = prepared / "personas.train.jsonl.gz", prepared / "personas.test.jsonl.gz"
    few = ["--pairs", 5, "--validation", 4, "--out"]
    script("personas/opposed.py", *pair, *few, tmp_path / "plain", "--persona", "risk-averse")
    script("personas/opposed.py", *pair, *few, tmp_path / "chat", "--persona", "risk-averse", "--chat")
    for role in ("train", "validation", "test"):
        plain, chat = (rows(tmp_path / folder / f"opposed.{role}.jsonl.gz") for folder in ("plain", "chat"))
        assert {row["client"] for row in chat} == {"risk-averse", "not-risk-averse"}
        for one, other in zip(plain, chat, strict=True):
            (message,) = other["prompt"]
            assert one["prompt"] == f"\n\nHuman: {message['content']}\n\nAssistant:"
            assert message["role"] == "user"
            assert (one["chosen"], one["rejected"]) == (f" {other['chosen']}", f" {other['rejected']}")
    message = script("personas/opposed.py", *pair, "--out", tmp_path, "--persona", "risk", fails=True)
    assert "no persona is called 'risk' (personas: risk-averse, risk-seeking)" in message
    files = [
        f"data.{role}={tmp_path / 'chat' / f'opposed.{role}.jsonl.gz'}"
        for role in ("train", "validation", "test")
    ]
    table = load_table(EXPERIMENTS / "smollm2/conflict.toml")
    methods = "feddpo local fedper fedrep fedsdg ditto perfedavg fedamp fedamp-distance fedpdpo"
    rows_of = {*methods.split(), "no-reward-head", "no-bottleneck"}
    assert set(table.cells(EXPERIMENTS / "smollm2/conflict.toml")) == rows_of
    common = [f"model.name={place['model']}", "engine.threads=1", "rounds=1", "model.dtype=float32"]
    result = run(Experiment.load(EXPERIMENTS / "smollm2/opposed.toml", [*common, *files]), tmp_path / "run")
    assert set(result.summary["clients"]) == {"risk-averse", "not-risk-averse"}


def test_harmless_comparisons_are_split_at_the_last_shared_turn(tmp_path):
    """Of ten comparisons one has no turn in common, one repeats itself and one answers nothing; two are for
    the test, and what shares a prompt with them does not train."""
    start = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: {}\n\nAssistant:"
    lines = [
        {"chosen": start.format(k) + f" no {k}", "rejected": start.format(k) + f" yes {k}"}
        for k in (0, 0, 1, 2, 3, 4, 5)
    ]
    lines += [
        {"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: b"},
        {"chosen": start.format(6) + " same", "rejected": start.format(6) + " same"},
        {"chosen": start.format(7), "rejected": start.format(7) + " words"},
    ]
    source = jsonl(tmp_path / "test.jsonl", lines)
    script("hh_harmless/prepare.py", source, "--out", tmp_path, "--share", 1, "--test", 2)
    train, test = rows(tmp_path / "hh_harmless.train.jsonl.gz"), rows(tmp_path / "hh_harmless.test.jsonl.gz")
    assert len(test) == 2
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    for row in train + test:
        k = row["prompt"].removesuffix("\n\nAssistant:").rpartition("Human: ")[2]
        assert row == {"prompt": start.format(k), "chosen": f" no {k}", "rejected": f" yes {k}"}
    assert {row["prompt"] for row in train + test} == {start.format(k) for k in range(6)}
    script("hh_harmless/prepare.py", source, "--out", tmp_path, "--share", 0.5, "--test", 1)
    assert len(rows(tmp_path / "hh_harmless.train.jsonl.gz")) <= 4


def test_policies_with_faults_and_an_interval_over_seeds(tmp_path):
    """Win rates 0.6, 0.7 and 0.8: 0.7 ± 4.303 · 0.1 / √3 = 0.7 ± 0.248. One answer has each fault."""
    said = [
        "Ah, ah, ah, ah.",
        "Well done 👏🏼👏🏼👏🏼👏🏼👏🏼👏🏼",
        "Glad to help. What is it?",
        "Practise daily.",
    ]
    for seed, rate in ((1, 0.6), (2, 0.7), (3, 0.8)):
        judged = tmp_path / f"oracle-{seed}/judge/reward"
        judged.mkdir(parents=True)
        (tmp_path / f"oracle-{seed}/align").mkdir()
        epochs = [{"agreement": 0.5}, {"agreement": 0.625}]
        (judged.parents[1] / "align/summary.json").write_text(json.dumps({"train": {"epochs": epochs}}))
        shares = {"win_rate": {"mean": rate, "low": rate - 0.1, "high": rate + 0.1}}
        (judged / "summary.json").write_text(json.dumps(shares))
        jsonl(judged / "verdicts.jsonl", [{"text": text, "against": "Practise daily."} for text in said])
    printed = script("smollm2/policies.py", *(tmp_path / f"oracle-{seed}" for seed in (1, 2, 3)))
    assert "| oracle | 2 | 0.500, 0.625 | 70.0% [60.0, 80.0] | 4 | 1 (0) | 1 (0) | 1 (0) |" in printed
    assert "oracle: 70.0%, 95% interval over 3 seeds 45.2% to 94.8%" in printed


def test_answers_of_clients_who_want_opposite_things(tmp_path):
    """Six clients and six who choose what those reject. Of two answers by an own model, one has fewer words
    than the base model's and one as many: 75% for who wants them brief, 25% for the others."""
    script("smollm2/answers.py", "--out", tmp_path)
    both = rows(tmp_path / "answers.brief-opposed.train.jsonl")
    sides = [f"{side}-{number}" for side in ("brief", "not-brief") for number in range(6)]
    assert Counter(row["client"] for row in both) == dict.fromkeys(sides, 40)
    wanted = [row for row in both if row["client"] in sides[:6]]
    assert rows(tmp_path / "answers.brief.train.jsonl") == wanted
    for row in both:
        assert (len(row["chosen"].split()) < len(row["rejected"].split())) == (row in wanted)
    shape = {"layers": 1, "width": 16, "heads": 2, "context": 512, "steps": 1}
    model = make_tiny(tmp_path / "model", ["Go to bed."], Key(0), **shape)
    few = ["rounds=1", "method.local_steps=1", "report.max_new_tokens=1", 'report.prompts=["a","b"]']
    few += [f"data.{part}={tmp_path}/answers.brief-opposed.{part}.jsonl" for part in ("train", "test")]
    cell = load_table(table := EXPERIMENTS / "smollm2/answers.toml").cells(table)["brief-opposed/local-rpo"]
    run(cell.experiment(f"model.name={model}", "model.dtype=float32", *few), tmp_path / "run")
    answers = rows(path := tmp_path / "run/answers.jsonl")
    texts = ["One two three.", "One two three.", *["One two three.", "One."] * 2]  # the base model's first
    jsonl(path, [{**row, "text": text} for row, text in zip(answers, texts, strict=True)])
    printed = script("smollm2/answers_table.py", tmp_path / "run")
    for side, rate in (("brief", "75.0%"), ("not-brief", "25.0%")):
        assert f"| model | brief-opposed | {side} | local | rpo | 0.001 | 1 | 1 | {rate} [" in printed


def test_the_table_of_an_aligned_run_has_win_rates_by_the_utility(tmp_path):
    """A policy that does not differ from the base model wins half of its comparisons; of three labels, one is
    right, one wrong and one a tie. The model repeats a letter, so all answers are cut and loop."""
    script("smollm2/answers.py", "--out", tmp_path)
    shape = {"layers": 1, "width": 16, "heads": 2, "context": 512, "steps": 20}
    model = make_tiny(tmp_path / "model", ["Go to bed.", "Ask them what they like."], Key(0), **shape)
    jsonl(tmp_path / "align.jsonl", [{"prompt": [{"role": "user", "content": q}]} for q in ("Why?", "How?")])
    few = [f"data.{part}={tmp_path}/answers.brief.{part}.jsonl" for part in ("train", "test")]
    few += [f"model.name={model}", f"align.prompts={tmp_path}/align.jsonl", "rounds=1", "data.max_length=96"]
    few += ["align.max_new_tokens=8", "align.temperature=2", "align.epochs=1", "align.lr=1e-12"]
    cell = load_table(table := EXPERIMENTS / "smollm2/align.toml").cells(table)["brief-fedvpa"]
    run(cell.experiment(*few), path := tmp_path / "brief-fedvpa-seed1")
    labels = [{"chosen": "One.", "rejected": other} for other in ("One two.", "One three.", "Two.")]
    labels[1] = {"chosen": "One three.", "rejected": "One."}
    jsonl(path / "align/labels.jsonl", labels)
    asked = ["--prompts", 2, "--questions", tmp_path / "answers.prompts.jsonl"]
    row = next(
        line for line in script("smollm2/align_table.py", path, *asked).splitlines() if path.name in line
    )
    _, policy, best_of, right, *health = [cell.strip() for cell in row.strip("| ").split("|")]
    assert (policy, right, health[:2], health[4:6]) == ("50.0%", "50.0%", ["0%", "100%"], ["0%", "100%"])
    assert best_of in {"0.0%", "25.0%", "50.0%", "75.0%", "100.0%"}


def test_the_oracle_labels_by_utility(monkeypatch):
    """For brief answers, fewer words win, and as many are a tie."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS / "smollm2"))
    judge = runpy.run_path(str(EXPERIMENTS / "smollm2/align_oracle.py"))["Oracle"]("brief", JudgeOptions())
    asked = [
        Question("Q?", *texts) for texts in (("One.", "One two."), ("One two.", "One."), ("One.", "Two."))
    ]
    assert [verdict.preference for verdict in judge.compare(asked)] == [1, 0, 0.5]


@pytest.fixture(scope="module")
def arms():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        return runpy.run_path(str(EXPERIMENTS / "loop/arms.py"))


def test_arms_of_a_loop_have_equal_numbers_of_completions_and_judgements(arms):
    """Sixteen completions of each prompt, and where selectors learn from clients, 64 pairs of each client."""
    judged = {}
    for arm, table in arms["ARMS"].items():
        settings = AlignConfig.model_validate({**table, "prompts": "x.jsonl"})
        assert settings.generations * settings.completions == 16
        if refresh := settings.refresh:
            times = sum(settings.refreshed(k) == k for k in range(1, settings.generations + 1))
            judged[arm] = times * refresh.pairs, times * refresh.rounds
    assert judged == {"judged": (64, 16), "refreshed": (64, 16)}


def test_a_loop_is_measured_by_the_program(arms, tmp_path):
    """For brief answers, win, tie and loss. Of three pairs of completions, selectors order one correctly, one
    is a tie of theirs, and one has no longer completion and does not count."""

    def texts(*each):
        return [SimpleNamespace(text=text) for text in each]

    own, base = texts("One.", "One two.", "One two."), texts("One two.", "Two one.", "One.")
    assert arms["true_rate"]("brief", own, base) == 0.5
    words = ["One.", "One two.", "Two."]
    jsonl(
        tmp_path / "completions.jsonl",
        [{"index": 0, "sample": k, "completion": w} for k, w in enumerate(words)],
    )
    scores = [((0, 1), [2.0]), ((1, 2), [0.0]), ((0, 2), [1.0])]
    jsonl(tmp_path / "scores.jsonl", [{"index": 0, "samples": pair, "scores": own} for pair, own in scores])
    generation = SimpleNamespace(path=lambda alignment, name: tmp_path / name)
    alignment = SimpleNamespace(config=SimpleNamespace(labels="majority"))
    assert arms["accuracy"](alignment, generation, "brief") == 0.75
