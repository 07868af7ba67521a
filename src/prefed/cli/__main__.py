"""``python -m prefed.cli``, the same as ``prefed``."""

from prefed.cli.app import main

main()
