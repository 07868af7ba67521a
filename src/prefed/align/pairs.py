"""Pairs of the server, tokenised for a policy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prefed.align.alignment import Alignment
from prefed.data import PolicyEncoder, Record, Template, TokenSet
from prefed.data.templates import Tokenizer
from prefed.data.writer import write_records


def cache(alignment: Alignment) -> Path:
    """The folder of what can be made again."""
    return alignment.folder / "cache"


def write_pairs(alignment: Alignment, tokenizer: Tokenizer, records: Iterable[Record], name: str) -> TokenSet:
    """Tokenise ``records`` into the folder ``name`` of the cache.

    :attr:`TokenSet.rows` are the records' numbers, from 1. A pair whose response leaves no room for its
    prompt within ``data.max_length`` is left out.

    Raises:
        DataError: the chat template refuses a record.
    """
    data = alignment.data
    encoder = PolicyEncoder(
        tokenizer, Template(tokenizer, data.template), max_length=data.max_length, too_long="drop"
    )
    return write_records(cache(alignment) / name, encoder, records, name)
