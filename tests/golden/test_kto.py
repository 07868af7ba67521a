"""KTO on thumbs: the loss of TRL, and a visit in plain PyTorch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.small_models import Pair, Pairs, away, backbone

from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase
from prefed.train import PairTrainer
from prefed.train.losses import ThumbBatch, objective
from prefed.train.metrics import ThumbScores

SETTINGS = {"beta": 0.3, "desirable": 1.3, "undesirable": 0.6}


class Thumbs(Pairs):
    """Random responses with thumbs in memory; every third is up. Some unrelated ones are cut."""

    def __init__(self, count: int, seed: int = 0) -> None:
        super().__init__(count, seed)
        self.up = np.arange(count) % 3 == 0
        self._pairs = [Pair(p.prompt, p.chosen, p.chosen[:0]) for p in self._pairs]
        own = np.array([[len(p.prompt), len(p.chosen), 0] for p in self._pairs], np.int32)
        self.lengths = np.where(self.up[:, None], own, own[:, [0, 2, 1]])
        self.max_length = int(own.sum(1).max())

    def pair(self, row: int, other: int | None = None) -> Pair:
        own = self._pairs[row]
        if other is None:
            return own
        unrelated = self._pairs[other].chosen[: self.max_length - len(own.prompt)]
        return Pair(own.prompt, own.chosen, unrelated)


THUMBS = Thumbs(7, seed=5)
EVERY = np.arange(7)


@pytest.mark.parametrize("shift", [-5.0, 5.0])
def test_loss_and_slopes_are_trls_in_float64(shift: float) -> None:
    """TRL's own loss code on given log-probabilities, with the reference point clamped and not."""
    from tests.golden.test_losses_trl import trainer

    kto_trainer = pytest.importorskip("trl.trainer.kto_trainer").KTOTrainer
    draw = torch.Generator().manual_seed(1)
    policy, reference, kl, ref_kl = 3 * torch.randn(4, 6, generator=draw, dtype=torch.float64)
    kl, up = kl + shift, torch.tensor([1, 0, 0, 1, 0, 1]).bool()
    theirs, ours = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    zero = torch.zeros(6, 1, dtype=torch.float64)
    stub = trainer(
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.3,
        undesirable_weight=0.6,
        calculate_KL=True,
        _compute_kl_logps=lambda *_: kl,
    )
    inputs = {
        "input_ids": torch.zeros(6, 2, dtype=torch.int64),
        "attention_mask": torch.ones(6, 2, dtype=torch.int64),
        "completion_mask": torch.tensor([[0, 1]] * 6),
        "label": up,
        "ref_logps": reference,
        "ref_KL_logps": ref_kl,
    }
    out = SimpleNamespace(log_probs=theirs[:, None], entropy=zero, mean_logits=zero, is_top1=zero.bool())
    expected = kto_trainer._compute_loss(stub, lambda **_: out, inputs, False)
    loss = objective("kto")(ThumbBatch(ours, reference, kl - ref_kl, up), SETTINGS)[0].mean()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)


def test_the_reference_is_asked_once_for_thumbs_that_are_scored_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Model and reference pass once each for the first scores, and the model alone for the next, which are
    equal. Other rows have other unrelated responses, so the reference passes again."""
    ours = backbone("llama")
    trainer, start = PairTrainer(ours, THUMBS), away(ours.layout, ours.initial)
    passes, outputs = [], trainer.model.outputs
    monkeypatch.setattr(
        trainer.model, "outputs", lambda rows, **options: passes.append(len(rows)) or outputs(rows, **options)
    )
    first, again = trainer.score(start, EVERY), trainer.score(start, EVERY)
    assert isinstance(first, ThumbScores)
    assert isinstance(again, ThumbScores)
    assert passes == [7, 7, 7]
    assert np.array_equal(first.reference, again.reference)
    assert np.array_equal(first.policy, again.policy)
    trainer.score(start, EVERY[:5])
    assert passes == [7, 7, 7, 5, 5]


@pytest.mark.parametrize("most", [4096, 30])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_packed_equals_padded(family: str, most: int) -> None:
    """The packed path, as one pass or as several, against padding with PEFT: the same to 1e-4."""
    results = []
    for fast in (True, False):
        model = backbone(family, fast=fast)
        parts = Ownership.of(model.layout, lambda entry: Owner.SHARED)
        trainer = PairTrainer(model, THUMBS, max_tokens=most if fast else 4096, fast=fast)
        start = away(model.layout, model.initial)
        scores = trainer.score(start, EVERY)
        assert isinstance(scores, ThumbScores)
        gradient, loss = trainer.visit(EVERY, Key(0), parts).gradient(start, Objective("kto", SETTINGS))
        assert trainer.loss(start, Objective("kto", SETTINGS), EVERY) == pytest.approx(loss, rel=1e-5)
        results.append((scores, gradient.flat, loss))
    (fast_scores, packed, loss), (scores, padded, expected) = results
    assert loss == pytest.approx(expected, rel=1e-5)
    assert float((packed - padded).norm()) < 1e-4 * float(padded.norm())
    np.testing.assert_allclose(fast_scores.policy, scores.policy, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(fast_scores.reference, scores.reference, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(scores.up, THUMBS.up)


class PlainKTO:
    """KTO of a LoRA in float64, one sequence at a time through PEFT's own forward pass."""

    def __init__(self) -> None:
        self.exact = backbone("llama", fast=False, double=True)
        self.names = list(self.exact.layout.names)

    def load(self, start) -> list[torch.Tensor]:
        leaves = [self.exact.parameters[name] for name in self.names]
        for name, leaf in zip(self.names, leaves, strict=True):
            leaf.data = start[name].double().clone()
            leaf.grad = None
            leaf.requires_grad_(True)
        return leaves

    def logprob(self, prompt: np.ndarray, response: np.ndarray) -> torch.Tensor:
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        logits = self.exact.causal(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).sum()

    def ratio(self, prompt: np.ndarray, response: np.ndarray) -> torch.Tensor:
        with torch.no_grad(), self.exact.model.disable_adapter():
            reference = self.logprob(prompt, response)
        return self.logprob(prompt, response) - reference

    def loss(self, rows: list[int]) -> torch.Tensor:
        """−value + λ of the paper, mean over the batch; a batch of one has no unrelated response."""
        point = torch.zeros((), dtype=torch.float64)
        if len(rows) > 1:
            follow = [*rows[1:], rows[0]]
            with torch.no_grad():
                pairs = [THUMBS.pair(row, other) for row, other in zip(rows, follow, strict=True)]
                point = torch.stack([self.ratio(p.prompt, p.rejected) for p in pairs]).mean().clamp(min=0)
        total = torch.zeros((), dtype=torch.float64)
        for row in rows:
            reward = self.ratio(THUMBS.pair(row).prompt, THUMBS.pair(row).chosen)
            if THUMBS.up[row]:
                value = SETTINGS["desirable"] * torch.sigmoid(SETTINGS["beta"] * (reward - point))
                total = total + SETTINGS["desirable"] - value
            else:
                value = SETTINGS["undesirable"] * torch.sigmoid(SETTINGS["beta"] * (point - reward))
                total = total + SETTINGS["undesirable"] - value
        return total / len(rows)


def test_a_visit_against_its_twin() -> None:
    """Two epochs over seven thumbs: steps of two batches of three, each with its own reference point, then a
    batch of one. Plain SGD with clipping in float64; the moved distance agrees to 1e-4."""
    ours, key = backbone("llama"), Key(4)
    start = away(ours.layout, ours.initial)
    parts = Ownership.of(ours.layout, lambda entry: Owner.SHARED)
    phase = Phase(
        "train",
        ours.layout.names,
        Objective("kto", SETTINGS),
        Optimizer("sgd", lr=2.0, clip=0.5, weight_decay=0.0),
        batch_size=3,
        epochs=2,
        accumulate=2,
    )
    result = PairTrainer(ours, THUMBS).visit(EVERY, key, parts).train(start, phase)

    twin = PlainKTO()
    leaves, losses = twin.load(start), []
    for epoch in range(2):
        order = key.at("phase", "train").at("epoch", epoch).numpy().permutation(EVERY).tolist()
        for batches in ([order[:3], order[3:6]], [order[6:]]):
            loss = torch.stack([twin.loss(batch) for batch in batches]).mean()
            slopes = torch.autograd.grad(loss, leaves)
            norm = torch.cat([slope.reshape(-1) for slope in slopes]).norm()
            losses.append(float(loss.detach()))
            with torch.no_grad():
                for leaf, slope in zip(leaves, slopes, strict=True):
                    leaf -= 2.0 * slope * min(1.0, 0.5 / float(norm))
    expected = torch.cat([leaf.detach().reshape(-1) for leaf in leaves])
    moved = (expected - start.flat.double()).norm()
    assert float((result.tensors.flat.double() - expected).norm()) < 1e-4 * float(moved)
    assert result.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert (result.steps, result.pairs) == (4, 14)
