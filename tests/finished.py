"""Finished runs for tests: one written by hand, and what a small real one is made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from prefed.core import Key
from prefed.models.tiny import make_tiny
from prefed.train.metrics import federated_metric

CLIENTS = {"ann": (0.25, 0.5, 0.75), "bob": (0.5, 0.75, 1.0), "cyd": (0.0, 0.25, 0.25)}
"""Client → accuracy before, after round 1 and after round 2."""


def config(**changes: Any) -> dict[str, Any]:
    """A resolved experiment, as ``config.toml`` has it."""
    return {
        "seed": 1,
        "rounds": 2,
        "data": {"train": {"path": "pairs.jsonl"}, "partition": {"by": "column", "column": "worker"}},
        "model": {"name": "tiny", "lora": {"rank": 2}},
        "method": {"name": "feddpo", "lr": 0.01, "beta": 0.1},
        "engine": {"name": "local", "workers": 0},
        **changes,
    }


def write_run(
    path: Path,
    clients: Any = CLIENTS,
    *,
    settings: dict[str, Any] | None = None,
    fingerprint: dict[str, str] | None = None,
    figures: dict[str, list[float]] | None = None,
    **summary: Any,
) -> Path:
    """A run directory as a finished run leaves it, without its checkpoint's states.

    Args:
        path: made here.
        clients: client → accuracy before and after each round.
        settings: in place of those of :func:`config`.
        fingerprint: puts a commit with it there.
        figures: numbers of the method's own, one per round.
        summary: further keys of the summary.
    """
    path.mkdir(parents=True)
    resolved = config(**(settings or {}))
    (path / "config.toml").write_text(tomli_w.dumps(resolved))

    def over(number: int) -> Any:
        return federated_metric({client: values[number] for client, values in clients.items()})

    rounds = len(next(iter(clients.values()))) - 1
    with (path / "rounds.jsonl").open("w") as file:
        for number in range(1, rounds + 1):
            evaluation = {
                "baseline_accuracy": over(0),
                "preference_accuracy": over(number),
                "margin": number / 4,
            }
            record = {
                "round": number,
                "loss": 0.7 / number,
                "preference_accuracy": evaluation["preference_accuracy"]["mean"],
                "evaluation": evaluation,
                "bytes_up": 1000,
                "bytes_down": 2000,
                "seconds": 1.5,
                "cohort": sorted(clients)[:2],
                "dropped": [],
                **{name: values[number - 1] for name, values in (figures or {}).items()},
            }
            file.write(json.dumps(record) + "\n")
    whole = {
        "method": resolved["method"]["name"],
        "rounds": rounds,
        "seed": resolved["seed"],
        "baseline_accuracy": over(0),
        "preference_accuracy": over(rounds),
        "split": "test",
        "left_out": 0,
        "parameters": {"trainable": 1234, "communicated": 617},
        "bytes": {"up": 1000 * rounds, "down": 2000 * rounds},
        "seconds": 1.5 * rounds,
        "peak_memory_mb": 321.0,
        "clients": {client: {"train": 8, "validation": 0, "test": 4} for client in clients},
        **summary,
    }
    (path / "summary.json").write_text(json.dumps(whole))
    if fingerprint is not None:
        (path / "checkpoint").mkdir()
        none: dict[str, Any] = {"settings": None, "digests": {}, "private": {}}
        commit = {"format": 1, "round": rounds, "totals": {}, "fingerprint": fingerprint, **none}
        (path / "checkpoint/COMMIT.json").write_text(json.dumps(commit))
    return path


def small_place(folder: Path) -> Path:
    """A model of two blocks of width 32; two workers of opposite tastes, 8 pairs and 4 test pairs each."""
    draw, rows = np.random.default_rng(0), []
    for number in range(24):
        worker, tastes = ("left", "right")[number % 2], [" up", " down"]
        ends = [" we go" * int(draw.integers(3)) for _ in tastes]
        up, down = (taste + end for taste, end in zip(tastes, ends, strict=True))
        chosen, rejected = (up, down) if worker == "left" else (down, up)
        rows.append({"prompt": f"Case {number}:", "chosen": chosen, "rejected": rejected, "worker": worker})
    for name, part in (("train", rows[:16]), ("test", rows[16:])):
        lines = (json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    texts = [row["prompt"] + row["chosen"] for row in rows]
    make_tiny(
        folder / "model", texts, Key(0), layers=2, width=32, heads=2, vocabulary=270, context=64, steps=3
    )
    return folder


WORDY = ("ann", "bob", "cyd", "dee")
"""The clients of :func:`wordy_place`."""


def wordy_place(folder: Path) -> Path:
    """Four clients with 4 training and 2 test pairs each, whose prompts have 12 words of their own."""
    draw, letters = np.random.default_rng(1), list("bcdfgklmnprstvwz")
    small_place(folder)
    for name, count in (("train", 16), ("test", 8)):
        rows = []
        for number in range(count):
            words = " ".join("".join(draw.choice(letters, 2)) for _ in range(12))
            row = {"prompt": f"{words}:", "chosen": " up", "rejected": " down"}
            rows.append({**row, "worker": WORDY[number % 4]})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "Say {n}:"}}\n' for n in range(6)))
    return folder


def rows_of(place: Path, name: str, client: str | None = None) -> list[dict[str, str]]:
    """The rows of a file of :func:`wordy_place`, of all clients or of one."""
    rows = [json.loads(line) for line in (place / f"{name}.jsonl").read_text().splitlines()]
    return [row for row in rows if client in (None, row["worker"])]


def found(path: Path, rows: list[dict[str, str]]) -> list[Path]:
    """The files in a folder with 12 words of a prompt in them."""
    needles = [row["prompt"].rstrip(":").encode() for row in rows]
    everything = (file for file in path.rglob("*") if file.is_file())
    return [file for file in everything if any(needle in file.read_bytes() for needle in needles)]


def small_experiment(place: Path, column: str = "worker", **changes: Any) -> dict[str, Any]:
    """FedDPO of two rounds over :func:`small_place`, whose column names the clients."""
    return {
        "seed": 3,
        "rounds": 2,
        "data": {
            "train": str(place / "train.jsonl"),
            "test": str(place / "test.jsonl"),
            "partition": {"by": "column", "column": column},
        },
        "model": {"name": str(place / "model"), "lora": {"rank": 2}},
        "method": {"name": "feddpo", "lr": 0.01, "local_steps": 3, "batch_size": 4},
        "engine": {"threads": 1},
        **changes,
    }


def logprobs(model: Any, tokens: Any, indices: Any) -> np.ndarray:
    """Oracle: a plain forward pass for each response, its completion's log-probabilities summed."""
    sums = []
    for index in indices:
        pair = tokens.pair(int(index))
        for response in (pair.chosen, pair.rejected):
            ids = torch.from_numpy(np.concatenate([pair.prompt, response]).astype(np.int64))[None]
            with torch.inference_mode():
                logits = model(ids).logits[0, len(pair.prompt) - 1 : -1].double()
            at = torch.from_numpy(response.astype(np.int64))[:, None]
            sums.append(float(logits.log_softmax(-1).gather(1, at).sum()))
    return np.array(sums).reshape(-1, 2)
