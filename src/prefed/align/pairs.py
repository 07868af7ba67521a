"""Pairs of the server, tokenised for a policy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prefed.align.alignment import Alignment
from prefed.data import PolicyEncoder, Record, Template, TokenSet
from prefed.data.writer import write_records
from prefed.models import Backbone
from prefed.train.trainer_factory import longest_input


def cache(alignment: Alignment) -> Path:
    """The folder of what can be made again."""
    return alignment.folder / "cache"


def write_pairs(alignment: Alignment, backbone: Backbone, records: Iterable[Record], name: str) -> TokenSet:
    """Tokenise ``records`` into the folder ``name`` of the cache.

    :attr:`TokenSet.rows` are the records' numbers, from 1. A pair whose response leaves no room for its
    prompt within ``data.max_length``, or within the model's context, is left out.

    Raises:
        DataError: the chat template refuses a record.
    """
    data, tokenizer = alignment.data, backbone.tokenizer
    encoder = PolicyEncoder(
        tokenizer,
        Template(tokenizer, data.template),
        max_length=longest_input(backbone, data.max_length),
        too_long="drop",
    )
    return write_records(cache(alignment) / name, encoder, records, name)
