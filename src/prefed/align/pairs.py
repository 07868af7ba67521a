"""Pairs of the server, tokenised for a policy."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from prefed import files
from prefed.align.alignment import Alignment
from prefed.data import PolicyEncoder, Record, TokenSet, TokenWriter
from prefed.data.errors import ErrorCollector, RowLocation
from prefed.data.templates import Template, Tokenizer


def write_pairs(
    alignment: Alignment, tokenizer: Tokenizer, records: Iterable[Record], name: str
) -> tuple[TokenSet, Path]:
    """Tokenise ``records`` into ``cache/NAME`` of the alignment's folder, and give that folder too.

    :attr:`TokenSet.rows` are the records' numbers, from 1. A pair whose response leaves no room for its
    prompt within ``data.max_length`` is left out.

    Raises:
        DataError: the chat template refuses a record.
    """
    folder = alignment.folder / "cache" / name
    shutil.rmtree(folder, ignore_errors=True)
    files.private_folder(folder)
    data, errors = alignment.data, ErrorCollector()
    encoder = PolicyEncoder(
        tokenizer, Template(tokenizer, data.template), max_length=data.max_length, too_long="drop"
    )
    writer = TokenWriter(folder, encoder, errors=errors)
    try:
        for number, record in enumerate(records, 1):
            writer.add(record, RowLocation(name, number))
        writer.flush()
        errors.raise_if_any()
        writer.finish()
    finally:
        writer.close()
    return TokenSet(folder), folder
