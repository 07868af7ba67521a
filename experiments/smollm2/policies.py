"""Judged policies of path.toml: win rates over seeds, and answers that no reader would accept.

    python experiments/smollm2/policies.py runs/smollm2/oracle-* runs/smollm2/selector-*

Each folder ``LABELS-SEED`` is a run that ``prefed judge`` has compared with the base model. Of its answers,
and of the base model's, the table counts

- ``few words``: fewer than 40% of the words are distinct;
- ``repeated``: one to four characters, e.g. an emoji, occur at least six times in a row;
- ``offer``: the answer offers help, e.g. "I'm here to help" or "How can I assist you?".
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from prefed.train.metrics import seed_interval

DISTINCT = 0.4
REPEATED = re.compile(r"(\S{1,4}?)(\s*\1){5}")
OFFER = re.compile(
    r"(here|happy|glad|pleased|delighted) to (help|support|assist|listen)|how (can|may) I (help|assist)", re.I
)


def faults(answers: Sequence[str]) -> dict[str, int]:
    """How many answers have each fault.

    >>> faults(["Ah, ah, ah, ah.", "Good!!!!!!", "Hello! How can I help you?", "Practise daily."])
    {'few words': 1, 'repeated': 1, 'offer': 1}
    """
    words = [re.findall(r"\w+", answer.lower()) for answer in answers]
    return {
        "few words": sum(len(set(each)) < DISTINCT * len(each) for each in words),
        "repeated": sum(REPEATED.search(answer) is not None for answer in answers),
        "offer": sum(OFFER.search(answer) is not None for answer in answers),
    }


def read(folder: Path) -> dict[str, Any]:
    """The figures of a judged run."""
    epochs = json.loads((folder / "align/summary.json").read_text("utf-8"))["train"]["epochs"]
    (judged,) = (path.parent for path in folder.glob("judge/*/verdicts.jsonl"))
    verdicts = [json.loads(line) for line in (judged / "verdicts.jsonl").read_text("utf-8").splitlines()]
    return {
        "agreement": [epoch["agreement"] for epoch in epochs],
        "rate": json.loads((judged / "summary.json").read_text("utf-8"))["win_rate"],
        "policy": faults([verdict["text"] for verdict in verdicts]),
        "base": faults([verdict["against"] for verdict in verdicts]),
        "answers": len(verdicts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="LABELS-SEED")
    rates: dict[str, list[float]] = {}
    print("| labels | seed | agreement by epoch | win rate | answers | few words | repeated | offer |")
    print("|---|---|---|---|---|---|---|---|")
    for folder in parser.parse_args().folders:
        labels, _, seed = folder.resolve().name.rpartition("-")
        found = read(folder)
        rate = found["rate"]
        rates.setdefault(labels, []).append(rate["mean"])
        counts = [f"{count} ({found['base'][name]})" for name, count in found["policy"].items()]
        agreement = ", ".join(f"{each:.3f}" for each in found["agreement"])
        shown = f"{rate['mean']:.1%} [{100 * rate['low']:.1f}, {100 * rate['high']:.1f}]"
        print("|", " | ".join((labels, seed, agreement, shown, str(found["answers"]), *counts)), "|")
    print("\nIn parentheses: answers of the base model; in brackets: 95% intervals over questions")
    for labels, means in rates.items():
        interval = seed_interval(means, within=(0.0, 1.0))
        if interval is not None:
            low, high = interval
            over = f"over {len(means)} seeds {100 * low:.1f}% to {100 * high:.1f}%"
            print(f"{labels}: {fmean(means):.1%}, 95% interval {over}")


if __name__ == "__main__":
    main()
