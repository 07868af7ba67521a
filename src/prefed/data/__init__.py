"""Preference data: records, sources, partitions, and tokens on disk."""

from typing import TYPE_CHECKING

from prefed.core.lazy import attach

if TYPE_CHECKING:
    from prefed.data.build import build_dataset, make_encoder
    from prefed.data.choices import ChoiceEncoder, ChoiceTemplate, write_choices
    from prefed.data.config import Columns, DataConfig, Partition, SelectorConfig, Source
    from prefed.data.dataset import ClientData, ClientSizes, FederatedDataset, RowCounts
    from prefed.data.encoding import Encoder, PolicyEncoder, Template, dialogue, instruction
    from prefed.data.errors import DataError, DataMismatchError
    from prefed.data.record import Message, Prompt, Record
    from prefed.data.response_encoder import ResponseEncoder
    from prefed.data.sources import FORMATS
    from prefed.data.tokens import Pair, TokenSet, TokenWriter

__all__ = [
    "FORMATS",
    "ChoiceEncoder",
    "ChoiceTemplate",
    "ClientData",
    "ClientSizes",
    "Columns",
    "DataConfig",
    "DataError",
    "DataMismatchError",
    "Encoder",
    "FederatedDataset",
    "Message",
    "Pair",
    "Partition",
    "PolicyEncoder",
    "Prompt",
    "Record",
    "ResponseEncoder",
    "RowCounts",
    "SelectorConfig",
    "Source",
    "Template",
    "TokenSet",
    "TokenWriter",
    "build_dataset",
    "dialogue",
    "instruction",
    "make_encoder",
    "write_choices",
]

attach(__name__, __file__)
