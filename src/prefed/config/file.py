"""Reading TOML files, overriding their keys, and resolving their paths."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from prefed.core import plugins
from prefed.core.strict_settings import ConfigError
from prefed.data.sources.folders import SUFFIXES, file_kind
from prefed.methods import MethodKind

Origins: TypeAlias = Mapping[tuple[str, ...], str]
"""Path of a key → the option that set it, for keys not set by the file."""


def read_toml(path: Path, remedy: str | None = None) -> dict[str, Any]:
    """Read a TOML file.

    Args:
        remedy: hint for a missing file; default: how to create an experiment file.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8 or is not TOML.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        remedy = remedy or f"`prefed init METHOD --out {path}` writes one"
        raise ConfigError(f"{path}: no such file; {remedy}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if file_kind(path) is not None:
        raise ConfigError(
            f"{path} is a data file; name it as [data] train in an experiment file; `prefed init METHOD` "
            "writes one"
        )
    try:
        # Some Windows editors write a byte order mark.
        return parse_toml(raw.decode("utf-8-sig").replace("\r\n", "\n"), str(path))
    except (UnicodeDecodeError, ConfigError) as error:
        problem = str(error)
        if isinstance(error, UnicodeDecodeError):
            line = raw.count(b"\n", 0, error.start) + 1
            problem = (
                f"{path}: not UTF-8 text (byte 0x{raw[error.start]:02x} on line {line}); save it as UTF-8"
            )
        if path.suffix.lower() != ".toml":
            problem += f"; if it contains data, its name must end in one of {SUFFIXES}"
        raise ConfigError(problem) from None


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse a TOML text.

    Raises:
        ConfigError: the text is not TOML; the message names ``where``.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        quotes = "; texts need quotes" if "Invalid value" in str(error) else ""
        raise ConfigError(f"{where} is not TOML: {error}{quotes}") from None


def override(
    tables: dict[str, Any], overrides: Sequence[str], folder: Path, option: str = "--set"
) -> Origins:
    """Override keys of ``tables`` in place.

    Args:
        overrides: ``"key.sub=value"`` each.
        folder: where to look up relative paths that are not in the working folder.
        option: the command-line option of the overrides, for messages.

    Returns:
        Path of each overridden key → the override, for messages.

    Raises:
        ConfigError: an override is not ``key=value``, or its key is inside a value that is not a table.
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
    """Make each path absolute that exists in one of ``folders``; earlier folders take precedence."""
    for table, key in list(_paths(tables)):
        table[key] = _absolute(table[key], folders)
    for table, key, _ in list(code_names(tables)):
        path, rest = plugins.file_of(table[key])
        table[key] = _absolute(path, folders) + rest


def _absolute(name: str, folders: Sequence[Path]) -> str:
    for folder in folders if name else ():
        if (path := folder / Path(name).expanduser()).exists():
            return str(path.resolve())
    return name


def parse_override(text: str, option: str = "--set") -> tuple[tuple[str, ...], Any]:
    """Split ``"key.sub=value"`` into the path of the key and the value.

    A value that is not valid TOML is a string.

    Raises:
        ConfigError: the text is not ``key=value``; the message names the option.
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


_CODE = (
    ("method", "name", "methods"),
    ("method", "objective", "objectives"),
    ("align", "objective", "objectives"),
    ("merge", "rule", "merge_rules"),
    ("data", "format", "formats"),
    ("evaluate", "metrics", "metrics"),
    ("track", "to", "trackers"),
)
"""Table, key and kind of each setting that may name an object from outside prefed."""


def code_names(tables: Mapping[str, Any]) -> Iterator[tuple[Any, Any, str]]:
    """Yield the table or list, the key in it, and the kind of each object that may be from outside prefed."""
    for name, key, kind in _CODE:
        table = tables.get(name)
        value = table.get(key) if isinstance(table, Mapping) else None
        if isinstance(table, str) and key == "name":  # only the name instead of a table
            yield tables, name, kind
        if isinstance(value, str):
            yield table, key, kind
        elif isinstance(value, list):
            yield from ((value, index, kind) for index, each in enumerate(value) if isinstance(each, str))


def name_method(tables: dict[str, Any]) -> None:
    """Replace a method that is given as an object by its name or place.

    Raises:
        ConfigError: other processes cannot find the object.
    """
    method = tables.get("method")
    table = dict(method) if isinstance(method, Mapping) else {"name": method}
    if not isinstance(kind := table.get("name"), MethodKind):
        return
    try:
        tables["method"] = {**table, "name": kind.place}
    except plugins.PluginError as error:
        raise ConfigError(str(error)) from error


def allow_code(
    tables: Mapping[str, Any], where: Path | None = None, allow: Callable[[str], None] = plugins.allow
) -> None:
    """Allow the code that nested tables name; see :mod:`prefed.core.plugins`.

    Args:
        where: the file of the tables, which may be somebody else's: a ``config.toml``, or any file that the
            user only looks at, allows only code that the user has run before.

    Raises:
        ConfigError: there is no such code, or it may not be loaded.
    """
    if where is not None and (where.name == "config.toml" or plugins.is_looking()):
        allow = partial(plugins.allow_recorded, where=str(where))
    try:
        for name in {table[key] for table, key, _ in code_names(tables) if plugins.is_code(table[key])}:
            allow(name)
    except plugins.PluginError as error:
        raise ConfigError(str(error)) from error


def remember_code(tables: Mapping[str, Any]) -> None:
    """Remember the loaded code that nested tables name; see :func:`prefed.core.plugins.remember`."""
    for table, key, _ in code_names(tables):
        plugins.remember(table[key])


def code_of(tables: Mapping[str, Any]) -> dict[str, plugins.Code]:
    """Return name → code of each object from outside prefed that nested tables name."""
    # A tracker does not affect results.
    named = {(table[key], kind) for table, key, kind in code_names(tables) if kind != "trackers"}
    registries = _registries()
    found = {name: registries[kind].code(name) for name, kind in sorted(named)}
    return {name: code for name, code in found.items() if code is not None}


def kind_of(name: str) -> str:
    """Load allowed code and return the kind of its object, or an empty text if it defines none."""
    from prefed.trackers.tools import TRACKERS

    for registry in {**_registries(), TRACKERS.kind: TRACKERS}.values():
        with suppress(plugins.PluginError, KeyError):
            return registry.kind if registry[name] else ""
    return ""


def _registries() -> dict[str, plugins.Registry[Any]]:
    from prefed.data.sources.formats import FORMATS
    from prefed.train.metrics.table import METRICS

    return {**plugins.REGISTRIES, FORMATS.kind: FORMATS, METRICS.kind: METRICS}


def _put(tables: dict[str, Any], keys: tuple[str, ...], patch: dict[str, Any], override: str) -> None:
    for key in keys[:-1]:
        inside = tables.setdefault(key, {})
        if not isinstance(inside, dict):
            raise ConfigError(f"{override}: {key} is {inside!r}, not a table")
        tables, patch = inside, patch[key]
    tables[keys[-1]] = patch[keys[-1]]


def _paths(tables: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the table or list, and the key in it, of each string that may be a path."""
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
