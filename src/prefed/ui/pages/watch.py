"""Keeps the page of a run fresh while the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import sleep

from prefed.runs.live import committed, read_going
from prefed.runs.record import read_run
from prefed.store.directory import at_work
from prefed.ui.pages.page import Going, write_page, write_waiting

LOOK = 1.0
"""Seconds between two looks at a run."""
REFRESH = 5
"""Seconds after which a browser loads a watched page again."""


def watch(run: Path, out: Path, tell: Callable[[str], None]) -> None:
    """Write the page of a run whenever a round is committed, until the run ends.

    The last page does not load itself again: neither that of a run that is finished or has stopped, nor the
    one that is left behind where this is interrupted.

    Args:
        run: the run directory.
        out: the page.
        tell: is told where the page is, and of a run that has stopped before its end.

    Raises:
        RunError: there is no run, or a file is damaged.
        KeyboardInterrupt: this was interrupted; the last page is written.
    """
    if not run.is_dir():
        read_run(run)  # says which runs there are
    written, said = -1, False
    try:
        while not (run / "summary.json").exists():
            # Who looks in this order misses no round of a process that ends in between.
            working, number = at_work(run), committed(run)
            if not working:
                break
            if number != written:
                _write(run, out, number, working=True)
                written = number
                if not said:
                    tell(f"report: {out}, written after every round; Ctrl-C ends this, not the run")
                    said = True
            sleep(LOOK)
    except KeyboardInterrupt:
        _write(run, out, committed(run), working=None)
        raise
    if (run / "summary.json").exists():
        write_page(read_run(run), out)
        tell(f"report: {out}")
        return
    number = committed(run)
    _write(run, out, number, working=False)
    tell(f"report: {out}; nobody works on {run}: it stands after round {number}")


def _write(run: Path, out: Path, number: int, *, working: bool | None) -> None:
    """The page of an unfinished run.

    Args:
        working: whether somebody works on it; ``None`` where nobody looks any more.
    """
    told = {
        True: f"It stands after round {number} and goes on: this page loads itself again.",
        False: f"It stands after round {number}, and nobody works on it.",
        None: f"It stood after round {number} when this page was written.",
    }
    going = Going(f"This run is not finished. {told[working]}", REFRESH if working else None)
    record = read_going(run) if number else None
    if record is None:
        write_waiting(run, out, going)
    else:
        write_page(record, out, going)
