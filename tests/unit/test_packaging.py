"""What is published: its description, its extras, and what runs without them."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from prefed.data import DataError
from prefed.data.errors import ErrorCollector
from prefed.data.sources import files, huggingface
from prefed.data.sources.folders import saved_rows
from prefed.runs.run import RunResult
from prefed.ui.cli import app

ROOT = Path(__file__).resolve().parents[2]
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT = BUILD["project"]
EXTRAS = PROJECT["optional-dependencies"]
PACKAGES = {"mlflow": "mlflow-skinny"}
"""Modules whose names differ from that of their package, other than by ``_`` for ``-``."""


def name_of(requirement: str) -> str:
    """``"prefed[a,b]>=1"`` → ``"prefed"``."""
    return re.split(r"[\[<>=!~ ;]", requirement)[0]


def packages(extra: str) -> set[str]:
    """The packages of an extra, with those of the extras that it names."""
    found = set()
    for requirement in EXTRAS[extra]:
        if name_of(requirement) == "prefed":
            for other in requirement.split("[")[1].rstrip("]").split(","):
                found |= packages(other)
        else:
            found.add(name_of(requirement))
    return found


def test_links_of_the_readme_on_an_index_lead_to_files_of_the_repository() -> None:
    """An index shows no file of the repository: every link and picture becomes a URL of one that exists."""
    hook = BUILD["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = "".join((ROOT / fragment["path"]).read_text("utf-8") for fragment in hook["fragments"])
    relative = len(re.findall(r'\]\((?!https?:|#)|(?:src|srcset)="(?!https?:)', text))
    for substitution in hook["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    targets = re.findall(r"\]\((?!#)([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    own = [
        match[1]
        for target in targets
        if (
            match := re.fullmatch(
                r"https://[\w.]+/prefed/prefed(?:/blob)?/v\$HFPR_VERSION/([^#]+)(#.*)?", target
            )
        )
    ]
    assert all(target.startswith("https://") for target in targets)
    assert len(own) == relative
    assert [path for path in own if not (ROOT / path).is_file()] == []


def test_every_extra_that_is_named_exists() -> None:
    """In messages, pages and pyproject.toml itself."""
    folders = [ROOT / "src", ROOT / "docs", ROOT / "deploy", ROOT / "scripts"]
    texts = [
        path for folder in folders for path in folder.rglob("*") if path.suffix in {".py", ".md", ".sh", ""}
    ]
    named = {
        extra
        for path in [*(path for path in texts if path.is_file()), ROOT / "pyproject.toml"]
        for group in re.findall(r"prefed(?:\.whl)?\[([\w,]+)\]", path.read_text("utf-8"))
        for extra in group.split(",")
    }
    assert named - set(EXTRAS) == set()
    assert {"datasets", "plots", "nvflare"} <= named


def test_all_holds_every_extra_for_users() -> None:
    """But kernels: they need Triton, which is large and comes with PyTorch where there is a CUDA device."""
    for_users = set(EXTRAS) - {"all", "kernels", "test", "docs", "dev", "release"}
    assert packages("all") == set().union(*(packages(extra) for extra in for_users))


def third_party(path: Path) -> Iterator[tuple[str, bool]]:
    """The packages that a file imports, and whether it does so when it is itself imported."""
    tree = ast.parse(path.read_text("utf-8"))
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            modules.append(str(node.module))
        for module in modules:
            top = module.split(".")[0]
            yield PACKAGES.get(top, top.replace("_", "-")), node in tree.body


def test_files_import_what_is_required_or_of_an_extra() -> None:
    """A file that is imported needs nothing but what ``prefed`` requires, but those of two extras."""
    required = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    brought = {"accelerate", "huggingface-hub", "markupsafe", "packaging", "pydantic-core", "tokenizers"}
    standard = {name.replace("_", "-") for name in sys.stdlib_module_names}
    free = {*required, *brought, *standard, "prefed", "typing-extensions"}
    optional = packages("all") | packages("kernels")
    source = ROOT / "src" / "prefed"
    unknown, first = set(), set()
    for path in source.rglob("*.py"):
        for package, at_import in third_party(path):
            if package not in free:
                unknown |= {package} - optional
                first |= {(package, path.relative_to(source).as_posix())} if at_import else set()
    assert unknown == {"psutil"}  # comes with nvflare
    assert first == {
        ("nvflare", "networks/federation/flare/relays.py"),
        ("starlette", "ui/collect/server.py"),
        ("uvicorn", "ui/collect/server.py"),
    }


@pytest.mark.parametrize(
    ("package", "read", "error", "message"),
    [
        (
            "pyarrow",
            lambda: next(files.read_rows(Path("a.parquet"), "utf-8", ErrorCollector())),
            DataError,
            r"a\.parquet: a Parquet file needs the package pyarrow: .*'prefed\[datasets\]'",
        ),
        ("datasets", lambda: next(saved_rows(Path("saved"))), DataError, r"saved: a saved dataset needs"),
        (
            "datasets",
            lambda: next(
                huggingface.read_rows("a/b", subset=None, subset_is_folder=False, split="test", revision=None)
            ),
            DataError,
            r"a/b \(test\), on the Hugging Face hub, needs the package datasets: .*'prefed\[datasets\]'",
        ),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, package, read, error, message) -> None:
    monkeypatch.setattr("prefed.data.errors.find_spec", lambda name: None if name == package else name)
    with pytest.raises(error, match=message):
        read()


def test_clients_of_a_result_need_pandas(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(RuntimeError, match=r"pandas: pip install 'prefed\[datasets\]'"):
        RunResult.clients.func(SimpleNamespace())


def test_a_plot_needs_matplotlib(monkeypatch, tmp_path) -> None:
    """It is refused before anything is printed."""
    monkeypatch.setattr("prefed.ui.pages.plot_file.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["compare", str(tmp_path), str(tmp_path), "--out", "a.png"])
    assert result.exit_code == 1
    assert "a.png: a plot needs the package matplotlib: pip install 'prefed[plots]'" in result.stderr
    assert result.stdout == ""


def test_the_lock_holds_the_tested_versions() -> None:
    """Every package of ``prefed[all]`` is in lock.txt with hashes, at its version in constraints.txt. PyTorch
    is not, nor are the CUDA libraries that only its Linux build requires.
    """
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    entries = re.split(r"\n(?=\S)", (ROOT / "lock.txt").read_text("utf-8").strip())
    locked = {}
    for entry in entries:
        requirement = re.match(r"([\w.-]+)==(\S+)", entry)
        assert requirement is not None
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), requirement[1]
        locked[requirement[1]] = requirement[2]
    needed = {name_of(requirement) for requirement in PROJECT["dependencies"]} | packages("all")
    assert {name: locked.get(name) for name in needed - {"torch"}} == {
        name: pins[name] for name in needed - {"torch"}
    }
    assert {name for name in locked if name in pins and locked[name] != pins[name]} == set()
    assert {name for name in locked if re.match("torch$|triton$|nvidia-|cuda-", name)} == set()


@pytest.mark.rare
def test_a_wheelhouse_installs_for_all_users_and_only_what_was_made(tmp_path: Path) -> None:
    """A service's user runs what root installs with umask 077. A changed file stops the installation."""
    house, venv = tmp_path / "house", tmp_path / "prefed"
    (house / "wheels").mkdir(parents=True)
    wheel = house / "wheels" / "prefed-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("own.py", "def main(): print('prefed 1')")
        info = {
            "METADATA": "Metadata-Version: 2.1\nName: prefed\nVersion: 1\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "entry_points.txt": "[console_scripts]\nprefed = own:main\n",
            "RECORD": "",
        }
        for name, text in info.items():
            archive.writestr(f"prefed-1.dist-info/{name}", text)
    shutil.copy(ROOT / "scripts" / "wheelhouse-install.sh", house / "install.sh")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (house / "requirements.txt").write_text(f"prefed==1 --hash=sha256:{digest}\n")
    (house / "python").write_text(f"{sys.version_info[0]}.{sys.version_info[1]}\n")
    (house / "SHA256SUMS").write_text(f"{digest}  ./wheels/{wheel.name}\n")

    def install() -> subprocess.CompletedProcess[str]:
        command = ["sh", "-c", f"umask 077; sh {house}/install.sh {venv}"]
        environment = os.environ | {"PYTHON": sys.executable}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    good = install()
    assert (good.returncode, good.stdout.splitlines()[-1]) == (0, "prefed 1"), good.stderr
    assert [path for path in venv.rglob("*") if path.stat().st_mode & 0o044 != 0o044] == []
    assert "prefed exists; name a new folder" in install().stderr
    shutil.rmtree(venv)
    wheel.write_bytes(wheel.read_bytes() + b" ")
    damaged = install()
    assert damaged.returncode == 1
    assert "the wheelhouse is damaged or was changed; nothing is installed" in damaged.stderr
    assert not venv.exists()
