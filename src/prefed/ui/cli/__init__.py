"""The command line, one file a command.

A command imports what it needs when it runs, so that ``--help`` is quick. Its errors are shown by
:func:`prefed.ui.cli.errors.user_errors`, which :mod:`prefed.ui.cli.app` lays around each.
"""

from prefed.ui.cli.app import app, main

__all__ = ["app", "main"]
