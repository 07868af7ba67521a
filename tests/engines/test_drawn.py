"""Random experiments end alike in a dry run and in a run; ``benchmarks/fuzz.py`` starts more of them."""

from __future__ import annotations

from itertools import count

import drawn


def test_drawn_experiments_end_alike(tmp_path):
    """Until three are completed: about a third of those drawn are valid, and some of these are refused."""
    place, completed = drawn.make_place(tmp_path), 0
    seeds = count()
    while completed < 3:
        seed = next(seeds)
        outcome, wrong = drawn.outcome(drawn.experiment(place, seed), place / "runs" / str(seed))
        assert wrong == [], seed
        completed += outcome == "completed"
