"""Events of a run as lines of text, and ``run.log``, which contains them with times."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefed.core import Callback
from prefed.core.text import duration, pluralize, printable, size

if TYPE_CHECKING:
    from prefed.core.records import RoundRecord

_LOGGED = (
    *("round", "loss", "preference_accuracy", "reward_accuracy", "epsilon"),
    *("bytes_up", "bytes_down", "seconds"),
)
"""Keys of a round's record that are logged as numbers."""


def loss_and_accuracy(record: RoundRecord) -> list[str]:
    """Format loss, preference accuracy and health of text of a round's record, if present.

    >>> loss_and_accuracy({"loss": 0.69314, "preference_accuracy": 0.5})
    ['loss 0.6931', 'preference accuracy 0.500']
    >>> loss_and_accuracy({"evaluation": {"text": {"shared": {"ends": 0.95, "loops": 0.05}}}})
    ['answers: 95% end, 5% loop']
    """
    figures = []
    if record.get("loss") is not None:
        figures.append(f"loss {record['loss']:.4f}")
    if record.get("preference_accuracy") is not None:
        figures.append(f"preference accuracy {record['preference_accuracy']:.3f}")
    text = record.get("evaluation", {}).get("text", {})
    if own := text.get("own", text.get("shared")):
        figures.append(f"answers: {own['ends']:.0%} end, {own['loops']:.0%} loop")
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


class EventLog(Callback):
    """Describes each event of a run in a line of text.

    The lines contain counts, metrics and names of clients, but no prompt or response.
    """

    def __init__(self) -> None:
        self._rounds = self._done = 0

    def add(self, event: str, text: str, level: str = "info", **fields: Any) -> None:
        """Log an event.

        Args:
            fields: its numbers, which ``text`` contains in rounded form.
        """
        raise NotImplementedError

    def on_run_begin(self, done: int, rounds: int) -> None:
        """Log the number of rounds, and how many are complete."""
        self._rounds, self._done = rounds, done
        text = f"continues after round {done}/{rounds}" if done else pluralize(rounds, "round", "rounds")
        self.add("start", text, round=done, rounds=rounds)

    def on_round_end(self, record: RoundRecord) -> None:
        """Log the metrics of a round."""
        self._done = record["round"]
        fields: dict[str, Any] = {name: value for name, value in record.items() if name in _LOGGED}
        self.add("round", round_line(record, self._rounds), rounds=self._rounds, **fields)

    def on_note(self, text: str) -> None:
        """Log a note."""
        self.add("note", text)

    def on_warning(self, text: str) -> None:
        """Log a warning."""
        self.add("warning", f"warning: {text}", "warning")

    def on_stage_end(self, stage: str, figures: Mapping[str, Any]) -> None:
        """Log a completed stage of an alignment."""
        numbers: dict[str, Any] = {n: value for n, value in figures.items() if isinstance(value, int | float)}
        self.add("stage", stage_line(stage, figures), stage=stage, **numbers)


class JsonLog(EventLog):
    """Passes each event to a function.

    Args:
        add: called as :meth:`add`.
    """

    def __init__(self, add: Callable[..., None]) -> None:
        super().__init__()
        self._add = add

    def add(self, event: str, text: str, level: str = "info", **fields: Any) -> None:
        """Pass on an event, without numbers that JSON cannot represent."""
        finite = {n: v for n, v in fields.items() if not isinstance(v, float) or math.isfinite(v)}
        self._add(event, printable(text), level, **finite)


class RunLog(EventLog):
    """Appends a line with the time to a run's log for each event.

    Of an error only the type is logged, because its message may quote data. Write errors are ignored.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def add(self, event: str, text: str, level: str = "info", **fields: Any) -> None:
        """Append a line."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        # Symbolic links are not followed, as for the other files of the directory.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with suppress(OSError), os.fdopen(os.open(self._path, flags, 0o666), "ab") as file:
            file.write(f"{now} {printable(text)}\n".encode())

    def ended(self, error: BaseException | None) -> None:
        """Log how the run ended."""
        done = f" after round {self._done}/{self._rounds}" if self._rounds else ""
        if error is None:
            self.add("end", "done")
        elif isinstance(error, KeyboardInterrupt):
            self.add("end", f"interrupted{done}")
        else:
            self.add("end", f"ended by {type(error).__name__}{done}")
