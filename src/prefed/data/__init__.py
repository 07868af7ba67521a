"""Preferences: records, sources, tokens on disk, and who holds what."""

from typing import TYPE_CHECKING

from prefed.core.lazy import attach

if TYPE_CHECKING:
    from prefed.data.build import build_dataset
    from prefed.data.config import Columns, DataConfig, Partition, Source, resolve
    from prefed.data.dataset import ClientData, ClientSizes, FederatedDataset, Report
    from prefed.data.errors import DataError, OtherDataError
    from prefed.data.record import Message, Prompt, Record
    from prefed.data.sources import FORMATS
    from prefed.data.templates import Template, dialogue
    from prefed.data.tokens import Pair, TokenSet
    from prefed.data.writer import TokenWriter

__all__ = [
    "FORMATS",
    "ClientData",
    "ClientSizes",
    "Columns",
    "DataConfig",
    "DataError",
    "FederatedDataset",
    "Message",
    "OtherDataError",
    "Pair",
    "Partition",
    "Prompt",
    "Record",
    "Report",
    "Source",
    "Template",
    "TokenSet",
    "TokenWriter",
    "build_dataset",
    "dialogue",
    "resolve",
]

__getattr__ = attach(__name__, __file__)
