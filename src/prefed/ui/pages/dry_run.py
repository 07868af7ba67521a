"""What a dry run found, on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefed.core.text import duration, pluralize, printable, size
from prefed.runs.dry_run import DryRun

if TYPE_CHECKING:
    from rich.console import Console


def estimate_line(found: DryRun) -> str:
    """The result of a dry run in one line."""
    each = duration(sum(found.seconds_per_round.values()))
    wrong = pluralize(len(found.warnings), "warning", "warnings") if found.warnings else "nothing is wrong"
    return (
        f"{found.method}: {wrong}; by estimate {each} a round, {duration(found.seconds)} in all, "
        f"{size(found.bytes['up'])} up and {size(found.bytes['down'])} down"
    )


def print_dry_run(found: DryRun, console: Console) -> None:
    """Sizes and times, one kind a line."""
    from rich.table import Table

    clients, pairs, disk, timed = found.clients, found.pairs, found.disk, found.timed
    each, whole, seconds = found.bytes_per_round, found.bytes, found.seconds_per_round
    rounds = pluralize(found.rounds, "round", "rounds")
    unseen = f", and {pluralize(clients['unseen'], 'newcomer', 'newcomers')}" if clients["unseen"] else ""
    needed = sum(disk.values()) - disk["free"]
    rows = {
        "clients": f"{clients['train']:,} train, {clients['cohort']:,} of them in a round; "
        f"{clients['evaluated']:,} are evaluated{unseen}",
        "pairs": f"{pairs['train']:,} to train on, {pairs['validation']:,} to validate on, "
        f"{pairs['test']:,} to test on",
        "parameters": f"{found.parameters['trainable']:,} are trained, "
        f"{found.parameters['communicated']:,} are in an upload",
        "sent": f"{size(each['up'])} up and {size(each['down'])} down a round; "
        f"{size(whole['up'])} up and {size(whole['down'])} down in {rounds}",
        "disk": f"{size(needed)}: cache {size(disk['cache'])}, checkpoint {size(disk['checkpoint'])}, "
        f"adapters {size(disk['adapters'])}; {size(disk['free'])} are free",
        "memory": f"{found.peak_memory_mb:,.0f} MiB at the most so far, in this process",
        "time": f"{duration(sum(seconds.values()))} a round, of which evaluation "
        f"{duration(seconds['evaluation'])}; {duration(found.seconds)} in {rounds}",
        "": f"an estimate, from {pluralize(int(timed['steps']), 'step', 'steps')} of client "
        f"{printable(str(timed['client']))!r} and "
        f"{pluralize(int(timed['pairs']), 'evaluated pair', 'evaluated pairs')}; "
        "what the untouched model gives each pair, once, comes on top",
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(name, text)
    console.print(table, markup=False)
    for text in found.notes:
        console.print(printable(text), markup=False, soft_wrap=True)
    for text in found.warnings:
        console.print(f"warning: {printable(text)}", style="yellow", markup=False, soft_wrap=True)
    wrong = "" if found.warnings else "nothing is wrong, and "
    console.print(f"{wrong}nothing was written", markup=False)
