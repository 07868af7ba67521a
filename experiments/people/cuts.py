"""The files of methods.toml, from those of prepare.py.

    python experiments/people/cuts.py                    # or: cuts.py TRAIN TEST

A tenth of the training pairs of arguments, by a hash of their texts, are validation pairs for everybody. Of
the others a person keeps the first 8, 32 or 128, or all; for newcomers, the second half of the people keep 8.
The task ``people`` of ``../bench`` has the first pairs of the 20 people with the most judgements.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prepare import fraction, unordered, write

HERE = Path(__file__).resolve().parent
SIZES = (8, 32, 128)
VALIDATION = 0.1
BENCH = {"train": 24, "validation": 16, "test": 32}
"""Role → pairs of a person in the benchmark."""
PEOPLE = 20
Rows = Sequence[Mapping[str, Any]]


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a gzipped file of JSON lines."""
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def by_person(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Person → the person's rows in their order; people in the order of their names."""
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        found[row["person"]].append(row)
    return dict(sorted(found.items()))


def cuts(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Name of a file → its rows."""
    validated = [fraction(f"validation\n{unordered(row)}") < VALIDATION for row in rows]
    own = by_person([row for row, taken in zip(rows, validated, strict=True) if not taken])
    found = {"people.validation": [row for row, taken in zip(rows, validated, strict=True) if taken]}
    for name, size in (*((f"people-{size}", size) for size in SIZES), ("people-all", None)):
        found[f"{name}.train"] = [row for kept in own.values() for row in kept[:size]]
    found["people-newcomers.train"] = [
        row
        for place, kept in enumerate(own.values())
        for row in kept[: None if place < len(own) // 2 else SIZES[0]]
    ]
    return found


def bench(found: Mapping[str, Rows], test: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Role → rows of the people with the most training and test pairs, from the result of :func:`cuts`."""
    own = {"train": found["people-all.train"], "validation": found["people.validation"], "test": test}
    parts = {role: by_person(rows) for role, rows in own.items()}
    sizes = {name: len(rows) + len(parts["test"].get(name, ())) for name, rows in parts["train"].items()}
    chosen = sorted(sorted(sizes, key=lambda name: (-sizes[name], name))[:PEOPLE])
    return {
        role: [row for name in chosen for row in parts[role].get(name, [])[:size]]
        for role, size in BENCH.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for part in ("train", "test"):
        default = HERE / f"people.{part}.jsonl.gz"
        parser.add_argument(part, type=Path, nargs="?", default=default, help=f"left out: {default.name}")
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    for path in (args.train, args.test):
        if not path.exists():
            parser.error(f"{path}: no such file; experiments/people/prepare.py writes it")
    found, test = cuts(read(args.train)), read(args.test)
    for name, rows in found.items():
        write(args.out / f"{name}.jsonl.gz", rows)
    for role, rows in bench(found, test).items():
        write(args.out / f"bench.{role}.jsonl.gz", rows)
    if args.test.resolve() != (args.out / "people.test.jsonl.gz").resolve():
        write(args.out / "people.test.jsonl.gz", test)


if __name__ == "__main__":
    main()
