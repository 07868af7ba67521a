"""Read an experiment file: its tables, the overrides laid over them, and the paths in them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from prefed.config.errors import ConfigError

Origins: TypeAlias = Mapping[tuple[str, ...], str]
"""Path of a key → the option that set it, for keys that the file does not set."""


def read_toml(path: Path, remedy: str | None = None) -> dict[str, Any]:
    """Read a TOML file.

    Args:
        remedy: where such a file comes from, for the message if there is none; left out: that of an
            experiment.

    Raises:
        ConfigError: it cannot be read, is not UTF-8 or is not TOML.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        remedy = remedy or f"`prefed init METHOD --out {path}` writes one"
        raise ConfigError(f"{path}: no such file; {remedy}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        # Editors on Windows may put a byte order mark before the text.
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}: not UTF-8 text (byte 0x{raw[error.start]:02x} on line {line}); save it as UTF-8"
        ) from None
    return parse_toml(text.replace("\r\n", "\n"), str(path))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse a TOML text.

    Raises:
        ConfigError: it is not TOML; the message names ``where``.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not TOML: {error}") from None


def override(
    tables: dict[str, Any], overrides: Sequence[str], folder: Path, option: str = "--set"
) -> Origins:
    """Put the values of ``--set`` into an experiment's ``tables``.

    Args:
        overrides: ``"key.sub=value"`` each.
        folder: relative paths are looked for in the working folder, and then here.
        option: what messages call them.

    Returns:
        Path of each key that an override set → the override, for messages.

    Raises:
        ConfigError: an override is not ``key=value``, or its key is inside a value that is no table.
    """
    origins: dict[tuple[str, ...], str] = {}
    for text in overrides:
        keys, patch = parse_override(text, option)
        origins[keys] = f"{option} {text}"
        for key in reversed(keys):
            patch = {key: patch}
        make_absolute(patch, (Path(), folder))
        _put(tables, keys, patch, f"{option} {text}")
    return origins


def make_absolute(tables: dict[str, Any], folders: Sequence[Path]) -> None:
    """Make each path absolute that exists in one of ``folders``; the first such folder counts."""
    for table, key in list(_paths(tables)):
        path = Path(table[key]).expanduser()
        for folder in folders if table[key] else ():
            if (folder / path).exists():
                table[key] = str((folder / path).resolve())
                break


def parse_override(text: str, option: str = "--set") -> tuple[tuple[str, ...], Any]:
    """The path of the key and the value of ``"key.sub=value"``.

    Raises:
        ConfigError: it is not ``key=value``; the message names the option.
    """
    name, equals, word = text.partition("=")
    try:
        keys: list[str] = []
        inside: Any = tomllib.loads(f"{name} = 0")
        while isinstance(inside, dict):
            ((key, inside),) = inside.items()
            keys.append(key)
    except (tomllib.TOMLDecodeError, ValueError):
        equals = ""
    if not equals:
        raise ConfigError(f"{option} {text}: write key=value, e.g. {option} method.lr=1e-4")
    try:
        parsed = tomllib.loads(f"value = {word}")
        value = parsed["value"] if len(parsed) == 1 else word
    except tomllib.TOMLDecodeError:
        value = word
    known = isinstance(value, bool | int | float | str | list | dict)
    return tuple(keys), value if known else word


def _put(tables: dict[str, Any], keys: tuple[str, ...], patch: dict[str, Any], override: str) -> None:
    """Copy the value at ``keys`` from ``patch`` into ``tables``."""
    for key in keys[:-1]:
        inside = tables.setdefault(key, {})
        if not isinstance(inside, dict):
            raise ConfigError(f"{override}: {key} is {inside!r}, not a table")
        tables, patch = inside, patch[key]
    tables[keys[-1]] = patch[keys[-1]]


def _paths(tables: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Find each text that may be a path: the table or list that holds it, and its key there."""
    align = tables.get("align")
    inside = align if isinstance(align, dict) else {}
    for table, key in (
        (tables.get("model"), "name"),
        (tables.get("method"), "reward_model"),
        (tables.get("fleet"), "trace"),
        (tables.get("graph"), "file"),
        (inside.get("model"), "name"),
        (inside.get("prompts"), "path"),
        (inside, "prompts"),
        (inside, "sft"),
    ):
        if isinstance(table, dict) and isinstance(table.get(key), str):
            yield table, key
    data, roles = tables.get("data"), ("train", "validation", "test")
    waiting: list[tuple[Any, Any]] = [(data, role) for role in roles] if isinstance(data, dict) else []
    while waiting:
        table, key = waiting.pop()
        value = table[key] if isinstance(table, list) else table.get(key)
        if isinstance(value, str):
            yield table, key
        elif isinstance(value, list):
            waiting += [(value, index) for index in range(len(value))]
        elif isinstance(value, dict):
            waiting += [(value, "path")] if "path" in value else [(value, name) for name in value]
