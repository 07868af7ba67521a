"""Align runs of align.toml once more, with labels by the program of ``answers.py``: the oracle.

    python experiments/smollm2/align_oracle.py runs/align/brief-fedbis-seed*

Copies each run, with the completions that its selectors labelled, to ``…-oracle-seed…``; labels there by the
utility of the run's taste, and trains. ``align_table.py`` reads the copies like other runs.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import answers

from prefed.align.judge import Question, Verdict
from prefed.align.judge.names import ARGUMENTS
from prefed.config.align import JudgeOptions
from prefed.runs.align import align, read_settings
from prefed.runs.finished_run import read_run
from prefed.runs.labels import JUDGES


class Oracle:
    """Compares utilities; equal ones are a tie. ``own`` is the taste of the client that judges."""

    def __init__(self, argument: str, options: JudgeOptions) -> None:
        self._taste = answers.taste_of(options.taste) if argument == "own" else argument
        self.identity = {"judge": "oracle", "taste": self._taste}

    def compare(self, questions: Iterable[Question]) -> Iterator[Verdict]:
        """Yield 1 if the first answer is better, 0 if the second one is, 0.5 for a tie."""
        for each in questions:
            first, second = (answers.utility(self._taste, text) for text in (each.first, each.second))
            yield Verdict((float(first > second) + float(first >= second)) / 2, text="")


def main() -> None:
    """Align a copy of each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    # A judge of a package would have an entry point.
    JUDGES.builtin["oracle"], ARGUMENTS["oracle"] = Oracle, "TASTE"  # type: ignore[index]
    for path in parser.parse_args().runs:
        taste, _, seed = path.name.split("-")
        copy = path.with_name(f"{taste}-oracle-{seed}")
        shutil.copytree(path, copy)
        config = read_settings(read_run(copy), [f"align.labels=judge:oracle:{taste}"])
        align(copy, config, stage="labels")


if __name__ == "__main__":
    main()
