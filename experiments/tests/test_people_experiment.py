"""Pairs of real people: what is read from the corpus, reference points, what is personal, the table."""

import gzip
import hashlib
import json
import runpy
import shutil
from collections import Counter
from xml.sax.saxutils import escape

import numpy as np
import pytest

from experiment_scripts import EXPERIMENTS, rows, script
from finished import small_experiment, small_place
from prefed import Experiment, run
from prefed.runs.evaluate import evaluate_file
from prefed.runs.loaded_run import load_run

WORKERS = ("AFIRST", "ASECOND", "ATHIRD", "AFOURTH")
"""All have 100 judgements but the last, who found 21 pairs equal and so has 79."""


def corpus(folder, vote="a1"):
    """A file in the form of UKPConvArg1-full-XML: 100 pairs, which the four workers and another one judge."""

    def argument(name, text):
        return f"<{name}><author>x</author><stance>Yes &amp; no</stance><text>{escape(text)}</text></{name}>"

    pairs = []
    for k in range(100):
        votes = {"AFIRST": "a1", "ASECOND": "a1", "ATHIRD": "a2", "AFOURTH": "equal" if k < 21 else "a1"}
        votes[f"AONCE{k}"] = vote
        assignments = "".join(
            f"<mTurkAssignment><turkID>{worker}</turkID><hitID>H{k}</hitID><value>{value}</value>"
            f"<reason>{worker} says so</reason></mTurkAssignment>"
            for worker, value in votes.items()
        )
        pairs.append(
            f"<annotatedArgumentPair><id>{k}</id>{argument('arg1', f' first {chr(10)} {k}')}"
            f"{argument('arg2', f'second <{k}>')}<debateMetaData><title>Is it?</title><url>u</url>"
            f"</debateMetaData><mTurkAssignments>{assignments}</mTurkAssignments><goldLabel>a1</goldLabel>"
            "</annotatedArgumentPair>"
        )
    folder.mkdir(exist_ok=True)
    (folder / "is-it_yes.xml").write_text(f'<?xml version="1.0"?>\n<list>{"".join(pairs)}</list>')
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Rows of each file that prepare.py and cuts.py write, by the file's name."""
    folder = tmp_path_factory.mktemp("people")
    script("people/prepare.py", corpus(folder / "xml"), "--out", folder)
    train, test = (folder / f"people.{part}.jsonl.gz" for part in ("train", "test"))
    script("people/cuts.py", train, test, "--out", folder)
    return {path.name[: -len(".jsonl.gz")]: rows(path) for path in folder.glob("*.gz")}


def test_judgements_become_pairs_of_people_without_ids(prepared):
    """Three workers have at least 80 pairs; int(0.6 · 3) = 1 of them is taken, the first by hash. Of its four
    other judges three share the first two workers' choice, or two if one of them finds both equal, and nobody
    the third's."""
    (worker,) = sorted(WORKERS[:3], key=lambda name: hashlib.sha256(name.encode()).hexdigest())[:1]
    own = prepared["people.train"] + prepared["people.test"]
    assert Counter(row["person"] for row in own) == {"person-001": 100}
    assert not any(name in str(own) for name in (*WORKERS, "AONCE"))
    texts = {"chosen": {f"first {k}" for k in range(100)}, "rejected": {f"second <{k}>" for k in range(100)}}
    if worker == "ATHIRD":
        texts["chosen"], texts["rejected"] = texts["rejected"], texts["chosen"]
    for name, expected in texts.items():
        assert {row[name] for row in own} == expected
    assert {row["prompt"] for row in own} == {"In the debate “Is it?”, give an argument for: Yes & no"}
    assert {row["debate"] for row in own} == {"Is it?"}
    agree = Counter(row["others_agree"] for row in own)
    assert agree == ({0.0: 100} if worker == "ATHIRD" else {0.5: 21, 0.75: 79})


def test_a_pair_of_arguments_is_in_one_part(prepared):
    """Whoever judged it, and in whichever order; a person's fewer pairs are the first of its many."""
    module = runpy_people("cuts")
    unordered = module["unordered"]
    swapped = {"prompt": "p", "chosen": "a", "rejected": "b"}
    assert unordered(swapped) == unordered({"prompt": "p", "chosen": "b", "rejected": "a"})
    parts = {
        part: {unordered(row) for row in prepared[name]}
        for part, name in (
            ("train", "people-all.train"),
            ("validation", "people.validation"),
            ("test", "people.test"),
        )
    }
    assert sum(map(len, parts.values())) == len(set().union(*parts.values())) == 100
    assert all(len(part) > 1 for part in parts.values())
    for size in (8, 32):
        assert prepared[f"people-{size}.train"] == prepared["people-all.train"][:size]
    many = [
        {"prompt": "p", "chosen": f"{k}", "rejected": "", "person": f"person-{person}"}
        for person in (1, 2, 3)
        for k in range(30)
    ]
    found = module["cuts"](many)
    kept = Counter(row["person"] for row in found["people-newcomers.train"])
    everything = Counter(row["person"] for row in found["people-all.train"])
    assert kept == {"person-1": everything["person-1"], "person-2": 8, "person-3": 8}


def test_the_benchmark_has_the_first_pairs_of_those_with_the_most():
    """Person k has k training pairs and, if odd, 8 test pairs. Of 1 to 30, the 20 with the most are the odd
    ones from 7, with 15 pairs, and the even ones from 16."""
    module = runpy_people("cuts")
    found = {
        "people-all.train": [{"person": f"{k:02}", "pair": n} for k in range(1, 31) for n in range(k)],
        "people.validation": [{"person": "30", "pair": n} for n in range(20)],
    }
    test = [{"person": f"{k:02}", "pair": n} for k in range(1, 31, 2) for n in range(8)]
    chosen = module["bench"](found, test)
    kept = [*range(7, 31, 2), *range(16, 31, 2)]
    assert Counter(row["person"] for row in chosen["train"]) == {f"{k:02}": min(k, 24) for k in kept}
    assert [row["pair"] for row in chosen["train"] if row["person"] == "30"] == list(range(24))
    assert Counter(row["person"] for row in chosen["validation"]) == {"30": 16}
    assert Counter(row["person"] for row in chosen["test"]) == {f"{k:02}": 8 for k in kept if k % 2}


def runpy_people(name):
    """The names that a script of ``experiments/people`` defines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXPERIMENTS / "people"))
        return runpy.run_path(str(EXPERIMENTS / f"people/{name}.py"))


def simulated(deviation, people=60, pairs=120, seed=3):
    """Features of pairs and their people, whose slopes are 1, 0.5 and 0 plus ``deviation`` · N(0, 1)."""
    rng = np.random.default_rng(seed)
    slopes = [1.0, 0.5, 0.0] + rng.normal(size=(people, 3)) * deviation
    x, owner = rng.normal(size=(people * pairs, 3)), np.repeat(np.arange(people), pairs)
    chosen = rng.random(len(x)) < 1 / (1 + np.exp(-(x * slopes[owner]).sum(1)))
    return np.where(chosen[:, None], x, -x), owner, slopes


def test_the_mixed_model_finds_what_is_personal():
    """With 60 people a deviation's standard error is about a tenth of it. The shares follow from the known
    variances: 1.25 shared, 1 personal, π²/3 noise. Whoever has one slope for all has no personal share."""
    module = runpy_people("reference")
    x, owner, slopes = simulated(np.array([0.9, 0.4, 0.0]))
    fit = module["mixed"](x, owner)
    np.testing.assert_allclose(np.sqrt(fit.variances), slopes.std(0), atol=0.12)
    np.testing.assert_allclose(fit.shared, slopes.mean(0), atol=0.12)
    whole = 1.25 + 0.97 + np.pi**2 / 3
    found = module["shares"](fit, x)
    assert found["personal"] == pytest.approx(0.97 / whole, abs=0.05)
    assert sum(found.values()) == pytest.approx(1)
    # Deviations are nearer to the person's own than the shared slopes are, and nothing is shrunk beyond.
    error = ((fit.shared + fit.deviations - slopes) ** 2).mean()
    assert error < 0.5 * ((fit.shared - slopes) ** 2).mean()
    alike, owner, _ = simulated(0.0)
    assert module["shares"](module["mixed"](alike, owner), alike)["personal"] < 0.01
    # Knowing everybody's slopes would order more pairs than the shared ones do.
    own, common = (np.mean((x * each).sum(1) > 0) for each in (slopes[owner], slopes.mean(0)))
    assert module["possible_gain"](fit, x) == pytest.approx(own - common, abs=0.02)


def test_reference_points_of_a_known_taste(tmp_path):
    """Everybody prefers "good" to "evil"; half of them longer responses, half shorter ones.
    Words order all pairs, length half of each two people's, and others agree or not as the file says."""
    module = runpy_people("reference")
    rng = np.random.default_rng(0)

    def rows(count):
        for person in range(4):
            for _ in range(count):
                short, long = "tiny", "tiny " * int(rng.integers(2, 9))
                more, less = (long, short) if person % 2 else (short, long)
                agree = [0.0, 0.25, 1.0, None][person]
                texts = {"chosen": f"good {more}", "rejected": f"evil {less}"}
                yield {"person": f"person-{person}", "prompt": "?", **texts, "others_agree": agree}

    split = module["Split"](*(list(rows(count)) for count in (40, 20, 30)))
    found = module["references"](split, None, 3, 3)
    accuracy = found["accuracy"]
    assert accuracy["the longer argument"]["all"] == {
        f"person-{person}": float(person % 2) for person in range(4)
    }
    assert set(accuracy["bag of words, pooled"]["all"].values()) == {1.0}
    assert accuracy["the longer argument"]["contested"] == {"person-1": 1.0}
    assert accuracy["the others' votes on the pair"]["all"] == {
        "person-0": 0.0,
        "person-1": 0.0,
        "person-2": 1.0,
        "person-3": 0.5,
    }
    right = found["personal"]["accuracy"]
    assert set(right["own"].values()) == {1.0}
    assert set(right["another's"].values()) == {0.0}


def test_the_table_compares_people(tmp_path):
    """Of a made-up column: the rate that is best on validation pairs with the first seed, means over people
    and seeds, people paired with feddpo's."""
    for name, validated, values in (
        ("feddpo-seed1", 0.5, (0.5, 0.7)),
        ("fedper-lr0.1-seed1", 0.6, (0.1, 0.1)),
        ("fedper-lr0.01-seed1", 0.7, (0.6, 0.9)),
        ("fedper-lr0.01-seed2", 0.4, (0.8, 0.9)),
    ):
        run = tmp_path / "all" / name
        run.mkdir(parents=True)
        (run / "summary.json").write_text(json.dumps({"reward_accuracy": {"mean": validated}}))
        own = {"test": 10, "train": 8, "preference": 0.3, "contested": 0.4, "agreed": 0.8}
        people = {key: {**own, "accuracy": value} for key, value in zip("ab", values, strict=True)}
        if name.endswith("1"):
            people = {key: {**value, "another": 0.5} for key, value in people.items()}
        if name.startswith("fedper"):
            people = {key: {**value, "shared": 0.25} for key, value in people.items()}
            people |= {"c": {"joined": 0.4}, "d": {"joined": 0.6}}
        (run / "people.json").write_text(json.dumps(people))
        fewer = {key: {**people[key], "train": 2, "accuracy": 0.5} for key in "ab"}
        shutil.copytree(run, tmp_path / "own-8" / name)
        (tmp_path / "own-8" / name / "people.json").write_text(json.dumps(fewer))
    test = tmp_path / "test.jsonl.gz"
    test.write_bytes(gzip.compress(b""))
    words = (tmp_path, "--test", test, "--out", tmp_path / "t.md", "--pictures", tmp_path)
    lines = script("people/table.py", *words).splitlines()
    head, _, fedper, feddpo = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:6])
    fedper, feddpo = (dict(zip(head, row, strict=True)) for row in (fedper, feddpo))
    # People have 0.7 and 0.9, and with two values t is 12.706: 12.706 · 0.1 = 1.271; seeds 0.75 and 0.85.
    assert fedper["accuracy"] == "0.800 ± 1.271"
    assert fedper["over seeds"] == "0.800 ± 0.635"
    assert fedper["less feddpo"] == "+0.200 ± 0.000"
    # Only the first seed has another's: 0.6 and 0.9 less 0.5.
    assert fedper["own less another's"] == "+0.250 ± 1.906"
    assert (fedper["contested"], fedper["agreed"]) == ("0.400 ± 0.000", "0.800 ± 0.000")
    assert (fedper["newcomers"], feddpo["newcomers"]) == ("0.500 ± 1.271", "–")
    assert (feddpo["worst tenth"], feddpo["seeds"], feddpo["over seeds"]) == ("0.500", "1", "–")
    own, pairs = ((tmp_path / f"people-{name}.svg").read_text() for name in ("own", "pairs"))
    # feddpo has no own models, but a line from 2 to 8 pairs.
    assert "fedper" in own
    assert "feddpo" not in own
    assert "fedper" in pairs
    assert "feddpo" in pairs


def test_people_of_a_real_run(tmp_path):
    """Two people of opposite tastes, alone. Accuracies are the run's, those of contested and agreed pairs
    make them up, and another's is that of the other model on the same pairs."""
    module, place = runpy_people("table"), small_place(tmp_path)
    tree = small_experiment(place)
    tree["method"] |= {"name": "local", "lr": 0.03}
    run(Experiment.model_validate(tree), tmp_path / "run")
    judged = {
        tuple(row[name].strip() for name in ("worker", "prompt", "chosen", "rejected")): k % 4 == 0
        for k, row in enumerate(rows(place / "test.jsonl"))
    }
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    joined = {"mean": 0.25, "worst": 0.25, "worst_decile": 0.25, "per_client": {"new": 0.25}}
    (tmp_path / "run/summary.json").write_text(json.dumps(summary | {"unseen_accuracy": {"8": joined}}))
    found = module["from_models"](tmp_path / "run", judged, True)
    assert found.pop("new") == {"joined": 0.25}
    for person, own in found.items():
        assert own["accuracy"] == summary["reward_accuracy"]["per_client"][person]
        assert own["preference"] == summary["preference_accuracy"]["per_client"][person]
        assert (own["train"], own["test"]) == (8, 4)
    # Of a person's four pairs, every second is contested of the first person and none of the second.
    assert found["left"]["accuracy"] == (found["left"]["contested"] + found["left"]["agreed"]) / 2
    assert "contested" not in found["right"]
    assert found["right"]["agreed"] == found["right"]["accuracy"]
    # Right's model on left's pairs, read from a file of their own.
    own = [row for row in rows(place / "test.jsonl") if row["worker"] == "left"]
    (tmp_path / "left.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in own))
    loaded = load_run(tmp_path / "run", data=True)
    judged = evaluate_file(loaded, str(tmp_path / "left.jsonl"), ["right"], everyone=True)
    assert found["left"]["another"] == judged.figures["reward_accuracy"]["mean"] < found["left"]["accuracy"]
