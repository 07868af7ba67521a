r"""Everything that needs a GPU, in one command of at most ten minutes: tests, and a table of figures.

    python benchmarks/gpu.py --out gpu.md
    python benchmarks/gpu.py --device cpu --out /tmp/gpu.md  # a trial on tiny shapes

Stages run one after the other, each in a process of its own with a time limit; a stage that fails is a row
that says why. The table names device, driver, versions and commit, and is written after each stage.

A step is DPO in bfloat16 (float32 on a CPU) on random weights and four random pairs (prompts and responses of
64 to 512 tokens), LoRA 8/16 on the same modules, dropout 0. TRL's sides have the reference precomputed and
the head on completions only; ``liger`` needs liger-kernel, four bits need bitsandbytes.
Memory is the peak of PyTorch's allocations, model included (of resident memory on a CPU).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SIDES = ("prefed", "prefed, liger", "prefed, checkpointing", "trl", "trl, liger")
RUNS = ("feddpo", "fedper", "4-bit", "two workers on one device", "one model on two GPUs")
BATCH, LEARNING_RATE = 4, 1e-3
NEVER = -1
"""An end-of-text token that no model writes."""
Row = tuple[str, str]
"""What was measured, and its value."""


def stages(device: str) -> dict[str, int]:
    """Name of each stage → the most seconds that it may take."""
    shapes = ("qwen2-0.5b", "qwen2-1.5b") if device == "cuda" else ("llama-4k",)
    steps = {f"step, {shape}, {side}": 60 for shape in shapes for side in SIDES}
    runs = {f"run, {how}": 75 for how in RUNS}
    return {"tests": 120, "products": 40, **steps, "generation": 60, **runs}


def model_of(shape: str, device: str) -> Any:
    """Random weights of a named shape, made on the device; in bfloat16 on a GPU."""
    import torch
    from common import shape as named

    with torch.device(device):
        return named(shape).to(torch.bfloat16 if device == "cuda" else torch.float32)


def peak_mib(device: str) -> float:
    """The peak of this process, on the CUDA device that has the highest."""
    import torch

    from prefed.engines.backends import peak_memory_mb

    if device != "cuda":
        return peak_memory_mb()
    return max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))) / 2**20


def tests(device: str, folder: Path) -> Iterator[Row]:
    """The tests that are skipped without a GPU."""
    files = ("test_checkpointing.py", "test_kernels.py", "test_small_numbers.py")
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-k", "gpu or cuda"]
    command += [str(HERE.parent / "tests/golden" / file) for file in files]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
    report = done.stdout.strip().splitlines()
    yield from (("failed", line) for line in report if line.startswith(("FAILED", "ERROR")))
    marks = "".join(line.partition(" ")[0] for line in report if line.strip(".sFEx").startswith(" "))
    yield "passed, skipped, failed", f"{marks.count('.')}, {marks.count('s')}, {marks.count('F')}"


def products(device: str, folder: Path) -> Iterator[Row]:
    """The rate of large matrix products, which no step can exceed."""
    import torch
    from common import matmul_peak

    size = 8192 if device == "cuda" else 512
    for dtype in (torch.bfloat16, torch.float32):
        rate = matmul_peak((size, size, size), dtype=dtype) / 1e3
        yield f"{str(dtype).removeprefix('torch.')} products", f"{rate:.2f} TFLOP/s"


def step(device: str, folder: Path, shape: str, side: str) -> Iterator[Row]:
    """Steps of one side on the same pairs."""
    import numpy as np
    import torch
    from common import Pairs, timed
    from dpo_step import Prefed, Trl

    from prefed.data import Pair
    from prefed.models.families import FAMILIES

    gpu = device == "cuda"
    most, count = (512, 10) if gpu else (24, 4)
    model = model_of(shape, device)
    draw = np.random.default_rng(0)
    lengths = draw.integers(most // 8, most, (BATCH * count, 3))
    rows = [[draw.integers(2, model.config.vocab_size, n).astype(np.int32) for n in each] for each in lengths]
    pairs = Pairs([Pair(*row) for row in rows])
    yield "parameters", f"{sum(weight.numel() for weight in model.parameters()) / 1e6:,.0f} million"
    own: Any
    if side.startswith("prefed"):
        kernels = "liger" if "liger" in side else "torch"
        checkpointing = "checkpointing" in side
        own = Prefed(model, pairs, batch=BATCH, bf16=gpu, checkpointing=checkpointing, kernels=kernels)
    else:
        targets = list(FAMILIES[model.config.model_type].targets)
        # Any numbers: they change neither time nor memory.
        reference = np.zeros((len(pairs), 2), np.float32)
        if "liger" in side:
            # The trainer would do so in train(), which is not called.
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False)
        own = Trl(
            model,
            targets,
            pairs,
            tokenizer=folder / "model",
            reference=reference,
            compact=True,
            batch=BATCH,
            bf16=gpu,
        )
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    batches = np.arange(len(pairs)).reshape(-1, BATCH)
    usual = statistics.median([timed(lambda batch=batch: own.step(batch))[0] for batch in batches][2:])  # type: ignore[misc]
    tokens = int(lengths.sum() / count)
    yield "step", f"{usual:.1f} ms, {1e3 * tokens / usual:,.0f} tokens/s"
    yield "peak memory", f"{peak_mib(device):,.0f} MiB"


def generation(device: str, folder: Path) -> Iterator[Row]:
    """Completions of a batch of prompts."""
    from types import SimpleNamespace

    import torch
    from common import timed

    from prefed.core import Key
    from prefed.models import LoraSettings, ModelConfig, make_backbone
    from prefed.train.generation import Sampling, complete_batch

    large = device == "cuda"
    batch, length, count = (16, 256, 128) if large else (4, 16, 8)
    base = model_of("qwen2-0.5b" if large else "llama-4k", device)
    base.config.use_cache = True
    config = ModelConfig(name="model", lora=LoraSettings(dropout=0.0))
    backbone = make_backbone(base, SimpleNamespace(eos_token_id=NEVER), config, Key(0))
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, base.config.vocab_size, (batch, length), generator=draw).tolist()
    keys = [Key(0).at("prompt", number) for number in range(batch)]
    how = Sampling(max_tokens=count, temperature=0.7)
    took = [
        timed(lambda: complete_batch(backbone, backbone.reference, prompts, how, keys))[0] for _ in range(3)
    ]
    yield f"{batch} completions of {count} tokens", f"{1e3 * batch * count / min(took):,.0f} tokens/s"
    yield "peak memory", f"{peak_mib(device):,.0f} MiB"


def whole(device: str, folder: Path, how: str) -> Iterator[Row]:
    """A run of two rounds of four clients on the model and data in ``folder``."""
    import torch

    from prefed import Experiment, run

    if "two GPUs" in how and (count := torch.cuda.device_count()) < 2:
        yield "skipped", f"needs two CUDA devices, and {count} are here"
        return
    method = how if how.startswith("fed") else "feddpo"
    model: dict[str, Any] = {"name": str(folder / "model"), "lora": {"dropout": 0.0}}
    engine: dict[str, Any] = {"threads": 1}
    if how == "4-bit":
        model["quantize"] = "nf4"
    if "two GPUs" in how:
        model["gpus"] = 2
    if "workers" in how:
        engine |= {"workers": 2} | ({"devices": ["cuda:0"]} if device == "cuda" else {})
    split = {"by": "column", "column": "client"}
    data = {name: str(folder / f"data/{name}.jsonl") for name in ("train", "test")}
    tables = {
        "rounds": 2,
        "data": {**data, "partition": split, "max_length": 128, "duplicates": "keep"},
        "model": model,
        "method": {"name": method, "lr": LEARNING_RATE, "local_steps": 4, "batch_size": 4},
        "engine": engine,
    }
    result = run(Experiment.model_validate(tables), folder / f"run {how}")
    first, last = result.rounds
    yield "rounds", f"{first['seconds']:.2f} s, {last['seconds']:.2f} s"
    yield "loss", f"{first['loss']:.4f}, {last['loss']:.4f}"
    peak = result.summary["peak_memory_mb"] if device == "cpu" else peak_mib(device)
    yield "peak memory of the main process" if device == "cuda" else "peak memory", f"{peak:,.0f} MiB"


def prepare(device: str, folder: Path) -> Iterator[Row]:
    """Write the model, the tokenizer and the data of the runs."""
    from many_clients import write_data

    from prefed.core import Key
    from prefed.data import synthetic
    from prefed.models.tiny import make_tiny

    make_tiny(folder / "model", synthetic.corpus(Key(7), 300), Key(7), steps=2)
    model_of("qwen2-0.5b" if device == "cuda" else "llama-4k", device).save_pretrained(folder / "model")
    write_data(folder / "data", 4)
    yield "written", ""


def carry_out(name: str, device: str, folder: Path) -> None:
    """Run a stage in this process, and print each row as JSON."""
    kind, *rest = name.split(", ", 2)
    work: Any = {
        "prepare": prepare,
        "tests": tests,
        "products": products,
        "step": step,
        "generation": generation,
        "run": whole,
    }[kind]
    for row in work(device, folder, *rest):
        print(json.dumps(row), flush=True)


def process(name: str, seconds: float, device: str, folder: Path) -> list[Row]:
    """Run a stage in a process of its own, which is killed with its children after ``seconds``."""
    started = time.monotonic()
    command = [sys.executable, __file__, "--stage", name, "--device", device, "--folder", str(folder)]
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment = os.environ | ({} if device == "cuda" else on_cpu)
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    problem = ""
    try:
        out, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, errors = child.communicate()
        problem = f"stopped after {seconds:.0f} s"
    if child.returncode and not problem:
        problem = (errors.strip().splitlines() or [f"exit code {child.returncode}"])[-1][:200]
    rows = [tuple(json.loads(line)) for line in out.splitlines() if line.startswith("[")]
    rows += [("FAILED", problem)] if problem else []
    return [*rows, ("seconds of the stage", f"{time.monotonic() - started:.0f}")]


def output_of(*command: str) -> str:
    """The first line of what a command prints; empty if it is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0]


def origin(device: str) -> list[Row]:
    """Device, driver, versions and commit."""
    import torch

    rows = [("device", platform.processor() or platform.machine()), ("machine", platform.platform())]
    if device == "cuda":
        about = output_of(
            "nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"
        )
        rows = [("device, driver, memory", about or torch.cuda.get_device_name())]
        rows += [("devices", str(torch.cuda.device_count())), ("CUDA", str(torch.version.cuda))]
    for package in ("torch", "transformers", "peft", "trl", "liger-kernel", "bitsandbytes"):
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            rows.append((package, "not installed"))
    changed = "+" if output_of("git", "status", "--porcelain", "--untracked-files=no") else ""
    return [*rows, ("commit", output_of("git", "rev-parse", "HEAD") + changed)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu.md"), help="the table (default gpu.md)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of all stages (default 10)")
    parser.add_argument("--only", default="", help="stages whose names contain this")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        carry_out(args.stage, args.device, args.folder)
        return
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: --device cpu tries the program on tiny shapes")
    end = time.monotonic() + 60 * args.minutes
    about = origin(args.device)
    lines = [f"# prefed on {about[0][1]}", "", "| what | value |", "|---|---|"]
    lines += [f"| {what} | {value} |" for what, value in about]
    lines += ["", "| stage | what | value |", "|---|---|---|"]
    with tempfile.TemporaryDirectory() as name:
        for stage, seconds in {"prepare": 60, **stages(args.device)}.items():
            left = end - time.monotonic()
            if stage != "prepare" and args.only not in stage:
                continue
            rows = [("FAILED", "no time left")]
            if left > 1:
                rows = process(stage, min(seconds, left), args.device, Path(name))
            new = [f"| {stage} | {what} | {value.replace('|', '/')} |" for what, value in rows]
            print("\n".join(new), flush=True)
            lines += new
            args.out.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
