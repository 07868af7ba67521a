r"""A table of methods: each with its learning rate chosen on validation pairs, then run over seeds.

    python experiments/sweep.py experiments/personas/base.toml --method feddpo --method local \
        --lr 1e-3 --lr 3e-3 --further 2 --seed 42 --seed 43 --seed 44 --out runs/personas

For each method, every learning rate is run with the first seed and judged on the validation split; while the
best one is the smallest or the largest tried, up to ``--further`` rates beyond it are tried too. The best
(highest mean of ``--judge``, the smaller rate on a tie) is run with every seed and judged on the test split.
Finished runs are kept and reused. Prints a Markdown table and writes ``table.json`` and ``table.md``.
``--set KEY=VALUE`` changes the base file for all, ``--for METHOD:KEY=VALUE`` for one method; ``{lr}`` in a
value stands for the rate that is being tried.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from prefed import files
from prefed.after.pairs import judge
from prefed.config import load
from prefed.experiment import run
from prefed.opened import open_run
from prefed.progress import quiet

ACCURACIES = ("preference_accuracy", "reward_accuracy", "baseline_accuracy", "shared_accuracy")


def finished(file: Path, overrides: Sequence[str], out: Path) -> dict[str, Any]:
    """The summary of a run, which is resumed or taken as it is if it is there."""
    done = out / "summary.json"
    if done.exists():
        return dict(json.loads(done.read_text("utf-8")))
    return dict(run(load(file, list(overrides)), out, resume=out.exists()).summary)


def judged(out: Path, split: Literal["validation", "test"]) -> dict[str, dict[str, float]]:
    """Mean and worst client of each accuracy on ``split``; kept beside the run."""
    done = out / f"judged-{split}.json"
    if not done.exists():
        figures = judge(open_run(out, data=True), split).figures
        there = [name for name in ACCURACIES if name in figures]
        kept = {name: {k: figures[name][k] for k in ("mean", "worst")} for name in there}
        files.write(done, json.dumps(kept, indent=1).encode())
    return dict(json.loads(done.read_text("utf-8")))


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


def sweep(args: argparse.Namespace, label: str, name: str) -> dict[str, Any]:
    """One method: its rates on validation pairs, its best over seeds on test pairs."""
    own = [text.split(":", 1)[1] for text in args.own if text.split(":", 1)[0] == label]
    common = [*args.overrides, f"method.name={name}", "engine.threads=1", *own, "evaluate.split=validation"]

    def one(lr: float, seed: int) -> Path:
        out = Path(args.out) / f"{label}-lr{lr:g}-seed{seed}"
        overrides = [text.replace("{lr}", repr(lr)) for text in [*common, f"seed={seed}", "method.lr={lr}"]]
        finished(args.file, overrides, out)
        return out

    chosen: dict[float, float] = {}
    waiting, further = sorted(args.lr), args.further
    while waiting:
        lr = waiting.pop(0)
        summary = json.loads((one(lr, args.seed[0]) / "summary.json").read_text("utf-8"))
        chosen[lr] = summary[args.judge]["mean"]
        print(f"{label} lr {lr:g}: validation {chosen[lr]:.3f}", flush=True)
        best = max(sorted(chosen), key=lambda rate: chosen[rate])
        if not waiting and further and (more := beyond([*chosen], best)):
            waiting, further = [more], further - 1
    runs = [one(best, seed) for seed in args.seed]
    row: dict[str, Any] = {"method": label, "lr": best, "validation": chosen}
    tests = [judged(out, "test") for out in runs]
    for key in ACCURACIES:
        for figure in ("mean", "worst"):
            row[f"{key}.{figure}"] = [each[key][figure] for each in tests if key in each]
    summaries = [json.loads((out / "summary.json").read_text("utf-8")) for out in runs]
    row["bytes"] = [each["bytes"]["up"] + each["bytes"]["down"] for each in summaries]
    row["seconds"] = [each["seconds"] for each in summaries]
    print(f"{label}: test {spread(row['preference_accuracy.mean'])}", flush=True)
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown, best accuracy first."""
    lines = [
        "| method | lr | accuracy | worst client | shared model | reward accuracy | worst client | MB sent |",
        "|---|---|---|---|---|---|---|---|",
        f"| untouched model | | {spread(rows[0]['baseline_accuracy.mean'])} "
        f"| {spread(rows[0]['baseline_accuracy.worst'])} | | | | |",
    ]
    for row in sorted(rows, key=lambda row: -statistics.mean(row["preference_accuracy.mean"])):
        shared = row["shared_accuracy.mean"]
        cells = [
            row["method"],
            f"{row['lr']:g}",
            spread(row["preference_accuracy.mean"]),
            spread(row["preference_accuracy.worst"]),
            spread(shared) if shared else "",
            spread(row["reward_accuracy.mean"]),
            spread(row["reward_accuracy.worst"]),
            f"{statistics.mean(row['bytes']) / 1e6:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--method", action="append", required=True, help="NAME, or LABEL=NAME")
    parser.add_argument("--lr", action="append", type=float, required=True)
    parser.add_argument("--further", type=int, default=0, help="rates to try beyond an end of those given")
    parser.add_argument("--judge", choices=ACCURACIES[:2], default=ACCURACIES[0], help="what chooses a rate")
    parser.add_argument("--seed", action="append", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--for", dest="own", action="append", default=[], metavar="LABEL:KEY=VALUE")
    args = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    rows = []
    for wanted in args.method:
        label, _, name = wanted.rpartition("=")
        rows.append(sweep(args, label or name, name))
        args.out.mkdir(parents=True, exist_ok=True)
        files.write(args.out / "table.json", json.dumps(rows, indent=1).encode())
        files.write(args.out / "table.md", table(rows).encode())
    print(table(rows))


if __name__ == "__main__":
    main()
