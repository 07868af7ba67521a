"""The table of sites.toml: what clients measure, seed by seed next to central noise."""

import json

import pytest

from experiment_scripts import script


def test_sums_are_compared_with_central_noise_seed_by_seed(tmp_path):
    """Two seeds: t = 12.706 with one degree of freedom, so half widths are 12.706 |a − b| / 2. A row without
    its partner has no difference, and one without noise no ε."""
    accuracies = {"central-4": (0.71, 0.72), "sums-4-0": (0.70, 0.72), "sums-8-0": (0.6,), "clip": (0.75,)}
    for row, values in accuracies.items():
        for seed, value in enumerate(values, 42):
            run = tmp_path / f"{row}-seed{seed}"
            run.mkdir()
            epsilon = {"central-4": 2.33, "clip": None}.get(row, 2.5)
            (run / "summary.json").write_text(json.dumps({"privacy": {"epsilon": epsilon}}))
            (tmp_path / f"{run.name}.json").write_text(json.dumps({"reward_accuracy": {"mean": value}}))
    printed = script("privacy/sites_table.py", tmp_path)
    assert "| central-4 | 2.33 | 0.710 | 0.720 | 0.715 ± 0.064 |  |" in printed
    assert "| sums-4-0 | 2.50 | 0.700 | 0.720 | 0.710 ± 0.127 | -0.005 ± 0.064 |" in printed
    assert "| sums-8-0 | 2.50 | 0.600 |  | 0.600 |  |" in printed
    assert "| clip | – | 0.750 |  | 0.750 |  |" in printed


def test_noise_on_votes_is_that_of_the_accountant():
    """Three shapes at three ε. The noise on n pairs is z √n, and the rounds cost most of an ε."""
    lines = script("privacy/votes.py", "--clients", 4).splitlines()
    table = [[float(cell) for cell in line.strip("| ").split("|")] for line in lines if line[2:3].isdigit()]
    assert [row[4] for row in table] == [2, 4, 8] * 3
    for _, _, pairs, majority, epsilon, z, rounds, noise, same, clear in table:
        assert noise == pytest.approx(z * pairs**0.5, rel=0.01, abs=0.5)
        assert 0.9 * epsilon < rounds < epsilon
        assert 0 < majority < 4
        assert 0.3 < same <= clear + 0.1 <= 1.1
