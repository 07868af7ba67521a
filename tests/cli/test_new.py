"""``prefed new method``: a package that is whole, passes its own tests, and is a method like any other."""

import runpy
from pathlib import Path

import pytest

from commands import prefed_
from installing import installed
from prefed.methods import METHODS

NAME = "steady"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")  # no cell of a table is cut
    return tmp_path


def test_its_own_tests_pass_and_it_is_listed(place):
    """Its tests hold a closed form, a limit and all laws of ``prefed.testing``, a run included."""
    prefed_("new", "method", NAME)
    with installed(place / NAME, place / "site"):
        tests = runpy.run_path(f"{NAME}/tests/test_{NAME}.py")
        functions = [check for name, check in tests.items() if name.startswith("test_")]
        assert len(functions) == 3
        for check in functions:
            check()
        assert "steady FedDPO with bounded client updates" in " ".join(prefed_("methods").split())
        prefed_("init", NAME)
        text = Path(f"{NAME}.toml").read_text()
        assert "# largest norm r of a client's update; 0 gives FedDPO\n# radius = 1.0\n" in text
        assert METHODS[NAME].Settings().radius == 1.0
    assert NAME not in METHODS


@pytest.mark.parametrize(
    ("name", "code", "problem"),
    [
        ("LG-FedAvg", 2, "'LG-FedAvg' cannot name a method: use lower-case letters, digits and _"),
        ("class", 2, "'class' cannot name a method"),
        ("../up", 2, "'../up' cannot name a method"),
        ("fedper", 2, "there is already a method 'fedper'; choose another name"),
        ("numpy", 2, "there is already a Python module 'numpy'; choose another name"),
        ("taken", 1, "taken exists; choose another name, or work in another folder"),
    ],
)
def test_a_name_that_is_invalid_or_taken_is_refused(name, code, problem, place):
    (place / "taken").symlink_to("nowhere")
    assert problem in prefed_("new", "method", name, code=code)
    assert [path.name for path in place.iterdir()] == ["taken"]


def test_only_methods_are_written():
    assert "use `prefed new method NAME`" in prefed_("new", "loss", NAME, code=2)


def test_a_package_that_cannot_be_written_leaves_nothing(place, monkeypatch):
    """The disk is full at its last file."""
    write = Path.write_text

    def full(path, text, *more):
        if path.name == f"test_{NAME}.py":
            raise OSError(28, "No space left on device", str(path))
        return write(path, text, *more)

    monkeypatch.setattr(Path, "write_text", full)
    assert "No space left on device" in prefed_("new", "method", NAME, code=1)
    assert list(place.iterdir()) == []
