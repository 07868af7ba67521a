"""Everything that clients answer in real runs, byte by byte: no word and no token of a pair is in it."""

import json

import numpy as np
import pytest

from finished import small_experiment, small_place
from prefed import Experiment, run
from prefed.core import plugins
from prefed.engines import backends

WORDS = ("zebra", "quince", "yonder", "walrus")
METRIC = """
import numpy as np
from prefed.train.metrics import Metric

METRIC = Metric("half", lambda scores: np.full(len(next(iter(vars(scores).values()))), 0.5))
"""
TASTE = {"latent": 4, "widths": [16, 8]}
CASES = {
    "icl": ({"name": "icl", "examples": 2}, {}),
    "pal": ({"name": "pal", "local_steps": 2, "newcomer_steps": 2}, {}),
    "fedvpl": ({"name": "fedvpl", "lr": 0.01, "local_steps": 2}, {"variational": TASTE}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Three workers whose prompts and responses have their own words."""
    folder = small_place(tmp_path_factory.mktemp("words"))
    for name, first in (("train", 0), ("test", 18)):
        rows = [
            {
                "prompt": f"{WORDS[0]} {n}:",
                "chosen": f" {WORDS[1]} {n}",
                "rejected": f" {WORDS[2]} {n}",
                "worker": f"w{n % 3}",
                "note": WORDS[3],
            }
            for n in range(first, first + 18)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def traces(data, tokens):
    """The words and the token ids that a message holds, ids in each width and in JSON."""
    found = [word for word in WORDS if word.encode() in data.lower()]
    for index in range(len(tokens)):
        pair = tokens.pair(index)
        for ids in (pair.prompt, pair.chosen, pair.rejected):
            ids = np.asarray(ids)[:3]
            forms = [ids.astype(kind).tobytes() for kind in ("<i2", "<i4", "<i8", "<f4", "<f8")]
            forms += [
                json.dumps(ids.tolist()).encode(),
                json.dumps(ids.tolist(), separators=(",", ":")).encode(),
            ]
            found += [tuple(ids)] if len(ids) > 2 and any(form in data for form in forms) else []
    return found


@pytest.mark.parametrize("case", CASES)
def test_no_answer_of_a_client_holds_its_text(place, tmp_path, monkeypatch, case):
    """Uploads, evaluations with a metric from outside prefed, and newcomers' evaluations. Control: a
    client's own encoded pairs have traces."""
    method, model = CASES[case]
    (tmp_path / "metric.py").write_text(METRIC)
    monkeypatch.chdir(tmp_path)
    plugins.allow("./metric.py")
    answers, real, jobs = [], backends.run_task, []

    def seen(job, task, states):
        result = real(job, task, states)
        answers.append((task.kind, task.client, result.message + result.withheld.encode()))
        jobs.append(job)
        return result

    monkeypatch.setattr(backends, "run_task", seen)
    tree = small_experiment(
        place,
        model={"name": str(place / "model"), "lora": {"rank": 2}, **model},
        method=method,
        evaluate={"unseen": ["w2"], "unseen_steps": [0, 1], "metrics": ["./metric.py"]},
    )
    run(Experiment.model_validate(tree), tmp_path / "run")
    tokens = jobs[0].trainers.dataset.tokens
    assert {(kind, client) for kind, client, _ in answers} >= {
        ("visit", "w0"),
        ("evaluate", "w1"),
        ("evaluate", "w2"),
    }
    assert not [trace for _, _, data in answers for trace in traces(data, tokens)]
    assert b'"half": 0.5' in b"".join(data for _, _, data in answers)
    first = tokens.pair(0)
    assert traces(np.asarray(first.chosen).astype("<i4").tobytes(), tokens)
    assert traces(f"the {WORDS[0]}".encode(), tokens) == [WORDS[0]]
