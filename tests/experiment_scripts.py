"""Runs the scripts of ``experiments/`` and reads what they write."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"


def script(name: str, *arguments: Any, fails: bool = False) -> str:
    """What a script prints; its complaint if it is to fail."""
    printed, complained, status = io.StringIO(), io.StringIO(), None
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(complained),
    ):
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        # Scripts import their neighbours, as they do when Python runs them.
        patch.syspath_prepend(str((EXPERIMENTS / name).parent))
        try:
            runpy.run_path(str(EXPERIMENTS / name), run_name="__main__")
        except SystemExit as end:
            status = end.code
    assert bool(status) is fails, (status, complained.getvalue())
    return printed.getvalue() + complained.getvalue() + str(status) if fails else printed.getvalue()


def rows(path: Path) -> list[Any]:
    """The rows of a file of JSON lines, gzipped or not."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in content.decode().split("\n") if line]
