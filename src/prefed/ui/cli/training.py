"""``prefed run``, ``sweep`` and ``align``: the commands that train."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from prefed.ui.cli.arguments import (
    AsJson,
    AutoResume,
    CellName,
    Fields,
    File,
    Overrides,
    Resume,
    RunFolder,
    RunOut,
    Track,
    given_words,
    run_name,
)
from prefed.ui.cli.errors_and_interrupts import INTERRUPTED, UsageError, interruptible, terminable
from prefed.ui.cli.log import report
from prefed.ui.cli.output import print_json, print_progress, progress_console, terminal

if TYPE_CHECKING:
    from rich.console import Console

    from prefed.align import Clients
    from prefed.config import AlignConfig, Experiment
    from prefed.runs.sweep import SweepCell


def run(
    context: typer.Context,
    file: File,
    overrides: Overrides = None,
    out: RunOut = None,
    resume: Resume = False,
    auto_resume: AutoResume = False,
    cell: CellName = None,
    track: Track = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything and estimate message sizes and the duration of a round; write nothing.",
        ),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cuda:SIZE",
            help="With --dry-run: estimate the memory of a training step on a GPU of this size instead, e.g. "
            "cuda:80GB. No weights are loaded, and no GPU is needed.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment and write its run directory."""
    if device and not dry_run:
        raise UsageError("--device requires --dry-run; to choose a run's device, --set model.device=NAME")
    if dry_run and (resume or auto_resume):
        raise UsageError("give --dry-run or --resume, not both: a dry run is always a new run")
    overrides = [*(overrides or []), *([f"track.to={json.dumps(track)}"] if track else [])]
    words = ["prefed", "run", str(file), *given_words(context, ("out", "resume", "auto_resume", "as_json"))]
    again = "--auto-resume" if auto_resume else "--resume"
    from prefed.core.plugins import looking

    with (
        interruptible(words, out, resume or auto_resume, again=(again,)) as paths,
        looking() if dry_run else nullcontext(),
    ):
        from prefed.config.experiment_table import load_cell

        # Report errors in the file before the slow import of PyTorch.
        experiment = load_cell(file, cell, overrides)
        from prefed.core.text import pluralize, printable_lines
        from prefed.runs.run import default_out
        from prefed.runs.start_or_resume import refuse_existing
        from prefed.store import StoreError
        from prefed.store.directory import holds_run

        console = progress_console(as_json)
        path = out or default_out(experiment, run_name(file, cell))
        if path.is_file():
            raise ValueError(f"{path} is a file, not a folder; choose another --out")
        if not dry_run:
            paths.append(path)
        resume = holds_run(path) if auto_resume else resume
        try:
            refuse_existing(experiment, path, resume)
        except StoreError as error:
            # A dry run writes nothing, so only a directory that was asked for is a reason to refuse.
            if not dry_run or out is not None:
                raise
            report("warning", printable_lines(f"warning: {error}"), "warning")
        rounds = pluralize(experiment.rounds, "round", "rounds")
        console.print(f"{experiment.method.name}, {rounds} → {path}", markup=False)
        if device:
            from prefed.runs.memory_plan import plan_memory
            from prefed.ui.pages.terminal import plan_line, print_memory_plan

            _show(plan_memory(experiment, device), as_json, console, plan_line, print_memory_plan)
        elif dry_run:
            from prefed.runs import dry_run as trial
            from prefed.ui.pages.terminal import estimate_line, print_dry_run

            _show(trial.dry_run(experiment, path), as_json, console, estimate_line, print_dry_run)
        else:
            _run(experiment, path, resume, as_json, console)


def _run(experiment: Experiment, path: Path, resume: bool, as_json: bool, console: Console) -> None:
    from prefed.runs.metrics import groupings_of
    from prefed.runs.run import run as run_experiment
    from prefed.ui.pages.terminal import print_result, privacy_line, result_line

    page: Callable[[Path], str] | None = None
    if experiment.track is not None:
        from prefed.ui.pages.page import public_page

        page = public_page
    result = run_experiment(experiment, path, resume=resume, callbacks=terminal(console), page=page)
    if as_json:
        print_json(result.summary)
    elif console.quiet:
        typer.echo(f"{result_line(result.summary)} → {path}")
    else:
        spent, tastes = {}, None
        if experiment.align or experiment.has_tastes:
            from prefed.runs.finished_run import alignment_of, spent_with_votes, tastes_in

            spent = spent_with_votes(alignment_of(path)) if experiment.align else {}
            tastes = tastes_in(path)
        print_result(result.summary, console, groupings=groupings_of(result.rounds), tastes=tastes)
        adapters = ", ".join(map(str, result.adapters)) or "none; see `prefed export`"
        for line in (
            *map(privacy_line, spent.values()),
            f"{'adapters' if len(result.adapters) > 1 else 'adapter'}: {adapters}",
            *([f"aligned: {path / 'align' / 'adapter'}"] if experiment.align else []),
            f"summary: {path / 'summary.json'}",
            f"report: prefed report {shlex.quote(str(path))}",
            *next_commands(path, experiment.method.kind.reads == "choice", experiment.align is not None),
        ):
            console.print(line, markup=False, soft_wrap=True)


def _show(
    found: Any, as_json: bool, console: Console, line: Callable[[Any], str], tables: Callable[..., None]
) -> None:
    """Print an estimate as JSON, with ``-q`` in a line, or else in tables."""
    if as_json:
        print_json(asdict(found))
    elif console.quiet:
        typer.echo(line(found))
    else:
        tables(found, console)


def next_commands(path: Path, selectors: bool, aligned: bool) -> list[str]:
    """Suggested next commands after a run with selectors; otherwise none."""
    run = shlex.quote(str(path))
    if aligned:
        return [f"judge: prefed judge {run} --judge NAME --prompts FILE"]
    return [f"align: prefed align {run} --prompts FILE"] if selectors else []


T = TypeVar("T")


def sweep(
    tables: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Table files (TOML); with --grid or --seeds, one experiment file.",
            show_default=False,
        ),
    ],
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="Run the experiment with each of these values of a key, e.g. method.lr=1e-4,1e-3; given "
            "again, every combination is run. The best one on validation pairs is selected.",
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Number of seeds for every combination, starting with the experiment's own; or the seeds "
            "themselves, e.g. 1,2,5.",
            show_default=False,
        ),
    ] = None,
    judge: Annotated[
        Literal["preference_accuracy", "reward_accuracy"] | None,
        typer.Option(
            help="With --grid, the metric that selects (default: preference_accuracy).", show_default=False
        ),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="The folder for runs, tables and pages.")] = Path("runs/tables"),
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CELL", help="Only this cell, or the cells that match a pattern such as 'imdb-3/*'."
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Run this method instead of the methods of the tables, and add it to OUT/leaderboard.md; a "
            "name, ./FILE.py or PACKAGE.MODULE:OBJECT.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Number of parallel runs, with one thread each.")] = 2,
) -> None:
    """Run the cells of a table, or an experiment over a grid and seeds; existing runs are resumed."""
    if grid or seeds is not None:
        if len(tables) > 1 or only or method:
            raise UsageError("--grid and --seeds are for one experiment file, without --only and --method")
        _sweep_grid(tables[0], grid or [], seeds, judge or "preference_accuracy", overrides or [], out, jobs)
        return
    if judge is not None:
        raise UsageError("--judge requires --grid; a table declares its own judge")
    if len({table.stem for table in tables}) < len(tables):
        raise UsageError("two tables have the same file name; run them separately, each with its own --out")
    from prefed.runs.sweep import Sweep, check_cells, sweep_cells

    if method:
        _sweep_methods(tables, method, overrides or [], out, only or [], jobs)
        return
    cells = [cell for table in tables for cell in sweep_cells(table, out, overrides or [])]
    order: dict[Path, list[str]] = {}
    for cell in cells:
        order.setdefault(cell.folder, []).append(cell.definition.name)
    cells = _select(cells, only or [])
    from prefed.ui.pages.sweep import keep

    check_cells(cells)

    def done(cell: SweepCell, outcome: dict[str, Any]) -> None:
        keep(cell, order[cell.folder], outcome)

    work = Sweep(jobs, print_progress)
    _to_the_end(work.tables(cells, done))
    for folder, table in {cell.folder: cell.table for cell in cells}.items():
        path = folder.with_name(f"{folder.name}.md")
        if path.exists():
            typer.echo(f"\n{table.title} ({path})\n\n{path.read_text('utf-8')}", nl=False)
    if work.failed:
        raise ValueError("some cells failed:\n" + "\n".join(work.failed.values()))


def _sweep_methods(
    tables: list[Path], methods: list[str], overrides: list[str], out: Path, only: list[str], jobs: int
) -> None:
    from prefed.config import ConfigError
    from prefed.config.file import allow_code, make_absolute
    from prefed.runs.sweep import Sweep, check_cells, sweep_cells
    from prefed.ui.pages.leaderboard import add, write_leaderboard

    named = [{"method": {"name": name}} for name in methods]
    for tree in named:
        make_absolute(tree, [Path()])
        allow_code(tree)
    cells = [
        cell
        for tree in named
        for table in tables
        for cell in sweep_cells(table, out, overrides, tree["method"]["name"])
    ]
    if len({cell.name for cell in cells}) < len(cells):
        raise UsageError("two methods have the same name; run them separately, each with its own --out")
    cells = _select(cells, only)
    refused: dict[str, str] = {}
    for cell in cells:
        try:
            cell.planned()
        except ConfigError:
            try:
                replace(cell, overrides=()).planned()
            except ConfigError as error:  # also without --set, so the method cannot do the task
                where = f"{cell.definition.path}, cell {cell.definition.name}: "
                refused[cell.name] = " ".join(str(error).removeprefix(where).split())
                print_progress(f"{cell.name} is refused: {refused[cell.name]}")
            else:
                raise
    possible = [cell for cell in cells if cell.name not in refused]
    check_cells(possible)
    work = Sweep(jobs, print_progress)
    if possible:
        _to_the_end(work.tables(possible, partial(add, out)))
    refused |= work.refused
    for cell in cells:
        if cell.name in refused:
            add(out, cell, {"refused": refused[cell.name]})
    typer.echo(write_leaderboard(out))
    if failed := [line for name, line in work.failed.items() if name not in refused]:
        raise ValueError("some cells failed:\n" + "\n".join(failed))
    if all(cell.name in refused for cell in possible):
        raise ValueError("every cell is refused:\n" + "\n".join(f"{k}: {v}" for k, v in refused.items()))


def _sweep_grid(
    path: Path,
    grid: list[str],
    seeds: str | None,
    judge: Literal["preference_accuracy", "reward_accuracy"],
    overrides: list[str],
    out: Path,
    jobs: int,
) -> None:
    from prefed.config.experiment_table import grid_table
    from prefed.config.grid import parse_grid, parse_seeds
    from prefed.runs.sweep import Sweep, check_cells, grid_cells

    combinations = parse_grid(grid, overrides)
    _, (first, *_) = grid_table(path, combinations, [0])
    every_seed = parse_seeds(seeds, first.experiment(*overrides).seed)
    cells = grid_cells(path, combinations, every_seed, out / path.stem, overrides, judge)
    check_cells(cells)
    sweep = Sweep(jobs, print_progress)
    chosen = _to_the_end(sweep.grid(cells))
    from prefed.ui.pages.sweep import keep_grid, sentence

    kept = keep_grid(cells, chosen)
    for line in (*map(sentence, chosen), *(kept or ())):
        typer.echo(line)
    if sweep.failed:
        raise ValueError(
            "some runs failed, so no combination was selected:\n" + "\n".join(sweep.failed.values())
        )


def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; on an interrupt, cancel it and exit."""
    try:
        with terminable():
            return asyncio.run(work)
    except KeyboardInterrupt:
        text = "\nstopped; the same command continues from here"
        report("stopped", text, "error", code=INTERRUPTED)
        raise typer.Exit(INTERRUPTED) from None


def _select(cells: list[SweepCell], only: list[str]) -> list[SweepCell]:
    from prefed.core.text import did_you_mean

    names = [cell.definition.name for cell in cells]
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = did_you_mean(pattern, names) or f" (cells: {', '.join(names)})"
            files = ", ".join(dict.fromkeys(str(cell.definition.path) for cell in cells))
            raise ValueError(f"{files}: no cell matches {pattern!r}{hint}")
    return [
        cell
        for cell in cells
        if not only or any(fnmatchcase(cell.definition.name, pattern) for pattern in only)
    ]


def align(
    context: typer.Context,
    run: RunFolder,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The server's prompts: a file, folder or hub dataset (default: align.prompts).",
        ),
    ] = None,
    overrides: Overrides = None,
    stage: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Repeat this stage and those after it: prompts, policy, …"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the alignment in the directory, with its settings.")
    ] = False,
    hub: Annotated[
        Path | None, typer.Option(help="For a run whose clients judge at their sites: the hub's folder.")
    ] = None,
    sites: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="With --hub: the sites whose clients judge (default: all)."),
    ] = None,
    *,
    terms: Annotated[
        dict[str, Any],
        Fields(
            "networks.federation.config:Terms",
            "wait visit",
            {
                "wait": "With --hub: seconds to wait for all sites to connect.",
                "visit": "With --hub: timeout of a client's task in seconds.",
            },
        ),
    ],
) -> None:
    """Align a model with a finished run's selectors, on prompts only."""
    overrides = [*([f"align.prompts.path={json.dumps(prompts)}"] if prompts else []), *(overrides or [])]
    words = ["prefed", "align", str(run), *given_words(context, ("stage", "resume"))]
    with interruptible(words, None, resume=True, kept="finished steps are kept"):
        from prefed.runs.finished_run import read_run

        record = read_run(run)
        from prefed.align.run import has_alignment
        from prefed.config.align import SITE
        from prefed.core import Callbacks
        from prefed.core.text import pluralize
        from prefed.runs.align import FOLDER, read_settings
        from prefed.runs.align import align as align_run
        from prefed.runs.labels import check_selectors
        from prefed.train.metrics import health_line
        from prefed.ui.pages.terminal import privacy_line

        check_selectors(record)
        folder = record.path / FOLDER
        anew = not (resume or stage)
        if anew and has_alignment(folder):
            raise ValueError(
                f"{folder} contains an alignment: continue it with --resume, or repeat a stage and those "
                "after it with --stage NAME (--stage prompts repeats all)"
            )
        config = read_settings(record, overrides, anew=anew)
        if (hub is None) == (config.client_judge == SITE):
            raise UsageError(f"--hub and align.client_judge = '{SITE}' require each other")

        console = progress_console()
        console.print(f"{config.prompts.path} → {folder}", markup=False, soft_wrap=True)
        callbacks = terminal(console)
        with _site_clients(
            record.path, config, hub, sites, terms, Callbacks(callbacks).on_warning
        ) as clients:
            done = align_run(run, config, stage=stage, callbacks=callbacks, clients=clients)
        training = done["train"]
        kept = training["epochs"][training["kept"] - 1]
        generation = f", generation {kept['generation']}" if "generation" in kept else ""
        measured = ""
        if kept.get("win_rate") is not None:
            answered = pluralize(training["answered"], "held-out prompt", "held-out prompts")
            health = health_line(kept["text"]["shared"], kept["text"]["base"])
            measured = f", win rate {kept['win_rate']:.3f} over its start on {answered}; {health}"
        for line in (
            f"kept: epoch {kept['epoch']} of {len(training['epochs'])}{generation}{measured}",
            *([privacy_line(done["privacy"])] if "privacy" in done else []),
            f"adapter: {folder / 'adapter'}",
            f"summary: {folder / 'summary.json'}",
            *next_commands(run, selectors=True, aligned=True),
        ):
            console.print(line, markup=False, soft_wrap=True)
        if console.quiet:
            typer.echo(f"adapter: {folder / 'adapter'}")


@contextmanager
def _site_clients(
    run: Path,
    config: AlignConfig,
    hub: Path | None,
    sites: str | None,
    terms: dict[str, Any],
    warn: Callable[[str], None],
) -> Iterator[Clients | None]:
    """Open the sites of a run, whose clients judge; nothing without a hub."""
    if hub is None:
        yield None
        return
    from prefed.networks.federation.flare import check_installed

    check_installed()
    from prefed.networks.federation.config import Terms
    from prefed.networks.federation.flare.kits import Kits
    from prefed.networks.federation.flare.transport import FlareTransport
    from prefed.networks.federation.site_clients import site_clients

    kits = Kits.open(hub)
    asked = Terms(kits.federation, tuple(sites.split(",")) if sites else (), **terms)
    with (
        FlareTransport(kits) as transport,
        site_clients(run, config, transport, asked, warn, print_progress) as clients,
    ):
        yield clients
