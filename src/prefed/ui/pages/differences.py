"""Finished runs set side by side: their names, what they do differently, which cannot be compared."""

from __future__ import annotations

import re
from collections.abc import Sequence

from prefed.core.strict import flatten
from prefed.runs.record import RunRecord
from prefed.runs.replicates import Case, cases
from prefed.ui.pages.tables import setting


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """A short name for each run, no two alike: the directory's, with as many parents as it takes."""
    parts = [run.path.resolve().parts for run in runs]
    depth = 1
    while depth < max(map(len, parts)) and len({p[-depth:] for p in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def case_names(known: Sequence[Case]) -> list[str]:
    """A short name for each case, no two alike: its first run's without the seed."""
    whole = labels([case.runs[0] for case in known])
    names = [
        re.sub(rf"[-_./ ]*seed[-_=]?{case.seeds[0]}$", "", name)
        for case, name in zip(known, whole, strict=True)
    ]
    return [own if own and names.count(own) == 1 else name for own, name in zip(names, whole, strict=True)]


def letters(count: int) -> list[str]:
    """Short names in the place of long ones.

    >>> letters(3), letters(28)[-2:]
    (['A', 'B', 'C'], ['AA', 'AB'])
    """
    alphabet = [chr(ord("A") + number) for number in range(26)]
    return [*alphabet, *(first + second for first in alphabet for second in alphabet)][:count]


def disagreements(runs: Sequence[RunRecord]) -> dict[int, str]:
    """The runs whose figures cannot be compared with the first run's: index → why.

    They had other data, were judged on other pairs or clients, or began at another base model. A seed may
    decide who has which pairs, so each run is compared with the first one of its own seed.
    """
    first, reasons = runs[0], {}
    of_seed: dict[int, RunRecord] = {}
    for index, run in enumerate(runs):
        peer = of_seed.get(run.seed)
        mine, theirs = (each.fingerprint.get("data") for each in (run, peer or first))
        why = []
        if mine and theirs and (peer or mine == theirs):
            if mine != theirs:
                why.append("other data")
        elif run.config["data"] != first.config["data"]:
            why.append("other [data] settings")
        if run.split != first.split:
            why.append(f"judged on {run.split} pairs, not {first.split} pairs")
        elif not why and peer and run.clients != peer.clients:
            why.append("judged on other clients")
        if run.config["model"]["name"] != first.config["model"]["name"]:
            why.append("another base model")
        if why:
            reasons[index] = ", ".join(why)
        else:
            of_seed.setdefault(run.seed, run)
    return reasons


def cases_apart(runs: Sequence[RunRecord]) -> tuple[list[Case], list[Case]]:
    """The cases that can be compared with the first run, and those that cannot: no case has runs of both."""
    marked = disagreements(runs)
    fine = [run for index, run in enumerate(runs) if index not in marked]
    return cases(fine), cases([runs[index] for index in marked])


def differences(runs: Sequence[RunRecord]) -> dict[str, list[str | None]]:
    """The settings in which runs differ: dotted name → each run's value, ``None`` where it has none.

    A method's own settings are compared between the runs of methods that have them. ``[engine]`` says where
    the work was done and decides nothing, so it is left out.
    """
    settings = [{name: setting(value) for name, value in flatten(run.config).items()} for run in runs]
    methods: dict[str, set[str]] = {}
    for run, own in zip(runs, settings, strict=True):
        methods.setdefault(run.method, set()).update(own)
    result = {}
    for name in dict.fromkeys(name for own in settings for name in own):
        values = [own.get(name) for own in settings]
        compared = {
            value
            for value, run in zip(values, runs, strict=True)
            if not name.startswith("method.") or name in methods[run.method]
        }
        if len(compared) > 1 and not name.startswith("engine."):
            result[name] = values
    return result
