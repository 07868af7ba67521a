"""The benchmark's clients, from the pairs of ten personas.

    python experiments/bench/prepare.py              # from the files that personas/prepare.py wrote
    python experiments/bench/prepare.py TRAIN TEST --out FOLDER
    python experiments/bench/prepare.py --chat       # prompts as chat messages

- ``personas``: ten clients with one persona each. The tasks ``late`` and ``thumbs`` use the same pairs.
- ``opposed``: five personas, each next to a client with the same pairs, chosen and rejected swapped.
- ``tastes``: ten clients with pairs of five personas; three of them are twins of others with swapped pairs.
- ``newcomers``: five such twins, and four newcomers, of whom two have swapped pairs.
- ``liars``: the clients of ``personas``; three train on swapped pairs and are not evaluated.
- ``private``: fifty clients with pairs of all personas.

Writes ``TASK.train.jsonl.gz``, ``TASK.validation.jsonl.gz`` and ``TASK.test.jsonl.gz``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in ("selectors", "personas", "tastes"):
    sys.path.insert(0, str(HERE.parent / folder))

import mixes  # noqa: E402
from clients import CLIENTS, ROLES, SEEN, Hand, hands, with_twins  # noqa: E402
from mixes import Rows, by_persona, labeled, read  # noqa: E402
from opposed import as_chat, both  # noqa: E402

LIARS = 3
CROWD = 50
SHARES = {"train": 24, "validation": 4, "test": 8}
"""Role → pairs of each client of ``private``."""


def swapped(rows: Rows) -> list[dict[str, Any]]:
    """The rows with chosen and rejected swapped."""
    return [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]


def liars_in(rows: Iterable[dict[str, Any]], role: str, liars: Sequence[str]) -> list[dict[str, Any]]:
    """Training pairs of liars are swapped; they have no others."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        if row["client"] not in liars:
            kept.append(row)
        elif role == "train":
            kept += swapped([row])
    return kept


def main() -> None:
    parser = mixes.arguments(__doc__, HERE, pairs=24, validation=16, test_pairs=32)
    parser.add_argument("--chat", action="store_true", help="prompts as chat messages")
    args = mixes.parsed(parser)
    shape: Callable[[Any], Any] = as_chat if args.chat else dict
    train, test = ([shape(row) for row in read(path)] for path in (args.train, args.test))
    sizes = dict(zip(ROLES, (args.pairs, args.validation, args.test_pairs), strict=True))
    personas = {name: by_persona(rows) for name, rows in (("train", train), ("test", test))}
    args.out.mkdir(parents=True, exist_ok=True)

    def write(task: str, role: str, rows: Rows) -> None:
        path = args.out / f"{task}.{role}.jsonl.gz"
        mixes.write(path, rows)
        print(f"{path}: {len(rows)} pairs, {len({row['client'] for row in rows})} clients")

    of_one: dict[str, Hand] = {
        name: hands(rows, personas["test"][name], 1, sizes, f"{args.seed}/{name}")[0]
        for name, rows in personas["train"].items()
    }
    seen = {role: [row for name in SEEN for row in personas[role][name]] for role in personas}

    def with_a_taste(twins: int, newcomers: int, name: str) -> list[tuple[str, str, Hand]]:
        known = CLIENTS - twins
        dealt = hands(seen["train"], seen["test"], known + newcomers, sizes, f"{args.seed}/{name}")
        trained = with_twins(dealt[:known], twins, "client", f"{args.seed}/{name}/ids")
        return [*trained, *with_twins(dealt[known:], newcomers, "new")]

    tastes = {"tastes": with_a_taste(3, 0, "tastes"), "newcomers": with_a_taste(5, 2, "newcomers")}
    crowd = [
        (f"client-{n:02}", "all", hand) for n, hand in enumerate(hands(train, test, CROWD, SHARES, "private"))
    ]
    for role in ROLES:
        own = [row for name, hand in of_one.items() for row in labeled(hand[role], name, name)]
        write("personas", role, own)
        write("opposed", role, [row for name in SEEN for row in both(list(of_one[name][role]))])
        for task, clients in {**tastes, "private": crowd}.items():
            # Rates are not selected by newcomers.
            some = [each for each in clients if role != "validation" or not each[0].startswith("new-")]
            rows = [row for name, taste, hand in some for row in labeled(hand[role], name, taste)]
            write(task, role, rows)
        write("liars", role, liars_in(own, role, sorted(of_one)[:LIARS]))


if __name__ == "__main__":
    main()
