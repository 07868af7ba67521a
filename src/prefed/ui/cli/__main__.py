"""``python -m prefed.ui.cli``, the same as ``prefed``."""

from prefed.ui.cli.app import main

main()
