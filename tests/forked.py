"""Processes that are forked: a fresh interpreter imports PyTorch, which takes longer than their work.

Workers speak over the same pipe, take the same signals and end with the same exit codes. What a fresh
interpreter adds is in ``test_workers.py``: paths, the main module, memory, the end of the parent.
"""

import os
import signal
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import torch

from prefed.engines.backends import processes
from prefed.ui.cli import app


class Forked(subprocess.Popen):
    """As the interpreter that :class:`prefed.engines.backends.processes.Worker` starts, without imports."""

    def _execute_child(self, args, executable, before, close, handles, folder, environment, *rest):
        reader, writer = rest[3:5]  # the ends of its standard input
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            os.close(reader)
            return
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            os.close(writer)
            os.dup2(reader, 0)
            for last, end in pairwise((2, *sorted(handles), os.sysconf("SC_OPEN_MAX"))):
                os.closerange(last + 1, end)
            sys.stdin = os.fdopen(0)
            # What pytest captures with has other handles.
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            os.environ.update(environment)
            processes.serve(*handles)
            code = 0
        finally:
            os._exit(code)


WORKERS = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE)
"""In the place of ``subprocess`` where workers are started."""


class Command:
    """A command of prefed.

    Args:
        errors: the file that takes its standard error.
        before: called in the process before the command.
    """

    def __init__(self, errors, *words, before=lambda: None):
        self.errors = errors
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            # As a shell does for what a script starts in the background.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            torch.set_num_threads(1)  # makes torch's pool anew before threads that load a model race for it
            try:
                with errors.open("w") as file:
                    os.dup2(file.fileno(), 2)
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                before()
                app([str(word) for word in words], prog_name="prefed")
            except SystemExit as end:
                sys.stderr.flush()
                code = end.code or 0
            finally:
                os._exit(code)

    def send(self, number):
        """Send a signal, and wait for the end."""
        os.kill(self.pid, number)
        return self.end()

    def end(self):
        """The exit code and what was written to standard error."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status), self.errors.read_text()
