"""What tests of ``prefed collect`` share: pairs to ask about, and a browser without a screen."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from prefed.core import Key
from prefed.data import Record
from prefed.runs.append_log import Journal
from prefed.ui.collect.pairs import Choices, Questions, RecordedPairs
from prefed.ui.collect.session import Session
from waiting import WATCHDOG

RECORDS = [Record(f"Case {k}:", f" up {k}", f" down {k}", category="c") for k in range(8)]


@contextmanager
def session(
    folder: Path,
    records: Sequence[Record] = RECORDS,
    client: str | None = "ann",
    questions: Callable[[Journal], Questions] | None = None,
    thumbs: bool = False,
) -> Iterator[Session]:
    """The session over files in ``folder``, as one start of the command has it."""
    with Journal(folder / ".pairs.jsonl.collect" / "journal.jsonl") as journal:
        asked = RecordedPairs(records) if questions is None else questions(journal)
        unpaired = Choices(folder / "thumbs.jsonl") if thumbs else None
        opened = Session(asked, Choices(folder / "pairs.jsonl"), journal, Key(0), unpaired)
        if client is not None:
            opened.name(client)
        yield opened


@contextmanager
def serving(opened: Session, add: Callable[[str], None] | None = None) -> Iterator[list[str]]:
    """A server for the block; gives the list of its links."""
    from prefed.ui.collect.server import listen, serve

    links: list[str] = []
    there = threading.Event()

    def got(link: str) -> None:
        links.append(link)
        there.set()

    with listen(0) as listening:
        thread = threading.Thread(target=serve, args=(opened, listening), kwargs={"add": add, "report": got})
        thread.start()
        assert there.wait(WATCHDOG)
        try:
            yield links
        finally:
            # After a test's own form has ended the session, the server may take a moment to end, and refuses.
            with suppress(OSError):
                Browser(links[-1]).post("/finish")
            thread.join(WATCHDOG)
            assert not thread.is_alive()


class Browser:
    """Opens a link and keeps its cookie.

    Attributes:
        status, headers, text: of the last answer, after redirections.
    """

    def __init__(self, link: str | None = None, root: str | None = None) -> None:
        self.root = root or str(link).partition("/?")[0]
        self.cookies = CookieJar()
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.cookies))
        if link is not None:
            self.get(link.removeprefix(self.root))

    def get(self, path: str = "/", headers: Mapping[str, str] | None = None) -> str:
        return self._open(urllib.request.Request(self.root + path, headers=dict(headers or {})))

    def post(self, path: str, headers: Mapping[str, str] | None = None, **fields: Any) -> str:
        own = {"Origin": self.root, **(headers or {})}
        return self._open(urllib.request.Request(self.root + path, urlencode(fields).encode(), own))

    def answer(self, choice: str, **fields: Any) -> str:
        """Answer the question on the page."""
        return self.post("/choose", number=self.number, answer=choice, **fields)

    @property
    def number(self) -> str:
        return re.findall(r'name="number" value="(\d+)"', self.text)[0]

    def _open(self, request: urllib.request.Request) -> str:
        try:
            with self._opener.open(request, timeout=WATCHDOG) as answer:
                self.status, self.headers, self.text = answer.status, answer.headers, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                self.status, self.headers, self.text = error.code, error.headers, error.read().decode()
        return self.text


def start(*words: Any, cwd: Path) -> tuple[subprocess.Popen[str], str]:
    """The command as a process, and the link that it prints."""
    command = [sys.executable, "-m", "prefed", "collect", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd)
    assert process.stdout is not None
    lines = [process.stdout.readline().strip() for _ in range(2)]
    if not lines[1].startswith("http"):
        _, errors = process.communicate(timeout=WATCHDOG)
        raise AssertionError(f"no link in {lines}: {errors}")
    return process, lines[1]
