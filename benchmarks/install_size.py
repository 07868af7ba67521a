"""What prefed and each role install, and what a start imports, at given commits.

    pip install "prefed[all]"
    python benchmarks/install_size.py 7014faf9^ HEAD

A role installs what its commit's pyproject.toml requires, with all that this requires in turn, at the
versions in this environment. Sizes are those in the packages' lists of files: without bytecode. The extras of
a role are those that the last commit names. CPU seconds are the least of several runs.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from startup import cpu_seconds

ROLES = ("", "site", "hub", "research", "all")
PYTORCH = re.compile(r"(torch|triton)$|nvidia-|cuda-")
STARTS = {
    "import prefed": "import prefed",
    "from prefed import run": "from prefed import run",
    "prefed --help": "sys.argv[1:] = ['--help']; from prefed.ui.cli import main; main()",
}
PROGRAM = "import sys; sys.path.insert(0, 'src')\ntry: {}\nfinally: print('\\n', len(sys.modules))"


def unpacked(commit: str, folder: Path) -> Path:
    """A folder with the commit's files."""
    archive = subprocess.run(
        ["git", "archive", commit], capture_output=True, check=True, cwd=Path(__file__).resolve().parents[1]
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def features(extra: str, extras: dict[str, list[str]]) -> set[str]:
    """The extras without roles that an extra consists of."""
    named = [Requirement(each) for each in extras.get(extra, [])]
    inner = {other for each in named if each.name == "prefed" for other in each.extras}
    return set().union(*(features(each, extras) for each in inner)) if inner else {extra}


def closure(requirements: Iterable[str], extras: Iterable[str] = ()) -> set[str]:
    """The names of all packages that requirements install here.

    Raises:
        PackageNotFoundError: one of them is not installed.
    """
    found: set[tuple[str, str]] = set()
    waiting = [(Requirement(each), extra) for each in requirements for extra in (*extras, "")]
    while waiting:
        requirement, of = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": of}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} - {known for package, known in found if package == name}:
            found.add((name, extra))
            waiting += [(Requirement(each), extra) for each in distribution(name).requires or ()]
    return {name for name, _ in found}


def megabytes(package: str) -> float:
    """The size of a package's files here."""
    files = distribution(package).files or []
    return sum(each.size or 0 for each in files if each.suffix != ".pyc") / 1e6


def row(project: dict[str, Any], own: float, chosen: set[str]) -> str:
    """Packages, MB, and MB without PyTorch of prefed with some features."""
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(each for name in chosen for each in extras.get(name, []))]
    sizes = {name: megabytes(name) for name in closure(asked)}
    other = own + sum(size for name, size in sizes.items() if not PYTORCH.match(name))
    return f"{len(sizes) + 1:8} {own + sum(sizes.values()):8.0f} {other:8.0f}"


def main() -> None:
    shaped = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shaped)
    parser.add_argument("commits", nargs="+")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        trees = {commit: unpacked(commit, Path(work, str(n))) for n, commit in enumerate(args.commits)}
        projects = {
            commit: tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))["project"]
            for commit, tree in trees.items()
        }
        roles = projects[args.commits[-1]]["optional-dependencies"]
        print(f"{'':40} packages       MB  without PyTorch")
        for role in ROLES:
            for commit, tree in trees.items():
                own = sum(each.stat().st_size for each in (tree / "src").rglob("*") if each.is_file()) / 1e6
                chosen = features(role, roles) if role else set()
                name = f"prefed[{role}]" if role else "prefed"
                print(f"{name:18} {commit:20} {row(projects[commit], own, chosen)}", flush=True)
        print(f"\n{'':46} CPU s  modules")
        for name, code in STARTS.items():
            words = [sys.executable, "-c", PROGRAM.format(code)]
            turns = [
                {each: cpu_seconds(words, tree) for each, tree in trees.items()} for _ in range(args.runs)
            ]
            for commit, tree in trees.items():
                output = subprocess.run(words, capture_output=True, text=True, cwd=tree).stdout
                least = min(turn[commit] for turn in turns)
                print(f"{name:25} {commit:20} {least:5.2f}  {output.split()[-1]:>7}", flush=True)


if __name__ == "__main__":
    main()
