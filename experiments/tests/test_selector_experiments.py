"""FedBiscuit's experiments and the mixes of tastes: that they run, and their scripts."""

import itertools
import json
import math
import random
import runpy
from collections import Counter
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import prefed_
from experiment_scripts import EXPERIMENTS, rows, script
from prefed.core import Key
from prefed.models.tiny import make_tiny
from preferences import jsonl

# That they run, with a tiny model and small copies of the sets


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny model, small copies of every set, and what prepare.py makes of them."""
    folder = tmp_path_factory.mktemp("fedbiscuit")
    draw = random.Random(0)

    def words(count=4):
        return " ".join(draw.choice(("a", "cat", "sat", "on", "the", "mat", "today")) for _ in range(count))

    def write(name, make, count):
        (folder / name).parent.mkdir(exist_ok=True)
        return jsonl(folder / f"{name}.jsonl", [make(k) for k in range(count)])

    def reddit_post(k):
        # Longer than the texts that other columns may have.
        return {"id": f"t3_{k}", "subreddit": "cats", "title": f"Cat {k}", "post": f"Post {k}. {words(260)}"}

    posts = [reddit_post(k) for k in range(40)]
    for split, first, last in (("train", 0, 30), ("valid", 30, 32), ("test", 32, 40)):
        summed = [{**row, "summary": f" Summary of {row['id']} "} for row in posts[first:last]]
        write(f"posts/{split}", summed.__getitem__, last - first)
    write(
        "comparisons/train",
        lambda k: {
            "info": {**posts[k // 6], "site": None, "article": None},
            "summaries": [{"text": f" one {words()} {k}"}, {"text": f" two {words()} {k}"}],
            "choice": k % 2,
            "worker": f"w{k % 5}",
            "split": "train",
            "extra": {"confidence": 5},
        },
        60,
    )
    write("alpaca", lambda k: {"instruction": f"Do {k}", "input": "it" * (k % 2), "output": words()}, 8)

    def shp(k):
        return {
            "history": f"How {k}?",
            "human_ref_A": f"{words()} {k}",
            "human_ref_B": f"{words()} no",
            "labels": k % 2,
            "score_ratio": 2.0,
            "domain": f"ask{k % 3}_train",
        }

    write("shp/train", shp, 40)
    write("shp/validation", lambda k: shp(100 + k), 16)
    write("shp/test", lambda k: shp(200 + k // 2), 8)
    write("safe", lambda k: {"prompt": f"Is {k // 2} safe?", "response_0": "yes", "response_1": "no"}, 6)
    write("eval", lambda k: {"instruction": f"Say {k}", "output": f"{k} it is", "dataset": "x"}, 3)
    copies = {
        "tldr": (folder / "posts", folder / "comparisons"),
        "alpaca": (folder / "alpaca.jsonl",),
        "reddit": (folder / "shp",),
        "saferlhf": (folder / "safe.jsonl",),
        "alpacaeval": (folder / "eval.jsonl",),
    }
    for what, sources in copies.items():
        script("fedbiscuit/prepare.py", what, *sources, "--out", folder)
    texts = [(folder / f"{name}.jsonl").read_text() for name in ("alpaca", "comparisons/train", "shp/train")]
    size = {"layers": 2, "width": 16, "heads": 2, "vocabulary": 300, "context": 768}
    make_tiny(folder / "model", texts, Key(0), **size, steps=1, batch=2)
    return folder


def test_what_prepare_makes_of_reddit_posts(place):
    """30 posts, of which 10 are in comparisons of 6 each: 20 are left, 12 (60%) to fine-tune on, 8 to align
    on."""
    tuned, prompts, tested = (rows(place / f"tldr.{name}.jsonl.gz") for name in ("sft", "prompts", "test"))
    assert (len(tuned), len(prompts), len(tested)) == (12, 8, 8)
    compared = {json.loads(line)["info"]["post"] for line in (place / "comparisons/train.jsonl").open()}
    assert not {row["post"] for row in prompts} & compared
    assert not {row["prompt"] for row in prompts} & {row["prompt"] for row in tuned}
    first = tested[0]
    assert first["prompt"] == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSummarize the following Reddit post in a paragraph of 50 words or less.\n\n"
        f"### Input:\nSUBREDDIT: r/cats\nTITLE: {first['title']}\nPOST: {first['post']}\n\n### Response:"
    )
    assert (first["summary"], first["subreddit"]) == ("Summary of t3_32", "cats")
    assert all(row["chosen"].startswith(" Summary of t3_") for row in tuned)
    # The response to another prompt is what fine-tuning does not read.
    assert [row["rejected"] for row in tuned[1:]] == [row["chosen"] for row in tuned[:-1]]


def test_what_prepare_makes_of_questions(place):
    """A prompt stands once, as a user's turn."""

    def contents(name):
        return [row["prompt"][0]["content"] for row in rows(place / f"{name}.jsonl.gz")]

    assert contents("reddit.prompts") == [f"How {200 + k}?" for k in range(4)]
    assert contents("saferlhf.prompts") == [f"Is {k} safe?" for k in range(3)]
    assert contents("alpaca.sft")[:2] == ["Do 0", "Do 1\n\n### Input:\nit"]
    assert rows(place / "alpacaeval.test.jsonl.gz")[2] == {
        "prompt": [{"role": "user", "content": "Say 2"}],
        "output": "2 it is",
    }


def run_cell(table, cell, out, *sets):
    """The summary of a cell that the command line ran with these settings."""
    path = EXPERIMENTS / f"{table}.toml"
    words = [word for each in ("engine.threads=1", *sets) for word in ("--set", each)]
    prefed_("run", path, "--cell", cell, "--out", out, *words)
    return json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize(
    ("table", "cell", "sets"),
    [
        (
            "fedbiscuit/table1",
            "gemma-2b/qwen2-0.5b-fedbiscuit-3",
            (
                "method.warmup_rounds=1",
                "method.regroup_every=1",
                "cohort.size=3",
                "data.train.path={place}/comparisons",
                "align.prompts={place}/tldr.prompts.jsonl.gz",
            ),
        ),
        (
            "fedbiscuit/table2",
            "llama-2-7b/reddit-4-fedbis",
            (
                "cohort.size=2",
                "data.train={place}/shp/train.jsonl",
                "data.validation={place}/shp/validation.jsonl",
                "data.partition.clients=4",
                "align.prompts={place}/reddit.prompts.jsonl.gz",
            ),
        ),
    ],
)
def test_a_cell_runs_from_preferences_to_an_aligned_model(place, tmp_path, table, cell, sets):
    """A cell with copies of its sets, 4 rounds and short completions; all else is as in the file."""
    copies = [each.format(place=place) for each in sets]
    copies += [f"model.name={place}/model", f"align.model.name={place}/model", "data.max_length=768"]
    copies += [f"align.sft={place}/alpaca.sft.jsonl.gz", "align.max_new_tokens=4", "align.epochs=1"]
    summary = run_cell(table, cell, tmp_path, *copies, "rounds=4", "method.local_steps=1")
    assert math.isfinite(summary["preference_accuracy"]["mean"])
    assert (tmp_path / "align/adapter/adapter_config.json").exists()
    prompts, completions = (
        len((tmp_path / f"align/{name}.jsonl").read_text().splitlines())
        for name in ("prompts", "completions")
    )
    assert prompts == (8 if table.endswith("table1") else 4)
    assert completions == prompts * (2 if table.endswith("table1") else 4)


def test_the_raw_model_is_fine_tuned_in_one_place(place, tmp_path):
    """Its adapter is what ``align.sft`` takes."""
    copies = (
        f"data.train={place}/alpaca.sft.jsonl.gz",
        f"model.name={place}/model",
        "data.test_fraction=0.2",
    )
    summary = run_cell("fedbiscuit/table1-baselines", "gemma-2b/raw", tmp_path, *copies, "rounds=1")
    assert len(summary["clients"]) == 1
    assert (tmp_path / "adapters/shared/adapter_config.json").exists()


# Mixes of tastes


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Four clients of each mix, of two personas with 20 pairs to train on and 8 to test on."""
    folder = tmp_path_factory.mktemp("mixes")
    for role, count in (("train", 20), ("test", 8)):
        pairs = [
            {
                "prompt": "\n\nHuman: What?\n\nAssistant:",
                "chosen": f" {persona} yes {role} {k}",
                "rejected": f" {persona} no {role} {k}",
                "persona": persona,
                "margin": 0.5,
            }
            for persona in ("bold", "shy")
            for k in range(count)
        ]
        jsonl(folder / f"{role}.jsonl", pairs)
    sizes = ("--clients", 4, "--pairs", 5, "--validation", 2, "--test-pairs", 3)
    script("selectors/mixes.py", folder / "train.jsonl", folder / "test.jsonl", "--out", folder, *sizes)
    return folder


def test_clients_of_each_mix(mixed):
    """Everyone has 5, 2 and 3 pairs. No pair has two owners, but for a client and its reverse."""
    tastes = {
        "like-minded": {"all": 4},
        "mixed": {"bold": 2, "shy": 2},
        "opposed": {"as it is": 2, "reversed": 2},
    }
    for mix, counts in tastes.items():
        of_client = {}
        for role, size in (("train", 5), ("validation", 2), ("test", 3)):
            found = rows(mixed / f"{mix}.{role}.jsonl.gz")
            assert Counter(row["client"] for row in found) == {f"client-{k:02}": size for k in range(4)}
            of_client |= {row["client"]: row["taste"] for row in found}
            texts = Counter(frozenset((row["chosen"], row["rejected"])) for row in found)
            assert set(texts.values()) == {2 if mix == "opposed" else 1}
            for row in found:
                better = " no " if row["taste"] == "reversed" else " yes "
                assert better in row["chosen"]
                assert row["taste"] in ("all", "as it is", "reversed", row["persona"])
        assert Counter(of_client.values()) == counts
    # Reversed pairs are those of one other client, all of them.
    found = rows(mixed / "opposed.train.jsonl.gz")
    owners = {}
    for row in found:
        owners.setdefault(frozenset((row["chosen"], row["rejected"])), []).append(row["client"])
    assert len({tuple(sorted(pair)) for pair in owners.values()}) == 2


@cache
def rand_index():
    """The names that rand_index.py defines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXPERIMENTS / "selectors"))
        return runpy.run_path(str(EXPERIMENTS / "selectors/rand_index.py"))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=2, max_size=9))
def test_adjusted_rand_index_counts_pairs_of_clients(members):
    """Let a pairs of clients be together in both groupings, b and c in one alone, d in neither: the index is
    2 (ad − bc) / ((a+b)(b+d) + (a+c)(c+d)) (Hubert and Arabie 1985)."""
    clusters = [[str(k) for k, (u, _) in enumerate(members) if u == cluster] for cluster in range(4)]
    tastes = {str(k): str(taste) for k, (_, taste) in enumerate(members)}
    counts = Counter((u == v, s == t) for (u, s), (v, t) in itertools.combinations(members, 2))
    a, b, c, d = (counts[key] for key in ((True, True), (True, False), (False, True), (False, False)))
    value = rand_index()["adjusted_rand_index"](clusters, tastes)
    if len(set(tastes.values())) == 1:
        assert math.isnan(value)
    else:
        below = (a + b) * (b + d) + (a + c) * (c + d)
        assert value == pytest.approx(2 * (a * d - b * c) / below if below else 1.0)


def test_a_mix_runs_and_its_clusters_are_compared_with_tastes(mixed, place, tmp_path):
    """Opposed clients get 0.5 on average from a vote, exactly: a test pair is right for one client of two."""
    copies = [f"data.{role}={mixed}/opposed.{role}.jsonl.gz" for role in ("train", "validation", "test")]
    short = ("rounds=4", "method.warmup_rounds=1", "method.regroup_every=1", "method.local_steps=1")
    cell = "opposed/fedbiscuit-eq6"
    summary = run_cell("selectors/mixes", cell, tmp_path, *copies, f"model.name={place}/model", *short)
    assert summary["majority_accuracy"]["mean"] == 0.5
    clusters = json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[3])["clusters"]
    tastes = {row["client"]: row["taste"] for row in rows(mixed / "opposed.train.jsonl.gz")}
    index = rand_index()["adjusted_rand_index"](clusters, tastes)
    printed = script("selectors/rand_index.py", tmp_path)
    assert printed.startswith(f"{tmp_path}: own cluster ")
    assert printed.endswith(f"vote 0.500, round 4 {index:.2f}\n")
