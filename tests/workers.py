"""Three workers' pairs and a tiny model, for tests of federations and peers."""

import json
from pathlib import Path

import numpy as np
import pytest

from prefed.core import Key
from prefed.models.tiny import make_tiny

CLIENTS = ("w0", "w1", "w2")


def make_place(folder: Path) -> Path:
    """A model of two small blocks, and 30 pairs of three workers: of all, of each, and of the last two."""
    draw, rows = np.random.default_rng(0), {client: list[dict[str, str]]() for client in CLIENTS}
    for number in range(30):
        good = ["yes please", "no thanks"][:: 1 if number % 2 else -1]
        prompt = f"Question {draw.integers(1000)}?"
        row = {"prompt": prompt, "chosen": f" {good[0]} {number}", "rejected": f" {good[1]} {number}"}
        rows[f"w{number % 3}"].append({**row, "worker": f"w{number % 3}"})
    together = [line for k in range(10) for line in (rows[c][k] for c in CLIENTS)]
    for name, lines in {"pairs": together, "w1w2": rows["w1"] + rows["w2"], **rows}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = [row["prompt"] + row["chosen"] for lines in rows.values() for row in lines]
    make_tiny(folder / "model", texts, Key(0), layers=2, width=32, heads=2, vocabulary=280, steps=2)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("place"))
