"""Messages and states as bytes: safetensors with a JSON header. Nothing is ever unpickled.

One group of tensors is one flat safetensors tensor; the header has the names and shapes in it. A value that
JSON would change (a tuple, a key that is not text) is refused. So ``decode(encode(m))`` is ``m`` bit for bit,
and equal messages have equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar, cast

import safetensors

from prefed.core import OPTIMIZER, Download, Entry, Layout, Plain, State, Tensors, Upload
from prefed.core.lazy import torch

FORMAT = 1
_ROOM = 1024
"""Bytes of a header for its fixed fields."""
_NUMBER = 64
"""Bytes of a header for one number; the longest float has 24 characters."""
_GROUP = 256
"""Bytes of safetensors' own entry for one group, without its name."""
_FLOATING = {"float32", "float64", "float16", "bfloat16"}

T = TypeVar("T")


class WireError(ValueError):
    """Bytes are no message of this format, or a message cannot carry a value."""


def encode(message: State | Download | Upload, keep: torch.dtype | None = None) -> bytes:
    """``message`` as bytes.

    Args:
        keep: dtype in which floating-point tensors are stored; decoding gives their own dtype again, rounded.
            If it is left out, every bit is stored. The memory of optimisers is always stored in full, as
            squares of gradients vanish in fewer bits.

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
        groups[name] = [_text(flat.dtype), [_row(entry) for entry in tensors.layout.entries]]
        flat = flat.to(stored_dtype(name, flat.dtype, keep))
        # Two groups of one state may share memory, and safetensors refuses such tensors.
        if flat.untyped_storage().data_ptr() in storages:
            flat = flat.clone()
        storages.add(flat.untyped_storage().data_ptr())
        buffers[name] = flat
    header = {"format": FORMAT, "kind": kind, "groups": groups, **plain}
    text = json.dumps(header, separators=(",", ":"))
    from safetensors.torch import save

    data: bytes = save(buffers, {"prefed": text})
    return data


def stored_dtype(group: str, dtype: torch.dtype, keep: torch.dtype | None) -> torch.dtype:
    """The dtype in which :func:`encode` stores a group of ``dtype``; see its argument ``keep``."""
    if keep is None or not dtype.is_floating_point or group.startswith(OPTIMIZER):
        return dtype
    return keep


def upload_limits(
    client: str, groups: Mapping[str, Layout], dtype: torch.dtype, scalars: Iterable[str]
) -> tuple[int, int]:
    """The most bytes that the header of an upload may have, and the most that the whole upload may have.

    Args:
        groups: the layouts of its groups.
        dtype: of their tensors.
        scalars: the names of its numbers.

    >>> groups = {"model": Layout((Entry("lora/0/A", (1, 2), "lora", 0, "A"),))}
    >>> data = encode(Upload("ward-7", 3, {"model": Tensors.zeros(groups["model"])}, {"loss": 0.5}, 1))
    >>> header, whole = upload_limits("ward-7", groups, torch.float32, ["loss"])
    >>> len(data) <= whole, whole - header - 8 == 2 * 4
    (True, True)
    """
    rows = {
        name: [_text(dtype), [_row(entry) for entry in layout.entries]] for name, layout in groups.items()
    }
    numbers = list(scalars)
    # The header is JSON, and one string in it is JSON again.
    header = len(json.dumps(json.dumps([client, rows, numbers]))) + _ROOM + _NUMBER * len(numbers)
    header += sum(_GROUP + len(json.dumps(name)) for name in groups)
    return header, 8 + header + dtype.itemsize * sum(layout.size for layout in groups.values())


def decode_state(data: bytes) -> State:
    """The state that :func:`encode` wrote.

    Raises:
        WireError: ``data`` is damaged or holds something else.
    """
    header, groups = _open(data, "state")
    return State(groups, _field(header, "values", dict))


def decode_download(data: bytes) -> Download:
    """The download that :func:`encode` wrote; raises as :func:`decode_state` does."""
    header, groups = _open(data, "download")
    return Download(groups, _scalars(header))


def decode_upload(data: bytes, most: tuple[int, int] | None = None) -> Upload:
    """The upload that :func:`encode` wrote; raises as :func:`decode_state` does.

    Args:
        most: from :func:`upload_limits`. A longer message is refused before it is read.
    """
    if most is not None:
        length = int.from_bytes(data[:8], "little")
        for what, size, limit in (("bytes", len(data), most[1]), ("bytes of header", length, most[0])):
            if size > limit:
                raise WireError(f"a message of {size:,} {what}; expected at most {limit:,}")
    # No cache of layouts here: clients could fill it.
    header, groups = _open(data, "upload", _read_layout)
    weight = header.get("weight")
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise WireError("damaged message: 'weight' is missing or not a number")
    return Upload(
        _field(header, "client", str), weight, groups, _scalars(header), _field(header, "sent_at", int)
    )


def outline_upload(data: bytes) -> tuple[dict[str, int], float, dict[str, float]]:
    """What an upload of this process's own holds, without a copy of its tensors.

    Returns:
        How many numbers each group's tensors have, the weight, and the numbers by name.

    Raises:
        WireError: as :func:`decode_state`, as far as the header goes.
    """
    header = _header(data, "upload")
    rows = {name: row[1] for name, row in _field(header, "groups", dict).items()}
    return {n: _read_layout(json.dumps(r)).size for n, r in rows.items()}, header["weight"], _scalars(header)


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
        raise WireError("damaged message: its header and its tensors name different groups")
    groups = {}
    for name, description in described.items():
        try:
            dtype, rows = description
            layout = (layout_of or _layout)(json.dumps(rows))
            if dtype not in _FLOATING and dtype != _text(buffers[name].dtype):
                raise ValueError(f"unexpected dtype {dtype}")
            groups[name] = Tensors(layout, buffers[name].to(getattr(torch, dtype)))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise WireError(f"damaged message: group {name!r}: {error}") from error
    return header, groups


def _header(data: bytes, kind: str) -> dict[str, Any]:
    """The header of a message of this kind; no tensor is read."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["prefed"])
    # A RecursionError is a RuntimeError.
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise WireError(f"not a prefed message ({len(data)} bytes): {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise WireError(f"a message of a format other than {FORMAT}, from another version of prefed")
    if header.get("kind") != kind:
        raise WireError(f"expected a message of kind {kind!r}, found {header.get('kind')!r}")
    return header


def _read_layout(rows: str) -> Layout:
    return Layout(
        tuple(
            Entry(str(name), tuple(int(n) for n in shape), str(part), block, factor)
            for name, shape, part, block, factor in json.loads(rows)
        )
    )


_layout = lru_cache(maxsize=64)(_read_layout)


def _row(entry: Entry) -> list[Plain]:
    return [entry.name, list(entry.shape), entry.part, entry.block, entry.factor]


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
    """Refuse a value that JSON would change."""
    if value is None or isinstance(value, str | bool | int | float):
        return
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise WireError(f"{where}: key {key!r} is not text")
            _check_plain(item, f"{where}.{key}")
    else:
        raise WireError(
            f"{where}: a {type(value).__name__} cannot be stored in JSON without loss; "
            "use None, bool, int, float, str, list or dict"
        )
