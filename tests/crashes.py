"""Processes that end in the middle of a file operation."""

from __future__ import annotations

import itertools
import os

from prefed.core import files


class Crash(BaseException):
    """A process that ends here."""


class Failing:
    """The ``os`` module, whose ``n``-th changing call ends the process: half done, if it writes."""

    CHANGING = ("open", "write", "fsync", "replace", "unlink", "truncate")

    def __init__(self, at):
        self.left = at

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in self.CHANGING:
            return real

        def call(*arguments, **named):
            self.left -= 1
            if self.left == 0:
                if name == "write":
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                raise Crash
            return real(*arguments, **named)

        return call


def flip(path, at=-1):
    """Flip a bit of the byte at a place of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def content(path):
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != "LOCK"
    }


def crashed(folder, monkeypatch, play):
    """The folder of each crash of ``play``, at a later operation each time, until it ends without one."""
    for at in itertools.count(1):
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", Failing(at))
            try:
                play(folder / f"crash{at}")
            except Crash:
                pass
            else:
                return
        yield folder / f"crash{at}"
