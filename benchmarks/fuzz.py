"""Start random experiments, drawn from the schema: the dry run and the run accept and refuse the same ones.

Prints each experiment of which a start ends with an unexpected error, whose dry run and run differ, or whose
refused run leaves a directory. ``tests/engines/test_drawn.py`` starts a few.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import drawn


def main() -> None:
    """Start the experiments of a range of seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1000, help="number of seeds")
    options = parser.parse_args()
    logging.getLogger("prefed").setLevel(logging.ERROR)
    counts = dict.fromkeys(("invalid", "refused", "completed", "wrong"), 0)
    with TemporaryDirectory() as name:
        place = drawn.make_place(Path(name))
        for seed in range(options.first, options.first + options.count):
            tables, out = drawn.experiment(place, seed), place / "runs" / str(seed)
            outcome, wrong = drawn.outcome(tables, out)
            counts["wrong" if wrong else outcome] += 1
            if wrong:
                print(f"seed {seed}: {'; '.join(wrong)}\n  {json.dumps(tables)}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    sys.exit(1 if counts["wrong"] else 0)


if __name__ == "__main__":
    main()
