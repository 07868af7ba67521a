"""A federation over NVIDIA FLARE on this machine: a hub and its sites, processes of their own.

    python benchmarks/federation.py               # each method: equal to one process? overhead a round
    python benchmarks/federation.py --newcomer    # the commands of docs/federation.md, as printed there
    python benchmarks/federation.py --faults      # what is killed, frozen or lied about, and what follows

Ten personas with pairs of their own, four at one site and three at each of two others, the tiny model. What
the faults are, and on which federation, is in ``federation_faults.py``.
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
from contextlib import suppress
from pathlib import Path

import federation_faults
from common import HERE, SHARED
from wards import PREFED, Federation, differences, prefed, rounds_of

SITES = {"north": 4, "south": 3, "east": 3}
"""Sites, and how many clients each has."""
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


def write_personas(folder: Path) -> None:
    """The pairs of ten personas."""
    for name in ("train", "test"):
        with gzip.open(SHARED / "data" / f"personas.{name}.jsonl.gz", "rt") as stream:
            lines = stream.readlines()
        personas = sorted({json.loads(line)["persona"] for line in lines})[:10]
        kept = [line for line in lines if json.loads(line)["persona"] in personas]
        (folder / f"{name}.jsonl").write_text("".join(kept))


def write_experiment(federation: Federation, method: str, rounds: int, steps: int) -> Path:
    """The file of an experiment, for one process and for the federation alike."""
    path, more = federation.folder / f"{method}-{rounds}.toml", MORE.get(method, "")
    text = EXPERIMENT.format(method=method, rounds=rounds, steps=steps, model=federation.model, more=more)
    path.write_text(text)
    return path


def compare(federation: Federation, methods: list[str], rounds: int, steps: int) -> None:
    """Each method in one process and over the sites."""
    print(f"{'method':12s} {'equal':>7s} {'one process':>12s} {'federation':>11s} {'up a round':>11s}")
    for method in methods:
        file = write_experiment(federation, method, rounds, steps)
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


def newcomer(folder: Path) -> None:
    """Write the files of the page's first part and run its commands with bash, as they are printed."""
    text = PAGE.read_text("utf-8").partition("## Try it on one machine")[2].partition("\n## ")[0]
    for name, content in re.findall(r'^```\w+ title="(.*?)"\n(.*?)^```', text, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(content)
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).splitlines(keepends=True)
    count = sum(line.startswith("$ ") for line in lines)
    script = "".join(line[2:] for line in lines if line.startswith("$ ") and "pip install" not in line)
    tools = f'prefed() {{ {" ".join(PREFED)} "$@"; }}\n'
    started = time.monotonic()
    done = subprocess.Popen(["bash", "-ec", tools + script], cwd=folder, start_new_session=True)
    try:
        done.wait()
    finally:
        # The sites too: they are bash's grandchildren.
        with suppress(ProcessLookupError):
            os.killpg(done.pid, signal.SIGTERM)
    print(f"{count} commands, status {done.returncode}, {time.monotonic() - started:.0f} s")
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
    parser.add_argument("--only", default=",".join(federation_faults.TABLES), help="tables of --faults")
    parser.add_argument("--newcomer", action="store_true")
    parser.add_argument("--keep", type=Path, help="a new folder that is kept")
    options = parser.parse_args()
    # A time-out's signal ends the sites too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    folder = options.keep or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    if options.newcomer:
        newcomer(folder)
        return
    try:
        if options.faults:
            federation_faults.faults(folder, options.port, options.only.split(","))
            return
        write_personas(folder)
        federation = Federation(folder, options.port, SITES, "persona", SHARED / "models" / "tiny-lm")
        try:
            federation.start(*SITES)
            compare(federation, options.methods.split(","), options.rounds, options.steps)
        finally:
            federation.stop()
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
