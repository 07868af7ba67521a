"""Laws of merging, over random small federations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from prefed.core import Entry, Key, Layout, Round, Tensors, Upload
from prefed.merge import (
    Aggregator,
    MergeConfig,
    ServerOptimizer,
    alignment_weights,
    distance_attention,
    similarity_attention,
)
from prefed.merge.lora import residuals, stacked
from prefed.merge.means_distances import weighted_mean
from prefed.merge.rules import coordinate_median, trimmed_mean

RANK, INNER, OUTER = 2, 4, 3
A, B = Entry("lora/0/q/A", (RANK, INNER), "lora", 0, "A"), Entry("lora/0/q/B", (OUTER, RANK), "lora", 0, "B")
HEAD, W = Entry("head/W", (2,), "head"), Entry("residual/0/q/W", (OUTER, INNER), "residual", 0)
SENT, WHOLE = Layout((A, B, HEAD)), Layout((A, B, HEAD, W))
SCALING = 2.0

seeds = st.integers(0, 2**32 - 1)
finite = st.floats(-(2.0**100), 2.0**100, width=32)


def draw_model(generator: torch.Generator, layout: Layout = SENT) -> Tensors:
    return Tensors(layout, torch.randn(layout.size, generator=generator))


@st.composite
def federations(draw: st.DrawFn, least: int = 1, most: int = 7) -> tuple[Tensors, list[Upload], Round]:
    """A server's tensors, replies of some clients in a random order, and the round."""
    generator = torch.Generator().manual_seed(draw(seeds))
    sizes = draw(st.lists(st.integers(1, 50), min_size=least, max_size=most))
    uploads = [
        Upload(f"client-{k}", float(size), {"model": draw_model(generator)}, {"loss": size / 7}, sent_at=1)
        for k, size in enumerate(sizes)
    ]
    weights = {upload.client: upload.weight for upload in uploads} | {"absent": 3.0}
    return draw_model(generator, WHOLE), draw(st.permutations(uploads)), Round(1, 5, Key(0), weights)


def configs() -> list[MergeConfig]:
    """Every combination of rules that is not refused."""
    valid = []
    for rule, weights, lora, optimizer in product(
        ("mean", "median", "trimmed_mean", "krum", "multi_krum", "norm_clip"),
        ("samples", "uniform", "mass", "qffl", "afl"),
        ("fedit", "fedex", "flexlora", "flora"),
        ("none", "fedavgm", "fedadam"),
    ):
        table: dict[str, Any] = {
            "rule": rule,
            "weights": weights,
            "lora": lora,
            "optimizer": {"name": optimizer},
            "liars": 0,
        }
        try:
            valid.append(MergeConfig(**table))
        except ValueError:
            continue
    return valid


CONFIGS = configs()


def same(first: Tensors, second: Tensors) -> bool:
    """Equal bit for bit, signs of zero included."""
    return first.layout == second.layout and torch.equal(
        first.flat.view(torch.int32), second.flat.view(torch.int32)
    )


def test_combinations_are_many() -> None:
    """6 rules × 5 weights × (fedit with 3 optimisers + fedex + flexlora + flora), less: mass, qffl and afl
    with the four rules that drop weights, 3 · 4 · 6; and, under the other two, median and trimmed_mean with
    the three rules that merge products, 12."""
    assert len(CONFIGS) == 6 * 5 * 6 - 3 * 4 * 6 - 12


@given(federations(least=3), st.sampled_from(CONFIGS), st.randoms(use_true_random=False))
def test_order_of_replies_changes_no_bit(
    federation: tuple[Tensors, list[Upload], Round], config: MergeConfig, random: Any
) -> None:
    model, uploads, now = federation
    aggregator = Aggregator(config, WHOLE, SCALING)
    state = aggregator.init(model)
    first, one = aggregator.merge(state, uploads, now)
    random.shuffle(uploads)
    second, other = aggregator.merge(state, uploads, now)
    assert all(same(first.tensors[name], second.tensors[name]) for name in first.tensors)
    assert (first.values, one) == (second.values, other)


@given(st.lists(finite, min_size=1, max_size=4), st.lists(st.floats(0, 1e6), min_size=1, max_size=9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_mean_of_equals_is_that_value(dtype: torch.dtype, numbers: list[float], weights: list[float]) -> None:
    """Bit for bit, whatever the weights, in any dtype."""
    if sum(weights) == 0:
        weights[0] = 1.0
    value = Tensors(Layout((Entry("x", (len(numbers),), "lora"),)), torch.tensor(numbers, dtype=dtype))
    mean = weighted_mean([value] * len(weights), [weight / sum(weights) for weight in weights])
    assert torch.equal(mean.flat, value.flat)
    assert mean.flat.dtype == dtype


@given(federations(least=3), st.sampled_from(CONFIGS))
def test_equal_updates_give_that_update(
    federation: tuple[Tensors, list[Upload], Round], config: MergeConfig
) -> None:
    """Under every rule without an optimiser: exactly, for flexlora in the factors' product, and for flora in
    the residual, which that product is added to. With the mass the current model is made equal, too."""
    model, uploads, now = federation
    common = uploads[0].tensors["model"]
    aggregator = Aggregator(config.model_copy(update={"optimizer": ServerOptimizer()}), WHOLE, SCALING)
    if config.weights == "mass":
        model = model.replace(common)
    elif config.rule == "norm_clip":
        model = model.replace(common * 0.5)
    equal = [Upload(u.client, u.weight, {"model": common}, sent_at=1) for u in uploads]
    after = aggregator.merge(aggregator.init(model), equal, now)[0].tensors["model"]
    if config.lora == "flexlora":
        torch.testing.assert_close(after[B.name] @ after[A.name], common[B.name] @ common[A.name])
        assert torch.equal(after[HEAD.name], common[HEAD.name])
    elif config.lora == "flora":
        more = SCALING * (common[B.name].double() @ common[A.name].double())
        torch.testing.assert_close(
            after[W.name].double(), model[W.name].double() + more, rtol=1e-5, atol=1e-5
        )
        assert not after[B.name].any()
        assert torch.equal(after[HEAD.name], common[HEAD.name])
        return
    else:
        assert torch.equal(after.select(SENT.names).flat, common.flat)
    assert torch.equal(after[W.name], model[W.name])


@given(federations())
def test_mean_against_plain_arithmetic(federation: tuple[Tensors, list[Upload], Round]) -> None:
    """Σ p_i φ_i in float64, one client at a time; and within the clients' range."""
    model, uploads, now = federation
    aggregator = Aggregator(MergeConfig(), model.layout, 1.0)
    total = sum(upload.weight for upload in uploads)
    plain = sum(upload.weight / total * upload.tensors["model"].flat.double() for upload in uploads)
    mean = aggregator.merge(aggregator.init(model), uploads, now)[0].tensors["model"].select(SENT.names).flat
    torch.testing.assert_close(mean.double(), plain, rtol=1e-6, atol=1e-7)
    stack = torch.stack([upload.tensors["model"].flat for upload in uploads])
    assert bool(((mean >= stack.amin(0) - 1e-6) & (mean <= stack.amax(0) + 1e-6)).all())


@given(federations(), st.sampled_from([c for c in CONFIGS if c.rule == "mean" and c.lora == "fedit"]))
def test_fedavgm_at_rest_is_the_mean(
    federation: tuple[Tensors, list[Upload], Round], config: MergeConfig
) -> None:
    """FedAvgM with momentum 0 and rate 1 gives the bits of no optimiser, also from a far-off model."""
    model, uploads, now = federation
    for scale in (1.0, 1e12):
        start = model * scale
        mergers = (
            Aggregator(config.model_copy(update={"optimizer": optimizer}), WHOLE, SCALING)
            for optimizer in (ServerOptimizer(), ServerOptimizer(name="fedavgm", momentum=0.0, lr=1.0))
        )
        first, second = (rule.merge(rule.init(start), uploads, now)[0].tensors["model"] for rule in mergers)
        assert torch.equal(first.flat, second.flat)


@given(
    federations(least=5),
    st.floats(10, 1e25),
    st.sampled_from(["median", "trimmed_mean", "krum", "multi_krum"]),
)
def test_one_outlier_is_ignored(
    federation: tuple[Tensors, list[Upload], Round], size: float, rule: str
) -> None:
    """With one liar among five or more, every number of the result stays within the honest clients' range."""
    model, uploads, now = federation
    liar = Upload("client-2", 1e9, {"model": Tensors(SENT, torch.full((SENT.size,), size))}, sent_at=1)
    sent = [liar if upload.client == liar.client else upload for upload in uploads]
    aggregator = Aggregator(MergeConfig(rule=rule, liars=1, trim=1 / len(sent)), WHOLE, SCALING)
    after = aggregator.merge(aggregator.init(model), sent, now)[0].tensors["model"].select(SENT.names).flat
    honest = torch.stack([u.tensors["model"].flat for u in sent if u is not liar])
    assert bool(((after >= honest.amin(0) - 1e-6) & (after <= honest.amax(0) + 1e-6)).all())


@given(federations(least=1), st.floats(0.01, 5), st.floats(1, 1e15))
def test_clipped_step_is_bounded(
    federation: tuple[Tensors, list[Upload], Round], bound: float, size: float
) -> None:
    """However far clients go, the model moves by at most max_norm."""
    model, uploads, now = federation
    far = [Upload(u.client, u.weight, {"model": u.tensors["model"] * size}, sent_at=1) for u in uploads]
    aggregator = Aggregator(MergeConfig(rule="norm_clip", max_norm=bound), WHOLE, SCALING)
    after = aggregator.merge(aggregator.init(model), far, now)[0].tensors["model"]
    assert (after - model).norm() <= bound * (1 + 1e-5) + 1e-5


@given(federations(least=3), st.randoms(use_true_random=False))
def test_coordinate_rules_treat_clients_alike(
    federation: tuple[Tensors, list[Upload], Round], random: Any
) -> None:
    """Median and trimmed mean of shuffled numbers, each coordinate shuffled apart, are the same."""
    _, uploads, _ = federation
    stack = torch.stack([upload.tensors["model"].flat for upload in uploads])
    shuffled = stack.clone()
    for column in range(SENT.size):
        order = list(range(len(uploads)))
        random.shuffle(order)
        shuffled[:, column] = stack[order, column]

    def rows(values: torch.Tensor) -> Sequence[Tensors]:
        return [Tensors(SENT, row) for row in values]

    assert torch.equal(coordinate_median(rows(stack)).flat, coordinate_median(rows(shuffled)).flat)
    assert torch.equal(trimmed_mean(rows(stack), 0.25).flat, trimmed_mean(rows(shuffled), 0.25).flat)


def products(uploads: Sequence[Upload]) -> torch.Tensor:
    """mean(B A) by number of pairs, in float64."""
    total = sum(upload.weight for upload in uploads)
    return sum(
        (
            u.weight / total * (u.tensors["model"][B.name].double() @ u.tensors["model"][A.name].double())
            for u in uploads
        ),
        torch.zeros(OUTER, INNER, dtype=torch.float64),
    )


@given(federations())
def test_fedex_loses_nothing(federation: tuple[Tensors, list[Upload], Round]) -> None:
    """s B̄ Ā + residual = s mean(B A) + what the residual was, to 1e-6; exactly, before it is rounded."""
    model, uploads, now = federation
    aggregator = Aggregator(MergeConfig(lora="fedex"), WHOLE, SCALING)
    after = aggregator.merge(aggregator.init(model), uploads, now)[0].tensors["model"]
    ours = SCALING * after[B.name].double() @ after[A.name].double() + after[W.name].double()
    expected = SCALING * products(uploads) + model[W.name].double()
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    total = sum(upload.weight for upload in uploads)
    values, weights = [u.tensors["model"] for u in uploads], [u.weight / total for u in uploads]
    ((_, exact),) = residuals(values, weights, after.select([A.name, B.name]), SCALING)
    ours = SCALING * after[B.name].double() @ after[A.name].double() + exact
    torch.testing.assert_close(ours, SCALING * products(uploads), rtol=1e-12, atol=1e-12)


@given(federations(), st.lists(st.integers(1, RANK), min_size=7, max_size=7))
def test_flora_loses_nothing_for_any_ranks(
    federation: tuple[Tensors, list[Upload], Round], ranks: list[int]
) -> None:
    """The residual grows by s Σ p_i B_i A_i of the unpadded factors: to 1e-12 before it is rounded. The next
    round has B = 0, and an A within ±1/√in that is not any client's and differs from round to round."""
    model, uploads, now = federation
    expected, padded = torch.zeros(OUTER, INNER, dtype=torch.float64), []
    total = sum(upload.weight for upload in uploads)
    for upload, rank in zip(uploads, ranks, strict=False):
        value = upload.tensors["model"].clone()
        low_b, low_a = value[B.name][:, :rank].double(), value[A.name][:rank].double()
        expected += SCALING * upload.weight / total * (low_b @ low_a)
        value[B.name][:, rank:] = 0.0
        value[A.name][rank:] = 0.0
        padded.append(Upload(upload.client, upload.weight, {"model": value}, sent_at=1))
    values, weights = [u.tensors["model"] for u in padded], [u.weight / total for u in padded]
    ((_, exact),) = stacked(values, weights, SCALING)
    torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-12)
    aggregator = Aggregator(MergeConfig(lora="flora"), WHOLE, SCALING)
    state = aggregator.init(model)
    after = aggregator.merge(state, padded, now)[0].tensors["model"]
    grown = after[W.name].double() - model[W.name].double()
    torch.testing.assert_close(grown, expected, rtol=1e-5, atol=1e-5)
    assert not after[B.name].any()
    assert 0 < float(after[A.name].abs().max()) <= INNER**-0.5
    later = aggregator.merge(state, padded, replace(now, key=Key(1)))[0].tensors["model"]
    assert not torch.equal(later[A.name], after[A.name])


@given(federations(), seeds)
def test_flexlora_keeps_a_product_that_fits(
    federation: tuple[Tensors, list[Upload], Round], seed: int
) -> None:
    """Where the clients' products share a column space of the LoRA's rank, their mean is kept whole."""
    model, uploads, now = federation
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(OUTER, RANK, generator=generator)
    shared = []
    for upload in uploads:
        value = upload.tensors["model"].replace(
            {B.name: basis @ torch.randn(RANK, RANK, generator=generator)}
        )
        shared.append(Upload(upload.client, upload.weight, {"model": value}, sent_at=1))
    aggregator = Aggregator(MergeConfig(lora="flexlora"), WHOLE, SCALING)
    state, report = aggregator.merge(aggregator.init(model), shared, now)
    after = state.tensors["model"]
    ours, expected = after[B.name].double() @ after[A.name].double(), products(shared)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert report["truncation_error"] < 1e-6


@given(federations(least=2), st.booleans())
def test_alignment_weights_are_weights(
    federation: tuple[Tensors, list[Upload], Round], leave_one_out: bool
) -> None:
    """At least 0, summing to 1, blind to the updates' common scale and to the order of clients."""
    _, uploads, _ = federation
    updates = {upload.client: upload.tensors["model"] for upload in uploads}
    weights = alignment_weights(updates, leave_one_out=leave_one_out)
    assert min(weights.values()) >= 0
    assert sum(weights.values()) == pytest.approx(1)
    turned = {client: 2 * updates[client] for client in reversed(updates)}
    assert alignment_weights(turned, leave_one_out=leave_one_out) == pytest.approx(weights, abs=1e-9)


@given(federations(least=2))
def test_attention_mixes(federation: tuple[Tensors, list[Upload], Round]) -> None:
    """Rows sum to 1; equal models attend to themselves; a floor is a floor up to its last normalisation."""
    model, uploads, _ = federation
    models = {upload.client: upload.tensors["model"] for upload in uploads}
    n = len(models)
    seed = similarity_attention(models, model.select(SENT.names))
    own = distance_attention(models, alpha=1.0 / n, sigma=1.0)
    for coefficients in (seed, own):
        for row in coefficients.values():
            assert sum(row.values()) == pytest.approx(1)
            assert min(row.values()) >= 0
    least = min(0.05, 1 / n)
    assert all(weight >= least / (1 + n * least) - 1e-12 for row in seed.values() for weight in row.values())
    equal = dict.fromkeys(models, next(iter(models.values())))
    blend = Aggregator(MergeConfig(), next(iter(equal.values())).layout, 1.0).blend
    for client, row in seed.items():
        assert blend([equal[j] for j in row], list(row.values())).equal(equal[client])
