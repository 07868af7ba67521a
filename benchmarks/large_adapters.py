"""A federation over NVIDIA FLARE whose messages are large: time, and the peak memory of each party.

    python benchmarks/large_adapters.py                     # 303 MB, two sites, one round
    python benchmarks/large_adapters.py --rank 48 --sites 3 # 30 MB
    python benchmarks/large_adapters.py --messages          # a message there and back, without a model
    python benchmarks/large_adapters.py --overlong 512      # an answer of 512 MiB where 10 kB are due

The hub and the sites are processes of this machine. The model is a Llama of 16 layers and width 512 with
random weights (53 M numbers); the adapter has 157,696 numbers of 4 bytes for each unit of its rank. A site
has four short pairs, and trains one step on two of them.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
import transformers
from common import TOKENIZER

from prefed.networks.federation.flare.kits import HEARTBEAT, Kits, Project, make_kits
from prefed.networks.federation.flare.process import CLIENT, SITE_DOOR, FlareProcess, longest
from prefed.networks.federation.flare.transport import FlareTransport
from prefed.networks.federation.transport import LongAnswerError
from prefed.networks.federation.unix_socket import Door

PREFED = [sys.executable, "-m", "prefed"]
PARTIES = {
    "prefed federate": "the hub",
    "server_train": "the hub: FLARE's server",
    "runner_process": "the hub: FLARE's job",
    "prefed site": "a site",
    "client_train": "a site: FLARE's client",
    "worker_process": "a site: FLARE's job",
    "serve(int": "a site: what trains",
}
"""What a command line has → whose process it is. What trains has the site's own words in none of its own."""
EXPERIMENT = """
rounds = {rounds}
[data]
max_length = 64
[model]
name = "{model}"
lora = {{ rank = {rank}, alpha = {rank}, dropout = 0.0 }}
[method]
name = "feddpo"
lr = 1e-4
local_steps = 1
batch_size = 2
[evaluate]
every = 0
[engine]
threads = 1
"""
SITE = """
federation = "large"
name = "{site}"
[data]
train = {{ {site} = "train.jsonl" }}
test = {{ {site} = "test.jsonl" }}
[model]
name = "{model}"
[disclose]
pairs = true
"""


def make_model(folder: Path) -> None:
    """The base model, with the tiny model's tokenizer."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)


def make_site(folder: Path, site: str, model: Path) -> None:
    """Its pairs and its file, next to its kit."""
    for split, count in (("train", 4), ("test", 2)):
        rows = [
            {"prompt": f"Question {n} of {site}?", "chosen": f" Yes, {n}.", "rejected": f" No, {n}."}
            for n in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "site.toml").write_text(SITE.format(site=site, model=model))


class Watch:
    """The peak resident memory of each process below this one, by whose it is, in MiB."""

    def __init__(self) -> None:
        self.peaks: dict[str, dict[int, float]] = defaultdict(dict)

    def look(self) -> None:
        """Read what the system says of each."""
        waiting = [Path("/proc/self").resolve().name]
        while waiting:
            pid = waiting.pop()
            try:
                for task in Path(f"/proc/{pid}/task").iterdir():
                    waiting += (task / "children").read_text().split()
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
            except OSError:
                continue
            party = next((who for sign, who in PARTIES.items() if sign in words), None)
            if party and peak:
                self.peaks[party][int(pid)] = int(peak[1]) / 1024

    def report(self) -> None:
        """A line for each party: its largest process."""
        total = 0.0
        for party in PARTIES.values():
            found = self.peaks[party].values()
            total += sum(found)
            print(f"{party:26s} {max(found, default=0):7,.0f} MiB  ({len(found)} processes)")
        print(f"{'all, each at its peak':26s} {total:7,.0f} MiB")


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def messages(folder: Path, size: int) -> None:
    """A message to a site that answers with as many bytes, and what FLARE's processes take."""
    make_kits(Project(name="w", hub="localhost", port=free_port(), sites=["north"]), folder / "w")
    words, watch = ["uid=north", "org=north", f"heart_beat_interval={HEARTBEAT}"], Watch()
    with Door(lambda request: bytes(len(request))) as door:
        environment = {SITE_DOOR: str(door.path), **longest(4096)}
        process = FlareProcess(CLIENT, folder / "w/north/kit", words, environment)
        with FlareTransport(Kits.open(folder / "w/hub")) as transport:
            while not transport.connected():
                time.sleep(0.5)
            transport.call("north", bytes(100), 300, 1000)
            started = time.monotonic()
            transport.call("north", bytes(size), 3000, size)
            print(f"{size / 1e6:.0f} MB there and back: {time.monotonic() - started:.1f} s")
            watch.look()
        process.stop()
    watch.report()


def overlong(folder: Path, mebibytes: int) -> None:
    """An answer of so many MiB where 10 kB are due, and what the hub's processes take for it."""
    make_kits(Project(name="w", hub="localhost", port=free_port(), sites=["north"]), folder / "w")
    words, watch = ["uid=north", "org=north", f"heart_beat_interval={HEARTBEAT}"], Watch()
    with Door(lambda request: bytes(mebibytes << 20) if request == b"long" else b"") as door:
        environment = {SITE_DOOR: str(door.path), **longest(4096)}
        process = FlareProcess(CLIENT, folder / "w/north/kit", words, environment)
        with FlareTransport(Kits.open(folder / "w/hub")) as transport:
            while not transport.connected():
                time.sleep(0.5)
            transport.call("north", b"short", 300, 10_000)
            watch.look()
            print("before it:")
            watch.report()
            started = time.monotonic()
            try:
                what = f"LET IN: {len(transport.call('north', b'long', 300, 10_000)):,} bytes"
            except LongAnswerError as error:
                what = str(error)
            print(f"after {time.monotonic() - started:.1f} s: {what}")
            watch.look()
        process.stop()
    watch.report()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", type=int, default=480)
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--messages", action="store_true")
    parser.add_argument("--overlong", type=int, metavar="MIB")
    parser.add_argument("--keep", type=Path, help="a new folder that is kept")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    if options.messages:
        messages(folder, 4 * 157_696 * options.rank)
        shutil.rmtree(folder)
        return
    if options.overlong:
        overlong(folder, options.overlong)
        shutil.rmtree(folder)
        return
    names = [f"site{number}" for number in range(options.sites)]
    project = f'name = "large"\nhub = "localhost"\nport = {free_port()}\nsites = {json.dumps(names)}\n'
    (folder / "large.toml").write_text(project)
    subprocess.run([*PREFED, "federation", "init", "large.toml"], cwd=folder, check=True)
    make_model(folder / "model")
    text = EXPERIMENT.format(model=folder / "model", rank=options.rank, rounds=options.rounds)
    (folder / "experiment.toml").write_text(text)
    processes, watch, started = [], Watch(), time.monotonic()
    try:
        for name in names:
            make_site(folder / "large" / name, name, folder / "model")
            with (folder / f"{name}.log").open("wb") as log:
                words = [*PREFED, "site", str(folder / "large" / name / "site.toml")]
                processes.append(subprocess.Popen(words, stdout=log, stderr=log))
        words = ["federate", "experiment.toml", "--hub", "large/hub", "--out", "run", "--visit", "3600"]
        hub = subprocess.Popen([*PREFED, *words], cwd=folder)
        while hub.poll() is None:
            watch.look()
            time.sleep(0.2)
        if hub.returncode:
            raise SystemExit(f"prefed federate: exit code {hub.returncode}")
        for line in (folder / "run" / "rounds.jsonl").read_text().splitlines():
            record = json.loads(line)
            size = record["bytes_up"] / len(record["cohort"]) / 1e6
            print(f"round {record['round']}: {record['seconds']:.1f} s, {size:.1f} MB an upload")
        print(f"from start to end: {time.monotonic() - started:.0f} s")
        watch.report()
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
