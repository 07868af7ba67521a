"""A run that has just finished, and a finished run whose models are evaluated again, on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prefed.core.records import Summary, metrics_of_clients
from prefed.core.text import pluralize, size
from prefed.runs.figures import (
    REWARD_MEANING,
    REWARDED,
    Grouping,
    agreements,
    figures_of,
    profiles_of,
    selector_figures,
)
from prefed.train.metrics import MEAN_METRICS, small_clients_note
from prefed.ui.pages.selectors import agreement_table
from prefed.ui.pages.tables import Row, Table, lowest_clients, metrics_table, terminal, unseen_table
from prefed.ui.pages.tastes import tastes_line

if TYPE_CHECKING:
    from rich.console import Console

    from prefed.runs.evaluate import Evaluation


def print_result(
    summary: Summary,
    console: Console,
    more: Mapping[str, Mapping[str, Any]] | None = None,
    groupings: Sequence[Grouping] = (),
    tastes: Mapping[str, Any] | None = None,
) -> None:
    """Each client before and after, what a reader should know, and what the run cost.

    ``summary`` is what ``summary.json`` holds. ``more`` are further columns, each shaped as
    ``preference_accuracy`` is in the summary. ``groupings`` are the run's, where it has selectors,
    ``tastes`` what its ``tastes.json`` holds.
    """
    console.print(terminal(_clients(summary, more or {})))
    console.print(verdict(summary), soft_wrap=True)
    if "majority_accuracy" not in summary:
        console.print(f"reward accuracy: {REWARD_MEANING}", soft_wrap=True, style="dim")
    if summary["left_out"]:
        one, several = (f"{who} no pair to be judged on and" for who in ("client has", "clients have"))
        console.print(f"{pluralize(summary['left_out'], f'{one} is', f'{several} are')} left out")
    small = small_clients_note(summary["preference_accuracy"])
    if small:
        console.print(small, markup=False, soft_wrap=True)
    if "stop" in summary:
        console.print(best_line(summary["stop"]), markup=False, soft_wrap=True)
    if summary["dropped"]:
        uploads = pluralize(summary["dropped"], "upload was", "uploads were")
        console.print(f'{uploads} dropped: see "dropped" in rounds.jsonl', style="yellow")
    if summary.get("set_aside"):
        names = ", ".join(summary["set_aside"])
        console.print(f"set aside for bad uploads: {names}", markup=False, soft_wrap=True, style="yellow")
    if "explicit_margin" in summary:
        right, agreed = summary["explicit_accuracy"]["mean"], summary["agreement"]["mean"]
        console.print(
            f"reward head: explicit accuracy {right:.1%}, agreement with the policy {agreed:.1%}; "
            f"mean margin {summary['explicit_margin']:.3f}, the policy's {summary['margin']:.3f} nats",
            soft_wrap=True,
        )
    selectors = agreements(summary, groupings[-1].clusters if groupings else ())
    if table := agreement_table(selectors, f"{summary['split']} pairs"):
        console.print(terminal(table))
    if groupings:
        last = groupings[-1]
        sizes = ", ".join(f"{len(clients):,}" for clients in last.clusters)
        moved = pluralize(len(last.moved), "client", "clients")
        console.print(f"clusters of {sizes} clients since round {last.round}, where {moved} moved")
    if tastes:
        style = "yellow" if tastes["collapsed"] else None
        console.print(tastes_line(tastes), markup=False, soft_wrap=True, style=style)
    if "privacy" in summary:
        console.print(privacy_line(summary["privacy"]), markup=False, soft_wrap=True)
    for profile in profiles_of(summary).values():
        console.print(f"{profile.label}: mean {profile.ends}", markup=False)
    traffic, parameters = summary["bytes"], summary["parameters"]
    console.print(
        f"sent up {size(traffic['up'])}, down {size(traffic['down'])}; "
        f"{parameters['trainable']:,} parameters trained, {parameters['communicated']:,} in an upload; "
        f"{summary['seconds']:.1f} s, {summary['peak_memory_mb']:.0f} MiB at the most",
        soft_wrap=True,
    )


def verdict(summary: Summary) -> str:
    """Whether training helped: the mean before and after, and for how many clients it rose.

    >>> def over(mean, ann, bob):
    ...     return {"mean": mean, "per_client": {"ann": ann, "bob": bob}}
    >>> verdict({"baseline_accuracy": over(0.5, 0.5, 0.5), "preference_accuracy": over(0.6, 0.75, 0.45)})
    'preference accuracy 0.500 → 0.600, mean over clients: better than before for 1 of 2 clients'
    """
    before, after = summary["baseline_accuracy"], summary["preference_accuracy"]
    both = before["per_client"].keys() & after["per_client"].keys()
    better = sum(after["per_client"][client] > before["per_client"][client] for client in both)
    return (
        f"preference accuracy {before['mean']:.3f} → {after['mean']:.3f}, mean over clients: "
        f"better than before for {better:,} of {pluralize(len(both), 'client', 'clients')}"
    )


def result_line(summary: Summary) -> str:
    """The result of a run in one line; ``summary`` is what ``summary.json`` holds."""
    names = ("preference_accuracy", "baseline_accuracy", "reward_accuracy")
    metrics = metrics_of_clients(summary)
    figures = (f"{name.replace('_', ' ')} {metrics[name]['mean']:.3f}" for name in names)
    return f"{summary['method']}, {pluralize(summary['rounds'], 'round', 'rounds')}: {', '.join(figures)}"


def privacy_line(privacy: Mapping[str, Any]) -> str:
    """What a run with a ``[privacy] kind`` promises of any one client.

    >>> told = {"kind": "central", "epsilon": None, "delta": None, "noise_multiplier": 0.0}
    >>> privacy_line(told)
    'privacy: central, updates are clipped and have no noise, so nothing is promised'
    """
    if privacy["epsilon"] is None:
        return f"privacy: {privacy['kind']}, updates are clipped and have no noise, so nothing is promised"
    releases = pluralize(privacy["releases"], "release", "releases")
    known = "; the seed gives the noise away" if privacy["draws"] == "seed" else ""
    return (
        f"privacy: {privacy['kind']}, epsilon {privacy['epsilon']:.3g} at delta {privacy['delta']:g} "
        f"({privacy['adjacency']}; {privacy['bound']}; {releases}{known})"
    )


def best_line(stop: Mapping[str, Any]) -> str:
    """Which round was the best, by what, and whether the run stopped before its last.

    >>> stop = {"metric": "preference_accuracy", "over": "mean", "stopped": True}
    >>> stop |= {"last": {"round": 9, "value": 0.61}, "best": {"round": 6, "value": 0.66}}
    >>> best_line(stop).partition(": ")[2]
    '6 (0.660; 0.610 after the last, 9, where the run stopped)'
    """
    by, last, best = f"{stop['over']} {stop['metric'].replace('_', ' ')}", stop["last"], stop.get("best")
    if best is None:
        return f"no round has a finite {by} on validation pairs: none is the best"
    ended = ", where the run stopped" if stop["stopped"] else ""
    value = "not finite" if last["value"] is None else f"{last['value']:.3f}"
    return (
        f"best round by {by} on validation pairs: {best['round']} ({best['value']:.3f}; {value} after the "
        f"last, {last['round']}{ended})"
    )


def _clients(summary: Summary, more: Mapping[str, Mapping[str, Any]]) -> Table:
    after = summary["preference_accuracy"]
    columns: dict[str, Mapping[str, Any]] = {"before": summary["baseline_accuracy"]}
    if "shared_accuracy" in summary:
        columns |= {"shared model": summary["shared_accuracy"], "own model": after}
    else:
        columns["after"] = after
    if "majority_accuracy" in summary:
        columns["majority accuracy"] = summary["majority_accuracy"]
    else:
        columns["reward accuracy"] = summary["reward_accuracy"]
    if "combined_accuracy" in summary:
        columns["combined accuracy"] = summary["combined_accuracy"]
    columns |= more
    clients, others = lowest_clients(after["per_client"])
    rows: list[Row] = []
    for client in clients:
        pairs = summary["clients"][client][summary["split"]]
        rows.append(
            (client, [f"{pairs:,}", *(f"{own['per_client'][client]:.3f}" for own in columns.values())])
        )
    if others:
        rows.append((others, []))
    spreads = [
        (name, ["", *(f"{own[key]:.3f}" for own in columns.values())])
        for name, key in (("mean", "mean"), ("worst client", "worst"), ("worst tenth", "worst_decile"))
    ]
    rounds = pluralize(summary["rounds"], "round", "rounds")
    title = f"{summary['method']}, {rounds}: preference accuracy on {summary['split']} pairs"
    return Table(title, ["client", "pairs", *columns], rows, spreads)


def print_evaluation(evaluation: Evaluation, name: str, console: Console) -> None:
    """Each client's figures, those of clients that never took part, and what a reader should know."""
    if evaluation.figures:
        figures = {n: figure for n, figure in figures_of(evaluation.figures).items() if n not in MEAN_METRICS}
        if evaluation.taste is not None:
            name = f"{name}, taste {evaluation.taste}"
            figures["preference_accuracy"] = replace(figures["preference_accuracy"], label="this taste")
        single = selector_figures(figures)
        usual = [figure for n, figure in figures.items() if n not in (*REWARDED, *single)]
        title = f"{name}: preference accuracy on {evaluation.what}"
        console.print(terminal(metrics_table(title, usual, evaluation.pairs.get)))
        if single:
            title = f"{name}: each selector by itself"
            alone = [figures[n] for n in single]
            console.print(terminal(metrics_table(title, alone, evaluation.pairs.get)))
        rewarded = [figures[n] for n in ("preference_accuracy", *REWARDED) if n in figures]
        if len(rewarded) > 1:
            title = f"{name}: with the reward head"
            console.print(terminal(metrics_table(title, rewarded, evaluation.pairs.get)))
        margin = f"mean margin {evaluation.figures['margin']['mean']:.3f} nats"
        for loss, name_of_loss in (("dpo_loss", "DPO loss"), ("choice_loss", "cross-entropy")):
            if loss in evaluation.figures:
                console.print(f"{margin}, mean {name_of_loss} {evaluation.figures[loss]['mean']:.4f}")
        if "explicit_margin" in evaluation.figures:
            explicit = evaluation.figures["explicit_margin"]["mean"]
            console.print(f"mean margin of the reward head {explicit:.3f}")
    if evaluation.unseen:
        console.print(terminal(unseen_table(evaluation.unseen, evaluation.taste)))
    if evaluation.unseen_selectors:
        pairs = "the pairs of clients that never took part,"
        if table := agreement_table(agreements(evaluation.unseen_selectors), pairs):
            console.print(terminal(table))
    for note in evaluation.notes:
        console.print(note, markup=False, soft_wrap=True)
