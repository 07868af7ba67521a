"""DecDPO as five processes on this machine: what a mix costs, and what happens when one dies or hangs.

    OMP_NUM_THREADS=1 python benchmarks/peers.py

The model is the small GPT-2 of ``--model`` with a LoRA of rank 18, 1.2 MB a message, on a ring of
generated clients with 5 steps of 4 pairs a round. The peers are started one by one, and by torchrun.

- A mix is all from the trained model to the mixed one: message, exchange, validation, sum. The last peer of
  a round to come to it waits for nobody: its time is the mix. The share with waiting is the mean of all.
- Then one peer is killed after round 4 (SIGKILL), and one stopped (SIGSTOP). Seconds are from the signal to
  the end of the last other peer. Each of these runs is started again and compared with the one left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomli_w
from common import TOKENIZER

ROUND = 4
"""Committed rounds after which a peer gets its signal."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Peers:
    """Peers under way, in ``out``."""

    def __init__(self, file: Path, out: Path, how: str, count: int, *more: str) -> None:
        self.out, self.count = out, count
        self.logs: list[Path] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        words = ["-m", "prefed", "peer", str(file), "--out", str(out), *more]
        if how == "torchrun":
            self._start(["-m", "torch.distributed.run", f"--nproc-per-node={count}", *words])
            return
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            at = f"127.0.0.1:{probe.getsockname()[1]}"
        for rank in range(count):
            self._start([*words, "--rank", str(rank), "--peers", str(count), "--at", at])

    def _start(self, words: list[str]) -> None:
        log = self.out.with_name(f"{self.out.name}-{len(self.processes)}.log")
        with log.open("a") as stream:
            command = [sys.executable, *words]
            self.processes.append(subprocess.Popen(command, stdout=stream, stderr=stream, env=ENVIRONMENT))
        self.logs.append(log)

    def signal(self, what: signal.Signals) -> float:
        """Send a signal to one peer once it has done some rounds; seconds until all others have ended."""
        one = self.count // 2
        folder = self.out / f"peer-{one}"
        while len(records(folder)) < ROUND:
            time.sleep(0.02)
        victim = int((folder / "checkpoint" / "LOCK").read_text().split()[1])
        os.kill(victim, what)
        started = time.perf_counter()
        waiting = {*range(self.count)} - {one}
        while waiting:
            waiting = {rank for rank in waiting if self._lives(rank)}
            time.sleep(0.01)
        seconds = time.perf_counter() - started
        if what == signal.SIGSTOP:
            os.kill(victim, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        return seconds

    def _lives(self, rank: int) -> bool:
        if len(self.processes) > 1:
            return self.processes[rank].poll() is None
        number = (self.out / f"peer-{rank}" / "checkpoint" / "LOCK").read_text().split()[1]
        return Path("/proc", number).exists()

    def finish(self) -> float:
        """Wait for the end; seconds."""
        started = time.perf_counter()
        for process, log in zip(self.processes, self.logs, strict=True):
            if process.wait():
                raise SystemExit(log.read_text())
        return time.perf_counter() - started

    def errors(self) -> set[str]:
        """The different error lines of all peers."""
        lines = [line for log in self.logs for line in log.read_text().splitlines()]
        return {line for line in lines if line.startswith("error:")}


def records(folder: Path) -> list[dict[str, float]]:
    path = folder / "rounds.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def folders(out: Path) -> list[Path]:
    return sorted(out.glob("peer-*"))


def states(out: Path) -> list[bytes]:
    """Each peer's last model and private state."""
    found = []
    for run in folders(out):
        folder = run / "checkpoint"
        number = json.loads((folder / "COMMIT.json").read_text())["round"]
        private = sorted((folder / "clients").glob("*.safetensors"))[-1]
        found.append((folder / f"server@{number:06d}.safetensors").read_bytes() + private.read_bytes())
    return found


def costs(out: Path) -> None:
    """The cost of a mix and its share of a round, over all rounds but the first."""
    logs = [records(folder)[1:] for folder in folders(out)]
    mixes = [min(record["mix_seconds"] for record in each) for each in zip(*logs, strict=True)]
    waits = [record["mix_seconds"] / record["seconds"] for log in logs for record in log]
    rounds = [statistics.mean(record["seconds"] for record in each) for each in zip(*logs, strict=True)]
    mix, whole = statistics.median(mixes), statistics.median(rounds)
    size = logs[0][0]["bytes_up"] / 2
    print(
        f"  message {size / 1e6:.2f} MB, mix {1e3 * mix:.1f} ms, round {1e3 * whole:.0f} ms: "
        f"{mix / whole:.1%} of it, {statistics.mean(waits):.1%} with waiting for neighbours",
        flush=True,
    )


def main() -> None:
    shaped = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shaped)
    parser.add_argument(
        "--model", default=str(TOKENIZER), help="folder or hub name of a causal language model"
    )
    parser.add_argument("--peers", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=12)
    ways = ["one by one", "torchrun"]
    parser.add_argument("--how", choices=ways, nargs="*", default=ways, help="ways to start the peers")
    parser.add_argument("--patience", type=float, default=5.0)
    args = parser.parse_args()
    from prefed.core import Key
    from prefed.data import synthetic

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for split, counts in (("train", (40, 0)), ("test", (0, 10))):
            rows = synthetic.generate(Key(7), clients=args.peers, train=counts[0], test=counts[1])
            fields = ("prompt", "chosen", "rejected", "client")
            lines = (json.dumps({field: getattr(row, field) for field in fields}) for row in rows)
            (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        file = folder / "decdpo.toml"
        tables = {
            "rounds": args.rounds,
            "data": {
                "train": "train.jsonl",
                "test": "test.jsonl",
                "partition": {"by": "column", "column": "client"},
                "max_length": 128,
            },
            "model": {"name": args.model, "lora": {"rank": 18, "alpha": 36.0}},
            "method": {"name": "decdpo", "lr": 1e-3, "optimizer_state": "kept"},
            "evaluate": {"every": 0},
            "engine": {"threads": 1},
        }
        file.write_text(tomli_w.dumps(tables))
        for how in args.how:
            print(f"{how}:", flush=True)
            Peers(file, folder / how, how, args.peers).finish()
            costs(folder / how)
        expected = states(folder / args.how[0])
        same = all(states(folder / how) == expected for how in args.how)
        print(f"equal to the bit, however started: {same}", flush=True)
        for how in args.how:
            for what in (signal.SIGKILL, signal.SIGSTOP):
                out = folder / f"{how}-{what.name}"
                first = Peers(file, out, how, args.peers, "--patience", str(args.patience))
                seconds = first.signal(what)
                how_long = f"the others ended after {seconds:.1f} s, patience {args.patience:g} s"
                print(f"{how}, {what.name}: {how_long}")
                for line in sorted(first.errors()):
                    print(f"    {line}")
                kept = [len(records(run)) for run in folders(out)]
                Peers(file, out, how, args.peers, "--auto-resume").finish()
                print(
                    f"    whole rounds {kept}; started again, equal to the bit: {states(out) == expected}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
