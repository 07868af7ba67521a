"""What clients with known tastes gain from aligned models, and what judges' labels cost them.

    python experiments/synthetic/utility.py RUN…
    python experiments/synthetic/utility.py RUN… --epochs

Each run's aligned model and the untouched one respond to prompts that neither the clients nor the alignment
have. Runs that differ in ``-seedN`` alone are one row. A row has, for sampled and for greedy responses:

- the mean utility of the untouched and of the aligned model, the mean over clients and prompts;
- the win rate of the aligned model by the clients' mean utility, with a 95% interval over seeds;
- the share of the oracle's gain, the mean over seeds (``--oracle`` names the oracle's row);
- the gain of the client who gains least, and of the one who gains most;
- characters of a response of both models;
- how the mean sign of each attribute changes: what the alignment taught;
- the share of aligned responses that are whole: they show every attribute. An alignment that goes too far
  breaks the language.

With ``--epochs`` every checkpoint of every run responds, sampled. A row then has the share of held-out labels
that it orders rightly, its win rate by the run's selectors, and that by the utility; then utility, characters
and whole responses. Where the first two rise while the third falls, the policy pleases the selectors alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from prefed.align.judge import Judge, Question, outcome
from prefed.align.judge.local import read_taste
from prefed.align.judge.questions import NumberedPrompt, numbered_prompts
from prefed.align.policy import load_base
from prefed.config.align import JudgeOptions
from prefed.core import files
from prefed.data.synthetic import ATTRIBUTES, Taste, attributes, utility
from prefed.models.backbone import model_digest
from prefed.runs.judge import Comparison, judge
from prefed.runs.labels import make_judge
from prefed.runs.loaded_run import LoadedRun, load_run
from prefed.runs.responses import Models, ModelSide
from prefed.train.generation import Sampling
from prefed.train.metrics import seed_interval
from prefed.train.metrics.winrate import win_rate

HERE = Path(__file__).resolve().parent
Texts = Sequence[str]


def tastes(run: LoadedRun) -> list[Taste]:
    """The taste of each client of a run, from the utilities in its data."""
    dataset = run.trainers.dataset
    records = [dataset.tokens.record(row) for row in range(len(dataset.tokens))]
    return [read_taste(client, records, dataset.flipped) for client in sorted(run.job.members)]


def mean_utility(texts: Texts, crowd: Iterable[Taste]) -> float:
    """The mean utility over clients and texts."""
    return mean(utility(text, taste) for taste in crowd for text in texts)


def mean_signs(texts: Texts) -> dict[str, float]:
    """The mean sign of each attribute; an attribute that a text does not show counts as 0."""
    signs = [attributes(text) for text in texts]
    return {name: mean(each.get(name, 0) for each in signs) for name in ATTRIBUTES}


def whole(texts: Texts) -> float:
    """The share of texts that show every attribute."""
    return mean(len(attributes(text)) == len(ATTRIBUTES) for text in texts)


def measure(run: LoadedRun, prompts: Path, sampling: Sampling, name: str) -> dict[str, object]:
    """The figures of a run's aligned model next to the untouched one; the texts are kept in the run."""
    # An alignment that is done again has verdicts of its own.
    adapter = run.record.path / "align" / "adapter" / "adapter_model.safetensors"
    folder = f"{name}-{files.file_digest(adapter)[:8]}"
    judge(run.record.path, Comparison("utility", prompts, sampling=sampling, name=folder))
    rows = (run.record.path / "judge" / folder / "verdicts.jsonl").read_text("utf-8").splitlines()
    verdicts = [json.loads(row) for row in rows]
    own, base = ([row[key] for row in verdicts] for key in ("text", "against"))
    crowd = tastes(run)
    gains = [mean_utility(own, [taste]) - mean_utility(base, [taste]) for taste in crowd]
    before, after = mean_signs(base), mean_signs(own)
    return {
        "base": mean_utility(base, crowd),
        "aligned": mean_utility(own, crowd),
        "outcomes": [row["outcome"] for row in verdicts],
        "least": min(gains),
        "most": max(gains),
        "length": (mean(map(len, base)), mean(map(len, own))),
        "whole": whole(own),
        "signs": {attribute: after[attribute] - before[attribute] for attribute in ATTRIBUTES},
    }


def row_of(run: Path) -> tuple[str, str]:
    """The row and the seed of a run directory.

    >>> row_of(Path("runs/path/fedbis-seed42"))
    ('fedbis', '42')
    """
    row, _, seed = run.name.partition("-seed")
    return row, seed


def shares(figures: Mapping[tuple[str, str], Mapping[str, float]], row: str, oracle: str) -> list[float]:
    """The share of the oracle's gain in utility that a row gets, for each seed that both have.

    >>> run = {"base": 0.0, "aligned": 1.0}
    >>> shares({("a", "1"): run, ("oracle", "1"): {"base": 0.0, "aligned": 1.25}}, "a", "oracle")
    [0.8]
    """

    def gain(name: str, seed: str) -> float:
        return figures[name, seed]["aligned"] - figures[name, seed]["base"]

    seeds = [seed for name, seed in figures if name == row and (oracle, seed) in figures]
    return [gain(row, seed) / gain(oracle, seed) for seed in seeds if gain(oracle, seed)]


def spread(values: Sequence[float]) -> str:
    """The mean, and the standard deviation over seeds where there are several.

    >>> spread([0.25]), spread([0.0, 1.0]), spread([])
    ('0.25', '0.50±0.71', '–')
    """
    if not values:
        return "–"
    return f"{mean(values):.2f}" + (f"±{stdev(values):.2f}" if len(values) > 1 else "")


def win_rates(rates: Sequence[float]) -> str:
    """The mean of the seeds' win rates, and its 95% interval where there are several seeds.

    >>> win_rates([0.7]), win_rates([0.5, 0.6, 0.7]), win_rates([0.8, 1.0])
    ('0.700', '0.600 [0.352, 0.848]', '0.900 [0.000, 1.000]')
    """
    interval = seed_interval(rates, within=(0.0, 1.0))
    return f"{mean(rates):.3f}" + (" [{:.3f}, {:.3f}]".format(*interval) if interval else "")


def table(figures: Mapping[tuple[str, str], Mapping[str, object]], oracle: str) -> Iterator[str]:
    """The lines of the table, a row for each method."""
    yield (
        "| row | seeds | base | aligned | win rate | oracle's gain | least, most | characters | "
        + " | ".join([*ATTRIBUTES, "whole"])
        + " |"
    )
    yield "|" + "---|" * (9 + len(ATTRIBUTES))
    for row in dict.fromkeys(name for name, _ in figures):
        own = [each for (name, _), each in figures.items() if name == row]
        rates = [win_rate(each["outcomes"]).mean for each in own]
        characters = [mean(each["length"][k] for each in own) for k in (0, 1)]
        cells = [
            row,
            str(len(own)),
            spread([each["base"] for each in own]),
            spread([each["aligned"] for each in own]),
            win_rates(rates),
            spread(shares(figures, row, oracle)),
            ", ".join(f"{mean(each[key] for each in own):+.2f}" for key in ("least", "most")),
            " → ".join(f"{value:.0f}" for value in characters),
            *(f"{mean(each['signs'][name] for each in own):+.2f}" for name in ATTRIBUTES),
            spread([each["whole"] for each in own]),
        ]
        yield f"| {' | '.join(cells)} |"


def wins(judge: Judge, prompts: Sequence[NumberedPrompt], own: Texts, other: Texts) -> float:
    """The win rate of texts against others, asked in both orders; equal texts are ties."""
    outcomes = []
    for row, text, against in zip(prompts, own, other, strict=True):
        question = Question(row.prompt, text, against)
        alike = text.strip() == against.strip()
        answers = () if alike else judge.compare([question, question.swapped()])
        outcomes.append(0.5 if alike else outcome(*answers))
    return win_rate(outcomes).mean


def epochs(run: LoadedRun, prompts: Sequence[NumberedPrompt], sampling: Sampling) -> Iterator[str]:
    """A line for each checkpoint of a run's alignment."""
    path, seed = run.record.path, run.experiment.seed
    judges = [make_judge(name, JudgeOptions(), run) for name in (f"selector:{path}", "utility")]
    crowd = tastes(run)

    def responses(side: ModelSide) -> Texts:
        texts = side.texts(prompts, path / "judge" / "texts", lambda what, done, of: None)
        return [texts[row.row] for row in prompts]

    base = responses(Models(run, sampling).base())
    for epoch in json.loads((path / "align" / "summary.json").read_text("utf-8"))["train"]["epochs"]:
        name = f"epoch-{epoch['epoch']}"
        backbone = load_base(run.experiment.model, seed, path / "align" / "checkpoints" / name)
        identity = {"model": model_digest(backbone)}
        side = ModelSide(name, run, backbone, backbone.reference, identity, sampling, 0, raw=False)
        texts = responses(side)
        by_selectors, by_utility = (wins(each, prompts, texts, base) for each in judges)
        cells = (
            path.name,
            str(epoch["epoch"]),
            "–" if epoch["agreement"] is None else f"{epoch['agreement']:.3f}",
            f"{by_selectors:.3f}",
            f"{by_utility:.3f}",
            f"{mean_utility(texts, crowd):+.2f}",
            f"{mean(map(len, texts)):.0f}",
            f"{whole(texts):.2f}",
        )
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--prompts", type=Path, default=HERE / "test-prompts.jsonl")
    parser.add_argument("--oracle", default="oracle", help="the row whose gain is the whole (default oracle)")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--epochs", action="store_true", help="every checkpoint of every run")
    args = parser.parse_args()
    loaded = {row_of(path): load_run(path, data=True) for path in args.runs}
    sampled = Sampling(temperature=1.0, max_tokens=args.max_new_tokens)
    if args.epochs:
        print(
            "| run | epoch | agreement | wins by selectors | wins by utility | utility | characters | whole |"
        )
        print("|" + "---|" * 8)
        prompts = numbered_prompts(args.prompts)
        for run in loaded.values():
            for line in epochs(run, prompts, sampled):
                print(line, flush=True)
        return
    for name, how in (("sampled", sampled), ("greedy", sampled.model_copy(update={"temperature": 0.0}))):
        figures = {key: measure(run, args.prompts, how, name) for key, run in loaded.items()}
        print(f"\n{name}\n", *table(figures, args.oracle), sep="\n")


if __name__ == "__main__":
    main()
