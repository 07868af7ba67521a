"""Tables on a narrow terminal, and what goes into a pipe: names whole, numbers whole."""

import io
import re

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from finished import write_run
from prefed import Callback, Experiment, run
from prefed.runs.finished_run import read_run
from prefed.trackers.terminal import Terminal
from prefed.ui.cli import app
from prefed.ui.cli.errors_and_interrupts import user_errors
from prefed.ui.cli.models import print_responses
from prefed.ui.pages.comparison_data import Compared
from prefed.ui.pages.comparison_tables import differences_table, runs_table
from prefed.ui.pages.tables import LISTED, lowest_clients, metrics_table, terminal
from prefed.ui.pages.terminal import print_result

NAMES = [f"hospital-of-saint-{saint}/department [of] medicine" for saint in "abc"]


def narrow(show, width=80):
    """What ``show(console)`` prints, and the first column's cells put together again."""
    file = io.StringIO()
    show(Console(file=file, width=width, highlight=False))
    lines = file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines if line[:1] in "│┃ ")
    start = next(line for line in lines if re.match(r"\W*(client|run)\b", line))
    edge = re.match(r"\W*\w+ +", start).end()
    return file.getvalue(), re.sub(r"[│┃ ]", "", "".join(line[:edge] for line in lines))


def figure(value):
    return {"mean": value, "worst": value, "worst_decile": value, "per_client": dict.fromkeys(NAMES, value)}


def test_a_result_in_80_columns():
    """Seven columns of figures and long ids: ids fold, letter for letter, and every figure is there."""
    names = ("baseline", "preference", "reward", "shared", "combined")
    summary = {f"{name}_accuracy": figure(0.111 * k) for k, name in enumerate(names, 1)}
    summary |= {
        "method": "fedpdpo",
        "rounds": 1,
        "split": "test",
        "left_out": 0,
        "dropped": 0,
        "seconds": 1.0,
    }
    summary |= {"bytes": {"up": 1, "down": 1}, "parameters": {"trainable": 1, "communicated": 1}}
    summary |= {"peak_memory_mb": 1.0, "clients": {name: {"test": 1234} for name in NAMES}}
    text, first = narrow(lambda console: print_result(summary, console, {"oracle": figure(0.666)}))
    assert all(name.replace(" ", "") in first for name in NAMES)
    assert text.count("1,234") == 3
    for value in ("0.111", "0.222", "0.333", "0.444", "0.555", "0.666"):
        assert text.count(value) == 5 + (value in ("0.111", "0.222"))  # once more in the verdict


def test_every_paper_of_the_methods_is_whole(monkeypatch):
    from prefed.methods import METHODS

    monkeypatch.setenv("COLUMNS", "80")
    words = CliRunner().invoke(app, ["methods"]).stdout
    assert "…" not in words
    numbers = [number for kind in METHODS.values() for number in re.findall(r"arXiv:[\d.]+\d", kind.source)]
    assert len(numbers) > 10
    assert all(number in words for number in numbers)


def test_a_message_obeys_no_character_that_it_quotes(capsys):
    """What a file holds reaches the terminal written out; the message's own lines stay lines."""
    with pytest.raises(typer.Exit), user_errors():
        raise ValueError("a.jsonl: no column 'x\x1b[2J\u202e\ud800'\nlook there")
    assert capsys.readouterr().err == "error: a.jsonl: no column 'x\\x1b[2J\\u202e\\ud800'\nlook there\n"


def test_a_run_from_elsewhere_steers_no_terminal(tmp_path):
    """Its settings, its method's name and its own name are shown as they are, or written out."""
    nasty = "[/red]\x1b[2J\u202e"
    names = {"a": "plain", "b[bold]\x1b[2J": nasty}
    runs = [read_run(write_run(tmp_path / n, settings={"note": v}, method=v)) for n, v in names.items()]
    file = io.StringIO()
    console = Console(file=file, width=200)
    compared = Compared(tuple(runs))
    console.print(terminal(runs_table(compared, compared.labels)))
    console.print(terminal(differences_table(runs, compared.labels)))
    console.print(terminal(metrics_table(nasty, list(runs[0].figures.values()), runs[0].pairs)))
    output = file.getvalue()
    assert "\x1b" not in output
    assert "\u202e" not in output
    assert output.count("[/red]\\x1b[2J\\u202e") == 3
    assert output.count("b[bold]\\x1b[2J") == 2


def test_what_a_model_writes_steers_no_terminal(capsys):
    """Its lines and tabs stay: a byte-level model can write any character."""
    print_responses("say", {"base": "one\n\ttwo", "aligned": "\x1b[2Jthree"})
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "\\x1b[2Jthree" in output
    assert "two" in output
    assert "\\t" not in output


@pytest.mark.parametrize("callbacks", [Callback(), Callback, [Callback]])
def test_callbacks_that_are_no_list_of_instances_are_refused_before_anything_is_loaded(callbacks, tmp_path):
    data = {"train": "none.jsonl", "partition": {"by": "column", "column": "who"}}
    experiment = Experiment(data=data, model={"name": "none"}, method={"name": "feddpo"})
    with pytest.raises(TypeError, match=r"a list of prefed\.Callback instances, e\.g\. callbacks=\[X\(\)\]"):
        run(experiment, tmp_path / "run", callbacks=callbacks)
    assert not (tmp_path / "run").exists()


def test_stages_of_an_alignment_in_a_pipe_and_on_a_terminal():
    """In a pipe: a line for each tenth of the steps, and one at the end. A terminal has a bar."""
    figures = {"completions": 1600, "tokens": 9000, "tokens_per_second": 12.5, "seconds": 95.0}
    shown = {}
    for forced in (False, True):
        file = io.StringIO()
        tracker = Terminal(Console(file=file, width=100, highlight=False, force_terminal=forced))
        tracker.on_stage_begin("completions", 0, 1600)
        for done in range(16, 1601, 16):
            tracker.on_stage_step("completions", done, 1600, {"tokens_per_second": 1234.56})
        tracker.on_stage_end("completions", figures)
        shown[forced] = file.getvalue()
    lines = shown[False].splitlines()
    assert lines[0] == "completions 16/1600  tokens/second 1235"
    assert lines[-2:] == [
        "completions 1600/1600  tokens/second 1235",
        "completions: completions 1,600  tokens 9,000  1m35s",
    ]
    assert len(lines) == 12
    assert "completions 1600/1600" in shown[True]
    assert shown[True].rstrip().endswith("1m35s")


def test_of_many_clients_a_table_lists_the_lowest_by_accuracy():
    """Accuracies fall while names rise, so the order by name is the opposite; a table of few is by name."""
    count = LISTED + 3
    accuracies = {f"c{k:03}": (count - k) / count for k in range(count)}
    listed, others = lowest_clients(accuracies)
    assert listed == [f"c{k:03}" for k in reversed(range(3, count))]
    assert "3 clients" in others
    assert lowest_clients(dict(list(accuracies.items())[:LISTED])) == (sorted(accuracies)[:LISTED], "")
