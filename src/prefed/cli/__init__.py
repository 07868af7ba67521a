"""The command line, one file a command.

A command imports what it needs when it runs, so that ``--help`` is quick. Its errors are shown by
:func:`prefed.cli.errors.user_errors`, which :mod:`prefed.cli.app` lays around each.
"""

from prefed.cli.app import app, main

__all__ = ["app", "main"]
