"""Clients of one taste, of two opposed tastes half and half, and 70 to 30; and newcomers of each.

    python experiments/tastes/clients.py              # from the files that personas/prepare.py wrote
    python experiments/tastes/clients.py TRAIN TEST --out FOLDER
    python experiments/tastes/clients.py --chat       # prompts as chat messages

Five personas that do not contradict one another are the taste ``as it is``; the same pairs with chosen and
rejected swapped are the taste ``reversed``. Every client has pairs of all five.

- ``like-minded``: ten clients that train, all of one taste.
- ``half``: five pairs of twins. Twins have the same pairs; one of them has them reversed.
- ``seventy``: three pairs of twins, and four clients more of the taste as it is.
- ``half-a``, ``half-b``, ``seventy-a``, ``seventy-b``: the clients of one taste alone, for the ceilings. They
  are clients and newcomers of ``half`` and ``seventy`` with the same ids and pairs.

Newcomers never train: ``new-…`` have other pairs of the five personas, ``far-…`` pairs of two other
personas. They are twins where the clients are. Pairs of different clients differ, but for twins. The id of a
client that trains says nothing about its taste. Writes ``MIX.train.jsonl.gz``, ``MIX.validation.jsonl.gz``
and ``MIX.test.jsonl.gz`` with the columns ``client`` and ``taste``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "selectors"))  # mixes.py deals the pairs of the other mixes

sys.path.insert(0, str(HERE.parent / "personas"))  # opposed.py makes chat messages of prompts

import mixes  # noqa: E402
from mixes import Rows, by_persona, deal, labeled, read  # noqa: E402
from opposed import as_chat  # noqa: E402

SEEN = ("politically-liberal", "risk-averse", "interest-in-sports", "interest-in-math", "agreeableness")
UNSEEN = ("subscribes-to-Buddhism", "extraversion")
AS_IT_IS, REVERSED = "as it is", "reversed"
TWINS = {"like-minded": 0, "half": 5, "seventy": 3}
"""Mix → how many of its clients as they are have a reversed twin."""
CLIENTS = 10
ROLES = ("train", "validation", "test")

Hand = Mapping[str, Rows]
"""Role → the pairs of one client, as they are."""


def hands(train: Rows, test: Rows, count: int, sizes: Mapping[str, int], name: str) -> list[Hand]:
    """The pairs of ``count`` clients; ``name`` seeds the draw."""
    own = deal(train, count, sizes["train"] + sizes["validation"], f"{name}/train")
    tested = deal(test, count, sizes["test"], f"{name}/test")
    return [
        dict(zip(ROLES, (pairs[: sizes["train"]], pairs[sizes["train"] :], judged), strict=True))
        for pairs, judged in zip(own, tested, strict=True)
    ]


def with_twins(
    dealt: Sequence[Hand], twins: int, ids: str, seed: str | None = None
) -> Iterator[tuple[str, str, Hand]]:
    """Id, taste and pairs of each client: the first ``twins`` stand a second time, reversed.

    Args:
        seed: of the shuffle of ids; ``None`` leaves the clients as they are before the reversed ones.
    """
    clients = [(AS_IT_IS, hand) for hand in dealt]
    for hand in dealt[:twins]:
        swapped = {
            role: [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
            for role, rows in hand.items()
        }
        clients.append((REVERSED, swapped))
    names = [f"{ids}-{number:02}" for number in range(len(clients))]
    if seed is not None:
        # Where selectors are equal, ids decide who is in a cluster.
        random.Random(seed).shuffle(names)
    for name, (taste, hand) in sorted(zip(names, clients, strict=True), key=lambda each: each[0]):
        yield name, taste, hand


def main() -> None:
    parser = mixes.arguments(__doc__, HERE, pairs=120, validation=40, test_pairs=40)
    parser.add_argument("--newcomers", type=int, default=2, help="of each taste and kind (default 2)")
    parser.add_argument("--chat", action="store_true", help="prompts as chat messages")
    args = mixes.parsed(parser)
    shape = as_chat if args.chat else dict
    train, test = (by_persona([shape(row) for row in read(path)]) for path in (args.train, args.test))
    if missing := [name for name in (*SEEN, *UNSEEN) if name not in train or name not in test]:
        parser.error(f"{args.train}, {args.test}: no pairs of {', '.join(missing)}")
    sizes = dict(zip(ROLES, (args.pairs, args.validation, args.test_pairs), strict=True))
    args.out.mkdir(parents=True, exist_ok=True)

    def rows_of(personas: Sequence[str], rows: Mapping[str, Rows]) -> list[Mapping[str, Any]]:
        return [row for name in personas for row in rows[name]]

    for mix, twins in TWINS.items():
        known = CLIENTS - twins
        dealt = hands(
            rows_of(SEEN, train), rows_of(SEEN, test), known + args.newcomers, sizes, f"{args.seed}/{mix}"
        )
        others = hands(
            rows_of(UNSEEN, train), rows_of(UNSEEN, test), args.newcomers, sizes, f"{args.seed}/{mix}/far"
        )
        more = args.newcomers if twins else 0
        trained = [*with_twins(dealt[:known], twins, "client", f"{args.seed}/{mix}/ids")]
        everybody = [
            *trained,
            *with_twins(dealt[known:], more, "new"),
            *with_twins(others, more, "far"),
        ]
        write(args.out, mix, everybody)
        for letter, taste in (("a", AS_IT_IS), ("b", REVERSED)) if twins else ():
            write(args.out, f"{mix}-{letter}", [each for each in everybody if each[1] == taste])


def write(out: Path, mix: str, clients: Sequence[tuple[str, str, Hand]]) -> None:
    """The files of a mix."""
    for role in ROLES:
        rows = [row for name, taste, hand in clients for row in labeled(hand[role], name, taste)]
        path = out / f"{mix}.{role}.jsonl.gz"
        mixes.write(path, rows)
        print(f"{path}: {len(rows)} pairs, {len(clients)} clients")


if __name__ == "__main__":
    main()
