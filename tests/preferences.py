"""Tokenizers and files for the data tests, made in place."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from prefed.core import Key
from prefed.data import DataConfig, Record
from prefed.data.errors import ErrorCollector
from prefed.data.sources import ReadCounts, read_records
from prefed.data.synthetic import corpus

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(*, bos: bool = False, chat: str | None = None, eos: str | None = "<eos>") -> Any:
    """One token per byte, so that lengths are known: ids 0 to 4 are special, and byte tokens follow.

    Args:
        bos: put ``<bos>`` before every text, as Llama's tokenizers do.
        chat: a chat template.
        eos: the end-of-text token.
    """
    special = ["<eos>", "<bos>", "<pad>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: k for k, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos,
        bos_token="<bos>" if bos else None,
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = chat
    return tokenizer


def merging() -> Any:
    """A byte-level BPE of 400 tokens trained on the synthetic grammar; ``<eos>`` is 0."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus(Key(0), 300), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")


def jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def pairs(count: int, **columns: Any) -> list[dict[str, Any]]:
    """Rows of different prompts; a column given as a function gets the row's number."""
    return [
        {
            "prompt": f"Q{k}:",
            "chosen": f" yes {k}",
            "rejected": f" no {k}",
            **{name: value(k) if callable(value) else value for name, value in columns.items()},
        }
        for k in range(count)
    ]


def read_source(source: Any, **settings: Any) -> tuple[list[Record], ReadCounts, ErrorCollector]:
    """The records of a source, a path or a table, the counts of its rows, and what was wrong with those
    that ``invalid = "drop"`` left out."""
    train = source if isinstance(source, Mapping) else str(source)
    config = DataConfig(train=train, partition={"by": "iid", "clients": 1}, **settings)
    errors, counts = ErrorCollector(count_only=config.invalid == "drop"), ReadCounts()
    records = [record for record, _ in read_records(config.train, config, "train", None, errors, counts)]
    errors.raise_if_any()
    return records, counts, errors
