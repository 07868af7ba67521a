"""How the answers of policies of align.toml suit the taste, next to the base model's and to best of four.

    python experiments/smollm2/align_table.py runs/align/brief-fedvpa-seed*

The runs of one row of the table, one per seed. The policy and the base model answer the first ``--prompts``
of ``--questions`` (``answers.prompts.jsonl``) greedily, within the alignment's limit of tokens. ``best of
4`` is what the run's labeller picks from four samples of the base model, without training. Win rates are by
the utility of ``answers.py``; brackets are 95% intervals over seeds (Student's t).
A row has the run, both win rates, the share of labels on the policy's own completions that agree with the
utility, for base model and policy the shares that end and loop, surprise and words, and the seconds of
``prefed align``. ``--show`` prints the first five answers of the first run.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import answers

from prefed.align.policy import load_base
from prefed.core import Key
from prefed.data import Message, Record, Template
from prefed.models import Backbone
from prefed.models.pretrained import with_dtype
from prefed.runs.finished_run import read_run
from prefed.runs.labels import selectors_of
from prefed.runs.loaded_run import load_run, recorded_experiment
from prefed.train.generation import (
    BATCH,
    Completion,
    Sampling,
    complete_batch,
    padded_batches,
    surprises,
    write_answers,
)
from prefed.train.metrics import WrittenAnswer, seed_interval, text_health

SAMPLES, TEMPERATURE = 4, 0.7
MADE: dict[tuple[Any, ...], Any] = {}
Made = TypeVar("Made")
QUESTIONS = Path(__file__).parent / "answers.prompts.jsonl"


@dataclass(frozen=True)
class Run:
    """A finished run with an alignment, and the questions that it answers."""

    path: Path
    questions: Sequence[str]

    @cached_property
    def summary(self) -> dict[str, dict[str, float]]:
        """``align/summary.json``."""
        found: dict[str, dict[str, float]] = json.loads((self.path / "align/summary.json").read_text())
        return found

    @cached_property
    def taste(self) -> str:
        """The taste of the clients."""
        found = re.search(r"answers\.(\w+)\.", str(read_run(self.path).config["data"]["train"]))
        if found is None:
            raise SystemExit(f"{self.path}: not a run of align.toml")
        return found[1]

    def backbone(self, adapter: Path | None) -> Backbone:
        """The base model, with an adapter merged into its weights."""
        experiment = recorded_experiment(read_run(self.path))
        return load_base(with_dtype(experiment.model), experiment.seed, adapter)

    @cached_property
    def base(self) -> Backbone:
        """The base model."""
        return self.backbone(None)

    @cached_property
    def prompts(self) -> list[tuple[str, list[int]]]:
        """The questions with their token ids."""
        template = Template.of(self.base.tokenizer, recorded_experiment(read_run(self.path)).data)
        return [(text, template.prompt_ids((Message("user", text),))) for text in self.questions]

    def sampling(self, temperature: float) -> Sampling:
        """Within the limit of tokens of the alignment."""
        return Sampling(
            max_tokens=int(self.summary["completions"]["max_new_tokens"]), temperature=temperature
        )

    def write(self, model: Backbone) -> list[WrittenAnswer]:
        """The greedy answers of a model, with their surprise under the base model."""
        written = write_answers(model, model.reference, self.prompts, self.sampling(0), BATCH)
        ends = [model.tokenizer.eos_token_id if answer.ended else None for answer in written]
        completions = [Completion([*a.tokens], end) for a, end in zip(written, ends, strict=True)]
        scores = surprises(self.base, [prompt for _, prompt in self.prompts], completions)
        return [replace(answer, surprise=score) for answer, score in zip(written, scores, strict=True)]

    def once(self, make: Callable[[Run], Made]) -> Made:
        """What only the base model and the limit of tokens determine, made once for all seeds."""
        name = make, read_run(self.path).config["model"]["name"], self.sampling(0).max_tokens
        if name not in MADE:
            MADE[name] = make(self)
        return MADE[name]  # type: ignore[no-any-return]

    def base_answers(self) -> list[WrittenAnswer]:
        """The greedy answers of the base model."""
        return self.write(self.base)

    def samples(self) -> list[list[str]]:
        """Four samples of the base model for each question."""
        how, ids = self.sampling(TEMPERATURE), [prompt for _, prompt in self.prompts for _ in range(SAMPLES)]
        found, key = dict[int, str](), Key(0).at("best of")
        for batch in padded_batches(self.base, ids, how, BATCH):
            keys = [key.at("row", k) for k in batch]
            for k, each in zip(
                batch,
                complete_batch(self.base, self.base.reference, [ids[k] for k in batch], how, keys),
                strict=True,
            ):
                found[k] = self.base.tokenizer.decode(each.tokens, skip_special_tokens=True)
        return [[found[k * SAMPLES + j] for j in range(SAMPLES)] for k in range(len(self.questions))]

    def best_of(self) -> list[str]:
        """The sample of each question that the labeller prefers to the others.

        That is the one with the largest sum of log-odds, or the largest utility if the program labels.
        """
        if str(json.loads((self.path / "align/settings.json").read_text())["labels"]).startswith("judge:"):
            return [
                max(texts, key=lambda text: answers.utility(self.taste, text))
                for texts in self.once(Run.samples)
            ]
        picked, selectors = [], selectors_of(load_run(self.path))
        for question, texts in zip(self.questions, self.once(Run.samples), strict=True):
            pairs = [
                (i, j)
                for i, j in combinations(range(SAMPLES), 2)
                if texts[i].strip() and texts[j].strip() and texts[i].strip() != texts[j].strip()
            ]
            records = [Record((Message("user", question),), texts[i], texts[j]) for i, j in pairs]
            points = [0.0 if text.strip() else -float("inf") for text in texts]
            asked, scores = selectors.scores(records)
            for row, score in zip(asked, scores.mean(0), strict=True):
                i, j = pairs[row]
                points[i], points[j] = points[i] + score, points[j] - score
            picked.append(texts[points.index(max(points))])
        return picked

    def right_labels(self) -> float:
        """The share of labels that the utility agrees with, without its ties."""
        rows = [json.loads(line) for line in (self.path / "align/labels.jsonl").read_text().splitlines()]
        values = [[answers.utility(self.taste, row[name]) for name in ("chosen", "rejected")] for row in rows]
        return fmean(a > b for a, b in values if a != b)


def win_rate(run: Run, texts: Sequence[str], base: Sequence[WrittenAnswer]) -> float:
    """The win rate of texts over the base model's answers; a tie is half a win."""
    utilities = [answers.utility(run.taste, text) for text in texts]
    before = [answers.utility(run.taste, answer.text) for answer in base]
    return fmean((float(a > b) + float(a >= b)) / 2 for a, b in zip(utilities, before, strict=True))


def main() -> None:
    """Print a row of the table for each seed, and their mean."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--prompts", type=int, default=60, metavar="N")
    parser.add_argument("--questions", type=Path, default=QUESTIONS, metavar="FILE")
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    text = args.questions.read_text().splitlines()[: args.prompts]
    questions = [json.loads(line)["prompt"][0]["content"] for line in text]
    rates, picks = dict[str, float](), dict[str, float]()
    for path in args.runs:
        run = Run(path, questions)
        base, own = run.once(Run.base_answers), run.write(run.backbone(path / "align/adapter"))
        rates[path.name] = win_rate(run, [answer.text for answer in own], base)
        picks[path.name] = win_rate(run, run.best_of(), base)
        cells = [path.name, f"{rates[path.name]:.1%}", f"{picks[path.name]:.1%}", f"{run.right_labels():.1%}"]
        for written in (base, own):
            health = text_health(written)
            cells += [f"{health['ends']:.0%}", f"{health['loops']:.0%}", f"{health['surprise']:.2f}"]
            cells.append(f"{fmean(len(answer.text.split()) for answer in written):.0f}")
        print("|", " | ".join(cells), f"| {run.summary['seconds']:.0f} s |", flush=True)
        if args.show and path == args.runs[0]:
            for first, answer in list(zip(base, own, strict=True))[:5]:
                print(f"- {answer.prompt}\n  - base: {first.text!r}\n  - policy: {answer.text!r}")
    for name, values in (("policy", rates), ("best of 4", picks)):
        if interval := seed_interval(list(values.values()), within=(0, 1)):
            low, high = interval
            print(f"{name}: {fmean(values.values()):.1%} [{low:.1%}, {high:.1%}] over {len(values)} seeds")


if __name__ == "__main__":
    main()
