"""Pairs of real people: what is read from the corpus, reference points, what is personal, the table."""

import hashlib
import runpy
from collections import Counter
from xml.sax.saxutils import escape

import pytest

from experiment_scripts import EXPERIMENTS, rows, script

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


def test_other_files_are_refused(tmp_path):
    message = script("people/prepare.py", corpus(tmp_path / "odd", "a3"), "--out", tmp_path, fails=True)
    assert "is-it_yes.xml, pair 1: a vote for 'a3', not a1, a2 or equal" in message
    (tmp_path / "odd/is-it_yes.xml").write_text("<list><annotatedArgumentPair/></list>")
    message = script("people/prepare.py", tmp_path / "odd", "--out", tmp_path, fails=True)
    assert "pair 1: <annotatedArgumentPair> has no <arg1>; is this a file of UKPConvArg1-full-XML?" in message
    assert "no .xml files" in script("people/prepare.py", tmp_path, "--out", tmp_path, fails=True)
    message = script("people/cuts.py", tmp_path / "no.gz", tmp_path / "no.gz", fails=True)
    assert "prepare.py writes it" in message


def runpy_people(name):
    """The names that a script of ``experiments/people`` defines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXPERIMENTS / "people"))
        return runpy.run_path(str(EXPERIMENTS / f"people/{name}.py"))
