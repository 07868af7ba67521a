"""Stages ``prompts`` and ``policy``: select the server's prompts, and prepare the initial policy.

Prompts that clients also have are removed. The initial policy generates completions and is π_ref.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from prefed.align.alignment import Alignment, write_pairs
from prefed.align.policy import (
    CONFIG,
    FILE,
    FOLDER,
    PLAIN,
    WEIGHTS,
    AlignError,
    Training,
    adapter_settings,
    load_base,
    train_epochs,
)
from prefed.align.stages import Figures, Stage, dumps, rows_in
from prefed.config.align import AlignConfig
from prefed.core import Objective, Optimizer, files
from prefed.data import DataConfig, DataError, Prompt, Record, Source
from prefed.data.prompts import PromptRow, prompt_digests, read_prompts
from prefed.data.record import parse_prompt, plain_prompt
from prefed.data.tokens import prompt_hash
from prefed.models import Backbone, save_adapter
from prefed.models.adapter_files import atomic_folder
from prefed.models.backbone import model_digest
from prefed.train import PairTrainer
from prefed.train.generation import as_prompt

PROMPTS = "prompts.jsonl"


def own_prompts(alignment: Alignment) -> list[PromptRow]:
    """Read the selected prompts in their order."""
    rows = rows_in(alignment.folder / PROMPTS)
    return [PromptRow(parse_prompt(row["prompt"]), extra=row.get("extra", {})) for row in rows]


def _prompts_settings(alignment: Alignment) -> dict[str, Any]:
    config = alignment.config
    source = config.prompts.model_dump(mode="json", exclude={"path"}, exclude_none=True)
    return {
        "prompts": {**source, "files": prompt_digests(config.prompts)},
        "limit": config.limit,
        "raw": config.raw,
        "encoding": alignment.data.encoding,
        "format": alignment.data.format,
    }


def _keep_prompts(alignment: Alignment) -> Figures:
    counts = {"read": 0, "duplicates": 0, "clients": 0, "kept": 0}
    rows = list(_new_prompts(alignment, counts))
    if not rows:
        raise AlignError(
            f"{alignment.config.prompts.path}: no prompts are left: of {counts['read']:,}, clients have "
            f"{counts['clients']:,}, and {counts['duplicates']:,} are repeats; use prompts that clients do "
            "not have"
        )
    files.write(alignment.folder / PROMPTS, dumps(rows))
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


PROMPTS_STAGE = Stage("prompts", ("clients",), _prompts_settings, (PROMPTS,), _keep_prompts)


STATE = "policy.state"
_NOBODY = "∅"
"""Placeholder for a rejected response, which the loss ``sft`` ignores."""


def _policy_settings(alignment: Alignment) -> dict[str, Any]:
    config = alignment.config
    # Checkpointing does not affect results.
    model = alignment.model.model_dump(mode="json", exclude_none=True, exclude={"checkpointing"})
    settings = {"model": model, "seed": alignment.seed}
    if alignment.needs != PLAIN:
        settings["parts"] = sorted(alignment.needs)
    if config.sft is None:
        return settings
    if _is_adapter(config.sft):
        folder = Path(config.sft).expanduser()
        present = [name for name in (CONFIG, WEIGHTS) if (folder / name).exists()]
        digests = {name: files.file_digest(folder / name) for name in present}
        return {**settings, "adapter": digests}
    return {
        **settings,
        "sft": prompt_digests(Source(path=config.sft)),
        "sft_lr": config.sft_lr,
        "sft_epochs": config.sft_epochs,
        "batch_size": config.batch_size,
        "raw": config.raw,
        "template": alignment.data.template,
        "max_length": alignment.data.max_length,
    }


def _is_adapter(sft: str) -> bool:
    return (Path(sft).expanduser() / CONFIG).exists()


def _start_policy(alignment: Alignment) -> Figures:
    config, folder = alignment.config, alignment.folder
    figures: dict[str, Any] = {"start": "model"}
    if config.sft is not None and _is_adapter(config.sft):
        given = Path(config.sft).expanduser()
        adapter_settings(given)
        # Raises before anything is written if the adapter does not fit.
        load_base(alignment.model, alignment.seed, given)
        with atomic_folder(folder / FOLDER) as partial:
            for name in (CONFIG, WEIGHTS):
                shutil.copyfile(given / name, partial / name)
        figures = {"start": "adapter"}
    elif config.sft is not None:
        figures = {"start": "rows", **_fine_tune(alignment, config.sft)}
    adapter = folder / FOLDER
    start = adapter if adapter.exists() else None
    digest = model_digest(load_base(alignment.model, alignment.seed, start, alignment.needs))
    files.write(folder / FILE, json.dumps({**figures, "model": digest}, indent=1).encode() + b"\n")
    return figures


def _fine_tune(alignment: Alignment, sft: str) -> dict[str, Any]:
    """Fine-tune the base model on the responses of a file, and write the adapter."""
    config = alignment.config
    backbone: Backbone = load_base(alignment.model, alignment.seed, None)
    tokens = write_pairs(alignment, backbone, _responses(alignment, sft), "sft")
    if not len(tokens):
        raise DataError(
            f"[align] sft: every row of {sft} exceeds data.max_length = {alignment.data.max_length}; raise it"
        )
    trainer = PairTrainer(backbone, tokens, max_tokens=alignment.max_tokens, fast=alignment.model.fast)
    training = Training(
        stage="policy",
        rows=np.arange(len(tokens)),
        objective=Objective("sft"),
        optimizer=Optimizer("adamw", lr=config.sft_lr),
        batch_size=config.batch_size,
        epochs=config.sft_epochs,
        state=alignment.folder / STATE,
        remedy="lower align.sft_lr",
    )
    key = alignment.key.at("sft")
    tensors, history = train_epochs(trainer, training, key, alignment.callback, lambda epoch, now: {})
    save_adapter(backbone, tensors, alignment.folder / FOLDER)
    return {"rows": len(tokens), "losses": [epoch["loss"] for epoch in history]}


def _responses(alignment: Alignment, sft: str) -> Iterator[Record]:
    example = alignment.client_prompts().example
    for prompt, response in _rows(sft, alignment.data):
        if isinstance(prompt, str):
            prompt = as_prompt(prompt, example, raw=alignment.config.raw)
        yield Record(prompt, response, _NOBODY)


def _rows(sft: str, data: DataConfig) -> Iterator[tuple[Prompt, str]]:
    for row, location in read_prompts(Source(path=sft), data.encoding, data.format):
        if row.response is None or not row.response.strip():
            raise AlignError(f"{location}: no response to fine-tune on; add a column 'response'")
        yield row.prompt, row.response


def check_inputs(config: AlignConfig, data: DataConfig) -> None:
    """Check the files of prompts and of ``sft``, before clients train.

    Raises:
        DataError: a file is missing, or a row has no prompt.
        AlignError: a row has no response, or the adapter is not a plain LoRA.
    """
    for _ in islice(read_prompts(config.prompts, data.encoding, data.format), config.limit):
        pass
    if config.sft is not None and _is_adapter(config.sft):
        adapter_settings(Path(config.sft).expanduser())
    elif config.sft is not None:
        for _ in _rows(config.sft, data):
            pass


POLICY_STAGE = Stage("policy", ("clients",), _policy_settings, (FILE, FOLDER), _start_policy, (STATE,))
