"""A synthetic preference dataset for chat models: advice on everyday questions in four ways of speaking.

An answer is brief or detailed, and casual or formal. Each of four clients wants one of the four ways; the
first two differ in both, and so do the last two. All of them want kind closing words and no curt ones.
So one model for all can learn to be kind, and must fail some client on the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prefed.core.random_keys import Key
from prefed.data.record import Message, Record, Split


class Style(NamedTuple):
    """A way of speaking."""

    casual: bool
    brief: bool
    kind: bool = True

    def describe(self) -> str:
        """The style in words.

        >>> Style(casual=True, brief=False).describe()
        'casual and detailed'
        """
        return f"{'casual' if self.casual else 'formal'} and {'brief' if self.brief else 'detailed'}"


STYLES: Mapping[str, Style] = {
    "ada": Style(casual=True, brief=True),
    "ben": Style(casual=False, brief=False),
    "cleo": Style(casual=True, brief=False),
    "dan": Style(casual=False, brief=True),
}
"""Client → the style that it wants."""

PROMPTS = (
    "How can I cheer up a friend?",
    "What should I cook for my parents?",
    "How do I get better at chess?",
)
"""Questions that no pair has."""

TESTED = 12
"""So many of the topics, the last ones, are for test pairs alone."""

_TOPICS = tuple(
    tuple(part.strip() for part in line.split("|"))
    for line in Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines()
)
"""A question, what to do, why, and what else there is to say."""

_OPENINGS = {
    True: ("Hey! ", "Oh, easy one! ", "Hey there! "),
    False: ("Certainly. ", "Thank you for asking. "),
}
_ADVICE = {
    True: ("Just {}.", "I'd say {}.", "You could totally {}."),
    False: ("I would recommend that you {}.", "It is advisable that you {}."),
}
_REASONS = {
    True: (" Basically, {}.", " You see, {}."),
    False: (" The reason is that {}.", " This is sensible because {}."),
}
_MORE = {True: (" Oh, and {}!", " Plus, {}!"), False: (" Furthermore, {}.", " In addition, {}.")}
_CLOSINGS = {
    (True, True): (" Have fun!", " You've got this!", " Good luck!"),
    (True, False): (" Whatever.", " Not my problem, though."),
    (False, True): (" I wish you every success.", " I hope that this is of help to you."),
    (False, False): (" There is nothing more to say.", " I do not wish to discuss it further."),
}


def generate(key: Key, *, train: int, test: int, styles: Mapping[str, Style] = STYLES) -> list[Record]:
    """Pairs of the clients, ``train`` and ``test`` of each; a prompt is one turn of a user.

    The chosen answer is in the client's style and the rejected one in another. No question of a test pair is
    one of a training pair.

    Args:
        styles: client → the style that it wants.
    """
    records = []
    for client, style in styles.items():
        generator = key.at("advice", client).numpy()
        others = [Style(*signs) for signs in product((True, False), repeat=3) if Style(*signs) != style]
        parts: tuple[tuple[Split, int, Any], ...] = (
            ("train", train, _TOPICS[:-TESTED]),
            ("test", test, _TOPICS[-TESTED:]),
        )
        for split, count, topics in parts:
            order = np.concatenate(
                [generator.permutation(len(topics)) for _ in range(-(-count // len(topics)))]
            )
            for index in order[:count]:
                topic = topics[index]
                rejected = answer(generator, topic, others[int(generator.integers(len(others)))])
                chosen = answer(generator, topic, style)
                records.append(
                    Record((Message("user", topic[0]),), chosen, rejected, client=client, split=split)
                )
    return records


def answer(generator: np.random.Generator, topic: Sequence[str], style: Style) -> str:
    """An answer to the question of a topic, in a style."""

    def pick(options: Sequence[str]) -> str:
        return options[int(generator.integers(len(options)))]

    casual, brief, kind = style
    _, advice, reason, more = topic
    text = pick(_OPENINGS[casual]) + pick(_ADVICE[casual]).format(advice)
    if not brief:
        text += pick(_REASONS[casual]).format(reason) + pick(_MORE[casual]).format(more)
    return text + pick(_CLOSINGS[casual, kind])
