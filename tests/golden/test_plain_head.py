"""The plain path's head runs at completion rows only, and its passes are as large as what runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.small_models import FAMILIES, VOCABULARY, Choices, Pairs, away, backbone

from prefed.train import PairTrainer, forward_passes
from prefed.train.padded import PaddedForward, logits_at, pad, shifted
from prefed.train.ppo import token_outputs

PAIRS, ROWS = Pairs(9), np.arange(9)


def watched(model: Any, sizes: list[int]) -> Any:
    """Notes how many rows of logits each call of the head gives."""
    head = model.causal.get_output_embeddings()
    return head.register_forward_hook(lambda _, __, out: sizes.append(out.numel() // out.shape[-1]))


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_and_gradients_are_those_of_full_logits(family: str) -> None:
    """In float64, against the model's own forward with all logits: 1e-6 and far below."""
    model = backbone(family, fast=False, double=True)
    start = away(model.layout, model.initial)
    for name, parameter in model.parameters.items():
        parameter.data, parameter.grad = start[name].double(), None
        parameter.requires_grad_(True)
    ids, attention, completion = pad([PAIRS.pair(int(row)) for row in ROWS])

    def gradient(tokens: torch.Tensor) -> list[torch.Tensor]:
        slopes = torch.linspace(-1, 1, len(tokens), dtype=torch.float64)
        return list(torch.autograd.grad((tokens * slopes).sum(), list(model.parameters.values())))

    sizes: list[int] = []
    handle = watched(model, sizes)
    logits, _ = logits_at(model.causal, shifted(completion), input_ids=ids, attention_mask=attention)
    handle.remove()
    got = logits.log_softmax(1).gather(1, ids[completion][:, None])[:, 0]
    full = model.causal(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
    every = full.log_softmax(2).gather(2, ids[:, 1:, None])[..., 0]
    want = every[completion[:, 1:]]
    assert sizes == [int(completion.sum())]
    assert sizes[0] < full.shape[0] * full.shape[1] / 2
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    for one, other in zip(gradient(got), gradient(want), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_model_that_does_not_call_its_head_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the logits of all positions are there, and those of the rows are taken of them."""
    model = backbone("gpt2", fast=False)
    pairs = [PAIRS.pair(int(row)) for row in ROWS]
    want = PaddedForward(model)(pairs)

    class Elsewhere:
        def register_forward_pre_hook(self, hook: Any) -> Any:
            return torch.nn.Identity().register_forward_pre_hook(hook)

    monkeypatch.setattr(model.causal, "get_output_embeddings", Elsewhere)
    torch.testing.assert_close(PaddedForward(model)(pairs), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("most", [60, 200, 10_000])
def test_no_pass_is_larger_than_its_budget(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass has the padded batch's tokens, prompts with each response; logits are counted at the head. A
    pair that is larger by itself is the only one that may be."""
    model = backbone("llama", fast=False)
    trainer = PairTrainer(model, PAIRS, max_tokens=most, fast=False)
    logits = 20 * VOCABULARY
    monkeypatch.setattr(forward_passes, "MAX_LOGITS", logits)
    groups = trainer.model.groups(ROWS)
    np.testing.assert_array_equal(np.concatenate(groups), ROWS)
    sizes: list[int] = []
    handle = watched(model, sizes)
    for group in groups:
        ids, _, _ = pad([PAIRS.pair(int(row)) for row in group])
        trainer.model.run(group)
        if len(group) > 1:
            assert ids.numel() <= most
            assert sizes[-1] * VOCABULARY <= logits
    handle.remove()
    assert any(len(group) > 1 for group in groups)


def test_choices_and_tokens_have_logits_of_their_rows_only() -> None:
    """Two last rows of each choice, and the completion tokens of offline PPO."""
    model, sizes = backbone("llama", fast=False), []
    handle = watched(model, sizes)
    PairTrainer(model, Choices(5), fast=False).model.run(np.arange(5))
    handle.remove()
    assert sizes == [10]
    model, sizes = backbone("llama", frozenset({"lora", "value"}), fast=False), []
    handle = watched(model, sizes)
    pairs = [PAIRS.pair(int(row)) for row in ROWS]
    outputs = token_outputs(model, PaddedForward(model), pairs)
    handle.remove()
    assert sizes == [len(outputs.logprobs)] == [sum(len(p.chosen) + len(p.rejected) for p in pairs)]
