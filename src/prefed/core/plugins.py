"""Methods, losses and other named objects from outside the package.

A name is looked up among the built-in objects, then among installed entry points. ``PACKAGE.MODULE:OBJECT``
and ``./FILE.py[:OBJECT]`` name code directly. Such code is loaded only after :func:`allow`, which is called
for what the user wants to run, or after :func:`allow_recorded`, which is called for what the user only looks
at: a run directory, or any file within :func:`looking`. :func:`remember` records which code was run.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from prefed.core import files
from prefed.core.text import did_you_mean, listed

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

OWN = "your own: ./FILE.py or PACKAGE.MODULE:OBJECT"
"""How to name an object from outside the package, for messages."""

_NAME = r"[^\W\d]\w*"
_CODE = re.compile(
    rf"(?P<file>.+\.py)(:(?P<within>{_NAME}))?|(?P<module>{_NAME}(\.{_NAME})*):(?P<object>{_NAME})"
)


class PluginError(ValueError):
    """An object from outside the package cannot be loaded."""


@cache
def version_of(package: str) -> str:
    """The version of an installed package, whose metadata is read once."""
    from importlib.metadata import version

    return version(package)


@dataclass(frozen=True)
class Code:
    """The source of an object from outside the package.

    Attributes:
        place: absolute path of a file, or name of an installed package.
        digest: SHA-256 of the file, or of all Python files of the package.
        source: the content of the file; empty for a package.
    """

    place: str
    digest: str
    source: bytes = b""

    @property
    def version(self) -> str:
        """The version of the package; empty for a file, or for a package that was not installed."""
        from importlib.metadata import PackageNotFoundError, packages_distributions, version

        try:
            return version(packages_distributions().get(self.place, [self.place])[0])
        except (PackageNotFoundError, ValueError):
            return ""

    def record(self) -> dict[str, str]:
        """Place, version and SHA-256, as in ``summary.json``."""
        return {"place": self.place, "version": self.version, "sha256": self.digest}


def is_code(name: str) -> bool:
    """Whether a name is a file or an object of a package.

    >>> [is_code(name) for name in ("./m.py", "/a/m.py:M", "pack.mod:M", "feddpo", "owner/data")]
    [True, True, True, False, False]
    """
    return _CODE.fullmatch(name) is not None


def file_of(name: str) -> tuple[str, str]:
    """Split a name into the path of its file, empty if it names none, and the rest.

    >>> file_of("./m.py:M"), file_of("feddpo")
    (('./m.py', ':M'), ('', 'feddpo'))
    """
    path = (match["file"] or "") if (match := _CODE.fullmatch(name)) else ""
    return path, name[len(path) :]


_allowed: dict[str, Code] = {}
_only: ContextVar[Collection[str] | None] = ContextVar("only", default=None)
_looking: ContextVar[bool] = ContextVar("looking", default=False)


@contextmanager
def only(names: Collection[str]) -> Iterator[None]:
    """Within this context, no object from outside the package can be used except ``names``."""
    token = _only.set(names)
    try:
        yield
    finally:
        _only.reset(token)


@contextmanager
def looking() -> Iterator[None]:
    """Within this context, files that name code do not allow it: it must have been run before."""
    token = _looking.set(True)
    try:
        yield
    finally:
        _looking.reset(token)


def is_looking() -> bool:
    """Whether this is within :func:`looking`."""
    return _looking.get()


def allow(name: str) -> None:
    """Allow code in this process. Nothing is loaded.

    Raises:
        PluginError: there is no such file or package.
    """
    _allowed[name] = _find(name)


def remember(name: str) -> None:
    """Allow this version of code also for what the user looks at, now and later, if it has been loaded.

    Args:
        name: a name after :func:`allow`; others are ignored.
    """
    code = _allowed.get(name)
    loaded = code and any((name, code.digest) in registry._loaded for registry in REGISTRIES.values())
    if code and loaded and code.digest not in _remembered().get(code.place, ()):
        with suppress(OSError):
            files.private_folder(_list().parent)
            files.append(_list(), f"{code.digest} {code.place}\n".encode(), mode=0o600)


def allow_recorded(name: str, where: str, digest: str | None = None) -> None:
    """Allow code that a run directory or a file names, if the user has run the same code before.

    Whoever wrote it chooses neither what is loaded nor from where: a file may have moved, or the path may be
    a trap.

    Args:
        where: the run directory or the file, for messages.
        digest: the digest in the record of the run; ``None`` for the present one.

    Raises:
        PluginError: the user has not run it, or it changed since the run.
    """
    path, rest = file_of(name)
    digest = digest or _find(name).digest
    places = [place for place, digests in _remembered().items() if digest in digests]
    places = [p for p in places if (Path(p).is_absolute() if path else p == re.split("[.:]", name)[0])]
    for place in places:
        with suppress(PluginError):
            code = _find(f"{place}{rest}" if path else name)
            if code.digest == digest:
                _allowed[name] = code
                return
    if places:
        raise PluginError(f"{where}: {places[0]} changed since the run; restore it (SHA-256 {digest})")
    raise PluginError(
        f"{where}: {name} is code from outside prefed that you have not used on this machine, or not this "
        f"version of it (SHA-256 {digest}); it is not loaded. If you trust it, `prefed init "
        f"{f'./FILE.py{rest}' if path else name}` loads and allows it, and so does `prefed run`"
    )


def _list() -> Path:
    """The file with the digests and places of the code that this user has allowed."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "prefed" / "code"


def _remembered() -> dict[str, set[str]]:
    known: dict[str, set[str]] = {}
    with suppress(OSError):
        for line in _list().read_text("utf-8").splitlines():
            digest, _, place = line.partition(" ")
            known.setdefault(place, set()).add(digest)
    return known


def _find(name: str) -> Code:
    """Read the code of a name without running it."""
    match = _CODE.fullmatch(name)
    assert match is not None
    if match["module"]:
        return _package(match["module"].partition(".")[0])
    path = Path(match["file"]).expanduser().resolve()
    if not path.is_file():
        raise PluginError(f"{match['file']}: no such file")
    source = path.read_bytes()
    return Code(str(path), hashlib.sha256(source).hexdigest(), source)


@cache
def _package(name: str) -> Code:
    from importlib.util import find_spec

    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise PluginError(f"no package is called {name!r}; install it, or name a file, e.g. ./{name}.py")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    paths = {path.relative_to(folder): path for folder in folders for path in folder.rglob("*.py")}
    if not folders and spec.origin:
        paths = {Path(f"{name}.py"): Path(spec.origin)}
    hasher = hashlib.sha256()
    for relative, path in sorted(paths.items()):
        hasher.update(f"{relative.as_posix()}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return Code(name, hasher.hexdigest())


@cache
def entry_points(kind: str) -> dict[str, list[EntryPoint]]:
    """The installed entry points of a kind by name; several if packages use the same name."""
    from importlib import metadata

    points: dict[str, list[EntryPoint]] = {}
    for point in metadata.entry_points(group=f"prefed.{kind}"):
        points.setdefault(point.name, []).append(point)
    return points


def _load(name: str, code: Code, default: str) -> Any:
    match = _CODE.fullmatch(name)
    assert match is not None
    wanted = match["object"] or match["within"] or default
    try:
        # Standard output may be for JSON.
        with redirect_stdout(sys.stderr):
            module = import_module(match["module"]) if match["module"] else _module(code)
    except (Exception, SystemExit) as error:
        why = f"{name} cannot be imported: {type(error).__name__}: {error}"
        unknown = f"{error.name}.py" if code.source and isinstance(error, ModuleNotFoundError) else None
        if unknown and Path(code.place).with_name(unknown).exists():
            # A neighbour's code is neither in the digest nor sent to other machines.
            why += (
                "; a file cannot import its neighbours, but a module of a package can: prefed new method NAME"
            )
        raise PluginError(why) from error
    if not hasattr(module, wanted):
        raise PluginError(f"{name.removesuffix(f':{wanted}')} defines no {wanted}")
    return getattr(module, wanted)


def _module(code: Code) -> ModuleType:
    name = f"prefed_file_{code.digest[:16]}"
    if name not in sys.modules:
        module = ModuleType(name)
        module.__file__ = code.place
        sys.modules[name] = module
        try:
            # The bytes that the digest is of, even if the file changes meanwhile.
            exec(compile(code.source, code.place, "exec"), module.__dict__)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


T = TypeVar("T")
REGISTRIES: dict[str, Registry[Any]] = {}
"""Kind → the registry, of the modules that are imported."""


class Registry(Mapping[str, T], Generic[T]):
    """The objects of one kind by name: built-in ones, entry points, and code that was allowed.

    Iterating yields the names of built-in objects and of entry points.

    Args:
        kind: the group of entry points is ``prefed.KIND``.
        builtin: name → built-in object.
        default: the object that a file defines if a name has none.
        fits: whether an object is of this kind.
    """

    def __init__(self, kind: str, builtin: Mapping[str, T], default: str, fits: type | None = None) -> None:
        self.kind, self.builtin, self._default, self._fits = kind, builtin, default, fits
        self._loaded: dict[tuple[str, str], T] = {}
        REGISTRIES[kind] = self

    def __getitem__(self, name: str) -> T:
        if name in self.builtin:
            return self.builtin[name]
        code = self.code(name)
        if code is None:
            raise KeyError(name)
        key = name, code.digest
        if key not in self._loaded:
            point = None if name in _allowed else self._point(name)
            found = _load(name if point is None else point.value, code, self._default)
            if not (callable(found) if self._fits is None else isinstance(found, self._fits)):
                wanted = "a callable" if self._fits is None else f"a {self._fits.__name__}"
                raise PluginError(f"{name} is {type(found).__name__}, not {wanted}")
            self._loaded[key] = found
        return self._loaded[key]

    def __iter__(self) -> Iterator[str]:
        return iter({**self.builtin, **entry_points(self.kind)})

    def __len__(self) -> int:
        return len(list(iter(self)))

    def code(self, name: str) -> Code | None:
        """The code of a name; ``None`` for a built-in object, or if nothing usable has this name."""
        allowed = _only.get()
        if name in self.builtin or (allowed is not None and name not in allowed):
            return None
        if name in _allowed:
            return _allowed[name]
        point = None if is_code(name) else self._point(name)
        return None if point is None else _package(point.module.partition(".")[0])

    def _point(self, name: str) -> EntryPoint | None:
        points = entry_points(self.kind).get(name, [])
        if len(points) > 1:
            raise PluginError(
                f"{name!r} is an entry point of several packages; name one by its object: "
                f"{listed([point.value for point in points], str)}"
            )
        return points[0] if points else None

    def hint(self, name: str) -> str:
        """What to write instead of an unknown name, for messages."""
        if is_code(name) or name in entry_points(self.kind):
            allow = (
                "" if _only.get() is None else f"; to allow it, add {name!r} to [limits] code in site.toml"
            )
            return f": it is code from outside prefed that may not be loaded here{allow}"
        return f"{did_you_mean(name, self)} ({self.kind.replace('_', ' ')}: {', '.join(self)}; {OWN})"
