"""Choose the learning rate of each run's alignment by its own labels, never by the utility.

    python experiments/synthetic/align_rates.py RUN… --lr 3e-5 1e-4 3e-4

The stage ``train`` is done again with every rate. The rate is kept whose best checkpoint orders most of the
held-out pairs as the labels do; of equals the one with the larger margin. The rule is the same one for
selectors and for the oracle.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from prefed.config.align import align_settings
from prefed.runs.align import align, stored_settings
from prefed.runs.finished_run import read_run


def train(run: Path, lr: float) -> dict[str, Any]:
    """The figures of the epoch that training with a rate keeps."""
    record = read_run(run)
    config = align_settings(stored_settings(record), [f"align.lr={lr!r}"], record.path)
    figures = align(run, config, stage="train")["train"]
    return dict(figures["epochs"][figures["kept"] - 1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-5, 1e-4, 3e-4])
    args = parser.parse_args()
    for run in args.runs:
        kept = {lr: train(run, lr) for lr in args.lr}
        for lr, epoch in kept.items():
            print(f"{run}: lr {lr:g}: epoch {epoch['epoch']}, agreement {epoch['agreement']:.3f}")
        best = max(args.lr, key=lambda lr: (kept[lr]["agreement"], kept[lr]["margin"]))
        if best != args.lr[-1]:
            train(run, best)
        print(f"{run}: keeps lr {best:g}", flush=True)


if __name__ == "__main__":
    main()
