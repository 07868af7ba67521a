"""The documentation: nothing in it may point nowhere, fall behind the code, or fail to run."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, get_args

import numpy as np
import pytest
import torch
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from installing import installed
from prefed.align.judge import Question
from prefed.config import Experiment
from prefed.config.experiment_table import Table
from prefed.core import Entry, Layout, Tensors
from prefed.merge import Aggregator, MergeConfig
from prefed.methods import METHODS, LocalSettings, TrainingSettings
from prefed.methods.base import FedAvgBase
from prefed.testing import Quadratic, initial, simulate
from prefed.train.losses import PairBatch
from prefed.train.metrics import PairScores
from prefed.ui.cli import app

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
READ = [*PAGES, *NOTEBOOKS, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, language: str) -> Iterator[tuple[str, str]]:
    """The fenced blocks of one language, each with its title."""
    for block in FENCE.finditer(path.read_text("utf-8")):
        kind, _, rest = block["info"].partition(" ")
        if kind == language:
            title = re.search(r'title="([^"]*)"', rest)
            yield (title[1] if title else ""), block["body"]


def nav(entries: Any) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else nav(value)


def anchors(path: Path) -> set[str]:
    """The ids of a page's headings, as Python-Markdown makes them."""
    ids = set()
    for line in FENCE.sub("", path.read_text("utf-8")).splitlines():
        if heading := re.match(r"#+ (.*)", line):
            text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            ids.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower()))
    return ids


def hook(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / "hooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_menu_holds_every_page_once() -> None:
    listed = list(nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]))
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in [*PAGES, *NOTEBOOKS])


def broken_links(page: Path) -> list[str]:
    broken = []
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text("utf-8")))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        # What follows the name of a picture says in which colour scheme it is shown.
        headings = {"only-light", "only-dark"} if path.suffix == ".svg" else anchors(path) if anchor else ()
        # The site has only the pages: `make docs` refuses a link that leaves them.
        outside = page.is_relative_to(DOCS) and not path.is_relative_to(DOCS)
        if not path.exists() or outside or (anchor and anchor not in headings):
            broken.append(target)
    return broken


def test_links_lead_somewhere() -> None:
    policies = [ROOT / name for name in ("SECURITY.md", "GOVERNANCE.md", "CODE_OF_CONDUCT.md")]
    broken = {name_of(page): broken_links(page) for page in [*READ, *policies]}
    assert {page: links for page, links in broken.items() if links} == {}


@pytest.mark.parametrize("page", [DOCS / "choosing.md", ROOT / "README.md"], ids=name_of)
def test_figures_that_a_page_repeats_are_those_of_the_results(page: Path) -> None:
    figure = re.compile(r"\d\.\d{3} ± \d\.\d{3}")
    got = set(figure.findall(page.read_text("utf-8")))
    assert got <= set(figure.findall((DOCS / "results.md").read_text("utf-8")))


def missing_paths(page: str) -> list[str]:
    """The paths in a page's code spans that are neither in ``src/prefed`` nor in the repository."""
    missing = []
    for path in re.findall(r"`([\w/.]+(?:/|\.py|\.html))`", page):
        roots = (ROOT / "src/prefed", ROOT)
        exists = [root / path for root in roots if (root / path).exists()]
        if "/" not in path:
            exists = [file for root in ("src/prefed", "tests") for file in (ROOT / root).rglob(path)]
        if not exists and "NAME" not in path:
            missing.append(path)
    return missing


def test_every_path_on_the_page_of_rooms_exists() -> None:
    assert missing_paths((DOCS / "rooms.md").read_text("utf-8")) == []
    assert missing_paths("`engines/server_rounds.py`, `engines/none.py`, `test_none.py`") == [
        "engines/none.py",
        "test_none.py",
    ]


REFERENCE = re.compile(r"\]\[(prefed[\w.]*)\]")
SHOWN = re.compile(r"^::: (\S+)(?:\n    options:\n      members: \[(.*)\])?$", re.MULTILINE)


def test_references_name_something() -> None:
    """``::: module.name`` with its members, and ``[text][module.name]``."""
    fill = hook("reference").fill
    names = set()
    for page in PAGES:
        text = fill(page.read_text("utf-8"))
        names.update(REFERENCE.findall(text))
        for name, members in SHOWN.findall(text):
            names.update([name, *(f"{name}.{member}" for member in members.split(", ") if member)])
    for name in sorted(names):
        pkgutil.resolve_name(name)


def test_every_method_has_a_page_and_a_line_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert [name for name in METHODS if not (DOCS / "methods" / f"{name}.md").exists()] == []
    assert [name for name in METHODS if f"`{name}`" not in readme] == []


def test_headline_figures_stand_on_the_pages_that_they_link_to() -> None:
    """Every number of a line of the README, but hashes of commits, is on a page that the line links to."""
    section = (
        (ROOT / "README.md").read_text("utf-8").partition("## What was measured")[2].partition("\n## ")[0]
    )
    lines = section.split("\n- ")[1:]
    assert len(lines) > 4
    for line in lines:
        pages = {target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", line)}
        text = "".join((ROOT / page).read_text("utf-8") for page in pages)
        figures = re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)", re.sub(r"\]\([^)]+\)", "]", line))
        assert figures
        assert [figure for figure in figures if figure not in text] == []


def records(record: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A settings record and all those inside it."""

    def inside(annotation: Any) -> Iterator[type[BaseModel]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        elif isinstance(annotation, UnionType) or get_args(annotation):
            for argument in get_args(annotation):
                yield from inside(argument)

    yield record
    for field in record.model_fields.values():
        for inner in inside(field.annotation):
            yield from records(inner)


def test_every_settings_record_is_described() -> None:
    """The experiment file's page asks for the table of every record that an experiment holds."""
    page = (DOCS / "experiment-file.md").read_text("utf-8")
    asked = set(re.findall(r"<!-- settings: \S+:(\w+)", page))
    names = {record.__name__ for record in records(Experiment)} - {"MethodConfig"}
    assert names | {TrainingSettings.__name__, LocalSettings.__name__} == asked


def test_every_key_of_every_record_has_a_meaning() -> None:
    reference = hook("reference")
    kinds = [kind.Settings for kind in METHODS.values()]
    silent = []
    for record in [*dict.fromkeys(records(Experiment)), *kinds]:
        if record.__name__ == "MethodConfig":
            continue
        rows = reference.settings(record).splitlines()[2:]
        assert [row.split("`")[1] for row in rows] == list(record.model_fields)
        silent += [f"{record.__name__}: {row}" for row in rows if row.endswith("|  |")]
    assert silent == []


def test_every_mark_becomes_a_table() -> None:
    """MkDocs fills the marks; a page keeps no copy of what they become."""
    fill = hook("reference").fill
    mark = re.compile(r"^<!-- (?:settings|methods|objectives|formats|command|api)\b.*$", re.MULTILINE)
    left = {name_of(page): mark.findall(FENCE.sub("", fill(page.read_text("utf-8")))) for page in PAGES}
    assert {page: marks for page, marks in left.items() if marks} == {}


def test_the_commands_page_knows_every_command_and_option() -> None:
    """Typer's own help is the other witness: what it lists, the page lists; options of all commands once."""
    source = (DOCS / "commands.md").read_text("utf-8")
    everywhere = {"--help", *(f"--{name}" for name in hook("reference").EVERYWHERE)}
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert re.findall(r"^## `prefed (\S+)`$", source, re.MULTILINE) == names
    sections = dict(zip(names, source.split("## `prefed ")[1:], strict=True))
    for name, section in sections.items():
        assert re.findall("^<!-- command: (.*) -->$", section, re.MULTILINE) == [name]
        shown = set(re.findall(r"(--[a-z][a-z-]*) ", runner.invoke(app, [name, "--help"]).output))
        rows = hook("reference").command(name)
        assert set(re.findall(r"^\| `(--[a-z-]+)[ `]", rows, re.MULTILINE)) == shown - everywhere


def test_experiment_files_in_pages_are_valid(subtests: pytest.Subtests) -> None:
    whole = {
        "data": {"train": "pairs.jsonl", "partition": {"by": "iid", "clients": 2}},
        "model": {"name": "some/model"},
        "method": {"name": "feddpo"},
    }
    for page in READ:
        for number, (_, text) in enumerate(blocks(page, "toml"), 1):
            with subtests.test(f"{name_of(page)}, file {number}"):
                tree = tomllib.loads(text)
                if "rows" in tree:
                    assert [cell.experiment() for cell in Table.model_validate(tree).cells(page).values()]
                else:
                    Experiment.model_validate({**whole, **tree})


def test_formulas_can_be_translated(subtests: pytest.Subtests) -> None:
    pytest.importorskip("latex2mathml")
    formulas = hook("formulas")
    formula = re.compile(r"\$\$(.+?)\$\$|(?<![\\$])\$(?!\s)([^$\n]+?)(?<!\s)\$", re.DOTALL)
    for page in PAGES:
        text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text("utf-8")))
        for block, inline in formula.findall(text):
            with subtests.test(name_of(page), formula=block or inline):
                assert formulas.mathml(block or inline, block=bool(block)).startswith("<math")


def test_the_worked_method_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page on adding a method: its file and its tests, in the package that the page starts with. A run
    takes seconds; ``test_new.py`` has one.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prefed.testing.all_laws.check_run", lambda name, settings: None)
    assert CliRunner().invoke(app, ["new", "method", "lgfedavg"]).exit_code == 0
    code = dict(blocks(DOCS / "adding-a-method.md", "python"))
    written = [path.as_posix() for path in Path("lgfedavg").rglob("*.py")]
    assert sorted(code) == sorted(written)
    for path, text in code.items():
        Path(path).write_text(text, "utf-8")
    with installed(tmp_path / "lgfedavg", tmp_path / "site"):
        assert METHODS["lgfedavg"].personal
        checks = runpy.run_path("lgfedavg/tests/test_lgfedavg.py")
        functions = [check for name, check in checks.items() if name.startswith("test_")]
        assert len(functions) == 3
        for check in functions:
            check()


def worked(title: str, names: dict[str, Any]) -> dict[str, Any]:
    """The names of an example on the page on adding a method, executed where ``names`` are known."""
    example = dict(blocks(DOCS / "adding-a-method.md", "py"))[title]
    exec(compile(f"from __future__ import annotations\n{example}", f"{title}.py", "exec"), names)
    return names


def test_the_worked_server_momentum_works() -> None:
    """From 0 every client steps to 1: B's velocity is 1 and then ½ · 1 + 0, so B ends at 1.5."""

    class Settings(LocalSettings):
        server_momentum: float = 0.5

    build = worked("server momentum", {"FedAvgBase": FedAvgBase, "SOURCE": ""})["build"]
    start = initial() * 0.0
    settings = Settings(optimizer="sgd", lr=1.0, clip=0.0, weight_decay=0.0, local_steps=1)
    method = build(settings, start.layout, Aggregator(MergeConfig(), start.layout, 1.0), 2)
    clients = {"a": Quadratic.at([1.0] * start.layout.size, size=1)}
    model = simulate(method, clients, start, rounds=2).server.tensors["model"]
    assert {entry.factor: model[entry.name].unique().tolist() for entry in start.layout.entries} == {
        "A": [1.0],
        "B": [1.5],
    }


def test_the_worked_objects_work() -> None:
    """β Δ_ir is ½, and (1 − ½)² = ¼. Half of the mean of 1 and 4 with weights ¾ and ¼ is 0.875. One of two
    pairs has a chosen response whose log-probability is more than 1 above the other's. The vote is for b, and
    of "aa" and "b" the second is shorter."""
    objects = worked("objects", {})
    one, zero = torch.ones(1), torch.zeros(1)
    losses, _ = objects["OBJECTIVE"](PairBatch(one, one, zero, one, zero, zero), {"beta": 0.5})
    assert losses.tolist() == [0.25]
    layout = Layout((Entry("a", (1,), "lora"),))
    tensors = [Tensors(layout, value * one) for value in (1, 4)]
    assert objects["MERGE_RULE"].function(tensors, [0.75, 0.25], share=0.5)["a"].tolist() == [0.875]
    policy = np.array([[-1, -3], [-1, -1.5]], np.float32)
    scores = PairScores(policy, policy, np.ones((2, 2), np.int32))
    assert objects["METRIC"].function(scores).tolist() == [True, False]
    (pair,) = objects["FORMAT"].pairs({"question": "Which?", "a": "aa", "b": "b", "vote": "b"})
    assert pair is not None
    assert (pair.prompt, pair.chosen, pair.rejected) == ("Which?", "b", "aa")
    (verdict,) = objects["JUDGE"]("", None).compare([Question("Which?", "aa", "b")])
    assert verdict.preference == 0


def test_a_version_is_cited_and_its_run_directory_frozen() -> None:
    """The version of the package, that of the citation, and a run that later versions must open."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert (ROOT / "tests/frozen" / version / "run/summary.json").is_file()


def test_pictures_are_small_and_load_nothing() -> None:
    """All together below 340 kB, the terminal's in the reader's own font; README or a page names each."""
    pictures = sorted((DOCS / "pictures").iterdir())
    assert sum(picture.stat().st_size for picture in pictures) < 340_000
    readme = (ROOT / "README.md").read_text("utf-8")
    named = re.findall(r'(?:src|srcset)="docs/pictures/([^"]+)"', readme)
    for page in DOCS.glob("*.md"):
        named += re.findall(r"\]\(pictures/([^)#]+)", page.read_text("utf-8"))
    assert sorted({*named}) == [picture.name for picture in pictures]
    for picture in DOCS.glob("pictures/*.svg"):
        assert not re.search(r"url\((?!#)|https?://(?!www\.w3\.org)", picture.read_text("utf-8"))
