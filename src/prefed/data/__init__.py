"""Preferences: records, sources, tokens on disk, and who holds what."""

from prefed.data.build import federate
from prefed.data.config import Columns, DataConfig, Partition, Source, resolve
from prefed.data.errors import DataError, OtherDataError
from prefed.data.federation import ClientData, Federation, Report
from prefed.data.record import Message, Prompt, Record
from prefed.data.sources import FORMATS
from prefed.data.templates import Template, dialogue
from prefed.data.tokens import Pair, TokenSet
from prefed.data.writer import TokenWriter

__all__ = [
    "FORMATS",
    "ClientData",
    "Columns",
    "DataConfig",
    "DataError",
    "Federation",
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
    "dialogue",
    "federate",
    "resolve",
]
