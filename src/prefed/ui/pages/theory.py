"""The theory with numbers in it, on the terminal: constants, statements, bounds and slips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefed.theory import SLIPS, Bound, Constants, Slip, Statement
from prefed.ui.pages.tables import literal

if TYPE_CHECKING:
    from rich.console import Console

    from prefed.runs.constants import Estimate


def print_theory(
    constants: Constants, known: Sequence[Statement], console: Console, found: Estimate | None, run: str
) -> None:
    """All of it.

    Args:
        found: what was estimated from a run; ``None`` without one.
        run: that run's directory.
    """
    print_constants(constants, console)
    if found:
        print_measured(found, run, console)
    for statement in known:
        print_statement(statement, console)
    console.print("[bold]the algorithms[/]")
    print_slips([s for s in SLIPS if "the algorithms" in s.concerns], console)


def print_constants(constants: Constants, console: Console) -> None:
    """The constants with their meaning, what follows from them, and what is wrong with that."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("constant", "value", "meaning"):
        table.add_column(head, no_wrap=head != "meaning")
    for name, value in constants.model_dump().items():
        if value is not None:
            table.add_row(name, f"{value:.6g}", Constants.model_fields[name].description)
    for name, value in constants.derived().items():
        table.add_row(name, f"{value:.6g}", "")
    console.print(table)
    print_slips([slip for slip in SLIPS if "the constants" in slip.concerns], console)


def print_measured(found: Estimate, run: str, console: Console) -> None:
    """What the run has on the left side of the statements, the paper's gap, and what to know of both."""
    told = found.measured
    console.print(f"[bold]measured[/] in {literal(run)}", soft_wrap=True)
    for value, meaning in (
        (told["mean_squared_gradient"], "(1/R) Σ‖∇ℒ(θ^r)‖² over the diagnosed rounds: bounded below"),
        (told["last_squared_gradient"], "‖∇ℒ‖² at the last of them"),
        (told["paper_gap"], "the paper's own gap: local batches' squared gradients, clipped at 1"),
    ):
        console.print(f"    {value:<12.4g} {meaning}", markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"  {note}", markup=False, soft_wrap=True)
    console.print()


def print_statement(statement: Statement, console: Console) -> None:
    """A statement with its numbers, and its slips below."""
    console.print(f"[bold]{statement.name}[/] – {statement.about}")
    if statement.limit:
        verdict = "within" if statement.allowed else "[red]not[/] within"
        console.print(f"  η ≤ {statement.limit.formula} = {statement.limit.value:.4g}: η is {verdict} it")
    for bound in filter(None, (statement.stated, statement.derived)):
        print_bound(bound, console)
    if statement.stated.total is not None:
        when = f"from R = {statement.rounds:,} on" if statement.rounds else "never, with so large an η"
        console.print(f"  the stated bound is below ε {when}")
    for term in statement.complexity:
        console.print(f"  {term.formula}: {term.value:.4g}", markup=False)
    print_slips(statement.slips, console)


def print_bound(bound: Bound, console: Console) -> None:
    """The terms of a bound in a column, and their sum."""
    console.print(f"  {bound.where}:", markup=False)
    for term in bound.terms:
        console.print(f"    {term.value:<12.4g} {term.formula}", markup=False)
    if bound.total is not None:
        console.print(f"    {bound.total:<12.4g} in all", markup=False)


def print_slips(slips: Sequence[Slip], console: Console) -> None:
    """Known slips, one a line."""
    from rich.padding import Padding
    from rich.text import Text

    for slip in slips:
        console.print(Padding(Text(f"known slip, {slip.where}: {slip.text}"), (0, 0, 0, 2)))
    console.print()
