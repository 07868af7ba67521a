"""What a sweep over a grid leaves beside its runs: the choice as JSON, and the page over all runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefed.core import files
from prefed.core.text import pluralize
from prefed.runs.child import commits
from prefed.runs.grid import Chosen, GridSweep
from prefed.runs.record import read_run
from prefed.runs.seeds import fold
from prefed.ui.pages.compare_page import write_comparison
from prefed.ui.pages.compared import ChosenCase, plus_minus


def keep_grid(sweep: GridSweep, chosen: Sequence[Chosen]) -> tuple[Path, Path] | None:
    """Write ``FOLDER.json`` and ``FOLDER.html`` about the finished runs of a sweep; ``None`` without any."""
    runs = [sweep.run_of(each, seed) for each in sweep.combinations for seed in sweep.seeds]
    records = [read_run(run.out) for run in runs if run.finished]
    if not records:
        return None
    told, page = (sweep.folder.with_name(f"{sweep.folder.name}.{kind}") for kind in ("json", "html"))
    content = {
        "experiment": str(sweep.path),
        "judge": sweep.judge,
        "seeds": list(sweep.seeds),
        "combinations": [{"name": each.name, "settings": dict(each.values)} for each in sweep.combinations],
        "chosen": [_plain(sweep, each) for each in chosen],
        "commits": sorted({commit for run in runs if run.finished for commit in commits(run.out)}),
    }
    files.write(told, json.dumps(content, indent=1, ensure_ascii=False).encode())
    write_comparison(records, page, chosen_cases(sweep, chosen))
    return told, page


def chosen_cases(sweep: GridSweep, chosen: Sequence[Chosen]) -> list[ChosenCase]:
    """What was chosen, in words, with its figures on test pairs."""
    return [
        ChosenCase(
            sentence(sweep, each),
            [sweep.run_of(each.combination, seed).out for seed in sweep.seeds],
            {
                name: {seed: value["mean"] for seed, value in own.items()}
                for name, own in _test(sweep, each).items()
            },
        )
        for each in chosen
    ]


def sentence(sweep: GridSweep, chosen: Chosen) -> str:
    """Which combination was chosen, of how many, and by which figures."""
    best, figures = chosen.among[0]
    where = f"With {', '.join(best.of_data)}: " if best.of_data else ""
    seeds = pluralize(len(sweep.seeds), "seed", "seeds")
    text = f"{where}{best.name} ({', '.join(f'{k} = {v}' for k, v in best.texts.items())}) was chosen of "
    text += f"{pluralize(len(chosen.among), 'combination', 'combinations')}. "
    text += f"Its {sweep.judge.replace('_', ' ')} on "
    text += f"validation pairs, mean over clients and {seeds}, is the highest: {plus_minus(figures)}."
    if len(chosen.among) > 1:
        second, theirs = chosen.among[1]
        text += f" Next is {second.name}: {plus_minus(theirs)}."
        if fold(list(theirs.values())).mean == fold(list(figures.values())).mean:
            text += " They are equal, and the first one given is taken."
    for key in chosen.at_end_of:
        text += f" Its {key} lies at the end of those tried: others beyond it may do better."
    return text


def _test(sweep: GridSweep, chosen: Chosen) -> dict[str, dict[int, dict[str, float]]]:
    """Figure → seed → mean and worst client on test pairs."""
    told: dict[str, dict[int, dict[str, float]]] = {}
    for seed in sweep.seeds:
        for name, values in (sweep.run_of(chosen.combination, seed, test=True).figures or {}).items():
            told.setdefault(name, {})[seed] = values
    return told


def _plain(sweep: GridSweep, chosen: Chosen) -> dict[str, Any]:
    return {
        "name": chosen.combination.name,
        "settings": dict(chosen.combination.values),
        "validation": {each.name: {str(s): v for s, v in own.items()} for each, own in chosen.among},
        "test": {
            name: {str(seed): values for seed, values in own.items()}
            for name, own in _test(sweep, chosen).items()
        },
    }
