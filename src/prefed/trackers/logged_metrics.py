"""The metrics that are logged to tools. Nothing else of a record is sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prefed.core.records import Summary, is_metric, metrics_of_clients

OVER_CLIENTS = ("mean", "worst", "worst_decile")
"""Statistics of a metric over clients that are logged."""
NOT_LOGGED = ("rounds", "seed", "left_out", "personal")
"""Entries of ``summary.json`` that are no metrics, or metrics of private states."""
COUNTS = ("bytes", "parameters")
"""Tables of numbers of ``summary.json`` that are logged."""
EPOCH = ("loss", "win_rate", "agreement", "margin")
"""Metrics of an epoch of an alignment that are logged."""
STAGES = {
    "prompts": ("read", "kept", "duplicates"),
    "completions": ("completions", "cut", "tokens", "too_long"),
    "labels": (
        "pairs",
        "labelled",
        "unanimous",
        "ties",
        "identical",
        "blank",
        "cut",
        "less_clear",
        "too_long",
        "failed",
    ),
    "train": ("pairs", "held_out", "too_long", "kept"),
}
"""Stage of an alignment → its counts that are logged."""
JUDGED = ("wins", "length_controlled", "ties", "judged", "failed", "left_out")
"""Numbers of a comparison that are logged in addition to its win rate."""


def round_figures(record: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in a round's record by path. No client is named.

    >>> accuracy = {"mean": 0.5, "worst": 0.25, "worst_decile": 0.25, "per_client": {"a": 0.25, "b": 0.75}}
    >>> evaluation = {"preference_accuracy": accuracy, "margin": 0.1, "split": "test"}
    >>> record = {"round": 1, "loss": 0.6, "cohort": ["ann"], "dropped": [], "evaluation": evaluation}
    >>> round_figures(record)  # doctest: +NORMALIZE_WHITESPACE
    {'loss': 0.6, 'dropped': 0.0, 'evaluation/preference_accuracy/mean': 0.5,
     'evaluation/preference_accuracy/worst': 0.25, 'evaluation/preference_accuracy/worst_decile': 0.25,
     'evaluation/margin': 0.1}
    """
    figures = {name: float(value) for name, value in record.items() if name != "round" and _is_number(value)}
    figures["dropped"] = float(len(record.get("dropped", ())))
    return figures | dict(_paths("evaluation", record.get("evaluation", {})))


def summary_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in ``summary.json`` by path, without those of single clients and private states.

    >>> accuracy = {"mean": 0.5, "worst": 0.5, "worst_decile": 0.5, "per_client": {"ann": 0.5}}
    >>> summary = {"preference_accuracy": accuracy, "loss": 0.6, "bytes": {"up": 10, "down": 20}}
    >>> gates = {"personal": {"gate": {"ann": {"0": 0.51}}}}
    >>> summary_figures(summary | gates)  # doctest: +NORMALIZE_WHITESPACE
    {'summary/preference_accuracy/mean': 0.5, 'summary/preference_accuracy/worst': 0.5,
     'summary/preference_accuracy/worst_decile': 0.5, 'summary/loss': 0.6, 'summary/bytes/up': 10.0,
     'summary/bytes/down': 20.0}
    """
    figures = dict(_paths("summary", {name: summary[name] for name in summary if name not in NOT_LOGGED}))
    for name in COUNTS:
        figures |= dict(_paths(f"summary/{name}", summary.get(name, {})))
    return figures


def client_table(summary: Summary) -> tuple[list[str], list[list[str | float | None]]]:
    """The clients that have individual metrics, as columns and rows.

    >>> accuracy = {"mean": 0.5, "per_client": {"bob": 0.75, "ann": 0.25}}
    >>> sizes = {"ann": {"train": 8, "test": 4}, "bob": {"train": 9, "test": 4}, "tim": {"test": 1}}
    >>> client_table({"preference_accuracy": accuracy, "clients": sizes, "split": "test"})
    (['client', 'test', 'preference_accuracy'], [['ann', 4, 0.25], ['bob', 4, 0.75]])
    """
    figures = {name: metric["per_client"] for name, metric in metrics_of_clients(summary).items()}
    split, sizes = summary.get("split", "test"), summary.get("clients", {})
    clients = sorted(summary["preference_accuracy"]["per_client"])
    rows: list[list[str | float | None]] = [
        [client, sizes.get(client, {}).get(split), *(values.get(client) for values in figures.values())]
        for client in clients
    ]
    return ["client", split, *figures], rows


def epoch_figures(epoch: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an epoch of an alignment.

    >>> epoch_figures({"epoch": 3, "generation": 2, "loss": 0.5, "steps": 7, "agreement": None})
    {'align/loss': 0.5, 'align/generation': 2.0}
    """
    return {f"align/{name}": value for name, value in _only(epoch, (*EPOCH, "generation")).items()}


def alignment_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in ``align/summary.json``: counts and times of its stages, and the kept epoch.

    >>> train = {"pairs": 8, "kept": 2, "epochs": [{"loss": 0.7}, {"loss": 0.6, "agreement": 0.75}]}
    >>> alignment_figures({"labels": {"ties": 1, "seconds": 2.5}, "train": train, "seconds": 9.5})
    ... # doctest: +NORMALIZE_WHITESPACE
    {'summary/align/labels/ties': 1.0, 'summary/align/labels/seconds': 2.5, 'summary/align/train/pairs': 8.0,
     'summary/align/train/kept': 2.0, 'summary/align/loss': 0.6, 'summary/align/agreement': 0.75,
     'summary/align/seconds': 9.5}
    """
    kept = summary["train"]["epochs"][summary["train"]["kept"] - 1]
    tables = {stage: _only(summary.get(stage, {}), (*names, "seconds")) for stage, names in STAGES.items()}
    figures = {f"{stage}/{name}": value for stage, own in tables.items() for name, value in own.items()}
    figures |= _only(kept, EPOCH) | _only(summary, ("seconds",))
    return {f"summary/align/{name}": value for name, value in figures.items()}


def judged_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in the ``summary.json`` of a judge's comparison.

    >>> rate = {"mean": 0.625, "low": 0.5, "high": 0.75}
    >>> judged_figures({"name": "n", "judge": "utility", "win_rate": rate, "ties": 2, "note": ""})
    ... # doctest: +NORMALIZE_WHITESPACE
    {'judge/n/win_rate/mean': 0.625, 'judge/n/win_rate/low': 0.5, 'judge/n/win_rate/high': 0.75,
     'judge/n/ties': 2.0}
    """
    rate = _only(summary["win_rate"], ("mean", "low", "high"))
    figures = {f"win_rate/{name}": value for name, value in rate.items()} | _only(summary, JUDGED)
    return {f"judge/{summary['name']}/{name}": value for name, value in figures.items()}


def _only(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    """The numbers among ``values`` with these names."""
    return {name: float(values[name]) for name in names if _is_number(values.get(name))}


def _paths(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a table and in its metrics over clients, also nested, e.g. ``unseen_accuracy``."""
    for name, value in values.items():
        path = f"{prefix}/{name}"
        if _is_number(value):
            yield path, float(value)
        elif is_metric(value):
            yield from ((f"{path}/{n}", float(value[n])) for n in OVER_CLIENTS if _is_number(value.get(n)))
        elif name == "text":
            for model, health in value.items():
                yield from _paths(f"{path}/{model}", health)
        elif isinstance(value, Mapping):
            # A number in a nested table, such as not_finite, belongs to a client.
            yield from _paths(path, {n: inner for n, inner in value.items() if is_metric(inner)})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
