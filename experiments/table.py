"""Run experiment files over seeds and print one line for each, beside the number that its first line names.

    python experiments/table.py experiments/fedpdpo/table1/imdb-10/*.toml --seed 42 --seed 43 --out runs

A run lies in ``OUT/FILE/seedSEED``; finished runs are kept and reused, unfinished ones are resumed.
Accuracies are percent of the clients' test pairs with log π(y_w|x) > log π(y_l|x), mean over clients, then
mean ± sample standard deviation over seeds: of each seed's best evaluated round (its worst client and
its clients too), and of the last round. The best round is selected on the very test pairs that it is judged
on, as in the papers: it flatters, the more the more rounds there are, and is no estimate of accuracy on new
pairs. The last round is chosen by nothing. ``--set KEY=VALUE`` holds for all files. Writes ``table.md`` and
``table.json`` into OUT.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefed.config import Experiment
from prefed.runs.run import run
from prefed.trackers.terminal import quiet

HERE = Path(__file__).resolve().parent
SELECTED = "best round, selected on test"
FEW = 5
"""Clients whose own accuracies are printed at most."""


def title(file: Path) -> tuple[str, str]:
    """What the file's first line says it is, and the paper's number, or "" where it names none.

    A first line reads ``# Paper, table 1: IMDB (3), FedPDPO: 87.41±0.20``.
    """
    first = file.read_text("utf-8").partition("\n")[0]
    if not first.startswith("#"):
        return file.stem, ""
    text = first.lstrip("# ").strip()
    found = re.fullmatch(r"(.*): (\d+\.\d+(?:±\d+\.\d+)?)", text)
    return (found[1], found[2]) if found else (text, "")


def place(file: Path, out: Path) -> Path:
    """Where a file's runs go: its path below ``experiments/``, or its name."""
    whole = file.resolve()
    inside = whole.relative_to(HERE) if whole.is_relative_to(HERE) else Path(whole.name)
    return out / inside.with_suffix("")


def outcome(file: Path, seed: int, overrides: Sequence[str], out: Path) -> dict[str, Any]:
    """One run's accuracies, carried out or completed if need be."""
    experiment = Experiment.load(file, [*overrides, f"seed={seed}"])
    result = run(experiment, out, resume=out.exists())
    judged = [
        record["evaluation"]["preference_accuracy"] for record in result.rounds if "evaluation" in record
    ]
    best = max(judged, key=lambda accuracy: accuracy["mean"])
    sent = result.summary["bytes"]
    return {
        "seed": seed,
        "last": judged[-1]["mean"],
        "best": best["mean"],
        "worst": best["worst"],
        "clients": best["per_client"],
        "bytes": sent["up"] + sent["down"],
        "seconds": result.summary["seconds"],
    }


def percent(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation, in percent."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.2f}±{100 * deviation:.2f}"


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    runs = row["runs"]

    def of(figure: str) -> list[float]:
        return [each[figure] for each in runs]

    names = list(runs[0]["clients"])
    each = ", ".join(f"{name} {percent([r['clients'][name] for r in runs])}" for name in names)
    cells = [
        row["experiment"],
        row["paper"],
        percent(of("best")),
        percent(of("last")),
        percent(of("worst")),
        each if len(names) <= FEW else "",
        f"{statistics.mean(of('bytes')) / 1e6:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--seed", action="append", type=int, help="left out: each file's own")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    args = parser.parse_args()
    quiet()
    rows = []
    for file in args.files:
        name, paper = title(file)
        seeds = args.seed or [Experiment.load(file, args.overrides).seed]
        runs = [outcome(file, seed, args.overrides, place(file, args.out) / f"seed{seed}") for seed in seeds]
        rows.append({"experiment": name, "file": str(file), "paper": paper, "runs": runs})
        print(line(rows[-1]), flush=True)
    best = (SELECTED, "last round", f"worst client, {SELECTED}", f"clients, {SELECTED}")
    head = ["experiment", "paper", *best, "MB sent"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *map(line, rows)]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (args.out / "table.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
