"""Clients that want opposite things: each persona next to its reverse, on the same pairs.

    python experiments/personas/opposed.py              # from the files that prepare.py wrote
    python experiments/personas/opposed.py TRAIN TEST --out FOLDER
    python experiments/personas/opposed.py --chat       # prompts as chat messages

For each persona P of the files, client ``P`` holds pairs of it as they are, and client ``not-P`` the same
pairs with chosen and rejected swapped. Both train on the same few pairs, choose learning rates on others of
the training file, and are tested on the first pairs of the test file. Writes ``opposed.train.jsonl.gz``,
``opposed.validation.jsonl.gz`` and ``opposed.test.jsonl.gz`` with the client in the column ``client``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path
from typing import Any

from prefed.core import files

HERE = Path(__file__).resolve().parent


def by_persona(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Persona → its rows, in the order of the file."""
    rows_of: dict[str, list[dict[str, Any]]] = {}
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for line in filter(str.strip, data.decode("utf-8").split("\n")):
        row = json.loads(line)
        rows_of.setdefault(row["persona"], []).append(row)
    return rows_of


def as_chat(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose prompt is the user's message, for a chat template."""
    question = row["prompt"].removeprefix("\n\nHuman: ").removesuffix("\n\nAssistant:")
    return {
        **row,
        "prompt": [{"role": "user", "content": question}],
        "chosen": row["chosen"].strip(),
        "rejected": row["rejected"].strip(),
    }


def both(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the persona's client, and those of its reverse."""
    pairs = [{key: row[key] for key in ("prompt", "chosen", "rejected", "persona")} for row in rows]
    return [{**row, "client": row["persona"]} for row in pairs] + [
        {**row, "chosen": row["rejected"], "rejected": row["chosen"], "client": f"not-{row['persona']}"}
        for row in pairs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("train", type=Path, nargs="?", default=HERE / "personas.train.jsonl.gz")
    parser.add_argument("test", type=Path, nargs="?", default=HERE / "personas.test.jsonl.gz")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--pairs", type=int, default=24, help="training pairs of a client (default 24)")
    parser.add_argument(
        "--validation", type=int, default=40, help="validation pairs of a client (default 40)"
    )
    parser.add_argument(
        "--test-pairs", type=int, default=50, help="test pairs of a client (default 50, 0: all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw of pairs")
    parser.add_argument("--persona", action="append", help="repeatable (default: every persona of the files)")
    parser.add_argument("--chat", action="store_true", help="prompts as chat messages")
    args = parser.parse_args()
    for path in (args.train, args.test):
        if not path.exists():
            parser.error(f"{path}: no such file; prepare.py writes it")
    roles: dict[str, list[dict[str, Any]]] = {"train": [], "validation": [], "test": []}
    train, test = by_persona(args.train), by_persona(args.test)
    for persona in args.persona or sorted(train):
        if persona not in train or persona not in test:
            parser.error(f"no persona is called {persona!r} (personas: {', '.join(sorted(train))})")
        rows = train[persona]
        wanted = args.pairs + args.validation
        if len(rows) < wanted:
            parser.error(f"{args.train}: {persona} has {len(rows)} pairs, and {wanted} are asked for")
        drawn = random.Random(f"{args.seed}/{persona}").sample(rows, wanted)
        roles["train"] += both(drawn[: args.pairs])
        roles["validation"] += both(drawn[args.pairs :])
        roles["test"] += both(test[persona][: args.test_pairs or None])
    args.out.mkdir(parents=True, exist_ok=True)
    for role, rows in roles.items():
        if args.chat:
            rows = [as_chat(row) for row in rows]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path = args.out / f"opposed.{role}.jsonl.gz"
        files.write(path, gzip.compress(text.encode(), mtime=0))
        print(f"{path}: {len(rows)} pairs of {len({row['client'] for row in rows})} clients")


if __name__ == "__main__":
    main()
