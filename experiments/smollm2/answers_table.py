"""How the answers of runs of answers.toml suit the taste of their clients, next to those of the base model.

    python experiments/smollm2/answers_table.py runs/answers/*/answers/*/*
    python experiments/smollm2/answers_table.py runs/answers/*/answers/*/* --read 5

After rounds 1, 2, 4, … and the last, the shared model answers the held-out questions, and ``utility`` of
``answers.py`` compares each answer with the base model's. The table has, as means over seeds: the win rate (a
tie is half a win), the shares that end, that loop and that are about the model itself ("I'm not a singing
AI."), the words, the median surprise in nats a token, and the mean change of the log-probability of chosen
responses. The 95% interval of the win rate is over seeds or over questions, whichever is wider. ``--chosen``
adds the surprise of the chosen responses of test pairs. ``--read N`` prints the answers to the first N
questions instead, of the first seed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import answers

from prefed import load_run
from prefed.runs.finished_run import Answer, RunRecord, read_run
from prefed.train.metrics import seed_interval
from prefed.train.metrics.intervals import wilson_interval
from prefed.train.metrics.text import loops

HEADS = (
    *("model", "taste", "method", "rate", "round", "seeds", "win rate", "end", "loop", "about itself"),
    *("words", "surprise", "chosen shift"),
)
ITSELF = re.compile(r"\b(?:AI|language model|I(?:'m| am) (?:not|sorry|an?))\b")


class Line(NamedTuple):
    """What a line of the table is about; ``round`` is 0 for the base model."""

    model: str
    taste: str
    method: str
    rate: float
    round: int


class Figures(NamedTuple):
    """The figures of a line, of one seed."""

    wins: float
    ends: float
    loops: float
    itself: float
    words: float
    surprise: float
    shift: float | None


def lines(run: RunRecord) -> Iterator[tuple[Line, Figures, list[Answer]]]:
    """The lines of a run, their figures and answers: the base model's, then those after each round."""
    found = re.search(r"answers\.(\w+)\.", str(run.config["data"]["train"]))
    if found is None:
        raise SystemExit(f"{run.path}: not a run of answers.toml")
    by: dict[int, list[Answer]] = {}
    for answer in run.answers:
        by.setdefault(answer.round, []).append(answer)
    before = {answer.prompt: answers.utility(found[1], answer.text) for answer in by[0]}
    shifts = dict(zip(*run.curve("chosen_shift"), strict=True))
    model, method = Path(run.config["model"]["name"]).name, run.config["method"]
    for number, read in sorted(by.items()):
        line = Line(model, found[1], f"{method['name']}, {method['objective']}", method["lr"], number)
        values = [(answers.utility(found[1], answer.text), before[answer.prompt]) for answer in read]
        signs = [re.findall(r"[^\W\d]+|\S", answer.text) for answer in read]
        figures = Figures(
            fmean(0.5 if own == base else float(own > base) for own, base in values),
            fmean(bool(answer.ended) for answer in read),
            fmean(map(loops, signs)),
            fmean(ITSELF.search(answer.text) is not None for answer in read),
            fmean(len(answer.text.split()) for answer in read),
            median(answer.surprise for answer in read if answer.surprise is not None),
            shifts.get(number),
        )
        yield line if number else Line(model, found[1], "", 0.0, 0), figures, read


def chosen_surprise(run: Path) -> float:
    """Median surprise of the chosen responses of a run's test pairs, in nats a token."""
    trainers = load_run(run, data=True).trainers
    scores = [trainers.score(client, trainers.backbone.reference, "test") for client in trainers.clients]
    pairs = [pair for each in scores for pair in zip(each.reference[:, 0], each.lengths[:, 0], strict=True)]
    return median(-logp / length for logp, length in pairs)


def row(line: Line, some: Sequence[Figures], answered: int) -> tuple[str, ...]:
    """A row of the table: means over seeds."""
    won = [each.wins for each in some]
    both = [wilson_interval(fmean(won), answered), seed_interval(won, within=(0.0, 1.0))]
    low, high = max((each for each in both if each), key=lambda each: each[1] - each[0])
    *others, shifts = zip(*some, strict=True)
    wins, ends, looping, itself, words, surprise = map(fmean, others)
    known = [shift for shift in shifts if shift is not None]
    return (
        *(
            line.model,
            line.taste,
            line.method,
            f"{line.rate:g}" if line.rate else "",
            str(line.round),
            str(len(some)),
        ),
        f"{wins:.1%} [{low:.1%}, {high:.1%}]" if line.round else "",
        *(f"{ends:.1%}", f"{looping:.1%}", f"{itself:.1%}", f"{words:.1f}", f"{surprise:.2f}"),
        f"{fmean(known):+.1f}" if known else "",
    )


def main() -> None:
    """Print the table, or answers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--read", type=int, metavar="N")
    parser.add_argument("--chosen", action="store_true")
    args = parser.parse_args()
    found: dict[Line, list[tuple[Figures, list[Answer], Path]]] = {}
    for folder in args.folders:
        for line, figures, read in lines(read_run(folder)):
            found.setdefault(line, []).append((figures, read, folder))
    if args.read is None:
        for words in (HEADS, ["---"] * len(HEADS)):
            print("|", " | ".join(words), "|")
    for line, seeds in sorted(found.items()):
        _, first, folder = seeds[0]
        if args.read is None:
            print("|", " | ".join(row(line, [figures for figures, _, _ in seeds], len(first))), "|")
            if args.chosen and not line.round:
                print(
                    f"| | {line.taste} | chosen responses | | | | | | | | | {chosen_surprise(folder):.2f} | |"
                )
        else:
            print("\n" + ", ".join(str(each) for each in line))
            for answer in first[: args.read]:
                print(f"- {answer.prompt} {answer.text!r}{'' if answer.ended else ' (cut)'}")


if __name__ == "__main__":
    main()
