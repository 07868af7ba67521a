"""One run of a sweep, in a separate process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefed.config import Experiment, to_toml
from prefed.core import files
from prefed.core.strict_settings import differing
from prefed.runs.reference_cache import SHARED
from prefed.train.metrics import COMPARED_METRICS

NEWCOMERS = "newcomer_accuracy"
"""The accuracy of clients that never trained, after the most local steps or pairs of ``[evaluate]``."""
PACKAGE = Path(__file__).resolve().parents[1]
START = """
import os, sys, threading

def end_with_the_parent():
    os.read(0, 1)  # nothing is ever written there: this returns when the parent is gone
    os._exit(1)

threading.Thread(target=end_with_the_parent, daemon=True).start()
sys.argv[0] = "prefed"
from prefed.ui.cli import main
main()
"""
"""The program of a child process: a ``prefed`` command that ends when its standard input closes."""


class CommandError(RuntimeError):
    """A command of a run failed.

    Attributes:
        log: the file with its error output.
        refusal: its error message if it ended before the first round, as for a method that cannot do the
            task; else empty.
    """

    def __init__(self, message: str, log: Path, refusal: str) -> None:
        super().__init__(message)
        self.log, self.refusal = log, refusal


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        test: also evaluate the finished run on test pairs.
    """

    experiment: Experiment
    out: Path
    test: bool = False

    @property
    def finished(self) -> bool:
        """Whether the run has ended and its file ``commit`` is written."""
        return (self.out / "summary.json").exists() and not self.side_file("commits").exists()

    @property
    def ready(self) -> bool:
        """Whether the run is finished and, if ``test`` is set, evaluated."""
        return self.finished and (not self.test or self.figures is not None)

    @property
    def figures(self) -> dict[str, dict[str, float]] | None:
        """Mean and worst client of each accuracy on test pairs; ``None`` if one is missing."""
        path = self.out / "judged-test.json"
        figures = dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}
        return figures if all(name in figures for name in COMPARED_METRICS if name in self.summary) else None

    @property
    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``."""
        return dict(json.loads((self.out / "summary.json").read_text("utf-8")))

    @property
    def breaks_text(self) -> bool:
        """Whether text after the last round is worse than the base model's."""
        from prefed.train.metrics import broken_text

        return bool(broken_text(self.summary.get("text")))

    def side_file(self, ending: str) -> Path:
        """Return the path of a file next to the run directory that exists until the run has succeeded."""
        return self.out.with_name(f"{self.out.name}.{ending}")

    def check(self) -> None:
        """Check that the run directory contains this run, or nothing.

        Raises:
            ValueError: it contains a run with other settings.
        """
        config = self.out / "config.toml"
        if not config.exists():
            return
        # Imported here: PyTorch takes seconds, and an invalid table is reported before.
        from prefed.runs.start_or_resume import changed_code, fitted, is_place
        from prefed.store.commit import read_commit

        stored = Experiment.parse(config.read_text("utf-8"))
        asked = fitted(self.experiment, stored).tables()
        listed = [
            f"{name} is {before!r}, not {after!r}"
            for name, (before, after) in differing(stored.tables(), asked).items()
            if not is_place(name) and not name.startswith(("engine.", "track."))
        ]
        commit = read_commit(self.out / "checkpoint")
        if commit and (code := changed_code(self.experiment, commit.fingerprint)):
            listed.append(f"{code} has changed since")
        if listed:
            raise ValueError(
                f"{self.out} contains a run with other settings: {'; '.join(listed)}. "
                "Move it away, or choose another --out"
            )


def code_version(folder: Path = PACKAGE) -> str:
    """Return the Git commit of a folder, with ``+`` if files were changed; else the version of prefed."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if git("ls-files", "__init__.py"):
            return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        pass
    return f"v{version('prefed')}"


def commits(out: Path) -> list[str]:
    """Return the commits of the code behind a run: several if other code resumed it."""
    path = out / "commit"
    return path.read_text("utf-8").split() if path.exists() else ["unknown"]


async def run_in_process(run: SweepRun) -> None:
    """Start or resume a run with ``prefed run`` and ``prefed evaluate`` in separate processes.

    Their errors are logged next to the run directory until the run has succeeded. The commit of the code is
    written into the run directory.

    Raises:
        CommandError: a command failed.
    """
    note, experiment = run.side_file("commits"), run.side_file("toml")
    run.out.parent.mkdir(parents=True, exist_ok=True)
    if not (run.out / "summary.json").exists():
        # If other code resumes a killed run, both commits are listed. The note is next to the run directory,
        # which must be empty before the run starts.
        files.append(note, f"{code_version()}\n".encode())
        files.write(experiment, to_toml(run.experiment).encode())
        again = ["--resume"] if run.out.exists() else []
        await _command(run, "run", str(experiment), "--out", str(run.out), *again)
    if note.exists():
        names = dict.fromkeys(note.read_text("utf-8").split())
        files.write(run.out / "commit", "".join(f"{name}\n" for name in names).encode())
        files.remove(note)
    if run.test and run.figures is None:
        figures = json.loads(await _command(run, "evaluate", str(run.out), "--split", "test", "--json"))
        figures[NEWCOMERS] = next(reversed(figures.get("unseen_accuracy", {}).values()), None)
        accuracies = {
            name: {key: figures[name][key] for key in ("mean", "worst")}
            for name in (*COMPARED_METRICS, NEWCOMERS)
            if figures.get(name)
        }
        files.write(run.out / "judged-test.json", json.dumps(accuracies, indent=1).encode())
    for path in (experiment, run.side_file("log")):
        path.unlink(missing_ok=True)


def _environment(run: SweepRun) -> dict[str, str]:
    """One thread, and a reference cache shared by all runs of the sweep unless the user has set one."""
    shared = os.environ.get(SHARED) or str(run.out.resolve().parent / "reference")
    return {"OMP_NUM_THREADS": "1", SHARED: shared}


async def _command(run: SweepRun, *words: str) -> bytes:
    """Run a ``prefed`` command and return its output; errors go to the log next to the run directory."""
    log = run.side_file("log")
    with log.open("wb") as errors:
        child = await asyncio.create_subprocess_exec(
            # -P: files in the working directory cannot shadow libraries.
            *(sys.executable, "-P", "-c", START, *words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **_environment(run)},
        )
        try:
            # Not communicate(): it may close the child's standard input.
            assert child.stdout is not None
            output = await child.stdout.read()
            await child.wait()
        finally:
            if child.returncode is None:
                child.terminate()
                await child.wait()
    if child.returncode:
        text = log.read_text("utf-8", "replace").strip()
        last = text.rpartition("\n")[2]
        # The first line of an error has the reason; after a colon, the second has an example.
        _, found, message = f"\n{text}".rpartition("\nerror: ")
        reason, *more = message.split("\n")
        reason = " ".join([reason, *(line.strip() for line in more[:1] if reason.endswith(":"))])
        refusal = reason if found and not run.out.exists() else ""
        raise CommandError(
            f"{run.out} failed with status {child.returncode}: {last} (log: {log})", log, refusal
        )
    return output
