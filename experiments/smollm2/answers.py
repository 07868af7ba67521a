"""Clients with a visible taste for brief, formal or listed answers, and a program that judges answers.

    python experiments/smollm2/answers.py
    python experiments/smollm2/answers.py --out FOLDER

For each taste, six clients want it and six want the opposite, on the topics of
``prefed.data.synthetic_chat``: 40 pairs to train and 6 to test per client, and no question of a test pair is
one of a training pair. Another 60 questions are on no topic of a pair. Writes them to
``answers.prompts.jsonl``, the pairs of the six who want the taste to ``answers.TASTE.train.jsonl`` and
``answers.TASTE.test.jsonl``, and those of all twelve to
``answers.TASTE-opposed.train.jsonl`` and ``answers.TASTE-opposed.test.jsonl``.

:func:`utility` scores an answer for a taste. It counts words, so it cannot be fooled by a label.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from prefed.core import Key, files
from prefed.data.synthetic_chat import _TOPICS, TESTED, Style, answer

HERE = Path(__file__).resolve().parent
TASTES = ("brief", "formal", "lists")
CLIENTS = 6
OPPOSITE = "not-"
PAIRS = {"train": 40, "test": 6}
SKILLS = (
    *("drawing", "singing", "dancing", "writing", "sewing", "baking", "painting", "skating", "fishing"),
    *("rowing", "skiing", "acting", "coding", "boxing", "climbing"),
)
QUESTIONS = (
    "How do I get better at {}?",
    "Can you teach me {}?",
    "How much should I practise {}?",
    "What should I know before I start {}?",
)
ASKED = ("{}", "Quick question: {}", "A friend asks me: {}", "Please help me. {}")
FORMAL = re.compile(
    r"\b(?:I would|would recommend|advisable|furthermore|in addition|certainly|moreover|therefore|sensible"
    r"|thank you for|every success|of help to you|one should|consider)\b",
    re.I,
)
CASUAL = re.compile(
    r"\b(?:hey|oh|just|totally|basically|you see|plus|okay|cool|yeah|fun|got this|good luck)\b|['’]|!", re.I
)
ITEM = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+\S")


def utility(taste: str, text: str) -> float:
    r"""How much an answer is to a taste; an empty one is worth less than any other.

    ``brief``: minus the words. ``formal``: formal turns of phrase less casual ones, per word. ``lists``: the
    share of lines that are items of a list. An opposite such as ``not-brief`` has minus the utility.

    >>> utility("brief", "Go to bed early."), utility("lists", "- Go to bed.\n- Get up.")
    (-4.0, 1.0)
    >>> utility("not-brief", "Go to bed early."), utility("not-brief", "")
    (4.0, -inf)
    """
    words = len(text.split())
    if not words:
        return -float("inf")
    if taste.startswith(OPPOSITE):
        return -utility(taste.removeprefix(OPPOSITE), text)
    if taste == "brief":
        return -float(words)
    if taste == "formal":
        return (len(FORMAL.findall(text)) - len(CASUAL.findall(text))) / words
    lines = [line for line in text.splitlines() if line.strip()]
    return sum(ITEM.match(line) is not None for line in lines) / len(lines)


def answers(generator: np.random.Generator, topic: tuple[str, ...], taste: str) -> tuple[str, str]:
    """An answer that is to the taste, and one that is to the opposite taste."""
    _, do, reason, more = topic
    first, second, third = (f"{part[0].upper()}{part[1:]}." for part in (do, reason, more))
    if taste == "lists":
        return f"- {first}\n- {second}\n- {third}", f"{first} {second} {third}"
    if taste == "formal":
        formal, casual = (Style(casual=casual, brief=True) for casual in (False, True))
        return answer(generator, topic, formal), answer(generator, topic, casual)
    long = (
        f"There are several things that you can do. One of them is to {do}, because {reason}. {third} "
        "It is worth trying this for a few weeks."
    )
    return first, long


def taste_of(client: str) -> str:
    """The taste of a client.

    >>> taste_of("not-brief-3")
    'not-brief'
    """
    return client.rpartition("-")[0]


def pairs(taste: str, key: Key) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield split and row of every pair; the six clients who want the taste come first."""
    topics = _TOPICS
    parts = {"train": topics[:-TESTED], "test": topics[-TESTED:]}
    for wanted, number in product((taste, f"{OPPOSITE}{taste}"), range(CLIENTS)):
        client = f"{wanted}-{number}"
        generator = key.at(taste, client).numpy()
        for split, count in PAIRS.items():
            known = parts[split]
            asked = [(topic, form) for form in ASKED for topic in known]
            for place in generator.permutation(len(asked))[:count]:
                topic, form = asked[place]
                both = answers(generator, topic, taste)
                chosen, rejected = both if wanted == taste else both[::-1]
                prompt = [{"role": "user", "content": form.format(topic[0])}]
                yield split, {"prompt": prompt, "chosen": chosen, "rejected": rejected, "client": client}


def prompts() -> list[dict[str, Any]]:
    """60 questions on topics that no pair has: each form with each skill."""
    texts = [QUESTIONS[k % len(QUESTIONS)].format(SKILLS[k % len(SKILLS)]) for k in range(60)]
    return [{"prompt": [{"role": "user", "content": text}]} for text in texts]


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tables: dict[str, list[dict[str, Any]]] = {"prompts": prompts()}
    for taste in TASTES:
        for split, row in pairs(taste, Key(7)):
            tables.setdefault(f"{taste}-opposed.{split}", []).append(row)
            if taste_of(row["client"]) == taste:
                tables.setdefault(f"{taste}.{split}", []).append(row)
    for name, rows in tables.items():
        path = args.out / f"answers.{name}.jsonl"
        files.write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
