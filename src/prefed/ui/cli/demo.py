"""``prefed demo``: a whole federation on this machine, without data or a model, in under two minutes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefed.ui.cli.errors import usage
from prefed.ui.cli.output import progress_console, terminal

if TYPE_CHECKING:
    from rich.console import Console

    from prefed.core import Key
    from prefed.data import Record


CLIENTS, TRAIN, TEST, SEED = 6, 64, 64, 7
TEXTS, STEPS = 1500, 200

EXPERIMENT = """\
# The experiment that `prefed demo` ran. Change a line and run it again:
#     prefed run {file}
# Every key, explained: `prefed init METHOD`. Every method: `prefed methods`.
seed = 42
rounds = 10

[data]
train = "train.jsonl"                   # your own JSON lines go here: prompt, chosen, rejected
test = "test.jsonl"
partition = {{ by = "column", column = "client" }}
max_length = 128

[model]
name = "model"                          # or any causal language model: a folder or a hub name
lora = {{ rank = 8, alpha = 16, dropout = 0.0 }}

[method]
name = "{method}"                         # or another method: feddpo, fedper, local, …
lr = 3e-3

[evaluate]
every = 1

[engine]
workers = {workers}
threads = 1
"""


def demo(
    out: Annotated[Path, typer.Option(help="The folder for data, model and run.")] = Path("prefed-demo"),
    method: Annotated[str, typer.Option(help="The method to run; see `prefed methods`.")] = "fedsdg",
) -> None:
    """Make a preference set and a tiny model, train a federation on them and report."""
    import os

    from prefed.config import Experiment, method_kind

    with usage():
        method_kind(method)
    from prefed.core import Key, files
    from prefed.data import synthetic
    from prefed.models.quiet_libraries import silence_transformers
    from prefed.runs.record import read_run
    from prefed.runs.run import run
    from prefed.ui.pages.page import write_page
    from prefed.ui.pages.terminal import print_result, result_line

    silence_transformers()
    console = progress_console()
    out.mkdir(parents=True, exist_ok=True)
    key = Key(SEED)
    tastes = synthetic.tastes(key, CLIENTS)
    records = synthetic.generate(key, clients=CLIENTS, train=TRAIN, test=TEST)
    synthetic.write(out, records)
    console.print(f"{CLIENTS} clients, {TRAIN} preference pairs each, in {out}; what they like:")
    for client, taste in tastes.items():
        console.print(f"  {client}: {taste.describe()}")
    if not (out / "model").exists():
        _make_model(out / "model", key, console)
    file = out / f"{method}.toml"
    workers = min(2, os.cpu_count() or 1)
    if not file.exists():
        files.write(file, EXPERIMENT.format(file=file, method=method, workers=workers).encode())
    path = _free_path(out / f"run-{method}")
    result = run(Experiment.load(file, []), path, callbacks=terminal(console))
    print_result(result.summary, console, {"oracle": _oracle(records)})
    console.print("oracle: the accuracy with each client's taste known; labels are noisy")
    page = result.path / "report.html"
    write_page(read_run(result.path), page)
    console.print(f"report: {page}\nadapter: {result.adapter or 'none: see `prefed export`'}")
    console.print(f"experiment: {file}; change a line, e.g. the method, and `prefed run {file}`")
    if console.quiet:
        typer.echo(f"{result_line(result.summary)} → {page}")


def _make_model(folder: Path, key: Key, console: Console) -> None:
    from rich.progress import Progress

    from prefed.data import synthetic
    from prefed.models.tiny import make_tiny

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("pretraining a tiny model", total=None)

        def step(done: int, steps: int, loss: float) -> None:
            bar.update(task, completed=done, total=steps)

        make_tiny(folder, synthetic.corpus(key, TEXTS), key, steps=STEPS, progress=step)
    console.print(f"a tiny language model, pretrained on similar text, in {folder}")


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
