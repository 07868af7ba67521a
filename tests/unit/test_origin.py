"""Where a run comes from, as its summary says: the machine and the data."""

import os
import platform
from datetime import UTC, datetime

import pytest

from prefed.runs import summary


def test_the_machine_and_the_moment_are_named() -> None:
    """Memory is pages times their size; the name of the processor is a line of /proc/cpuinfo if it exists."""
    before = datetime.now(UTC).replace(microsecond=0)
    got = summary.describe_origin({})
    assert before <= datetime.fromisoformat(got["finished"]) <= datetime.now(UTC)
    hardware = got["hardware"]
    assert 1 <= hardware["cores"] <= (os.cpu_count() or 1)
    assert hardware["memory_mb"] * 2**20 <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert hardware["system"] == f"{platform.system()} {platform.machine()}"
    assert hardware["processor"]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["/x/prefed/__main__.py", "run", "a.toml", "--set", "seed=1"], "prefed run a.toml --set seed=1"),
        (["/x/prefed/__main__.py", "peer", "a.toml", "--client", "a b"], "prefed peer a.toml --client 'a b'"),
        (["/x/pytest/__main__.py", "--token=x"], "__main__.py"),
        (["-c"], "-c"),
    ],
)
def test_arguments_of_other_programs_are_not_shown(words: list[str], command: str) -> None:
    assert summary.command(words) == command
