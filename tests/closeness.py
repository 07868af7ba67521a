"""A pytest plugin that records how much of its tolerance each comparison of numbers uses.

``PREFED_CLOSENESS=FILE python -m pytest -p closeness`` appends a line of JSON for each comparison to FILE:
its test and line of code, the error as a share of the tolerance, and the number compared.
scripts/processors.sh compares the files of several processor settings.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

TESTS = str(Path(__file__).parent)
DEFAULTS = {torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5), torch.float32: (1.3e-6, 1e-5)}


def record(actual: Any, expected: Any, relative: float, absolute: float) -> None:
    """Append the worst element of a comparison. Numbers that cannot be compared are left to the test."""
    try:
        a, e = (torch.as_tensor(x).detach().to("cpu", torch.float64) for x in (actual, expected))
        a, e = torch.broadcast_tensors(a, e)
        allowed = absolute + relative * e.abs()
        error = (a - e).abs()
        error[a == e] = 0.0
    except (TypeError, ValueError, RuntimeError):
        return
    if not allowed.any() or not error.numel():
        return
    share = torch.where(error == 0, 0.0, error / allowed)
    worst = int(share.argmax())
    frame = sys._getframe(1)
    while (frame.f_back and not frame.f_code.co_filename.startswith(TESTS)) or frame.f_globals is globals():
        frame = frame.f_back
    line = {
        "test": os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0],
        "line": f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}",
        "share": float(share.flatten()[worst]),
        "value": repr(float(a.flatten()[worst])),
    }
    with Path(os.environ["PREFED_CLOSENESS"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def watched(
    function: Callable[..., Any], relative: float | None, absolute: float | None
) -> Callable[..., Any]:
    """``function(actual, expected, rtol=relative, atol=absolute)`` with a record of each call."""

    def compare(actual: Any, expected: Any, *more: Any, **options: Any) -> Any:
        given = {**dict(zip(("rtol", "atol"), more, strict=False)), **options}
        rtol, atol = given.get("rtol", relative), given.get("atol", absolute)
        if rtol is None or atol is None:
            kind = actual.dtype if isinstance(actual, torch.Tensor) else torch.float64
            rtol, atol = DEFAULTS.get(kind, (1e-7, 1e-7))
        record(actual, expected, rtol, atol)
        return function(actual, expected, *more, **options)

    return compare


def pytest_configure() -> None:
    """Wrap what tests compare numbers with."""
    torch.testing.assert_close = watched(torch.testing.assert_close, None, None)
    torch.allclose = watched(torch.allclose, 1e-5, 1e-8)
    np.allclose = watched(np.allclose, 1e-5, 1e-8)
    np.testing.assert_allclose = watched(np.testing.assert_allclose, 1e-7, 0.0)
    scalar: Any = type(pytest.approx(1.0))
    equal = scalar.__eq__

    def compare(self: Any, actual: Any) -> bool:
        if isinstance(self.expected, int | float) and not isinstance(self.expected, bool):
            record(actual, self.expected, 0.0, float(self.tolerance))
        return equal(self, actual)

    scalar.__eq__ = compare
    less = torch.Tensor.__lt__

    def compare_less(self: Any, other: Any) -> Any:
        # `(got - want).norm() < bound` in a test.
        if self.ndim == 0 and sys._getframe(1).f_code.co_filename.startswith(TESTS):
            record(self, 0.0, 0.0, float(other))
        return less(self, other)

    torch.Tensor.__lt__ = compare_less


def main(*files: str) -> None:
    """Print comparisons whose numbers differ between ``files`` and that use a tenth of their tolerance."""
    values, shares = defaultdict(set), defaultdict(float)
    for file in files:
        found = defaultdict(list)
        for entry in map(json.loads, Path(file).read_text().splitlines()):
            found[entry["test"], entry["line"]].append(entry["value"])
            shares[entry["test"], entry["line"]] = max(shares[entry["test"], entry["line"]], entry["share"])
        for where, numbers in found.items():
            values[where].add(tuple(numbers))
    close = [(share, *where) for where, share in shares.items() if share > 0.1 and len(values[where]) > 1]
    for share, test, line in sorted(close, reverse=True):
        print(f"{share:.2g} of the tolerance at {line} in {test}")


if __name__ == "__main__":
    main(*sys.argv[1:])
