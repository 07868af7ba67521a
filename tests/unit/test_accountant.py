"""What a run is said to have spent: published values, other bounds, and what does not go together."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from mpmath import mp
from typer.testing import CliRunner

from prefed.config import ConfigError, Experiment, to_toml
from prefed.config.experiment_table import load_table
from prefed.core import Key, Privacy
from prefed.engines.cohorts import draw_cohort
from prefed.privacy import Guarantee, guarantee_of
from prefed.privacy.accountant import AccountantError
from prefed.runs.privacy import plan
from prefed.runs.start_or_resume import settings_digest
from prefed.ui.cli import app

BASE = {
    "data": {"train": "pairs.jsonl", "partition": {"by": "iid", "clients": 20}},
    "model": {"name": "some/model"},
    "method": {"name": "feddpo"},
    "merge": {"weights": "uniform"},
    "rounds": 8,
}
CENTRAL = {"kind": "central", "clip": 0.5, "noise_multiplier": 1.0, "delta": 1e-5}
ALIGN = {"prompts": "x.txt", "labels": "clients", "client_judge": "utility", "generations": 3}
LOCAL = {**CENTRAL, "kind": "local"}
DISTRIBUTED = {**CENTRAL, "kind": "distributed"}


def experiment(**tables):
    return Experiment.model_validate({**BASE, **tables})


# The accountant


@pytest.mark.parametrize(
    ("noise", "epochs", "published"), [(1.3, 15, 1.19), (1.1, 60, 3.01), (0.7, 45, 7.10)]
)
def test_published_values_of_mnist(noise, epochs, published):
    """The table of TensorFlow Privacy's tutorial: batches of 256 of 60,000, δ = 1e-5. It was made with
    ε = min over α of R_α + log(1/δ)/(α − 1) (Mironov 2017, proposition 3). The Rényi divergences R_α are
    asked of our accountant, and give it, the third with 0.02 more: it asks for no order between 2 and 3. Its
    own conversion (Canonne et al. 2020) is never above."""
    pytest.importorskip("dp_accounting")
    from prefed.privacy.accountant import _one

    steps = epochs * 60_000 // 256
    guarantee = Guarantee(noise, False, "poisson", 60_000, 256)
    one = _one(guarantee)
    bound = min(r * steps + math.log(1e5) / (order - 1) for order, r in zip(one.orders, one.rdp, strict=True))
    assert published - 0.005 <= bound <= published + 0.025
    assert guarantee.epsilon(steps, 1e-5) < bound


def exact(sigma: float, delta: float) -> float:
    """The least ε of the Gaussian mechanism with noise ``sigma`` over its sensitivity: Balle and Wang 2018,
    theorem 8, δ(ε) = Φ(1/(2σ) − εσ) − e^ε Φ(−1/(2σ) − εσ), solved for ε by bisection."""
    from scipy.stats import norm

    def left(epsilon):
        a = 1 / (2 * sigma)
        return norm.cdf(a - epsilon * sigma) - math.exp(epsilon + norm.logcdf(-a - epsilon * sigma))

    low, high = 0.0, 200.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if left(middle) > delta else (low, middle)
    return high


@pytest.mark.sample
@pytest.mark.parametrize("releases", [1, 5])
@pytest.mark.parametrize("noise", [1.0, 4.0])
@pytest.mark.parametrize("kind", ["central", "local"])
def test_gaussian_releases_cost_no_less_than_they_do(kind, noise, releases):
    """T releases are one with noise over √T. Of a local upload the sensitivity is 2 clips. The Rényi bound is
    above the exact value, and not by more than 12%: half of the noise would be far outside."""
    pytest.importorskip("dp_accounting")
    guarantee = guarantee_of(Privacy(**{**CENTRAL, "kind": kind, "noise_multiplier": noise}), 20, 20)
    least = exact(noise / (2 if kind == "local" else 1) / math.sqrt(releases), 1e-5)
    assert least <= guarantee.epsilon(releases, 1e-5) <= 1.12 * least


def test_sampling_helps_where_it_is_secret_alone():
    """Poisson below known cohorts; a fixed number is a bound for replaced clients, twice as far apart."""
    pytest.importorskip("dp_accounting")
    secret = Privacy(**{**CENTRAL, "noise_multiplier": 2.0, "secret_cohorts": True})
    open_ = Privacy(**{**CENTRAL, "noise_multiplier": 2.0})
    costs = [
        guarantee_of(open_, 100, 10).epsilon(8, 1e-5),
        guarantee_of(secret, 100, 10, "poisson").epsilon(8, 1e-5),
        guarantee_of(secret, 100, 10).epsilon(8, 1e-5),
    ]
    assert costs[1] < costs[2]
    assert costs[1] < costs[0]
    whole = guarantee_of(secret, 100, 100, "poisson")
    assert (whole.sampling, whole.replaced) == ("none", False)


def test_votes_of_all_clients_are_not_amplified_by_sampling():
    """With known cohorts a release of votes is one like any other, and T of them are one with noise over √T.
    With secret ones the Rényi divergences add up: those of the rounds, and α (2/z)²/2 or α/(2 z²) a vote."""
    pytest.importorskip("dp_accounting")
    from dp_accounting.rdp import compute_epsilon

    from prefed.privacy.accountant import _one

    known = guarantee_of(Privacy(**CENTRAL), 20, 20)
    assert known.epsilon(3, 1e-5, votes=4) == known.epsilon(7, 1e-5)
    assert exact(1 / math.sqrt(7), 1e-5) <= known.epsilon(3, 1e-5, 4) <= 1.12 * exact(1 / math.sqrt(7), 1e-5)
    assert known.epsilon(0, 1e-5, 1) == known.epsilon(1, 1e-5)
    secret = Privacy(**{**CENTRAL, "noise_multiplier": 2.0, "secret_cohorts": True})
    for sampling, distance in (("poisson", 1), ("fixed", 2)):
        drawn = guarantee_of(secret, 100, 10, sampling)
        orders = np.array(_one(drawn).orders)
        divergences = 8 * _one(drawn).rdp + 3 * orders * (distance / 2) ** 2 / 2
        expected, _ = compute_epsilon(orders, divergences, 1e-5)
        assert drawn.epsilon(8, 1e-5, votes=3) == pytest.approx(expected)
        assert drawn.epsilon(11, 1e-5) < drawn.epsilon(8, 1e-5, votes=3)


def fixed_cohort_moment(order, share, distance):
    """E_Q[(P/Q)^α] of one release of a fixed cohort, bounded from above: P and Q differ in one client.

    P − Q = γ (p − p'), where p and p' are the releases whose cohort has the client, and Q = (1 − γ) r + γ p',
    where r has another client instead. So the moment is 1 + Σ_j C(α, j) γ^j E_Q[((p − p')/Q)^j], j = 2 … α.
    |x|^j / y^(j − 1) is jointly convex, so Q may become the worst r at a replaced client's distance from both
    p and p'. Then |p − p'|^j / r^(j − 1) is at most

    - the sum of |p − r|^j / r^(j − 1) and |p' − r|^j / r^(j − 1) where r is least or largest of the three;
      between them, say p' < r < p, it is at most |p − p'|^j / p'^(j − 1). So E is at most 4 times
      χ_j = E_r[|p/r − 1|^j] of two normal distributions, largest at the full distance, since nearer ones
      arise from them by scaling and adding noise;
    - (p/r)^j + (p'/r)^j, so E is at most 2 e^(j (j − 1) d² / 2).

    χ_j is the sum of (−1)^(j − i) C(j, i) e^(i (i − 1) d² / 2) for even j, and at most √(χ_(j−1) χ_(j+1)) for
    odd j.
    """
    with mp.workdps(60):

        def even(j):
            return mp.fsum(
                (-1) ** (j - i) * mp.binomial(j, i) * mp.e ** (i * (i - 1) * mp.mpf(distance) ** 2 / 2)
                for i in range(j + 1)
            )

        def term(j):
            chi = even(j) if j % 2 == 0 else mp.sqrt(even(j - 1) * even(j + 1))
            most = min(4 * chi, 2 * mp.e ** (j * (j - 1) * mp.mpf(distance) ** 2 / 2))
            return mp.binomial(order, j) * mp.mpf(share) ** j * most

        return 1 + mp.fsum(map(term, range(2, order + 1)))


def test_the_bound_of_fixed_cohorts_is_that_of_its_proof():
    """25 of 500 clients, noise of 4 clips, so two clips are half of it: ε = 2.4925 after 100 rounds at
    δ = 1e-5. Without the first of the two bounds for j > 2, it would be 2.7277. Both are above the divergence
    of one client at +1 and −1 clip among clients that send 0, here by integration."""
    pytest.importorskip("dp_accounting")
    from prefed.privacy.accountant import _one

    guarantee = Guarantee(4.0, True, "fixed", 500, 25)
    one = _one(guarantee)
    x = np.linspace(-60.0, 60.0, 200_001)
    zero, plus, minus = (np.exp(-((x - at) ** 2) / 32) / math.sqrt(32 * math.pi) for at in (0, 1, -1))
    p, q = (0.95 * zero + 0.05 * other for other in (plus, minus))
    for order, divergence in zip(one.orders, one.rdp, strict=True):
        bound = float(mp.log(fixed_cohort_moment(order, 0.05, 0.5))) / (order - 1)
        assert divergence == pytest.approx(bound, rel=1e-9)
        least = math.log(np.trapezoid(p * (p / q) ** (order - 1), x)) / (order - 1)
        assert least < bound
    assert guarantee.epsilon(100, 1e-5) == pytest.approx(2.4925, abs=5e-5)


def test_the_search_gives_the_least_noise():
    pytest.importorskip("dp_accounting")
    guarantee = guarantee_of(Privacy(**CENTRAL), 20, 20)
    noise = guarantee.noise_for(4.0, 8, 1e-5)
    costs = [Guarantee(n, False, "none", 20, 20).epsilon(8, 1e-5) for n in (noise, noise - 2e-4)]
    assert costs[0] <= 4.0 < costs[1]
    with pytest.raises(AccountantError, match="raise epsilon or delta"):
        guarantee.noise_for(1e-9, 8, 1e-300)


def test_no_release_costs_nothing_and_no_noise_has_no_bound():
    guarantee = guarantee_of(Privacy(kind="central", noise_multiplier=0.0), 20, 5)
    assert guarantee.epsilon(0, 1e-5) == 0.0
    assert guarantee.epsilon(3, 1e-5) is None


# Before a run


def test_a_plan_counts_what_a_run_will(tmp_path):
    """Of 20 clients 5 a round, 8 rounds: the most visits by the cohorts that the seed gives."""
    counts = [0] * 20
    for number in range(1, 9):
        for index in draw_cohort(Key(42).at("round", number), 20, 5, "fixed"):
            counts[index] += 1
    _, releases = plan(experiment(privacy=CENTRAL, cohort={"size": 5}))
    assert releases == max(counts) < 8
    secret = {**CENTRAL, "secret_cohorts": True}
    assert plan(experiment(privacy=secret, cohort={"size": 5}))[1] == 8
    assert plan(experiment(privacy=CENTRAL, evaluate={"unseen": 2}))[0].clients == 18
    column = {"train": "pairs.jsonl", "partition": {"by": "column", "column": "who"}}
    for changes, message in (
        ({}, "no kind"),
        ({"privacy": LOCAL, "fleet": {}}, "decides how often clients take part"),
        ({"privacy": CENTRAL, "data": column}, "set it with --clients"),
        ({"privacy": CENTRAL, "cohort": {"size": 30}}, "size = 30, but 20 clients train"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan(experiment(**changes))


def test_the_command_looks_for_noise(tmp_path):
    pytest.importorskip("dp_accounting")
    file = tmp_path / "experiment.toml"
    file.write_text(to_toml(experiment(privacy=CENTRAL)))
    shown = CliRunner().invoke(app, ["privacy", str(file), "--epsilon", "4", "--json"])
    got = json.loads(shown.output)
    assert got["epsilon"] == pytest.approx(4.0, abs=2e-3)
    assert got["epsilon"] <= 4.0
    assert (got["releases"], got["adjacency"]) == (8, "one client sends nothing")
    got = CliRunner().invoke(app, ["privacy", str(file), "--set", "privacy.noise_multiplier=0"]).output
    assert "unbounded, without noise" in got
    # Votes for labels are further releases, as many as generations.
    file.write_text(to_toml(experiment(privacy=CENTRAL, align=ALIGN, method={"name": "fedbis"})))
    promised = guarantee_of(Privacy(**CENTRAL), 20, 20)
    got = json.loads(CliRunner().invoke(app, ["privacy", str(file), "--json"]).output)
    assert (got["votes"], got["epsilon"]) == (3, pytest.approx(promised.epsilon(8, 1e-5)))
    assert got["epsilon_with_votes"] == pytest.approx(promised.epsilon(11, 1e-5))
    got = CliRunner().invoke(app, ["privacy", str(file)]).output
    assert f"votes             epsilon {promised.epsilon(11, 1e-5):.4g} with those for labels of 3 gen" in got
    # A federation's file: the sites have the data.
    tables = experiment(privacy=CENTRAL).tables()
    del tables["data"]
    file.write_text(tomli_w.dumps(tables))
    asked = ["privacy", str(file), "--epsilon", "4", "--json"]
    assert "only the sites know the number" in " ".join(CliRunner().invoke(app, asked).output.split())
    assert json.loads(CliRunner().invoke(app, [*asked, "--clients", "20"]).output) == json.loads(shown.output)


def test_the_table_of_noise_has_the_epsilons_of_its_page():
    """All hundred clients in each of 8 rounds. Local noise counts half: at z = 4 it is worth central 2."""
    pytest.importorskip("dp_accounting")
    folder = Path(__file__).resolve().parents[2] / "experiments" / "privacy"
    page = (folder / "README.md").read_text("utf-8")
    cells = load_table(folder / "noise.toml").cells(folder / "noise.toml")
    got = {}
    for name in cells.keys() - {"plain", "clip"}:
        promised, releases = plan(planned := cells[name].experiment())
        got[name] = promised.epsilon(releases, planned.privacy.delta)
    assert got.pop("local-4") == got["central-2"]
    got = dict(sorted(got.items()))
    assert list(got) == ["central-1", "central-2", "central-4", "central-8"]
    assert f"| {', '.join(f'{epsilon:.3g}' for epsilon in got.values())} |" in page
    assert all(
        cell.experiment() for cell in load_table(folder / "clip.toml").cells(folder / "clip.toml").values()
    )


# What goes together

REFUSED = [
    ({"privacy": {"clip": 1.0}}, "clip requires kind"),
    ({"privacy": {"kind": "local"}}, "kind requires noise_multiplier"),
    ({"privacy": {"kind": "local", "noise_multiplier": 1.0, "delta": 1e-5}}, "requires clip"),
    ({"privacy": {"kind": "local", "noise_multiplier": 1.0, "clip": 1.0}}, "requires delta"),
    ({"privacy": {**LOCAL, "clip": 1e300, "noise_multiplier": 1e10}}, r"clip \* noise_multiplier is inf"),
    ({"privacy": {**LOCAL, "clip": 5e-324, "noise_multiplier": 0.4}}, r"clip \* noise_multiplier is 0"),
    ({"method": {"name": "fedvpl", "posterior_clip": 1e-40, "posterior_noise": 1.0}}, "noise is 1e-40"),
    ({"privacy": {**LOCAL, "colluders": 1}}, "colluders requires kind = 'distributed'"),
    ({"privacy": LOCAL, "merge": {}}, "set 'uniform'"),
    ({"privacy": LOCAL, "evaluate": {"diagnose": 1}}, "gradients without noise"),
    ({"privacy": CENTRAL, "merge": {"weights": "uniform", "ranks": {"a": 1}}}, "different shapes"),
    ({"privacy": {**LOCAL, "secret_cohorts": True}}, "secret_cohorts requires kind = 'central'"),
    ({"privacy": {**DISTRIBUTED, "secret_cohorts": True}}, "with 'distributed' the server knows who sent"),
    ({"privacy": {**DISTRIBUTED, "noise_multiplier": 0.0}}, "two sums that differ by one site"),
    ({"privacy": DISTRIBUTED, "merge": {"weights": "uniform", "rule": "median"}}, "needs individual uploads"),
    ({"privacy": LOCAL, "method": {"name": "feddpo", "schedule": "plateau"}}, "plateau"),
    ({"privacy": CENTRAL, "stop": {}}, r"\[stop\] .* no noise"),
    *(
        ({"privacy": LOCAL, "method": {"name": name}}, f"{name} does not support differential privacy: ")
        for name in ("centralized", "local", "fedbiscuit")
    ),
    *(
        ({"privacy": CENTRAL, "method": {"name": n}}, f": {n}: its server")
        for n in ("fedamp", "fedvpl", "fedvpa")
    ),
    *(
        ({"privacy": CENTRAL, "merge": {"weights": "uniform", "rule": rule}}, "needs individual uploads")
        for rule in ("median", "trimmed_mean", "krum", "multi_krum", "norm_clip")
    ),
    *(
        ({"privacy": CENTRAL, "merge": {"weights": "uniform", "lora": rule}}, "needs the product of each")
        for rule in ("fedex", "flexlora", "flora")
    ),
    ({"privacy": CENTRAL, "method": {"name": "fedsdg"}}, "alignment weights each upload"),
    ({"privacy": CENTRAL, "method": {"name": "decdpo"}}, "party has the mean"),
    ({"privacy": CENTRAL, "fleet": {"max_delay": 1}}, "twice in a round"),
    ({"cohort": {"sampling": "poisson"}}, "requires size or fraction: set one of them"),
    ({"cohort": {"sampling": "poisson", "size": 2}, "fleet": {}}, "become free"),
]


def test_what_noise_cannot_hide_is_refused(subtests):
    for tables, words in REFUSED:
        with subtests.test(tables=tables, words=words), pytest.raises(ValueError, match=words):
            experiment(**tables)


def test_all_other_methods_go_with_a_kind():
    """And local noise with every merge rule: what a server computes from noised uploads reveals nothing
    more."""
    from prefed.methods import METHODS

    for name, kind in METHODS.items():
        if kind.reason("NO_NOISE"):
            continue
        experiment(privacy=LOCAL, method={"name": name})
        if not (kind.serverless or kind.reason("SINGLE_UPLOADS")):
            more = {"alignment": "off"} if name == "fedsdg" else {}
            for privacy in (CENTRAL, DISTRIBUTED):
                experiment(privacy=privacy, method={"name": name, **more})
    experiment(privacy=LOCAL, merge={"weights": "uniform", "rule": "median", "lora": "ffa"}, fleet={})


def test_the_settings_digest_covers_privacy_and_sampling():
    tables = experiment().tables()
    whole = {**BASE, "privacy": {"minimum_pairs": 0}}
    assert settings_digest(Experiment.model_validate(whole).tables()) == settings_digest(tables)
    private = experiment(privacy=CENTRAL, cohort={"size": 2, "sampling": "poisson"})
    assert Experiment.parse(to_toml(private)) == private
    assert settings_digest(private.tables()) != settings_digest(tables)


def test_trust_models_are_compared_at_one_epsilon(tmp_path):
    """z = 1, C = 0.5 and 20 clients at five sites, of which one colludes: the noise on the mean is zC/m,
    zC √(5/4)/m, and 2 z C/√m where each client adds its own and may be replaced. Under distributed noise
    an evaluation is a release, too: one a round, so the others reach the same ε with 1/√2 of the noise. Its
    metrics are √3/2 long."""
    pytest.importorskip("dp_accounting")
    file = tmp_path / "experiment.toml"
    file.write_text(to_toml(experiment(privacy={**DISTRIBUTED, "sites": 5})))
    models = json.loads(CliRunner().invoke(app, ["privacy", str(file), "--json"]).stdout)["trust_models"]
    assert [model["kind"] for model in models] == ["none", "central", "distributed", "local"]
    expected = (0.0, 0.5 / 20 / 2**0.5, 0.5 / 20 * math.sqrt(5 / 4), 2 * 0.5 / math.sqrt(20) / 2**0.5)
    for model, noise in zip(models, expected, strict=True):
        assert model["noise"] == pytest.approx(noise, rel=1e-3)
    assert [model["bytes_up"] for model in models] == [80, 80, 20, 80]
    assert len({model["epsilon"] for model in models[1:]}) == 1
    assert models[2]["trusted"] == "the site; 1 of 5 may collude"
    shown = CliRunner().invoke(app, ["privacy", str(file)]).stdout
    rounds, noise = experiment().rounds, (3 * 5 / 4) ** 0.5 / 2 / 20
    assert f"covered: {rounds} of the releases are means" in shown
    assert f"the noise on each is {noise:.2g}\n" in shown
    assert [line.split()[0] for line in shown.splitlines()[-5:-1]] == [model["kind"] for model in models]
