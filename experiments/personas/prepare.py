r"""Pairs of ten personas from anthropics/evals (Perez et al. 2022, arXiv:2212.09251, CC BY 4.0).

    git clone --depth 1 https://github.com/anthropics/evals
    python experiments/personas/prepare.py evals/persona
    python experiments/personas/prepare.py              # the same files, from Anthropic/model-written-evals

A persona's file holds statements that it would make ("answer_matching_behavior" Yes) and that it would not
(No), each with the confidence in its label. They are shuffled and joined: chosen is one that the persona
would make, rejected one that it would not, margin the sum of both confidences minus 1. A fifth of each
persona's pairs is for the test; no statement of a persona occurs twice. Writes ``personas.train.jsonl.gz``
and ``personas.test.jsonl.gz``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path
from typing import Any

from prefed.core import files

HUB = "Anthropic/model-written-evals"
PERSONAS = (
    "politically-liberal",
    "politically-conservative",
    "risk-averse",
    "risk-seeking",
    "interest-in-sports",
    "interest-in-math",
    "agreeableness",
    "narcissism",
    "subscribes-to-Buddhism",
    "extraversion",
)
QUESTIONS = (
    "What do you think?",
    "What matters to you?",
    "Tell me something you believe.",
    "Share an opinion of yours.",
    "What is something you would say?",
    "Say something that sounds like you.",
)


def statements(path: Path) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    """What a persona would say and would not say, each with the confidence in its label.

    Raises:
        SystemExit: a line that is no such statement.
    """
    sides: dict[str, dict[str, float]] = {"Yes": {}, "No": {}}
    for number, line in enumerate(path.read_text("utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            side = sides[row["answer_matching_behavior"].strip()]
            text, confidence = row["statement"].strip(), float(row["label_confidence"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SystemExit(
                f"{path}, row {number}: no statement with label_confidence and a Yes or No in "
                f"answer_matching_behavior ({error!r}); is this a persona file of anthropics/evals?"
            ) from error
        if text not in sides["Yes"] and text not in sides["No"]:
            side[text] = confidence
    return list(sides["Yes"].items()), list(sides["No"].items())


def pairs(path: Path, persona: str, draw: random.Random) -> list[dict[str, Any]]:
    """A persona's pairs, shuffled."""
    would, would_not = statements(path)
    draw.shuffle(would)
    draw.shuffle(would_not)
    return [
        {
            "prompt": f"\n\nHuman: {draw.choice(QUESTIONS)}\n\nAssistant:",
            "chosen": f" {chosen}",
            "rejected": f" {rejected}",
            "persona": persona,
            "margin": round(yes + no - 1, 4),
        }
        for (chosen, yes), (rejected, no) in zip(would, would_not, strict=False)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """JSON lines, gzipped to the same bytes each time."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    files.write(path, gzip.compress(text.encode(), mtime=0))
    print(f"{path}: {len(rows)} pairs")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="?", help=f"folder of the persona files; left out: {HUB}")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--persona", action="append", help=f"left out: {', '.join(PERSONAS)}")
    parser.add_argument("--test", type=float, default=0.2, help="share of a persona's pairs (default 0.2)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train: list[dict[str, Any]] = []
    test: list[dict[str, Any]] = []
    for persona in args.persona or PERSONAS:
        if args.source is None:
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(HUB, f"persona/{persona}.jsonl", repo_type="dataset"))
        else:
            path = Path(args.source) / f"{persona}.jsonl"
            if not path.exists():
                parser.error(
                    f"{path}: no such file; the source is the folder with the personas' .jsonl files"
                )
        rows = pairs(path, persona, random.Random(f"{args.seed}/{persona}"))
        tested = round(args.test * len(rows))
        train += rows[tested:]
        test += rows[:tested]
    write(args.out / "personas.train.jsonl.gz", train)
    write(args.out / "personas.test.jsonl.gz", test)


if __name__ == "__main__":
    main()
