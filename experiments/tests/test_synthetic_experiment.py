"""The whole path on clients with known tastes: what prepare.py makes, the oracle's labels, the figures."""

import json
import runpy

import pytest

from commands import prefed_
from experiment_scripts import EXPERIMENTS, script
from prefed.config.experiment_table import load_table
from prefed.core import Key
from prefed.data import synthetic

TABLE = EXPERIMENTS / "synthetic/path.toml"
SMALL = (
    *("rounds=1", "method.local_steps=1", "method.batch_size=4", "model.lora.rank=2", "engine.threads=1"),
    *("align.limit=12", "align.completions=3", "align.epochs=2", "align.max_new_tokens=40"),
)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """What prepare.py makes, small."""
    folder = tmp_path_factory.mktemp("synthetic")
    size = ("--clients", 2, "--pairs", 10, "--test-pairs", 2, "--prompts", 400)
    model = ("--layers", 1, "--width", 64, "--steps", 100)
    script("synthetic/prepare.py", "--out", folder, *size, *model)
    return folder


@pytest.fixture(scope="module")
def runs(place):
    """The oracle's run, and one whose labels are a selector's."""
    for cell in ("oracle", "fedbis"):
        files = [f"data.{role}={place}/{role}.jsonl" for role in ("train", "test")]
        settings = (*files, f"model.name={place}/model", f"align.prompts={place}/prompts.jsonl", *SMALL)
        words = ["run", str(TABLE), "--cell", cell, "--out", str(place / f"{cell}-seed42")]
        prefed_(*words, *(w for text in settings for w in ("--set", text)))
    return place / "oracle-seed42", place / "fedbis-seed42"


def test_no_client_holds_a_prompt_of_the_server(place):
    """6 requests × 6 topics × 12 occasions are 432 prompts: 400 to align on, 32 to judge on."""
    own, judged = (
        [row["prompt"] for row in rows(place / f"{name}.jsonl")] for name in ("prompts", "test-prompts")
    )
    assert (len(own), len(judged), len({*own, *judged})) == (400, 32, 432)
    pairs = [row for name in ("train", "test") for row in rows(place / f"{name}.jsonl")]
    assert len(pairs) == 2 * (10 + 2)
    assert not {row["prompt"] for row in pairs} & {*own, *judged}


def test_rows_differ_in_labels_alone():
    cells = load_table(TABLE).cells(TABLE)
    stages = {name: cell.experiment().align for name, cell in cells.items()}
    assert {name: align.labels for name, align in stages.items()} == {
        "fedbis": "majority",
        "fedbiscuit": "majority",
        "fedbiscuit-one": 0,
        "oracle": "judge:utility",
    }
    assert len({align.model_copy(update={"labels": 0}).model_dump_json() for align in stages.values()}) == 1
    rates = EXPERIMENTS / "synthetic/rates.toml"
    assert all(cell.experiment().align is None for cell in load_table(rates).cells(rates).values())


def test_the_oracle_labels_by_the_clients_mean_utility(runs):
    """On the two clients' mean only warmth counts, 1.5 for each sign: other weights cancel. Equal utilities
    are no label. Both runs have the same completions, so the same pairs."""
    oracle, selector = runs
    assert (oracle / "align/completions.jsonl").read_bytes() == (
        selector / "align/completions.jsonl"
    ).read_bytes()
    taste = synthetic.Taste("mean", {"warmth": 1.5})
    labels = rows(oracle / "align/labels.jsonl")
    for row in labels:
        assert synthetic.utility(row["chosen"], taste) > synthetic.utility(row["rejected"], taste)
    figures = json.loads((oracle / "align/summary.json").read_text())["labels"]
    assert figures["labelled"] == figures["unanimous"] == len(labels) > 0
    assert figures["ties"] > 0
    named = ("pairs", "identical", "blank", "failed", "ties", "labelled")
    pairs, *others = (figures[name] for name in named)
    assert pairs == sum(others) == 12 * 3


def test_the_printed_figures_are_those_of_the_texts(runs, place):
    """Utilities, win rates and lengths from the verdicts' texts by another way; the oracle gets all of its
    own gain, in the column after the win rate."""
    prompts = ("--prompts", place / "test-prompts.jsonl", "--max-new-tokens", 40)
    printed = script("synthetic/utility.py", *runs, *prompts)
    sampled = printed.partition("greedy")[0]
    cells = {
        line.split(" | ")[0][2:]: line.split(" | ") for line in sampled.splitlines() if line.startswith("| ")
    }
    for path in runs:
        (judged,) = (path / "judge").glob("sampled-*")
        verdicts = rows(judged / "verdicts.jsonl")
        _, seeds, base, aligned, rate, share, spread, characters, warmth, *_ = cells[path.name[:-7]]
        assert seeds == "1"
        signs = {}
        for key in ("against", "text"):
            signs[key] = [synthetic.attributes(row[key]).get("warmth", 0) for row in verdicts]
        means = {key: sum(values) / len(values) for key, values in signs.items()}
        assert base == f"{1.5 * means['against']:.2f}"
        assert aligned == f"{1.5 * means['text']:.2f}"
        assert warmth == f"{means['text'] - means['against']:+.2f}"
        outcomes = [(a > b) + (a == b) / 2 for a, b in zip(signs["text"], signs["against"], strict=True)]
        assert rate == f"{sum(outcomes) / len(outcomes):.3f}", "one seed has no interval over seeds"
        lengths = [sum(len(row[key]) for row in verdicts) / len(verdicts) for key in ("against", "text")]
        assert characters == " → ".join(f"{length:.0f}" for length in lengths)
        least, most = map(float, spread.split(", "))
        gain = 1.5 * (means["text"] - means["against"])
        assert (least + most) / 2 == pytest.approx(gain, abs=0.011)
        if path == runs[0]:
            assert share == ("1.00" if gain else "–")


def test_checkpoints_and_rates(runs, place):
    """A line for each epoch, with its agreement as the alignment wrote it; the best rate stays."""
    selector = runs[1]
    printed = script("synthetic/align_rates.py", selector, "--lr", 1e-1, 1e-9)
    rates = [line.rpartition(" ")[2] for line in printed.splitlines()]
    assert rates[2] in ("0.1", "1e-09")
    best = max(float(rate) for rate in rates[:2])
    training = json.loads((selector / "align/summary.json").read_text())["train"]
    agreement = training["epochs"][training["kept"] - 1]["agreement"]
    assert f"{agreement:.3f}" == f"{best:.3f}"
    settings = json.loads((selector / "align/settings.json").read_text())
    assert settings["lr"] == float(rates[2])
    prompts = ("--prompts", place / "test-prompts.jsonl", "--max-new-tokens", 40, "--epochs")
    lines = script("synthetic/utility.py", selector, *prompts).splitlines()[2:]
    agreements = [line.split(" | ")[2] for line in lines]
    assert agreements == [f"{epoch['agreement']:.3f}" for epoch in training["epochs"]]
    again = script("synthetic/utility.py", selector, *prompts[:-1])
    assert "sampled" in again, "an alignment that was done again is judged again"


def test_intervals_are_over_seeds():
    """Two seeds with win rates of 0.7 and 0.6 over 100 prompts each, and gains of 0.2 and 0.4. In one pool
    0.65 would be at 0.58 to 0.72. One degree of freedom has its 97.5% point at tan(0.475 π) = 12.706: 0.65 ±
    12.706 · 0.05 is 0.015 to 1.285, which ends at 1, and 0.3 ± 12.706 · 0.1 is −0.971 to 1.571."""
    module = runpy.run_path(str(EXPERIMENTS / "synthetic/utility.py"))
    seed = {"base": 0.0, "aligned": 0.0, "least": 0.0, "most": 0.0, "length": (1.0, 1.0), "whole": 1.0}
    seed["signs"] = dict.fromkeys(synthetic.ATTRIBUTES, 0.0)
    figures = {("row", str(won)): {**seed, "outcomes": [1.0] * won + [0.0] * (100 - won)} for won in (70, 60)}
    assert "| 0.650 [0.015, 1.000] |" in [*module["table"](figures, "oracle")][2]
    cell = runpy.run_path(str(EXPERIMENTS / "synthetic/cross.py"))["cell"]
    gains = [[0.2 - each, 0.2 + each] * 50 for each in (0.1, 0.1)]
    gains[1] = [value + 0.2 for value in gains[1]]
    assert cell(gains) == "+0.30 [-0.97, 1.57], wins 1.00"


def test_shares_are_of_the_same_seed():
    """Of gains 2 and 4 a row with 1 and 1 gets a half and a quarter; a seed without an oracle gives none."""
    shares = runpy.run_path(str(EXPERIMENTS / "synthetic/utility.py"))["shares"]

    def gain(size):
        return {"base": 0.5, "aligned": 0.5 + size}

    figures = {("oracle", "1"): gain(2), ("oracle", "2"): gain(4)}
    figures |= {("row", seed): gain(1) for seed in ("1", "2", "3")}
    assert shares(figures, "row", "oracle") == [0.5, 0.25]


@pytest.mark.parametrize("cell", ["fedvpa", "fedvpa-prototypes"])
def test_the_cross_table_is_that_of_the_texts(place, cell):
    """One round and a few completions: the figures are recomputed from the verdicts' texts. The second
    utility is minus the first, so its column is too. A policy trained at prototypes is asked for them."""
    table, out = EXPERIMENTS / "synthetic/opposed.toml", place / f"{cell}-seed42"
    files = [f"data.{role}={place}/opposed/{role}.jsonl" for role in ("train", "test")]
    settings = (*files, f"model.name={place}/model", f"align.prompts={place}/prompts.jsonl", *SMALL)
    words = ["run", str(table), "--cell", cell, "--out", str(out), "--set", "align.generations=1"]
    prefed_(*words, *(w for text in settings for w in ("--set", text)))
    prompts = ("--prompts", place / "test-prompts.jsonl", "--max-new-tokens", 40)
    printed = script("synthetic/cross.py", out, *prompts).splitlines()
    taste = next(iter(synthetic.opposed_tastes(Key(0).at("synthetic").at("opposed"), 2).values()))
    assert printed[0].startswith(f"A: {taste.describe()}. B: ")
    cells = {line.split(" | ")[1]: line.split(" | ")[2:] for line in printed if line.startswith("| fedvpa")}
    assert list(cells) == ["A", "B", "population"]
    names = {"A": "ada", "B": "ben", "population": "population"}
    if cell == "fedvpa-prototypes":
        labels = json.loads((out / "align/tastes.json").read_text())["labels"]
        names |= {"A": f"prototype-{labels['ada']}", "B": f"prototype-{labels['ben']}"}
    for asked, name in names.items():
        verdicts = rows(out / f"judge/cross-{name}/verdicts.jsonl")
        gains = [
            synthetic.utility(row["text"], taste) - synthetic.utility(row["against"], taste)
            for row in verdicts
        ]
        mean = sum(gains) / len(gains)
        shown = [cell.split(" ")[0].rstrip(",") for cell in cells[asked]]
        assert shown == [f"{mean:+.2f}", f"{0 - mean:+.2f}"]
