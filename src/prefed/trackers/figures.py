"""The numbers of a run that a tool is told: those named here, and nothing else that a record holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

OVER_CLIENTS = ("mean", "worst", "worst_decile")
"""Numbers of a figure that every client has."""
SUMMARY = (
    *("margin", "dpo_loss", "choice_loss", "explicit_margin", "loss", "gradient_norm", "paper_gap"),
    *("time", "seconds", "peak_memory_mb", "dropped"),
)
"""Numbers of ``summary.json`` that are told."""
COUNTS = ("bytes", "parameters")
"""Its tables of numbers that are told."""


def round_figures(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a round's record, by their path. No client is named.

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
    """The numbers of a ``summary.json``, by their path; none of a client, and none of private states.

    >>> accuracy = {"mean": 0.5, "worst": 0.5, "worst_decile": 0.5, "per_client": {"ann": 0.5}}
    >>> summary = {"preference_accuracy": accuracy, "loss": 0.6, "bytes": {"up": 10, "down": 20}}
    >>> gates = {"personal": {"gate": {"ann": {"0": 0.51}}}}
    >>> summary_figures(summary | gates)  # doctest: +NORMALIZE_WHITESPACE
    {'summary/preference_accuracy/mean': 0.5, 'summary/preference_accuracy/worst': 0.5,
     'summary/preference_accuracy/worst_decile': 0.5, 'summary/loss': 0.6, 'summary/bytes/up': 10.0,
     'summary/bytes/down': 20.0}
    """
    tables = {
        name: value for name, value in summary.items() if isinstance(value, Mapping) and name != "personal"
    }
    figures = dict(_paths("summary", tables))
    figures |= dict(_paths("summary", {name: summary[name] for name in SUMMARY if name in summary}))
    for name in COUNTS:
        figures |= dict(_paths(f"summary/{name}", summary.get(name, {})))
    return figures


def client_table(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str | float | None]]]:
    """The clients that have figures of their own: columns and rows.

    >>> accuracy = {"mean": 0.5, "per_client": {"bob": 0.75, "ann": 0.25}}
    >>> sizes = {"ann": {"train": 8, "test": 4}, "bob": {"train": 9, "test": 4}, "tim": {"test": 1}}
    >>> client_table({"preference_accuracy": accuracy, "clients": sizes, "split": "test"})
    (['client', 'test', 'preference_accuracy'], [['ann', 4, 0.25], ['bob', 4, 0.75]])
    """
    figures = {name: value["per_client"] for name, value in summary.items() if _over_clients(value)}
    split, sizes = summary.get("split", "test"), summary.get("clients", {})
    clients = sorted(summary["preference_accuracy"]["per_client"])
    rows: list[list[str | float | None]] = [
        [client, sizes.get(client, {}).get(split), *(values.get(client) for values in figures.values())]
        for client in clients
    ]
    return ["client", split, *figures], rows


def _paths(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers in a table, of figures over clients, and of tables of such, e.g. ``unseen_accuracy``."""
    for name, value in values.items():
        path = f"{prefix}/{name}"
        if _is_number(value):
            yield path, float(value)
        elif _over_clients(value):
            yield from ((f"{path}/{n}", float(value[n])) for n in OVER_CLIENTS if _is_number(value.get(n)))
        elif isinstance(value, Mapping):
            # A number in a table, such as not_finite, is a client's.
            yield from _paths(path, {n: inner for n, inner in value.items() if _over_clients(inner)})


def _over_clients(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("per_client"), Mapping)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
