"""The commands that a page of the documentation prints, and its blocks of code."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

FENCE = re.compile(r"^```(?P<language>\w+)(?P<info>[^\n]*)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [block["body"] for block in FENCE.finditer(text) if block["language"] == language]


def commands(block: str, program: str = "prefed") -> Iterator[list[str]]:
    """The words that ``program`` is called with, as bash takes a console block apart."""
    script = "".join(line[2:] for line in block.splitlines(keepends=True) if line[:2] in ("$ ", "> "))
    function = f"{program}() {{ printf '%s\\0' \"$@\"; printf '\\36\\0'; }}\n"
    process = subprocess.run(["bash", "-euc", function + script], capture_output=True, text=True, check=True)
    words: list[str] = []
    for word in process.stdout.split("\0")[:-1]:
        if word == "\36":
            yield words
            words = []
        else:
            words.append(word)
