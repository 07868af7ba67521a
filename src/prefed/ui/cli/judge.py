"""``prefed judge RUN --judge … --prompts …``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from prefed.ui.cli.errors import UsageError, usage
from prefed.ui.cli.output import bar_console, print_json


def judge(
    run: Annotated[Path, typer.Argument(help="The run directory.", show_default=False)],
    judge: Annotated[
        str,
        typer.Option(
            metavar="NAME[:ARGUMENT]",
            help="reward:FOLDER, endpoint:MODEL, local:FOLDER, selector:RUN or utility.",
            show_default=False,
        ),
    ],
    prompts: Annotated[
        Path, typer.Option(metavar="FILE", help="A row for each prompt to respond to.", show_default=False)
    ],
    run2: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN2]", help="Compare with this run's model; left out: with the untouched one."
        ),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare with the reference answers in a file.")
    ] = None,
    column: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --against: the column of the answers.")
    ] = None,
    client: Annotated[
        str | None, typer.Option(metavar="ID", help="A client's own model, of both runs if there are two.")
    ] = None,
    against_shared: Annotated[
        bool, typer.Option("--against-shared", help="With --client: compare with the shared model.")
    ] = False,
    policy_taste: Annotated[
        str | None,
        typer.Option(
            metavar="TASTE",
            help="For a model that takes a taste, the one with which it responds, as prefed generate --taste "
            "names it.",
        ),
    ] = None,
    prompt_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of the prompts; left out: prompt, or that of preference pairs."),
    ] = None,
    template: Annotated[
        str, typer.Option(help="How a language model is asked: plain, mt-bench or auto-j.")
    ] = "plain",
    criterion: Annotated[
        Literal["helpful", "harmless"] | None,
        typer.Option(help="A language model decides by this alone; left out: by --template."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Of an endpoint, up to and with /v1; left out: OpenAI's.")
    ] = None,
    key: Annotated[
        str, typer.Option(metavar="VARIABLE", help="The environment's variable with an endpoint's key.")
    ] = "OPENAI_API_KEY",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an endpoint's answer.")] = 120.0,
    parallel: Annotated[int, typer.Option(min=1, help="Questions to an endpoint at a time.")] = 4,
    judge_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a judge's answer at most.")] = 1024,
    taste: Annotated[
        str,
        typer.Option(
            metavar="CLIENT|mean",
            help="Whose utility, for the judge utility; whose taste, for selectors that have one.",
        ),
    ] = "mean",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a response at most.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="Of responses; 0 takes the likeliest token each time.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of responses that are drawn.")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Take prompts as they are, also where the run's data are dialogues.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Of the folder under RUN/judge; left out: made of what is compared.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Let a judge compare a finished run's model with another one: win rates, and every verdict in a file."""
    from prefed.align.judge.questions import JudgeOptions
    from prefed.align.judge.registry import split_name

    if timeout <= 0:
        raise UsageError(f"--timeout {timeout:g}: above 0")
    with usage():
        split_name(judge)
    from prefed.align.judge.questions import URL, criterion_template, get_template
    from prefed.models.notices import silence_transformers
    from prefed.runs.judge import Comparison
    from prefed.runs.judge import judge as judge_run
    from prefed.trackers.terminal import stdout_console
    from prefed.train.generation import Sampling
    from prefed.ui.pages.outcomes import print_judged

    silence_transformers()
    with usage():
        if criterion is not None:
            template = criterion_template(criterion, template, judge)
        get_template(template)
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
            sampling=Sampling(max_tokens=max_new_tokens, temperature=temperature),
            seed=seed,
            options=JudgeOptions(
                url=URL if url is None else url,
                template=template,
                judge_tokens=judge_tokens,
                key_variable=key,
                timeout=timeout,
                parallel=parallel,
                taste=taste,
            ),
            name=name,
        )
    with _progress() as tell:
        summary = judge_run(run, comparison, tell)
    if as_json:
        print_json(summary)
    else:
        print_judged(summary, run, stdout_console())


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each step, on standard error if that is a terminal."""
    from rich.progress import Progress, TaskID

    console = bar_console()
    tasks: dict[str, TaskID] = {}
    with Progress(console=console, transient=True, disable=console.quiet or not console.is_terminal) as bar:

        def tell(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=of)

        yield tell
