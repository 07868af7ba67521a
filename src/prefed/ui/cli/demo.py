"""``prefed demo``: a whole federation on this machine; preferences and model are made here or given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prefed.ui.cli.errors_and_interrupts import UsageError, usage
from prefed.ui.cli.output import progress_console, terminal

if TYPE_CHECKING:
    from rich.console import Console

    from prefed.core import Key
    from prefed.data import Record


CLIENTS, TRAIN, TEST, SEED = 6, 64, 64, 7
TEXTS, STEPS = 1500, 200
CHAT_TRAIN, CHAT_TEST = 24, 12
SPLITS: tuple[Literal["train"], Literal["test"]] = ("train", "test")

EXPERIMENT = """\
# The experiment that `prefed demo` ran. Change a line and run it again:
#     prefed run {file}
# Every key, explained: `prefed init METHOD`. Every method: `prefed methods`.
seed = 42
rounds = {rounds}

[data]
train = "train.jsonl"                   # your own JSON lines go here: prompt, chosen, rejected
test = "test.jsonl"
partition = {{ by = "column", column = "client" }}
{data}

[model]
name = {model}                          # or any causal language model: a folder or a hub name
{dtype}lora = {{ rank = 8, alpha = 16, dropout = 0.0 }}

[method]
name = "{method}"                         # or another method: feddpo, fedper, local, …
{objective}{own}{training}

[evaluate]
every = {every}
{report}
[engine]
workers = {workers}
threads = 1
"""
TINY = {
    "method": "fedsdg",
    "rounds": 5,
    "every": 1,
    "dtype": "",
    "data": "max_length = 128\n"
    'metadata = ["utility_chosen", "utility_rejected"]   # for `prefed judge --judge utility`',
    "model": '"model"',
    "training": "lr = 3e-3",
    "own": "",
    "report": "",
}
PEOPLE = {
    **TINY,
    "method": "lore",  # a selector: what people find convincing is learned, not written
    "data": "max_length = 256",
    "training": "",
    "own": "lr = 3e-2",
}
CHAT = {
    "method": "fedala",  # whose shared model is a whole one
    "rounds": 2,
    "every": 0,
    "data": "max_length = 512",
    "training": "lr = 3e-3\nlocal_steps = 5\nbatch_size = 4",
    "own": "first_weight_steps = 5\n",  # of 20: enough for answers that differ
}
OBJECTIVE = 'objective = "rpo"                       # also imitates the chosen responses: text stays whole\n'


@dataclass(frozen=True)
class _Story:
    """What the demo trains on.

    Attributes:
        tastes: client → what it likes.
        pairs: training pairs of a client.
        settings: the experiment's; ``own`` are those that only its default method has.
        corpus: what a model that is made here is pretrained on.
        context: its largest number of tokens.
        more: further columns of the result.
    """

    tastes: Mapping[str, str]
    records: Sequence[Record]
    pairs: int
    settings: dict[str, Any]
    corpus: Iterable[str] = ()
    context: int = 128
    more: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder for data, model and run (default: prefed-demo; with --model prefed-demo-NAME)."
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="The method; see `prefed methods` (default: fedsdg, with --model fedala, with --people "
            "lore)."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|HUB-NAME",
            help="A chat model to train, e.g. HuggingFaceTB/SmolLM2-135M-Instruct (default: a tiny model, "
            "made here).",
        ),
    ] = None,
    people: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Real people's judgements: the folder with the files that experiments/people/prepare.py "
            "writes (default: generated preferences).",
        ),
    ] = None,
) -> None:
    """Train a tiny or given model on generated preferences, or real people's, and report."""
    import os

    from prefed.config import Experiment, method_kind

    usual = PEOPLE if people is not None else TINY if model is None else CHAT
    method = method or str(usual["method"])
    with usage():
        kind = method_kind(method)
    from prefed.core import Key, files
    from prefed.data import synthetic
    from prefed.models.pretrained import silence_transformers
    from prefed.runs.finished_run import read_run
    from prefed.runs.run import run
    from prefed.store.directory import PAGE
    from prefed.ui.cli.models import print_responses
    from prefed.ui.pages.outcomes import answers
    from prefed.ui.pages.page import write_page
    from prefed.ui.pages.terminal import print_result, result_line

    silence_transformers()
    console = progress_console()
    key = Key(SEED)
    if model is not None and Path(model).is_dir():
        model = str(Path(model).resolve())
    if people is not None:
        story = _people(people, model)
    else:
        story = _tiny(key) if model is None else _chat(key, model)
    name = "prefed-demo" if people is None else "prefed-demo-people"
    out = out or Path(name if model is None else f"{name}-{Path(model).name}")
    file = out / f"{method}.toml"
    if model is not None and file.exists() and (other := Experiment.load(file, []).model.name) != model:
        raise UsageError(f"{file} trains another model, {other}: choose another --out")
    try:
        synthetic.write(out, story.records, replace=False)
    except ValueError as error:
        raise UsageError(f"{error} than this demo's: choose another --out, or prefed run FILE") from None
    console.print(
        f"{len(story.tastes)} clients, {story.pairs} preference pairs each, in {out}; what they like:",
        markup=False,
    )
    for client, taste in story.tastes.items():
        console.print(f"  {client}: {taste}")
    if model is None and not (out / "model").exists():
        _make_model(out / "model", story, key, console)
    workers = min(2, os.cpu_count() or 1)
    if not file.exists():
        objective = OBJECTIVE if "objective" in kind.Settings.model_fields else ""
        settings = story.settings | {"method": method}
        if method != story.settings["method"]:
            settings["own"] = ""
        text = EXPERIMENT.format(file=quote(str(file)), objective=objective, workers=workers, **settings)
        files.write(file, text.encode())
    path = _free_path(out / f"run-{method}")
    result = run(Experiment.load(file, []), path, callbacks=terminal(console))
    print_result(result.summary, console, story.more)
    if story.more:
        console.print("oracle: accuracy of a judge that knows each client's taste; labels are noisy")
    record, page = read_run(result.path), result.path / PAGE
    for part in answers(record)[:1]:
        for prompt, texts, _ in part.rows:
            print_responses(prompt, dict(zip(part.heads, texts, strict=True)), console)
        console.print(part.note, markup=False, soft_wrap=True, style="dim")
    write_page(record, page)
    console.print(f"report: {page}\nadapter: {result.adapter or 'none: see `prefed export`'}", markup=False)
    again = f"prefed run {quote(str(file))}"
    console.print(
        f"experiment: {file}; change a line, e.g. the method, then: {again}", markup=False, soft_wrap=True
    )
    if console.quiet:
        typer.echo(f"{result_line(result.summary)} → {page}")


def _tiny(key: Key) -> _Story:
    """Advice from a small grammar, for the model that is made here."""
    from prefed.data import synthetic

    records = synthetic.generate(key, clients=CLIENTS, train=TRAIN, test=TEST)
    tastes = {client: taste.describe() for client, taste in synthetic.tastes(key, CLIENTS).items()}
    corpus = synthetic.corpus(key, TEXTS)
    return _Story(tastes, records, TRAIN, TINY, corpus, more={"oracle": _oracle(records)})


def _chat(key: Key, model: str) -> _Story:
    """Advice in four ways of speaking, for a model that has learned to chat."""
    from prefed.config.new_file import toml_value
    from prefed.data import synthetic_chat

    report = f"\n[report]\nprompts = {toml_value(synthetic_chat.PROMPTS)}\n"
    tastes = {client: style.describe() for client, style in synthetic_chat.STYLES.items()}
    records = synthetic_chat.generate(key, train=CHAT_TRAIN, test=CHAT_TEST)
    return _Story(tastes, records, CHAT_TRAIN, {**CHAT, **_given(model), "report": report})


def _given(model: str) -> dict[str, str]:
    """The settings of a model that is not made here."""
    from prefed.config.new_file import toml_value
    from prefed.models.pretrained import bfloat16_cost

    dtype = 'dtype = "bfloat16"                      # which this processor multiplies faster\n'
    return {"model": toml_value(model), "dtype": dtype if bfloat16_cost() < 1 else ""}


def _people(folder: Path, model: str | None) -> _Story:
    """What the first people with enough judgements found more convincing."""
    from dataclasses import replace

    from prefed.data import DataConfig, Record, Source
    from prefed.data.errors import ErrorCollector
    from prefed.data.sources import ReadCounts, read_records

    found: defaultdict[str, dict[str, list[Record]]] = defaultdict(lambda: {name: [] for name in SPLITS})
    for split in SPLITS:
        path = folder / f"people.{split}.jsonl.gz"
        if not path.exists():
            raise UsageError(f"{path}: no such file; experiments/people/prepare.py writes it")
        source, errors = Source(path=str(path)), ErrorCollector()
        config = DataConfig(train=source, partition={"by": "column", "column": "person"})
        for record, _ in read_records(source, config, split, None, errors, ReadCounts()):
            person = str(record.column("person"))
            found[person][split].append(replace(record, client=person, split=split, extra={}))
        errors.raise_if_any()
    enough = [who for who, own in sorted(found.items()) if len(own["train"]) >= TRAIN and own["test"]]
    if not enough:
        raise UsageError(f"{folder}: nobody has {TRAIN} training pairs and a test pair")
    train, test, tastes = list[Record](), list[Record](), dict[str, str]()
    for person in enough[:CLIENTS]:
        own = found[person]["train"][:TRAIN]
        longer = sum(len(pair.chosen) > len(pair.rejected) for pair in own)
        tastes[person] = f"the longer argument in {longer} of {TRAIN} pairs"
        train += own
        test += found[person]["test"][:TEST]
    corpus = dict.fromkeys(f"{pair.prompt} {text}" for pair in train for text in (pair.chosen, pair.rejected))
    settings = PEOPLE if model is None else {**PEOPLE, **_given(model)}
    return _Story(tastes, [*train, *test], TRAIN, settings, corpus, context=256)


def _make_model(folder: Path, story: _Story, key: Key, console: Console) -> None:
    from rich.progress import Progress

    from prefed.models.tiny import make_tiny

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("pretraining a tiny model", total=None)

        def step(done: int, steps: int, loss: float) -> None:
            bar.update(task, completed=done, total=steps)

        make_tiny(folder, story.corpus, key, context=story.context, steps=STEPS, progress=step)
    console.print(f"a tiny language model, pretrained on similar text, in {folder}", markup=False)


def _free_path(folder: Path) -> Path:
    """The first of ``folder``, ``folder-2``, ``folder-3``, … that does not exist."""
    number, path = 1, folder
    while path.exists():
        number += 1
        path = folder.with_name(f"{folder.name}-{number}")
    return path


def _oracle(records: Sequence[Record]) -> dict[str, Any]:
    """The accuracy of someone who knows the clients' true tastes."""
    from prefed.data.synthetic import oracle_accuracy
    from prefed.train.metrics import federated_metric

    test = [record for record in records if record.split == "test"]
    clients = sorted({record.client for record in test if record.client})
    return dict(federated_metric({c: oracle_accuracy([r for r in test if r.client == c]) for c in clients}))
