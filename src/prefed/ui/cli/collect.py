"""``prefed collect``: preference pairs from a person."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prefed.ui.cli.arguments import Fields, PromptColumn
from prefed.ui.cli.errors_and_interrupts import UsageError, interruptible

if TYPE_CHECKING:
    from prefed.ui.collect.response_generator import Drawing
    from prefed.ui.collect.session import Session


def collect(
    prompts: Annotated[
        str | None,
        typer.Argument(help="A file, folder or hub dataset of prompts (default: typed on the page)."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model that responds: a folder or a hub name.")
    ] = None,
    pairs: Annotated[
        str | None,
        typer.Option("--from", metavar="FILE", help="Judge the pairs in FILE, blind; needs no model."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The file for the chosen pairs (default: pairs.jsonl; with --from, judged.jsonl).",
        ),
    ] = None,
    thumbs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Offer the answers “both good” and “both bad”, saved to FILE as thumbs.",
        ),
    ] = None,
    client: Annotated[
        str | None, typer.Option(metavar="NAME", help="The annotator's name (default: the page asks for it).")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N prompts or pairs of the file.")
    ] = None,
    prompt_column: PromptColumn = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Use typed prompts without a chat template, even if the others are dialogues."
        ),
    ] = False,
    *,
    how: Annotated[
        dict[str, Any],
        Fields(
            "train.sampling:Sampling",
            "max_new_tokens=max_tokens temperature top_p top_k",
            {"temperature": "Temperature; above 0, so that the two responses differ."},
        ),
    ],
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Data type of the model's weights.")
    ] = "float32",
    ahead: Annotated[int, typer.Option(min=1, help="Number of pairs generated ahead.")] = 16,
    seed: Annotated[int, typer.Option(help="Random seed of the responses and of their sides.")] = 0,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 picks a free one.")] = 0,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Collect preference pairs from a person, on a local web page."""
    with interruptible(["prefed", *sys.argv[1:]], None, True, kept="every choice is kept", again=()):
        if (pairs is None) == (model is None) or (pairs is not None and prompts is not None):
            raise UsageError("give --model NAME, optionally with PROMPTS, or --from FILE without PROMPTS")
        if not how["temperature"]:
            raise UsageError("--temperature must be above 0, so that the two responses differ")
        path = out or Path("pairs.jsonl" if pairs is None else "judged.jsonl")
        if pairs is not None and path.exists() and Path(pairs).exists() and path.samefile(pairs):
            raise UsageError(f"--out {path} is the same file as --from; choose another --out")
        if thumbs is not None and thumbs.resolve() in (path.resolve(), Path(pairs or path).resolve()):
            raise UsageError(f"--thumbs {thumbs} is also the file of the pairs; choose another --thumbs")
        if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
            raise ValueError(f"prefed collect needs {' and '.join(missing)}: pip install 'prefed[collect]'")
        from prefed.core import Key
        from prefed.runs.append_log import Journal
        from prefed.ui.collect.pairs import Choices, DrawnPairs, file_prompts, recorded_pairs
        from prefed.ui.collect.server import listen, serve
        from prefed.ui.collect.session import Session

        key = Key(seed).at("collect")
        with listen(port) as listening, Journal(journal_of(path)) as journal:
            choices, add = Choices(path), None
            unpaired = None if thumbs is None else Choices(thumbs, "--thumbs")
            drawing: Drawing | nullcontext[None] = nullcontext()
            if model is None:
                assert pairs is not None
                session = Session(recorded_pairs(pairs, limit), choices, journal, key, unpaired)
            else:
                from prefed.models import ModelConfig, load_backbone
                from prefed.train.generation import Sampling
                from prefed.ui.collect.response_generator import Drawing, ModelResponder

                asked = [] if prompts is None else file_prompts(prompts, prompt_column, limit)
                backbone = load_backbone(ModelConfig(name=model, dtype=dtype), key.at("model"))
                like = asked[0] if asked else None
                responder = ModelResponder(backbone, Sampling(**how), key, like, raw=raw)
                drawn = DrawnPairs(asked, journal, responder.identity)
                session = Session(drawn, choices, journal, key, unpaired)
                drawing = Drawing(session, drawn, responder, ahead=ahead, report=_note)
                add = drawing.add
            if client is not None:
                session.name(client)
            try:
                with drawing:
                    serve(session, listening, add=add, report=_link_printer(show))
            finally:
                _print_end(session)


def journal_of(out: Path) -> Path:
    """The journal of responses, in a hidden folder so that the folder of ``out`` can be read as data."""
    return out.parent / f".{out.name}.collect" / "journal.jsonl"


def _note(text: str) -> None:
    from prefed.core.text import printable

    typer.echo(printable(text))


def _link_printer(show: bool) -> Callable[[str], None]:
    first = True

    def report(link: str) -> None:
        nonlocal first
        typer.echo(f"{'page (Ctrl-C to stop)' if first else 'link for another browser'}:\n  {link}")
        if show and first:
            import webbrowser

            webbrowser.open(link)
        first = False

    return report


def _print_end(session: Session) -> None:
    from prefed.core.text import pluralize

    path, progress, agreement = session.choices.path, session.progress(), session.agreement()
    chosen = pluralize(progress.chosen, "pair", "pairs")
    neither = f"; {progress.neither:,} answered with neither" if progress.neither else ""
    typer.echo(f"{chosen} by {session.client or 'nobody'} in {path}{neither}")
    if agreement is not None:
        kappa = "none" if agreement.kappa is None else f"{agreement.kappa:.2f}"
        typer.echo(
            f"agreement with the recorded choices: {agreement.share:.1%} of {agreement.judged:,} "
            f"(95% interval {agreement.low:.1%} to {agreement.high:.1%}), Cohen's kappa {kappa}"
        )
    typer.echo(f"to train on them, set in [data]: train = {json.dumps(str(path), ensure_ascii=False)}")
    if progress.thumbs and session.thumbs is not None:
        where = json.dumps(str(session.thumbs.path), ensure_ascii=False)
        answers = pluralize(progress.thumbs, "question", "questions")
        typer.echo(
            f"thumbs of {answers} in {session.thumbs.path}; to train on them, use objective = 'kto' and"
        )
        typer.echo(f"  train = {where}")
