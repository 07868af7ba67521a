"""Harmlessness comparisons of Anthropic/hh-rlhf (Bai et al. 2022, arXiv:2204.05862, MIT) as pairs.

    python experiments/hh_harmless/prepare.py              # harmless-base/test.jsonl.gz from the hub
    python experiments/hh_harmless/prepare.py FILE         # or your copy of it

Reads a random half of the test split of harmless-base, splits each comparison at the last "Assistant:" that
both dialogues share, and sets 200 pairs apart for the test; no prompt is on both sides. Writes
``hh_harmless.train.jsonl.gz`` and ``hh_harmless.test.jsonl.gz``. The texts contain offensive language.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path

from prefed.core import files
from prefed.data.sources.pairs import TURN, split_dialogue

HUB, FILE = "Anthropic/hh-rlhf", "harmless-base/test.jsonl.gz"


def split(chosen: str, rejected: str) -> dict[str, str] | None:
    r"""A comparison as prompt and responses; ``None`` where there is no shared turn or nothing to compare.

    >>> split("\n\nHuman: Hi\n\nAssistant: Hello", "\n\nHuman: Hi\n\nAssistant: Go")
    {'prompt': '\n\nHuman: Hi\n\nAssistant:', 'chosen': ' Hello', 'rejected': ' Go'}
    """
    prompt, chosen, rejected = split_dialogue(chosen, rejected)
    if not prompt.endswith(TURN) or not chosen.strip() or not rejected.strip() or chosen == rejected:
        return None
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, nargs="?", help=f"left out: {FILE} of {HUB}")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--share", type=float, default=0.5, help="of the comparisons (default 0.5)")
    parser.add_argument("--test", type=int, default=200, help="pairs for the test (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.source is None:
        from huggingface_hub import hf_hub_download

        args.source = Path(hf_hub_download(HUB, FILE, repo_type="dataset"))
    elif not args.source.exists():
        parser.error(f"{args.source}: no such file")
    data = args.source.read_bytes()
    text = (gzip.decompress(data) if args.source.suffix == ".gz" else data).decode("utf-8")
    lines = [line for line in text.split("\n") if line.strip()]
    random.Random(args.seed).shuffle(lines)
    compared = [split(**json.loads(line)) for line in lines[: round(args.share * len(lines))]]
    rows = [row for row in compared if row is not None]
    test = rows[: args.test]
    test_prompts = {row["prompt"] for row in test}
    train = [row for row in rows[args.test :] if row["prompt"] not in test_prompts]
    for role, pairs in (("train", train), ("test", test)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in pairs)
        path = args.out / f"hh_harmless.{role}.jsonl.gz"
        files.write(path, gzip.compress(text.encode(), mtime=0))
        print(f"{path}: {len(pairs)} pairs")


if __name__ == "__main__":
    main()
