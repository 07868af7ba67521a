"""A judge that prefers the answer with the larger utility of ``answers.py``: ``judge:./oracle.py``.

``[align.judge] taste`` is brief, formal or lists.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from prefed.align.judge import Question, Verdict
from prefed.config.align import JudgeOptions


def _answers() -> ModuleType:
    path = Path(__file__).resolve().with_name("answers.py")
    spec = importlib.util.spec_from_file_location("smollm2_answers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Oracle:
    """Compares utilities; equal ones are a tie."""

    def __init__(self, argument: str, options: JudgeOptions) -> None:
        self.identity = {"judge": "oracle", "taste": options.taste}
        self._utility, self._taste = _answers().utility, options.taste

    def compare(self, questions: Iterable[Question]) -> Iterator[Verdict]:
        """Yield 1 if the first answer is better, 0 if the second one is, 0.5 for a tie."""
        for each in questions:
            first, second = (self._utility(self._taste, text) for text in (each.first, each.second))
            yield Verdict((float(first > second) + float(first >= second)) / 2, text="")


JUDGE = Oracle
