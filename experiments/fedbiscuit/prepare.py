"""The files of FedBiscuit's experiments that no data set of the hub is as it stands.

    python experiments/fedbiscuit/prepare.py tldr           # Reddit posts: to align, judge and fine-tune on
    python experiments/fedbiscuit/prepare.py alpaca         # instructions to fine-tune on
    python experiments/fedbiscuit/prepare.py reddit         # questions to align on
    python experiments/fedbiscuit/prepare.py saferlhf       # questions to align on
    python experiments/fedbiscuit/prepare.py alpacaeval     # instructions to judge on
    python experiments/fedbiscuit/prepare.py alpaca FILE    # from your copy of the set

A copy with several splits is a folder; the names of its files begin with train, valid or test. ``tldr`` has
two sources: the posts (OpenAI's ``tldr_3_filtered``), and the comparisons of their summaries.

The prompt of a post is the instruction of FedBiscuit's figure 4. Its subreddit, title and text are columns
too, which a selector's template shows. All other prompts are a user's turn.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prefed.core import files
from prefed.data import DataError, instruction
from prefed.data.errors import ErrorCollector, RowLocation
from prefed.data.sources import files as local
from prefed.data.sources import huggingface
from prefed.data.sources.folders import data_files

SUMMARIZE = "Summarize the following Reddit post in a paragraph of 50 words or less."
SFT_SHARE = 0.6
"""FedBiscuit, section 6: of the posts that are in no comparison."""

Rows = Iterator[dict[str, Any]]
Located = Iterator[tuple[Mapping[str, Any], RowLocation]]
Prompt = str | list[dict[str, str]]
Files = dict[str, list[dict[str, Any]]]
"""Name of a file → its rows."""


@dataclass(frozen=True)
class Reader:
    """Reads a data set of the hub, or a copy of it.

    Attributes:
        name: on the hub.
        columns: that every row must have.
        subset: the set's configuration.
        folders: its configurations are folders.
        copy: a file or a folder in place of the hub.
    """

    name: str
    columns: tuple[str, ...]
    subset: str | None = None
    folders: bool = False
    copy: Path | None = None

    def rows(self, split: str) -> Rows:
        """The rows of one split; all rows where the copy is a file.

        Raises:
            SystemExit: they cannot be read, or lack a column.
        """
        try:
            for row, location in self._from_hub(split) if self.copy is None else self._from_copy(split):
                missing = [name for name in self.columns if row.get(name) is None]
                if missing:
                    raise SystemExit(
                        f"{location}: no {' and no '.join(missing)}; is this a row of {self.name}?"
                    )
                yield dict(row)
        except DataError as error:
            raise SystemExit(str(error)) from error

    def _from_hub(self, split: str) -> Located:
        return huggingface.read_rows(
            self.name, subset=self.subset, subset_is_folder=self.folders, split=split, revision=None
        )

    def _from_copy(self, split: str) -> Located:
        assert self.copy is not None
        start, errors = split[:5], ErrorCollector()
        paths = [path for path in data_files(self.copy) if self.copy == path or path.name.startswith(start)]
        if not paths:
            raise SystemExit(f"{self.copy}: it has no file whose name begins with {start!r}")
        for path in paths:
            yield from local.read_rows(path, "utf-8", errors)
        errors.raise_if_any()


def turn(text: str, given: str = "") -> list[dict[str, str]]:
    """A user's turn, with the input that it is about."""
    return [{"role": "user", "content": text + (f"\n\n### Input:\n{given}" if given else "")}]


def post(row: Mapping[str, Any]) -> dict[str, str]:
    """The prompt that asks for a post's summary, and the post in columns."""
    fields = {name: str(row.get(name) or "") for name in ("subreddit", "title", "post")}
    given = "SUBREDDIT: r/{subreddit}\nTITLE: {title}\nPOST: {post}".format(**fields)
    return {"prompt": instruction(SUMMARIZE, given), **fields}


def to_tune_on(rows: Iterable[tuple[Prompt, str]]) -> list[dict[str, Any]]:
    """Rows with a prompt and a response, as pairs.

    Fine-tuning reads the chosen response alone. The rejected one is the response to the row before, so an
    accuracy on these pairs says how often the model knows which of two prompts a response is for.
    """
    answered = [(prompt, response) for prompt, response in rows if response.strip()]
    return [
        {"prompt": prompt, "chosen": response, "rejected": answered[k - 1][1]}
        for k, (prompt, response) in enumerate(answered)
    ]


def unique(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first row of each prompt."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        first.setdefault(json.dumps(row["prompt"]), row)
    return list(first.values())


def tldr(seed: int, posts: Reader, comparisons: Reader) -> Files:
    """Section 6: no post of a comparison; 60% to fine-tune on, the others to align on; 6,553 to judge on."""
    compared = {str(row["info"].get("id")) for row in comparisons.rows("train")}
    rows = [row for row in posts.rows("train") if str(row.get("id")) not in compared]
    random.Random(seed).shuffle(rows)
    cut = round(SFT_SHARE * len(rows))
    return {
        "tldr.sft": to_tune_on((post(row)["prompt"], " " + row["summary"].strip()) for row in rows[:cut]),
        "tldr.prompts": unique(post(row) for row in rows[cut:]),
        "tldr.test": [{**post(row), "summary": row["summary"].strip()} for row in posts.rows("test")],
    }


def alpaca(seed: int, source: Reader) -> Files:
    """Alpaca's instructions with their answers."""
    rows = source.rows("train")
    return {
        "alpaca.sft": to_tune_on(
            (turn(row["instruction"], row.get("input") or ""), row["output"]) for row in rows
        )
    }


def reddit(seed: int, source: Reader) -> Files:
    """The questions of SHP's test split."""
    return {"reddit.prompts": unique({"prompt": turn(row["history"])} for row in source.rows("test"))}


def saferlhf(seed: int, source: Reader) -> Files:
    """The prompts of SafeRLHF's training split."""
    return {"saferlhf.prompts": unique({"prompt": turn(row["prompt"])} for row in source.rows("train"))}


def alpacaeval(seed: int, source: Reader) -> Files:
    """AlpacaEval's 805 instructions with GPT-4's answers."""
    rows = source.rows("eval")
    return {
        "alpacaeval.test": [{"prompt": turn(row["instruction"]), "output": row["output"]} for row in rows]
    }


POSTS = Reader("vwxyzjn/summarize_from_feedback_tldr_3_filtered", ("id", "post", "summary"))
COMPARISONS = Reader("openai/summarize_from_feedback", ("info",), subset="comparisons")
ALPACA = Reader("tatsu-lab/alpaca", ("instruction", "output"))
SHP = Reader("stanfordnlp/SHP", ("history",), folders=True)
SAFE = Reader("PKU-Alignment/PKU-SafeRLHF", ("prompt",))
EVAL = Reader("tatsu-lab/alpaca_eval", ("instruction", "output"), subset="alpaca_eval_gpt4_baseline")
PREPARED: Mapping[str, tuple[Callable[..., Files], tuple[Reader, ...]]] = {
    "tldr": (tldr, (POSTS, COMPARISONS)),
    "alpaca": (alpaca, (ALPACA,)),
    "reddit": (reddit, (SHP,)),
    "saferlhf": (saferlhf, (SAFE,)),
    "alpacaeval": (alpacaeval, (EVAL,)),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=PREPARED)
    parser.add_argument("copies", type=Path, nargs="*", metavar="COPY", help="left out: from the hub")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--limit", type=int, help="rows of a file at most, the first ones")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of posts to fine-tune on")
    args = parser.parse_args()
    prepare, readers = PREPARED[args.what]
    if len(args.copies) > len(readers):
        parser.error(f"the sources of {args.what} are {' and '.join(reader.name for reader in readers)}")
    for path in args.copies:
        if not path.exists():
            parser.error(f"{path}: no such file or folder")
    copies = [replace(reader, copy=copy) for reader, copy in zip(readers, args.copies, strict=False)]
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in prepare(args.seed, *copies, *readers[len(copies) :]).items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[: args.limit])
        path = args.out / f"{name}.jsonl.gz"
        files.write(path, gzip.compress(text.encode(), mtime=0))
        print(f"{path}: {len(rows[: args.limit])} rows")


if __name__ == "__main__":
    main()
