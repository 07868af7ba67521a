"""FedVPA-GP's experiments and the tables of tastes: their scripts and their verdicts."""

import gzip
import json
import runpy
from collections import Counter
from functools import cache

import pytest

from experiment_scripts import EXPERIMENTS, rows, script
from preferences import jsonl

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
