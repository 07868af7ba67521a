r"""CPU time and peak memory of whole runs as one number of them grows, and the exponents of the growth.

    OMP_NUM_THREADS=1 python benchmarks/growth.py
    OMP_NUM_THREADS=1 python benchmarks/growth.py clients length --out growth.svg

- ``clients``: of which ten take part in each of four rounds, with 8 training pairs each;
- ``pairs``: training pairs of each of ten clients, four steps of 8 in each of two rounds;
- ``length``: tokens of a prompt with one response, four steps of 2 pairs, width 256;
- ``rank``: of the LoRA, four steps of 8 pairs;
- ``heads``: personal ones of FedPer, 83 KiB each, all of whose clients take part once, ten a round.

Each run is a process of its own, over generated preferences and a Llama of two layers of 64 with random
weights. With the costs t(n) of the first run and the last two, an exponent is

    log((t(n₂) − t(n₀)) / (t(n₁) − t(n₀))) / log((n₂ − n₀) / (n₁ − n₀)),

so that what does not grow with n does not count: 1 if the rest is linear. Of memory that grows by less than
5 MiB there is none.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import save_picture
from many_clients import write_data

from prefed.core import Key

GRID = {
    "clients": (10, 100, 1_000, 10_000, 100_000),
    "pairs": (10, 100, 1_000, 10_000),
    "length": (128, 256, 512, 1_024, 2_048),
    "rank": (1, 4, 16, 64, 256),
    "heads": (10, 100, 1_000),
}
LABELS = {
    "clients": "clients",
    "pairs": "pairs of a client",
    "length": "tokens",
    "rank": "rank",
    "heads": "personal heads",
}
SMALL = 5.0
"""MiB that the memory of equal runs differs by."""
RUN = """
import json, sys
import torch
torch.set_num_threads(1)
from prefed import Experiment, run
result = run(Experiment.model_validate(json.loads(sys.argv[1])), sys.argv[2])
print(result.summary["peak_memory_mb"])
"""


class Cost(NamedTuple):
    """What a run took: CPU seconds, and MiB of memory at its peak."""

    seconds: float
    memory: float


def write_model(folder: Path, width: int) -> None:
    """A Llama with random weights, which has positions for any length, and a small tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from prefed.data import synthetic
    from prefed.models.tiny import make_tiny

    make_tiny(folder, synthetic.corpus(Key(7), 300), Key(7), layers=1, width=16, heads=2, steps=1)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write_long(folder: Path, tokens: int) -> None:
    """Pairs of two clients whose prompt and responses have half of the tokens each, one a character."""
    folder.mkdir(parents=True)
    for split, count in (("train", 8), ("test", 1)):
        draw = Key(tokens).at(split).numpy()
        rows = []
        for client in ("a", "b"):
            for _ in range(count):
                parts = ["".join(map(chr, draw.integers(33, 127, tokens // 2 - 2))) for _ in range(3)]
                rows.append(
                    {**dict(zip(("prompt", "chosen", "rejected"), parts, strict=True)), "client": client}
                )
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_pairs(folder: Path, count: int) -> None:
    """Training pairs of ten clients, ``count`` each."""
    from prefed.data import synthetic

    synthetic.write(folder, synthetic.generate(Key(count), clients=10, train=count, test=1))


def experiment(axis: str, number: int, data: Path, model: Path) -> dict[str, Any]:
    """The run of a number on an axis."""
    tree: dict[str, Any] = {
        "rounds": {"clients": 4, "pairs": 2, "heads": max(1, number // 10)}.get(axis, 1),
        "data": {
            "train": str(data / "train.jsonl"),
            "test": str(data / "test.jsonl"),
            "partition": {"by": "column", "column": "client"},
            "max_length": number if axis == "length" else 128,
            "duplicates": "keep",
        },
        "model": {"name": str(model), "lora": {"dropout": 0.0, "rank": 8, "alpha": 16}},
        "method": {"name": "feddpo", "lr": 1e-3, "local_steps": 4, "batch_size": 8},
        "evaluate": {"every": 0, "clients": 10},
        "engine": {"threads": 1, "max_tokens": 4096},
    }
    if axis in ("clients", "heads"):
        tree["cohort"] = {"size": 10}
    if axis == "clients":
        tree["method"]["local_steps"] = 1
    if axis == "length":
        tree["method"]["batch_size"] = 2
    if axis == "rank":
        tree["model"]["lora"]["rank"] = number
    if axis == "heads":
        tree["method"] = {**tree["method"], "name": "fedper", "local_steps": 1}
    return tree


def measure(axis: str, number: int, model: Path, folder: Path) -> Cost:
    """The cost of a run of a process of its own."""
    data = folder / "data"
    if axis == "length":
        write_long(data, number)
    elif axis == "pairs":
        write_pairs(data, number)
    else:
        write_data(data, number if axis in ("clients", "heads") else 2)
    words = [json.dumps(experiment(axis, number, data, model)), str(folder / "run")]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(done.stderr)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(seconds, float(done.stdout.splitlines()[-1]))


def exponent(numbers: list[int], costs: list[float], least: float = 0.0) -> float | None:
    """How cost grows at the end; ``None`` if it grows by less than ``least``.

    >>> exponent([1, 10, 100], [7.0, 7.9, 16.9]), exponent([1, 10, 100], [3.0, 3.1, 3.0], least=1.0)
    (1.0, None)
    """
    first, before, last = costs[0], costs[-2], costs[-1]
    if last - first <= least or before <= first:
        return None
    ratio = (numbers[-1] - numbers[0]) / (numbers[-2] - numbers[0])
    return round(math.log((last - first) / (before - first)) / math.log(ratio), 2)


def draw(found: dict[str, tuple[list[int], list[Cost]]], out: Path) -> None:
    """Time and memory by the number, relative to its smallest, drawn as prefed draws its plots."""
    from prefed.ui.pages.chart_data import Axis, Chart, Line, Panel, look_of

    panels = []
    for place, what in enumerate(("CPU seconds", "peak memory, MiB")):
        lines = []
        for index, (axis, (numbers, costs)) in enumerate(found.items()):
            points = [(n / numbers[0], cost[place]) for n, cost in zip(numbers, costs, strict=True)]
            lines.append(
                Line(f"{LABELS[axis]}, from {numbers[0]}", points, [""] * len(points), look_of(index))
            )
        panels.append(Panel(Axis("times the smallest number", log=True), Axis(what, log=True), lines))
    save_picture(Chart("growth", "cost as work grows", "", panels), out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("axes", nargs="*", metavar="AXIS", help=", ".join(GRID))
    parser.add_argument("--out", type=Path, help="draw it to this file")
    parser.add_argument("--most", type=int, help="leave out larger numbers")
    args = parser.parse_args()
    if unknown := set(args.axes) - set(GRID):
        parser.error(f"no axis {', '.join(sorted(unknown))}; there are {', '.join(GRID)}")
    found = dict[str, tuple[list[int], list[Cost]]]()
    with tempfile.TemporaryDirectory() as name:
        for axis in args.axes or GRID:
            write_model(Path(name, "model"), 256 if axis == "length" else 64)
            numbers = [n for n in GRID[axis] if args.most is None or n <= args.most]
            costs = list[Cost]()
            for number in numbers:
                with tempfile.TemporaryDirectory(dir=name) as place:
                    costs.append(measure(axis, number, Path(name, "model"), Path(place)))
                seconds, memory = costs[-1]
                print(
                    f"{LABELS[axis]} {number:>7,}: {seconds:8.1f} CPU s, peak {memory:6.0f} MiB", flush=True
                )
            found[axis] = numbers, costs
            times, peaks = ([cost[k] for cost in costs] for k in (0, 1))
            grown = exponent(numbers, times), exponent(numbers, peaks, SMALL)
            print("        exponents: {} of time, {} of memory".format(*grown), flush=True)
    if args.out is not None:
        draw(found, args.out)


if __name__ == "__main__":
    main()
