"""The trainer's loss and gradients compared with TRL's DPOTrainer on the same tokens and the same tensors."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.small_models import Pairs, away, backbone, causal, put_lora

from prefed.core import Key, Objective, Owner, Ownership
from prefed.train import PairTrainer

trl = pytest.importorskip("trl")
PAIRS = Pairs(4, seed=8)


def trainer(family: str, out: Path):
    """TRL's trainer over PEFT's LoRA of the same shape; its data set is a placeholder."""
    import datasets
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    targets = list(backbone(family).family.targets)
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"w0": 0, "w1": 1}, unk_token="w0")),
        eos_token="w0",
        pad_token="w1",
    )
    trainer = trl.DPOTrainer(
        copy.deepcopy(causal(family)),
        args=trl.DPOConfig(
            output_dir=str(out), beta=0.3, max_length=None, report_to=[], use_cpu=True, bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "w1", "chosen": "w1", "rejected": "w0"}]),
        processing_class=words,
        peft_config=LoraConfig(
            r=3,
            lora_alpha=6,
            lora_dropout=0.0,
            target_modules=targets,
            fan_in_fan_out=family == "gpt2",
            task_type="CAUSAL_LM",
        ),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    return trainer


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "gemma"])
def test_loss_and_gradients_are_trls(family: str, tmp_path: Path) -> None:
    """DPO at β 0.3 on one batch: loss to 1e-5, every LoRA gradient to 1e-4 of the gradient's norm."""
    ours = backbone(family)
    start = away(ours.layout, ours.initial)
    parts = Ownership.of(ours.layout, lambda entry: Owner.SHARED)
    pair_trainer = PairTrainer(ours, PAIRS)
    gradient, loss = pair_trainer.visit(np.arange(4), Key(0), parts).gradient(
        start, Objective("dpo", {"beta": 0.3})
    )

    theirs = trainer(family, tmp_path)
    parameters = put_lora(theirs.model, start)
    examples = [
        {f"{key}_ids": getattr(PAIRS.pair(row), key).tolist() for key in ("prompt", "chosen", "rejected")}
        for row in range(4)
    ]
    theirs.model.eval()
    for module in theirs.model.modules():
        module.training = False
    expected = theirs.compute_loss(theirs.model, theirs.data_collator(examples))
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), abs=1e-5)
    scale = torch.cat([parameter.grad.reshape(-1) for parameter in parameters.values()]).norm()
    for name, parameter in parameters.items():
        torch.testing.assert_close(gradient[name], parameter.grad, rtol=0, atol=1e-4 * float(scale))
