"""A synthetic preference dataset with known tastes: advice from a small grammar.

Responses have five attributes: warmth, tone, strength, caution and length, each shown by certain words. The
utility of a response to a client is a weighted sum of the signs of its attributes. All clients value warmth
equally. On every other attribute, half of the clients have the opposite sign of the other half. A shared
model can therefore learn warmth, but not all other preferences. With opposed tastes, there are only two
tastes, with utilities of opposite signs.

Labels are drawn from the Bradley–Terry model: P(a is preferred to b) = σ(u(a) − u(b)).
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from prefed.core import files
from prefed.core.random_keys import Key
from prefed.data.record import Record, Split

_WORDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tone": (("I would recommend", "May I suggest"), ("How about", "You should try")),
    "strength": (("bold", "wild"), ("gentle", "mild")),
    "length": (
        (" It takes a while and rewards some patience.", " There is a lot to it once you look."),
        ("",),
    ),
    "caution": (
        (" Please check it first.", " Do take it slowly."),
        (" Just go for it.", " Do not think twice."),
    ),
    "warmth": (
        (" I hope you love it.", " Have a lovely time."),
        (" Not that I care.", " Suit yourself."),
    ),
}
# Match only whole words: "wilder" does not contain "wild".
_PATTERNS = tuple(
    (name, sign, re.compile(rf"(?<!\w)(?:{'|'.join(re.escape(word.strip()) for word in words)})(?!\w)"))
    for name, signs in _WORDS.items()
    for sign, words in zip((1, -1), signs, strict=True)
    if any(words)
)
ATTRIBUTES: Mapping[str, tuple[str, str]] = {
    "warmth": ("warm", "cold"),
    "tone": ("formal", "casual"),
    "strength": ("bold", "mild"),
    "caution": ("careful", "daring"),
    "length": ("long", "short"),
}
"""Attribute → names of the signs +1 and −1."""

SHARED = "warmth"
"""The attribute on which all clients agree."""

_TOPICS: Mapping[str, tuple[str, ...]] = {
    "a meal": ("soup", "curry", "stew", "salad"),
    "a film": ("comedy", "drama", "western", "thriller"),
    "a trip": ("walk", "ride", "cruise", "hike"),
    "a gift": ("book", "plant", "puzzle", "scarf"),
    "a hobby": ("sport", "craft", "game", "dance"),
    "a drink": ("tea", "coffee", "juice", "cider"),
}
_REQUESTS = ("Recommend {}.", "Help me choose {}.", "I am looking for {}.")
_NAMES = ("ada", "ben", "cleo", "dan", "eve", "finn", "gwen", "hugo", "iris", "jon")

_T = TypeVar("_T")


@dataclass(frozen=True)
class Taste:
    """The taste of a client: one weight per attribute.

    >>> Taste("ada", {"warmth": 1.5, "tone": -1.0}).describe()
    'warm, casual'
    """

    client: str
    weights: Mapping[str, float]

    def describe(self) -> str:
        """Describe the taste in words."""
        return ", ".join(ATTRIBUTES[name][weight < 0] for name, weight in self.weights.items() if weight)


def tastes(key: Key, clients: int = 6) -> dict[str, Taste]:
    """Draw tastes with weight 1.5 for warmth and, for each other attribute, +1 or −1 for half of the clients.

    >>> crowd = tastes(Key(0), 6).values()
    >>> {name: sum(taste.weights[name] for taste in crowd) for name in ("warmth", "tone")}
    {'warmth': 9.0, 'tone': 0.0}
    """
    width = len(str(clients - 1))
    names = [_NAMES[k] if clients <= len(_NAMES) else f"client-{k:0{width}d}" for k in range(clients)]
    signs = {
        name: np.where(key.at("taste", name).numpy().permutation(clients) % 2 == 0, 1.0, -1.0)
        for name in ATTRIBUTES
        if name != SHARED
    }
    return {
        client: Taste(client, {SHARED: 1.5, **{name: float(sign[k]) for name, sign in signs.items()}})
        for k, client in enumerate(names)
    }


def opposed_tastes(key: Key, clients: int = 6) -> dict[str, Taste]:
    """Give half of the clients the first taste of :func:`tastes`, and the other half the opposite taste.

    >>> crowd = opposed_tastes(Key(0), 6).values()
    >>> sorted({taste.describe() for taste in crowd})
    ['cold, formal, bold, careful, short', 'warm, casual, mild, daring, long']
    """
    drawn = tastes(key, clients)
    one = next(iter(drawn.values())).weights
    sides = np.where(key.at("sides").numpy().permutation(clients) % 2 == 0, 1.0, -1.0)
    return {
        client: Taste(client, {name: float(side) * weight for name, weight in one.items()})
        for client, side in zip(drawn, sides, strict=True)
    }


def attributes(text: str) -> dict[str, int]:
    """Return the sign, +1 or −1, of each attribute of a response, without attributes that it does not show.

    >>> attributes(" How about a mild soup? Just go for it. I hope you love it.")
    {'warmth': 1, 'tone': -1, 'strength': -1, 'caution': -1, 'length': -1}
    """
    signs = {name: sign for name, sign, pattern in _PATTERNS if pattern.search(text)}
    # A response is short if it has no words of the long form.
    if text.strip():
        signs.setdefault("length", -1)
    return {name: signs[name] for name in ATTRIBUTES if name in signs}


def utility(text: str, taste: Taste) -> float:
    """Return the utility of a response to a client: the sum over attributes of weight times sign."""
    signs = attributes(text)
    return float(sum(weight * signs.get(name, 0) for name, weight in taste.weights.items()))


def corpus(key: Key, texts: int) -> Iterator[str]:
    """Generate dialogues for pretraining, with all attributes equally likely."""
    generator = key.at("corpus").numpy()
    for _ in range(texts):
        topic, prompt = _prompt(generator)
        yield prompt + _response(generator, topic)


def generate(key: Key, *, clients: int = 6, train: int, test: int, opposed: bool = False) -> list[Record]:
    """Generate ``train`` and ``test`` labelled pairs per client.

    The tastes are those of :func:`tastes` or, if ``opposed``, of :func:`opposed_tastes`. ``extra`` contains
    the utilities ``utility_chosen`` and ``utility_rejected``. The margin is the absolute value of their
    difference, which is never zero.
    """
    records = []
    for client, taste in (opposed_tastes if opposed else tastes)(key, clients).items():
        here = key.at("client", client)
        generator = here.at("pairs").numpy()
        for index in range(train + test):
            topic, prompt = _prompt(generator)
            first, second = _response(generator, topic), _response(generator, topic)
            while utility(first, taste) == utility(second, taste):
                second = _response(generator, topic)
            gap = utility(first, taste) - utility(second, taste)
            first_wins = generator.random() < 1.0 / (1.0 + math.exp(-gap))
            chosen, rejected = (first, second) if first_wins else (second, first)
            split: Split = "train" if index < train else "test"
            records.append(
                Record(
                    prompt,
                    chosen,
                    rejected,
                    margin=abs(gap),
                    client=client,
                    category=topic.removeprefix("a "),
                    split=split,
                    extra={
                        "utility_chosen": utility(chosen, taste),
                        "utility_rejected": utility(rejected, taste),
                    },
                )
            )
    return records


def oracle_accuracy(records: Iterable[Record]) -> float:
    """Return the share of records in which the chosen response has the larger utility.

    Raises:
        ValueError: there are no records, or a record has no utilities.
    """
    correct = []
    for record in records:
        if "utility_chosen" not in record.extra or "utility_rejected" not in record.extra:
            raise ValueError("a record has no utility_chosen or utility_rejected; use generated records")
        correct.append(float(record.extra["utility_chosen"]) > float(record.extra["utility_rejected"]))
    if not correct:
        raise ValueError("no records")
    return sum(correct) / len(correct)


def write(folder: Path, records: Sequence[Record], replace: bool = True) -> None:
    """Write one file per split: ``train.jsonl``, ``validation.jsonl``, ``test.jsonl``.

    ``extra`` is written as separate columns.

    Raises:
        ValueError: without ``replace``, one of them exists with other content; nothing is written.
    """
    lines: defaultdict[Path, list[str]] = defaultdict(list)
    for record in records:
        row = json.loads(record.to_json())
        row |= row.pop("extra", {})
        path = folder / f"{row.pop('split', 'train')}.jsonl"
        lines[path].append(json.dumps(row, ensure_ascii=False) + "\n")
    parts = {path: "".join(own).encode() for path, own in lines.items()}
    for path, content in parts.items():
        if not replace and path.exists() and path.read_bytes() != content:
            raise ValueError(f"{path} contains other pairs")
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in parts.items():
        files.write(path, content)


def _prompt(generator: np.random.Generator) -> tuple[str, str]:
    topic = _pick(generator, tuple(_TOPICS))
    return topic, f"\n\nHuman: {_pick(generator, _REQUESTS).format(topic)}\n\nAssistant:"


def _response(generator: np.random.Generator, topic: str) -> str:
    words = {name: _pick(generator, _pick(generator, signs)) for name, signs in _WORDS.items()}
    opening = f" {words['tone']} a {words['strength']} {_pick(generator, _TOPICS[topic])}."
    return opening + words["length"] + words["caution"] + words["warmth"]


def _pick(generator: np.random.Generator, options: Sequence[_T]) -> _T:
    return options[int(generator.integers(len(options)))]
