"""KTO on thumbs: the loss by hand, TRL's KTOTrainer on the same tokens, and a visit in plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.small_models import Pair, Pairs, away, backbone, causal, put_lora

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


def test_thumbs_by_hand() -> None:
    """z_0 = max(0, (0.4 + 0.8 − 0.6)/3) = 0.2. With β = 1/2: an up at r = 0.2 + 2 log 3 has σ(−log 3) = 1/4,
    times λ_D = 2; a down at the same r has σ(log 3) = 3/4, times λ_U = 3; an up at z_0 has 1/2. The slope of
    λ σ(∓β (r − z_0)) is ∓ λ β σ (1 − σ), and the mismatched log-ratios have none."""
    far = 0.2 + 2 * np.log(3.0)
    policy = torch.tensor([far, far - 1, 0.2], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, -1.0, 0.0], dtype=torch.float64)
    other = torch.tensor([0.4, 0.8, -0.6], dtype=torch.float64, requires_grad=True)
    batch = ThumbBatch(policy, reference, other, torch.tensor([True, False, True]))
    loss, metrics = objective("kto")(batch, {"beta": 0.5, "desirable": 2.0, "undesirable": 3.0})
    torch.testing.assert_close(loss, torch.tensor([0.5, 2.25, 1.0], dtype=torch.float64))
    loss.sum().backward()
    slope = torch.tensor([-2 * 3 / 16, 3 * 3 / 16, -2 / 4], dtype=torch.float64) / 2
    torch.testing.assert_close(policy.grad, slope)
    assert other.grad is None
    assert float(metrics["kl"]) == pytest.approx(0.2)
    below = ThumbBatch(policy.detach(), reference, -other.detach(), batch.up)
    assert float(objective("kto")(below)[1]["kl"]) == 0


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


def trl_trainer(family: str, out: Path):
    """TRL's KTOTrainer over PEFT's LoRA of the same shape; its data set is a placeholder."""
    trl = pytest.importorskip("trl")
    import datasets
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"w0": 0, "w1": 1}, unk_token="w0")),
        eos_token="w0",
        pad_token="w1",
    )
    row = {"prompt": "w1", "completion": "w1", "label": True}
    lora = LoraConfig(
        r=3,
        lora_alpha=6,
        lora_dropout=0.0,
        target_modules=list(backbone(family).family.targets),
        fan_in_fan_out=family == "gpt2",
        task_type="CAUSAL_LM",
    )
    config = trl.KTOConfig(
        output_dir=str(out),
        beta=0.3,
        desirable_weight=1.3,
        undesirable_weight=0.6,
        max_length=None,
        per_device_train_batch_size=7,
        train_sampling_strategy="sequential",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    made = trl.KTOTrainer(
        copy.deepcopy(causal(family)),
        args=config,
        train_dataset=datasets.Dataset.from_list([row, row | {"label": False}]),
        processing_class=words,
        peft_config=lora,
    )
    made.current_gradient_accumulation_steps = 1
    return made


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_loss_and_gradients_of_a_model_are_trls(family: str, tmp_path: Path) -> None:
    """Seven thumbs in a batch, mismatched in the same way: loss to 1e-5, gradients to 1e-4 of their norm."""
    ours = backbone(family)
    start = away(ours.layout, ours.initial)
    parts = Ownership.of(ours.layout, lambda entry: Owner.SHARED)
    gradient, loss = (
        PairTrainer(ours, THUMBS).visit(EVERY, Key(0), parts).gradient(start, Objective("kto", SETTINGS))
    )
    theirs = trl_trainer(family, tmp_path)
    parameters = put_lora(theirs.model, start)
    examples = []
    for row in EVERY:
        prompt, response, unrelated = (ids.tolist() for ids in THUMBS.pair(row, (row + 1) % 7))
        examples.append(
            {
                "prompt_ids": prompt,
                "completion_ids": response,
                "KL_completion_ids": unrelated,
                "label": bool(THUMBS.up[row]),
            }
        )
    theirs.model.eval()
    expected = theirs.compute_loss(theirs.model, theirs.data_collator(examples))
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), abs=1e-5)
    scale = torch.cat([parameter.grad.reshape(-1) for parameter in parameters.values()]).norm()
    for name, parameter in parameters.items():
        torch.testing.assert_close(gradient[name], parameter.grad, rtol=0, atol=1e-4 * float(scale))


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
