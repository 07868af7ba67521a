"""Worker processes that are forked: a fresh interpreter imports PyTorch, which takes longer than their work.

They speak over the same pipe, take the same signals and end with the same exit codes. What a fresh
interpreter adds is in ``test_workers.py``: paths, the main module, memory, the end of the parent.
"""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

from prefed.engines.backends import processes


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
            sys.stdin = os.fdopen(0)
            os.environ.update(environment)
            processes.serve(*handles)
            code = 0
        finally:
            os._exit(code)


WORKERS = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE)
"""In the place of ``subprocess`` where workers are started."""
