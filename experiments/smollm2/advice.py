"""Clients who want brief and kind advice, a server's questions, and pairs for the reward model that judges.

    python experiments/smollm2/advice.py
    python experiments/smollm2/advice.py --out FOLDER

The pairs are those of ``prefed demo --model`` (``prefed.data.synthetic_chat``). All eight clients want kind
and brief answers; five want casual and three formal ones. The reward model's pairs are of the same eight
tastes, drawn with another seed; none is a client's. The server's questions are on other topics than all
pairs: some to align on, the others to judge on. Writes ``advice.train.jsonl``, ``advice.test.jsonl``,
``advice.reward.jsonl``, ``advice.prompts.jsonl`` and ``advice.judge.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import product
from pathlib import Path
from typing import Any

from prefed.core import Key, files
from prefed.data import synthetic_chat

HERE = Path(__file__).resolve().parent
CASUAL, FORMAL = 5, 3
PAIRS = {"train": 60, "test": 24}
ALIGN, JUDGE = 80, 40
SKILLS = (
    *("drawing", "running", "singing", "cooking", "gardening", "public speaking", "photography", "writing"),
    *("swimming", "dancing", "sewing", "juggling", "baking", "cycling", "painting", "remembering names"),
    *("telling jokes", "being patient", "fixing bikes", "playing the piano"),
)
ASKED = (
    "How do I get better at {}?",
    "How much should I practise {}?",
    "Can you teach me {}?",
    "Is {} worth my time?",
    "What should I know before I start {}?",
    "I am bad at {}. What can I do?",
)


def pairs(key: Key, train: int, test: int) -> dict[str, list[dict[str, Any]]]:
    """Split → the rows of all clients."""
    styles = [synthetic_chat.Style(casual=True, brief=True)] * CASUAL
    styles += [synthetic_chat.Style(casual=False, brief=True)] * FORMAL
    clients = {f"{'casual' if style.casual else 'formal'}-{k}": style for k, style in enumerate(styles)}
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for record in synthetic_chat.generate(key, train=train, test=test, styles=clients):
        prompt = [{"role": message.role, "content": message.content} for message in record.prompt]
        row = {"prompt": prompt, "chosen": record.chosen, "rejected": record.rejected}
        rows[record.split].append({**row, "client": record.client})
    return rows


def questions(seed: int) -> list[dict[str, Any]]:
    """The server's questions, in random order."""
    texts = [asked.format(skill) for asked, skill in product(ASKED, SKILLS)]
    random.Random(seed).shuffle(texts)
    return [{"prompt": [{"role": "user", "content": text}]} for text in texts]


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    clients, server = pairs(Key(7), **PAIRS), questions(7)
    held = [{**row, "client": ""} for rows in clients.values() for row in rows]
    others = [row for rows in pairs(Key(8), **PAIRS).values() for row in rows]
    parts = {
        "train": clients["train"],
        "test": clients["test"],
        "reward": [row for row in others if {**row, "client": ""} not in held],
        "prompts": server[:ALIGN],
        "judge": server[ALIGN : ALIGN + JUDGE],
    }
    for name, rows in parts.items():
        path = args.out / f"advice.{name}.jsonl"
        files.write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
