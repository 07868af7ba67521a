"""``prefed theory`` and ``prefed privacy``: calculations without training."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefed.ui.cli.arguments import AsJson, CellName
from prefed.ui.cli.errors_and_interrupts import UsageError
from prefed.ui.cli.output import print_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from prefed.runs.theory_constants import Estimate
    from prefed.theory import Constants, Statement


def theory(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Constants, as the keys of a TOML file.", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a constant, e.g. lr=0.01."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Estimate the constants from this run, which needs evaluate.diagnose; FILE and --set "
            "override them.",
            show_default=False,
        ),
    ] = None,
    graph: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Compute rho from this graph, e.g. star, with Metropolis weights."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate the bounds on FedDPO and DecDPO for given constants, or for those of a run."""
    from prefed.theory import statements

    found = None
    if run is not None:
        from prefed.runs.theory_constants import estimate

        found = estimate(run)
    constants = read_constants(file, overrides or [], graph, found.constants if found else {})
    known = statements(constants)
    if as_json:
        print_json(
            {
                "constants": constants.model_dump() | constants.derived(),
                **({"measured": found.measured, "notes": found.notes} if found else {}),
                "statements": [asdict(statement) for statement in known],
            }
        )
        return
    from prefed.trackers.terminal import stdout_console

    _print(constants, known, found, stdout_console())


def read_constants(
    file: Path | None, overrides: list[str], graph: str | None, found: Mapping[str, float]
) -> Constants:
    """Combine the constants ``found`` in a run with a file, ``--set`` and ``--graph``; later ones win.

    Raises:
        ConfigError: unknown constant, or a value out of range.
    """
    from prefed.config import ConfigError
    from prefed.config.errors import validate
    from prefed.config.file import override, read_toml
    from prefed.theory import Constants

    if file is not None and not file.exists():
        raise ConfigError(f"{file}: no such file; omit FILE to use the paper's constants")
    tables: dict[str, Any] = read_toml(file) if file else {}
    origins = override(tables, overrides, Path())
    tables = {**found, **tables}
    where = str(file or "prefed theory")
    constants = validate(Constants, tables, where, origins)
    if graph is None:
        return constants
    return validate(Constants, {**tables, "rho": rho_of(graph, constants.clients)}, where, origins)


def rho_of(graph: str, clients: int) -> float:
    """ρ of a named graph with Metropolis–Hastings weights."""
    from typing import get_args

    from prefed.core import Key
    from prefed.core.text import did_you_mean
    from prefed.merge.config import GraphConfig, GraphName
    from prefed.merge.mixing_matrices import Topology

    fixed = [name for name in get_args(GraphName) if name not in ("erdos_renyi", "edges", "matrix")]
    if graph not in fixed:
        near = did_you_mean(graph, fixed) or f" (graphs: {', '.join(fixed)})"
        raise UsageError(f"--graph {graph}: no such graph{near}")
    nodes = tuple(str(node) for node in range(clients))
    return Topology(GraphConfig.model_validate({"name": graph}), nodes, Key(0)).rho


def _print(
    constants: Constants, known: Sequence[Statement], found: Estimate | None, console: Console
) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("constant", "value", "meaning"):
        table.add_column(head, no_wrap=head != "meaning")
    meanings = {name: field.description for name, field in type(constants).model_fields.items()}
    for name, value in (constants.model_dump() | constants.derived()).items():
        if value is not None:
            table.add_row(name, f"{value:.6g}", meanings.get(name, ""))
    console.print(table)

    def line(text: str = "") -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if found:
        line("measured")
        for name, meaning in (
            ("mean_squared_gradient", "(1/R) Σ‖∇ℒ(θ^r)‖² over the diagnosed rounds; bounds follow below"),
            ("last_squared_gradient", "‖∇ℒ‖² in the last diagnosed round"),
            ("paper_gap", "the paper's gap: mean squared norm of mini-batch gradients, clipped at 1"),
        ):
            line(f"    {found.measured[name]:<12.4g} {meaning}")
        for note in found.notes:
            line(f"  {note}")
    for statement in known:
        line(f"\n{statement.name} – {statement.about}")
        if statement.limit:
            formula, value = statement.limit
            within = "within" if statement.allowed else "not within"
            line(f"  η ≤ {formula} = {value:.4g}: η is {within} the limit")
        for bound in filter(None, (statement.stated, statement.derived)):
            line(f"  {bound.where}:")
            for formula, value in bound.terms.items():
                line(f"    {value:<12.4g} {formula}")
            if bound.total is not None:
                line(f"    {bound.total:<12.4g} in total")
        if statement.stated.total is not None:
            when = f"from R = {statement.rounds:,} on" if statement.rounds else "never: η is too large"
            line(f"  the stated bound is below ε {when}")
    line("\nKnown errors of these statements: experiments/distributed_dpo/slips.md in prefed's repository.")


def privacy(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The experiment file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key."),
    ] = None,
    cell: CellName = None,
    clients: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of clients that train (default: from data.partition).",
            show_default=False,
        ),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            metavar="E",
            help="Find the smallest noise_multiplier that keeps epsilon below E.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute the epsilon of a run with [privacy] kind, or the noise that an epsilon needs."""
    from dataclasses import replace

    from prefed.config import ConfigError
    from prefed.core.text import pluralize
    from prefed.networks.federation.experiment import HELD, load_federated
    from prefed.runs.privacy import metrics_note, plan, trust_models, with_votes

    if epsilon is not None and epsilon <= 0:
        raise UsageError("--epsilon must be above 0")
    experiment = load_federated(file, cell, overrides or ())
    if clients is None and getattr(experiment.data.train, "path", None) == HELD:
        raise ConfigError(f"{file}: only the sites know the number of clients; set it with --clients")
    promised, releases = plan(experiment, clients)
    delta = experiment.privacy.delta
    assert delta is not None
    if epsilon is not None:
        promised = replace(promised, noise_multiplier=promised.noise_for(epsilon, releases, delta))
    spent = promised.epsilon(releases, delta)
    votes, epsilon_with_votes = with_votes(experiment, promised, releases)
    models = [] if spent is None else trust_models(experiment, promised, epsilon or spent)
    if as_json:
        content = {
            "trust_models": [model._asdict() for model in models],
            "noise_multiplier": promised.noise_multiplier,
            "epsilon": spent,
            "delta": delta,
            "adjacency": promised.adjacency,
            "bound": promised.bound,
            "releases": releases,
            **({"votes": votes, "epsilon_with_votes": epsilon_with_votes} if votes else {}),
        }
        print_json(content)
        return
    budget = "unbounded, without noise" if spent is None else f"{spent:.4g} at delta {delta:g}"
    typer.echo(f"noise_multiplier  {promised.noise_multiplier:.4f}")
    typer.echo(f"epsilon           {budget}")
    typer.echo(f"neighbours        {promised.adjacency}")
    typer.echo(f"bound             {promised.bound}")
    typer.echo(f"releases          {releases} (maximum over clients)")
    typer.echo(f"metrics           {metrics_note(experiment, promised)}")
    if votes and epsilon_with_votes is not None:
        labels = pluralize(votes, "generation", "generations")
        typer.echo(f"votes             epsilon {epsilon_with_votes:.4g} with those for labels of {labels}")
    if models:
        typer.echo("\nkind         epsilon  multiplier  noise on the mean  bytes up*  sees single updates")
    for each in models:
        reached = "–" if each.epsilon is None else f"{each.epsilon:.4g}"
        typer.echo(
            f"{each.kind:<11}  {reached:>7}  {each.noise_multiplier:>10.4f}  {each.noise:>17.3g}  "
            f"{each.bytes_up:>9,}  {each.trusted}"
        )
    if models:
        typer.echo("* to the server in a round, for each number in float32; only distributed covers metrics")
