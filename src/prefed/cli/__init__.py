"""The command line, one file a command. Commands import what they need when they run: `--help` is quick."""

from prefed.cli.app import app, main

__all__ = ["app", "main"]
