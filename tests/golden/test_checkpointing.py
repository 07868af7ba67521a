"""Checkpointing against the plain pass: gradients bit-identical, on the packed and on the plain path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.small_models import Pairs, away, backbone

from prefed.core import Key, Objective, Owner, Ownership, Tensors
from prefed.models import ModelError
from prefed.models.backbone import recompute_blocks
from prefed.train import PairTrainer
from prefed.train.packed import PackedForward

PAIRS, ROWS = Pairs(6), np.arange(6)
CASES = [
    ("gpt2", {"lora"}, True),
    ("gpt2", {"lora"}, False),
    ("gpt2", {"lora", "personal_lora", "gate", "outputs"}, True),
    ("llama", {"lora", "bottleneck", "head", "reward"}, True),
    ("llama", {"lora", "bottleneck", "head", "reward"}, False),
    ("qwen2", {"weights"}, True),
]


def trained(
    family: str, needs: set[str], checkpointing: bool, **settings: object
) -> tuple[PairTrainer, Tensors, float]:
    """The trainer, and gradient and value of the DPO loss in all tensors, in two groups and with dropout."""
    model = backbone(family, frozenset(needs), dropout=0.2, checkpointing=checkpointing, **settings)
    trainer = PairTrainer(model, PAIRS, max_tokens=60, fast=model.config.fast)
    everything = Ownership.of(model.layout, lambda entry: Owner.SHARED)
    loss = Objective("pdpo" if "reward" in needs else "dpo", {"beta": 0.5})
    start = away(model.layout, model.initial)
    return trainer, *trainer.visit(ROWS, Key(5), everything).gradient(start, loss)


def check_equal(family: str, needs: set[str], fast: bool, device: str) -> None:
    (plain, grad, loss), (again, other, value) = (
        trained(family, needs, each, fast=fast, device=device) for each in (False, True)
    )
    assert isinstance(plain.model.forward, PackedForward) == fast
    assert len(plain.model.groups(ROWS)) > 1
    assert grad.norm() > 0
    if device == "cpu":
        assert torch.equal(grad.flat, other.flat)
        assert loss == value
    else:
        # Sums over tokens are made in the order in which threads come.
        assert (grad - other).norm() < 1e-5 * grad.norm()
        return
    start = plain.backbone.initial
    np.testing.assert_array_equal(plain.score(start, ROWS).policy, again.score(start, ROWS).policy)


@pytest.mark.parametrize(("family", "needs", "fast"), CASES)
def test_gradients_equal_the_plain_pass_to_the_bit(family: str, needs: set[str], fast: bool) -> None:
    """The second pass through a block has the first one's input, weights and dropout masks. It runs the same
    operations in the same order, so no rounding differs; and so does the gradient behind it."""
    check_equal(family, needs, fast, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("family", "needs", "fast"), CASES[:2])
def test_they_agree_on_a_gpu(family: str, needs: set[str], fast: bool) -> None:
    """Within 1e-5. Its own random state is put back too, or dropout would draw other masks."""
    check_equal(family, needs, fast, "cuda")


@pytest.mark.parametrize(("fast", "twice"), [(True, 1), (False, 2)])
def test_blocks_run_twice_where_that_saves_memory_and_once_elsewhere(fast: bool, twice: int) -> None:
    """Of two blocks the plain path runs both a second time. The packed path does not run the last one again:
    it would be the first to run again, when nothing has been freed yet. A score has no second pass."""
    model = backbone("llama", fast=fast, checkpointing=True)
    trainer, calls = PairTrainer(model, PAIRS, fast=fast), []
    for number, block in enumerate(model.trunk.layers):
        block.mlp.register_forward_pre_hook(lambda module, args, number=number: calls.append(number))
    trainer.score(model.initial, ROWS)
    assert calls.count(0) == calls.count(1) == 2  # the policy and the reference
    trainer.references.fill_training(ROWS, ROWS)
    calls.clear()
    everything = Ownership.of(model.layout, lambda entry: Owner.SHARED)
    trainer.visit(ROWS, Key(5), everything).gradient(model.initial, Objective("dpo"))
    assert calls == [0, 1, *reversed(range(twice))]


def test_less_is_kept_between_the_passes() -> None:
    """Autograd's graph of the trunk holds one tensor of each block that runs twice, and not some twenty."""

    def kept(checkpointing: bool) -> int:
        model = backbone("gpt2", checkpointing=checkpointing)
        forward, held = PairTrainer(model, PAIRS).model.forward, dict[int, int]()
        model.train_only(model.layout.names)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad or tensor.grad_fn is not None:
                held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward([PAIRS.pair(row) for row in range(6)])
        return sum(held.values())

    assert kept(True) < 0.7 * kept(False)


def test_a_model_without_known_blocks_is_refused() -> None:
    class Plain(torch.nn.Linear):
        config = type("Config", (), {"model_type": "plain"})

    message = r"\[model\] checkpointing does not support model type 'plain'; remove it and lower "
    message += r"\[engine\] max_tokens$"
    with pytest.raises(ModelError, match=message):
        recompute_blocks(Plain(2, 2))
