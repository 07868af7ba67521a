"""Every fast path of the trainer against its plain twin, in fp32 and against fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.small_models import FAMILIES, Pairs, away, backbone, float64

from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase, Tensors
from prefed.train import Packing, PairTrainer, forward_passes, logprobs, packed
from prefed.train.logprobs import token_logprobs
from prefed.train.packed import PackedForward
from prefed.train.padded import PaddedForward

NEEDS = [
    {"lora"},
    {"lora", "bottleneck", "head", "reward"},
    {"lora", "personal_lora", "gate", "outputs"},
    {"lora", "personal_lora", "gate", "factors"},
    {"lora", "norm"},
    {"weights"},
]
PAIRS = Pairs(6)
ROWS = np.arange(6)


def gradients(forward, model, rewards: bool) -> tuple[torch.Tensor, Tensors]:
    """Outputs, and the gradient of a fixed weighting of them, from the same tensors."""
    model.load(away(model.layout, model.initial))
    model.train_only(model.layout.names)
    model.grad.zero_()
    outputs = forward([PAIRS.pair(int(row)) for row in ROWS], rewards=rewards)
    weights = torch.linspace(-1, 1, outputs.numel()).view_as(outputs)
    (outputs * weights).sum().backward()
    return outputs.detach(), Tensors(model.layout, model.grad.clone())


@pytest.mark.sample
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("needs", NEEDS, ids=lambda needs: "+".join(sorted(needs - {"lora"})) or "lora")
def test_packed_equals_padded(family: str, needs: set[str]) -> None:
    """Packing with shared prompts, the cut last block, the blocked log-softmax and the fused LoRA change only
    the order of sums: outputs agree to 1e-5 relative, gradients to 1e-4 of their norm."""
    fast, plain = backbone(family, frozenset(needs)), backbone(family, frozenset(needs), fast=False)
    forward = PairTrainer(fast, PAIRS).model.forward
    assert isinstance(forward, PackedForward)
    rewards = "reward" in needs
    got, grad = gradients(forward, fast, rewards)
    want, expected = gradients(PaddedForward(plain), plain, rewards)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for name in expected:
        torch.testing.assert_close(grad[name], expected[name], rtol=1e-4, atol=1e-4 * expected.norm())
    assert (grad - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("rewards", [False, True])
def test_attention_of_a_cpu_equals_that_of_a_gpu(family: str, rewards: bool, monkeypatch) -> None:
    """The CPU's three calls a pair agree with a GPU's two in fp32: outputs to 1e-5, gradients to 1e-4."""
    model = backbone(family, frozenset({"lora", "reward"}))
    forward = PairTrainer(model, PAIRS).model.forward
    got, grad = gradients(forward, model, rewards)
    monkeypatch.setattr(packed, "_kernel", lambda query: packed._one_by_one)
    want, expected = gradients(forward, model, rewards)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert (grad - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "gemma"])
def test_fp32_against_fp64(family: str) -> None:
    """The packed path in fp32 compared with PEFT's own forward, padded, in fp64: gradients within 1e-5."""
    fast, exact = backbone(family), backbone(family, fast=False, double=True)
    got, grad = gradients(PairTrainer(fast, PAIRS).model.forward, fast, False)
    start = away(exact.layout, exact.initial)
    for name, parameter in exact.parameters.items():
        module = parameter
        module.data = start[name].double()
        module.grad = None
        module.requires_grad_(True)
    outputs = Padded64(exact)([PAIRS.pair(int(row)) for row in ROWS])
    weights = torch.linspace(-1, 1, outputs.numel()).view_as(outputs)
    (outputs * weights).sum().backward()
    expected = torch.cat([exact.parameters[name].grad.reshape(-1) for name in exact.layout.names])
    torch.testing.assert_close(got.double(), outputs.detach(), rtol=1e-5, atol=1e-5)
    assert float((grad.flat.double() - expected).norm() / expected.norm()) < 1e-5


class Padded64:
    """The plain path without its cast to fp32."""

    def __init__(self, model) -> None:
        self.model = model

    def __call__(self, pairs):
        sums = []
        for pair in pairs:
            for response in (pair.chosen, pair.rejected):
                ids = torch.from_numpy(np.concatenate([pair.prompt, response]).astype(np.int64))[None]
                logits = self.model.causal(input_ids=ids, use_cache=False).logits[0, :-1]
                tokens = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
                sums.append(tokens[len(pair.prompt) - 1 :].sum())
        return torch.stack(sums).view(-1, 2)


@pytest.mark.sample
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("needs", NEEDS, ids=lambda needs: "+".join(sorted(needs - {"lora"})) or "lora")
def test_reference_is_the_untouched_model(family: str, needs: set[str]) -> None:
    """With B = 0, identity bottleneck and copied head, Δ_ir is 0: the policy is the bare model."""
    ours = backbone(family, frozenset(needs))
    scores = PairTrainer(ours, PAIRS).score(ours.reference, ROWS)
    bare = backbone(family, fast=False)
    with torch.no_grad(), bare.model.disable_adapter():
        want = PaddedForward(bare)([PAIRS.pair(int(row)) for row in ROWS]).numpy()
    np.testing.assert_allclose(scores.policy, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(scores.policy, scores.reference)


def test_a_pair_does_not_see_its_neighbours() -> None:
    """A pair's log-probabilities are the same alone and at any place in a batch."""
    model = backbone("llama")
    forward = PairTrainer(model, PAIRS).model.forward
    model.load(away(model.layout, model.initial))
    with torch.no_grad():
        alone = torch.cat([forward([PAIRS.pair(row)]) for row in range(6)])
        order = [3, 0, 5, 1, 4, 2]
        together = forward([PAIRS.pair(row) for row in order])
    torch.testing.assert_close(together, alone[order], rtol=1e-5, atol=1e-5)


@given(
    rows=st.integers(1, 5),
    vocabulary=st.integers(2, 40),
    block=st.integers(1, 41),
    keep=st.booleans(),
    seed=st.integers(0, 99),
)
@float64()
def test_blocked_logprobs(rows: int, vocabulary: int, block: int, keep: bool, seed: int) -> None:
    """Values and both gradients are log_softmax's, for any block size, held or computed a second time."""
    draw = torch.Generator().manual_seed(seed)
    hidden = (3 * torch.randn(rows, 4, generator=draw)).requires_grad_()
    weight = torch.randn(vocabulary, 4, generator=draw).requires_grad_()
    pick = torch.randint(rows, (7,), generator=draw)
    targets = torch.randint(vocabulary, (7,), generator=draw)
    slope = torch.randn(7, generator=draw)
    want = (hidden @ weight.t()).log_softmax(-1)[pick, targets]
    expected = torch.autograd.grad(want, (hidden, weight), slope)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "BLOCK", block)
        patch.setattr(logprobs, "KEEP", 1 << 20 if keep else 0)
        got = token_logprobs(hidden, weight, pick, targets)
        grads = torch.autograd.grad(got, (hidden, weight), slope)
        into = torch.ones_like(weight)
        added = token_logprobs(hidden, weight, pick, targets, into)
        (toward,) = torch.autograd.grad(added, hidden, slope)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((toward, into - 1), expected, rtol=1e-12, atol=1e-12)


def phase(parts: Ownership, model, objective: str = "dpo", names=None, **changes) -> Phase:
    settings = {
        "name": "test",
        "train": tuple(names or parts.names(Owner.SHARED)),
        "objective": Objective(objective, {"beta": 0.5}),
        "optimizer": Optimizer("adamw", lr=1e-2),
        "batch_size": 4,
        "epochs": 2,
    }
    return Phase(**{**settings, **changes})


def everything(model) -> Ownership:
    return Ownership.of(model.layout, lambda entry: Owner.SHARED)


@pytest.mark.parametrize("objective", ["dpo", "rpo", "kto_pair", "orpo"])
def test_split_batches_equal_whole_ones(objective: str) -> None:
    """A batch that is split into groups moves the tensors like an unsplit one. This holds too where a pair's
    loss depends on the whole batch (KTO)."""
    results = []
    for most in (4096, 20):
        model = backbone()
        pair_trainer = PairTrainer(model, PAIRS, max_tokens=most)
        trained = pair_trainer.visit(ROWS, Key(5), everything(model)).train(
            model.initial, phase(everything(model), model, objective)
        )
        results.append(trained)
    assert (results[0].tensors - results[1].tensors).norm() < 1e-4 * results[0].tensors.norm()
    assert results[0].loss == pytest.approx(results[1].loss, abs=1e-5)
    assert results[0].steps == 4
    assert results[0].pairs == 12


@pytest.mark.parametrize(("objective", "passes"), [("dpo", 1), ("kto_pair", 2)])
def test_a_split_batch_goes_forward_once_unless_its_loss_needs_it_whole(objective: str, passes: int) -> None:
    """A step on four pairs in g groups makes g forward passes if a pair's loss depends on that pair alone. It
    makes 2 g if the slope at a pair depends on the others (KTO: its reference point is the batch's mean)."""
    model = backbone()
    pair_trainer = PairTrainer(model, PAIRS, max_tokens=20)
    batch = ROWS[:4]
    groups = pair_trainer.model.groups(batch)
    calls = []
    forward = pair_trainer.model.forward

    def counted(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(args)
        return forward(*args, **kwargs)  # type: ignore[arg-type]

    pair_trainer.references.fill_training(batch, batch)
    pair_trainer.model.forward = counted  # type: ignore[assignment]
    pair_trainer.visit(batch, Key(5), everything(model)).gradient(
        model.initial, Objective(objective, {"beta": 0.5})
    )
    assert len(groups) > 1
    assert len(calls) == passes * len(groups)


@pytest.mark.parametrize(("accumulate", "scale"), [(1, 0.955), (2, 0.91225)])
def test_statistics_are_of_a_batch_and_not_of_a_step(accumulate: int, scale: float) -> None:
    """At the reference every implicit margin is 0, and PDPO's s goes towards 0.1, its least: 0.95 + 0.005
    after a batch, 0.95 * 0.955 + 0.005 after the second of a step."""
    model = backbone(needs=frozenset({"lora", "bottleneck", "head", "reward"}))
    pair_trainer = PairTrainer(model, PAIRS)
    what = phase(everything(model), model, "pdpo", batch_size=2, accumulate=accumulate, steps=1, epochs=None)
    trained = pair_trainer.visit(ROWS, Key(5), everything(model)).train(model.initial, what)
    assert trained.memory["scale"] == pytest.approx(scale)
    assert trained.pairs == 2 * accumulate


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("objective", ["dpo", "pdpo"])
def test_cached_features_equal_recomputing(
    family: str, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A phase trains bottleneck, head and reward head. It gives the same numbers if the trunk runs once and
    if it runs in every step."""
    needs = frozenset({"lora", "bottleneck", "head", "reward"})
    results = []
    for most in (1 << 28, 0):
        monkeypatch.setattr(forward_passes, "MAX_FEATURES", most)
        model = backbone(family, needs)
        pair_trainer = PairTrainer(model, PAIRS)
        names = [name for name in model.layout.names if not name.startswith("lora/")]
        what = phase(everything(model), model, objective, names)
        start = away(model.layout, model.initial)
        results.append(pair_trainer.visit(ROWS, Key(5), everything(model)).train(start, what))
    gap = (results[0].tensors - results[1].tensors).norm()
    moved = (results[0].tensors - start).norm()
    assert moved > 0.1
    assert gap < 1e-3 * moved
    assert results[0].loss == pytest.approx(results[1].loss, abs=1e-5)


def test_flat_adamw_equals_one_parameter_at_a_time() -> None:
    """Stepping slices of the buffer equals torch's AdamW over the single tensors, clip included."""
    model = backbone()
    pair_trainer = PairTrainer(model, PAIRS)
    start = away(model.layout, model.initial)
    names = [name for name in model.layout.names if name.endswith("/A")]
    what = phase(everything(model), model, names=names, steps=3, epochs=None, batch_size=6)
    got = pair_trainer.visit(ROWS, Key(5), everything(model)).train(start, what).tensors
    twin = backbone(fast=False)
    twin.load(start)
    twin.train_only(names)
    free = [torch.nn.Parameter(twin.parameters[name].detach().clone()) for name in names]
    optimizer = torch.optim.AdamW(free, lr=1e-2, weight_decay=0.0)
    reference = torch.from_numpy(pair_trainer.score(model.reference, ROWS).reference)
    for _ in range(3):
        for parameter, value in zip(names, free, strict=True):
            twin.parameters[parameter].data.copy_(value)
        twin.grad.zero_()
        ratio = PaddedForward(twin)([PAIRS.pair(row) for row in range(6)]) - reference
        (-torch.nn.functional.logsigmoid(0.5 * (ratio[:, 0] - ratio[:, 1]))).mean().backward()
        for parameter, value in zip(names, free, strict=True):
            value.grad = twin.parameters[parameter].grad.clone()
        torch.nn.utils.clip_grad_norm_(free, 1.0)
        optimizer.step()
    for name, value in zip(names, free, strict=True):
        torch.testing.assert_close(got[name], value.detach(), rtol=1e-3, atol=1e-4)
    for name in model.layout.names:
        if name not in names:
            assert torch.equal(got[name], start[name])


def test_unknown_family_takes_the_plain_path_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = backbone()
    model.family = None
    pair_trainer = PairTrainer(model, PAIRS)
    assert isinstance(pair_trainer.model.forward, PaddedForward)
    assert "plain path" in caplog.text


def test_whole_packing_adds_only_the_last_tokens() -> None:
    """Both packings predict the same targets from the same tokens; ``whole`` has two more tokens per pair."""
    pairs = [PAIRS.pair(row) for row in range(6)]
    cut, whole = Packing.of(pairs), Packing.of(pairs, whole=True)
    assert whole.ids.shape[1] == cut.ids.shape[1] + 12
    assert torch.equal(cut.targets, whole.targets)
    assert torch.equal(cut.ids[0, cut.rows[cut.pick]], whole.ids[0, whole.rows[whole.pick]])
