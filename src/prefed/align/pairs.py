"""Pairs of the server, tokenised for a policy."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from prefed import files
from prefed.align.alignment import Alignment
from prefed.data import PolicyEncoder, Record, TokenSet, TokenWriter
from prefed.data.errors import ErrorCollector, RowLocation
from prefed.data.templates import Template
from prefed.models import Backbone
from prefed.train.trainer_factory import longest_input


def write_pairs(
    alignment: Alignment, backbone: Backbone, records: Iterable[Record], name: str
) -> tuple[TokenSet, Path]:
    """Tokenise ``records`` into ``cache/NAME`` of the alignment's folder, and give that folder too.

    :attr:`TokenSet.rows` are the records' numbers, from 1. A pair whose response leaves no room for its
    prompt within ``data.max_length``, or within the model's context, is left out.

    Raises:
        DataError: the chat template refuses a record.
    """
    folder = alignment.folder / "cache" / name
    shutil.rmtree(folder, ignore_errors=True)
    files.private_folder(folder)
    data, errors, tokenizer = alignment.data, ErrorCollector(), backbone.tokenizer
    encoder = PolicyEncoder(
        tokenizer,
        Template(tokenizer, data.template),
        max_length=longest_input(backbone, data.max_length),
        too_long="drop",
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
