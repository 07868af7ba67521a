"""A selector's two logits against the full head, its gradients against the padded twin, its loss by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.small_models import FAMILIES, Choices, Pair, away, backbone, float64

from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase, Tensors
from prefed.train import PairTrainer, forward_passes, packed
from prefed.train.losses import ChoiceBatch, choice
from prefed.train.packed import PackedChoices
from prefed.train.padded import PaddedChoices

PAIRS = Choices(6)
ROWS = np.arange(6)
CHOICE = Objective("choice")


def everything(model) -> Ownership:
    return Ownership.of(model.layout, lambda entry: Owner.SHARED)


def at_a_distance(family: str = "gpt2", needs: frozenset[str] = frozenset({"lora"}), **options):
    model = backbone(family, needs, **options)
    model.load(away(model.layout, model.initial))
    return model


def full_head(model, pairs) -> torch.Tensor:
    """Log-odds from the whole head's two columns: every order runs alone and without padding."""
    orders = []
    for pair in pairs:
        for branch in (pair.chosen, pair.rejected):
            ids = torch.from_numpy(np.concatenate([pair.prompt, branch[:-1]]).astype(np.int64))[None]
            with torch.no_grad():
                logits = model.causal(input_ids=ids, use_cache=False).logits[0, -1]
            target = int(branch[-1])
            orders.append(logits[target] - logits[3 - target])
    return torch.stack(orders).view(-1, 2)


@pytest.mark.sample
@pytest.mark.parametrize("needs", [{"lora"}, {"lora", "bottleneck", "head"}], ids=["lora", "head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_logits_are_two_columns_of_the_full_head(family: str, needs: set[str]) -> None:
    """Packed with a shared prompt, and padded: both agree with each order alone, to 1e-5."""
    model, plain = (at_a_distance(family, frozenset(needs), fast=fast) for fast in (True, False))
    forward = PairTrainer(model, PAIRS).model.forward
    assert isinstance(forward, PackedChoices)
    pairs = [PAIRS.pair(row) for row in range(6)]
    want = full_head(plain, pairs)
    with torch.no_grad():
        torch.testing.assert_close(forward(pairs), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(PaddedChoices(plain, (1, 2))(pairs), want, rtol=1e-5, atol=1e-5)


@pytest.mark.sample
@pytest.mark.parametrize("needs", [{"lora"}, {"lora", "bottleneck", "head"}], ids=["lora", "head"])
@pytest.mark.parametrize("family", FAMILIES)
@float64()
def test_gradients_are_those_of_the_padded_twin(family: str, needs: set[str]) -> None:
    """Through :meth:`PairTrainer.gradient`, over a batch that is whole and one that is split."""
    gradients = []
    for fast, most in ((False, 4096), (True, 4096), (True, 20)):
        model = backbone(family, frozenset(needs), fast=fast)
        trainer = PairTrainer(model, PAIRS, fast=fast, max_tokens=most)
        start = away(model.layout, model.initial)
        gradients.append(trainer.visit(ROWS, Key(1), everything(model)).gradient(start, CHOICE))
    (expected, loss), *others = gradients
    for gradient, value in others:
        for name in expected:
            torch.testing.assert_close(gradient[name], expected[name], rtol=0, atol=1e-6 * expected.norm())
        assert value == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_attention_of_a_cpu_equals_that_of_a_gpu(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = at_a_distance(family)
    forward = PairTrainer(model, PAIRS).model.forward
    pairs = [PAIRS.pair(row) for row in range(6)]
    with torch.no_grad():
        by_parts = forward(pairs)
        monkeypatch.setattr(packed, "_kernel", lambda query: packed._one_by_one)
        torch.testing.assert_close(forward(pairs), by_parts, rtol=1e-5, atol=1e-5)


def test_half_precision_agrees_with_its_own_plain_path() -> None:
    """bfloat16 has 8 bits of fraction: logits of size 1 differ by hundredths, and stay float32 outside."""
    outputs = []
    for fast in (True, False):
        model = at_a_distance(fast=fast)
        model.causal.to(torch.bfloat16)
        trainer = PairTrainer(model, PAIRS, fast=fast)
        outputs.append(trainer.model.outputs(ROWS))
        assert outputs[-1].dtype == np.float32
    np.testing.assert_allclose(outputs[0], outputs[1], atol=0.1)


def test_an_unknown_family_and_a_head_with_bias_take_the_plain_path() -> None:
    """The bias is in the plain path's logits: 0.25 more for A moves order 1 by 0.25 and order 2 by −0.25."""
    bare, biased, unknown = (at_a_distance() for _ in range(3))
    unknown.family = None
    head = biased.causal.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(len(head.weight)), requires_grad=False)
    head.bias.data[1] = 0.25
    forwards = [PairTrainer(model, PAIRS).model for model in (bare, unknown, biased)]
    assert [type(model.forward) for model in forwards] == [PackedChoices, PaddedChoices, PaddedChoices]
    want, plain, moved = (model.outputs(ROWS) for model in forwards)
    np.testing.assert_allclose(plain, want, atol=1e-5)
    np.testing.assert_allclose(moved - want, np.tile([0.25, -0.25], (6, 1)), atol=1e-5)


def test_a_sequence_may_fill_the_context() -> None:
    """The letter is not an input: 60 + 5 tokens with it fit into GPT-2's 64 positions, packed and padded."""
    pairs = Choices(1, orientations=[1])
    pairs._pairs = [Pair(*(np.full(count, 5, np.int32) for count in (60, 5, 5)))]
    pairs._pairs[0].chosen[-1], pairs._pairs[0].rejected[-1] = pairs.letters
    pairs.lengths = np.array([[60, 5, 5]], np.int32)
    scores = [
        PairTrainer(model, pairs, fast=fast).model.outputs(np.arange(1))
        for fast, model in ((fast, at_a_distance(fast=fast)) for fast in (True, False))
    ]
    assert forward_passes.longest_sequence(pairs) == 64
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-5)


def test_swapped_responses_negate_the_score_to_the_bit() -> None:
    """A swap changes the orientation alone, so the same two numbers get the other sign."""
    model, other = backbone(), backbone()
    flipped = Choices(6, orientations=(1 - PAIRS.orientations).tolist())
    start = away(model.layout, model.initial)
    one, two = PairTrainer(model, PAIRS), PairTrainer(other, flipped)
    scores, swapped = one.score(start, ROWS), two.score(start, ROWS)
    np.testing.assert_array_equal(scores.orders, -swapped.orders)
    np.testing.assert_array_equal(scores.baseline, -swapped.baseline)
    assert np.abs(scores.orders - scores.baseline).min() > 0
    np.testing.assert_array_equal(one.choice_scores(start, ROWS), two.choice_scores(start, ROWS))
    signs = np.where(PAIRS.orientations == 1, 1, -1)
    np.testing.assert_array_equal(signs * one.choice_scores(start, ROWS), scores.orders.mean(1))


def test_the_baseline_is_the_untouched_model() -> None:
    model = backbone()
    scores = PairTrainer(model, PAIRS).score(model.reference, ROWS)
    np.testing.assert_array_equal(scores.orders, scores.baseline)
    bare = backbone(fast=False)
    with bare.model.disable_adapter():
        want = full_head(bare, [PAIRS.pair(row) for row in range(6)]).numpy()
    signs = np.where(PAIRS.orientations == 1, 1, -1)[:, None]
    np.testing.assert_allclose(scores.baseline, signs * want, rtol=1e-5, atol=1e-5)


def test_loss_by_hand() -> None:
    """The first is chosen at log-odds ln 3 and ln 1: −(ln ¾ + ln ½) / 2. It is rejected: −(ln ¼ + ln ½) / 2.
    The scores of the chosen are ±½ ln 3, so one of two pairs is right and the mean margin is 0."""
    orders = torch.tensor([[np.log(3.0), 0.0]] * 2)
    losses, figures = choice(ChoiceBatch(orders, torch.tensor([1.0, -1.0])))
    want = [-(np.log(0.75) + np.log(0.5)) / 2, -(np.log(0.25) + np.log(0.5)) / 2]
    torch.testing.assert_close(losses, torch.tensor(want, dtype=losses.dtype))
    assert float(figures["accuracy"]) == 0.5
    assert float(figures["margin"]) == 0


@given(st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30), st.booleans()), min_size=1, max_size=6))
def test_gradient_of_the_loss_in_closed_form(pairs: list[tuple[float, float, bool]]) -> None:
    """d/dx of −log σ(s x) is −s σ(−s x); an order has half of a pair's loss, a pair 1/n of the mean."""
    orders = torch.tensor([pair[:2] for pair in pairs], dtype=torch.float64, requires_grad=True)
    sign = torch.tensor([1.0 if pair[2] else -1.0 for pair in pairs], dtype=torch.float64)
    choice(ChoiceBatch(orders, sign))[0].mean().backward()
    want = -sign[:, None] * torch.sigmoid(-sign[:, None] * orders.detach()) / 2 / len(pairs)
    torch.testing.assert_close(orders.grad, want)


@pytest.mark.parametrize("names", ["lora/", "head/"])
def test_a_phase_learns_the_labels(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained on six pairs, a selector comes to order them; a phase on the head alone gives the same numbers
    whether the trunk runs once or in every step."""
    results: list[Tensors] = []
    for most in (1 << 28, 0):
        monkeypatch.setattr(forward_passes, "MAX_FEATURES", most)
        model = backbone(needs=frozenset({"lora", "head"}))
        trainer = PairTrainer(model, PAIRS)
        train = tuple(name for name in model.layout.names if name.startswith(names))
        phase = Phase("choose", train, CHOICE, Optimizer("adamw", lr=3e-2), batch_size=3, epochs=15)
        before = trainer.loss(model.initial, CHOICE, ROWS)
        trained = trainer.visit(ROWS, Key(2), everything(model)).train(model.initial, phase)
        results.append(trained.tensors)
    assert (trained.steps, trained.pairs) == (30, 90)
    assert trainer.loss(trained.tensors, CHOICE, ROWS) < 0.2 * before
    assert (trainer.score(trained.tensors, ROWS).orders.mean(1) > 0).all()
    assert (results[0] - results[1]).norm() < 1e-3 * (results[0] - model.initial).norm()
