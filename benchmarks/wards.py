"""A federation on this machine for the benchmarks: kits, pairs of personas, and a process for each site."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import HERE

PREFED = [sys.executable, "-m", "prefed"]
WATCHED = [sys.executable, str(HERE / "watched_site.py")]
SITE = """
federation = "wards"
name = "{site}"
[data]
train = "train.jsonl"
test = "test.jsonl"
partition = {{ by = "column", column = "{column}" }}
[model]
name = "{model}"
[disclose]
pairs = true
"""


class Federation:
    """Kits, data and site processes in a folder, in which ``train.jsonl`` and ``test.jsonl`` lie.

    Args:
        clients: of each site, so many: the first ones by name.
        column: of the pairs, which names their client.
        model: folder of the base model.
        watched: sites note their visits in ``folder``, and can lie on request there.
    """

    def __init__(
        self,
        folder: Path,
        port: int,
        clients: Mapping[str, int],
        column: str,
        model: Path,
        watched: bool = False,
    ) -> None:
        self.folder, self.model, self.watched = folder, model, watched
        self.sites = dict[str, subprocess.Popen[bytes]]()
        self.homes = dict[str, list[str]]()
        project = f'name = "wards"\nhub = "localhost"\nport = {port}\nsites = {json.dumps(list(clients))}\n'
        (folder / "wards.toml").write_text(project)
        prefed("federation", "init", folder / "wards.toml", "--out", folder / "wards")
        lines = {name: (folder / f"{name}.jsonl").read_text().splitlines(True) for name in ("train", "test")}
        left = iter(sorted({json.loads(line)[column] for line in lines["train"]}))
        for site, count in clients.items():
            own = self.homes[site] = [next(left) for _ in range(count)]
            for name, rows in lines.items():
                kept = [line for line in rows if json.loads(line)[column] in own]
                (self.of(site) / f"{name}.jsonl").write_text("".join(kept))
            text = SITE.format(site=site, model=model, column=column)
            (self.of(site) / "site.toml").write_text(text)

    def of(self, site: str) -> Path:
        """The folder of a site."""
        return self.folder / "wards" / site

    def start(self, *sites: str) -> None:
        """Start ``prefed site`` for these sites."""
        for site in sites:
            path = str(self.of(site) / "site.toml")
            words = [*WATCHED, path, str(self.folder)] if self.watched else [*PREFED, "site", path]
            with (self.folder / f"{site}.log").open("ab") as log:
                self.sites[site] = subprocess.Popen(words, stdout=log, stderr=log)

    def kill(self, *sites: str) -> None:
        """Kill sites, as a power cut does."""
        for site in sites:
            self.sites[site].kill()
            self.sites[site].wait()

    def stop(self) -> None:
        """End all sites."""
        for process in self.sites.values():
            for pid in below(process.pid):
                with suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
            process.terminate()
        for process in self.sites.values():
            process.wait()

    def federate(self, file: Path, out: Path, *more: str) -> list[str]:
        """The command that runs an experiment over the sites."""
        hub = str(self.folder / "wards" / "hub")
        return [*PREFED, "federate", str(file), "--hub", hub, "--out", str(out), *more]


def prefed(*words: object) -> str:
    """Run a command; what it prints."""
    done = subprocess.run([*PREFED, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"prefed {' '.join(map(str, words))}:\n{done.stdout}{done.stderr}")
    return done.stdout


def rounds_of(out: Path) -> list[dict[str, Any]]:
    """The records of a run, which may be under way."""
    path = out / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def differences(alone: Path, over: Path) -> list[str]:
    """What two runs have otherwise, apart from times: the server's state by its bytes, and records."""
    different = []
    left, right = (sorted((out / "checkpoint").glob("server@*")) for out in (alone, over))
    if [path.read_bytes() for path in left] != [path.read_bytes() for path in right]:
        different.append("the server's state")
    for one, other in zip(rounds_of(alone), rounds_of(over), strict=True):
        names = sorted(name for name in {*one, *other} - {"seconds"} if one.get(name) != other.get(name))
        different += [f"round {one['round']}: {name}" for name in names]
    return different


def processes(*parts: str) -> list[int]:
    """The ids of processes of this machine whose command has all these parts."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace")
        except (OSError, ValueError):
            continue
        if folder.name.isdigit() and all(part in words for part in parts):
            found.append(int(folder.name))
    return found


def below(pid: int) -> Sequence[int]:
    """The ids of a process and of all that it started, and so on."""
    found = [pid]
    for each in found:
        path = Path(f"/proc/{each}/task/{each}/children")
        with suppress(OSError):
            found += [int(word) for word in path.read_text().split()]
    return found
