"""How another process builds the same job."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prefed.engines.job import Job


@dataclass(frozen=True)
class JobFactory:
    """How another process builds the same :class:`Job`.

    Attributes:
        builder: ``"module:function"``; the function is called with ``text``.
        text: its one argument, on a machine that has the files of this one.
        shipped: name → file or folder that the function needs on a machine that has not. There its second
            argument is a folder with a copy of each, by its name.
    """

    builder: str
    text: str
    shipped: Mapping[str, Path] = field(default_factory=dict)

    def build(self, folder: Path | None = None) -> Job:
        """The job; ``folder`` holds this machine's copies of what is shipped."""
        module, _, function = self.builder.partition(":")
        build = getattr(importlib.import_module(module), function)
        job: Job = build(self.text) if folder is None else build(self.text, folder)
        return job
