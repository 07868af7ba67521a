"""Which of two arguments people found more convincing: UKPConvArg1 (Habernal and Gurevych 2016, CC BY 4.0).

    git clone --depth 1 https://github.com/UKPLab/acl2016-convincing-arguments
    python experiments/people/prepare.py acl2016-convincing-arguments/data/UKPConvArg1-full-XML

A judgement is a pair for its person: chosen is the argument that the person found more convincing; "equal"
makes no pair. Of the people with at least 80 pairs, the first 60% in the order of a hash are taken, and that
order numbers them: no id of a worker is written. About 24% of the pairs of arguments, by a hash of their
texts, are test pairs for everybody; a person has at most 180 training and 60 test pairs. ``others_agree`` is
the share of a pair's other judges who chose the same, of all their votes, "equal" included.
Writes ``people.train.jsonl.gz`` and ``people.test.jsonl.gz``. The texts are opinions, some offensive.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from prefed.core import files

LEAST, SHARE = 80, 0.6
"""Pairs of a person who is taken, and the share of such people who are."""
TEST, CAPS = 0.24, {"train": 180, "test": 60}


class Pair(NamedTuple):
    """Two arguments for one side of a debate, and worker → ``a1``, ``a2`` or ``equal``."""

    debate: str
    stance: str
    arguments: dict[str, str]
    votes: dict[str, str]


def digest(text: str) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def fraction(text: str) -> float:
    """A number in [0, 1) that only ``text`` decides.

    >>> fraction("") == fraction(""), 0 <= fraction("a") < 1
    (True, True)
    """
    return int(digest(text)[:13], 16) / 16**13


def unordered(row: Mapping[str, Any]) -> str:
    """A pair of arguments, whichever was chosen."""
    return "\n".join((row["prompt"], *sorted((row["chosen"], row["rejected"]))))


def child(node: ElementTree.Element, name: str) -> ElementTree.Element:
    """The first child of this name, or ``ValueError``."""
    found = node.find(name)
    if found is None:
        raise ValueError(f"<{node.tag}> has no <{name}>")
    return found


def text(node: ElementTree.Element, name: str) -> str:
    """The text of a child, with single spaces; without text ``ValueError``."""
    found = " ".join((child(node, name).text or "").split())
    if not found:
        raise ValueError(f"<{node.tag}> has an empty <{name}>")
    return found


def pair_of(node: ElementTree.Element) -> Pair:
    """An ``annotatedArgumentPair``; ``ValueError`` if it is none."""
    arguments = {f"a{k}": child(node, f"arg{k}") for k in (1, 2)}
    votes = {text(vote, "turkID"): text(vote, "value") for vote in node.iter("mTurkAssignment")}
    if odd := set(votes.values()) - {*arguments, "equal"}:
        raise ValueError(f"a vote for {min(odd)!r}, not a1, a2 or equal")
    return Pair(
        text(child(node, "debateMetaData"), "title"),
        text(arguments["a1"], "stance"),
        {name: text(argument, "text") for name, argument in arguments.items()},
        votes,
    )


def read(path: Path) -> Iterator[Pair]:
    """The pairs of a file of the corpus.

    Raises:
        SystemExit: the file is not one of the corpus.
    """
    place = f"{path}"
    try:
        for number, node in enumerate(ElementTree.parse(path).getroot(), 1):
            place = f"{path}, pair {number}"
            yield pair_of(node)
    except (ElementTree.ParseError, ValueError) as error:
        raise SystemExit(f"{place}: {error}; is this a file of UKPConvArg1-full-XML?") from error


def rows(pairs: Iterable[Pair]) -> dict[str, list[dict[str, Any]]]:
    """``train`` and ``test`` → the rows of the people who are taken, person by person."""
    judged: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for pair in pairs:
        counts = Counter(pair.votes.values())
        for worker, vote in pair.votes.items():
            if vote == "equal" or pair.arguments["a1"] == pair.arguments["a2"]:
                continue
            others = len(pair.votes) - 1
            row = {
                "prompt": f"In the debate “{pair.debate}”, give an argument for: {pair.stance}",
                "chosen": pair.arguments[vote],
                "rejected": pair.arguments["a1" if vote == "a2" else "a2"],
                "debate": pair.debate,
                "others_agree": round((counts[vote] - 1) / others, 3) if others else None,
            }
            judged[worker].append(row)
    workers = sorted((worker for worker in judged if len(judged[worker]) >= LEAST), key=digest)
    found: dict[str, list[dict[str, Any]]] = {part: [] for part in CAPS}
    for number, worker in enumerate(workers[: int(SHARE * len(workers))], 1):
        own: dict[str, list[dict[str, Any]]] = {part: [] for part in CAPS}
        person = f"person-{number:03}"
        for row in sorted(judged[worker], key=lambda row: digest(f"{person}\n{unordered(row)}")):
            own["test" if fraction(unordered(row)) < TEST else "train"].append({**row, "person": person})
        for part, cap in CAPS.items():
            found[part] += own[part][:cap]
    return found


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """JSON lines, gzipped to the same bytes each time."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    files.write(path, gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
    print(f"{path}: {len(lines)} pairs")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="the corpus's folder UKPConvArg1-full-XML")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    args = parser.parse_args()
    paths = sorted(args.source.glob("*.xml"))
    if not paths:
        parser.error(f"{args.source}: no .xml files; the source is data/UKPConvArg1-full-XML of the corpus")
    found = rows(pair for path in paths for pair in read(path))
    if not found["train"]:
        parser.error(f"{args.source}: nobody has {LEAST} judgements; is the corpus complete?")
    for part, own in found.items():
        write(args.out / f"people.{part}.jsonl.gz", own)


if __name__ == "__main__":
    main()
