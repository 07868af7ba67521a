"""One run of a table, in a process of its own: carried out, resumed, or taken as it is.

    python experiments/one.py FILE --out DIR --set seed=42 --set method.lr=1e-3 --test

Keeps the commit of its code in ``DIR/commit``; ``--test`` judges it on the test split besides.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sweep import Run, finished, judged

from prefed.trackers.terminal import quiet


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--test", action="store_true")
    args = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    finished(Run(args.file, args.out, tuple(args.overrides)))
    if args.test:
        judged(args.out, "test")


if __name__ == "__main__":
    main()
