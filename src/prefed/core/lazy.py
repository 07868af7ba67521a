"""Lazy imports of slow libraries and modules.

Reading an experiment file must not import PyTorch, NumPy or a model library. Code on that path imports
``torch``, ``np`` and ``F`` from here, and packages load their modules through :func:`attach`.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["F", "attach", "np", "torch"]


class _LazyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        # The next access is as fast as that of a module.
        self.__dict__[name] = value = getattr(import_module(self.__name__), name)
        return value


if TYPE_CHECKING:
    import numpy as np
    import torch
    import torch.nn.functional as F
else:
    np = _LazyModule("numpy")
    torch = _LazyModule("torch")
    F = _LazyModule("torch.nn.functional")


def attach(package: str, file: str) -> None:
    """Give a package a ``__getattr__`` that runs its ``if TYPE_CHECKING:`` imports on first access.

    The imports that a type checker reads are then also the imports that run. It does not see the function,
    for which it would take any name for an attribute of the package.
    """

    @cache
    def modules() -> dict[str, str]:
        blocks = [n for n in ast.parse(Path(file).read_text("utf-8")).body if isinstance(n, ast.If)]
        imports = [n for block in blocks for n in block.body if isinstance(n, ast.ImportFrom)]
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules()[name]), name)

    vars(sys.modules[package])["__getattr__"] = get
