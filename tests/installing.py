"""A package as an editable install leaves it, without pip."""

import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefed.core import plugins
from prefed.methods import METHODS


@contextmanager
def installed(project: Path, site: Path) -> Iterator[None]:
    """Within this context, Python's path has the modules in ``project/src`` and the entry points of
    ``project/pyproject.toml``, the latter written to ``site``.
    """
    described = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    info = site / f"{described['name']}-{described['version']}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {described['name']}", f"Version: {described['version']}"]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    points = described["entry-points"].items()
    groups = ([f"[{group}]", *(f"{key} = {value}" for key, value in own.items())] for group, own in points)
    (info / "entry_points.txt").write_text("\n".join(line for group in groups for line in group) + "\n")

    def forget() -> None:
        METHODS._loaded.clear()
        plugins._package.cache_clear()
        plugins.entry_points.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        for folder in (project / "src", site):
            patch.syspath_prepend(folder)
        forget()
        yield
    forget()
    for path in (project / "src").glob("*.py"):
        sys.modules.pop(path.stem, None)
