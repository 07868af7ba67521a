"""Clients with known tastes, the server's prompts, and a small model that speaks their grammar.

    python experiments/synthetic/prepare.py
    python experiments/synthetic/prepare.py --out FOLDER

The clients' pairs are those of ``prefed.data.synthetic``. All their prompts are among eighteen. The server
has prompts of its own: other requests, each for an occasion, so no client holds one. Some are for the
alignment, the others are for the judging. The model is pretrained on responses to prompts of both kinds, with
all attributes equally likely: it has no taste. Writes ``train.jsonl``, ``test.jsonl``, ``prompts.jsonl``,
``test-prompts.jsonl`` and the folder ``model``. As many clients of two opposed tastes are in ``opposed``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from prefed.core import Key, files
from prefed.data.synthetic import corpus, generate, write
from prefed.models.tiny import make_tiny

HERE = Path(__file__).resolve().parent
REQUESTS = (
    "Suggest {} {}.",
    "Find me {} {}.",
    "I need {} {}.",
    "Pick {} {}.",
    "Name {} {}.",
    "I want {} {}.",
)
OCCASIONS = (
    *("for tonight", "for the weekend", "for a rainy day", "for my sister", "for a friend", "for two"),
    *("for beginners", "after work", "on a budget", "in spring", "near the sea", "with children"),
)
_TURN = re.compile(r"\n\nHuman: .*?(a \w+)\.\n\nAssistant:")
"""A prompt of the grammar; the group is its topic."""


def server_prompts(topics: Iterable[str], draw: np.random.Generator) -> list[str]:
    """Every request for every topic and occasion, as a dialogue's first turn, shuffled."""
    wishes = product(REQUESTS, sorted(topics), OCCASIONS)
    prompts = [f"\n\nHuman: {request.format(*words)}\n\nAssistant:" for request, *words in wishes]
    return [prompts[k] for k in draw.permutation(len(prompts))]


def topic(text: str) -> str:
    """The topic of a dialogue of the grammar."""
    turn = _TURN.match(text)
    assert turn is not None
    return turn.group(1)


def texts(dialogues: Iterable[str], prompts: Sequence[str], draw: np.random.Generator) -> Iterator[str]:
    """The dialogues; every other one with a prompt of the server on the same topic."""
    for number, text in enumerate(dialogues):
        if number % 2 == 0:
            yield text
            continue
        alike = [prompt for prompt in prompts if f" {topic(text)} " in prompt]
        yield alike[int(draw.integers(len(alike)))] + _TURN.sub("", text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=120, help="training pairs of a client (default 120)")
    parser.add_argument("--test-pairs", type=int, default=50, help="test pairs of a client (default 50)")
    parser.add_argument("--prompts", type=int, default=200, help="for the alignment (default 200)")
    parser.add_argument("--steps", type=int, default=500, help="pretraining steps (default 500)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    key = Key(args.seed).at("synthetic")
    args.out.mkdir(parents=True, exist_ok=True)
    size = {"clients": args.clients, "train": args.pairs, "test": args.test_pairs}
    write(args.out, generate(key.at("pairs"), **size))
    write(args.out / "opposed", generate(key.at("opposed"), **size, opposed=True))
    dialogues = list(corpus(key.at("texts"), 4000))
    prompts = server_prompts({topic(text) for text in dialogues}, key.at("prompts").numpy())
    if not 0 < args.prompts < len(prompts):
        parser.error(f"--prompts {args.prompts}: give fewer than {len(prompts)}, the rest is for the judging")
    for name, part in {"prompts": prompts[: args.prompts], "test-prompts": prompts[args.prompts :]}.items():
        rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in part)
        files.write(args.out / f"{name}.jsonl", rows.encode())
        print(f"{args.out / name}.jsonl: {len(part)} prompts")
    make_tiny(
        args.out / "model",
        texts(dialogues, prompts, key.at("replaced").numpy()),
        key.at("model"),
        layers=args.layers,
        width=args.width,
        context=256,
        steps=args.steps,
    )
    print(f"{args.out / 'model'}: {args.layers} layers of width {args.width}")


if __name__ == "__main__":
    main()
