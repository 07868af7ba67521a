"""The leaderboard of ``prefed sweep --method``: a table of methods for each task."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefed.core import files
from prefed.runs.sweep import SweepCell
from prefed.runs.sweep_child import NEWCOMERS
from prefed.train.metrics import seed_interval
from prefed.ui.pages.sweep import HEALTHY, Outcome, healthy_texts, rate, sent
from prefed.ui.pages.tables import Table, markdown

NOTE = (
    "The tables below add 95% intervals (Student's t) and a second accuracy, empty if it equals the first, "
    "as for selectors. †: by the other accuracy, the order of this policy and another is reversed, with "
    "intervals that do not overlap in either. A learning rate with ≤ or ≥ is at an end of those tried. "
    "`leaderboard.json` has the rates tried, the other metrics, and each seed's values and commit.\n"
)


def add(out: Path, cell: SweepCell, outcome: Outcome) -> None:
    """Add or replace the result of a method on a task in ``OUT/leaderboard.json``.

    Args:
        outcome: from the sweep, or ``{"refused": REASON}`` if the method cannot do the task.
    """
    with files.locked(out):
        tasks = _read(out)
        task = tasks.setdefault(cell.folder.name, {"methods": {}})
        task |= {"title": cell.table.title, "judge": cell.table.judge}
        task["methods"][cell.definition.name] = {"text": cell.definition.text, **outcome}
        files.write(out / "leaderboard.json", json.dumps(tasks, indent=1, ensure_ascii=False).encode())


def write_leaderboard(out: Path) -> Path:
    """Write ``OUT/leaderboard.md`` from ``OUT/leaderboard.json``."""
    path = out / "leaderboard.md"
    with files.locked(out):
        files.write(path, _page(_read(out)).encode())
    return path


def _page(tasks: Mapping[str, Any]) -> str:
    methods = {name: each["text"] for task in tasks.values() for name, each in task["methods"].items()}
    overview = [
        (text, [*(_headline(task, task["methods"].get(name)) for task in tasks.values()), _sent(tasks, name)])
        for name, text in methods.items()
    ]
    rows = [each for task in tasks.values() for each in task["methods"].values()]
    commits = sorted({commit for each in rows for commit in each.get("commits", [])})
    parts = [
        "# Leaderboard\n",
        "The first metric of each task's table below, as a mean over seeds:\n",
        markdown(Table("", ["method", *tasks, "MB sent"], overview)),
        f"{NOTE}\nCommits: {', '.join(commits)}.\n",
    ]
    for name, task in tasks.items():
        parts += [f"## {name}\n\n{task['title']}.{_base(task)}\n", markdown(_table(task))]
        if refused := _refused(task):
            parts.append("".join(f"- {texts}: – ({reason})\n" for texts, reason in refused))
    return "\n".join(parts)


def _refused(task: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Methods that cannot do a task, and why; those whose reasons differ only by their name are together."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for name, each in task["methods"].items():
        if "refused" in each:
            general = re.sub(rf"(?<![\w']){re.escape(name)}(?![\w'])", "the method", each["refused"])
            alike.setdefault(general, []).append((each["text"], each["refused"]))
    return [
        (", ".join(text for text, _ in group), general if len(group) > 1 else group[0][1])
        for general, group in alike.items()
    ]


def with_interval(values: Sequence[float]) -> str:
    """Format a mean over seeds and its interval; with one seed, only the mean.

    >>> with_interval([0.6, 0.7, 0.8]), with_interval([0.7])
    ('0.700 [0.452, 0.948]', '0.700')
    """
    interval = seed_interval(values, within=(0, 1))
    ends = "" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]"
    return f"{statistics.fmean(values):.3f}{ends}"


def _read(out: Path) -> dict[str, Any]:
    path = out / "leaderboard.json"
    return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}


def _leading(task: Mapping[str, Any]) -> str:
    """The metric that ranks methods: newcomers' accuracy if there are any, else the judge of the rates."""
    newcomers = any(each.get(f"{NEWCOMERS}.mean") for each in task["methods"].values())
    return NEWCOMERS if newcomers else str(task["judge"])


def _headline(task: Mapping[str, Any], outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    values = outcome.get(f"{_leading(task)}.mean")
    return f"{statistics.fmean(values):.3f}" if values else "–"


def _sent(tasks: Mapping[str, Any], name: str) -> str:
    """The least and the most that a method sent, over tasks."""
    each = [task["methods"].get(name, {}) for task in tasks.values()]
    values = sorted({sent(outcome["bytes"]) for outcome in each if "bytes" in outcome}, key=float)
    return " to ".join(dict.fromkeys([values[0], values[-1]])) if values else "–"


def _reversed(rows: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[bool]:
    """Whether two metrics order a policy and another oppositely, with intervals that do not overlap.

    A selector's two metrics are one and the same, and are not compared with a policy's.

    Args:
        rows: values of both metrics over seeds, the best by the first metric first.

    >>> _reversed([((0.9, 0.9), (0.3, 0.3)), ((0.8, 0.8), (0.5, 0.5)), ((0.7, 0.7), (0.7, 0.7))])
    [True, True, False]
    """
    found: list[tuple[int, tuple[float, float], tuple[float, float]]] = []
    for place, (first, second) in enumerate(rows):
        leading, other = seed_interval(first, within=(0, 1)), seed_interval(second, within=(0, 1))
        if first != second and leading and other:
            found.append((place, leading, other))
    marked = {
        place
        for ahead, behind in itertools.combinations(found, 2)
        if ahead[1][0] > behind[1][1] and ahead[2][1] < behind[2][0]
        for place in (ahead[0], behind[0])
    }
    return [place in marked for place in range(len(rows))]


def _table(task: Mapping[str, Any]) -> Table:
    """The finished methods of a task, the best first; those with equal cells share a row."""
    leading = _leading(task)
    second = "preference_accuracy" if leading == "reward_accuracy" else "reward_accuracy"
    finished = [each for each in task["methods"].values() if each.get(f"{leading}.mean")]
    finished.sort(key=lambda each: -statistics.fmean(each[f"{leading}.mean"]))
    text = [HEALTHY] if any("health" in each for each in finished) else []
    opposed = _reversed([(each[f"{leading}.mean"], each.get(f"{second}.mean") or ()) for each in finished])
    rows: dict[tuple[str, ...], list[str]] = {}
    for each, mark in zip(finished, opposed, strict=True):
        first, values = each[f"{leading}.mean"], each.get(f"{second}.mean")
        other = with_interval(values) + " †" * mark if values and values != first else ""
        worst = f"{statistics.fmean(each[f'{leading}.worst']):.3f}"
        cells = with_interval(first), other, worst, rate(each)[0], *(healthy_texts(each) for _ in text)
        rows.setdefault(cells, []).append(each["text"])
    head = ["method", leading.replace("_", " "), second.replace("_", " "), "worst client", "learning rate"]
    return Table("", [*head, *text], [(", ".join(texts), cells) for cells, texts in rows.items()])


def _base(task: Mapping[str, Any]) -> str:
    """The base model's preference accuracy: one as a policy, and one as a selector if there are any."""
    methods = task["methods"].values()
    means = [each["baseline_accuracy.mean"] for each in methods if each.get("baseline_accuracy.mean")]
    values = sorted({f"{statistics.fmean(mean):.3f}" for mean in means})
    return f" The base model's preference accuracy is {' or '.join(values)}." if values else ""
