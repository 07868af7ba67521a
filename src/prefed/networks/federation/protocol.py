"""What hub and site say to each other: the form of a request, and what both must have alike."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from typing import Any

from prefed.core import files

FORMAT = 1
"""Of requests and answers. A hub and a site of two formats do not work together."""
HEADER = 1 << 24
"""Bytes of the longest header of a message that is read: a hundred thousand clients' names fit."""
PACKAGES = ("prefed", "torch", "transformers")
"""A site tells its versions of these. That of prefed must be the hub's."""


def pack(body: bytes = b"", **header: Any) -> bytes:
    """A JSON header and bytes, as one message.

    >>> unpack(pack(b"tensors", kind="visit", round=3))
    ({'kind': 'visit', 'round': 3}, b'tensors')
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + body


def unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    """What :func:`pack` made.

    Raises:
        ValueError: it is no such message.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < max(8, end):
        raise ValueError(f"not a message: {len(data):,} bytes")
    if end > 8 + HEADER:
        raise ValueError(f"not a message: {end:,} bytes of header")
    try:
        header = json.loads(data[8:end])
    except RecursionError as error:
        raise ValueError("not a message: its header is nested too deep") from error
    if not isinstance(header, dict):
        raise ValueError("not a message: its header is no object")
    return header, data[end:]


def is_run(text: str) -> bool:
    """Whether a text has the form of a run's name between hub and sites.

    >>> is_run("3fa9b2c4d5e6f708"), is_run("../../etc")
    (True, False)
    """
    return re.fullmatch(r"[0-9a-f]{16}", text) is not None


def order_digest(experiment: str, members: list[str], unseen: list[str]) -> str:
    """A digest of what a site was told of a run: with another one it must be told again."""
    return files.digest(json.dumps([experiment, members, unseen]).encode())


def own_version(name: str) -> str:
    """The version of a package here, without what says how it was built."""
    return version(name).partition("+")[0]
