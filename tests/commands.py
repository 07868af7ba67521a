"""Commands in the process of the test."""

from typer.testing import CliRunner

from prefed.ui.cli import app


def prefed_(*words, code=0):
    """What a command prints, or its errors if it is to end with another code than 0."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.stdout if code == 0 else result.stderr


async def sweep_command(processes, run, *words):
    """Instead of :meth:`prefed.runs.sweep_child.CommandProcesses.call`."""
    return prefed_(*words).encode()
