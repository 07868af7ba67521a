"""A reward model of the personas as they are, for the offline PPO of the opposed clients.

    python experiments/personas/reward.py --model distilbert/distilgpt2 --out runs/reward
    python experiments/personas/reward.py TRAIN TEST --model FOLDER --out runs/reward

Trains a sequence classification model with one output on the pairs of all personas together (Bradley-Terry,
TRL's RewardTrainer) and writes it to ``--out`` with its tokenizer. The reverses have no part in it: it is to
its users what a public reward model is, one opinion, which some clients share and others oppose. Prints the
share of pairs it orders rightly.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from opposed import HERE, by_persona
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer


def pairs(path: Path) -> Dataset:
    """Prompt, chosen and rejected of all personas."""
    rows = [row for _, group in sorted(by_persona(path).items()) for row in group]
    return Dataset.from_list([{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("train", type=Path, nargs="?", default=HERE / "personas.train.jsonl.gz")
    parser.add_argument("test", type=Path, nargs="?", default=HERE / "personas.test.jsonl.gz")
    parser.add_argument("--model", default="distilbert/distilgpt2", help="the trunk: a folder or a hub name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for path in (args.train, args.test):
        if not path.exists():
            parser.error(f"{path}: no such file; prepare.py writes it")
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    with tempfile.TemporaryDirectory() as scratch:
        config = RewardConfig(
            output_dir=scratch,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=32,
            num_train_epochs=args.epochs,
            learning_rate=args.lr,
            max_length=256,
            gradient_checkpointing=False,
            bf16=False,
            save_strategy="no",
            report_to=[],
            seed=args.seed,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = RewardTrainer(
            model,
            args=config,
            train_dataset=pairs(args.train),
            eval_dataset=pairs(args.test),
            processing_class=tokenizer,
        )
        trainer.train()
        accuracy = trainer.evaluate()["eval_accuracy"]
    args.out.mkdir(parents=True, exist_ok=True)
    trainer.model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{args.out}: orders {accuracy:.3f} of the test pairs of the personas rightly")


if __name__ == "__main__":
    main()
