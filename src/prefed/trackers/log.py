"""Events of a run as lines of text, and ``run.log``, which contains them with times."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from prefed.core import Callback
from prefed.core.records import RoundRecord
from prefed.core.text import duration, pluralize, printable, size


def loss_and_accuracy(record: RoundRecord) -> list[str]:
    """Format loss and preference accuracy of a round's record, if present.

    >>> loss_and_accuracy({"loss": 0.69314, "preference_accuracy": 0.5})
    ['loss 0.6931', 'preference accuracy 0.500']
    """
    figures = []
    if record.get("loss") is not None:
        figures.append(f"loss {record['loss']:.4f}")
    if record.get("preference_accuracy") is not None:
        figures.append(f"preference accuracy {record['preference_accuracy']:.3f}")
    return figures


def round_line(record: RoundRecord, rounds: int) -> str:
    """Format a round's record as a line of text.

    >>> round_line({"round": 1, "loss": 0.69314, "bytes_up": 1500, "bytes_down": 20, "seconds": 2.04}, 9)
    'round 1/9  loss 0.6931  up 1.5 kB  down 20 B  2.0 s'
    """
    figures = loss_and_accuracy(record)
    figures.append(f"up {size(record['bytes_up'])}  down {size(record['bytes_down'])}")
    figures.append(f"{record['seconds']:.1f} s")
    return f"round {record['round']}/{rounds}  {'  '.join(figures)}"


def stage_line(stage: str, figures: Mapping[str, Any]) -> str:
    """Format the counts and the duration of a stage of an alignment.

    >>> stage_line("labels", {"pairs": 1200, "labelled": 800, "mean": 0.5, "seconds": 95.0})
    'labels: pairs 1,200  labelled 800  1m35s'
    """
    counts = [f"{name} {value:,}" for name, value in figures.items() if isinstance(value, int)]
    return f"{stage}: {'  '.join([*counts, duration(figures['seconds'])])}"


class RunLog(Callback):
    """Appends a line with the time to a run's log for each event.

    Like ``rounds.jsonl``, the log contains counts, metrics and names of clients, but no prompt or response.
    Of an error only the type is logged, because its message may quote data. Write errors are ignored.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rounds = self._done = 0

    def write(self, text: str) -> None:
        """Append a line."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        # Symbolic links are not followed, as for the other files of the directory.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with suppress(OSError), os.fdopen(os.open(self._path, flags, 0o666), "ab") as file:
            file.write(f"{now} {printable(text)}\n".encode())

    def on_run_begin(self, done: int, rounds: int) -> None:
        """Log the number of rounds, and how many are complete."""
        self._rounds, self._done = rounds, done
        self.write(
            pluralize(rounds, "round", "rounds") if done == 0 else f"continues after round {done}/{rounds}"
        )

    def on_round_end(self, record: RoundRecord) -> None:
        """Log the metrics of a round."""
        self._done = record["round"]
        self.write(round_line(record, self._rounds))

    def on_note(self, text: str) -> None:
        """Log a note."""
        self.write(text)

    def on_warning(self, text: str) -> None:
        """Log a warning."""
        self.write(f"warning: {text}")

    def on_stage_end(self, stage: str, figures: Mapping[str, Any]) -> None:
        """Log a completed stage of an alignment."""
        self.write(stage_line(stage, figures))

    def ended(self, error: BaseException | None) -> None:
        """Log how the run ended."""
        done = f" after round {self._done}/{self._rounds}" if self._rounds else ""
        if error is None:
            self.write("done")
        elif isinstance(error, KeyboardInterrupt):
            self.write(f"interrupted{done}")
        else:
            self.write(f"ended by {type(error).__name__}{done}")
