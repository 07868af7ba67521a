"""Train a reward model on your own pairs, for ``--judge reward:FOLDER`` and for offline PPO.

    python experiments/reward_model.py TRAIN TEST --model MODEL --out runs/reward
    python experiments/reward_model.py TRAIN --model MODEL --out runs/reward --trunk frozen --lr 1e-2

TRAIN and TEST are pairs in any form that prefed reads; without TEST, a tenth of TRAIN is held out. MODEL is a
causal language model. A scalar head on its trunk is trained with the Bradley-Terry loss,
-log σ(r(x, y_w) - r(x, y_l)): with ``--trunk lora``, an adapter of rank 8 is trained too and merged into the
weights; with ``frozen``, the head only; with ``full``, all weights. Texts become the tokens that the judge
sees, at most ``--max-length``, which is stored with the tokenizer. The output is a folder for
``AutoModelForSequenceClassification``.

Prints the accuracy: the share of held-out pairs in which the chosen response has the higher score.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from prefed.data import DataConfig, DataError, Record
from prefed.data.errors import ErrorCollector
from prefed.data.sources import ReadCounts, read_records
from prefed.models import ModelError, load_pretrained
from prefed.models.pretrained import find_device, silence_transformers
from prefed.train.reward_model import RewardModel

CHUNKS = 10
"""Lines of progress."""


def read(train: str, test: str | None, seed: int) -> tuple[list[Record], list[Record]]:
    """Shuffled pairs for training, and held-out pairs."""
    config = DataConfig.model_validate(
        {"train": train, "test": test, "partition": {"by": "iid", "clients": 1}}
    )
    pairs, errors = [], ErrorCollector()
    for role, name, source in config.sources():
        found = [record for record, _ in read_records(source, config, role, name, errors, ReadCounts())]
        random.Random(seed).shuffle(found)
        pairs.append(found)
    errors.raise_if_any()
    if test is None:
        held = math.ceil(len(pairs[0]) / 10)
        pairs = [pairs[0][held:], pairs[0][:held]]
    return pairs[0], pairs[1]


def untrained(name: str, max_length: int, folder: str) -> None:
    """Write a causal model's trunk with a random head, and its tokenizer."""
    tokenizer = load_pretrained(AutoTokenizer, "--model", name, "tokenizer")
    tokenizer.model_max_length = min(tokenizer.model_max_length, max_length)
    # The head is new, so the checkpoint need not have all weights of the model.
    model = AutoModelForSequenceClassification.from_pretrained(
        name, num_labels=1, dtype=torch.float32, trust_remote_code=False
    )
    for part in (model, tokenizer):
        part.save_pretrained(folder)


def train(reward: RewardModel, pairs: Sequence[Record], args: argparse.Namespace) -> None:
    """Train the model in place, with AdamW and a rate that falls to zero linearly."""
    model = reward.model.requires_grad_(args.trunk == "full")
    if args.trunk == "lora":
        conv1d = model.config.model_type == "gpt2"
        lora = LoraConfig(
            r=8, lora_alpha=16, target_modules="all-linear", fan_in_fan_out=conv1d, task_type="SEQ_CLS"
        )
        model = get_peft_model(model, lora)
    elif args.trunk == "frozen":
        model.requires_grad_(True)
        model.base_model.requires_grad_(False)
    free = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(free, lr=args.lr, weight_decay=0.0)
    steps = math.ceil(args.epochs * len(pairs) / args.batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    encoded = [reward.encode(pair.prompt, pair.chosen, pair.rejected) for pair in pairs]
    order, losses = [], []
    model.train()
    for step in range(steps):
        while len(order) < args.batch_size:
            order += torch.randperm(len(pairs)).tolist()
        batch, order = order[: args.batch_size], order[args.batch_size :]
        texts = [encoded[row][side] for side in (0, 1) for row in batch]
        inputs = reward.tokenizer.pad(texts, return_tensors="pt", verbose=False)
        chosen, rejected = model(**inputs.to(reward.device)).logits[:, 0].chunk(2)
        loss = -F.logsigmoid(chosen - rejected).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(free, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) * CHUNKS // steps > step * CHUNKS // steps:
            print(f"step {step + 1}/{steps}: loss {sum(losses) / len(losses):.4f}", flush=True)
            losses.clear()
    if args.trunk == "lora":
        reward.model = model.merge_and_unload()


def accuracy(reward: RewardModel, pairs: Sequence[Record]) -> float:
    """The share of pairs in which the chosen response has the higher score."""
    encoded = [text for p in pairs for text in reward.encode(p.prompt, p.chosen, p.rejected)]
    scores = reward.score(encoded).reshape(-1, 2)
    return float((scores[:, 0] > scores[:, 1]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("train", help="pairs: a file, a folder or a hub name")
    parser.add_argument("test", nargs="?", help="held-out pairs")
    parser.add_argument("--model", required=True, help="a causal language model: a folder or a hub name")
    parser.add_argument("--out", required=True)
    parser.add_argument("--trunk", choices=["lora", "frozen", "full"], default="lora")
    parser.add_argument("--pairs", type=int, help="train on at most this many, drawn with the seed")
    parser.add_argument("--test-pairs", type=int, help="hold out at most this many")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    silence_transformers()
    torch.manual_seed(args.seed)
    device = find_device("auto")
    try:
        pairs, held = read(args.train, args.test, args.seed)
        pairs, held = pairs[: args.pairs], held[: args.test_pairs]
        if not (pairs and held):
            parser.error(f"{len(pairs)} pairs to train on and {len(held)} held out; both need at least one")
        with tempfile.TemporaryDirectory() as folder:
            untrained(args.model, args.max_length, folder)
            reward = RewardModel(folder, device, "--model")
    except (DataError, ModelError) as error:
        parser.error(str(error))
    train(reward, pairs, args)
    for part in (reward.model, reward.tokenizer):
        part.save_pretrained(args.out)
    print(
        f"{args.out}: held-out accuracy {accuracy(RewardModel(args.out, device), held):.3f} on {len(held):,} "
        f"pairs (trained on {len(pairs):,}: trunk {args.trunk}, seed {args.seed}, epochs {args.epochs:g}, lr "
        f"{args.lr:g}, max length {reward.tokenizer.model_max_length})"
    )


if __name__ == "__main__":
    main()
