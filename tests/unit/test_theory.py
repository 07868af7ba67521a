"""The calculator: numbers worked out by hand, slips that can be shown, and the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from finished import write_run
from prefed.theory import Constants, statements
from prefed.ui.cli import app

GIVEN = Constants(
    smoothness=2,
    zeta_g2=3,
    kappa2=5,
    gap=7,
    clients=4,
    cohort=2,
    local_steps=3,
    rounds=10,
    lr=0.01,
    max_delay=2,
    rho=0.6,
    epsilon=1,
)


def known(constants=GIVEN):
    return {statement.name: statement for statement in statements(constants)}


def values(terms):
    return list(terms.values())


def close(*numbers):
    return pytest.approx(list(numbers), rel=1e-9)


def test_closed_forms_of_the_constants():
    """β = ½, H = 6, ζ_φ² = 2, C₀ = 3, ς = ¼: C_mix = 1 + 1.5/0.75 = 3, L = (¾ + 1) · 12, ζ_g² = 3 · 12."""
    constants = Constants(beta=0.5, horizon=6, zeta_phi2=2, c0=3, varsigma=0.25)
    assert (constants.c_mix, constants.l, constants.noise) == close(3, 21, 36)
    assert constants.diversity == constants.noise
    assert Constants(smoothness=4, zeta_g2=0, kappa2=1).l == 4


def test_theorem_5_1():
    """14/0.3; 8·2·0.01·3/2; 16·4·1e-4·3·5; 16·4·1e-4·9·3/2. The limit is 2/384, and the step is above it."""
    theorem = known()["theorem 5.1"]
    assert values(theorem.stated.terms) == close(14 / 0.3, 0.24, 0.096, 0.0864)
    assert theorem.stated.total == pytest.approx(14 / 0.3 + 0.4224)
    assert values(theorem.derived.terms) == close(14 / 0.3, 10, 0.0432, 0.06)
    assert (theorem.limit[1], theorem.allowed) == (pytest.approx(2 / 384), False)


def test_rounds_of_theorem_5_1():
    """At η = 0.01 the stated bound needs R > (1400/3)/(1 − 0.4224) = 807.9…; ε = 0.42 is out of reach."""
    assert known()["theorem 5.1"].rounds == 808
    assert known(GIVEN.model_copy(update={"rounds": 808}))["theorem 5.1"].stated.total <= 1
    assert known(GIVEN.model_copy(update={"rounds": 807}))["theorem 5.1"].stated.total > 1
    assert known(GIVEN.model_copy(update={"epsilon": 0.42}))["theorem 5.1"].rounds is None


def test_corollary_5_2():
    corollary = known()["corollary 5.2"]
    assert values(corollary.stated.terms) == close(14 / 0.3, 0.03, 0.048)
    assert values(corollary.derived.terms) == close(14 / 0.3, 10, 0.0432, 0.03)
    assert (corollary.limit[1], corollary.allowed) == (pytest.approx(1 / 48), True)


def test_theorem_5_4():
    """C_q = 1e-4 · 3 · 8. The limit is 2/(32 · 2 · 4 · 3 · 3)."""
    theorem = known()["theorem 5.4"]
    assert values(theorem.stated.terms) == close(14 / 0.3, 0.03, 0.075, 4.8e-5)
    assert theorem.stated.total is None
    assert theorem.limit[1] == pytest.approx(2 / 2304)
    assert known(GIVEN.model_copy(update={"max_delay": 0}))["theorem 5.4"].limit[1] == pytest.approx(2 / 768)


def test_theorem_5_5():
    theorem = known()["theorem 5.5"]
    assert values(theorem.stated.terms) == close(7.5, (3 / 20) ** 0.5)
    assert values(theorem.derived.terms) == close(22.5, 3 / 20**0.5)
    assert (theorem.limit, theorem.allowed, theorem.rounds) == (None, True, None)


def test_theorem_6_1():
    """1 − ρ² = 0.64: 14/0.1; 32·4e-4·3/0.64; 16·4e-4·5/0.64. What it lacks is 2·0.01·3/4."""
    theorem = known()["theorem 6.1"]
    assert values(theorem.stated.terms) == close(140, 0.06, 0.05)
    assert values(theorem.derived.terms)[3] == pytest.approx(0.015)
    assert theorem.limit[1] == pytest.approx(0.1)
    assert theorem.rounds == 1574  # 1400/0.89 = 1573.03…


def test_slip_the_drift_of_corollary_5_2():
    """Full participation, exact gradients, N = 2, L = 1, η = 1/(8LE), E = 1,000: F₁ = ½(θ − 1)², F₂ = θ.
    FedAvg stands still where its two displacements cancel. There the squared gradient is about 0.001, and κ²
    about 1: above 8L²η²Eκ² = κ²/8,000, below 8L²η²E²κ² = κ²/8. The first term vanishes with R → ∞."""
    steps = 1000
    rate = 1 / (8 * steps)
    theta = 0.0
    for _ in range(400):
        near = 1 + (theta - 1) * (1 - rate) ** steps
        theta = (near + theta - rate * steps) / 2
    gradients = np.array([theta - 1, 1.0])
    squared, diversity = gradients.mean() ** 2, gradients.var()
    constants = Constants(
        smoothness=1, zeta_g2=0, kappa2=diversity, clients=2, cohort=2, local_steps=steps, lr=rate, gap=0
    )
    corollary = known(constants)["corollary 5.2"]
    assert corollary.allowed
    assert squared > 5 * corollary.stated.total
    assert squared < corollary.stated.total * steps


def test_slip_the_noise_of_theorem_6_1():
    """Complete graph, the same quadratic ½θ² at ten nodes, noise of variance 1: the mean's variance goes to
    η/(N(2 − η)), which is above 32η²ζ_g² for small η. With the missing term the bound holds."""
    rate, variance = 1e-3, 0.0
    for _ in range(20_000):
        variance = (1 - rate) ** 2 * variance + rate**2 / 10
    constants = Constants(smoothness=1, zeta_g2=1, kappa2=0, clients=10, rho=0, lr=rate, gap=0, local_steps=1)
    theorem = known(constants)["theorem 6.1"]
    assert theorem.allowed
    assert theorem.stated.total < variance < theorem.derived.total


def test_slip_lemma_d_2():
    """Nodes that differ along W's slowest direction, and gradients that push the same way: (ρ + ηc)² is above
    ρ² + 2η²c² for ηc < 2ρ, and below 2ρ² + 2η²c²."""
    rho, push = 0.8727, 0.5
    after = (rho + push) ** 2
    assert rho**2 + 2 * push**2 < after < 2 * rho**2 + 2 * push**2


def test_slip_upper_and_lower_bound_contradict_each_other():
    """E = 1, S = N: the upper bound is as small as one likes, the lower one is κ²/N times a constant."""
    for rate in (1e-3, 1e-6, 1e-9):
        constants = Constants(local_steps=1, cohort=5, lr=rate, rounds=10**30)
        both = known(constants)
        upper, lower = both["corollary 5.2"].stated.total, values(both["theorem 5.5"].stated.terms)[0]
    assert upper < 1e-5 * lower


def test_a_cohort_is_of_clients():
    with pytest.raises(ValidationError, match=r"cohort = 6 .* clients = 5"):
        Constants(cohort=6)


def run(*words):
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, ["theory", *words])


def test_the_command_takes_rho_of_a_graph():
    content = json.loads(run("--graph", "star", "--json").output)
    assert content["constants"]["rho"] == pytest.approx(0.8)
    assert content["constants"]["C_mix"] == 1
    assert [statement["name"] for statement in content["statements"]] == [*known()]


def test_a_run_that_was_not_diagnosed_is_refused(tmp_path):
    result = run("--run", str(write_run(tmp_path / "run")))
    assert result.exit_code == 1
    assert "has no diagnostics of a shared model: run a method that shares one" in result.output
