"""What an experiment needs of a machine: packages, devices, files, disk space and a plausible clock."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement

import prefed
from prefed.config import Experiment
from prefed.core import files
from prefed.core.proxies import proxies
from prefed.core.strict_settings import flatten
from prefed.core.text import is_ours, one_line, pluralize, size
from prefed.data.errors import require as require_for_data
from prefed.data.sources.huggingface import looks_like_hub_name
from prefed.engines import check_engine
from prefed.methods.base.settings import BaselineSettings
from prefed.models.pretrained import NEEDED, absent_files, check_device
from prefed.privacy.accountant import require
from prefed.runs.align import check_alignment, what_is_sent
from prefed.runs.preflight import existing_parent
from prefed.runs.start_or_resume import is_place
from prefed.runs.summary import cores
from prefed.trackers.tools import trackers

DEVELOPMENT = {"test", "docs", "dev", "release"}
"""Extras that no command needs."""


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        what: what was checked.
        text: what was found or, if ``missing``, what to do.
        missing: it is not as the experiment needs it.
    """

    what: str
    text: str
    missing: bool = False


def checked(what: str, check: Callable[[], str]) -> Finding:
    """Call ``check`` and return what it found; it is missing if prefed or the system raises an error."""
    try:
        return Finding(what, check())
    except (ValueError, OSError, RuntimeError) as error:
        if not (is_ours(error) or isinstance(error, OSError)):
            raise
        return Finding(what, one_line(error), missing=True)


def environment(out: Path, newest: Iterable[Path] = ()) -> Iterator[Finding]:
    """Check what every run needs.

    Args:
        out: the run directory, or a folder in which it would be created.
        newest: files that must not be younger than the clock.
    """
    packages = ", ".join(f"{name} {version(name)}" for name in ("prefed", "torch", "transformers", "peft"))
    yield Finding("packages", f"{packages}, Python {platform.python_version()}")
    here = {name: _is_here(name) for name in metadata("prefed").get_all("Provides-Extra") or ()}
    named = [name for name in here if name not in DEVELOPMENT]
    absent = ", ".join(name for name in named if not here[name])
    present = ", ".join(name for name in named if here[name])
    yield Finding("extras", (present or "none") + (absent and f"; not installed: {absent}"))
    yield Finding("devices", _devices())
    yield Finding("proxy", _proxy())
    yield checked("disk", lambda: f"{size(shutil.disk_usage(existing_parent(out)).free)} free for {out}")
    yield _clock((Path(prefed.__file__), *newest))


def needs(experiment: Experiment, out: Path, *, own_data: bool = True) -> Iterator[Finding]:
    """Check what an experiment needs. Nothing is loaded, downloaded or written.

    Args:
        out: the planned run directory.
        own_data: the pairs are on this machine, and not at the sites of a federation.
    """
    engine, model, privacy = experiment.engine, experiment.model, experiment.privacy

    def backend() -> str:
        check_engine(engine.name, engine.devices or ())
        return f"{engine.name}, {pluralize(engine.workers, 'worker', 'workers')}"

    yield checked("[engine]", backend)
    yield checked("[model] device", lambda: f"trains on {check_device(model).type}")
    settings = experiment.method.settings
    models = {"model.name": (model.name, model.revision)}
    if isinstance(settings, BaselineSettings) and settings.ppo:
        models["method.reward_model"] = (settings.reward_model, None)
    for key, name in models.items():
        yield checked(key, partial(_model, *name, out))
    for key, path in flatten(experiment.tables()).items() if own_data else ():
        if is_place(key) and key not in ("model.name", "method.reward_model"):
            yield checked(key, partial(_data, path))
    if privacy.noise:
        yield checked("[privacy]", lambda: f"{require().__name__} is installed")
    if (track := experiment.track) is not None:
        yield checked("[track]", lambda: ", ".join(trackers(track.to)))
    if (align := experiment.align) is not None:

        def alignment() -> str:
            check_alignment(align, experiment.data)
            return "; ".join(["prompts and judge are here", *what_is_sent(align)])

        yield checked("[align]", alignment)


def _is_here(extra: str) -> bool:
    """Return whether all packages of an extra of prefed are installed."""
    for line in requires("prefed") or ():
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate() or not wanted.marker.evaluate({"extra": extra}):
            continue
        if wanted.name == "prefed":  # an extra that joins others
            if not all(map(_is_here, wanted.extras)):
                return False
            continue
        try:
            if not wanted.specifier.contains(version(wanted.name), prereleases=True):
                return False
        except PackageNotFoundError:
            return False
    return True


def _devices() -> str:
    found = pluralize(cores(), "core", "cores")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(number) for number in range(count)]
    return ", ".join([found, *(names or ["no GPU"])])


def _proxy() -> str:
    if not (named := [f"{scheme}: {url}" for scheme, url in proxies().items()]):
        return "none"
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "none"
    return f"{', '.join(named)}; asked directly: this machine, and NO_PROXY = {direct}"


def _clock(paths: Iterable[Path]) -> Finding:
    now, newest = time.time(), max(paths, key=lambda path: path.stat().st_mtime)
    text = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if now < newest.stat().st_mtime:
        return Finding("clock", f"{text} is before {newest} was written: set the clock", missing=True)
    return Finding("clock", text)


def _model(name: str, revision: str | None, out: Path) -> str:
    """Find a model, and space for a copy of it.

    Raises:
        FileNotFoundError: it is not on this machine, or not whole.
        WriteError: there is no space for one more.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            config = try_to_load_from_cache(name, "config.json", revision=revision)
        except HFValidationError:
            raise FileNotFoundError(f"{name}: no such folder; correct the path") from None
        if not isinstance(config, str):
            raise FileNotFoundError(
                f"{name} is neither a folder nor in the cache of the Hugging Face hub: a run downloads it if "
                f"the hub can be reached; otherwise copy it here (hf download {name})"
            )
        folder = Path(config).parent
    check_model_folder(name, folder)
    whole, free = files.folder_size(folder), shutil.disk_usage(existing_parent(out)).free
    if free < whole:
        raise files.WriteError(
            f"{name} has {size(whole)}, and {size(free)} is free for {out}, too little for an exported "
            "model: free some space, or choose another --out"
        )
    return f"{name}, {size(whole)}"


def check_model_folder(name: str, folder: Path) -> None:
    """Raise FileNotFoundError if the folder of a model lacks its configuration, weights or tokenizer."""
    if absent := absent_files(folder):
        raise FileNotFoundError(f"{name}: the folder has no {', no '.join(absent)}; {NEEDED}")


def _data(path: str) -> str:
    """Find a source of data; raises FileNotFoundError, or DataError if a package is missing to read it."""
    if Path(path).expanduser().exists():
        if path.endswith(".parquet"):
            require_for_data("pyarrow", f"{path}: a Parquet file")
        return path
    if looks_like_hub_name(path):
        require_for_data("datasets", f"{path}, on the Hugging Face hub,")
        return f"{path}: on the Hugging Face hub, unless it is in the cache"
    raise FileNotFoundError(f"{path}: no such file or folder; correct the path")
