"""Random experiments end alike in a dry run and in a run; ``benchmarks/fuzz.py`` starts more of them."""

from __future__ import annotations

import pytest

import drawn

SEEDS = (30, 664, 902, 928, 930, 1775)
"""FedALA, stacked PAL and FedPDPO, a report with a fleet, diagnostics, and FedAMP on thumbs."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return drawn.make_place(tmp_path_factory.mktemp("place"))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_experiment_ends_alike(place, tmp_path, seed):
    tables = drawn.experiment(place, seed)
    outcome, wrong = drawn.outcome(tables, tmp_path / "run")
    assert (outcome != "invalid", wrong) == (True, [])
