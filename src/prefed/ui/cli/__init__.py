"""The command line.

Commands import their dependencies when they run, which keeps ``--help`` fast.
"""

from prefed.ui.cli.app import app, main

__all__ = ["app", "main"]
