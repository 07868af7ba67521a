"""The tutorial: its cells run to their end, and what the notebook shows is what they print."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from prefed.data import synthetic

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.ipynb"
ANSWER = re.compile(r"^(\w+) likes ([^\n]*):\n (.*)$", re.MULTILINE)


def printed(cell: Any) -> str:
    """What a cell prints, its last value and the kinds of its pictures."""
    parts = []
    for output in cell.get("outputs", ()):
        if output["output_type"] == "stream":
            parts.append(output["text"])
        else:
            parts += [kind for kind in output["data"] if kind != "text/plain"] or [
                output["data"]["text/plain"]
            ]
    return "".join(parts)


def masked(cell: Any) -> str:
    """The same without numbers and what models write, which differ from machine to machine."""
    text = ANSWER.sub(r"\1 \2", printed(cell))
    return re.sub(r"\d+", "0", re.sub(r"\s+", " ", text))


@pytest.mark.rare
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of its own, without a network. One model for all is better than the untouched one, and the
    clients' own are better still, but not above the oracle by more than two standard errors of 256 pairs. The
    answers to one question have more of the tastes of those who asked than of each other's."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    held = nbformat.read(TUTORIAL, as_version=4)
    book = runpy.run_path(str(ROOT / "scripts/tutorial.py"))["execute"](TUTORIAL, tmp_path)
    assert [masked(cell) for cell in book.cells] == [masked(cell) for cell in held.cells]

    text = "\n".join(printed(cell) for cell in book.cells)
    means = re.search(r"^mean +([\d. ]+)$", text, re.MULTILINE)
    assert means is not None
    untouched, feddpo, local, fedsdg, oracle = map(float, means[1].split())
    assert untouched + 0.1 < feddpo < fedsdg - 0.03
    assert local < oracle
    assert fedsdg < oracle + 2 * (oracle * (1 - oracle) / 256) ** 0.5
    (first, one, theirs), (second, other, others) = ANSWER.findall(text)
    assert first != second

    def agreement(answer: str, taste: str) -> int:
        """How many of a taste's five words the answer has."""
        signs = synthetic.attributes(answer)
        words = [synthetic.ATTRIBUTES[name][sign < 0] for name, sign in signs.items()]
        return len(set(words) & set(taste.split(", ")))

    assert agreement(theirs, one) > agreement(theirs, other)
    assert agreement(others, other) > agreement(others, one)
