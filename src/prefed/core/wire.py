"""Serialisation of messages and states: safetensors with a JSON header. Nothing is ever unpickled.

Each group of tensors is one flat safetensors tensor; the header contains names and shapes. Values that JSON
would change (a tuple, a non-string key) are rejected. Therefore ``decode(encode(m))`` is ``m`` bit for bit,
and equal messages have equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any, TypeVar, cast

import safetensors

from prefed.core import OPTIMIZER, Download, Entry, Layout, Plain, State, Tensors, Upload
from prefed.core.lazy import torch

FORMAT = 1
_FLOATING = {"float32", "float64", "float16", "bfloat16"}
_ROOM = 1024
"""Bytes reserved for the fixed fields of a header."""
_NUMBER = 64
"""Bytes reserved for one number in a header; the longest float has 24 characters."""
_GROUP = 256
"""Bytes reserved for safetensors' entry of one group, without its name."""

T = TypeVar("T")


class WireError(ValueError):
    """Bytes are not a valid message, or a message contains a value that cannot be encoded."""


def encode(message: State | Download | Upload, keep: torch.dtype | None = None) -> bytes:
    """Encode ``message``.

    Args:
        keep: dtype in which floating-point tensors are stored; decoding restores the original dtype, with
            rounded values. By default every bit is stored. Optimiser state is always stored in full, because
            squared gradients vanish in fewer bits.

    Raises:
        WireError: JSON would change a plain value.

    >>> layout = Layout((Entry("lora/0/A", (1, 2), "lora", 0, "A"),))
    >>> state = State({"model": Tensors(layout, torch.tensor([1.0, -0.0]))}, {"seen": ["a", 1, None]})
    >>> back = decode_state(encode(state))
    >>> back.tensors["model"].equal(state.tensors["model"]), back.values["seen"]
    (True, ['a', 1, None])
    """
    kind = type(message).__name__.lower()
    plain = {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in vars(message).items()
        if name != "tensors"
    }
    _check_plain(plain, kind)
    groups, buffers, storages = {}, {}, set()
    for name, tensors in message.tensors.items():
        flat = tensors.flat.cpu().contiguous()
        groups[name] = described(flat.dtype, tensors.layout)
        flat = flat.to(stored_dtype(name, flat.dtype, keep))
        # Two groups of one state may share memory, which safetensors rejects.
        if flat.untyped_storage().data_ptr() in storages:
            flat = flat.clone()
        storages.add(flat.untyped_storage().data_ptr())
        buffers[name] = flat
    text = json.dumps({"format": FORMAT, "kind": kind, "groups": groups, **plain}, separators=(",", ":"))
    from safetensors.torch import save

    data: bytes = save(buffers, {"prefed": text})
    return data


def stored_dtype(group: str, dtype: torch.dtype, keep: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which :func:`encode` stores a group with the given ``dtype`` and ``keep``."""
    if keep is None or not dtype.is_floating_point or group.startswith(OPTIMIZER):
        return dtype
    return keep


def decode_state(data: bytes) -> State:
    """Decode a state from :func:`encode`.

    Raises:
        WireError: ``data`` is damaged or not a state.
    """
    # States are prefed's own, so that nobody else can fill the cache of layouts.
    header, groups = _open(data, "state", _layout)
    return State(groups, _field(header, "values", dict))


def decode_download(data: bytes) -> Download:
    """Decode a download from :func:`encode`. Raises as :func:`decode_state`."""
    header, groups = _open(data, "download")
    return Download(groups, _scalars(header))


def decode_upload(data: bytes, most: tuple[int, int] | None = None) -> Upload:
    """Decode an upload from :func:`encode`. Raises as :func:`decode_state`.

    Args:
        most: limits from :func:`upload_limits`. Longer messages are rejected
            before they are parsed.
    """
    if most is not None:
        length = int.from_bytes(data[:8], "little")
        for what, size, limit in (("bytes", len(data), most[1]), ("bytes of header", length, most[0])):
            if size > limit:
                raise WireError(f"the message has {size:,} {what}; expected at most {limit:,}")
    header, groups = _open(data, "upload")
    weight = header.get("weight")
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise WireError("damaged message: 'weight' is missing or not a number")
    return Upload(
        _field(header, "client", str), weight, groups, _scalars(header), _field(header, "sent_at", int)
    )


def outline_upload(data: bytes) -> tuple[dict[str, int], float, dict[str, float]]:
    """Read the header of a trusted upload, without decoding tensors.

    Returns:
        Number of elements of each group, the weight, and the numbers by name.

    Raises:
        WireError: the header is invalid.
    """
    header = _header(data, "upload")
    rows = {name: row[1] for name, row in _field(header, "groups", dict).items()}
    return {n: _read_layout(json.dumps(r)).size for n, r in rows.items()}, header["weight"], _scalars(header)


def upload_limits(
    client: str, groups: Mapping[str, Layout], dtype: torch.dtype, scalars: Collection[str]
) -> tuple[int, int]:
    """Return the maximum size of an upload in bytes: of its header, and of the whole message.

    >>> groups = {"model": Layout((Entry("lora/0/A", (1, 2), "lora", 0, "A"),))}
    >>> data = encode(Upload("ward-7", 3, {"model": Tensors.zeros(groups["model"])}, {"loss": 0.5}, 1))
    >>> header, whole = upload_limits("ward-7", groups, torch.float32, ["loss"])
    >>> len(data) <= whole, whole - header - 8 == 2 * 4
    (True, True)
    """
    rows = {name: described(dtype, layout) for name, layout in groups.items()}
    # The header is JSON with a JSON string inside.
    header = len(json.dumps(json.dumps([client, rows, list(scalars)]))) + _ROOM + _NUMBER * len(scalars)
    header += sum(_GROUP + len(json.dumps(name)) for name in groups)
    return header, 8 + header + dtype.itemsize * sum(layout.size for layout in groups.values())


def _open(
    data: bytes, kind: str, layout_of: Callable[[str], Layout] | None = None
) -> tuple[dict[str, Any], dict[str, Tensors]]:
    from safetensors.torch import load

    header = _header(data, kind)
    try:
        buffers = load(data)
    # PyTorch raises RuntimeError for an impossible shape.
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise WireError(f"not a prefed message ({len(data)} bytes): {error}") from error
    described = _field(header, "groups", dict)
    if set(described) != set(buffers):
        raise WireError("damaged message: header and tensors have different groups")
    groups = {}
    for name, description in described.items():
        try:
            dtype, rows = description
            layout = (layout_of or _read_layout)(json.dumps(rows))
            if dtype not in _FLOATING and dtype != _text(buffers[name].dtype):
                raise ValueError(f"unexpected dtype {dtype}")
            groups[name] = Tensors(layout, buffers[name].to(getattr(torch, dtype)))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise WireError(f"damaged message: group {name!r}: {error}") from error
    return header, groups


def _header(data: bytes, kind: str) -> dict[str, Any]:
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["prefed"])
    # A RecursionError is a RuntimeError.
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise WireError(f"not a prefed message ({len(data)} bytes): {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise WireError(f"the message is not in format {FORMAT}: it is from another version of prefed")
    if header.get("kind") != kind:
        raise WireError(f"the message is of kind {header.get('kind')!r}; expected {kind!r}")
    return header


def _read_layout(rows: str) -> Layout:
    return Layout(
        tuple(
            Entry(str(name), tuple(int(n) for n in shape), str(part), block, factor)
            for name, shape, part, block, factor in json.loads(rows)
        )
    )


_layout = lru_cache(maxsize=64)(_read_layout)


def described(dtype: torch.dtype, layout: Layout) -> list[Plain]:
    """Return the description of a group of tensors in a header."""
    rows: list[Plain] = [[e.name, list(e.shape), e.part, e.block, e.factor] for e in layout.entries]
    return [_text(dtype), rows]


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _field(header: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = header.get(name)
    if not isinstance(value, kind):
        raise WireError(f"damaged message: {name!r} is missing or not a {kind.__name__}")
    return value


def _scalars(header: Mapping[str, Any]) -> dict[str, float]:
    scalars = _field(header, "scalars", dict)
    for name, value in scalars.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WireError(f"damaged message: scalar {name!r} is not a number")
    return cast("dict[str, float]", scalars)


def _check_plain(value: object, where: str) -> None:
    """Reject values that JSON would change."""
    if value is None or isinstance(value, str | bool | int | float):
        return
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise WireError(f"{where}: key {key!r} is not a string")
            _check_plain(item, f"{where}.{key}")
    else:
        raise WireError(
            f"{where}: JSON cannot store type {type(value).__name__} without loss; "
            "use None, bool, int, float, str, list or dict"
        )
