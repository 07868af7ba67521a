"""FedBiscuit's experiments and the mixes of tastes: what the cells say, that they run, the scripts beside them."""

import itertools
import json
import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from experiment_scripts import EXPERIMENTS, rows, script
from prefed.cli import app
from prefed.config.table import load_table
from prefed.core import Key
from prefed.models.tiny import make_tiny
from preferences import jsonl

CELLS = {
    f"{path.parent.name}/{path.stem}/{name}": cell
    for folder in ("fedbiscuit", "selectors")
    for path in sorted((EXPERIMENTS / folder).glob("*.toml"))
    for name, cell in load_table(path).cells(path).items()
}
"""FOLDER/TABLE/CELL → the cell."""
PAPER = {name: cell for name, cell in CELLS.items() if name.startswith("fedbiscuit/")}

WINS = {
    "raw": (4408, 5032),
    "fedavg": (1878, 1850),
    "feddpo": (3213, 5047),
    "qwen2-0.5b-fedbis": (5681, 5874),
    "qwen2-0.5b-fedbiscuit-3": (5141, 5458),
    "qwen2-0.5b-fedbiscuit-5": (4847, 5376),
    "gemma-2b-fedbis": (5068, 5650),
    "gemma-2b-fedbiscuit-3": (5492, 5984),
    "gemma-2b-fedbiscuit-5": (5447, 5893),
    "llama-2-7b-fedbis": (5410, 6020),
    "llama-2-7b-fedbiscuit-3": (5367, 5951),
    "llama-2-7b-fedbiscuit-5": (5197, 5933),
}
"""Row of table 1 → wins of 6,553 with Gemma-2B and with LLaMA-2-7B, as the paper prints them."""


# What the cells say


def test_one_cell_for_each_of_the_papers():
    """Tables 1 and 2: two base models; three baselines, and three methods with three selectors (table 1) or three
    sets of prompts (table 2). Table 6: three methods with two selectors. Selectors' cells stand a second time,
    with 5 epochs."""
    counts = Counter(name.split("/")[1] for name in PAPER)
    assert counts == {
        "table1-baselines": 2 * 3,
        "table1": 2 * 9,
        "table1-epochs5": 2 * 9,
        "table2-baselines": 2 * 3,
        "table2": 2 * 9,
        "table2-epochs5": 2 * 9,
        "table6": 2 * 3,
        "table6-epochs5": 2 * 3,
    }
    assert all(cell.paper for cell in PAPER.values())
    for cell in CELLS.values():
        cell.experiment()


def test_the_papers_wins_are_its_percentages():
    """67.27% is 4408 of 6553, and so on: to 0.01, for the paper rounds some down. One is neither: 90.84%, where
    5951 wins are 90.81%. Table 6's first column is table 1's."""
    for name, cell in PAPER.items():
        table, column, row = name.split("/")[1:]
        if table.startswith("table1") and (column, row) != ("llama-2-7b", "llama-2-7b-fedbiscuit-3"):
            wins = WINS[row][column == "llama-2-7b"]
            assert float(cell.paper) == pytest.approx(100 * wins / 6553, abs=0.01)
        if table == "table6" and column == "qwen2-0.5b":
            assert cell.paper == PAPER[f"fedbiscuit/table1/gemma-2b/qwen2-0.5b-{row}"].paper


def test_fedbiscuit_is_set_as_the_paper_says():
    """Tables 3 and 4, B.1 and B.2, whether it stands in the file or is a default."""
    for name, cell in PAPER.items():
        table, column, row = name.split("/")[1:]
        experiment, answers = cell.experiment(), table.startswith("table2")
        method, model, align = experiment.method.settings, experiment.model, experiment.align
        if row == "raw":
            continue
        assert (experiment.rounds, experiment.cohort.size) == (500, 10 if answers else 5)
        assert (method.lr, method.betas, method.optimizer) == (1e-5, (0.9, 0.95), "adamw")
        assert (method.batch_size, method.local_steps) == (32, 30)
        assert (model.lora.rank, model.lora.alpha, model.lora.dropout) == (8, 16, 0.05)
        if answers:
            partition = experiment.data.partition
            assert (partition.by, partition.alpha, partition.clients) == ("dirichlet", 0.3, 200)
            assert not partition.share_prompts
            assert experiment.data.max_length == 512
        if table.endswith("baselines"):
            assert align is None
            assert experiment.method.name == {"fedavg": "fedsft", "feddpo": "feddpo"}[row]
            continue
        assert experiment.method.name == ("fedbis" if row.endswith("fedbis") else "fedbiscuit")
        if experiment.method.name == "fedbiscuit":
            assert method.selectors == int(row[-1])
            assert (method.warmup_rounds, method.regroup_every) == (50, 100 if answers else 50)
            assert (method.cluster_mean, method.balance) == ("eq6", "greedy")
        assert method.batches() == (16, 1)  # 32 presented orders
        assert experiment.selector.template == ("answer" if answers else "summary")
        assert experiment.selector.too_long == ("drop" if answers else "shorten")
        assert (align.optimizer, align.lr, align.batch_size) == ("rmsprop", 1e-6, 32)
        assert (align.objective, align.beta, align.labels) == ("dpo", 0.1, "majority")
        assert align.epochs == (5 if table.endswith("epochs5") else 3)
        assert (align.max_new_tokens, align.temperature) == (300 if answers else 80, 0.7)
        assert align.completions == (4 if "reddit-4" in row else 2)
        assert align.model.lora == model.lora
        names = {
            "gemma-2b": "google/gemma-2b",
            "llama-2-7b": "meta-llama/Llama-2-7b-hf",
            "qwen2-0.5b": "Qwen/Qwen2-0.5B",
            "qwen2-1.5b": "Qwen/Qwen2-1.5B",
        }
        aligned, judge = (
            ("gemma-2b", column) if table.startswith("table6") else (column, row.rpartition("-fedbis")[0])
        )
        assert align.model.name == names[aligned]
        assert model.name == names["gemma-2b" if answers else judge]


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
        return {"id": f"t3_{k}", "subreddit": "cats", "title": f"Cat {k}", "post": f"Post {k}. " + words(300)}

    posts = [reddit_post(k) for k in range(40)]
    for split, chosen in (("train", posts[:30]), ("valid", posts[30:32]), ("test", posts[32:])):
        (folder / "posts").mkdir(exist_ok=True)
        jsonl(
            folder / f"posts/{split}.jsonl",
            [{**row, "summary": f" Summary of {row['id']} "} for row in chosen],
        )
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
    write(
        "alpaca", lambda k: {"instruction": f"Do {k}", "input": "it" if k % 2 else "", "output": words()}, 8
    )
    shp = lambda k: {  # noqa: E731
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
    make_tiny(folder / "model", texts, Key(0), layers=2, width=16, heads=2, vocabulary=300, steps=1, batch=2)
    return folder


def test_what_prepare_makes_of_reddit_posts(place):
    """30 posts, of which 10 are in comparisons of 6 each: 20 are left, 12 (60%) to fine-tune on, 8 to align on."""
    tuned, prompts, tested = (rows(place / f"tldr.{name}.jsonl.gz") for name in ("sft", "prompts", "test"))
    assert (len(tuned), len(prompts), len(tested)) == (12, 8, 8)
    compared = {json.loads(line)["info"]["post"] for line in (place / "comparisons/train.jsonl").open()}
    assert not {row["post"] for row in prompts} & compared
    assert not {row["prompt"] for row in prompts} & {row["prompt"] for row in tuned}
    first = tested[0]
    assert first["prompt"] == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nSummarize the following Reddit "
        f"post in a paragraph of 50 words or less.\n\n### Input:\nSUBREDDIT: r/cats\nTITLE: {first['title']}\n"
        f"POST: {first['post']}\n\n### Response:"
    )
    assert (first["summary"], first["subreddit"]) == ("Summary of t3_32", "cats")
    # The response to another prompt is what fine-tuning does not read.
    assert all(row["chosen"].startswith(" Summary of t3_") for row in tuned)
    assert all(
        row["rejected"] == before["chosen"] for row, before in zip(tuned, [tuned[-1], *tuned], strict=False)
    )


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


def test_prepare_names_what_is_wrong(place, tmp_path):
    wrong = jsonl(tmp_path / "rows.jsonl", [{"instruction": "Do it"}])
    message = script("fedbiscuit/prepare.py", "alpaca", wrong, "--out", tmp_path, fails=True)
    assert f"{wrong}, row 1: no output; is this a row of tatsu-lab/alpaca?" in message
    message = script(
        "fedbiscuit/prepare.py", "reddit", place / "posts/valid.jsonl", "--out", tmp_path, fails=True
    )
    assert "row 1: no history" in message
    message = script("fedbiscuit/prepare.py", "tldr", place / "comparisons", place / "shp", fails=True)
    assert "no info" in message
    message = script("fedbiscuit/prepare.py", "saferlhf", place / "model", fails=True)
    assert "has no file whose name begins with 'train'" in message


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        (
            "fedbiscuit/table1/gemma-2b/qwen2-0.5b-fedbiscuit-3",
            ["method.warmup_rounds=1", "method.regroup_every=1"],
        ),
        ("fedbiscuit/table2/llama-2-7b/reddit-4-fedbis", []),
    ],
)
def test_a_cell_runs_from_preferences_to_an_aligned_model(place, tmp_path, name, sets):
    """A cell with copies of its sets, fewer rounds and fewer steps: all else is as in the file."""
    _, table, cell = name.split("/", 2)
    out = tmp_path / "run"
    if table == "table1":
        source = {"path": str(place / "comparisons"), "format": "summarize-from-feedback-instruction"}
        sets = [
            *sets,
            f"data.train={{path={json.dumps(source['path'])}, format={json.dumps(source['format'])}}}",
        ]
        sets += [f"align.prompts={place}/tldr.prompts.jsonl.gz", "cohort.size=3"]
    else:
        sets = [*sets, f"data.train={place}/shp/train.jsonl", f"data.validation={place}/shp/validation.jsonl"]
        sets += [
            f"align.prompts={place}/reddit.prompts.jsonl.gz",
            "data.partition.clients=4",
            "cohort.size=2",
        ]
    sets += [f"model.name={place}/model", f"align.model.name={place}/model", "model.dtype=float32"]
    sets += [f"align.sft={place}/alpaca.sft.jsonl.gz", "align.model.dtype=float32", "engine.threads=1"]
    sets += [
        "rounds=4",
        "method.local_steps=1",
        "data.max_length=768",
        "align.max_new_tokens=4",
        "align.epochs=1",
    ]
    words = [word for each in sets for word in ("--set", each)]
    path = EXPERIMENTS / f"fedbiscuit/{table}.toml"
    result = CliRunner().invoke(app, ["run", str(path), "--cell", cell, "--out", str(out), *words])
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "summary.json").read_text())
    assert math.isfinite(summary["preference_accuracy"]["mean"])
    assert (out / "align/adapter/adapter_config.json").exists()
    completions = [json.loads(line) for line in (out / "align/completions.jsonl").open()]
    assert completions


def test_the_raw_model_is_fine_tuned_in_one_place(place, tmp_path):
    sets = [f"data.train={place}/alpaca.sft.jsonl.gz", f"model.name={place}/model", "model.dtype=float32"]
    words = [word for each in [*sets, "engine.threads=1", "rounds=1"] for word in ("--set", each)]
    path, out = EXPERIMENTS / "fedbiscuit/table1-baselines.toml", tmp_path / "run"
    words += ["--set", "data.test_fraction=0.2"]
    result = CliRunner().invoke(app, ["run", str(path), "--cell", "gemma-2b/raw", "--out", str(out), *words])
    assert result.exit_code == 0, result.output
    assert list(json.loads((out / "summary.json").read_text())["clients"]) == ["client-0"]
    assert (out / "adapters/shared/adapter_config.json").exists()


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


def test_mixes_refuses_what_cannot_be_dealt(mixed):
    files = (mixed / "train.jsonl", mixed / "test.jsonl", "--out", mixed)
    message = script("selectors/mixes.py", *files, "--clients", 3, fails=True)
    assert "--clients 3: give an even number, divisible by the 2 personas" in message
    message = script("selectors/mixes.py", *files, "--clients", 4, "--pairs", 30, fails=True)
    assert "4 times 55 pairs are asked for, and there are 40" in message


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=2, max_size=9))
def test_adjusted_rand_index_counts_pairs_of_clients(members):
    """By its definition: of all pairs of clients, those together in both groupings, corrected for chance. With a pairs
    together in both, b and c in one alone, d in neither: 2 (ad − bc) / ((a+b)(b+d) + (a+c)(c+d))."""
    index = script_function("adjusted_rand_index")
    clusters = [[str(k) for k, (u, _) in enumerate(members) if u == cluster] for cluster in range(4)]
    tastes = {str(k): str(taste) for k, (_, taste) in enumerate(members)}
    counts = Counter((u == v, s == t) for (u, s), (v, t) in itertools.combinations(members, 2))
    a, b, c, d = (counts[key] for key in ((True, True), (True, False), (False, True), (False, False)))
    value = index(clusters, tastes)
    if len(set(tastes.values())) == 1:
        assert math.isnan(value)
    else:
        below = (a + b) * (b + d) + (a + c) * (c + d)
        assert value == pytest.approx(2 * (a * d - b * c) / below if below else 1.0)


def script_function(name):
    """A function of rand_index.py."""
    import runpy

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXPERIMENTS / "selectors"))
        return runpy.run_path(str(EXPERIMENTS / "selectors/rand_index.py"))[name]


def test_a_mix_runs_and_its_clusters_are_compared_with_tastes(mixed, place, tmp_path):
    """Opposed clients in one vote are 0.5 on average exactly: each test pair is right for one client of two."""
    out = tmp_path / "run"
    sets = [f"data.{role}={mixed}/opposed.{role}.jsonl.gz" for role in ("train", "validation", "test")]
    sets += [f"model.name={place}/model", "engine.threads=1", "rounds=4", "method.warmup_rounds=1"]
    sets += ["method.regroup_every=1", "method.local_steps=1"]
    words = [word for each in sets for word in ("--set", each)]
    path = EXPERIMENTS / "selectors/mixes.toml"
    result = CliRunner().invoke(
        app, ["run", str(path), "--cell", "opposed/fedbiscuit-eq6", "--out", str(out), *words]
    )
    assert result.exit_code == 0, result.output
    assert json.loads((out / "summary.json").read_text())["majority_accuracy"]["mean"] == 0.5
    clusters = json.loads((out / "rounds.jsonl").read_text().splitlines()[3])["clusters"]
    tastes = {row["client"]: row["taste"] for row in rows(mixed / "opposed.train.jsonl.gz")}
    index = script_function("adjusted_rand_index")(clusters, tastes)
    printed = script("selectors/rand_index.py", out)
    assert printed.startswith(f"{out}: own cluster ")
    assert printed.endswith(f"vote 0.500, round 4 {index:.2f}\n")
