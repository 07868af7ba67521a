"""How the answers of runs of answers.toml suit the taste of a client, next to those of the base model.

    python experiments/smollm2/answers_table.py runs/answers/1e-3/answers/*

After rounds 1, 2 and 4, the clients of ``[report]`` compare the answers of the shared model, and of
their own, to the held-out questions with the base model's, by ``utility`` of ``answers.py``. The table
has, over clients and questions: the win rate (a tie is half a win) with its 95% interval, the shares
that end and that loop, and the mean change of the log-probability of chosen responses.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import answers

from prefed.runs.finished_run import Answer, RunRecord, read_run
from prefed.train.metrics.intervals import wilson_interval
from prefed.train.metrics.text import loops

HEADS = ("run", "answers", "round", "win rate", "end", "loop", "words", "chosen shift")


def wins(taste: str, client: str, own: Sequence[Answer], base: Sequence[Answer]) -> list[float]:
    """1 for each answer that suits the client better than the base model's, 0.5 for a tie, else 0."""
    sign = -1 if client.startswith("not-") else 1
    before = {answer.prompt: answer.text for answer in base}
    pairs = [(answer.text, before[answer.prompt]) for answer in own]
    values = [[answers.utility(taste, text) for text in pair] for pair in pairs]
    return [0.5 if a == b else float((sign * a > sign * b) and a > -float("inf")) for a, b in values]


def rows(run: RunRecord) -> Iterator[tuple[str, ...]]:
    """The rows of a run: the base model's answers, then those after each round."""
    found = re.search(r"answers\.(\w+)\.\w+\.train", str(run.config["data"]["train"]))
    if found is None:
        raise SystemExit(f"{run.path}: not a run of answers.toml")
    asked = [answer for answer in run.answers if answer.holder is None]
    by = {(a.round, a.model, a.client) for a in asked}
    base = [answer for answer in asked if answer.model == "untouched"]
    clients = run.config["report"]["clients"]
    yield run.path.name, "base", "0", "", *_health(base), ""
    for number in sorted({round for round, model, _ in by if model != "untouched"}):
        for model in ("shared", "own"):
            judged, read = list[float](), list[Answer]()
            for client in clients:
                name = client if model == "own" else None
                own = [a for a in asked if (a.round, a.model, a.client) == (number, model, name)]
                judged += wins(found[1], client, own, base) if own else []
                read += own
            if not read:
                continue
            low, high = wilson_interval(fmean(judged), len(judged))
            # Evaluations are of the models that clients end with.
            measured = model == "own" or (number, "own", clients[0]) not in by
            shift = dict(zip(*run.curve("chosen_shift"), strict=True)).get(number) if measured else None
            rate = f"{fmean(judged):.1%} [{low:.1%}, {high:.1%}]"
            yield (
                run.path.name,
                model,
                str(number),
                rate,
                *_health(read),
                "" if shift is None else f"{shift:+.1f}",
            )


def _health(read: Sequence[Answer]) -> tuple[str, str, str]:
    words = [answer.text.split() for answer in read]
    ends, looping = fmean(bool(answer.ended) for answer in read), fmean(map(loops, words))
    return f"{ends:.1%}", f"{looping:.1%}", f"{fmean(map(len, words)):.1f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN")
    for line in (HEADS, ["---"] * len(HEADS)):
        print("|", " | ".join(line), "|")
    for folder in parser.parse_args().folders:
        for row in rows(read_run(folder)):
            print("|", " | ".join(row), "|")


if __name__ == "__main__":
    main()
