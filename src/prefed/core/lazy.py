"""What takes long to import, imported when it is first used.

An experiment file is read and checked, and methods are listed, without PyTorch, NumPy or a model library:
the rooms ``core``, ``losses``, ``merge``, ``methods`` and ``wire`` take ``torch`` and ``np`` from here, and
the packages ``data`` and ``models`` hand out their names through :func:`names`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["F", "names", "np", "torch"]


class _Later(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


if TYPE_CHECKING:
    import numpy as np
    import torch
    import torch.nn.functional as F
else:
    np = _Later("numpy")
    torch = _Later("torch")
    F = _Later("torch.nn.functional")


def names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's ``__getattr__``: its names are imported when they are asked for.

    Args:
        package: its ``__name__``.
        modules: a module of the package → the names in it, with spaces between.
    """
    where = {name: f"{package}.{module}" for module, held in modules.items() for name in held.split()}

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(where[name]), name)

    return get
