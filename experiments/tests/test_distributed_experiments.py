"""Distributed DPO's experiments: that they run, and how the claims are judged."""

import json

import pytest

from commands import prefed_
from experiment_scripts import EXPERIMENTS, script
from prefed.core import Key
from prefed.models.tiny import make_tiny
from preferences import jsonl


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A small model, and files of pairs with the columns of the personas."""
    folder = tmp_path_factory.mktemp("distributed")
    make_tiny(folder / "model", ["Human: a b c Assistant: d"] * 4, Key(0), layers=1, width=32, steps=1)
    names = (
        *("politically-liberal", "risk-averse", "politically-conservative", "risk-seeking"),
        *("interest-in-sports", "extraversion", "interest-in-math", "narcissism"),
        *("subscribes-to-Buddhism", "agreeableness"),
    )
    for role, pairs in (("train", 4), ("test", 1)):
        rows = [
            {
                "prompt": f"What of {n}?",
                "chosen": f" Yes, {n}.",
                "rejected": f" No, {role} {n}.",
                "persona": name,
            }
            for name in names
            for n in (f"{name} {k}" for k in range(pairs))
        ]
        jsonl(folder / f"{role}.jsonl", rows)
    return folder


@pytest.mark.parametrize("cell", ["personas/ring", "personas/buffered"])
def test_a_cell_runs(place, cell):
    """Two rounds on local files, every weight trained; the round log has what the figures show."""
    given = [
        "rounds=2",
        "model.train=full",
        "evaluate.diagnose=1",
        "engine.threads=1",
        f"model.name={place}/model",
    ]
    given += [f"data.{role}={place}/{role}.jsonl" for role in ("train", "test")]
    table, out = EXPERIMENTS / "distributed_dpo/figures.toml", place / cell.replace("/", "-")
    words = ["run", str(table), "--cell", cell, "--out", str(out)]
    prefed_(*words, *(word for text in given for word in ("--set", text)))
    last = json.loads((out / "rounds.jsonl").read_text().splitlines()[-1])
    assert {"global_loss", "gradient_norm", "kappa2", "zeta2", "paper_gap"} <= last.keys()
    assert ("consensus_after" in last) == (cell == "personas/ring")
    assert ("staleness" in last) == (cell == "personas/buffered")


def finished(folder, row, seed, gap, norms, zeta2=0.8):
    """A run of four clients as a sweep leaves it, with these gradient norms in its rounds."""
    run = folder / f"{row}-seed{seed}"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("[method]\nbatch_size = 4\n[evaluate]\ndiagnostic_pairs = 8\n")
    got = [{"gradient_norm": norm, "zeta2": zeta2, "global_loss": norm / 2} for norm in norms] or [{}]
    (run / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in got))
    reward = {"mean": 0.75, "worst": 0.5, "per_client": dict.fromkeys("abcd", 0.75)}
    summary = {"paper_gap": gap, "reward_accuracy": reward, "bytes": {"up": 10**6, "down": 10**6}}
    (run / "summary.json").write_text(json.dumps(summary))


def test_the_claims_are_judged_seed_by_seed(tmp_path):
    """E = 1 is above E = 3 with both seeds, and E = 3 above E = 6 with one of two. Of a squared norm of 1 a
    tenth is the draw's: ζ² = 0.8 of batches of 4, 8 pairs of each of four clients, 0.8 · 4/8/4. The gaps of
    S = 0.2 and 1 lie on 0.1 + 0.05 / S. Clients that train alone have no global objective."""
    for seed in (42, 43):
        finished(tmp_path, "e1", seed, 0.9, [2.0, 1.0])
        finished(tmp_path, "feddpo", seed, 0.15, [1.0])
        finished(tmp_path, "e6", seed, 0.1 if seed == 42 else 0.2, [0.5])
        finished(tmp_path, "single", seed, 0.35, [1.0])
        finished(tmp_path, "local", seed, 0.6, [])
    printed = script("distributed_dpo/claims.py", tmp_path)
    assert "| e1 | 2 | 0.5 ± 0 | 2.4 ± 0 | 0.9 ± 0 | 0.75 ± 0 | 0.5 ± 0 | 2 ± 0 |" in printed
    assert "| feddpo | 2 | 0.5 ± 0 | 0.9 ± 0 |" in printed
    assert "| local | 2 | | | 0.6 ± 0 |" in printed
    verdicts = "loss: cannot be decided; gradient²: holds; paper gap: holds"
    assert f"e1 > feddpo\n  {verdicts}" in printed
    assert "feddpo > e6\n  loss: holds; gradient²: holds; paper gap: cannot be decided" in printed
    assert "paper gap = 0.1 + 0.05 N/S, R² = 1.00" in printed
    assert "no finished run" in script("distributed_dpo/claims.py", tmp_path / "e1-seed42", fails=True)
