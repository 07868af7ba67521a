"""How the answers of runs of answers.toml suit the taste of a client, next to those of the base model.

    python experiments/smollm2/answers_table.py runs/answers/*/answers/*
    python experiments/smollm2/answers_table.py runs/answers/*/answers/* --read 5 --round 2

After rounds 1, 2, 4, … and the last, the shared model and the own models of the clients of ``[report]``
answer the held-out questions, and ``utility`` of ``answers.py`` compares each answer with the base model's.
The table has, as means over seeds: the win rate (a tie is half a win) with its 95% interval over seeds, the
shares that end and that loop, the words, the median surprise in nats a token, and the mean change of the
log-probability of chosen responses. ``--read N`` prints the answers to the first N questions instead, of the
first seed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import answers

from prefed.runs.finished_run import Answer, RunRecord, read_run
from prefed.train.metrics import seed_interval
from prefed.train.metrics.text import loops

HEADS = (
    *("taste", "clients", "method", "rate", "round", "answers", "seeds", "win rate"),
    *("end", "loop", "words", "surprise", "chosen shift"),
)


class Line(NamedTuple):
    """What a line of the table is about."""

    taste: str
    clients: str
    method: str
    rate: float
    round: int
    model: str


class Figures(NamedTuple):
    """Its figures, of one seed."""

    wins: float | None
    ends: float
    loops: float
    words: float
    surprise: float
    shift: float | None


def wins(taste: str, client: str, own: Sequence[Answer], base: Sequence[Answer]) -> list[float]:
    """1 for each answer that suits the client better than the base model's, 0.5 for a tie, else 0."""
    sign = -1 if client.startswith("not-") else 1
    before = {answer.prompt: answer.text for answer in base}
    pairs = [(answer.text, before[answer.prompt]) for answer in own]
    values = [[answers.utility(taste, text) for text in pair] for pair in pairs]
    return [0.5 if a == b else float((sign * a > sign * b) and a > -float("inf")) for a, b in values]


def lines(run: RunRecord) -> Iterator[tuple[Line, Figures, list[Answer]]]:
    """The lines of a run, their figures and answers: the base model's, then those after each round."""
    found = re.search(r"answers\.(\w+)\.(\w+)\.train", str(run.config["data"]["train"]))
    if found is None:
        raise SystemExit(f"{run.path}: not a run of answers.toml")
    taste, mix = found.groups()
    method, clients = run.config["method"], run.config["report"]["clients"]
    name = f"{method['name']}, {method['objective']}"
    by: dict[tuple[int, str, str | None], list[Answer]] = {}
    for answer in run.answers:
        if answer.holder is None:
            by.setdefault((answer.round, answer.model, answer.client), []).append(answer)
    base = by[0, "untouched", None]
    yield Line(taste, mix, "", 0.0, 0, "base"), _figures([], base, None), base
    shifts = dict(zip(*run.curve("chosen_shift"), strict=True))
    for number in sorted({round for round, model, _ in by if model != "untouched"}):
        for model in ("shared", "own"):
            judged, read = list[float](), list[Answer]()
            for client in clients:
                some = by.get((number, model, client if model == "own" else None), [])
                judged += wins(taste, client, some, base)
                read += some
            if read:
                # Evaluations are of the models that clients end with.
                measured = model == "own" or (number, "own", clients[0]) not in by
                line = Line(taste, mix, name, method["lr"], number, model)
                yield line, _figures(judged, read, shifts.get(number) if measured else None), read


def _figures(judged: Sequence[float], read: Sequence[Answer], shift: float | None) -> Figures:
    words = [answer.text.split() for answer in read]
    signs = [re.findall(r"[^\W\d]+|\S", answer.text) for answer in read]
    surprise = median(answer.surprise for answer in read if answer.surprise is not None)
    ends, looping = fmean(bool(answer.ended) for answer in read), fmean(map(loops, signs))
    return Figures(fmean(judged) if judged else None, ends, looping, fmean(map(len, words)), surprise, shift)


def row(line: Line, some: Sequence[Figures]) -> tuple[str, ...]:
    """A row of the table: means over seeds."""
    won = [each.wins for each in some if each.wins is not None]
    interval = seed_interval(won, within=(0.0, 1.0))
    rate = f"{fmean(won):.1%}" if won else ""
    rate += f" [{interval[0]:.1%}, {interval[1]:.1%}]" if interval else ""
    shift = [each.shift for each in some if each.shift is not None]
    return (
        *(line.taste, line.clients, line.method, f"{line.rate:g}" if line.rate else ""),
        *(str(line.round), line.model, str(len(some)), rate),
        f"{fmean(each.ends for each in some):.1%}",
        f"{fmean(each.loops for each in some):.1%}",
        f"{fmean(each.words for each in some):.1f}",
        f"{fmean(each.surprise for each in some):.2f}",
        f"{fmean(shift):+.1f}" if shift else "",
    )


def main() -> None:
    """Print the table, or answers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--read", type=int, metavar="N")
    parser.add_argument("--round", type=int)
    args = parser.parse_args()
    found: dict[Line, list[tuple[Figures, list[Answer]]]] = {}
    for folder in args.folders:
        for line, figures, read in lines(read_run(folder)):
            if args.round in (None, line.round) or line.model == "base":
                found.setdefault(line, []).append((figures, read))
    if args.read is None:
        for words in (HEADS, ["---"] * len(HEADS)):
            print("|", " | ".join(words), "|")
    for line, seeds in sorted(found.items()):
        if args.read is None:
            print("|", " | ".join(row(line, [figures for figures, _ in seeds])), "|")
        else:
            print("\n" + ", ".join(str(each) for each in line if each))
            for answer in seeds[0][1][: args.read]:
                print(f"- {answer.prompt} {answer.text!r}{'' if answer.ended else ' (cut)'}")


if __name__ == "__main__":
    main()
