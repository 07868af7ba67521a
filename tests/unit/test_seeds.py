"""Cases set side by side: means over seeds, tests seed by seed, gains client by client."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from finished import config, write_run
from prefed.runs import seed_groups, significance
from prefed.runs.finished_run import read_run
from prefed.runs.seed_groups import cases
from prefed.ui.pages.comparison_data import case_names, disagreements, rows_of_tests


def run(folder, method, seed, ends, *, by="column", data="x", shared=None, **summary):
    """A run of one round: client → accuracy after it; ``shared`` that of the shared model."""
    base = config()
    settings = {"seed": seed, "method": {**base["method"], "name": method}}
    settings["data"] = {**base["data"], "partition": {"by": by}}
    if shared:
        summary["shared_accuracy"] = {
            **dict.fromkeys(("mean", "worst", "worst_decile"), 0.5),
            "per_client": shared,
        }
    path = folder / f"{method}-seed{seed}"
    return read_run(
        write_run(
            path,
            {client: (0.5, end) for client, end in ends.items()},
            settings=settings,
            fingerprint={"data": data},
            **summary,
        )
    )


def several(folder, method, means, **options):
    """Runs of one method: seed → mean over two clients, which lie 0.1 apart."""
    return [
        run(folder, method, seed, {"ann": mean + 0.05, "bob": mean - 0.05}, **options)
        for seed, mean in means.items()
    ]


def test_runs_that_differ_in_their_seed_alone_are_one_case(tmp_path):
    """0.6, 0.7 and 0.8 have mean 0.7 and deviation 0.1; their worst clients lie 0.05 below."""
    runs = several(tmp_path, "feddpo", {1: 0.6, 2: 0.7, 3: 0.8}) + several(tmp_path, "fedprox", {1: 0.5})
    first, second = cases(runs)
    assert (first.seeds, second.seeds) == ((1, 2, 3), (1,))
    assert case_names([first, second]) == ["feddpo", "fedprox"]
    folded = seed_groups.fold(list(seed_groups.by_seed(first, "preference_accuracy").values()))
    assert folded == seed_groups.Folded(0.7, 0.1, 3)
    assert seed_groups.by_seed(first, "preference_accuracy", "worst")[3] == pytest.approx(0.75)
    rounds, values = first.over_rounds("preference_accuracy", "worst")
    assert (rounds, values[:, 0].tolist()) == ([1], pytest.approx([0.55, 0.65, 0.75]))


def test_the_same_run_twice_is_two_cases(tmp_path):
    """Of two runs of one seed neither is a second draw."""
    again = [several(tmp_path / name, "feddpo", {1: 0.6, 2: 0.7}) for name in "ab"]
    known = cases([*again[0], *again[1]])
    assert [case.seeds for case in known] == [(1, 2), (1, 2)]
    assert case_names(known) == ["a/feddpo", "b/feddpo"]


def test_a_paired_test_by_hand(tmp_path):
    """Differences 0.1, 0.2 and 0.3 on seeds 2, 3, 4: t = 0.2 / (0.1/√3) = 2√3 with 2 degrees of freedom, and
    P(|T| > t) = 1 − t/√(2 + t²). All three are positive, which 2 of the 2³ choices of signs reach: 0.25."""
    mine = several(tmp_path, "fedprox", {4: 0.9, 2: 0.6, 3: 0.75, 9: 0.1})
    theirs = several(tmp_path, "feddpo", {1: 0.2, 2: 0.5, 3: 0.55, 4: 0.6})
    other, case = cases([*theirs, *mine])
    found = significance.paired(case, other, "preference_accuracy")
    assert found.differences == pytest.approx({4: 0.3, 2: 0.1, 3: 0.2})
    assert (found.folded.mean, found.folded.std) == pytest.approx((0.2, 0.1))
    t = 2 * math.sqrt(3)
    assert found.t == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert found.wilcoxon == pytest.approx(0.25)
    # With 2 degrees of freedom t is √2 u / √(1 − u²) at u = 0.95: 4.3027.
    arm = math.sqrt(2) * 0.95 / math.sqrt(1 - 0.95**2) * 0.1 / math.sqrt(3)
    assert found.interval == pytest.approx((0.2 - arm, 0.2 + arm))
    assert rows_of_tests([found]) == [("3", "+0.200 [-0.048, +0.448]", f"{found.t:.3f}", "0.250")]


@given(st.lists(st.integers(-50, 50).filter(bool), min_size=2, max_size=7, unique_by=abs))
def test_wilcoxon_is_what_all_signs_say(differences):
    """Oracle: the share of all choices of signs whose rank sum is as far from its mean."""
    ranks = {value: rank for rank, value in enumerate(sorted(map(abs, differences)), 1)}

    def far(signs):
        total = sum(ranks[abs(d)] for d, up in zip(differences, signs, strict=True) if up)
        return abs(total - sum(ranks.values()) / 2)

    own = far([d > 0 for d in differences])
    every = list(itertools.product((True, False), repeat=len(differences)))
    expected = sum(far(signs) >= own - 1e-9 for signs in every) / len(every)
    assert stats.wilcoxon(differences).pvalue == pytest.approx(expected)


def test_what_no_test_can_be_made_of(tmp_path):
    """One seed in common, none, and differences that are all alike."""
    known = cases(
        several(tmp_path, "feddpo", {1: 0.5, 2: 0.6})
        + several(tmp_path, "fedprox", {2: 0.7, 3: 0.7})
        + several(tmp_path, "scaffold", {7: 0.7})
        + several(tmp_path, "fedbn", {1: 0.6, 2: 0.7})
    )
    first, *others = known
    one, none, alike = (significance.paired(case, first, "preference_accuracy") for case in others)
    assert (one.differences, one.t, none, alike.t) == (pytest.approx({2: 0.1}), None, None, None)
    assert alike.folded.std == pytest.approx(0)
    assert rows_of_tests([one, none, alike]) == [
        ("1", "+0.100", "", ""),
        ("0", "", "", ""),
        ("2", "+0.100", "", ""),
    ]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_never_below_and_keeps_the_order(p):
    """The smallest is multiplied by their number, the largest stays at least what it was; none is above 1."""
    adjusted = significance.holm(p)
    assert min(adjusted) == pytest.approx(min(1.0, min(p) * len(p)))
    assert all(a >= each and a <= 1 for a, each in zip(adjusted, p, strict=True))
    order = sorted(range(len(p)), key=p.__getitem__)
    assert [adjusted[k] for k in order] == sorted(adjusted)


def test_gains_of_clients_on_common_seeds(tmp_path):
    """Ann gains 0.2 and 0.4 on seeds 1 and 2, bob 0 twice; seed 3 has no partner. Where a partition deals the
    pairs anew with each seed, a client of one seed is another client than of the next."""
    ends = {1: (0.7, 0.5), 2: (0.9, 0.5), 3: (0.1, 0.1)}
    for by, expected in (
        ("column", {"ann": 0.3, "bob": 0.0}),
        ("file", {"ann": 0.3, "bob": 0.0}),
        ("dirichlet", {"ann, seed 1": 0.2, "bob, seed 1": 0, "ann, seed 2": 0.4, "bob, seed 2": 0}),
    ):
        mine = [run(tmp_path / by, "ditto", s, {"ann": a, "bob": b}, by=by) for s, (a, b) in ends.items()]
        theirs = [run(tmp_path / by, "feddpo", s, {"ann": 0.5, "bob": 0.5}, by=by) for s in (2, 1)]
        case, other = cases([*mine, *theirs])
        fixed = seed_groups.fixed_clients([case, other])
        assert fixed == (by != "dirichlet")
        assert seed_groups.gains(case, other, "preference_accuracy", fixed=fixed) == pytest.approx(expected)
    assert seed_groups.by_client(case, "preference_accuracy", fixed=True)["ann"] == pytest.approx(17 / 30)


def test_what_was_spent_by_the_end_of_a_round(tmp_path):
    """Rounds of 3,000 bytes and 1.5 seconds; the fleet's clock is already a sum. A number that one run lacks
    is none of the case."""
    paths = [
        write_run(tmp_path / f"r-seed{s}", settings={"seed": s}, figures={"time": [s, 3 * s]}) for s in (1, 3)
    ]
    (case,) = cases([read_run(path) for path in paths])
    assert seed_groups.spent(case, "bytes") == {1: 3000, 2: 6000}
    assert seed_groups.spent(case, "seconds") == {1: 1.5, 2: 3.0}
    assert seed_groups.spent(case, "time") == {1: 2, 2: 6}
    lines = [json.loads(line) for line in (paths[1] / "rounds.jsonl").read_text().splitlines()]
    del lines[1]["time"]
    (paths[1] / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (case,) = cases([read_run(path) for path in paths])
    assert seed_groups.spent(case, "time") == {}


def test_other_data_are_looked_for_seed_by_seed(tmp_path):
    """A seed may decide who has which pairs. Seed 2 of fedprox has not the pairs of seed 2 of feddpo."""
    runs = [
        run(tmp_path, "feddpo", 1, {"ann": 0.5}, data="one"),
        run(tmp_path, "feddpo", 2, {"ann": 0.5}, data="two"),
        run(tmp_path, "fedprox", 1, {"ann": 0.5}, data="one"),
        run(tmp_path, "fedprox", 2, {"ann": 0.5}, data="other"),
        run(tmp_path, "scaffold", 2, {"ann": 0.5}, data="two"),
        run(tmp_path, "scaffold", 3, {"ann": 0.5}, data="three", by="dirichlet"),
    ]
    assert disagreements(runs) == {3: "other data", 5: "other [data] settings"}
