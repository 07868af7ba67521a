"""``prefed methods``."""

from __future__ import annotations


def methods() -> None:
    """List the methods, where they come from and what is personal in them."""
    from rich import box
    from rich.table import Table

    from prefed.methods import METHODS
    from prefed.trackers.terminal import stdout_console

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("method", "what it is", "clients end with"):
        table.add_column(name, no_wrap=name == "method")
    table.add_column("source", overflow="fold", min_width=20)
    for kind in METHODS.values():
        ends = "models of their own" if kind.personal else "one model"
        table.add_row(kind.name, kind.title, ends, kind.source)
    stdout_console().print(table)
