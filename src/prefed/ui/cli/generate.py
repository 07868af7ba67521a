"""``prefed generate RUN --prompt …``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from prefed.ui.cli.arguments import RoundName
from prefed.ui.cli.errors import UsageError
from prefed.ui.cli.output import print_json


def generate(
    run: Annotated[Path, typer.Argument(help="The run directory.", show_default=False)],
    prompt: Annotated[
        list[str],
        typer.Option(
            metavar="TEXT", help="What to respond to; may be given again. - reads it from standard input."
        ),
    ],
    client: Annotated[
        str | None, typer.Option(metavar="ID", help="A client's own model; left out: the one that all share.")
    ] = None,
    taste: Annotated[
        str | None,
        typer.Option(
            metavar="TASTE",
            help="For a model that takes a taste: population, a client's id, prototype:K, infer:FILE, what "
            "the pairs of a file tell, or with --client ID infer:8, what 8 of that client's pairs tell.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses to each prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a response at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from so many of the likeliest tokens; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the draws; base and aligned model draw alike.")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Take prompts as they are, also where the run's data are dialogues.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    which: RoundName = "last",
) -> None:
    """Let the base model and a finished run's model respond to prompts, side by side."""
    if not 0 < top_p <= 1:
        raise UsageError(f"--top-p {top_p}: above 0 and at most 1")
    from prefed.core import Key
    from prefed.models.notices import silence_transformers
    from prefed.runs.loaded import load_run
    from prefed.runs.responses import Models
    from prefed.runs.tastes import needs_pairs
    from prefed.train.generation import Sampling, complete

    silence_transformers()
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k)
    models = Models(
        load_run(run, data=needs_pairs(taste), best=which == "best"), sampling, seed=seed, raw=raw
    )
    aligned, base = models.own(client, taste), models.base()
    heading, responses = ", ".join(filter(None, ("aligned", taste, client))), []
    for text in (sys.stdin.read() if text == "-" else text for text in prompt):
        ids = aligned.ids(text)
        for number in range(samples):
            key = Key(seed).at("generate", text).at("sample", number)
            first, second = (
                complete(m.backbone, m.tensors, ids, sampling, key, taste=m.taste) for m in (base, aligned)
            )
            responses.append({"prompt": text, "sample": number, "base": first, "aligned": second})
            if not as_json:
                print_responses(text if number == 0 else "", first, second, heading)
    if as_json:
        print_json(responses)


def print_responses(prompt: str, base: str, aligned: str, heading: str) -> None:
    """Two responses side by side, below their prompt, which is empty if it stands above earlier ones already.

    ``heading`` is that of the aligned model's column.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from prefed.core.text import printable_lines
    from prefed.trackers.terminal import stdout_console

    console = stdout_console()
    if prompt:
        console.print(Text(printable_lines(prompt.strip()), style="bold"))
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
    for head in ("base", heading):
        table.add_column(Text(head), ratio=1, overflow="fold")
    table.add_row(*(Text(printable_lines(text.strip())) for text in (base, aligned)))
    console.print(table)
