"""Random experiments end alike in a dry run and in a run; ``benchmarks/fuzz.py`` starts more of them."""

from __future__ import annotations

import drawn


def test_drawn_experiments_end_alike(tmp_path):
    """About a third of those drawn are valid; three at least must be, so that the test sees something."""
    place, completed = drawn.make_place(tmp_path), 0
    for seed in range(12):
        outcome, wrong = drawn.outcome(drawn.experiment(place, seed), place / "runs" / str(seed))
        assert wrong == [], seed
        completed += outcome == "completed"
    assert completed >= 3
