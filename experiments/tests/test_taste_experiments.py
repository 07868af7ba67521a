"""FedVPA-GP's experiments and the tables of tastes: what the cells say, their scripts, their verdicts."""

import gzip
import json
import runpy
from collections import Counter
from functools import cache

import pytest

from experiment_scripts import EXPERIMENTS, rows, script
from prefed.config.experiment_table import load_table
from preferences import jsonl

CELLS = {
    f"{path.parent.name}/{path.stem}/{name}": cell
    for files in ("fedvpa/*.toml", "tastes/*.toml", "smollm2/tastes*.toml", "smollm2/ceilings.toml")
    for path in sorted(EXPERIMENTS.glob(files))
    for name, cell in load_table(path).cells(path).items()
}
"""FOLDER/TABLE/CELL → the cell."""
HELPFULNESS = {
    "qwen": (48.12, 48.85, 62.24, 66.45, 43.05, 44.21, 54.18, 58.32, 41.48, 42.33, 53.05, 55.18),
    "gemma": (52.34, 51.65, 66.82, 73.21, 44.15, 46.21, 56.41, 64.48, 41.22, 43.44, 53.25, 60.15),
}
"""Model → FedDPO, FedBiscuit, FedVPL, FedVPA-GP with 10, with 50 and with 100 clients."""
METHODS = ("feddpo", "fedbiscuit", "fedvpl", "fedvpa")


# What the cells say


def test_every_cell_is_an_experiment():
    counts = Counter(name.split("/")[0] + "/" + name.split("/")[1] for name in CELLS)
    assert {name: counts[name] for name in counts if name.startswith("fedvpa")} == {
        "fedvpa/main": 2 * 3 * 4,
        "fedvpa/unseen": 2,
        "fedvpa/ratios": 2 * 4,
        "fedvpa/ablations": 9,
    }
    assert counts["tastes/tastes"] == 3 * 10
    assert (counts["tastes/ceilings"], counts["tastes/lora"]) == (4 * 2, 2)
    assert (counts["tastes/mixtures"], counts["tastes/mixtures-rates"]) == (2 * 4, 10)
    assert (counts["smollm2/tastes"], counts["smollm2/tastes-rates"]) == (3 * 4, 3)
    assert counts["smollm2/ceilings"] == 2
    for cell in CELLS.values():
        cell.experiment()


def test_the_main_table_is_the_sources():
    """2 models × 3 scales × 4 methods, by the settings of the summary, whether in the file or a default."""
    for model, figures in HELPFULNESS.items():
        names = [f"{model}-k{k}-{method}" for k in (10, 50, 100) for method in METHODS]
        assert [float(CELLS[f"fedvpa/main/{name}"].paper) for name in names] == list(figures)
        for name in names:
            experiment = CELLS[f"fedvpa/main/{name}"].experiment()
            method, clients = experiment.method.settings, int(name.split("-")[1][1:])
            assert (experiment.rounds, method.local_steps, method.betas) == (50, 30, (0.9, 0.95))
            assert method.lr == (1e-5 if model == "qwen" else 1e-4)
            assert experiment.data.partition.clients == clients
            assert experiment.data.partition.categories == ("helpful", "harmless")
            assert experiment.cohort.size == (5 if clients == 10 else 10)
            stage_two = experiment.align
            if name.endswith("feddpo"):
                assert stage_two is None
                continue
            assert (stage_two.completions, stage_two.max_new_tokens, stage_two.temperature) == (2, 512, 0.7)
            assert (stage_two.lr, stage_two.objective) == (method.lr, "dpo")
            taste = name.endswith(("fedvpl", "fedvpa"))
            assert (stage_two.tastes == "posteriors") is taste
            if taste:
                assert (method.beta, method.lora, method.batch_size) == (0.1, True, 32)
            if name.endswith("fedvpa"):
                assert (method.pull, method.prior_from, method.cap) == (1.0, "last_round", "hard")
                assert method.logit_dropout == (0.5 if model == "qwen" else 0.0)


def test_each_ablation_switches_off_what_it_says():
    def settings(name):
        return CELLS[f"fedvpa/ablations/{name}"].experiment().method.settings

    whole = settings("fedvpa")
    for name, changes in {
        "no-cap": {"cap": "off"},
        "no-dropout": {"logit_dropout": 0.0},
        "bound": {"prior": "bound"},
        "no-lora": {"lora": False},
        "prior": {"prototypes": False, "cap": "off", "logit_dropout": 0.0},
        "prototypes": {"prior": "standard", "cap": "off", "logit_dropout": 0.0},
    }.items():
        assert settings(name) == whole.model_copy(update=changes)


def test_newcomers_are_half_of_each_taste():
    evaluate = CELLS["fedvpa/unseen/fedvpa"].experiment().evaluate
    assert Counter(client.split("-")[0] for client in evaluate.unseen) == {"helpful": 5, "harmless": 5}
    assert evaluate.unseen_pairs == [2, 4, 8, 16]


# The clients of tastes.toml, and of the source's experiments

SEEN = ("politically-liberal", "risk-averse", "interest-in-sports", "interest-in-math", "agreeableness")
UNSEEN = ("subscribes-to-Buddhism", "extraversion")


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    """Ten clients of each mix with 5, 2 and 3 pairs, and a newcomer of each taste and kind."""
    folder = tmp_path_factory.mktemp("tastes")
    for role, count in (("train", 18), ("test", 8)):
        pairs = [
            {"prompt": "Q?", "chosen": f"{p} yes {role} {k}", "rejected": f"{p} no {role} {k}", "persona": p}
            for p in (*SEEN, *UNSEEN, "narcissism")
            for k in range(count)
        ]
        jsonl(folder / f"{role}.jsonl", pairs)
    sizes = ("--pairs", 5, "--validation", 2, "--test-pairs", 3, "--newcomers", 1)
    script("tastes/clients.py", folder / "train.jsonl", folder / "test.jsonl", "--out", folder, *sizes)
    return folder


def owners(path):
    """Client → its taste, and the two texts of each of its pairs."""
    tastes, texts = {}, {}
    for row in rows(path):
        tastes[row["client"]] = row["taste"]
        texts.setdefault(row["client"], []).append(frozenset((row["chosen"], row["rejected"])))
        assert (" no " in row["chosen"]) is (row["taste"] == "reversed")
        assert (row["persona"] in UNSEEN) is row["client"].startswith("far")
    return tastes, texts


@pytest.mark.parametrize(("mix", "counts"), [("like-minded", (10, 0)), ("half", (5, 5)), ("seventy", (7, 3))])
def test_clients_of_each_mix(clients, mix, counts):
    """A pair has one owner, or a client and its twin, which has it reversed."""
    for role, size in (("train", 5), ("validation", 2), ("test", 3)):
        tastes, texts = owners(clients / f"{mix}.{role}.jsonl.gz")
        trained = Counter(taste for client, taste in tastes.items() if client.startswith("client"))
        assert (trained["as it is"], trained["reversed"]) == counts
        assert {len(own) for own in texts.values()} == {size}
        held = Counter(pair for own in texts.values() for pair in own)
        twins = {client for client in texts if any(held[pair] == 2 for pair in texts[client])}
        assert set(held.values()) <= {1, 2}
        assert all(held[pair] == 2 for client in twins for pair in texts[client])
        assert sum(client.startswith("client") for client in twins) == 2 * counts[1]


def test_a_ceiling_has_the_clients_of_one_taste(clients):
    """With the ids and the pairs that they have in the mix; the ids that tables name are there."""
    for mix in ("half", "seventy"):
        tastes, texts = owners(clients / f"{mix}.train.jsonl.gz")
        for letter, taste in (("a", "as it is"), ("b", "reversed")):
            alone, own = owners(clients / f"{mix}-{letter}.train.jsonl.gz")
            assert set(alone.values()) == {taste}
            assert own == {client: texts[client] for client in tastes if tastes[client] == taste}
    tastes, _ = owners(clients / "half.train.jsonl.gz")
    assert {client: taste for client, taste in tastes.items() if not client.startswith("client")} == {
        "new-00": "as it is",
        "new-01": "reversed",
        "far-00": "as it is",
        "far-01": "reversed",
    }


def test_chat_changes_only_the_form_of_prompts(clients, tmp_path):
    sizes = ("--pairs", 5, "--validation", 2, "--test-pairs", 3, "--newcomers", 1)
    files = (clients / "train.jsonl", clients / "test.jsonl")
    script("tastes/clients.py", *files, "--chat", "--out", tmp_path, *sizes)
    expected = [
        {**row, "prompt": [{"role": "user", "content": "Q?"}]} for row in rows(clients / "half.test.jsonl.gz")
    ]
    assert rows(tmp_path / "half.test.jsonl.gz") == expected


def test_clients_py_refuses_other_personas(clients):
    only = jsonl(clients / "only.jsonl", [{"prompt": "", "chosen": "a", "rejected": "b", "persona": "x"}])
    message = script("tastes/clients.py", only, only, "--out", clients, fails=True)
    assert "no pairs of politically-liberal" in message


def test_helpful_and_harmless_comparisons(tmp_path):
    """No prompt is in two files; half of the test splits' prompts are to align on, half to judge on."""

    def comparison(name, k):
        head = f"\n\nHuman: {name} {k}?\n\nAssistant:"
        return {"chosen": f"{head} yes", "rejected": f"{head} no"}

    for category in ("helpful", "harmless"):
        folder = tmp_path / f"{category}-base"
        folder.mkdir()
        for split, count in (("train", 100), ("test", 6)):
            lines = [json.dumps(comparison(f"{category} {split}", k)) + "\n" for k in range(count)]
            (folder / f"{split}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    script("fedvpa/prepare.py", tmp_path, "--out", tmp_path)
    parts = {part: rows(tmp_path / f"hh.{part}.jsonl.gz") for part in ("train", "validation", "test")}
    assert {part: len(found) for part, found in parts.items()} == {"train": 180, "validation": 18, "test": 2}
    asked = [row["prompt"] for part in parts.values() for row in part]
    align = rows(tmp_path / "hh.prompts.jsonl.gz")
    assert Counter(row["category"] for row in align) == {"helpful": 3, "harmless": 3}
    asked += [row["prompt"] for row in align]
    for category in ("helpful", "harmless"):
        judged = rows(tmp_path / f"{category}.prompts.jsonl.gz")
        assert len(judged) == 3
        asked += [row["prompt"] for row in judged]
    assert len(set(asked)) == len(asked)


# The verdicts


@cache
def table():
    """The names that table.py defines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXPERIMENTS / "tastes"))
        return runpy.run_path(str(EXPERIMENTS / "tastes/table.py"))


def figures(**changes):
    """Figures that all thresholds hold for."""
    usual = {"own": 0.9, "own a": 0.9, "own b": 0.9, "same": 0.88, "opposite": 0.15, "another": 0.5}
    return {**usual, "new 8": 0.85, "far 8": 0.6, **changes}


CEILING = {letter: {"own": 0.94, "new 8": 0.9, "far 8": 0.65} for letter in "ab"}
EVEN = {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({}, None),
        ({"own b": 0.88}, "reversed"),  # 0.94 − 0.05 = 0.89
        ({"opposite": 0.2}, "own z less the opposite"),  # 0.7 < 0.8 (2 · 0.94 − 1) = 0.704
        ({"same": 0.86}, "the same taste's"),
        ({"new 8": 0.79}, "newcomers with"),  # 0.9 − 0.1 = 0.8
        ({"far 8": 0.54}, "newcomers of other personas"),
    ],
)
def test_thresholds(changes, failing):
    lines = table()["claims"](figures(**changes), CEILING, EVEN)
    assert len(lines) == 6
    assert [line for line in lines if "FAILS" in line] == [
        line for line in lines if failing and failing in line
    ]


def test_a_ceiling_weighs_as_its_clients_do():
    """Of 7 clients with 1.0 and 3 with 0.5 it is 0.85: 0.8 (2 · 0.85 − 1) = 0.56."""
    ceiling = {letter: {**CEILING[letter], "own": own} for letter, own in (("a", 1.0), ("b", 0.5))}
    lines = table()["claims"](figures(), ceiling, {"a": 0.7, "b": 0.3})
    assert any("at least 0.560" in line for line in lines)


def test_clients_at_the_other_tastes_prototype():
    """Prototypes have no names of their own: the better of both matches counts."""
    tastes = {"a": "warm", "b": "warm", "c": "warm", "d": "cold"}
    misplaced = table()["misplaced"]
    assert misplaced({"a": 1, "b": 1, "c": 1, "d": 0}, tastes) == 0
    assert misplaced({"a": 1, "b": 0, "c": 0, "d": 1}, tastes) == 1
    assert misplaced({"a": 0, "b": 1}, tastes) is None


def test_one_selector_on_reversed_pairs_is_half_exactly(tmp_path):
    check = table()["check_twins"]
    check(tmp_path / "half/fedbis-seed42", {"a": 0.875, "b": 0.125})
    check(tmp_path / "seventy/fedbis-seed42", {"a": 0.9, "b": 0.2})
    with pytest.raises(SystemExit, match=r"has 0\.51"):
        check(tmp_path / "half/fedbis-seed42", {"a": 0.875, "b": 0.15})


def test_the_table_has_mean_and_spread_of_each_mix():
    """Of 0.5 and 0.75 the mean is 0.625 and the standard deviation 0.25/√2."""
    runs = [{"own": 0.5, "another": 0.5}, {"own": 0.75, "another": 0.5}]
    text = table()["table"]({"half": {"fedvpl": runs, "fedbis": [{"own": 0.5}]}})
    first, second = text.splitlines()[4:6]
    assert first.startswith("| `fedbis` | 0.500 |")
    assert second.startswith("| `fedvpl` | 0.625 ± 0.177 |")
    assert table()["collapses"]({"half": {"fedvpl": runs}}) == [
        "- half, fedvpl: own z less another's 0.125 ± 0.177; collapsed in 1 of 2 runs"
    ]
