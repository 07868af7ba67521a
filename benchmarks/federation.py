"""A federation over NVIDIA FLARE on this machine: a hub and three sites, processes of their own.

    python benchmarks/federation.py               # each method: equal to one process? overhead a round
    python benchmarks/federation.py --newcomer    # the commands of docs/federation.md, as printed there
    python benchmarks/federation.py --faults      # what is killed or frozen in the middle, and what follows

Ten personas with pairs of their own, four at one site and three at each of two others, the tiny model.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import HERE, SHARED

PREFED = [sys.executable, "-m", "prefed.cli"]
SITES = ("north", "south", "east")
PAGE = HERE.parent / "docs" / "federation.md"
EXPERIMENT = """
seed = 42
rounds = {rounds}
[data]
train = "train.jsonl"
test = "test.jsonl"
partition = {{ by = "column", column = "persona" }}
limit = 24
max_length = 128
[model]
name = "{model}"
lora = {{ rank = 8, alpha = 16, dropout = 0.1 }}
[method]
name = "{method}"
lr = 1e-3
local_steps = {steps}
batch_size = 8
{more}
[evaluate]
every = 0
[engine]
threads = 1
"""
MORE = {"fedbiscuit": "selectors = 2\nwarmup_rounds = 1"}
"""Settings of methods: FedBiscuit groups clients in round 3, in an exchange before the training."""
SITE = """
federation = "wards"
name = "{site}"
[data]
train = "train.jsonl"
test = "test.jsonl"
partition = {{ by = "column", column = "persona" }}
[model]
name = "{model}"
[tell]
pairs = true
"""


class Federation:
    """Kits, data and site processes in a folder."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.sites = folder, dict[str, subprocess.Popen[bytes]]()
        names = json.dumps(list(SITES))
        project = f'name = "wards"\nhub = "localhost"\nport = {port}\nsites = {names}\n'
        (folder / "wards.toml").write_text(project)
        prefed("federation", "init", folder / "wards.toml", "--out", folder / "wards")
        model = SHARED / "models" / "tiny-lm"
        for name in ("train", "test"):
            with gzip.open(SHARED / "data" / f"personas.{name}.jsonl.gz", "rt") as stream:
                lines = stream.readlines()
            personas = sorted({json.loads(line)["persona"] for line in lines})[:10]
            shares = {"": personas, **{site: personas[k::3] for k, site in enumerate(SITES)}}
            for site, own in shares.items():
                kept = [line for line in lines if json.loads(line)["persona"] in own]
                (folder / (f"wards/{site}" if site else ".") / f"{name}.jsonl").write_text("".join(kept))
        for site in SITES:
            (folder / "wards" / site / "site.toml").write_text(SITE.format(site=site, model=model))

    def experiment(self, method: str, rounds: int, steps: int) -> Path:
        """The file of an experiment, for one process and for the federation alike."""
        model, path = SHARED / "models" / "tiny-lm", self.folder / f"{method}-{rounds}.toml"
        text = EXPERIMENT.format(
            method=method, rounds=rounds, steps=steps, model=model, more=MORE.get(method, "")
        )
        path.write_text(text)
        return path

    def start(self, site: str) -> None:
        """Start ``prefed site`` for a site."""
        words = ["site", str(self.folder / "wards" / site / "site.toml")]
        with (self.folder / f"{site}.log").open("ab") as log:
            self.sites[site] = subprocess.Popen([*PREFED, *words], stdout=log, stderr=log)

    def stop(self) -> None:
        """End all sites."""
        for process in self.sites.values():
            process.send_signal(signal.SIGCONT)
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
    """The records of a run."""
    return [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]


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


def compare(federation: Federation, methods: list[str], rounds: int, steps: int) -> None:
    """Each method in one process and over the sites."""
    print(f"{'method':12s} {'equal':>7s} {'one process':>12s} {'federation':>11s} {'up a round':>11s}")
    for method in methods:
        file = federation.experiment(method, rounds, steps)
        alone, over = federation.folder / f"alone-{method}", federation.folder / f"over-{method}"
        prefed("run", file, "--out", alone)
        done = subprocess.run(federation.federate(file, over), capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{method}:\n{done.stdout}{done.stderr}")
        different = differences(alone, over)
        seconds = [min(record["seconds"] for record in rounds_of(out)) for out in (alone, over)]
        up = rounds_of(over)[0]["bytes_up"]
        print(
            f"{method:12s} {'no' if different else 'to bits':>7s} {seconds[0]:10.2f} s {seconds[1]:9.2f} s "
            f"{up / 1e6:8.1f} MB {'; '.join(different[:3])}",
            flush=True,
        )


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


def children(pid: int) -> list[int]:
    """The ids of a process's children."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def faults(federation: Federation, rounds: int, steps: int) -> None:
    """One fault a run, in the middle of round 2, and the run that is left alone beside it."""
    file = federation.experiment("fedpdpo", rounds, steps)
    alone = federation.folder / "alone-faults"
    prefed("run", file, "--out", alone)
    kit = str((federation.folder / "wards" / "south" / "kit").resolve())
    server = str((federation.folder / "wards" / "hub" / "server").resolve())

    def trainer() -> None:
        for child in children(federation.sites["south"].pid):
            if "serve(int" in Path(f"/proc/{child}/cmdline").read_text():
                os.kill(child, signal.SIGKILL)

    def site() -> None:
        process = federation.sites["south"]
        process.kill()
        process.wait()
        time.sleep(3)
        federation.start("south")

    def frozen() -> None:
        federation.sites["south"].send_signal(signal.SIGSTOP)
        time.sleep(15)
        federation.sites["south"].send_signal(signal.SIGCONT)

    def killed(*parts: str) -> Callable[[], None]:
        return lambda: [os.kill(pid, signal.SIGKILL) for pid in processes(*parts)] and None

    cases: dict[str, Callable[[], None]] = {
        "the process that trains is killed": trainer,
        "a site's FLARE worker is killed": killed("worker_process", kit),
        "a site is killed and started again": site,
        "a site is frozen for 15 s": frozen,
        "the hub's FLARE job is killed": killed("runner_process", server),
        "the hub's FLARE server is killed": killed("server_train", server),
        "the hub is killed, and resumed": lambda: None,
    }
    for name, act in cases.items():
        out, begun = federation.folder / f"over-{re.sub(r'[^a-z]+', '-', name)}", time.monotonic()
        hub = subprocess.Popen(
            federation.federate(file, out), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        while hub.poll() is None and not (out / "rounds.jsonl").exists():
            time.sleep(0.1)
        time.sleep(0.5)
        act()
        if name.startswith("the hub is killed"):
            hub.kill()
            hub.wait()
            again = federation.federate(file, out, "--resume")
            hub = subprocess.Popen(again, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = hub.communicate()[0].decode()
        different = differences(alone, out) if hub.returncode == 0 else [f"it failed:\n{said}"]
        missed = sum(len(record["dropped"]) for record in rounds_of(out))
        print(
            f"{name:38s} {'equal to bits' if not different else '; '.join(different[:2])}; "
            f"{missed} visits missed; {time.monotonic() - begun:.0f} s",
            flush=True,
        )


def newcomer(folder: Path) -> None:
    """Run the blocks of the page's first part with bash, as they are printed."""
    text = PAGE.read_text("utf-8").partition("## In ten commands")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).splitlines(keepends=True)
    count = sum(line.startswith("$ ") for line in lines)
    script = "".join(line[2:] for line in lines if line[:2] in ("$ ", "> ") and "pip install" not in line)
    tools = f"prefed() {{ {' '.join(PREFED)} \"$@\"; }}\ntrap 'kill $(jobs -p); wait' EXIT\n"
    begun = time.monotonic()
    done = subprocess.run(["bash", "-ec", tools + script], cwd=folder)
    print(f"{count} commands, status {done.returncode}, {time.monotonic() - begun:.0f} s")
    if done.returncode:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="feddpo,fedpdpo,fedbiscuit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--port", type=int, default=8772)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--newcomer", action="store_true")
    parser.add_argument("--keep", type=Path, help="a new folder that is kept")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    if options.newcomer:
        newcomer(folder)
        return
    federation = Federation(folder, options.port)
    try:
        for site in SITES:
            federation.start(site)
        if options.faults:
            faults(federation, options.rounds, options.steps)
        else:
            compare(federation, options.methods.split(","), options.rounds, options.steps)
    finally:
        federation.stop()
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
