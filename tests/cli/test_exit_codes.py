"""One way of exit codes for every command: 0, 1 for the run or the data, 2 for the words, 130 for Ctrl-C."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from forked import Command
from prefed.ui.cli import app

COMMANDS = {
    "run": (["run", "none.toml"], "prefed.config.experiment_table.load_cell"),
    "align": (["align", "none", "--prompts", "p.jsonl"], "prefed.runs.finished_run.read_run"),
    "judge": (["judge", "none", "--judge", "utility", "--prompts", "p"], "prefed.runs.judge.judge"),
    "collect": (["collect", "--from", "none.jsonl"], "prefed.ui.collect.pairs.recorded_pairs"),
    "sweep": (["sweep", "none.toml"], "prefed.runs.sweep.sweep_cells"),
    "init": (["init", "feddpo", "--out", "."], "prefed.config.method_kind"),
    "new": (["new", "method", "file"], "prefed.ui.cli.new._check_name"),
    "data": (["data", "none.toml"], "prefed.config.experiment_table.load_cell"),
    "doctor": (["doctor", "none.toml"], "prefed.config.file.read_toml"),
    "evaluate": (["evaluate", "none"], "prefed.runs.finished_run.read_run"),
    "compare": (["compare", "none", "other"], "prefed.runs.finished_run.read_run"),
    "push": (["push", "none", "ann/none"], "prefed.runs.export.check_target"),
    "report": (["report", "none"], "prefed.runs.finished_run.read_run"),
    "export": (["export", "none"], "prefed.runs.finished_run.read_run"),
    "forget": (["forget", "none", "--client", "ann"], "prefed.runs.forget.plan"),
    "generate": (["generate", "none", "--prompt", "x"], "prefed.runs.finished_run.read_run"),
    "privacy": (["privacy", "none.toml"], "prefed.networks.federation.experiment.load_federated"),
    "theory": (["theory", "none.toml"], "prefed.theory.statements"),
    "federation": (["federation", "init", "none.toml"], "prefed.networks.federation.flare.check_installed"),
    "site": (["site", "none.toml"], "prefed.networks.federation.config.SiteConfig.load"),
    "federate": (["federate", "none.toml"], "prefed.networks.federation.flare.check_installed"),
    "demo": (["demo", "--out", "file"], "prefed.data.synthetic.write"),
}
"""Command → words that name what is not there, and what it calls on its way."""

WITHOUT_A_FILE = {"methods": ([], "prefed.trackers.terminal.stdout_console")}
"""A command that reads nothing cannot fail."""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()


def ended(*words):
    """The exit code, and what is said on standard error."""
    result = CliRunner().invoke(app, list(words))
    assert isinstance(result.exception, SystemExit) or result.exception is None, repr(result.exception)
    return result.exit_code, result.stderr


def test_every_command_is_here():
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert names == {*COMMANDS, *WITHOUT_A_FILE, "peer"}


def test_a_peer_ends_its_process_with_the_same_codes(tmp_path):
    """``prefed peer`` never returns: 1 for a missing file, 2 for an unknown option, 0 for help."""
    commands = (["none.toml"], ["none.toml", "--none"], ["--help"])
    codes = [Command(tmp_path / "errors", "peer", *words).end()[0] for words in commands]
    assert codes == [1, 2, 0]


def test_what_is_not_there_is_1(subtests):
    for name in COMMANDS:
        with subtests.test(name=name):
            code, errors = ended(*COMMANDS[name][0])
            assert (code, errors.startswith("error: ")) == (1, True), errors


def test_an_unknown_option_is_2(subtests):
    for name in (*COMMANDS, *WITHOUT_A_FILE):
        with subtests.test(name=name):
            code, errors = ended(name, "--colour")
            assert (code, "No such option" in errors) == (2, True), errors


def test_ctrl_c_is_130(monkeypatch, subtests):
    """It comes while the command works, in whatever it calls then."""

    def interrupted(*words, **options):
        raise KeyboardInterrupt

    commands = {**COMMANDS, **{n: ([n], c) for n, (_, c) in WITHOUT_A_FILE.items()}}
    commands["demo"] = ["demo", "--out", "new"], commands["demo"][1]
    commands["theory"] = ["theory"], commands["theory"][1]
    for name, (words, called) in commands.items():
        with subtests.test(name), monkeypatch.context() as patch:
            patch.setattr(called, interrupted)
            code, errors = ended(*words)
            assert (code, "stopped" in errors) == (130, True), errors


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["methods"], ["init", "feddpo"], ["run", "-h"]])
def test_all_is_well_is_0(words):
    assert ended(*words) == (0, "")


def test_a_process_gives_the_code_to_its_shell():
    """Ctrl-C, an unknown option and a file that is not there, as a shell sees them."""
    # A shell's background job has SIGINT ignored, and its children too.
    interrupt = "import os, signal, prefed.config.experiment_table as t\n" + (
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "t.load_cell = lambda *words: os.kill(os.getpid(), signal.SIGINT)\n"
    )
    for words, start, code in (
        (["data", "x.toml"], interrupt, 130),
        (["data", "--colour"], "", 2),
        (["data", "x.toml"], "", 1),
    ):
        program = (
            f"{start}import sys; sys.argv = ['prefed', *{words}]\nfrom prefed.ui.cli import main; main()"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
