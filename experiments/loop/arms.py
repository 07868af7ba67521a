"""Close the loop in several ways from each run of loop.toml, and print what became of the policy.

    python experiments/smollm2/answers.py
    python experiments/smollm2/align_prepare.py
    prefed sweep experiments/loop/loop.toml --out runs
    python experiments/loop/arms.py runs/loop/brief-seed* [--arm ARM …] [--steps N] [--picture FILE]

Each arm aligns a copy ``RUN-ARM`` with as many generated completions and training steps: four generations
of four completions and ``--steps`` steps, or one of sixteen and four times as many steps. A client's own
judge is the program of ``answers.py`` for the client's taste. Where clients want opposites, each arm aligns a
policy for either side, with the labels of that side's first client.

A row is a generation of an arm: the win rate of its policy over the base model on 60 questions, by the
program (``true``) and by the selectors that labelled for it (``proxy``), their gap; the share of pairs of
this generation's completions that those selectors order as the program does; the log-ratio of the policy's
answers in nats per token; the shares that end and loop, and their words; judgements by clients so far. The
last lines have means over seeds with 95% intervals (Student's t).
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from prefed.align.alignment import Alignment
from prefed.align.judge.names import ARGUMENTS
from prefed.align.labels import leads, won
from prefed.align.policy import read_policy
from prefed.align.stages import rows_in
from prefed.align.tastes import Generation
from prefed.config.align import align_settings
from prefed.core import Callback
from prefed.data import Message, Record
from prefed.runs.align import _alignment, _Source, align, read_settings
from prefed.runs.finished_run import read_run
from prefed.runs.labels import JUDGES
from prefed.train.generation import Sampling, write_answers
from prefed.train.metrics import WrittenAnswer, seed_interval, text_health

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "smollm2"), str(HERE.parents[1] / "benchmarks")]
import answers  # noqa: E402
from align_oracle import Oracle  # noqa: E402
from common import save_picture  # noqa: E402

LOOP = {"generations": 4, "completions": 4}
ONCE = {"generations": 1, "completions": 16}
REFRESH = {"every": 1, "pairs": 16, "rounds": 4}
ARMS: Mapping[str, Mapping[str, Any]] = {
    "offline": ONCE,
    "judged": {**ONCE, "client_judge": "oracle:own", "refresh": {"every": 1, "pairs": 64, "rounds": 16}},
    "frozen": LOOP,
    "refreshed": {**LOOP, "client_judge": "oracle:own", "refresh": REFRESH},
    "votes": {**LOOP, "client_judge": "oracle:own", "labels": "clients"},
    "oracle": {**LOOP, "labels": "judge:oracle:TASTE"},
    "grpo": {**LOOP, "objective": "grpo", "pairs": "all"},
    "par": {**LOOP, "objective": "par", "pairs": "all"},
}
"""Arm → its settings. ``judged`` has as many judgements as ``refreshed``, of the initial policy's text."""
SHARES = {"true", "proxy", "accuracy", "ends", "loops"}
COLUMNS = ("true", "proxy", "gap", "accuracy", "nats", "ends", "loops", "words", "judged")


def closed(run: Path, arm: str, taste: str, opposed: bool, steps: int, generations: int) -> Path:
    """Align a copy of a run as an arm does, unless that is done."""
    copy = run.with_name(f"{run.name}-{arm}-{taste}" if opposed else f"{run.name}-{arm}")
    if not (copy / "align/summary.json").exists():
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run, copy)
        settings = json.loads(json.dumps(dict(ARMS[arm])).replace("TASTE", taste))
        settings["generations"] = min(settings["generations"], generations)
        if opposed and "labels" not in settings:
            settings["taste"] = f"{taste}-0"
        settings["regenerate"] = steps * LOOP["generations"] // settings["generations"]
        table = {"prompts": str(HERE.parent / "smollm2/answers.align.jsonl"), **settings}
        align(copy, align_settings(table, [], copy))
    return copy


def measured(path: Path, taste: str, asked: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the figures of each generation."""
    record = read_run(path)
    settings = read_settings(record)
    alignment = _alignment(record, settings, _Source(path, settings, Callback()))
    most = json.loads((path / "align/summary.json").read_text())["completions"]["max_new_tokens"]
    how, template, policy = Sampling(max_tokens=most, temperature=0), alignment.template, alignment.policy
    prompts = [(text, template.prompt_ids((Message("user", text),))) for text in asked]
    base, judged = write_answers(policy, policy.reference, prompts, how, 60), 0
    for number in range(1, (settings.generations or 1) + 1):
        generation = Generation(number)
        folder = generation.path(alignment, "checkpoints")
        tensors = read_policy(policy, folder / "epoch-1.safetensors")
        own = write_answers(policy, tensors, prompts, how, 60)
        history = json.loads((path / f"align/stages/train-{number}.json").read_text())["figures"]
        file = generation.path(alignment, "judged.jsonl")
        if file.exists():
            judged += len(list(rows_in(file)))
        if settings.labels == "clients":
            pairs = len(list(rows_in(generation.path(alignment, "scores.jsonl"))))
            judged += pairs * len(record.summary["clients"])
        health = text_health(own)
        true, proxy = true_rate(taste, own, base), proxy_rate(alignment, generation, own, base)
        yield {
            "true": true,
            "proxy": proxy,
            "gap": proxy - true,
            "accuracy": accuracy(alignment, generation, taste),
            "nats": history["kl"],
            "ends": health["ends"],
            "loops": health["loops"],
            "words": fmean(len(answer.text.split()) for answer in own),
            "judged": judged,
        }


def true_rate(taste: str, own: Sequence[WrittenAnswer], base: Sequence[WrittenAnswer]) -> float:
    """The win rate of answers over others by the program; a tie is half a win."""
    pairs = [[answers.utility(taste, each.text) for each in both] for both in zip(own, base, strict=True)]
    return fmean((float(a > b) + float(a >= b)) / 2 for a, b in pairs)


def proxy_rate(
    alignment: Alignment,
    generation: Generation,
    own: Sequence[WrittenAnswer],
    base: Sequence[WrittenAnswer],
) -> float:
    """The same by the labeller of a generation."""
    wins, records = list[float](), list[Record]()
    for answer, first in zip(own, base, strict=True):
        if answer.text.strip() == first.text.strip() or not (answer.text.strip() and first.text.strip()):
            wins.append((float(bool(answer.text.strip())) + float(not first.text.strip())) / 2)
        else:
            records.append(Record((Message("user", answer.prompt),), answer.text, first.text))
    return fmean([*wins, *won(alignment, generation.scorer(alignment), records)])


def accuracy(alignment: Alignment, generation: Generation, taste: str) -> float:
    """The share of pairs of a generation's completions that its labeller orders as the program does.

    NaN if all that it judged are ties of the program.
    """
    texts = {
        (row["index"], row["sample"]): row["completion"]
        for row in rows_in(generation.path(alignment, "completions.jsonl"))
    }
    right = []
    for row in rows_in(generation.path(alignment, "scores.jsonl")):
        first, second = (answers.utility(taste, texts[row["index"], k]) for k in row["samples"])
        if row["scores"] is not None and first != second:
            lead = leads(np.array(row["scores"], float)[:, None], str(alignment.config.labels))[0]
            right.append((float(np.sign(lead)) * float(np.sign(first - second)) + 1) / 2)
    return fmean(right) if right else math.nan


def interval_of(each: Sequence[Mapping[str, Any]], name: str) -> tuple[float, tuple[float, float] | None]:
    """The mean of a figure over seeds, and its 95% interval; without generations that have none."""
    values = [figures[name] for figures in each if not math.isnan(figures[name])]
    least, most = (0.0, 1.0) if name in SHARES else (-math.inf, math.inf)
    return (fmean(values) if values else math.nan), seed_interval(values, within=(least, most))


def draw(found: Mapping[tuple[str, str, int], Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw accuracy on the policy's own pairs, and the true win rate, by generation."""
    from prefed.ui.pages.chart_data import Axis, Chart, Line, Panel, look_of, percent

    panels = []
    for name, label in (("accuracy", "selectors' accuracy on its pairs"), ("true", "true win rate")):
        lines = []
        for place, (arm, taste) in enumerate(dict.fromkeys(key[:2] for key in found)):
            points, low, high = list[tuple[float, float]](), list[float](), list[float]()
            for number in sorted(key[2] for key in found if key[:2] == (arm, taste)):
                mean, interval = interval_of(found[arm, taste, number], name)
                points.append((number, mean))
                bounds = interval or (mean, mean)
                low.append(bounds[0])
                high.append(bounds[1])
            text = f"{arm}, {taste.replace('not-formal', 'casual')}"
            lines.append(Line(text, points, [""] * len(points), look_of(place), low, high))
        panels.append(Panel(Axis("generation", whole=True), Axis(label, percent), lines))
    save_picture(Chart("loop", "a loop by generation", "", panels), path)


def line(*cells: str) -> None:
    """Print a row of the table."""
    print("|", " | ".join(cells), "|", flush=True)


def main() -> None:
    """Align the arms of each run, and print a row for each generation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--arm", choices=ARMS, action="append", metavar="ARM")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--generations", type=int, default=LOOP["generations"], help="at most so many")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw accuracy and win rate by generation"
    )
    args = parser.parse_args()
    # A judge of a package would have an entry point.
    JUDGES.builtin["oracle"], ARGUMENTS["oracle"] = Oracle, "TASTE"  # type: ignore[index]
    lines = (HERE.parent / "smollm2/answers.prompts.jsonl").read_text().splitlines()
    asked = [json.loads(each)["prompt"][0]["content"] for each in lines]
    found: defaultdict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    line("run", "arm", "taste", "generation", *COLUMNS)
    for run in args.runs:
        wanted = Path(read_run(run).config["data"]["train"]["path"]).name.split(".")[1]
        first, _, opposed = wanted.partition("-")
        sides = [first, f"{answers.OPPOSITE}{first}"] if opposed else [first]
        for arm, taste in product(args.arm or ARMS, sides):
            copy = closed(run, arm, taste, bool(opposed), args.steps, args.generations)
            for number, figures in enumerate(measured(copy, taste, asked), 1):
                found[arm, taste, number].append(figures)
                line(run.name, arm, taste, str(number), *(f"{figures[name]:.3g}" for name in COLUMNS))
    for (arm, taste, number), each in found.items():
        cells = []
        for name in COLUMNS:
            mean, interval = interval_of(each, name)
            spread = "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]"
            cells.append(f"{mean:.3g}{spread}")
        line("mean", arm, taste, str(number), *cells)
    if args.picture is not None:
        draw(found, args.picture)


if __name__ == "__main__":
    main()
