"""The house rules: which room may import which, and what is never used."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from waiting import WATCHDOG

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "prefed"

FLOORS = (
    ("core",),
    ("data", "merge", "models", "store", "theory", "trackers"),
    ("privacy", "train"),
    ("engines", "methods"),
    ("config",),
    ("align",),
    ("runs",),
    ("networks", "testing"),
    ("ui",),
)
"""The rooms from the ground up: each imports from lower floors only."""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts), path


def imported(name: str, tree: ast.AST) -> Iterator[str]:
    """Every ``prefed`` module that a module imports, also inside functions."""
    package = name.removesuffix(".__init__").split(".")
    if not name.endswith("__init__"):
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            # `from prefed.core import files` imports the module prefed.core.files.
            yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def imports_of(name: str, path: Path) -> frozenset[str]:
    """Every ``prefed`` module that a file imports."""
    return frozenset(imported(name, ast.parse(path.read_text("utf-8"))))


def room(module: str) -> str:
    """The room of ``prefed.data.sources.huggingface`` is ``data``, that of ``prefed.store`` is ``store``."""
    parts = module.removesuffix(".__init__").split(".")
    return parts[1] if len(parts) > 1 else "prefed"


@cache
def rooms() -> dict[str, dict[str, set[str]]]:
    """Room → room it imports → the modules that do."""
    known = {room(name) for name, _ in modules()}
    imports: dict[str, dict[str, set[str]]] = {name: {} for name in known}
    for name, path in modules():
        for target in imports_of(name, path):
            if target.split(".")[0] == "prefed" and room(target) in known and room(target) != room(name):
                imports[room(name)].setdefault(room(target), set()).add(name)
    return imports


def test_rooms_import_from_lower_floors_only() -> None:
    height = {name: level for level, floor in enumerate(FLOORS) for name in floor}
    wrong = {
        (name, to): sorted(by)
        for name in height
        for to, by in rooms()[name].items()
        if to != "prefed" and height[to] >= height[name]
    }
    assert wrong == {}


KERNEL = {"core", "data", "engines", "merge", "methods", "models", "store", "train"}
WINGS = {
    "prefed.align": {"networks", "runs", "ui.cli"},
    "prefed.networks.federation": {"ui.cli"},
    "prefed.networks.peers": {"ui.cli"},
    "prefed.trackers": {"config", "runs", "ui.cli"},
    "prefed.ui.collect": {"ui.cli"},
    "prefed.ui.pages": {"ui.cli"},
}
"""Wing → where it is imported, apart from itself and other wings; docs/inside.md draws it."""


def test_wings_are_attached_from_above() -> None:
    """No kernel module names a wing, not even in a string that is imported later."""
    by: dict[str, set[str]] = {wing: set() for wing in WINGS}
    for name, path in modules():
        text = path.read_text("utf-8")
        place = name.removeprefix("prefed.")
        for wing in WINGS:
            if name.startswith(wing):
                continue
            if room(name) in KERNEL:
                assert wing not in text, f"{name} names {wing}"
            elif any(f"{target}.".startswith(f"{wing}.") for target in imports_of(name, path)):
                by[wing].add(".".join(place.split(".")[: 2 if place.startswith("ui") else 1]))
    assert by == WINGS


def test_no_circles() -> None:
    """Raises ``CycleError``, naming the rooms, if two of them need each other."""
    # The package's own __init__ hands out what rooms above it define, when asked for.
    graph = {name: set(targets) - {"prefed"} for name, targets in rooms().items() if name != "prefed"}
    TopologicalSorter(graph).prepare()


def test_floors_hold_every_room() -> None:
    standing = {name for floor in FLOORS for name in floor}
    assert standing == set(rooms()) - {"prefed", "__main__"}


def test_no_circles_of_files() -> None:
    """Raises ``CycleError``, naming the files, if two of them need each other, also inside functions."""
    known = {name.removesuffix(".__init__") for name, _ in modules()}
    graph: dict[str, set[str]] = {}
    for name, path in modules():
        own = name.removesuffix(".__init__")
        targets = set()
        for target in imports_of(name, path):
            nearest = target if target in known else target.rpartition(".")[0]
            # A package's __init__ hands out what its files define.
            if nearest in known and nearest != own and not own.startswith(f"{nearest}."):
                targets.add(nearest)
        graph[own] = targets
    del graph["prefed"]
    TopologicalSorter(graph).prepare()


def test_imports_of_each_form_are_seen() -> None:
    text = (
        "import prefed.store\n"
        "from prefed.core import files\n"
        "from ..core import Key\n"
        "from . import tokens\n"
        "def f():\n    from prefed.data.record import Record\n"
    )
    assert sorted(imported("prefed.train.pair_trainer", ast.parse(text))) == [
        "prefed.core.Key",
        "prefed.core.files",
        "prefed.data.record.Record",
        "prefed.store",
        "prefed.train.tokens",
    ]
    assert list(imported("prefed.train.__init__", ast.parse("from .steps import FlatOptimizer"))) == [
        "prefed.train.steps.FlatOptimizer"
    ]


def test_nothing_is_pickled() -> None:
    """Neither by its name nor through a library that pickles by default."""
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    pickling = re.compile(r"(?<![\w.])torch\.(load|save)\(|allow_pickle\s*=\s*True")
    offenders = []
    for name, path in modules():
        text = path.read_text("utf-8")
        tops = {target.split(".")[0] for target in imports_of(name, path)}
        if tops & banned or pickling.search(text):
            offenders.append(name)
    assert offenders == []


def text_files() -> Iterator[Path]:
    """What a reader of the repository sees, data files apart."""
    built = {"site", "build", "dist", "runs", "prefed-demo", "__pycache__"}
    binary = {".gz", ".parquet", ".png", ".safetensors", ".pyc", ".woff2"}
    for top in sorted(ROOT.iterdir()):
        if top.name in built or (top.is_dir() and top.name.startswith(".") and top.name != ".ci"):
            continue
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and path.suffix not in binary:
                yield path


def test_what_is_next_to_the_repository_is_named_in_one_place() -> None:
    other = "../" + "shared"
    allowed = {ROOT / "tests" / "conftest.py"}
    matches = [
        str(path.relative_to(ROOT))
        for path in text_files()
        if path not in allowed
        and path.relative_to(ROOT).parts[0] != "benchmarks"
        and other in path.read_text("utf-8", errors="ignore")
    ]
    assert matches == []


def test_tested_versions_are_named_for_every_dependency() -> None:
    """Each dependency of pyproject.toml is pinned in constraints.txt, PyTorch in the Makefile."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    needed = {re.split(r"[\[<>=!~ ]", entry)[0] for group in groups for entry in group}
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    # prefed names its own extras.
    assert needed - pinned == {"prefed", "torch"}
    assert re.search(r"^TORCH +\?= torch==[\d.]+$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


def test_no_test_measures_time() -> None:
    """Waits for what has to happen are as long as ``waiting.WATCHDOG``. A literal is for a time-out that a
    test wants to expire: less than 10 seconds, on Ray 20, and never an end on the clock."""
    waits = re.compile(r"monotonic\(\) \+ \d|mark\.timeout|(\btimeout=|\.(wait|join|wait_for)\()[1-9]\d")
    allowed = {"unit/test_house.py", "engines/test_ray.py"}
    found = [
        f"{path.relative_to(ROOT / 'tests')}:{number}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if waits.search(line) and path.relative_to(ROOT / "tests").as_posix() not in allowed
    ]
    assert found == []
    options = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]
    assert options["timeout"] > 2 * WATCHDOG


BUDGET: dict[str, tuple[int, str]] = {
    # Lines of code, and why it was raised last.
    "src/prefed/": (250, ""),
    "src/prefed/align/": (2_417, "the choice of the kept epoch has its own file"),
    "src/prefed/config/": (1_682, "a key's variable that is not allowed is answered with those that are"),
    "src/prefed/core/": (1_550, "settings of distributed noise"),
    "src/prefed/data/": (5_090, "rows of forgotten clients are left out"),
    "src/prefed/engines/": (2_818, "a merge that is at fault itself is named, and no upload dropped for it"),
    "src/prefed/merge/": (1_650, ""),
    "src/prefed/methods/": (2_300, "why a round depends on clients outside its cohort"),
    "src/prefed/models/": (2_155, "a LoRA of zeros is left out by the same products"),
    "src/prefed/networks/": (5_612, "secure sums of votes; a judge that fails has none"),
    "src/prefed/privacy/": (
        638,
        "sums of votes with noise, and their epsilon",
    ),
    "src/prefed/runs/": (6_708, "commands of a sweep share the imports of libraries"),
    "src/prefed/store/": (850, ""),
    "src/prefed/testing/": (700, ""),
    "src/prefed/trackers/": (600, ""),
    "src/prefed/train/": (4_244, "a prompt is read once; completions that have ended take no time"),
    "src/prefed/ui/": (7_726, "ranges, metavars and help of their own for options from settings"),
    "experiments/tests/": (1_842, "the benchmark's people"),
    "tests/": (2_577, "set-ups that several files share, which have 257 lines fewer"),
    "tests/cli/": (4_435, "ranges and errors of options from settings"),
    "tests/engines/": (11_561, "a merge that is at fault itself"),
    "tests/golden/": (4_650, "guards that a review missed"),
    "tests/laws/": (1_890, "how much a client moves a sum of votes"),
    "tests/unit/": (18_047, "processes of a sweep that cannot start"),
    # Words.
    "docs, README.md": (60_000, "what two pages said is said on one"),
}
"""Place → what it may hold, and why that was raised last, written in the commit that raises it."""


def code_lines(text: str) -> int:
    """Lines with code on them: not blank, not only a comment, not of a docstring."""
    lines = {n for n, line in enumerate(text.split("\n"), 1) if line.strip() and line.strip()[0] != "#"}
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Constant(str()) | ast.JoinedStr():
                lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
            case ast.Expr(ast.Constant(str())):
                docstrings.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines - docstrings)


@cache
def measured() -> Counter[str]:
    sizes: Counter[str] = Counter()
    for top in ("src/prefed", "tests", "experiments/tests"):
        for path in (ROOT / top).rglob("*.py"):
            room, *rest = path.relative_to(ROOT / top).parts
            sizes[f"{top}/{room}/" if rest else f"{top}/"] += code_lines(path.read_text("utf-8"))
    for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        sizes["docs, README.md"] += len(path.read_text("utf-8").split())
    return sizes


def test_code_lines_are_counted() -> None:
    """Of ``x`` two lines, then ``def``, ``return (``, ``x`` and ``)``."""
    text = (
        '"""Doc."""\n\n# why\nx = """a\nb"""  # here\n\n\n'
        'def f():\n    """Doc\n    more."""\n    return (\n        x\n    )\n'
    )
    assert code_lines(text) == 6


def test_nothing_grows_beyond_its_budget() -> None:
    """The first thing to do is to make it smaller."""
    sizes = measured()
    assert set(sizes) == set(BUDGET)
    over = [
        f"{place} has {size:,}, {size - BUDGET[place][0]:,} more than its budget of {BUDGET[place][0]:,}"
        for place, size in sorted(sizes.items())
        if size > BUDGET[place][0]
    ]
    assert not over, (
        "; ".join(over)
        + ": simplify, or raise BUDGET in tests/unit/test_house.py with a reason next to the number"
    )


def test_a_budget_is_close() -> None:
    """What was saved stays saved: no budget is more than a tenth, or 100, above what its place holds."""
    sizes = measured()
    loose = {
        place: f"{sizes[place]:,} of {limit:,}"
        for place, (limit, _) in BUDGET.items()
        if limit > max(1.1 * sizes[place], sizes[place] + 100)
    }
    assert loose == {}, "lower these budgets"
