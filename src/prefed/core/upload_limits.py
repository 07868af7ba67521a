"""The maximum number of bytes of an upload, from the tensors and numbers that it should have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from prefed.core import Layout
from prefed.core.lazy import torch
from prefed.core.wire import described

_ROOM = 1024
"""Bytes reserved for the fixed fields of a header."""
_NUMBER = 64
"""Bytes reserved for one number in a header; the longest float has 24 characters."""
_GROUP = 256
"""Bytes reserved for safetensors' entry of one group, without its name."""


def upload_limits(
    client: str, groups: Mapping[str, Layout], dtype: torch.dtype, scalars: Iterable[str]
) -> tuple[int, int]:
    """Return the maximum size of an upload in bytes: of its header, and of the whole message.

    >>> from prefed.core import Entry, Tensors, Upload
    >>> from prefed.core.wire import encode
    >>> groups = {"model": Layout((Entry("lora/0/A", (1, 2), "lora", 0, "A"),))}
    >>> data = encode(Upload("ward-7", 3, {"model": Tensors.zeros(groups["model"])}, {"loss": 0.5}, 1))
    >>> header, whole = upload_limits("ward-7", groups, torch.float32, ["loss"])
    >>> len(data) <= whole, whole - header - 8 == 2 * 4
    (True, True)
    """
    rows = {name: described(dtype, layout) for name, layout in groups.items()}
    numbers = list(scalars)
    # The header is JSON with a JSON string inside.
    header = len(json.dumps(json.dumps([client, rows, numbers]))) + _ROOM + _NUMBER * len(numbers)
    header += sum(_GROUP + len(json.dumps(name)) for name in groups)
    return header, 8 + header + dtype.itemsize * sum(layout.size for layout in groups.values())
