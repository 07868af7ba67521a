"""A policy that takes a taste against plain transformers with e(z) in its input embeddings."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.small_models import FAMILIES, Choices, Pairs, away, backbone

from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase, Tensors
from prefed.data import Pair
from prefed.models import Backbone
from prefed.models.tastes import TASTE_MAP, tasting
from prefed.train import PairTrainer
from prefed.train.generation import Sampling, complete, complete_batch
from prefed.train.packed import PackedForward
from prefed.train.ppo import token_outputs

NEEDS = frozenset({"lora", TASTE_MAP})
PAIRS = Pairs(6)
ROWS = np.arange(6)
W, B = f"{TASTE_MAP}/weight", f"{TASTE_MAP}/bias"
WIDTH = 32
SHORT = Pair(*[np.ones(1, np.int32)] * 3)


def tastes(count: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def moved(family: str, *more: str, fast: bool = True) -> tuple[Backbone, Tensors]:
    """A model, and tensors so far from its start that a taste makes a difference."""
    model = backbone(family, NEEDS | set(more), fast=fast)
    return model, away(model.layout, model.initial)


def twin_logits(model: Backbone, ids: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    """``[T, V]``, with e added to what the embedding module gives."""
    embedded = model.causal.get_input_embeddings()(ids[None]) + e
    return model.causal(inputs_embeds=embedded, use_cache=False).logits[0]


def twin_logprobs(model: Backbone, weight: torch.Tensor, bias: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """``[6, 2]``, one response after another."""
    sums = []
    for row in ROWS:
        pair = PAIRS.pair(int(row))
        for response in (pair.chosen, pair.rejected):
            ids = torch.from_numpy(np.concatenate([pair.prompt, response]).astype(np.int64))
            logits = twin_logits(model, ids, weight @ z[row] + bias)[:-1].log_softmax(-1)
            tokens = logits.gather(1, ids[1:, None])[:, 0]
            sums.append(tokens[len(pair.prompt) - 1 :].sum())
    return torch.stack(sums).view(-1, 2)


@pytest.mark.sample
@pytest.mark.parametrize("fast", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_pair_at_its_own_taste(family: str, fast: bool) -> None:
    """Log-probabilities, and the gradient of a fixed weighting of them in W, b and the LoRA. The twin runs
    plain transformers from ``inputs_embeds``, each response by itself, with W z + b written out."""
    z = tastes()
    slopes = torch.linspace(-1, 1, 12).view(6, 2)
    plain, start = moved(family, fast=False)
    plain.load(start)
    plain.train_only(plain.layout.names)
    leaves = [start[name].clone().requires_grad_() for name in (W, B)]
    want = twin_logprobs(plain, *leaves, z)
    (want * slopes).sum().backward()

    model, tensors = moved(family, fast=fast)
    pair_model = PairTrainer(model, PAIRS, fast=fast, tastes=z).model
    assert isinstance(pair_model.forward, PackedForward) == fast
    model.load(tensors)
    model.train_only(model.layout.names)
    model.grad.zero_()
    got = pair_model.run(ROWS)
    (got * slopes).sum().backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    grad, expected = Tensors(model.layout, model.grad), Tensors(plain.layout, plain.grad)
    for name, leaf in zip((W, B), leaves, strict=True):
        expected[name].copy_(leaf.grad)
    for name in expected:
        torch.testing.assert_close(grad[name], expected[name], rtol=1e-4, atol=1e-4 * expected.norm())
        assert expected[name].any()

    shuffled = np.array([4, 0, 2])
    torch.testing.assert_close(pair_model.run(shuffled), want[shuffled], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pair_model.outputs(shuffled), want[shuffled].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "gemma"])
def test_the_map_at_its_start(family: str) -> None:
    """W is a draw from N(0, 1e-3²): of 1,024 numbers the standard deviation lies within 4 / √2048 = 9% of it,
    and the mean within 4 · 1e-3 / 32. Gemma's embedding module multiplies by √32 before e(z) is added."""
    model = backbone(family, NEEDS)
    assert model.layout[W].shape == (32, WIDTH)
    assert abs(float(model.initial[W].std()) / 1e-3 - 1) < 0.09
    assert abs(float(model.initial[W].mean())) < 1.25e-4
    assert not model.initial[B].any()
    assert not model.reference[W].any()
    assert not model.reference[B].any()

    ids, z = torch.arange(1, 7).view(2, 3), tastes(2)
    embeddings = model.causal.get_input_embeddings()
    tensors = away(model.layout, model.initial)
    model.load(tensors)
    bare = embeddings.weight[ids] * (32**0.5 if family == "gemma" else 1)
    with torch.no_grad():
        with tasting(model.taste_map, z):
            added = embeddings(ids)
        torch.testing.assert_close(added, bare + (z @ tensors[W].T + tensors[B])[:, None])
        torch.testing.assert_close(embeddings(ids), bare)


def goal(beta: float = 0.1) -> Objective:
    return Objective("dpo", {"beta": beta})


def step(model: Backbone, names: tuple[str, ...]) -> Phase:
    return Phase("train", names, goal(), Optimizer("sgd", lr=0.05, clip=0.0), batch_size=6, steps=1)


def ownership(model: Backbone) -> Ownership:
    return Ownership.of(model.layout, lambda entry: Owner.SHARED)


def test_a_step_of_dpo_is_that_of_a_plain_loop() -> None:
    """−log σ(β (Δ − Δ_ref)): the policy's Δ is at the pair's z, the reference's is without any."""
    z, (model, tensors) = tastes(), moved("gpt2")
    result = (
        PairTrainer(model, PAIRS, tastes=z)
        .visit(ROWS, Key(0), ownership(model))
        .train(tensors, step(model, (W, B)))
    )
    plain, _ = moved("gpt2", fast=False)
    leaves = [tensors[name].clone().requires_grad_() for name in (W, B)]
    plain.load(plain.reference)
    with torch.no_grad():
        reference = twin_logprobs(plain, torch.zeros(32, WIDTH), torch.zeros(32), z)
    plain.load(tensors)
    policy = twin_logprobs(plain, *leaves, z)
    margins = (policy - reference)[:, 0] - (policy - reference)[:, 1]
    loss = -torch.nn.functional.logsigmoid(0.1 * margins).mean()
    loss.backward()
    assert abs(result.loss - float(loss.detach())) < 1e-5
    for name, leaf in zip((W, B), leaves, strict=True):
        moved_by = result.tensors[name] - tensors[name]
        torch.testing.assert_close(moved_by, -0.05 * leaf.grad, rtol=1e-3, atol=1e-6)
    assert result.tensors.select(model.layout.names[:4]).equal(tensors.select(model.layout.names[:4]))


def test_what_is_kept_of_the_trunk_is_not_used_at_a_taste() -> None:
    """A phase that trains the head alone computes the trunk once per pair. At a taste that would be the trunk
    of no taste: so the step is that of the plain path, and not that of a trainer without tastes."""
    phase_names = ("head/weight",)
    outcomes = []
    for fast, z in ((True, tastes()), (False, tastes()), (True, None)):
        model, tensors = moved("gpt2", "head", fast=fast)
        trainer = PairTrainer(model, PAIRS, fast=fast, tastes=z)
        assert (trainer.model.features(ROWS) is None) == (z is not None or not fast)
        outcomes.append(
            trainer.visit(ROWS, Key(0), ownership(model)).train(tensors, step(model, phase_names))
        )
    packed, padded, without = (outcome.tensors["head/weight"] for outcome in outcomes)
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(packed, without, rtol=1e-5, atol=1e-5)
    assert backbone("gpt2", NEEDS).trains_trunk([W])


def test_the_reference_is_the_untouched_model_at_every_taste() -> None:
    """Bit for bit: so what is kept of it is of use to every taste."""
    model, tensors = moved("llama")
    scores = PairTrainer(model, PAIRS, tastes=tastes()).score(tensors, ROWS)
    bare = PairTrainer(backbone("llama"), PAIRS)
    np.testing.assert_array_equal(scores.reference, bare.score(bare.backbone.reference, ROWS).policy)
    others = PairTrainer(model, PAIRS, tastes=tastes(seed=1)).score(tensors, ROWS)
    assert np.abs(scores.policy - others.policy).min() > 1e-4


@pytest.mark.parametrize("fast", [True, False], ids=["packed", "padded"])
def test_ppo_takes_tastes_too(fast: bool) -> None:
    """Summed over a response, the log-probabilities of its tokens are those of the trainer of losses."""
    z, (model, tensors) = tastes(), moved("gpt2", "value", fast=fast)
    pair_model = PairTrainer(model, PAIRS, fast=fast, tastes=z).model
    model.load(tensors)
    with torch.no_grad():
        want = pair_model.run(ROWS).view(-1)
        tokens = token_outputs(model, pair_model.forward, pair_model.pairs(ROWS), None, z).logprobs
    lengths = PAIRS.lengths[:, 1:].reshape(-1).tolist()
    sums = torch.stack([part.sum() for part in torch.split(tokens, lengths)])
    torch.testing.assert_close(sums, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fast", [True, False], ids=["packed", "padded"])
def test_choices_are_taken_at_a_taste(fast: bool) -> None:
    """Log-odds of both letters at the end of each branch, with e(z) in the input embeddings."""
    choices, z, (model, tensors) = Choices(3), tastes(3), moved("gpt2", fast=fast)
    got = PairTrainer(model, choices, fast=fast, tastes=z).model
    plain, _ = moved("gpt2", fast=False)
    for each in (model, plain):
        each.load(tensors)
    rows = np.arange(3)
    want = []
    with torch.no_grad():
        for row in rows:
            pair = choices.pair(int(row))
            for branch in (pair.chosen, pair.rejected):
                ids = torch.from_numpy(np.concatenate([pair.prompt, branch[:-1]]).astype(np.int64))
                last = twin_logits(plain, ids, tensors[W] @ z[row] + tensors[B])[-1]
                want.append(last[int(branch[-1])] - last[3 - int(branch[-1])])
    np.testing.assert_allclose(got.outputs(rows).reshape(-1), torch.stack(want), rtol=1e-5, atol=1e-5)


PROMPTS = [[5, 9, 2], [7, 7, 3], [5, 9, 2]]


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma"])
def test_completions_at_a_taste_are_those_of_a_plain_loop(family: str) -> None:
    """Greedy, token by token, the whole text again for each: e(z) is added to prompt and response alike. The
    first and the last prompt are equal and their tastes are not."""
    model, tensors = moved(family)
    end = 100
    model.tokenizer = SimpleNamespace(
        eos_token_id=end, pad_token_id=end, decode=lambda ids, **_: [int(token) for token in ids]
    )
    model.causal.generation_config.eos_token_id = end
    z, how = 3 * tastes(3), Sampling(max_tokens=8, temperature=0)
    model.load(tensors)
    expected = []
    with torch.no_grad():
        for prompt, taste in zip(PROMPTS, z, strict=True):
            ids = list(prompt)
            for _ in range(8):
                token = twin_logits(model, torch.tensor(ids), tensors[W] @ taste + tensors[B])[-1].argmax()
                if int(token) == end:
                    break
                ids.append(int(token))
            expected.append(ids[3:])
    assert expected[0] != expected[2]
    keys = [Key(k) for k in range(3)]
    assert [list(each.tokens) for each in complete_batch(model, tensors, PROMPTS, how, keys, z)] == expected
    assert complete(model, tensors, PROMPTS[1], how, keys[1], z[1]) == str(expected[1])
    assert [list(each.tokens) for each in complete_batch(model, tensors, PROMPTS, how, keys)] != expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, _: PairTrainer(m, PAIRS, tastes=tastes(5)), "got 5 tastes for 6 pairs"),
        (lambda m, at: PairTrainer(m, PAIRS, tastes=tastes()[:, :4]).score(at, ROWS), "has 4 numbers"),
        (lambda m, at: complete_batch(m, at, PROMPTS, Sampling(), [Key(0)] * 3, tastes(2)), "2 tastes for 3"),
        (lambda m, at: PairTrainer(m, PAIRS).choice_scores(at, ROWS), "requires pairs of choices"),
        (lambda m, at: PairTrainer(m, Choices(6)).choice_scores(at, ROWS, tastes()), "no latent taste"),
        (lambda m, _: PairTrainer(m, Choices(6)).model.forward([SHORT]), "before its letter"),
    ],
)
def test_what_does_not_fit_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(*moved("gpt2"))
