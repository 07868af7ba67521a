"""``prefed evaluate``, ``compare``, ``report`` and ``judge``: results of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from prefed.ui.cli.arguments import AsJson, Fields, PromptColumn, Raw, RoundName, RunFolder
from prefed.ui.cli.errors_and_interrupts import INTERRUPTED, UsageError, terminable, usage
from prefed.ui.cli.log import report as log_event
from prefed.ui.cli.output import only_json, print_json, progress_console


def evaluate(
    run: RunFolder,
    split: Annotated[
        Literal["train", "validation", "test"] | None,
        typer.Option(help="Which of each client's pairs to use (default: the run's evaluation split)."),
    ] = None,
    test: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Evaluate on the pairs of another file, folder or hub dataset."),
    ] = None,
    everyone: Annotated[
        bool, typer.Option("--everyone", help="With --test: evaluate every client on all rows.")
    ] = False,
    client: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this client; repeatable.")
    ] = None,
    taste: Annotated[
        str | None,
        typer.Option(
            metavar="TASTE",
            help="For selectors with a latent taste, the taste to evaluate with: own, population, a "
            "client's id, prototype:K, infer:8 (from 8 of a client's training pairs) or infer:FILE "
            "(from a new user's pairs).",
        ),
    ] = None,
    as_json: AsJson = False,
    which: RoundName = "last",
) -> None:
    """Evaluate a finished run's models on each client's pairs, or on other pairs."""
    if test is not None and split is not None:
        raise UsageError("give --split or --test FILE, not both")
    if everyone and test is None:
        raise UsageError("--everyone requires --test FILE")
    from prefed.runs.finished_run import read_run

    record = read_run(run)
    record.check_clients(client or ())
    import torch

    from prefed.runs.evaluate import evaluate as evaluate_run
    from prefed.runs.evaluate import evaluate_file
    from prefed.runs.loaded_run import load_run
    from prefed.runs.tastes import at_taste
    from prefed.store import plain
    from prefed.trackers.terminal import stdout_console
    from prefed.ui.pages.terminal import print_evaluation

    # The hub of a federation does not have the run's pairs.
    own_pairs = test is None or (taste is not None and not record.sites)
    with only_json(as_json), _progress() as report:
        loaded_run = load_run(run, data=own_pairs, best=which == "best")
        if taste is not None:
            loaded_run = at_taste(loaded_run, taste, test, split or loaded_run.experiment.evaluate.split)
        # With the run's number of threads, its metrics are reproduced exactly.
        torch.set_num_threads(loaded_run.experiment.engine.threads or torch.get_num_threads())
        done = partial(report, "clients")
        if test is None:
            evaluation = evaluate_run(loaded_run, split or loaded_run.experiment.evaluate.split, client, done)
        else:
            evaluation = evaluate_file(loaded_run, test, client, everyone=everyone, progress=done)
    if as_json:
        print_json(plain(evaluation.plain()))
    else:
        number = loaded_run.reader.commit.round
        name = loaded_run.record.name + (f", best round {number}" if which == "best" else "")
        print_evaluation(evaluation, name, stdout_console())


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN RUN...",
            help="Run directories, or folders of run directories, e.g. of prefed sweep.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The plot, a .png, .svg or .pdf file (default: compare.png if matplotlib is installed; none "
            "with --html or --json)."
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a self-contained page about all runs."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare finished runs: tables, differing settings, and a plot or a page."""
    from prefed.runs.exports_log import record_copy
    from prefed.runs.finished_run import find_runs, read_run
    from prefed.ui.pages import plot_file

    default = out is None and html is None and not as_json
    if default and plot_file.installed():
        out = Path("compare.png")
    if out is not None:
        plot_file.file_format(out)
    if html is not None and html.is_dir():
        raise ValueError(f"{html} is a folder; name a file for the page")
    for path in runs:
        if not any(path.rglob("summary.json")):
            read_run(path)  # raises an error with the reason
    records = find_runs(runs)
    if len(records) < 2:
        raise ValueError("give at least two different runs")
    if as_json:
        from prefed.store.reader import plain
        from prefed.ui.pages.comparison_data import Compared

        print_json(plain(Compared(tuple(records)).plain()))
    else:
        from prefed.trackers.terminal import stdout_console
        from prefed.ui.pages.comparison_tables import print_comparison

        print_comparison(records, stdout_console())
    made = []
    if out is not None:
        from prefed.ui.pages.compare_charts import comparison

        plot_file.save(comparison(records), out)
        for each in records:
            record_copy(each.path, "plot", out)
        made.append(f"plot: {out}")
    if html is not None:
        from prefed.ui.pages.compare_page import write_comparison

        write_comparison(records, html)
        for each in records:
            record_copy(each.path, "page", html)
        made.append(f"page: {html}")
    if default and out is None:
        made.append(f"no plot: it {plot_file.NEEDS}")
    for line in made:
        typer.echo(line, err=as_json)


def report(
    run: RunFolder,
    out: Annotated[
        Path | None, typer.Option(help="The page (default: report.html in the run directory).")
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Rewrite the page after every round, until the run ends or Ctrl-C."),
    ] = False,
) -> None:
    """Write a self-contained HTML page about a finished run or, with --watch, a run in progress."""
    from prefed.runs.exports_log import record_copy
    from prefed.runs.finished_run import read_run
    from prefed.store.directory import PAGE
    from prefed.ui.pages.page import write_page
    from prefed.ui.pages.watch import watch as watch_run

    path = out or run / PAGE
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file for the page")
    if not watch:
        write_page(read_run(run), path)
        record_copy(run, "page", path)
        typer.echo(f"report: {path}")
        return
    if run.is_dir():
        record_copy(run, "page", path)
    try:
        with terminable():
            watch_run(run, path, typer.echo)
    except KeyboardInterrupt:
        log_event("stopped", f"report: {path}", "error", code=INTERRUPTED)
        raise typer.Exit(INTERRUPTED) from None


def judge(
    run: RunFolder,
    judge: Annotated[
        str,
        typer.Option(
            metavar="NAME[:ARGUMENT]",
            help="reward:FOLDER, endpoint:MODEL, local:FOLDER, selector:RUN, people:FOLDER or utility.",
            show_default=False,
        ),
    ],
    prompts: Annotated[
        Path, typer.Option(metavar="FILE", help="The prompts, one row each.", show_default=False)
    ],
    run2: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN2]", help="Compare with this run's model (default: the base model)."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare with the reference answers in a file.")
    ] = None,
    column: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --against: the column of the reference answers.")
    ] = None,
    client: Annotated[
        str | None, typer.Option(metavar="ID", help="A client's own model, in both runs if two are given.")
    ] = None,
    against_shared: Annotated[
        bool, typer.Option("--against-shared", help="With --client: compare with the shared model.")
    ] = False,
    policy_taste: Annotated[
        str | None,
        typer.Option(
            metavar="TASTE",
            help="For a model that takes a taste, the taste to respond with, as prefed generate --taste "
            "names it.",
        ),
    ] = None,
    prompt_column: PromptColumn = None,
    criterion: Annotated[
        Literal["helpful", "harmless"] | None,
        typer.Option(help="A criterion for a language model as judge (default: from --template)."),
    ] = None,
    *,
    options: Annotated[
        dict[str, Any],
        Fields(
            "config.align:JudgeOptions",
            "template url key=key_variable timeout parallel judge_tokens taste",
            {"taste": "The client with whose utility or taste to judge (utility; selectors with tastes)."},
            {"key": "VARIABLE", "taste": "CLIENT|mean"},
        ),
    ],
    responses: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL",
            help="Name of the run's model on a server that generates its responses; repeat for the other "
            "model.",
        ),
    ] = None,
    responses_url: Annotated[
        str | None, typer.Option(metavar="URL", help="With --responses: the server's URL, including /v1.")
    ] = None,
    responses_key: Annotated[
        dict[str, Any],
        Fields(
            "config.align:EndpointConfig",
            "responses_key=key_variable",
            metavars={"responses_key": "VARIABLE"},
        ),
    ],
    sampling: Annotated[
        dict[str, Any],
        Fields("train.sampling:Sampling", "max_new_tokens=max_tokens temperature", temperature=0.0),
    ],
    seed: Annotated[int, typer.Option(help="Random seed of sampled responses.")] = 0,
    raw: Raw = False,
    name: Annotated[
        str | None, typer.Option(help="Name of the folder under RUN/judge (default: from what is compared).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let a judge compare a finished run's model with another; writes win rates and verdicts."""
    from prefed.align.judge.names import split_name
    from prefed.config.align import EndpointConfig, JudgeOptions
    from prefed.core.plugins import allow, is_code

    if (responses_url is None) != (not responses):
        raise UsageError("use --responses MODEL and --responses-url URL together")
    with usage():
        if is_code(split_name(judge)[0]):
            allow(judge)
    from prefed.align.judge.questions import criterion_template, get_template
    from prefed.runs.judge import Comparison
    from prefed.runs.judge import judge as judge_run
    from prefed.trackers.terminal import stdout_console
    from prefed.train.generation import Sampling
    from prefed.ui.pages.outcomes import print_judged

    request = {name: options[name] for name in ("timeout", "parallel")}
    with usage():
        if criterion is not None:
            options["template"] = criterion_template(criterion, options["template"], judge)
        get_template(options["template"])
        comparison = Comparison(
            judge=judge,
            prompts=prompts,
            other=run2,
            reference=against,
            column=column,
            client=client,
            against_shared=against_shared,
            taste=policy_taste,
            prompt_column=prompt_column,
            raw=raw,
            sampling=Sampling(**sampling),
            seed=seed,
            options=JudgeOptions(**options),
            servers=[
                EndpointConfig(model=model, url=str(responses_url), **responses_key, **request)
                for model in responses or ()
            ],
            name=name,
        )
    with only_json(as_json), _progress() as report:
        summary = judge_run(run, comparison, report)
    if as_json:
        print_json(summary)
    else:
        print_judged(summary, run, stdout_console())


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Progress bars on standard error, if it is a terminal: call with a name, done and total."""
    from rich.progress import Progress, TaskID

    console = progress_console(as_json=True)
    tasks: dict[str, TaskID] = {}
    with Progress(console=console, transient=True, disable=console.quiet or not console.is_terminal) as bar:

        def report(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=of)

        yield report
