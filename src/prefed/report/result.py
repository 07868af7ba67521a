"""What a finished run came to, on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prefed.core.text import pluralize, printable, size
from prefed.metrics import small_clients_note
from prefed.runs.profiles import profiles_of

__all__ = ["print_result"]

SHOWN = 40
"""Clients that a table lists at most."""


def print_result(
    summary: Mapping[str, Any], console: Console, more: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """A finished run: each client before and after, what it cost.

    Args:
        summary: what ``summary.json`` holds.
        console: where to write.
        more: further columns, each shaped as ``preference_accuracy`` is in the summary.
    """
    before = summary["baseline_accuracy"]
    after = summary["preference_accuracy"]
    columns = [("before", before), ("after", after), ("reward", summary["reward_accuracy"])]
    if "shared_accuracy" in summary:
        columns[1:2] = [("shared model", summary["shared_accuracy"]), ("own model", after)]
    if "combined_accuracy" in summary:
        columns.append(("combined", summary["combined_accuracy"]))
    columns += list((more or {}).items())
    clients = list(after["per_client"])
    shown = sorted(clients, key=lambda c: after["per_client"][c])[:SHOWN] if len(clients) > SHOWN else clients
    rounds = pluralize(summary["rounds"], "round", "rounds")
    title = f"{summary['method']}, {rounds}: share of {summary['split']} pairs ordered rightly"
    table = Table(title=title, title_justify="left")
    table.add_column("client", overflow="fold", min_width=12)
    for name in ("pairs", *dict(columns)):
        name = name.replace(" ", "\n") if console.width < 100 else name
        table.add_column(name, justify="right", no_wrap=True)
    for client in shown:
        pairs = summary["clients"][client][summary["split"]]
        figures = [f"{values['per_client'][client]:.3f}" for _, values in columns]
        table.add_row(escape(printable(client)), f"{pairs:,}", *figures)
    if len(shown) < len(clients):
        table.add_row(
            f"… and {len(clients) - len(shown):,} clients that do better", *[""] * (len(columns) + 1)
        )
    table.add_section()
    for name, key in (("mean", "mean"), ("worst client", "worst"), ("worst tenth", "worst_decile")):
        table.add_row(name, "", *[f"{values[key]:.3f}" for _, values in columns], style="bold")
    console.print(table)
    if summary["left_out"]:
        one, several = (f"{who} no pair to be judged on and" for who in ("client has", "clients have"))
        console.print(f"{pluralize(summary['left_out'], f'{one} is', f'{several} are')} left out")
    small = small_clients_note(after)
    if small:
        console.print(small, markup=False, soft_wrap=True)
    if summary["dropped"]:
        gone = pluralize(summary["dropped"], "upload was", "uploads were")
        console.print(f'{gone} dropped: see "dropped" in rounds.jsonl', style="yellow")
    if "explicit_margin" in summary:
        right, agreed = (summary[name]["mean"] for name in ("explicit_accuracy", "agreement"))
        console.print(
            f"reward head: right on {right:.1%} of pairs, agrees with the policy on {agreed:.1%}; "
            f"mean margin {summary['explicit_margin']:.3f}, the policy's {summary['margin']:.3f} nats",
            soft_wrap=True,
        )
    for profile in profiles_of(summary).values():
        console.print(f"{profile.label}: mean {profile.ends}", markup=False)
    traffic, parameters = summary["bytes"], summary["parameters"]
    console.print(
        f"sent up {size(traffic['up'])}, down {size(traffic['down'])}; "
        f"{parameters['trainable']:,} parameters trained, {parameters['communicated']:,} in an upload; "
        f"{summary['seconds']:.1f} s, {summary['peak_memory_mb']:.0f} MiB at the most",
        soft_wrap=True,
    )
