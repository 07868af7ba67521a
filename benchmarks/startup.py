"""CPU seconds of the commands that need no PyTorch.

    python benchmarks/startup.py --runs 5

Each figure is the least of several runs, as what else the machine does can only add to it.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

COMMANDS = (
    ("--help",),
    ("methods",),
    ("init", "fedpdpo", "--force"),
    ("run", "typo.toml"),
    ("data", "typo.toml"),
)
TYPO = """
[data]
train = "pairs.jsonl"
partition = { by = "iid", clients = 2 }

[model]
name = "model"

[method]
name = "fedpdpo"
learning_rate = 1e-4
"""


def cpu_seconds(words: list[str], folder: Path) -> float:
    """User and system time of a command and what it starts."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    subprocess.run(words, cwd=folder, capture_output=True)
    return spent() - before


def main() -> None:
    shaped = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shaped)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "typo.toml").write_text(TYPO, "utf-8")
        for command in COMMANDS:
            words = [sys.executable, "-m", "prefed", *command]
            least = min(cpu_seconds(words, folder) for _ in range(args.runs))
            print(f"prefed {' '.join(command):24} {least:.2f} s", flush=True)


if __name__ == "__main__":
    main()
