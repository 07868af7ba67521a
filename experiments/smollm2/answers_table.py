"""How the answers of runs of answers.toml suit the taste of their clients, next to those of the base model.

    python experiments/smollm2/answers_table.py runs/answers/*/answers/*/*
    python experiments/smollm2/answers_table.py runs/answers/*/answers/*/* --read 5

After rounds 1, 2, 4, … and the last, models answer the held-out questions, and ``utility`` of ``answers.py``
compares each answer with the base model's. A client's own model answers for the clients who want the same;
otherwise the shared model does, for each taste. The table has, as means over seeds: the win rate (a
tie is half a win), the health of text (``docs/run-directory.md``; tokens are those of the text, encoded
again), the share of answers that are about the model itself ("I'm not a singing AI."), the words, the mean
change of the log-probability of chosen responses over all clients, and preference and reward accuracy on the
test pairs of those who want the same. The 95% interval of the win rate is over seeds or over questions,
whichever is wider. ``--rates`` has a column for each rate instead: win rate, answers that end and that loop.
``--chosen`` adds the surprise of the chosen responses of test pairs. ``--read N`` prints the answers to the
first N questions instead, of the first seed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import answers
from transformers import AutoTokenizer

from prefed import load_run
from prefed.runs.finished_run import Answer, RunRecord, read_run
from prefed.train.metrics import seed_interval
from prefed.train.metrics.intervals import wilson_interval
from prefed.train.metrics.text import WrittenAnswer, text_health, without_numbers

HEADS = (
    *(
        "model",
        "clients",
        "who want",
        "method",
        "objective",
        "rate",
        "round",
        "seeds",
        "win rate",
        "end",
        "loop",
    ),
    *("distinct-2", "about itself", "words", "surprise", "chosen shift", "preference accuracy"),
    "reward accuracy",
)
ITSELF = re.compile(r"\b(?:AI|language model|I(?:'m| am) (?:not|sorry|an?))\b")


class Line(NamedTuple):
    """What a line of the table is about; ``round`` is 0 for the base model."""

    model: str
    setting: str
    taste: str
    method: str = ""
    objective: str = ""
    rate: float = 0.0
    round: int = 0


class Figures(NamedTuple):
    """The figures of a line, of one seed."""

    wins: float
    ends: float
    loops: float
    distinct: float
    itself: float
    words: float
    surprise: float
    shift: float | None = None
    preference: float | None = None
    reward: float | None = None


@cache
def tokenizer_of(model: str) -> Any:
    """The tokenizer of a model."""
    return AutoTokenizer.from_pretrained(model)


def written(answer: Answer, tokenizer: Any) -> WrittenAnswer:
    """An answer of a run, with its tokens."""
    tokens = tokenizer(answer.text, add_special_tokens=False)["input_ids"]
    ended, surprise = bool(answer.ended), answer.surprise or 0.0
    return WrittenAnswer(
        answer.prompt, answer.text, tokens, ended, surprise, without_numbers(tokenizer, tokens)
    )


def measured(run: RunRecord, name: str, number: int, clients: Sequence[str]) -> float | None:
    """Mean over clients of a metric of a round, of those that were evaluated; or the metric of all."""
    value = run.rounds[number - 1].get("evaluation", {}).get(name) if number else None
    if isinstance(value, float) or value is None:
        return value
    known = [value["per_client"][client] for client in clients if client in value["per_client"]]
    return fmean(known) if known else None


def lines(run: RunRecord) -> Iterator[tuple[Line, Figures, list[Answer]]]:
    """The lines of a run, their figures and answers: the base model's, then those after each round."""
    found = re.search(r"answers\.([\w-]+)\.train", str(run.config["data"]["train"]))
    if found is None:
        raise SystemExit(f"{run.path}: not a run of answers.toml")
    model, method = run.config["model"]["name"], run.config["method"]
    clients: dict[str, list[str]] = {}
    for client in run.summary["clients"]:
        clients.setdefault(answers.taste_of(client), []).append(client)
    before = {answer.prompt: answer.text for answer in run.answers if not answer.round}
    own = {answer.round for answer in run.answers if answer.model == "own"}
    by: dict[tuple[int, str], list[Answer]] = {}
    for answer in run.answers:
        if answer.client or answer.round not in own:
            tastes = [answers.taste_of(answer.client)] if answer.client else clients
            for taste in tastes:
                by.setdefault((answer.round, taste), []).append(answer)
    for (number, taste), read in sorted(by.items()):
        values = [
            (answers.utility(taste, answer.text), answers.utility(taste, before[answer.prompt]))
            for answer in read
        ]
        health = text_health([written(answer, tokenizer_of(model)) for answer in read])
        figures = Figures(
            fmean(0.5 if new == base else float(new > base) for new, base in values),
            *(health["ends"], health["loops"], health["distinct_2"]),
            fmean(ITSELF.search(answer.text) is not None for answer in read),
            fmean(len(answer.text.split()) for answer in read),
            health["surprise"],
            measured(run, "chosen_shift", number, clients[taste]),
            measured(run, "preference_accuracy", number, clients[taste]),
            measured(run, "reward_accuracy", number, clients[taste]),
        )
        how = (method["name"], method["objective"], method["lr"], number) if number else ()
        yield Line(Path(model).name, found[1], taste, *how), figures, read


def chosen_surprise(run: Path, taste: str) -> float:
    """Median surprise of the responses that clients with a taste chose in test pairs, in nats a token."""
    trainers = load_run(run, data=True).trainers
    clients = [client for client in trainers.clients if answers.taste_of(client) == taste]
    scores = [trainers.score(client, trainers.backbone.reference, "test") for client in clients]
    pairs = [pair for each in scores for pair in zip(each.reference[:, 0], each.lengths[:, 0], strict=True)]
    return median(-logp / length for logp, length in pairs)


def mean(some: Iterable[float | None], form: str) -> str:
    """The mean of the known values, as the format has it; empty if there is none."""
    known = [value for value in some if value is not None]
    return format(fmean(known), form) if known else ""


def row(line: Line, some: Sequence[Figures], answered: int) -> tuple[str, ...]:
    """A row of the table: means over seeds."""
    won = [each.wins for each in some]
    both = [wilson_interval(fmean(won), answered), seed_interval(won, within=(0.0, 1.0))]
    low, high = max((each for each in both if each), key=lambda each: each[1] - each[0])
    forms = (".1%", ".1%", ".1%", ".2f", ".1%", ".1f", ".2f", "+.1f", ".3f", ".3f")
    wins, *others = (mean(values, form) for values, form in zip(zip(*some, strict=True), forms, strict=True))
    return (
        *(line.model, line.setting, line.taste, line.method, line.objective),
        *(f"{line.rate:g}" if line.rate else "", str(line.round), str(len(some))),
        f"{wins} [{low:.1%}, {high:.1%}]" if line.round else "",
        *others,
    )


def by_rate(found: Mapping[Line, Sequence[Figures]]) -> str:
    """A table with a column for each rate, of means over seeds."""
    rates = sorted({line.rate for line in found if line.round})
    cells: dict[tuple[str, ...], dict[float, str]] = {}
    for line, some in sorted(found.items()):
        name = (*line[:5], str(line.round))
        wins, ends, looping = (mean(values, ".0%") for values in [*zip(*some, strict=True)][:3])
        rated = {line.rate: f"{wins}, {ends}, {looping}"} if line.round else {rates[0]: f"{ends}, {looping}"}
        cells.setdefault(name, {}).update(rated)
    heads = (*HEADS[:5], "round", *(f"{rate:g}" for rate in rates))
    body = [(*name, *(row.get(rate, "") for rate in rates)) for name, row in cells.items()]
    return "\n".join(f"| {' | '.join(words)} |" for words in (heads, ["---"] * len(heads), *body))


def main() -> None:
    """Print the table, or answers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--read", type=int, metavar="N")
    parser.add_argument("--chosen", action="store_true")
    parser.add_argument("--rates", action="store_true")
    args = parser.parse_args()
    found: dict[Line, list[tuple[Figures, list[Answer], Path]]] = {}
    for folder in args.folders:
        for line, figures, read in lines(read_run(folder)):
            found.setdefault(line, []).append((figures, read, folder))
    if args.rates:
        print(by_rate({line: [figures for figures, _, _ in seeds] for line, seeds in found.items()}))
        return
    if args.read is None:
        for words in (HEADS, ["---"] * len(HEADS)):
            print("|", " | ".join(words), "|")
    for line, seeds in sorted(found.items()):
        _, first, folder = seeds[0]
        if args.read is None:
            print("|", " | ".join(row(line, [figures for figures, _, _ in seeds], len(first))), "|")
            if args.chosen and not line.round:
                surprise = chosen_surprise(folder, line.taste)
                print(f"| | {line.setting} | {line.taste} | surprise of chosen responses: {surprise:.2f} |")
        else:
            print("\n" + ", ".join(str(each) for each in line))
            for answer in first[: args.read]:
                print(f"- {answer.prompt} {answer.text!r}{'' if answer.ended else ' (cut)'}")


if __name__ == "__main__":
    main()
