"""What pages hold: commands and blocks of code of the documentation, elements of HTML."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser

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


class Page(HTMLParser):
    """What a page in HTML is made of: tags, text, the script. Every element is closed.

    Args:
        without: elements whose text is left out.
    """

    def __init__(self, text: str, without: tuple[str, ...] = ("style",)) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.without, self.data, self.script = {*without, "script"}, "", ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.script += data
        elif not self.without & {*self.open}:
            self.data += data

    def named(self, name: str) -> list[dict[str, str | None]]:
        """The attributes of each element of this name."""
        return [attributes for tag, attributes in self.tags if tag == name]
