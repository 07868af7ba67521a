"""``prefed theory``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefed.cli.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from prefed.runs.constants import Estimate
    from prefed.theory import Bound, Constants, Slip, Statement


def theory(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Constants, as keys of a TOML file.", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Put VALUE in the place of a constant, e.g. lr=0.01."
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Estimate constants from this run, which was diagnosed; FILE and --set go before.",
            show_default=False,
        ),
    ] = None,
    graph: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Take rho of this graph, e.g. star, with Metropolis weights."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Put numbers into the theory of FedDPO and DecDPO, beside what is known to be wrong with it."""
    from prefed.theory import SLIPS, statements

    found = None
    if run is not None:
        from prefed.runs.constants import estimate

        found = estimate(run)
    constants = read_constants(file, overrides or [], graph, found.constants if found else {})
    known = statements(constants)
    if as_json:
        content = {
            "constants": constants.model_dump() | derived(constants),
            **({"measured": found.measured, "notes": found.notes} if found else {}),
            "statements": [asdict(statement) for statement in known],
            "slips": [asdict(slip) for slip in SLIPS],
        }
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
        return
    from prefed.trackers.terminal import stdout_console

    console = stdout_console()
    print_constants(constants, console)
    if found:
        print_measured(found, str(run), console)
    for statement in known:
        print_statement(statement, console)
    console.print("[bold]the algorithms[/]")
    print_slips([s for s in SLIPS if "the algorithms" in s.concerns], console)


def read_constants(
    file: Path | None, overrides: list[str], graph: str | None, found: Mapping[str, float]
) -> Constants:
    """The constants ``found`` in a run, with those of a file, ``--set`` and ``--graph`` in their place.

    Raises:
        ConfigError: a constant is not one, or has no such value; or the graph cannot be had.
    """
    from pydantic import ValidationError

    from prefed.config.errors import ConfigError, explain
    from prefed.config.file import override, read_toml
    from prefed.theory import Constants

    if file is not None and not file.exists():
        raise ConfigError(f"{file}: no such file; leave it out for the paper's constants")
    tables: dict[str, Any] = read_toml(file) if file else {}
    origins = override(tables, overrides, Path())
    where = str(file or "prefed theory")
    tables = {**found, **tables}
    try:
        constants = Constants.model_validate(tables)
        if graph is None:
            return constants
        return Constants.model_validate({**tables, "rho": rho_of(graph, constants.clients)})
    except ValidationError as error:
        raise ConfigError(explain(error, Constants, tables, where, origins)) from None


def rho_of(graph: str, clients: int) -> float:
    """ρ of the graph of that name with Metropolis–Hastings weights."""
    from typing import get_args

    from prefed.core import Key
    from prefed.core.text import did_you_mean
    from prefed.merge.graphs import GraphConfig, GraphName
    from prefed.merge.topology import Topology

    fixed = [name for name in get_args(GraphName) if name not in ("erdos_renyi", "edges", "matrix")]
    if graph not in fixed:
        near = did_you_mean(graph, fixed) or f"; there are {', '.join(fixed)}"
        raise UsageError(f"--graph {graph}: no such graph{near}")
    nodes = tuple(str(node) for node in range(clients))
    return Topology(GraphConfig.model_validate({"name": graph}), nodes, Key(0)).rho()


def derived(constants: Constants) -> dict[str, float]:
    """What follows from the constants alone."""
    return {
        "C_mix": constants.c_mix,
        "L": constants.l,
        "ζ_g²": constants.noise,
        "κ²": constants.diversity,
        "C_q": constants.c_q,
        "‖∇²ℓ‖ over closed form of L, all steps aligned": constants.aligned_norm,
    }


def print_constants(constants: Constants, console: Console) -> None:
    """The constants with their meaning, what follows from them, and what is wrong with that."""
    from rich import box
    from rich.table import Table

    from prefed.theory import SLIPS, Constants

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("constant", "value", "meaning"):
        table.add_column(head, no_wrap=head != "meaning")
    for name, value in constants.model_dump().items():
        if value is not None:
            table.add_row(name, f"{value:.6g}", Constants.model_fields[name].description)
    for name, value in derived(constants).items():
        table.add_row(name, f"{value:.6g}", "")
    console.print(table)
    print_slips([slip for slip in SLIPS if "the constants" in slip.concerns], console)


def print_measured(found: Estimate, run: str, console: Console) -> None:
    """What the run has on the left side of the statements, the paper's gap, and what to know of both."""
    from prefed.report.tables import literal

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
