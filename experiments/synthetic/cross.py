"""What the aligned policies of two opposed tastes gain by the one utility and by the other.

    python experiments/synthetic/cross.py RUN…

Each run's policy responds to prompts that neither the clients nor the alignment have: with the taste of
a client of the one side, with that of a client of the other side, and with the population's. A policy that
was trained at prototypes is asked for theirs. One that takes no taste responds as it is. Runs that differ
in ``-seedN`` alone are one row. A cell is the mean gain in utility over the base model's responses,
with a 95% interval over seeds (Student's t), and the win rate against them.

The two utilities are each other's opposite, so the columns differ in their sign alone. What a table can
show is on its diagonal: both gains are above zero only if the policy does what it is asked.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from prefed.align.judge.local import read_taste
from prefed.align.run import SETTINGS
from prefed.align.tastes import load_tastes
from prefed.data.synthetic import Taste, utility
from prefed.runs.align import FOLDER
from prefed.runs.judge import Comparison, judge
from prefed.runs.loaded_run import LoadedRun, load_run
from prefed.runs.responses import POLICY
from prefed.train.generation import Sampling
from prefed.train.metrics import seed_interval
from prefed.train.metrics.winrate import win_rate

HERE = Path(__file__).resolve().parent


def sides(run: LoadedRun) -> tuple[Taste, Taste]:
    """The taste of the first client, and that of the first one with another taste.

    Raises:
        ValueError: the clients have one taste, or more than two.
    """
    dataset = run.trainers.dataset
    records = [dataset.tokens.record(row) for row in range(len(dataset.tokens))]
    by_words: dict[str, Taste] = {}
    for client in sorted(run.job.members):
        taste = read_taste(client, records, dataset.flipped)
        by_words.setdefault(taste.describe(), taste)
    if len(by_words) != 2:
        raise ValueError(f"{run.record.path}: its clients have {len(by_words)} tastes, and two are compared")
    one, other = by_words.values()
    return one, other


def tastes_of(path: Path, one: str, other: str) -> dict[str, str | None]:
    """What a run's policy is asked for: label → taste.

    Args:
        path: the run's directory.
        one: a client of the one side.
        other: one of the other side.
    """
    if not (path / POLICY).exists():
        return {"–": None}
    settings = json.loads((path / FOLDER / SETTINGS).read_text("utf-8"))
    labels = load_tastes(path / FOLDER).labels
    at_prototypes = settings["tastes"] == "prototypes"
    names = {side: f"prototype:{labels[side]}" if at_prototypes else side for side in (one, other)}
    return {"A": names[one], "B": names[other], "population": "population"}


def texts(
    run: LoadedRun, taste: str | None, prompts: Path, sampling: Sampling
) -> tuple[list[str], list[str]]:
    """What the aligned and the base model respond; both are kept in the run."""
    name = f"cross-{(taste or 'untold').replace(':', '-')}"
    judge(run.record.path, Comparison("utility", prompts, taste=taste, sampling=sampling, name=name))
    rows = (run.record.path / "judge" / name / "verdicts.jsonl").read_text("utf-8").splitlines()
    verdicts = [json.loads(row) for row in rows]
    return [row["text"] for row in verdicts], [row["against"] for row in verdicts]


def gain(own: Sequence[str], base: Sequence[str], taste: Taste) -> list[float]:
    """Utility of each text less that of the base model's.

    >>> warm = Taste("x", {"warmth": 1.5})
    >>> gain([" I hope you love it."], [" Not that I care."], warm)
    [3.0]
    """
    return [utility(text, taste) - utility(other, taste) for text, other in zip(own, base, strict=True)]


def cell(gains: Sequence[Sequence[float]]) -> str:
    """Mean and win rate of the gains of each seed, and the mean's interval where there are several seeds.

    >>> cell([[1.0, 0.0, -1.0, 2.0]])
    '+0.50, wins 0.62'
    >>> cell([[1.0, 1.0], [2.0, 1.0], [2.0, 2.0]])
    '+1.50 [0.26, 2.74], wins 1.00'
    """
    rates = [win_rate([(value > 0) + 0.5 * (value == 0) for value in own]).mean for own in gains]
    means = [fmean(own) for own in gains]
    interval = seed_interval(means)
    shown = f"{fmean(means):+.2f}" + (" [{:.2f}, {:.2f}]".format(*interval) if interval else "")
    return f"{shown}, wins {fmean(rates):.2f}"


def table(found: Mapping[tuple[str, str], Mapping[str, list[list[float]]]]) -> Iterator[str]:
    """The lines of the table: for each row and taste asked for, the gains by both utilities."""
    yield "| row | the policy is asked for | utility A | utility B |"
    yield "|---|---|---|---|"
    for (row, asked), gains in found.items():
        yield f"| {row} | {asked} | {cell(gains['A'])} | {cell(gains['B'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--prompts", type=Path, default=HERE / "test-prompts.jsonl")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()
    sampling = Sampling(temperature=1.0, max_tokens=args.max_new_tokens)
    found: dict[tuple[str, str], dict[str, list[list[float]]]] = {}
    words = ""
    for path in args.runs:
        run = load_run(path, data=True)
        one, other = sides(run)
        words = f"A: {one.describe()}. B: {other.describe()}."
        for label, taste in tastes_of(path, one.client, other.client).items():
            own, base = texts(run, taste, args.prompts, sampling)
            cells = found.setdefault((path.name.partition("-seed")[0], label), {"A": [], "B": []})
            cells["A"].append(gain(own, base, one))
            cells["B"].append(gain(own, base, other))
    print(words, "", *table(found), sep="\n")


if __name__ == "__main__":
    main()
