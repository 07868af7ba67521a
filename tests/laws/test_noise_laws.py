"""Clipping and noise: what one client can change, and what they change where they have nothing to do."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

import toy
from prefed.core import Download, Entry, Exchange, Key, Layout, Privacy, Round, Tensors, Upload
from prefed.engines.validation import expected_groups, withhold_scalars
from prefed.methods import METHODS
from prefed.privacy import noised_mean, noised_votes, privatize, vote_noise
from prefed.privacy.clip_and_noise import normal
from prefed.store import RunReader
from prefed.testing import Problem, QuadraticTrainer

LAYOUT = Layout((Entry("a", (3,), "lora"), Entry("b", (2,), "head")))
STEP = Layout((Entry("a", (3,), "lora"),))
LAYOUTS = {"model": LAYOUT, "control": STEP}
EXCHANGE = Exchange("train", None, None, None, origins={"control": 0.0})  # type: ignore[arg-type]
NUMBERS = st.floats(-1e4, 1e4, width=32)


@st.composite
def groups(draw):
    """A group that is measured from what was sent, and one of steps; far from each other in size."""
    scale = draw(st.sampled_from([1e-3, 1.0, 1e3]))
    flat = draw(st.lists(NUMBERS, min_size=8, max_size=8))
    return {
        "model": Tensors(LAYOUT, torch.tensor(flat[:5]) * scale),
        "control": Tensors(STEP, torch.tensor(flat[5:]) / scale),
    }


def upload(client, tensors):
    return Upload(client, 1.0, tensors, {}, 1)


def private(kind="central", clip=0.5, noise=0.0):
    return Privacy(kind=kind, clip=clip, noise_multiplier=noise, delta=1e-5)


def flat(tensors):
    return torch.cat([tensors[name].flat.double() for name in sorted(tensors)])


@given(sent=groups(), own=groups(), clip=st.floats(1e-3, 1e3))
def test_a_local_update_is_at_most_as_long_as_the_clip(sent, own, clip):
    """Over both groups together, in float64; ``control`` is a step, so what was sent under its name does not
    count. A shorter update goes out as it is, bit for bit, and direction is kept."""
    # In float64 no rounding of the result to the model's dtype stands in the way of the law.
    sent = {name: group.to(torch.float64) for name, group in sent.items()}
    own = {name: group.to(torch.float64) for name, group in own.items()}
    got = privatize(upload("a", own), Download(sent), EXCHANGE, private("local", clip), None).tensors
    zero = {"model": sent["model"], "control": own["control"] * 0.0}
    before, after = flat(own) - flat(zero), flat(got) - flat(zero)
    size = float(flat(sent).abs().max() + flat(own).abs().max())
    assert float(after.norm()) <= clip + 1e-12 * (1 + size)
    if float(before.norm()) <= clip:
        assert all(got[name].equal(own[name]) for name in own)
    else:
        assert torch.allclose(after, before * (clip / before.norm()), atol=1e-11 * (1 + size), rtol=1e-9)


@given(
    sent=groups(), cohort=st.lists(groups(), min_size=1, max_size=5), other=groups(), size=st.integers(1, 8)
)
def test_one_client_moves_the_sum_by_one_clip_or_two(sent, cohort, other, size):
    """Two cohorts differ by one client's upload. Without it the mean is at most C/m away, with any other
    upload in its place at most 2 C/m: m is the cohort's size, also where another number of uploads came."""
    clip, double = 0.5, lambda tensors: {name: group.to(torch.float64) for name, group in tensors.items()}
    uploads = [upload(str(k), double(tensors)) for k, tensors in enumerate(cohort)]

    def mean(those):
        found = noised_mean(those, Download(double(sent)), EXCHANGE, LAYOUTS, size, private(clip=clip), None)
        return flat(found)

    scale = 1e-10 * (1 + float(flat(sent).abs().max()))
    whole, without = mean(uploads), mean(uploads[1:])
    replaced = mean([upload("0", double(other)), *uploads[1:]])
    assert float((whole - without).norm()) <= clip / size + scale
    assert float((whole - replaced).norm()) <= 2 * clip / size + scale
    assert float((without - replaced).norm()) <= clip / size + scale


def test_opposed_updates_reach_both_bounds():
    """So the bounds are no tighter than they may be: ±(3, 4, 0, …) is cut to length 1."""
    sent = {"model": Tensors.zeros(LAYOUT, torch.float64), "control": Tensors.zeros(STEP, torch.float64)}
    far = {**sent, "model": Tensors(LAYOUT, torch.tensor([3.0, 4.0, 0.0, 0.0, 0.0], dtype=torch.float64))}
    near = {name: group * -1.0 for name, group in far.items()}

    def mean(*those):
        uploads = [upload(str(k), tensors) for k, tensors in enumerate(those)]
        return flat(noised_mean(uploads, Download(sent), EXCHANGE, LAYOUTS, 4, private(clip=1.0), None))

    assert float((mean(far) - mean()).norm()) == pytest.approx(1 / 4)
    assert float((mean(far) - mean(near)).norm()) == pytest.approx(2 / 4)


def test_the_noise_is_as_large_as_it_says():
    """z = 2 and C = 0.5 give each number of an upload a deviation of 1, and the mean of 4 clients 1/4. The
    relative error of a deviation from n draws is about 1/√(2n), 0.5% here: 2.5% is five of them."""
    layout = Layout((Entry("a", (20_000,), "lora"),))
    zero = {"model": Tensors.zeros(layout)}
    some = private("local", 0.5, 2.0)
    local = privatize(upload("a", zero), Download(zero), EXCHANGE, some, Key(1)).tensors["model"].flat
    assert float(local.std()) == pytest.approx(1.0, rel=0.025)
    means = noised_mean([], Download(zero), EXCHANGE, {"model": layout}, 4, private(noise=2.0), Key(1))
    assert float(means["model"].flat.std()) == pytest.approx(0.25, rel=0.025)
    assert means["model"].flat.dtype == torch.float32


def votes_of_clients(pairs):
    return st.lists(st.lists(st.integers(-3, 3), min_size=pairs, max_size=pairs), min_size=2)


@given(votes=st.integers(1, 12).flatmap(votes_of_clients))
def test_one_client_moves_a_sum_of_votes_by_one_clip_or_two(votes):
    """C = √n for n pairs, also if what a client sends are no votes; the others make no difference."""
    first, other, *rest = np.array(votes)
    bound = math.sqrt(len(first)) + 1e-9
    total, without, replaced = (
        noised_votes(np.stack([own, *rest]), private(), None) for own in (first, 0 * first, other)
    )
    assert np.linalg.norm(total - without) <= bound
    assert np.linalg.norm(total - replaced) <= 2 * bound


def test_unanimous_clients_reach_the_bound_of_votes():
    """One vote a client on each of 9 pairs moves their sum by 3, and by 6 against it."""
    ones = np.ones((1, 9))
    total, other = (noised_votes(own, private(), None) for own in (ones, -ones))
    assert (np.linalg.norm(total), np.linalg.norm(total - other)) == (3, 6)


@pytest.mark.parametrize(("kind", "deviation"), [("central", 400.0), ("local", 1200.0)])
def test_the_noise_of_votes_is_as_large_as_it_says(kind, deviation):
    """z = 2 on 40,000 pairs: 2 √40,000, and √9 times as much if each of 9 clients adds its own."""
    some = private(kind, noise=2.0)
    noise = noised_votes(np.zeros((9, 40_000)), some, Key(1))
    assert noise.std() == pytest.approx(deviation, rel=0.025)
    assert vote_noise(some, 9, 40_000) == pytest.approx(deviation)
    assert (noised_votes(np.zeros((9, 40_000)), some, Key(2)) == noise).mean() < 0.01


@pytest.mark.parametrize("key", [Key(5), None])
def test_draws_are_normal(key):
    """Kolmogorov and Smirnov's test, which a sample of N(0, 1) fails once in a million."""
    draws = normal(70_000, key)
    assert scipy.stats.kstest(draws.numpy(), "norm").pvalue > 1e-6
    assert draws.dtype == torch.float64


def test_secure_draws_differ_and_named_ones_do_not():
    assert normal(8, Key(1)).equal(normal(8, Key(1)))
    assert not set(normal(2000, None).tolist()) & set(normal(2000, None).tolist())


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(broken):
    """A clip makes no finite number of it, so the upload is refused where it is validated."""
    own = {"model": Tensors(LAYOUT, torch.tensor([broken, 1.0, 2.0, 3.0, 4.0]))}
    sent = Download({"model": Tensors.zeros(LAYOUT)})
    for noise in (0.0, 1.0):
        got = privatize(upload("a", own), sent, EXCHANGE, private("local", 1.0, noise), None)
        assert not got.tensors["model"].isfinite()


@pytest.mark.parametrize(("far", "passes"), [(2.0**20, True), (2.0**52, False)])
def test_no_download_makes_a_step_outgrow_its_bound(far, passes):
    """The client moves one number by 3 and the clip is 0.6. Near 2^52 float64 has only whole numbers, and
    a step of 0.6 is rounded to 1. Near 2^20 its spacing is 2^-32."""
    sent = {"model": Tensors(LAYOUT, torch.full((5,), far, dtype=torch.float64))}
    own = {"model": Tensors(LAYOUT, torch.tensor([far + 3.0, *[far] * 4], dtype=torch.float64))}
    got = privatize(upload("a", own), Download(sent), EXCHANGE, private("local", 0.6), None).tensors["model"]
    assert got.isfinite() == passes
    if passes:
        assert float((got.flat - sent["model"].flat)[0]) == pytest.approx(0.6, abs=2.0**-32)


PLAIN = [
    *[(name, kind) for name in ("feddpo", "fedper", "ditto", "pfedme") for kind in ("central", "local")],
    ("scaffold", "local"),
    ("fedamp", "local"),
]


@pytest.mark.parametrize(("method", "kind"), PLAIN)
def test_without_noise_and_clip_a_run_is_the_plain_one(method, kind, tmp_path):
    """Bit for bit: the server's state and what clients predict with."""
    options = {"method": method, "merge": {"weights": "uniform"}, "rounds": 3}
    plain = toy.run(tmp_path / "plain", **options)
    same = toy.run(tmp_path / "private", privacy={"kind": kind, "noise_multiplier": 0.0}, **options)
    assert all(group.equal(same.tensors[name]) for name, group in plain.tensors.items())
    records = [RunReader(tmp_path / name).rounds() for name in ("plain", "private")]
    for one, other in zip(*records, strict=True):
        assert one["evaluation"] == other["evaluation"]
        assert (other["loss"], other["epsilon"]) == (None, None)


def test_scaffolds_central_control_variate_is_the_plain_one(tmp_path):
    """c moves by Σ p_i Δc_i, a sum of single steps in another order here: equal within rounding."""
    options = {"method": "scaffold", "merge": {"weights": "uniform"}, "rounds": 3}
    plain = toy.run(tmp_path / "plain", **options)
    same = toy.run(tmp_path / "private", privacy={"kind": "central", "noise_multiplier": 0.0}, **options)
    for name, group in plain.tensors.items():
        assert torch.allclose(group.flat, same.tensors[name].flat, rtol=1e-12, atol=1e-12)


REASONS = ("NO_NOISE", "SINGLE_UPLOADS")
REFUSE = {name for name, kind in METHODS.items() if kind.serverless or any(map(kind.reason, REASONS))}
"""Methods that refuse central noise, see tests/unit/test_accountant.py."""
FEWER = {"fedsdg": {"alignment": "off"}}


@pytest.mark.parametrize("name", sorted(set(METHODS) - REFUSE))
def test_all_that_travels_moves_by_one_clip_a_client(name):
    """In every exchange of a round, whatever one client sends in any tensor of any group, all groups together
    move by at most C/m if it is left out, and by 2 C/m if it is replaced. Both are reached, so no tensor has
    a clip of its own. What a client sends is exactly what is clipped, a client that learns nothing sends a
    step of 0, and neither weights nor numbers travel."""
    private = Privacy(kind="central", clip=0.5, noise_multiplier=0.0)
    problem = Problem(METHODS[name], {"lr": 1e-10, "schedule": "constant", **FEWER.get(name, {})})
    method, start, clients = problem.build(), problem.initial, problem.clients
    server, first = method.init_server(start), min(clients)
    now = Round(1, 3, Key(0), dict.fromkeys(clients, 1.0), private)
    exchanges = [exchange for exchange in method.exchanges if exchange.due(1)]
    assert exchanges
    for exchange in exchanges:
        layouts = expected_groups(first, exchange, method.ownership, start.layout, now)
        sent = {client: exchange.send(server, client, now) for client in clients}
        assert all(same_tensors(sent[first].tensors, each.tensors) for each in sent.values())
        trainers = {
            client: QuadraticTrainer(client, data, now, Key(0), method.ownership, start)
            for client, data in clients.items()
        }
        honest = [
            withhold_scalars(
                exchange.work(trainer, method.init_client(start, client), sent[client])[0],
                client,
                exchange,
                now,
            )
            for client, trainer in trainers.items()
        ]
        for each in honest:
            assert {group: tensors.layout for group, tensors in each.tensors.items()} == dict(layouts)
            assert (each.weight, each.scalars) == (1.0, {})

        def mean(those, exchange=exchange, layouts=layouts, sent=sent):
            return flat(noised_mean(those, sent[first], exchange, layouts, len(clients), private, None))

        def liar(group, entry, size, first_upload=honest[0]):
            tensors = first_upload.tensors[group].clone()
            tensors[entry].add_(size)
            return replace(first_upload, tensors={**first_upload.tensors, group: tensors})

        nothing, step = mean([]), private.clip / len(clients)
        if "control" not in layouts:
            assert float((mean(honest) - nothing).norm()) < 1e-6
        for group, layout in layouts.items():
            for entry in layout.names:
                far, near = liar(group, entry, 1e6), liar(group, entry, -1e6)
                moved = mean([far, *honest[1:]])
                assert float((moved - mean(honest[1:])).norm()) == pytest.approx(step, rel=1e-6)
                assert float((moved - mean([near, *honest[1:]])).norm()) == pytest.approx(2 * step, rel=1e-5)


def same_tensors(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
