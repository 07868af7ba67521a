"""The server's prompts of align.toml, and its small model.

    python experiments/smollm2/answers.py
    python experiments/smollm2/align_prepare.py

Writes ``answers.align.jsonl``, 48 questions about skills that are in no pair and in no other question, and
``answers.model``, a GPT-2 model with 4 layers of width 128. It is trained for 600 steps on the questions of
the training pairs with both answers for every taste, so its samples vary in length, tone and layout, and can
be read.
"""

from __future__ import annotations

import json
from pathlib import Path

import answers

from prefed.core import Key, files
from prefed.data import Message, synthetic_chat
from prefed.data.encoding import dialogue
from prefed.models.tiny import make_tiny

HERE = Path(__file__).resolve().parent
SKILLS = (
    *("reading", "hiking", "editing", "budgeting", "poker", "surfing", "typing", "knitting", "yoga", "chess"),
    *(
        "sailing",
        "hunting",
        "camping",
        "investing",
        "tennis",
        "hosting",
        "marketing",
        "studying",
        "networking",
    ),
    *("listening", "cleaning", "planning", "debating", "golf"),
)
ASKED = ("How do I get better at {}?", "Can you teach me {}?")


def texts(key: Key) -> list[str]:
    """Every training question with both answers for every taste."""
    generator = key.numpy()
    return [
        f"{dialogue((Message('user', form.format(topic[0])),))} {text}"
        for topic in synthetic_chat._TOPICS[: -synthetic_chat.TESTED]
        for form in answers.ASKED
        for taste in answers.TASTES
        for text in answers.answers(generator, topic, taste)
    ]


def main() -> None:
    """Write the files."""
    rows = [
        {"prompt": [{"role": "user", "content": form.format(skill)}]} for skill in SKILLS for form in ASKED
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    files.write(HERE / "answers.align.jsonl", text.encode())
    key = Key(7)
    shape = {"layers": 4, "width": 128, "vocabulary": 1024, "context": 256, "steps": 600}
    make_tiny(HERE / "answers.model", texts(key.at("texts")), key, **shape)


if __name__ == "__main__":
    main()
