"""The selector with a latent taste: shapes, antisymmetry, the cap, empty contexts; two opposite tastes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from prefed.core import Entry, Key, Layout, Tensors
from prefed.core.random_keys import orthogonal_rows
from prefed.models.config import VariationalSettings
from prefed.models.tastes import CAP, PROTOTYPES, VARIATIONAL, VariationalSelector, trainable_share
from prefed.train.losses.tastes import Gaussian, orthogonality, prototype_pull, standard_kl

DIM = 12
SEEDS = st.integers(0, 2**16)
SMALL = {"latent": 5, "widths": (16, 8, 6)}


def selector(**changes: object) -> VariationalSelector:
    return VariationalSelector(VariationalSettings.model_validate({**SMALL, **changes}), DIM)


def weights_of(model: VariationalSelector, *, capped: bool = True, seed: int = 0) -> Tensors:
    """The starts of the networks as a client's tensors hold them: views of one buffer."""
    starts = model.starts(Key(seed), capped=capped)[VARIATIONAL]
    layout = Layout(tuple(Entry(name, tuple(start.shape), VARIATIONAL) for name, start in starts.items()))
    return Tensors.gather(layout, starts)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pairs(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, signs and the base's log-odds."""
    signs = draw(seed + 1, count).sign()
    return draw(seed, count, 2, DIM), signs, draw(seed + 2, count, 2)


def test_starts_depend_on_the_key_alone_and_each_name_has_its_own() -> None:
    model = selector()
    again, other = weights_of(model), weights_of(model, seed=1)
    assert again.equal(weights_of(model))
    assert not any(torch.equal(again[name], other[name]) for name in again if "log_variance/b" not in name)
    wider = weights_of(selector(latent=4))
    assert torch.equal(again["variational/encoder/0/weight"], wider["variational/encoder/0/weight"])


def test_trainable_share_of_the_sources_model() -> None:
    """Qwen-2 0.5B: d = 896, 494,032,768 weights. By hand: the response's MLP 896·512 + 512 + 512·256 + 256 +
    256·128 + 128 = 623,488; the encoder's 66,048 + 131,328 + 32,896 = 230,272; attention 3 · 16,512 = 49,536;
    heads 2 · 4,128 = 8,256; decoder 32·128 + 128 = 4,224. The sum is 915,776: the source's "about 0.9M"."""
    model = VariationalSelector(VariationalSettings(), 896)
    weights = weights_of(model)
    assert weights.layout.size == 623_488 + 230_272 + 49_536 + 8_256 + 4_224
    assert trainable_share(weights.layout.entries, 494_032_768) == pytest.approx(0.00185, abs=1e-5)


@given(SEEDS)
def test_other_labels_change_signs_alone(seed: int) -> None:
    """Bit for bit: the context's features are negated. A pair that is judged has no label to exchange."""
    model = selector()
    weights = weights_of(model)
    hidden, signs, _ = pairs(seed, 7)
    assert torch.equal(
        model.pair_features(weights, hidden, -signs), -model.pair_features(weights, hidden, signs)
    )


@given(SEEDS)
def test_the_printed_feature_is_not_antisymmetric(seed: int) -> None:
    """MLP(−x) is −MLP(x) for no MLP with biases; the option is the paper's letter, not a law."""
    model = selector(feature="difference")
    hidden, signs, _ = pairs(seed, 7)
    weights = weights_of(model)
    there, back = (model.pair_features(weights, hidden, s) for s in (signs, -signs))
    assert not torch.allclose(there, -back, atol=1e-3)


@given(SEEDS)
def test_exchanged_responses_exchange_the_log_odds(seed: int) -> None:
    """The whole of it: the first response's log-odds shown first are minus the second's shown second."""
    model = selector()
    weights = weights_of(model)
    hidden, _, base = pairs(seed, 7)
    z = draw(seed + 3, 5)
    there = model.log_odds(weights, hidden, z, base)
    back = model.log_odds(weights, hidden.flip(1), z, -base.flip(1))
    torch.testing.assert_close(back.flip(1), -there)


@given(SEEDS)
def test_the_reward_by_hand(seed: int) -> None:
    """r(h, z) = (W z + b) · MLP(h), written out in float64, added to both orders alike."""
    model = selector()
    weights = weights_of(model)
    hidden, _, base = pairs(seed, 4)
    z = draw(seed + 3, 5)
    w = {name.removeprefix("variational/"): value.double() for name, value in weights.items()}

    def reward(h: torch.Tensor) -> torch.Tensor:
        x = h.double()
        for k in range(3):
            x = w[f"response/{k}/weight"] @ x + w[f"response/{k}/bias"]
            x = x.clamp(min=0) if k < 2 else x
        return (w["decoder/weight"] @ z.double() + w["decoder/bias"]) @ x

    expected = torch.stack([base[i].double() + reward(h[0]) - reward(h[1]) for i, h in enumerate(hidden)])
    torch.testing.assert_close(model.log_odds(weights, hidden, z, base).double(), expected, rtol=0, atol=1e-5)


@given(SEEDS)
def test_opposite_taste_reverses_every_preference(seed: int) -> None:
    """With a decoder without bias w(−z) = −w(z): the reward's part of the log-odds is negated bit for bit."""
    model = selector()
    weights = weights_of(model)
    weights["variational/decoder/bias"].zero_()
    hidden, _, base = pairs(seed, 6)
    nothing, z = torch.zeros_like(base), draw(seed + 3, 5)
    there, back = (model.log_odds(weights, hidden, taste, nothing) for taste in (z, -z))
    assert torch.equal(back, -there)
    assert bool((there != 0).all())
    each = model.log_odds(weights, hidden, torch.stack([z, -z] * 3), nothing)
    torch.testing.assert_close(each[1::2], -there[1::2])


@given(SEEDS)
def test_an_additive_taste_cannot_see_the_responses(seed: int) -> None:
    """A known mistake of earlier code. Between two tastes every pair's log-odds move alike, and their mean
    over both orders does not move: no taste can reverse one preference and keep another."""
    model = selector(decoder="residual")
    weights = weights_of(model)
    hidden, _, base = pairs(seed, 6)
    one, other = (model.log_odds(weights, hidden, draw(seed + k, 5), base) for k in (3, 4))
    moves = one - other
    torch.testing.assert_close(moves, moves[:1].expand_as(moves), atol=1e-5, rtol=0)
    torch.testing.assert_close(moves.mean(1), torch.zeros(6), atol=1e-6, rtol=0)
    conditioned = selector()
    own = weights_of(conditioned)
    one, other = (conditioned.log_odds(own, hidden, draw(seed + k, 5), base) for k in (3, 4))
    assert float((one - other).mean(1).std()) > 1e-4


def test_dropped_base_log_odds_leave_the_reward_alone() -> None:
    model = selector()
    weights = weights_of(model)
    hidden, _, base = pairs(0, 3)
    z, keep = draw(3, 5), torch.tensor([1.0, 0.0, 1.0])
    kept, whole = model.log_odds(weights, hidden, z, base, keep), model.log_odds(weights, hidden, z, base)
    alone = model.log_odds(weights, hidden, z, torch.zeros_like(base))
    assert torch.equal(kept[0], whole[0])
    assert torch.equal(kept[1], alone[1])


def test_posterior_does_not_depend_on_the_order_of_the_context() -> None:
    model = selector()
    weights = weights_of(model)
    features = draw(0, 9, 6)
    mean, log_variance = model.posterior(weights, features)
    turned = model.posterior(weights, features.flip(0))
    assert mean.shape == log_variance.shape == (5,)
    torch.testing.assert_close(turned, (mean, log_variance))
    more = model.posterior(weights, torch.cat([features, features]))
    torch.testing.assert_close(more, (mean, log_variance))


def test_attention_against_torch() -> None:
    """The pooled features are torch's scaled dot-product attention, averaged over the pairs."""
    model = selector()
    weights = weights_of(model)
    w = {name.removeprefix("variational/"): value for name, value in weights.items()}

    def linear(layer: str, x: torch.Tensor) -> torch.Tensor:
        return x @ w[f"{layer}/weight"].T + w[f"{layer}/bias"]

    features = draw(0, 5, 6)
    x = linear("encoder/2", linear("encoder/1", linear("encoder/0", features).relu()).relu())
    q, k, v = (linear(f"attention/{name}", x)[None] for name in ("query", "key", "value"))
    pooled = torch.nn.functional.scaled_dot_product_attention(q, k, v)[0].mean(0)
    mean, log_variance = model.posterior(weights, features)
    torch.testing.assert_close(mean, linear("mean", pooled))
    torch.testing.assert_close(log_variance, linear("log_variance", pooled))


def slope(start: float, cap: float | None, *, soft: bool = False) -> tuple[float, float]:
    """log σ² of one dimension and its gradient in the bias, where the head's weights are 0."""
    model = selector()
    weights = weights_of(model)
    weights["variational/log_variance/weight"].zero_()
    bias = torch.full((5,), start).requires_grad_()
    mapping = {**weights, "variational/log_variance/bias": bias}
    _, log_variance = model.posterior(mapping, draw(0, 3, 6), cap=cap, soft=soft)
    (gradient,) = torch.autograd.grad(log_variance[0], bias)
    return float(log_variance[0].detach()), float(gradient[0])


def test_log_variance_has_a_gradient_where_it_starts() -> None:
    """Below the hard cap the slope is 1, above it 0; the soft cap's is σ(cap − x), which ends nowhere."""
    weights = weights_of(selector(), capped=True)
    assert weights["variational/log_variance/bias"].tolist() == [-3] * 5
    assert float(weights_of(selector(), capped=False)["variational/log_variance/bias"].abs().max()) < 1
    assert slope(-3.0, -2.0) == (-3.0, 1.0)
    assert slope(-1.0, -2.0) == (-2.0, 0.0)
    assert slope(-1.0, None) == (-1.0, 1.0)
    value, gradient = slope(-1.0, -2.0, soft=True)
    assert gradient == pytest.approx(1 / (1 + math.e))
    assert value == pytest.approx(-2 - math.log1p(math.exp(-1)))


def test_an_empty_context_has_no_posterior() -> None:
    with pytest.raises(ValueError, match=r"^a posterior requires at least one context pair$"):
        selector().posterior(weights_of(selector()), draw(0, 0, 4))


def test_context_labels_reach_z() -> None:
    """Other labels of the context are another taste: the leak test's other half needs this."""
    model = selector()
    weights = weights_of(model)
    hidden, signs, _ = pairs(1, 4)
    there, back = (
        model.posterior(weights, model.pair_features(weights, hidden, s))[0] for s in (signs, -signs)
    )
    assert not torch.allclose(there, back, atol=1e-3)


def test_dropout_is_its_generators_alone() -> None:
    """Equal generators, equal masks; in the mean over many draws the last layer is unbiased."""
    model = selector(dropout=0.5, widths=(64, 6))
    weights = weights_of(model)
    hidden = draw(0, 1, DIM)
    once, again = (model.embed(weights, hidden, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(once, again)
    assert not torch.equal(once, model.embed(weights, hidden))
    many = model.embed(weights, hidden.expand(20_000, DIM), torch.Generator().manual_seed(4))
    torch.testing.assert_close(many.mean(0), model.embed(weights, hidden)[0], atol=0.02, rtol=0)


def test_prototypes_start_orthogonal() -> None:
    """P Pᵀ = 25 I to 1e-6 of 25 in float32, and another key turns them elsewhere."""
    for seed, count in enumerate((1, 2, 5, 32)):
        rows = orthogonal_rows(Key(seed), count, 32, 5.0)
        gram = rows.double() @ rows.double().T / 25
        torch.testing.assert_close(gram, torch.eye(count).double(), atol=1e-6, rtol=0)
    assert not torch.allclose(orthogonal_rows(Key(0), 2, 32, 5.0), orthogonal_rows(Key(1), 2, 32, 5.0))
    with pytest.raises(ValueError, match=r"^33 vectors cannot be orthogonal in 32 dimensions$"):
        orthogonal_rows(Key(0), 33, 32, 5.0)
    with pytest.raises(ValidationError, match="raise latent"):
        VariationalSettings(latent=2, prototypes=3)


PAIRS, DIM, CONTEXT = 96, 8, 8


def accuracies(decoder: str) -> tuple[float, float]:
    """Train on two clients that differ in every label; accuracy on the last third with own and the other's z.

    The first response is the better one for client 0 where its first coordinate is larger. The contexts are
    drawn from the training pairs outside the batch.
    """
    model = VariationalSelector(
        VariationalSettings(latent=4, widths=(32, 16), dropout=0.0, decoder=decoder), DIM
    )
    starts = model.starts(Key(0), capped=True)
    weights = {name: start.requires_grad_() for name, start in starts[VARIATIONAL].items()}
    prototypes = starts[PROTOTYPES][PROTOTYPES].requires_grad_()
    optimizer = torch.optim.AdamW([*weights.values(), prototypes], lr=3e-3)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(PAIRS, 2, DIM, generator=draw)
    first = (hidden[:, 0, 0] - hidden[:, 1, 0]).sign()
    labels, base, train = torch.stack([first, -first]), torch.zeros(PAIRS, 2), 2 * PAIRS // 3
    for step in range(120):
        client = step % 2
        signs = labels[client]
        rows = torch.randperm(train, generator=draw)
        context, batch = rows[:CONTEXT], rows[CONTEXT : CONTEXT + 32]
        features = model.pair_features(weights, hidden[context], signs[context])
        q = Gaussian(*model.posterior(weights, features, cap=CAP))
        z = q.sample(torch.randn(4, generator=draw))
        odds = model.log_odds(weights, hidden[batch], z, base[batch])
        loss = torch.nn.functional.softplus(-signs[batch, None] * odds).mean() + 0.1 * standard_kl(q)
        loss = loss + prototype_pull(z, prototypes[client]) + 0.1 * orthogonality(prototypes, 5.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        contexts = (model.pair_features(weights, hidden[:CONTEXT], s[:CONTEXT]) for s in labels)
        own = [model.posterior(weights, context)[0] for context in contexts]
        judged = slice(train, PAIRS)
        right = [
            [
                (signs[judged] * model.log_odds(weights, hidden[judged], z, base[judged]).mean(1) > 1e-4)
                for z in own
            ]
            for signs in labels
        ]
    table = torch.stack([torch.stack(row) for row in right]).double().mean(-1)
    return float(table.diagonal().mean()), float((table.sum() - table.trace()) / 2)


@pytest.mark.parametrize("decoder", ["conditioned", "residual"])
def test_only_a_conditioned_reward_serves_opposite_tastes(decoder: str) -> None:
    """One set of weights orders pairs both ways, by z alone: own z is right where the other's is wrong, so
    the two accuracies sum to at most 1. An additive z, the paper's letter, leaves the mean of both orders at
    the base's log-odds, which are 0 here: a tie, and ties are wrong."""
    own, another = accuracies(decoder)
    if decoder == "conditioned":
        assert own > 0.9
        assert another < 0.1
    else:
        assert (own, another) == (0, 0)
