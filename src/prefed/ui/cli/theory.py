"""``prefed theory``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefed.ui.cli.errors import UsageError

if TYPE_CHECKING:
    from prefed.theory import Constants


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
            "constants": constants.model_dump() | constants.derived(),
            **({"measured": found.measured, "notes": found.notes} if found else {}),
            "statements": [asdict(statement) for statement in known],
            "slips": [asdict(slip) for slip in SLIPS],
        }
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
        return
    from prefed.trackers.terminal import stdout_console
    from prefed.ui.pages.theory import print_theory

    print_theory(constants, known, stdout_console(), found, str(run))


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
