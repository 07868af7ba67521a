r"""A table of methods: each with its learning rate chosen on validation pairs, then run over seeds.

    python experiments/sweep.py experiments/personas/base.toml --method feddpo --method local \
        --lr 1e-3 --lr 3e-3 --further 2 --seed 42 --seed 43 --seed 44 --out runs/personas

For each method, every learning rate is run with the first seed and judged on the validation split; while the
best one is the smallest or the largest tried, up to ``--further`` rates beyond it are tried too, unless all
rates come to the same. The best (highest mean of ``--judge``, the smaller rate on a tie) is run with every
seed and judged on the test split. Finished runs are kept and reused. Prints a Markdown table and writes
``table.json`` and ``table.md``. ``--set KEY=VALUE`` changes the base file for all, ``--for METHOD:KEY=VALUE``
for one method; ``{lr}`` in a value stands for the rate that is being tried.

``tables.py`` makes the tables of the README this way, each from a file in ``tables/``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import prefed
from prefed import files
from prefed.config import Experiment

ACCURACIES = (
    "preference_accuracy",
    "reward_accuracy",
    "baseline_accuracy",
    "shared_accuracy",
    "combined_accuracy",
    "explicit_accuracy",
)
JUDGES = ACCURACIES[:2]
PLACES = ("data.train.path", "data.validation.path", "data.test.path", "model.name", "method.reward_model")
"""Settings that say where something lies: another place does not make another run."""


@dataclass(frozen=True)
class Run:
    """One run of a table.

    Attributes:
        file: the experiment file.
        out: the run directory.
        overrides: ``KEY=VALUE`` each.
        test: whether it is judged on the test split besides.
    """

    file: Path
    out: Path
    overrides: tuple[str, ...]
    test: bool = False

    @property
    def ready(self) -> bool:
        """Whether all that is asked of it is there."""
        whole = (self.out / "summary.json").exists() and not begun(self.out).exists()
        return whole and (not self.test or held(self.out, "test") is not None)

    def check(self) -> None:
        """See that what lies in the run directory is this run.

        Raises:
            ConfigError: the settings are not valid.
            ValueError: it was run with other settings.
        """
        after, config = _settings(Experiment.load(self.file, list(self.overrides))), self.out / "config.toml"
        if not config.exists():
            return
        before = _settings(Experiment.parse(config.read_text("utf-8")))
        differ = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
        if differ:
            said = "; ".join(f"{key} is {before.get(key)!r}, not {after.get(key)!r}" for key in differ)
            raise ValueError(
                f"{self.out} was run with other settings: {said}. Move it away, or give another --out"
            )


def _settings(experiment: Experiment) -> dict[str, Any]:
    """All that decides a run's numbers, but where its data and models lie."""
    leaves = _leaves(experiment.model_dump(mode="json", exclude_none=True))
    return {key: value for key, value in leaves if key not in PLACES and not key.startswith("engine.")}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@dataclass(frozen=True)
class Row:
    """A row of a table: a method, the rates to begin with, and where its runs go.

    Attributes:
        label: of the row; its runs lie in ``FOLDER/LABEL-lrRATE-seedSEED``.
        file: the experiment file.
        folder: the table's.
        rates: learning rates that are all tried.
        further: how many may be tried beyond an end of them.
        seeds: the first chooses the rate.
        overrides: ``KEY=VALUE`` each; ``{lr}`` stands for the rate.
        judge: the figure that chooses the rate.
        text: how the table names it.
    """

    label: str
    file: Path
    folder: Path
    rates: tuple[float, ...]
    further: int
    seeds: tuple[int, ...]
    overrides: tuple[str, ...] = ()
    judge: str = JUDGES[0]
    text: str = ""

    def run(self, lr: float, seed: int, *, test: bool = False) -> Run:
        """The run at a rate with a seed."""
        given = [
            *self.overrides,
            "engine.threads=1",
            "evaluate.split=validation",
            f"seed={seed}",
            "method.lr={lr}",
        ]
        overrides = tuple(text.replace("{lr}", repr(lr)) for text in given)
        return Run(self.file, self.folder / f"{self.label}-lr{lr:g}-seed{seed}", overrides, test)

    def validation(self, lr: float) -> float:
        """What the finished run of the first seed at ``lr`` came to."""
        return float(summary(self.run(lr, self.seeds[0]).out)[self.judge]["mean"])

    def following(self, tried: Mapping[float, float]) -> float | None:
        """The rate to try after those in ``tried``, rate → figure; ``None`` when the best is known."""
        if flat(tried) or len(tried) >= len(set(self.rates)) + self.further:
            return None
        return beyond([*tried], best(tried))

    def outcome(self, tried: Mapping[float, float]) -> dict[str, Any]:
        """The row, once its best rate has been run and judged with every seed."""
        lr = best(tried)
        runs = [self.run(lr, seed).out for seed in self.seeds]
        looked = [self.run(each, self.seeds[0]).out for each in tried]
        tests = [judged(out, "test") for out in runs]
        row: dict[str, Any] = {
            "method": self.label,
            "text": self.text or f"`{self.label}`",
            "lr": lr,
            "judge": self.judge,
            "validation": dict(sorted(tried.items())),
            "seeds": list(self.seeds),
        }
        for key in ACCURACIES:
            for figure in ("mean", "worst"):
                row[f"{key}.{figure}"] = [each[key][figure] for each in tests if key in each]
        summaries = [summary(out) for out in runs]
        row["bytes"] = [each["bytes"]["up"] + each["bytes"]["down"] for each in summaries]
        row["seconds"] = [each["seconds"] for each in summaries]
        row["commits"] = sorted({commit for out in {*runs, *looked} for commit in commits(out)})
        return row


def summary(out: Path) -> dict[str, Any]:
    """The summary of a finished run."""
    return dict(json.loads((out / "summary.json").read_text("utf-8")))


def code() -> str:
    """The commit of the code that runs, with ``+`` if files differ from it; or else the version."""
    folder = Path(prefed.__file__).parent

    def git(*words: str) -> str:
        asked = ["git", "-C", str(folder), *words]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if git("ls-files", "__init__.py"):
            return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        pass
    return f"v{version('prefed')}"


def commits(out: Path) -> list[str]:
    """The commits of the code that made a run: more than one if other code resumed it."""
    path = out / "commit"
    return path.read_text("utf-8").split() if path.exists() else ["unknown"]


def finished(run: Run) -> None:
    """Carry a run out, or resume it, or take it as it is; the commit of its code is kept beside it."""
    note = begun(run.out)
    if not (run.out / "summary.json").exists():
        from prefed.runs.run import run as carry_out

        run.out.parent.mkdir(parents=True, exist_ok=True)
        # A run that was killed may be resumed by other code, and then has both to name. The run directory
        # itself holds nothing before the run does.
        files.append(note, f"{code()}\n".encode())
        carry_out(Experiment.load(run.file, list(run.overrides)), run.out, resume=run.out.exists())
    if note.exists():
        names = dict.fromkeys(note.read_text("utf-8").split())
        files.write(run.out / "commit", "".join(f"{name}\n" for name in names).encode())
        files.remove(note)


def begun(out: Path) -> Path:
    """Where the commits of a run that is under way are noted."""
    return out.with_name(f"{out.name}.begun")


def held(out: Path, split: str) -> dict[str, dict[str, float]] | None:
    """What :func:`judged` has kept of a finished run, if it is all that there is to know."""
    done = out / f"judged-{split}.json"
    kept = dict(json.loads(done.read_text("utf-8"))) if done.exists() else {}
    return kept if all(name in kept for name in ACCURACIES if name in summary(out)) else None


def judged(out: Path, split: Literal["validation", "test"]) -> dict[str, dict[str, float]]:
    """Mean and worst client of each accuracy on ``split``; kept beside the run."""
    kept = held(out, split)
    if kept is None:
        from prefed.runs.evaluate import judge
        from prefed.runs.loaded import load_run

        figures = judge(load_run(out, data=True), split).figures
        there = [name for name in ACCURACIES if name in figures]
        kept = {name: {k: figures[name][k] for k in ("mean", "worst")} for name in there}
        files.write(out / f"judged-{split}.json", json.dumps(kept, indent=1).encode())
    return kept


def best(tried: Mapping[float, float]) -> float:
    """The rate with the highest figure, the smaller on a tie."""
    return max(sorted(tried), key=lambda lr: tried[lr])


def flat(tried: Mapping[float, float]) -> bool:
    """Whether every rate comes to the same, so that no other would be better.

    So it is with one model for clients who want opposite things: it gets one of every two right.
    """
    return len(tried) > 1 and max(tried.values()) - min(tried.values()) < 1e-9


def beyond(rates: Sequence[float], best: float) -> float | None:
    """The rate to try next if ``best`` is at an end of ``rates``: as far again as its neighbour."""
    ordered = sorted(rates)
    if len(ordered) < 2 or best not in (ordered[0], ordered[-1]):
        return None
    neighbour = ordered[1] if best == ordered[0] else ordered[-2]
    return float(f"{best * best / neighbour:.1g}")


def spread(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


def short(lr: float) -> str:
    """A rate as the tables have it.

    >>> [short(lr) for lr in (3e-5, 0.0025, 0.03, 0.3, 3.0)]
    ['3e-5', '2.5e-3', '3e-2', '0.3', '3']
    """
    if lr >= 0.1:
        return f"{lr:g}"
    number, _, power = f"{lr:e}".partition("e")
    return f"{float(number):g}e{int(power)}"


def chosen(row: Mapping[str, Any]) -> tuple[str, str]:
    """The rate of a row, and which were tried; a best rate at their end, or no difference, is said."""
    tried = {float(lr): value for lr, value in row["validation"].items()}
    around = f"{short(min(tried))} to {short(max(tried))}" if len(tried) > 1 else short(row["lr"])
    if flat(tried):
        return "any", f"{around}, all alike"
    if row["lr"] in (min(tried), max(tried)):
        around += ", best at the end"
    return short(row["lr"]), around


COLUMNS = (
    ("accuracy", "preference_accuracy.mean"),
    ("worst client", "preference_accuracy.worst"),
    ("shared model", "shared_accuracy.mean"),
    ("reward accuracy", "reward_accuracy.mean"),
    ("worst client", "reward_accuracy.worst"),
    ("with the reward head", "combined_accuracy.mean"),
    ("reward head alone", "explicit_accuracy.mean"),
)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown, best accuracy first; a column that no row has a figure for is left out."""
    columns = [(name, key) for name, key in COLUMNS if any(row[key] for row in rows)]
    head = ["method", "learning rate", "rates tried", *(name for name, _ in columns), "MB sent", "commit"]
    untouched = {"preference_accuracy": "baseline_accuracy"}
    first = ["untouched model", "", ""]
    for _, key in columns:
        accuracy, _, figure = key.partition(".")
        first.append(spread(rows[0][f"{untouched[accuracy]}.{figure}"]) if accuracy in untouched else "")
    lines = [head, ["---"] * len(head), [*first, "", ""]]
    for row in sorted(rows, key=lambda row: -statistics.mean(row["preference_accuracy.mean"])):
        figures = [spread(row[key]) if row[key] else "" for _, key in columns]
        sent = f"{statistics.mean(row['bytes']) / 1e6:.1f}"
        lines.append([row["text"], *chosen(row), *figures, sent, ", ".join(row["commits"])])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def write(folder: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """``NAME.json`` and ``NAME.md`` in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / f"{name}.json", json.dumps(rows, indent=1).encode())
    files.write(folder / f"{name}.md", table(rows).encode())


def sweep(row: Row) -> dict[str, Any]:
    """One method: its rates on validation pairs, its best over seeds on test pairs."""

    def carried(run: Run) -> None:
        run.check()
        finished(run)

    tried: dict[float, float] = {}
    waiting = sorted(row.rates)
    while waiting:
        lr = waiting.pop(0)
        carried(row.run(lr, row.seeds[0]))
        tried[lr] = row.validation(lr)
        print(f"{row.label} lr {lr:g}: validation {tried[lr]:.3f}", flush=True)
        if not waiting and (more := row.following(tried)):
            waiting = [more]
    for seed in row.seeds:
        carried(row.run(best(tried), seed))
    found = row.outcome(tried)
    print(f"{row.label}: test {spread(found['preference_accuracy.mean'])}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--method", action="append", required=True, help="NAME, or LABEL=NAME")
    parser.add_argument("--lr", action="append", type=float, required=True)
    parser.add_argument("--further", type=int, default=0, help="rates to try beyond an end of those given")
    parser.add_argument("--judge", choices=JUDGES, default=JUDGES[0], help="what chooses a rate")
    parser.add_argument("--seed", action="append", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--for", dest="own", action="append", default=[], metavar="LABEL:KEY=VALUE")
    args = parser.parse_args()
    import torch

    from prefed.trackers.terminal import quiet

    quiet()
    torch.set_num_threads(1)
    rows = []
    for wanted in args.method:
        label, _, name = wanted.rpartition("=")
        label = label or name
        own = [text.partition(":")[2] for text in args.own if text.partition(":")[0] == label]
        overrides = (*args.overrides, f"method.name={name}", *own)
        rates, seeds = tuple(args.lr), tuple(args.seed)
        rows.append(sweep(Row(label, args.file, args.out, rates, args.further, seeds, overrides, args.judge)))
        write(args.out, "table", rows)
    print(table(rows))


if __name__ == "__main__":
    main()
