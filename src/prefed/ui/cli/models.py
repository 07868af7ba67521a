"""``prefed export``, ``push`` and ``generate``: models of a finished run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefed.ui.cli.arguments import (
    Aligned,
    AsJson,
    LicenseName,
    Merge,
    OwnModel,
    Raw,
    RoundName,
    RunFolder,
    Sampled,
    SelectorNumber,
    TasteName,
)
from prefed.ui.cli.errors_and_interrupts import UsageError
from prefed.ui.cli.output import print_json

if TYPE_CHECKING:
    from rich.console import Console

    from prefed.runs.export import Export

NARROW = 36
"""A column of responses is at least so wide, where there are more than two."""


def export(
    run: RunFolder,
    client: OwnModel = None,
    selector: SelectorNumber = None,
    aligned: Aligned = False,
    taste: TasteName = None,
    merge: Merge = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder to write (default: one in RUN/adapters or RUN/merged)."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the folder if it is an earlier export.")
    ] = False,
    card: Annotated[
        bool, typer.Option("--card", help="Write a model card next to the model, for the Hugging Face hub.")
    ] = False,
    license: LicenseName = None,
    which: RoundName = "last",
) -> None:
    """Export a finished run's model to a folder that PEFT or transformers loads."""
    from prefed.runs.finished_run import read_run
    from prefed.store import client_file

    check_choice(client, selector, aligned, taste, which)
    if license is not None and not card:
        raise UsageError("--license is for the model card: add --card")
    record = read_run(run)
    record.check_clients([client])
    name = "shared" if selector is None else f"selector-{selector}"
    if client is not None:
        name = f"client-{client_file(client)}"
    if aligned:
        name = "aligned" if client is None else f"aligned-{client_file(client)}"
    if taste is not None:
        name = f"taste-{client_file(taste)}" + ("" if client is None else f"-{client_file(client)}")
    folder = name if which == "last" else f"best-{name}"
    path = out or run / ("merged" if merge else "adapters") / folder
    if out is None and not path.resolve().is_relative_to(run.resolve()):
        raise ValueError(
            f"{path} is outside the run directory, because {run} contains a link; choose an --out"
        )
    base = Path(record.config["model"]["name"])
    check_folder(path, {"run": record.path, "run's base model": base}, replace=force or out is None)
    from prefed.runs.export import record_export, write_model

    best = which == "best"
    exported = write_model(
        run, path, client=client, selector=selector, taste=taste, aligned=aligned, merge=merge, best=best
    )
    if card:
        from prefed.core import files
        from prefed.ui.pages.card import CARD, model_card

        files.write(
            path / CARD, model_card(record.at_best() if best else record, exported, license=license).encode()
        )
    record_export(run, "export", path, exported)
    typer.echo(exported.describe(path))


def check_choice(
    client: str | None, selector: int | None, aligned: bool, taste: str | None, which: str
) -> None:
    """Check that the options select one model.

    Raises:
        UsageError: they exclude each other.
    """
    if client is not None and selector is not None:
        raise UsageError("give --client or --selector, not both")
    for option, given in (("--taste", taste is not None), ("--aligned", aligned)):
        if selector is not None and given:
            raise UsageError(f"give --selector or {option}, not both")
    if aligned and which == "best":
        raise UsageError(
            "--aligned: the model was aligned with the selectors of the last round; remove --round best"
        )


def check_folder(path: Path, places: Mapping[str, Path], *, replace: bool) -> None:
    """Check that an export may write to ``path``: a new folder, or with ``replace`` an earlier export.

    Args:
        places: description → folder that ``path`` must not contain.

    Raises:
        ValueError: the folder must not be replaced.
    """
    from prefed.models.adapter_files import unexpected_files

    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file, not a folder; choose another --out")
    folder = path.resolve()
    for what, place in places.items():
        if place.is_dir() and folder in (place.resolve(), *place.resolve().parents):
            raise ValueError(f"{path} contains the {what}; choose another --out")
    foreign = unexpected_files(path)
    if foreign:
        raise ValueError(
            f"{path} is not an earlier export, because it contains {foreign[0]!r}; choose another --out"
        )
    if any(path.iterdir()) and not replace:
        raise ValueError(f"{path} already exists; choose another --out, or --force to replace it")


def push(
    run: RunFolder,
    repo: Annotated[str, typer.Argument(help="The repository, OWNER/NAME.", show_default=False)],
    client: OwnModel = None,
    selector: SelectorNumber = None,
    aligned: Aligned = False,
    taste: TasteName = None,
    merge: Merge = False,
    public: Annotated[
        bool, typer.Option("--public", help="Make the repository public (default: private).")
    ] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Replace the model in an existing repository.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The base model's name on the hub, if the run loaded it from a folder."
        ),
    ] = None,
    license: LicenseName = None,
    which: RoundName = "last",
) -> None:
    """Publish a model of a finished run on the Hugging Face hub, with a model card."""
    check_choice(client, selector, aligned, taste, which)
    from prefed.runs.export import check_target
    from prefed.runs.finished_run import read_run

    check_target(repo)
    record = read_run(run)
    record.check_clients([client])
    from prefed.core import files
    from prefed.runs.export import name_base, publish, record_export, write_model
    from prefed.ui.pages.card import CARD, hub_name, model_card

    best = which == "best"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        exported = write_model(
            run,
            folder,
            client=client,
            selector=selector,
            taste=taste,
            aligned=aligned,
            merge=merge,
            best=best,
        )
        name = exported.model.name
        known = base or hub_name(name)
        name_base(folder, known or Path(name).name)
        of = record.at_best() if best else record
        card = model_card(of, exported, repo=repo, base=known, license=license)
        files.write(folder / CARD, card.encode())
        readers = "public" if public else "private"
        names = ", ".join(sorted(file.name for file in folder.iterdir()))
        typer.echo(f"publishing {_describe(exported)}\nto {repo} ({readers}): {names}")
        if known is None:
            typer.echo(
                f"the base model is a local folder, {name}; if it is also on the hub, give --base NAME",
                err=True,
            )
        commit = publish(folder, repo, public=public, update=update)
        record_export(run, "push", commit, exported)
        typer.echo(f"published: {commit}")


def _describe(exported: Export) -> str:
    if exported.aligned and exported.client is None and exported.taste in (None, "population"):
        return "the aligned model"
    if exported.aligned:
        of = (
            exported.taste
            if exported.client in (None, exported.taste)
            else f"{exported.taste} of {exported.client}"
        )
        return (
            f"the aligned model at the taste {of!r}: if it is a client's taste, the model reveals this "
            "client's preferences; publish it only with this client's consent"
        )
    if exported.client is not None:
        return (
            f"the personal model of client {exported.client!r}: trained on its pairs, it may reproduce them; "
            "publish it only with this client's consent"
        )
    return exported.selector.replace("-", " ") if exported.selector else "the shared model"


def generate(
    run: RunFolder,
    prompt: Annotated[
        list[str],
        typer.Option(metavar="TEXT", help="The prompt; repeatable. - reads it from standard input."),
    ],
    client: OwnModel = None,
    taste: Annotated[
        str | None,
        typer.Option(
            metavar="TASTE",
            help="For a model that takes a taste: population, a client's id, prototype:K, infer:FILE "
            "(from a file of pairs) or, with --client ID, infer:8 (from 8 of that client's pairs).",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of responses to each prompt.")] = 1,
    *,
    how: Sampled,
    seed: Annotated[
        int, typer.Option(help="Random seed of the sampling, the same for base and aligned model.")
    ] = 0,
    raw: Raw = False,
    as_json: AsJson = False,
    which: RoundName = "last",
) -> None:
    """Show responses of the base model and of a finished run's model next to each other."""
    from prefed.runs.finished_run import read_run

    read_run(run).check_clients([client])
    from prefed.core import Key
    from prefed.runs.loaded_run import load_run
    from prefed.runs.responses import Models
    from prefed.runs.tastes import needs_pairs
    from prefed.train.generation import Sampling, complete

    sampling = Sampling(**how)
    models = Models(
        load_run(run, data=needs_pairs(taste), best=which == "best"), sampling, seed=seed, raw=raw
    )
    aligned, base = models.own(client, taste), models.base()
    of = ", ".join(filter(None, (taste and f"taste {taste}", client and f"client {client}")))
    heading, responses = f"aligned ({of})" if of else "aligned", []
    for text in (sys.stdin.read() if text == "-" else text for text in prompt):
        ids = aligned.ids(text)
        for number in range(samples):
            key = Key(seed).at("generate", text).at("sample", number)
            first, second = (
                complete(m.backbone, m.tensors, ids, sampling, key, taste=m.taste) for m in (base, aligned)
            )
            responses.append({"prompt": text, "sample": number, "base": first, "aligned": second})
            if not as_json:
                print_responses(text if number == 0 else "", {"base": first, heading: second})
    if as_json:
        print_json(responses)


def print_responses(prompt: str, responses: Mapping[str, str], console: Console | None = None) -> None:
    """Print responses by heading below their prompt, if that is not empty.

    More than two are printed in rows on a terminal that is too narrow for so many columns.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from prefed.core.text import printable_lines
    from prefed.trackers.terminal import stdout_console

    console = console or stdout_console()
    if prompt:
        console.print(Text(printable_lines(prompt.strip()), style="bold"))
    texts = {head: Text(printable_lines(text.strip())) for head, text in responses.items()}
    if len(texts) > 2 and console.width < NARROW * len(texts):
        table = Table.grid(padding=(0, 2, 1, 0), expand=True)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
        for head, text in texts.items():
            table.add_row(Text(head), text)
    else:
        table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
        for head in texts:
            table.add_column(Text(head), ratio=1, overflow="fold")
        table.add_row(*texts.values())
    console.print(table)
