"""Stage ``prompts``: the server's own prompts, without those that clients hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from prefed.align.alignment import Alignment
from prefed.align.errors import AlignError
from prefed.align.lines import dumps, rows_in
from prefed.align.stages import Figures, Stage
from prefed.core import files
from prefed.data.prompts import PromptRow, parse_prompt, plain_prompt, prompt_digests, read_prompts
from prefed.data.writer import prompt_hash
from prefed.train.generation import as_prompt

FILE = "prompts.jsonl"


def own_prompts(alignment: Alignment) -> list[PromptRow]:
    """The prompts that the stage kept, in their order."""
    rows = rows_in(alignment.folder / FILE)
    return [PromptRow(parse_prompt(row["prompt"]), extra=row.get("extra", {})) for row in rows]


def _settings(alignment: Alignment) -> dict[str, Any]:
    config = alignment.config
    source = config.prompts.model_dump(mode="json", exclude={"path"}, exclude_none=True)
    return {
        "prompts": {**source, "files": prompt_digests(config.prompts)},
        "limit": config.limit,
        "raw": config.raw,
        "encoding": alignment.data.encoding,
        "format": alignment.data.format,
    }


def _work(alignment: Alignment) -> Figures:
    counts = {"read": 0, "duplicates": 0, "clients": 0, "kept": 0}
    rows = list(_new_prompts(alignment, counts))
    if not rows:
        raise AlignError(
            f"{alignment.config.prompts.path}: no prompt is left: of {counts['read']:,} there, clients hold "
            f"{counts['clients']:,}, and {counts['duplicates']:,} are repeats; give prompts of the "
            "server's own"
        )
    files.write(alignment.folder / FILE, dumps(rows))
    return counts


def _new_prompts(alignment: Alignment, counts: dict[str, int]) -> Iterator[dict[str, Any]]:
    config, clients = alignment.config, alignment.client_prompts()
    taken, seen = set(np.unique(clients.hashes).tolist()), set[int]()
    for row, _ in read_prompts(config.prompts, alignment.data.encoding, alignment.data.format):
        counts["read"] += 1
        prompt = row.prompt
        if isinstance(prompt, str):
            prompt = as_prompt(prompt, clients.example, raw=config.raw)
        number = prompt_hash(prompt)
        if number in taken:
            counts["clients"] += 1
        elif number in seen:
            counts["duplicates"] += 1
        else:
            seen.add(number)
            counts["kept"] += 1
            yield {"prompt": plain_prompt(prompt), **({"extra": dict(row.extra)} if row.extra else {})}
        if counts["kept"] == config.limit:
            return


STAGE = Stage("prompts", ("clients",), _settings, (FILE,), _work)
