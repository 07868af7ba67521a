"""One run of a sweep, in a separate process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefed.config import Experiment, to_toml
from prefed.core import files
from prefed.core.openmp import openmp_settings
from prefed.core.strict_settings import differing
from prefed.runs.reference_cache import SHARED
from prefed.train.metrics import COMPARED_METRICS

NEWCOMERS = "newcomer_accuracy"
"""The accuracy of clients that never trained, after the most local steps or pairs of ``[evaluate]``."""
PACKAGE = Path(__file__).resolve().parents[1]
START = """
import contextlib, gc, json, os, signal, sys, tempfile, threading

child = 0

def stop(number, frame):
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        if child:
            os.kill(child, number)
            os.waitpid(child, 0)
    sys.exit()

def end_with_the_parent():
    os.read(0, 1)  # nothing is written there during a command: this returns when the parent is gone
    os._exit(1)

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, signal.SIG_IGN)
from prefed.ui.cli import main
if sys.platform == "linux":  # libraries of macOS do not survive a fork
    import torch
    # Nor does a library that has asked for a GPU, as bitsandbytes does when it is imported.
    if not any(getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")):
        import peft, prefed.runs.evaluate, prefed.runs.run, prefed.ui.pages.terminal, rich.progress
    gc.freeze()
for line in iter(sys.stdin.readline, ""):
    words, environment, log = json.loads(line)
    with tempfile.TemporaryFile() as output:
        if not (child := os.fork()):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(output.fileno(), 1)
            os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666), 2)
            threading.Thread(target=end_with_the_parent, daemon=True).start()
            os.environ.update(environment)
            sys.argv = ["prefed", *words]
            sys.exit(main())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        child = 0
        print(status, output.seek(0, 2), flush=True)
        output.seek(0)
        sys.stdout.buffer.write(output.read())
        sys.stdout.flush()
"""
"""A program that runs ``prefed`` commands, one at a time, each in a fork that finds all libraries imported.

It reads a line of JSON for each command: its words, environment variables and the file for its errors. It
writes the exit status, the length of the output and the output. A command ends when standard input closes.
"""


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


async def run_in_process(run: SweepRun, processes: CommandProcesses) -> None:
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
        files.append(note, f"{processes.version}\n".encode())
        files.write(experiment, to_toml(run.experiment).encode())
        again = ["--resume"] if run.out.exists() else []
        await processes.call(run, "run", str(experiment), "--out", str(run.out), *again)
    if note.exists():
        names = dict.fromkeys(note.read_text("utf-8").split())
        files.write(run.out / "commit", "".join(f"{name}\n" for name in names).encode())
        files.remove(note)
    if run.test and run.figures is None:
        figures = json.loads(await processes.call(run, "evaluate", str(run.out), "--split", "test", "--json"))
        figures[NEWCOMERS] = next(reversed(figures.get("unseen_accuracy", {}).values()), None)
        accuracies = {
            name: {key: figures[name][key] for key in ("mean", "worst")}
            for name in (*COMPARED_METRICS, NEWCOMERS)
            if figures.get(name)
        }
        files.write(run.out / "judged-test.json", json.dumps(accuracies, indent=1).encode())
    for path in (experiment, run.side_file("log")):
        path.unlink(missing_ok=True)


class CommandProcesses:
    """Processes that run ``prefed`` commands, as many as run at the same time; a context that ends them."""

    def __init__(self) -> None:
        self._idle: list[asyncio.subprocess.Process] = []

    @cached_property
    def version(self) -> str:
        """See :func:`code_version`; processes import most of the code when they start."""
        return code_version()

    async def __aenter__(self) -> CommandProcesses:
        return self

    async def __aexit__(self, *error: object) -> None:
        while self._idle:
            await _end(self._idle.pop())

    async def call(self, run: SweepRun, *words: str) -> bytes:
        """Run a ``prefed`` command and return its output; errors go to the log next to the run directory.

        All runs of a sweep share a reference cache, unless the user has set one.

        Raises:
            CommandError: the command failed.
        """
        log = run.side_file("log")
        shared = os.environ.get(SHARED) or str(run.out.resolve().parent / "reference")
        request = json.dumps([words, {SHARED: shared}, str(log)])
        log.write_bytes(b"")
        process = self._idle.pop() if self._idle else await _start(log)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{request}\n".encode())
            answer = await process.stdout.readline()
            if not answer:
                raise _failure(run, await process.wait())
            status, length = map(int, answer.split())
            output = await process.stdout.readexactly(length)
        except BaseException:
            await _end(process)
            raise
        self._idle.append(process)
        if status:
            raise _failure(run, status)
        return output


async def _start(log: Path) -> asyncio.subprocess.Process:
    """Start a process whose own errors, such as a missing library, go to ``log``."""
    with log.open("ab") as errors:
        return await asyncio.create_subprocess_exec(
            # -P: files in the working directory cannot shadow libraries.
            *(sys.executable, "-P", "-c", START),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **openmp_settings(), "OMP_NUM_THREADS": "1"},
        )


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a process; if it runs a command, that is asked to stop and awaited."""
    with suppress(ProcessLookupError):
        process.terminate()
    if process.stdout is not None:
        await process.stdout.read()  # else a process that still has output would wait for a reader
    await process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _failure(run: SweepRun, status: int) -> CommandError:
    """The error of a command with this exit status, from its log."""
    log = run.side_file("log")
    text = log.read_text("utf-8", "replace").strip() or f"killed by signal {-status}"
    last = text.rpartition("\n")[2]
    # The first line of an error has the reason; after a colon, the second has an example.
    _, found, message = f"\n{text}".rpartition("\nerror: ")
    reason, *more = message.split("\n")
    reason = " ".join([reason, *(line.strip() for line in more[:1] if reason.endswith(":"))])
    refusal = reason if found and not run.out.exists() else ""
    return CommandError(f"{run.out} failed with status {status}: {last} (log: {log})", log, refusal)
