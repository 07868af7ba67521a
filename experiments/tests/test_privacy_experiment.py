"""The table of sites.toml: what clients measure, seed by seed next to central noise."""

import json

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
