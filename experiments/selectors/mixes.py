"""Clients of one taste, of ten, and of two that are opposed: three mixes of the same pairs.

    python experiments/selectors/mixes.py              # from the files that personas/prepare.py wrote
    python experiments/selectors/mixes.py TRAIN TEST --out FOLDER

The pairs are the personas'. In every mix a client has equally many.

- ``like-minded``: each client has pairs of all personas, so all clients have one taste.
- ``mixed``: each client has pairs of one persona, which is its taste. A persona has several clients.
- ``opposed``: each client has pairs of all personas. For each client there is another that has the same pairs
  with chosen and rejected swapped. So half of the clients have one taste, and half its reverse.

No two clients have a pair in common, but for a client and its reverse. Writes ``MIX.train.jsonl.gz``,
``MIX.validation.jsonl.gz`` and ``MIX.test.jsonl.gz`` with the columns ``client`` and ``taste``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefed.core import files

HERE = Path(__file__).resolve().parent
PERSONAS = HERE.parent / "personas"
MIXES = ("like-minded", "mixed", "opposed")

Rows = Sequence[Mapping[str, Any]]


def read(path: Path) -> list[dict[str, Any]]:
    """The pairs of a file, in its order."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in data.decode("utf-8").split("\n") if line.strip()]


def by_persona(rows: Rows) -> dict[str, Rows]:
    """Persona → its pairs."""
    names = sorted({row["persona"] for row in rows})
    return {name: [row for row in rows if row["persona"] == name] for name in names}


def deal(rows: Rows, hands: int, size: int, name: str) -> list[Rows]:
    """``hands`` times ``size`` of the rows, drawn without replacement; ``name`` seeds the draw.

    Raises:
        SystemExit: there are not so many rows.
    """
    if len(rows) < hands * size:
        raise SystemExit(
            f"{name}: {hands} times {size} pairs are asked for, and there are {len(rows)}; ask for fewer "
            "(--pairs, --validation, --test-pairs, --clients)"
        )
    drawn = random.Random(name).sample(list(rows), hands * size)
    return [drawn[start : start + size] for start in range(0, len(drawn), size)]


def clients_of(mix: str, rows: Rows, clients: int, size: int, name: str) -> Iterator[tuple[str, Rows]]:
    """The taste and the pairs of each client of a mix."""
    if mix == "like-minded":
        for hand in deal(rows, clients, size, name):
            yield "all", hand
    elif mix == "mixed":
        personas = by_persona(rows)
        for persona, own in personas.items():
            for hand in deal(own, clients // len(personas), size, f"{name}/{persona}"):
                yield persona, hand
    else:
        for hand in deal(rows, clients // 2, size, name):
            yield "as it is", hand
            yield "reversed", [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in hand]


def labeled(pairs: Rows, client: str, taste: str) -> list[dict[str, Any]]:
    """The pairs with the columns ``client`` and ``taste``."""
    columns = ("prompt", "chosen", "rejected", "persona")
    return [{**{key: row[key] for key in columns}, "client": client, "taste": taste} for row in pairs]


def write(path: Path, rows: Rows) -> None:
    """Write pairs as gzipped JSON lines; equal pairs give equal bytes."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    files.write(path, gzip.compress(text.encode(), mtime=0))


def arguments(
    description: str | None, out: Path, pairs: int, validation: int, test_pairs: int
) -> argparse.ArgumentParser:
    """The arguments of programs that deal the personas' pairs, with their defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("train", type=Path, nargs="?", default=PERSONAS / "personas.train.jsonl.gz")
    parser.add_argument("test", type=Path, nargs="?", default=PERSONAS / "personas.test.jsonl.gz")
    parser.add_argument("--out", type=Path, default=out)
    for name, default, of in (
        ("--pairs", pairs, "training"),
        ("--validation", validation, "validation"),
        ("--test-pairs", test_pairs, "test"),
    ):
        parser.add_argument(
            name, type=int, default=default, help=f"{of} pairs of a client (default {default})"
        )
    parser.add_argument("--seed", type=int, default=0, help="of the draw of pairs")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What the command says; it ends if a file is not there."""
    args = parser.parse_args()
    for path in (args.train, args.test):
        if not path.exists():
            parser.error(f"{path}: no such file; experiments/personas/prepare.py writes it")
    return args


def main() -> None:
    parser = arguments(__doc__, HERE, pairs=160, validation=25, test_pairs=50)
    parser.add_argument("--clients", type=int, default=20, help="of each mix (default 20)")
    args = parsed(parser)
    train, test = read(args.train), read(args.test)
    personas = len(by_persona(train))
    if args.clients % personas or args.clients % 2:
        parser.error(f"--clients {args.clients}: give an even number, divisible by the {personas} personas")
    args.out.mkdir(parents=True, exist_ok=True)
    for mix in MIXES:
        # A client's id says nothing about its taste: where selectors are equal, ids decide who is in a
        # cluster.
        ids = [f"client-{number:02}" for number in range(args.clients)]
        random.Random(f"{args.seed}/{mix}/ids").shuffle(ids)
        roles: dict[str, list[dict[str, Any]]] = {"train": [], "validation": [], "test": []}
        own = clients_of(mix, train, args.clients, args.pairs + args.validation, f"{args.seed}/{mix}/train")
        for client, (taste, pairs) in zip(ids, own, strict=True):
            roles["train"] += labeled(pairs[: args.pairs], client, taste)
            roles["validation"] += labeled(pairs[args.pairs :], client, taste)
        own = clients_of(mix, test, args.clients, args.test_pairs, f"{args.seed}/{mix}/test")
        for client, (taste, pairs) in zip(ids, own, strict=True):
            roles["test"] += labeled(pairs, client, taste)
        for role, rows in roles.items():
            path = args.out / f"{mix}.{role}.jsonl.gz"
            write(path, rows)
            clients, tastes = (len({row[key] for row in rows}) for key in ("client", "taste"))
            print(f"{path}: {len(rows)} pairs; clients: {clients}, tastes: {tastes}")


if __name__ == "__main__":
    main()
