"""Read the rows of JSON lines, JSON, CSV, TSV and Parquet files and of saved datasets, with locations."""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from prefed.data.errors import DataError, ErrorCollector, RowLocation, require
from prefed.data.sources.folders import NOT_TEXT, file_kind, saved_files, saved_rows

Row: TypeAlias = "Mapping[str, Any]"

_BATCH = 512
_SEPARATORS = (",", ";", "\t", "|")
"""What may separate the fields of a CSV file: Excel writes semicolons where a comma is the decimal mark."""
_WIDE = {
    **{codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"},
    **{codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"},
}
"""Byte order marks. Longer ones come first, since a shorter one is the beginning of a longer one."""


def read_rows(path: Path, encoding: str, errors: ErrorCollector) -> Iterator[tuple[Row, RowLocation]]:
    """Read the rows of one file lazily.

    Rows that are not objects, or not text in ``encoding``, are added to ``errors`` and skipped.

    Raises:
        DataError: the file is truncated, or its content does not match its name.
    """
    kind = "saved" if path.is_dir() else file_kind(path) or "lines"
    try:
        yield from _READERS[kind](path, encoding, errors)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: incomplete gzip file ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except LookupError as error:
        raise DataError(f"{path}: {error}") from error


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file, or of the row files of a saved dataset."""
    if path.is_dir():
        return hashlib.sha256("".join(map(sha256_of, saved_files(path))).encode()).hexdigest()
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _open(path: Path, encoding: str) -> BinaryIO:
    """Open a text file as bytes. Gzip is decompressed regardless of the file name.

    Raises:
        DataError: the first bytes indicate another type of file or another encoding.
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
    return cast("BinaryIO", stream)


def _problem_of_head(head: bytes, encoding: str) -> str | None:
    """Describe a file by its first bytes, or return ``None`` if it may be text in ``encoding``."""
    for magic, description in NOT_TEXT.items():
        if head.startswith(magic):
            return description
    if head.startswith(codecs.BOM_UTF8) and not codecs.lookup(encoding).name.startswith("utf-8"):
        return f'UTF-8 text: set encoding = "utf-8" instead of {encoding!r}'
    if _is_wide(encoding):
        return None
    for magic, name in _WIDE.items():
        if head.startswith(magic):
            return f'{name.upper()} text: set encoding = "{name}"'
    if len(head) == 4 and head.count(0) == 2 and head[0] != head[1]:
        name = "utf-16-be" if head[0] == 0 else "utf-16-le"
        return f'{name.upper()} text: set encoding = "{name}"'
    return "binary data, since it starts with zero bytes" if head and not any(head) else None


def _is_wide(encoding: str) -> bool:
    """Whether a newline byte can be part of a character in ``encoding``, as in UTF-16."""
    return "\n".encode(encoding)[-1:] != b"\n" or len("a".encode(encoding)) != 1


def text_lines(path: Path, encoding: str) -> Iterator[tuple[str, int, str | None]]:
    """Yield each line with its number, and an error message if it cannot be decoded.

    Raises:
        DataError: the first bytes indicate another type of file or another encoding.
    """
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
                byte = f"byte 0x{raw[error.start]:02x} at position {error.start}"
                message = f"not {encoding} text ({byte}); {_remedy(raw)}"
            yield (line.removeprefix("\ufeff") if number == 1 else line), number, message


def _wide_text(path: Path, encoding: str) -> Iterator[tuple[str, int, None]]:
    # Decode first: the bytes do not show where lines end.
    with _open(path, encoding) as stream, io.TextIOWrapper(stream, encoding, newline="") as text:
        number = 0
        try:
            for number, line in enumerate(text, 1):
                yield (line.removeprefix("\ufeff") if number == 1 else line), number, None
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, after row {number}: not {encoding} text ({error.reason})") from error


def _remedy(raw: bytes) -> str:
    """Suggest the encoding of a text: Windows-1252 contains Latin-1 without its control characters."""
    try:
        raw.decode("cp1252")
    except UnicodeDecodeError:
        return "set the encoding of the file"
    return 'set encoding = "cp1252" if Windows or Excel wrote it in Western Europe, or save it as UTF-8'


def _object(value: Any, location: RowLocation, errors: ErrorCollector) -> Iterator[tuple[Row, RowLocation]]:
    if isinstance(value, dict):
        if _is_whole_table(value):
            raise DataError(
                f"{location}: a whole table in one object, as pandas writes by default; write one object per "
                'row: to_json(FILE, orient="records", lines=True)'
            )
        yield value, location
    else:
        errors.add(location, f"a row must be an object with named columns, not {type_name(value)}")


def _is_whole_table(value: dict[str, Any]) -> bool:
    """Whether a value is a table of pandas: objects by number, by column or by row, or lists in ``data``."""
    if value.keys() & {"columns", "schema"} and isinstance(value.get("data"), list):
        return True
    inner = [*value.values()]
    if not inner or not all(isinstance(each, dict) and each.keys() == inner[0].keys() for each in inner):
        return False
    return any(names and all(map(str.isdecimal, names)) for names in (value, inner[0]))


def unmarked(row: Row) -> Iterable[tuple[str, Any]]:
    """Return the columns and values of a row without marking them as read."""
    return dict.items(row) if isinstance(row, dict) else row.items()


def peek(row: Row, name: str) -> Any:
    """Return the value of a column, or ``None``, without marking it as read."""
    return dict.get(row, name) if isinstance(row, dict) else row.get(name)


def has_value(value: Any) -> bool:
    """Whether a value contains anything but ``None``, blank texts and empty lists and objects.

    >>> [has_value(value) for value in (None, " ", "[]", [{"path": None}], 0, "a")]
    [False, False, False, False, True, True]
    """
    if isinstance(value, str):
        return value.strip() not in ("", "[]", "{}")
    if isinstance(value, dict):
        return any(map(has_value, dict.values(value)))
    if isinstance(value, list | tuple):
        return any(map(has_value, value))
    return value is not None


def type_name(value: Any) -> str:
    """Return the name of a JSON type, for messages."""
    names: dict[type, str] = {list: "a list", dict: "an object", str: "a string"}
    names |= {int: "a number", float: "a number", bool: "a boolean"}
    kind = dict if isinstance(value, dict) else type(value)
    return "null" if value is None else names.get(kind, kind.__name__)


def _lines(path: Path, encoding: str, errors: ErrorCollector) -> Iterator[tuple[Row, RowLocation]]:
    for line, number, message in text_lines(path, encoding):
        if not line.strip():
            continue
        location = RowLocation(str(path), number)
        if message is not None:
            errors.add(location, message)
            continue
        try:
            value = json.loads(line.rstrip("\r\n"), object_pairs_hook=_unique)
        except json.JSONDecodeError as error:
            if number == 1 and line.strip() == "[":
                raise DataError(f"{path}: a JSON list, not one object per line; rename it to .json") from None
            # Some messages of json already end in "at".
            errors.add(location, f"not JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}")
            continue
        except (ValueError, RecursionError) as error:
            errors.add(location, _unreadable(error))
            continue
        if number == 1 and isinstance(value, list):
            raise DataError(f"{path}: a JSON list, not one object per line; rename it to .json")
        yield from _object(value, location, errors)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, of which Python would keep only the last of several values of a key."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has several values of {repeated!r}")
    return value


def _unreadable(error: ValueError | RecursionError) -> str:
    """Return the message for JSON that exceeds a limit of Python: nesting depth or digits of a number."""
    # After a semicolon, Python's message explains how to raise the limit.
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]
    return f"not readable as JSON: {reason}"


def _json(path: Path, encoding: str, errors: ErrorCollector) -> Iterator[tuple[Row, RowLocation]]:
    """Read a list of objects, an object with one such list per client, or JSON lines named ``.json``.

    The rows of an object get the column ``client``. Only JSON lines are streamed.
    """
    for first, _, _ in text_lines(path, encoding):
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
        values = json.loads(raw.decode(encoding).removeprefix("\ufeff"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: not {encoding} text (byte 0x{raw[error.start]:02x}); {_remedy(raw)}"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: {_unreadable(error)}") from error
    if isinstance(values, dict):
        if not _is_by_client(values):
            raise DataError(
                f"{path} contains a single object; write one object per line, one list, [{{…}}, {{…}}], or "
                "one list per client, {client: [{…}, {…}], …}"
            )
        values = [
            {"client": name, **row} if isinstance(row, dict) else row
            for name, rows in values.items()
            for row in rows
        ]
    for number, value in enumerate(values, 1):
        yield from _object(value, RowLocation(str(path), number), errors)


def _has_clients(line: str) -> bool:
    """Whether a line is an object with lists of rows by client."""
    try:
        return _is_by_client(json.loads(line))
    except (ValueError, RecursionError):
        return False


def _is_by_client(value: Any) -> bool:
    """Whether a value has lists of rows by client, as opposed to a row with lists of messages."""
    # The keys may also be splits.
    if not isinstance(value, dict) or len(value) < 2 or value.keys() & {"train", "validation", "test"}:
        return False
    lists = all(isinstance(rows, list) for rows in value.values())
    rows = [row for rows in value.values() for row in rows] if lists else []
    return any(isinstance(row, dict) for row in rows) and not any(
        isinstance(row, dict) and row.keys() & {"role", "from"} for row in rows
    )


def _csv(
    path: Path, encoding: str, errors: ErrorCollector, separator: str = ","
) -> Iterator[tuple[Row, RowLocation]]:
    # A field may contain a long dialogue. The default limit is 131,072 characters.
    csv.field_size_limit(1 << 28)
    line = 0
    # Such a line may be part of a quoted field, so its whole row is dropped.
    undecodable: list[tuple[RowLocation, str]] = []

    def lines() -> Iterator[str]:
        nonlocal line
        for text, number, message in text_lines(path, encoding):
            line = number
            if message is not None:
                undecodable.append((RowLocation(str(path), number), message))
            yield text

    separator = _separator(path, encoding, separator)
    reader = csv.reader(lines(), delimiter=separator, strict=True)
    header: list[str] | None = None
    while True:
        before = line
        try:
            values = next(reader, None)
        except csv.Error as error:
            # Such lines are those of the Macintosh format of Excel.
            advice = "a line ends in CR without LF; save it as CSV UTF-8"
            problem = advice if "new-line" in str(error) else error
            raise DataError(f"{path}, row {before + 1}: not CSV: {problem}") from error
        if values is None:
            return
        # Spreadsheets write an empty row as a line of separators, and Excel the separator before the header.
        if not any(values) or (header is None and values == ["sep=", ""]):
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
            repeated = {name for name in header if header.count(name) > 1}
            if repeated:
                raise DataError(
                    f"{path}: the header repeats {', '.join(sorted(repeated))}; rename or remove one column"
                )
        elif values == header:
            errors.add(location, "repeats the header; join CSV files without the headers of the later ones")
        elif len(values) != len(header):
            errors.add(location, f"{len(values)} fields, but the header has {len(header)}")
        elif spoilt := next(filter(_spoilt, values), None):
            text = (
                spoilt
                if spoilt in _SPREADSHEET_ERRORS
                else f"{_CELL:,} characters, the most that a cell holds"
            )
            errors.add(location, f"a spreadsheet has lost the text of a field: {text}")
        else:
            # CSV cannot express a missing value other than by an empty field.
            row = {name: value if value else None for name, value in zip(header, values, strict=True)}
            yield row, location


_SPREADSHEET_ERRORS = ("#NAME?", "#VALUE!", "#REF!", "#N/A", "#DIV/0!", "#NUM!", "#NULL!")
_CELL = 32_767
"""Maximum number of characters in a cell of Excel, which truncates longer texts."""


def _spoilt(value: str) -> bool:
    return len(value) == _CELL or value in _SPREADSHEET_ERRORS


def _separator(path: Path, encoding: str, usual: str) -> str:
    """Return what separates the fields of the header: the usual character, unless it separates none."""

    def fields(separator: str) -> int:
        rows = csv.reader((text for text, *_ in text_lines(path, encoding)), delimiter=separator)
        try:
            return len(next(filter(any, rows), ()))
        except csv.Error:
            return 0

    if fields(usual) > 1:
        return usual
    return max((usual, *_SEPARATORS), key=fields)


def _parquet(path: Path, encoding: str, errors: ErrorCollector) -> Iterator[tuple[Row, RowLocation]]:
    require("pyarrow", f"{path}: a Parquet file")
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(
                    f"{path}: several columns are called {', '.join(repeated)}; rename or remove one"
                )
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
        raise DataError(f"{path}, after row {number}: incomplete Parquet file ({error})") from error


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        raise
    except (ValueError, OverflowError):
        # A time that Python cannot represent. No used column may be a time, so treat it as missing.
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
