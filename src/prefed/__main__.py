"""``python -m prefed``, the same as ``prefed``."""

from prefed.ui.cli import main

main()
