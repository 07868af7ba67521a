"""Reads JSON lines, JSON, CSV, TSV, Parquet and saved data sets by row. Each row has its location."""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from prefed.data.errors import DataError, ErrorCollector, RowLocation
from prefed.data.sources.folders import (
    NOT_TEXT,
    file_kind,
    saved_files,
    saved_rows,
)

Row: TypeAlias = "Mapping[str, Any]"

_BATCH = 512
_SEPARATORS = {",": re.compile(r"[;\t|]"), "\t": re.compile(r"[,;|]")}
"""The separator of a file → others, which its header shows where the file has another name than it should."""
_WIDE = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""The first bytes that mark an encoding. Longer ones come first, since a shorter one begins a longer one."""
_SPLIT_NAMES = {"train", "validation", "test"}
"""Lists under these names in one JSON file are splits, not clients."""
_LONGEST_FIELD = 1 << 28
"""Characters in a CSV field: it may hold a long dialogue. The default of ``csv`` is 131,072."""


def read_rows(path: Path, encoding: str, errors: ErrorCollector) -> Iterator[tuple[Row, RowLocation]]:
    """The rows of one file, read lazily.

    A row that is not an object, or not text in ``encoding``, is added to ``errors`` and left out.

    Raises:
        DataError: the file is truncated, or its content does not fit its name.
    """
    kind = "saved" if path.is_dir() else file_kind(path) or "lines"
    reader = _READERS[kind]
    try:
        yield from reader(path, encoding, errors)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: not a complete gzip file ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except LookupError as error:
        raise DataError(f"{path}: {error}") from error


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; of a saved data set those of its rows."""
    if path.is_dir():
        return hashlib.sha256("".join(map(sha256_of, saved_files(path))).encode()).hexdigest()
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _open(path: Path, encoding: str) -> BinaryIO:
    """Open a text file for reading bytes. Gzip is unpacked, whatever the name of the file.

    Raises:
        DataError: by its first bytes the file is not text, or is text in another encoding.
    """
    stream: Any = path.open("rb")
    try:
        if path.suffix.lower() == ".gz" or stream.peek(2)[:2] == b"\x1f\x8b":
            stream.close()
            stream = gzip.GzipFile(path, "rb")
        problem = _problem_of_head(stream.peek(4)[:4], encoding)
        if problem is not None:
            raise DataError(f"{path}: its first bytes indicate {problem}")
    except BaseException:
        stream.close()
        raise
    result: BinaryIO = stream
    return result


def _problem_of_head(head: bytes, encoding: str) -> str | None:
    """A description of a file by its first bytes, or ``None`` if it may be text in ``encoding``."""
    for magic, description in NOT_TEXT.items():
        if head.startswith(magic):
            return description
    if _is_wide(encoding):
        return None
    for magic, name in _WIDE.items():
        if head.startswith(magic):
            return f'{name.upper()} text: set encoding = "{name}"'
    if len(head) == 4 and head.count(0) == 2 and head[0] != head[1]:
        name = "utf-16-be" if head[0] == 0 else "utf-16-le"
        return f'{name.upper()} text: set encoding = "{name}"'
    return "binary data: it starts with zero bytes" if head and not any(head) else None


def _is_wide(encoding: str) -> bool:
    """Whether newline bytes can be part of a character in ``encoding``, as in UTF-16."""
    return "\n".encode(encoding)[-1:] != b"\n" or len("a".encode(encoding)) != 1


def _text(path: Path, encoding: str) -> Iterator[tuple[str, int, str | None]]:
    """Lines with their numbers, and an error message for those that cannot be decoded."""
    if _is_wide(encoding):
        yield from _wide_text(path, encoding)
        return
    with _open(path, encoding) as stream:
        for number, raw in enumerate(stream, 1):
            message = None
            try:
                line = raw.decode(encoding)
            except UnicodeDecodeError as error:
                line = raw.decode(encoding, errors="replace")
                message = (
                    f"not {encoding} text (byte 0x{raw[error.start]:02x} at position {error.start}); "
                    "set encoding to the file's, e.g. latin-1"
                )
            yield (line.removeprefix("\ufeff") if number == 1 else line), number, message


def _wide_text(path: Path, encoding: str) -> Iterator[tuple[str, int, None]]:
    # The text is decoded first: its lines cannot be told from the bytes.
    import io

    with _open(path, encoding) as stream, io.TextIOWrapper(stream, encoding, newline="") as text:
        number = 0
        try:
            for number, line in enumerate(text, 1):
                yield (line.removeprefix("\ufeff") if number == 1 else line), number, None
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, after row {number}: not {encoding} text ({error.reason})") from error


def _object(value: Any, location: RowLocation, errors: ErrorCollector) -> Iterator[tuple[Row, RowLocation]]:
    if isinstance(value, dict):
        yield value, location
    else:
        errors.add(location, f"a row must be an object with named columns, not {_type_name(value)}")


def _type_name(value: Any) -> str:
    names = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _lines(path: Path, encoding: str, errors: ErrorCollector) -> Iterator[tuple[Row, RowLocation]]:
    for line, number, message in _text(path, encoding):
        if not line.strip():
            continue
        location = RowLocation(str(path), number)
        if message is not None:
            errors.add(location, message)
            continue
        try:
            value = json.loads(line.rstrip("\r\n"))
        except json.JSONDecodeError as error:
            # Some of Python's messages end in "at".
            problem = error.msg.removesuffix(" at")
            errors.add(location, f"not JSON: {problem} at character {error.pos + 1}")
            continue
        except (ValueError, RecursionError) as error:
            errors.add(location, _unreadable(error))
            continue
        yield from _object(value, location, errors)


def _unreadable(error: ValueError | RecursionError) -> str:
    """The message for valid JSON that exceeds a limit of Python: depth, or the digits of a number."""
    # Python's own message goes on, after a semicolon, with how to raise the limit.
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]
    return f"not readable as JSON: {reason}"


def _json(path: Path, encoding: str, errors: ErrorCollector) -> Iterator[tuple[Row, RowLocation]]:
    """One list of objects, or one object with such a list per client; or JSON lines under the name ``.json``.

    All but lines are read as a whole. The rows of an object have the name of their client as ``client``.
    """
    for first, _, _ in _text(path, encoding):
        if first.strip():
            break
    else:
        return
    if not (first.lstrip().startswith("[") or first.strip() == "{" or _has_clients(first)):
        yield from _lines(path, encoding, errors)
        return
    with _open(path, encoding) as stream:
        raw = stream.read()
    try:
        values = json.loads(raw.decode(encoding).removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: not {encoding} text (byte 0x{raw[error.start]:02x})"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: {_unreadable(error)}") from error
    if isinstance(values, dict):
        if not _is_by_client(values):
            raise DataError(
                f"{path} holds one object; write rows as one object per line, as one list, "
                "[{…}, {…}], or as one list per client, {client: [{…}, {…}], …}"
            )
        values = [
            {"client": name, **row} if isinstance(row, dict) else row
            for name, rows in values.items()
            for row in rows
        ]
    for number, value in enumerate(values, 1):
        yield from _object(value, RowLocation(str(path), number), errors)


def _has_clients(line: str) -> bool:
    """Whether a line is an object with a list of rows for each of several clients."""
    try:
        return _is_by_client(json.loads(line))
    except (ValueError, RecursionError):
        return False


def _is_by_client(value: Any) -> bool:
    """Lists of objects under several names. A row may look alike: then its objects are messages."""
    if not isinstance(value, dict) or len(value) < 2 or value.keys() & _SPLIT_NAMES:
        return False
    lists = all(isinstance(rows, list) for rows in value.values())
    rows = [row for rows in value.values() for row in rows] if lists else []
    return any(isinstance(row, dict) for row in rows) and not any(
        isinstance(row, dict) and row.keys() & {"role", "from"} for row in rows
    )


def _csv(
    path: Path, encoding: str, errors: ErrorCollector, separator: str = ","
) -> Iterator[tuple[Row, RowLocation]]:
    csv.field_size_limit(_LONGEST_FIELD)
    line = 0
    # Such a line may be in the middle of a quoted field. Then its whole row is left out.
    undecodable: list[tuple[RowLocation, str]] = []

    def lines() -> Iterator[str]:
        nonlocal line
        for text, number, message in _text(path, encoding):
            line = number
            if message is not None:
                undecodable.append((RowLocation(str(path), number), message))
            yield text

    reader = csv.reader(lines(), delimiter=separator, strict=True)
    header: list[str] | None = None
    while True:
        before = line
        try:
            values = next(reader, None)
        except csv.Error as error:
            raise DataError(f"{path}, row {before + 1}: not CSV: {error}") from error
        if values is None:
            return
        # Spreadsheets write a line of separators for a row without anything in it.
        if not any(values):
            continue
        location = RowLocation(str(path), before + 1)
        if undecodable:
            location, message = undecodable[0]
            undecodable.clear()
            if header is None:
                raise DataError(f"{location}: {message}")
            errors.add(location, message)
        elif header is None:
            header = values
            if len(header) == 1 and (other := _SEPARATORS[separator].search(header[0])):
                own = "commas" if separator == "," else "tabs"
                rename = {"\t": "; rename the file to .tsv", ",": "; rename the file to .csv"}
                raise DataError(
                    f"{path}: the header is a single field, {header[0]!r}; separate fields by {own}, not by "
                    f"{other[0]!r}{rename.get(other[0], '')}"
                )
            repeated = {name for name in header if header.count(name) > 1}
            if repeated:
                raise DataError(f"{path}: the header names {', '.join(sorted(repeated))} twice")
        elif len(values) != len(header):
            errors.add(location, f"{len(values)} fields, but the header has {len(header)}")
        else:
            # An empty CSV field means that the value is absent: CSV has no other way to write that.
            row = {name: value if value else None for name, value in zip(header, values, strict=True)}
            yield row, location


def _parquet(path: Path, encoding: str, errors: ErrorCollector) -> Iterator[tuple[Row, RowLocation]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=_BATCH):
                try:
                    rows = batch.to_pylist()
                except (ValueError, OverflowError):
                    rows = [None] * len(batch)
                for k, row in enumerate(rows):
                    number += 1
                    location = RowLocation(str(path), number)
                    try:
                        if row is None:
                            columns = zip(batch.schema.names, batch.columns, strict=True)
                            row = {name: _value(column[k]) for name, column in columns}
                    except UnicodeDecodeError as error:
                        errors.add(location, f"not UTF-8 text ({error.reason})")
                        continue
                    yield row, location
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}, after row {number}: not a complete Parquet file ({error})") from error


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        raise
    except (ValueError, OverflowError):
        # A time that Python cannot represent. No column in use may be a time, so the value counts as absent.
        return None


def _saved(path: Path, encoding: str, errors: ErrorCollector) -> Iterator[tuple[Row, RowLocation]]:
    for number, row in enumerate(saved_rows(path), 1):
        yield row, RowLocation(str(path), number)


_READERS: Mapping[str, Callable[[Path, str, ErrorCollector], Iterator[tuple[Row, RowLocation]]]] = {
    "lines": _lines,
    "json": _json,
    "csv": _csv,
    "tsv": partial(_csv, separator="\t"),
    "parquet": _parquet,
    "saved": _saved,
}
