"""The helpful and the harmless comparisons of Anthropic/hh-rlhf (Bai et al. 2022, arXiv:2204.05862, MIT).

    python experiments/fedvpa/prepare.py              # helpful-base and harmless-base from the hub
    python experiments/fedvpa/prepare.py FOLDER       # from a copy: FOLDER/helpful-base/train.jsonl.gz …

Of the training comparisons 90% are for training, 9% for validation and 1% for the test; no prompt is in two
of them. The hub's test splits give prompts alone: half of them to align on, half to judge on, these in a file
for each criterion. Writes ``hh.train.jsonl.gz``, ``hh.validation.jsonl.gz`` and ``hh.test.jsonl.gz`` with the
column ``category``, ``hh.prompts.jsonl.gz``, ``helpful.prompts.jsonl.gz`` and ``harmless.prompts.jsonl.gz``.
The texts contain offensive language.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prefed.core import files
from prefed.data.sources.pairs import TURN, split_dialogue

HUB, CATEGORIES = "Anthropic/hh-rlhf", ("helpful", "harmless")
SHARES = {"train": 0.9, "validation": 0.09, "test": 0.01}


def read(folder: Path | None, category: str, split: str) -> list[dict[str, str]]:
    """The comparisons of a split as pairs, without those that have no shared turn or nothing to compare.

    Raises:
        SystemExit: there is no such file.
    """
    name = f"{category}-base/{split}.jsonl.gz"
    if folder is None:
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(HUB, name, repo_type="dataset"))
    else:
        path = folder / name
        if not path.exists():
            raise SystemExit(f"{path}: no such file; give the folder of a copy of {HUB}")
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")
    pairs = []
    for row in (json.loads(line) for line in lines if line.strip()):
        prompt, chosen, rejected = split_dialogue(row["chosen"], row["rejected"])
        if prompt.endswith(TURN) and chosen.strip() and rejected.strip() and chosen != rejected:
            pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected, "category": category})
    return pairs


def divide(prompts: Iterable[str], shares: Mapping[str, float], name: str) -> dict[str, str]:
    """Prompt → the part that it belongs to; ``name`` seeds the draw."""
    shuffled = sorted(set(prompts))
    random.Random(name).shuffle(shuffled)
    parts, end, total = dict[str, str](), 0.0, 0
    for part, share in shares.items():
        end += share
        for prompt in shuffled[total : round(end * len(shuffled))]:
            parts[prompt] = part
        total = round(end * len(shuffled))
    return parts


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """JSON lines, gzipped to the same bytes each time."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    files.write(path, gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
    print(f"{path}: {len(lines)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, nargs="?", help=f"folder of a copy; left out: {HUB}")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    pairs = [pair for category in CATEGORIES for pair in read(args.source, category, "train")]
    part_of = divide((pair["prompt"] for pair in pairs), SHARES, f"{args.seed}/pairs")
    for part in SHARES:
        rows = [pair for pair in pairs if part_of[pair["prompt"]] == part]
        random.Random(f"{args.seed}/{part}").shuffle(rows)
        write(args.out / f"hh.{part}.jsonl.gz", rows)
    asked = {
        category: sorted({pair["prompt"] for pair in read(args.source, category, "test")} - part_of.keys())
        for category in CATEGORIES
    }
    align = []
    for category, prompts in asked.items():
        random.Random(f"{args.seed}/{category}").shuffle(prompts)
        half = len(prompts) // 2
        align += [{"prompt": prompt, "category": category} for prompt in prompts[:half]]
        write(args.out / f"{category}.prompts.jsonl.gz", ({"prompt": prompt} for prompt in prompts[half:]))
    write(args.out / "hh.prompts.jsonl.gz", align)


if __name__ == "__main__":
    main()
