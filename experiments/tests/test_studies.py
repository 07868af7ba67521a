"""What runs show together: families of runs written by hand, whose figures are chosen."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from experiment_scripts import EXPERIMENTS, script
from finished import CLIENTS, config, write_run
from prefed.merge.mixing_matrices import ConsensusFactors
from prefed.runs.finished_run import find_runs, read_run

sys.path.append(str(EXPERIMENTS / "distributed_dpo"))
studies = importlib.import_module("study_plots")

FIVE = dict.fromkeys("abcde", (0.5, 0.6, 0.7))


def make(folder, name, seed=42, *, gap=0.5, norm=2.0, clients=CLIENTS, size=None, **tables):
    """A run whose last gap is ``gap``, with cohorts of ``size``. Tables are laid over those of other runs by
    hand; ``log`` has further numbers of its rounds."""
    tables |= {"cohort": {"size": size}} if size else {}
    base = config(seed=seed)
    settings = {key: {**base.get(key, {}), **table} for key, table in tables.items() if key != "log"}
    rounds = len(next(iter(clients.values()))) - 1
    got = {"global_loss": 0.6, "gradient_norm": norm, "paper_gap": gap, **tables.get("log", {})}
    path = write_run(
        folder / f"{name}-seed{seed}",
        clients,
        settings={"seed": seed, **settings},
        figures={key: value if isinstance(value, list) else [value] * rounds for key, value in got.items()},
    )
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        line["cohort"] = sorted(clients)[:size]
        for key in [key for key in got if line[key] is None]:
            del line[key]
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def study(folder, name, target=None):
    """The studies of that kind."""
    found = studies.studies(find_runs([folder]), target)
    return [each for each in found if each.name.partition("-")[0] == name]


def test_participation_and_its_line(tmp_path):
    """Gaps of 0.1 + 0.3/S lie on that line; a second seed 0.06 above and below changes R² alone: the variance
    of the points on the line is 0.3² · var{1, ½, ⅓}."""
    for size in (1, 2, 3):
        for seed, off in ((42, 0.06), (43, -0.06)):
            make(tmp_path, f"s{size}", seed, gap=0.1 + 0.3 / size + off, size=size)
    (found,) = study(tmp_path, "participation")
    gaps, fits = found.values["gaps"], found.values["fits"]
    assert gaps["the paper's gap"][0.5] == pytest.approx([0.31, 0.19])
    start, slope, share = fits["the paper's gap"]
    assert (start, slope) == pytest.approx((0.1, 0.3))
    mean = (1 + 1 / 2 + 1 / 3) / 3
    along = 0.09 * sum((x - mean) ** 2 for x in (1, 1 / 2, 1 / 3)) / 3
    assert share == pytest.approx(along / (along + 0.06**2))
    assert gaps["squared gradient norm"] == {1.0: [4, 4], 0.5: [4, 4], 1 / 3: [4, 4]}


def test_a_final_figure_is_of_the_last_five_rounds_that_have_it(tmp_path):
    clients = {"a": tuple(0.1 * n for n in range(9))}
    path = make(
        tmp_path, "run", gap=[9, 9, 1, 2, 3, None, 4, 5], clients=clients, norm=[9, 9, 9, 1, 1, 1, 2, 2]
    )
    run = read_run(path)
    assert studies.GAPS["the paper's gap"](run) == 3
    assert studies.GAPS["squared gradient norm"](run) == pytest.approx((1 + 1 + 1 + 4 + 4) / 5)


def test_what_few_pairs_add_to_a_squared_gradient_is_taken_off(tmp_path):
    """Three clients of 6 pairs, where a batch of 4 has the variance 0.9: of 18 pairs 0.9 · 4/18. All pairs of
    all clients as one client: of 6 pairs."""
    tables = {"evaluate": {"diagnostic_pairs": 6}, "method": {"batch_size": 4}, "log": {"zeta2": 0.9}}
    for name, cohort, pairs in (("three", ["ann", "bob"], 18), ("pooled", ["pooled"], 6)):
        path = make(tmp_path, name, norm=1.0, **tables)
        lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
        text = "".join(json.dumps({**line, "cohort": cohort}) + "\n" for line in lines)
        (path / "rounds.jsonl").write_text(text)
        assert studies.GAPS["squared gradient norm"](read_run(path)) == pytest.approx(1 - 0.9 * 4 / pairs)


def test_local_steps_and_rates_of_two_data_sets(tmp_path):
    """Families that differ in their data stay apart, and their titles say so."""
    for column in ("cooking", "law"):
        for steps, rate in ((1, 0.1), (3, 0.1), (3, 0.01)):
            method = {"local_steps": steps, "lr": rate}
            data = {"train": {"path": f"{column}.jsonl"}}
            make(tmp_path / column, f"e{steps}-{rate}", gap=steps * rate, method=method, data=data)
    both = study(tmp_path, "steps")
    assert [each.lines[0] for each in both] == ['path "cooking.jsonl"', 'path "law.jsonl"']
    for each in both:
        assert each.values["gaps"]["the paper's gap"] == {
            "η = 0.1": {1: [pytest.approx(0.1)], 3: [pytest.approx(0.3)]},
            "η = 0.01": {3: [pytest.approx(0.03)]},
        }


def test_delays_and_the_ways_in_which_they_count(tmp_path):
    """Every curve starts with the run in time. A buffered server does not count as a drawn delay."""
    make(tmp_path, "q0", gap=0.1)
    make(tmp_path, "q2", gap=0.2, fleet={"max_delay": 2})
    make(tmp_path, "q5", gap=0.5, fleet={"max_delay": 5})
    make(tmp_path, "q2-delta", gap=0.3, fleet={"max_delay": 2}, merge={"late": "delta"})
    make(tmp_path, "buffered", gap=0.9, fleet={"server": "buffered"})
    (found,) = study(tmp_path, "delay")
    assert found.values["gaps"]["the paper's gap"] == {
        "models": {0: [0.1], 2: [0.2], 5: [0.5]},
        "steps": {0: [0.1], 2: [0.3]},
    }


def test_topologies_next_to_the_curves_of_theory(tmp_path):
    """Errors that are a tenth of the noise's formula lie on its curve: section 3's numbers for N = 5."""
    factors = {"star": (9.3333, 5.3333, 0.8), "path": (7.6667, 3.6667, 0.8727), "complete": (4.0, 0.0, 0.0)}
    for name, (before, after, rho) in factors.items():
        log = {"consensus_before": before / 10, "consensus_after": after / 10, "rho": rho}
        make(tmp_path, name, clients=FIVE, log=log, method={"name": "decdpo"}, graph={"name": name})
    (found,) = study(tmp_path, "topology")
    graphs, said = found.values["graphs"], found.lines
    assert [graph.name for graph in graphs] == ["path", "star", "complete"]
    assert isinstance(graphs[0].factors, ConsensusFactors)
    assert "consensus error before the mix: path 0.767, star 0.933, complete 0.4" in said
    assert "  noisy gradients, one factor: path 0.767, star 0.933, complete 0.4" in said
    assert "  noisy gradients, one factor: path 0.367, star 0.533, complete 0" in said


def test_the_race_of_servers(tmp_path):
    """The synchronous run reaches 60% with round 1 at 4 s and 70% at 8 s, the buffered one at 1 s and 2 s."""
    for name, pace in (("synchronous", 4.0), ("buffered", 1.0)):
        log = {"time": [pace, 2 * pace]}
        make(tmp_path, name, clients=FIVE, log=log, fleet={"server": name, "speeds": "exponential"})
    for target, seconds in ((None, [2, 8]), (0.6, [1, 4]), (0.75, [None, None])):
        (found,) = study(tmp_path, "time", target)
        assert found.values["target"] == pytest.approx(target or 0.7)
        assert found.values["seconds"] == {
            f"{name} ({name})": [at] for name, at in zip(("buffered", "synchronous"), seconds, strict=True)
        }
    assert "1 of 1 runs never" in " ".join(found.lines)


def test_the_script_writes_plots_and_prints_their_numbers(tmp_path):
    """A plot of every kind can be drawn."""
    for size in (1, 2):
        make(tmp_path / "runs", f"s{size}", gap=1 / size, size=size)
    log = {"time": [1.0, 2.0], "consensus_before": 0.5, "consensus_after": 0.25, "rho": 0.5}
    for name in ("synchronous", "buffered"):
        make(tmp_path / "runs", name, log=log, fleet={"server": name, "speeds": "exponential"})
    for name in ("path", "star"):
        make(tmp_path / "runs", name, log=log, method={"name": "decdpo"}, graph={"name": name})
    for steps in (1, 2):
        make(tmp_path / "runs", f"e{steps}", method={"local_steps": steps})
    for late in (0, 2):
        make(tmp_path / "runs", f"q{late}", fleet={"max_delay": late})
    where = ("--out", tmp_path / "out", "--format", "svg")
    printed = script("distributed_dpo/study_plots.py", tmp_path / "runs", *where)
    kinds = {"methods", "participation", "steps", "delay", "topology", "time"}
    assert {path.stem.partition("-")[0] for path in (tmp_path / "out").iterdir()} == kinds
    assert "the paper's gap S=2 0.5, S=1 1; nearest line 0 + 1/S, R² 1.00" in printed
    plain = write_run(tmp_path / "plain")
    assert "no study" in script("distributed_dpo/study_plots.py", plain, fails=True)
