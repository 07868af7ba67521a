"""Terminal output: the result of a run, an evaluation, a dry run, the statistics of a dataset."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from prefed.core.records import Summary, metrics_of_clients
from prefed.core.text import duration, pluralize, printable, printable_lines, size
from prefed.runs.data_notices import CUT, LEFT_OUT
from prefed.runs.metrics import (
    Agreement,
    Grouping,
    agreements,
    figures_of,
    profiles_of,
    selector_figures,
)
from prefed.train.metrics import MEAN_METRICS, REWARD_SHARES, SHIFT_ERROR, TABLE, words_of
from prefed.train.metrics.run_warnings import small_clients_note
from prefed.ui.pages.tables import (
    LISTED,
    Row,
    Table,
    lowest_clients,
    metrics_table,
    terminal,
    unseen_table,
    without_repeated_tenth,
)

if TYPE_CHECKING:
    from rich.console import Console

    from prefed.data.show import Part, ShownClient
    from prefed.data.statistics import ClientStatistics, DatasetStatistics, Lengths
    from prefed.runs.dry_run import DryRun
    from prefed.runs.evaluate import Evaluation
    from prefed.runs.memory_plan import MemoryPlan


def print_result(
    summary: Summary,
    console: Console,
    more: Mapping[str, Mapping[str, Any]] | None = None,
    groupings: Sequence[Grouping] = (),
    tastes: Mapping[str, Any] | None = None,
) -> None:
    """Print each client before and after, notes and warnings, and the cost of the run.

    Args:
        more: heading → further column, with the structure of ``summary["preference_accuracy"]``.
        tastes: the content of ``tastes.json``, if any.
    """
    console.print(terminal(_clients(summary, more or {})))
    console.print(verdict(summary), soft_wrap=True)
    if "text" in summary:
        from prefed.train.metrics import broken_text
        from prefed.ui.pages.text_health import health_table, text_line

        console.print(terminal(health_table(summary["text"])))
        style = "yellow" if broken_text(summary["text"]) else None
        console.print(text_line(summary["text"]), soft_wrap=True, style=style)
    if "majority_accuracy" not in summary:
        meaning = words_of("reward_accuracy", summary)[1]
        console.print(f"reward accuracy: {meaning}", soft_wrap=True, style="dim")
    if summary["preference_accuracy"]["per_client"]:
        console.print(means_line(summary), soft_wrap=True)
    if summary["left_out"]:
        one, several = (f"{who} no {summary['split']} pairs and" for who in ("client has", "clients have"))
        console.print(f"{pluralize(summary['left_out'], f'{one} was', f'{several} were')} not evaluated")
    if small := small_clients_note(summary["preference_accuracy"]):
        console.print(small, markup=False, soft_wrap=True)
    if "stop" in summary:
        console.print(best_line(summary["stop"]), markup=False, soft_wrap=True)
    if summary["dropped"]:
        uploads = pluralize(summary["dropped"], "upload was", "uploads were")
        console.print(f'{uploads} dropped: see "dropped" in rounds.jsonl', style="yellow")
    if summary.get("set_aside"):
        text = f"clients excluded for invalid uploads: {', '.join(summary['set_aside'])}"
        console.print(text, markup=False, soft_wrap=True, style="yellow")
    selectors = agreements(summary, groupings[-1].clusters if groupings else ())
    _print_agreement(selectors, f"{summary['split']} pairs", console)
    if groupings:
        last = groupings[-1]
        sizes = ", ".join(f"{len(clients):,}" for clients in last.clusters)
        moved = pluralize(len(last.moved), "client", "clients")
        console.print(f"clusters of {sizes} clients since round {last.round}, when {moved} moved")
    if tastes:
        from prefed.ui.pages.tastes import tastes_line

        style = "yellow" if tastes["collapsed"] else None
        console.print(tastes_line(tastes), markup=False, soft_wrap=True, style=style)
    if "privacy" in summary:
        console.print(privacy_line(summary["privacy"]), markup=False, soft_wrap=True)
    for profile in profiles_of(summary).values():
        text = f"{profile.label}, mean over clients: {profile.ends} ({profile.meaning})"
        console.print(text, markup=False, soft_wrap=True)
    traffic, parameters = summary["bytes"], summary["parameters"]
    console.print(
        f"traffic {size(traffic['up'])} up, {size(traffic['down'])} down; "
        f"{parameters['trainable']:,} trainable parameters, {parameters['communicated']:,} per upload; "
        f"{summary['seconds']:.1f} s, peak memory {summary['peak_memory_mb']:.0f} MiB",
        soft_wrap=True,
    )


def _print_agreement(selectors: Sequence[Agreement], pairs: str, console: Console) -> None:
    if selectors:
        from prefed.ui.pages.selector_agreement import agreement_table

        if table := agreement_table(selectors, pairs):
            console.print(terminal(table))


def verdict(summary: Summary) -> str:
    """Summarise whether training helped: means before and after, and how many clients improved.

    Personal models are also compared with the shared model.

    >>> def over(mean, ann, bob):
    ...     return {"mean": mean, "per_client": {"ann": ann, "bob": bob}}
    >>> summary = {"baseline_accuracy": over(0.5, 0.5, 0.5), "preference_accuracy": over(0.6, 0.75, 0.45)}
    >>> verdict(summary)
    'preference accuracy 0.500 → 0.600, mean over clients; higher than before for 1 of 2 clients'
    >>> verdict({**summary, "shared_accuracy": over(0.7, 0.8, 0.6)}).partition("; ")[2]
    'higher than before for 1 of 2 clients, higher than the shared model for 0 of 2'
    >>> longer = {"preference_accuracy": over(0.0, 0.0, 0.0), "reward_accuracy": over(1.0, 1.0, 1.0)}
    >>> verdict({**summary, **longer}).partition(". ")[2].partition(",")[0]
    'Reward accuracy 1.000: training raises the chosen responses'
    """
    before, after = summary["baseline_accuracy"], summary["preference_accuracy"]

    def better(than: Mapping[str, Any]) -> tuple[int, int]:
        own, others = after["per_client"], than["per_client"]
        both = own.keys() & others.keys()
        return sum(own[client] > others[client] for client in both), len(both)

    higher, clients = better(before)
    text = f"preference accuracy {before['mean']:.3f} → {after['mean']:.3f}, mean over clients; "
    text += f"higher than before for {higher:,} of {pluralize(clients, 'client', 'clients')}"
    if not after["per_client"]:
        text = text.partition(";")[0]
    elif "shared_accuracy" in summary:
        higher, clients = better(summary["shared_accuracy"])
        text += f", higher than the shared model for {higher:,} of {clients:,}"
    reward = summary.get("reward_accuracy", after)["mean"]
    if after["mean"] <= before["mean"] and after["mean"] < 0.5 < reward:
        text += f". Reward accuracy {reward:.3f}: training raises the chosen responses, but most, often the "
        text += "longer ones, are still less likely"
    return text


def means_line(metrics: Mapping[str, Any]) -> str:
    """The means over clients of a reward head's metrics, and of all that are no shares.

    >>> means_line({"preference_accuracy": {"mean": 0.5}, "chosen_shift": 3.61, "dpo_loss": {"mean": 0.5}})
    'means: chosen shift +3.6 nats, DPO loss 0.5000'
    """
    values = {n: v["mean"] if isinstance(v := metrics[n], Mapping) else v for n in _MEANS if n in metrics}
    return f"means: {', '.join(TABLE[n].named(values) for n in values if values[n] is not None)}"


_MEANS = ("explicit_accuracy", "agreement", *(name for name in MEAN_METRICS if name != SHIFT_ERROR))


def result_line(summary: Summary) -> str:
    """The result of a run in one line."""
    names = ("preference_accuracy", "baseline_accuracy", "reward_accuracy")
    metrics = metrics_of_clients(summary)
    figures = (f"{name.replace('_', ' ')} {metrics[name]['mean']:.3f}" for name in names)
    return f"{summary['method']}, {pluralize(summary['rounds'], 'round', 'rounds')}: {', '.join(figures)}"


def privacy_line(privacy: Mapping[str, Any]) -> str:
    """The differential privacy of a run with ``[privacy] kind``, in one line.

    >>> privacy_line({"kind": "central", "epsilon": None, "delta": None, "noise_multiplier": 0.0})
    'privacy: central; updates are clipped but have no noise, so there is no privacy guarantee'
    >>> result = {"kind": "local", "epsilon": 3.14159, "delta": 1e-5, "adjacency": "A", "bound": "B"}
    >>> privacy_line({**result, "releases": 1, "draws": "seed"})
    'privacy: local, epsilon 3.14 at delta 1e-05 (A; B; 1 release; the seed reveals the noise)'
    """
    if privacy["epsilon"] is None:
        return (
            f"privacy: {privacy['kind']}; updates are clipped but have no noise, so there is no privacy "
            "guarantee"
        )
    releases = pluralize(privacy["releases"], "release", "releases")
    if "votes" in privacy:
        releases += f" and {privacy['votes']} of votes, {privacy['epsilon_without_votes']:.3g} without them"
    known = "; the seed reveals the noise" if privacy["draws"] == "seed" else ""
    return (
        f"privacy: {privacy['kind']}, epsilon {privacy['epsilon']:.3g} at delta {privacy['delta']:g} "
        f"({privacy['adjacency']}; {privacy['bound']}; {releases}{known})"
    )


def best_line(stop: Mapping[str, Any]) -> str:
    """The best round, its metric, and whether the run stopped early.

    >>> stop = {"metric": "preference_accuracy", "over": "mean", "stopped": True}
    >>> stop |= {"last": {"round": 9, "value": 0.61}, "best": {"round": 6, "value": 0.66}}
    >>> best_line(stop).partition(": ")[2]
    '6 (0.660); early stopping after round 9 (0.610)'
    """
    over = "worst-client" if stop["over"] == "worst" else stop["over"]
    by, last, best = f"{over} {stop['metric'].replace('_', ' ')}", stop["last"], stop.get("best")
    if best is None:
        return f"no best round: in every round, {by} on validation pairs is not finite or text is broken"
    end = "early stopping after round" if stop["stopped"] else "last round:"
    value = "not finite" if last["value"] is None else f"{last['value']:.3f}"
    return (
        f"best round by {by} on validation pairs: {best['round']} ({best['value']:.3f}); "
        f"{end} {last['round']} ({value})"
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
        pairs = summary["clients"][client].get(summary["split"], 0)
        rows.append(
            (client, [f"{pairs:,}", *(f"{own['per_client'][client]:.3f}" for own in columns.values())])
        )
    if others:
        rows.append((others, []))
    spreads = [
        (name, ["", *(f"{own[key]:.3f}" for own in columns.values())])
        for name, key in (("mean", "mean"), ("worst client", "worst"), ("worst tenth", "worst_decile"))
        if key in after
    ]
    rounds = pluralize(summary["rounds"], "round", "rounds")
    title = f"{summary['method']}, {rounds}: preference accuracy on {summary['split']} pairs"
    return Table(title, ["client", "pairs", *columns], rows, without_repeated_tenth(spreads))


def print_evaluation(evaluation: Evaluation, name: str, console: Console) -> None:
    """Print each client's metrics, those of clients that never trained, and notes."""
    if evaluation.figures:
        figures = {n: figure for n, figure in figures_of(evaluation.figures).items() if n not in MEAN_METRICS}
        if evaluation.taste is not None:
            name = f"{name}, taste {evaluation.taste}"
            figures["preference_accuracy"] = replace(figures["preference_accuracy"], label="this taste")
        single = selector_figures(figures)
        usual = [n for n in figures if n not in (*REWARD_SHARES, *single)]
        rewarded = [n for n in ("preference_accuracy", *REWARD_SHARES) if n in figures]
        tables = {
            f"preference accuracy on {evaluation.what}": usual,
            "individual selectors": single,
            "with the reward head": rewarded if len(rewarded) > 1 else [],
        }
        for title, names in tables.items():
            if names:
                metrics = [figures[n] for n in names]
                console.print(terminal(metrics_table(f"{name}: {title}", metrics, evaluation.pairs.get)))
        console.print(means_line(evaluation.figures), soft_wrap=True)
    if evaluation.unseen:
        console.print(terminal(unseen_table(evaluation.unseen, evaluation.taste)))
    if evaluation.unseen_selectors:
        pairs = "pairs of clients that never trained,"
        _print_agreement(agreements(evaluation.unseen_selectors), pairs, console)
    for note in evaluation.notes:
        console.print(note, markup=False, soft_wrap=True)


def estimate_line(found: DryRun) -> str:
    """The result of a dry run in one line."""
    each = duration(sum(found.seconds_per_round.values()))
    warnings = pluralize(len(found.warnings), "warning", "warnings") if found.warnings else "no problems"
    return (
        f"{found.method}: {warnings}; estimate: {each} per round, {duration(found.seconds)} in total, "
        f"{size(found.bytes['up'])} up and {size(found.bytes['down'])} down"
    )


def print_dry_run(found: DryRun, console: Console) -> None:
    """Print estimates of sizes and times, notes and warnings."""
    from rich.table import Table

    clients, pairs, disk, timed = found.clients, found.pairs, found.disk, found.timed
    each, whole, seconds = found.bytes_per_round, found.bytes, found.seconds_per_round
    rounds = pluralize(found.rounds, "round", "rounds")
    unseen = f", and {pluralize(clients['unseen'], 'newcomer', 'newcomers')}" if clients["unseen"] else ""
    needed = sum(disk.values()) - disk["free"]
    parts = f"{duration(seconds['evaluation'])} of evaluation"
    if found.answers["number"]:
        parts += f" and {duration(seconds['answers'])} of answers"
    rows = {
        "clients": f"{clients['train']:,} train, {clients['cohort']:,} per round; "
        f"{clients['evaluated']:,} evaluated{unseen}",
        "pairs": f"{pairs['train']:,} for training, {pairs['validation']:,} for validation, "
        f"{pairs['test']:,} for testing",
        "parameters": f"{found.parameters['trainable']:,} trainable, "
        f"{found.parameters['communicated']:,} per upload",
        "traffic": f"{size(each['up'])} up and {size(each['down'])} down per round; "
        f"{size(whole['up'])} up and {size(whole['down'])} down in {rounds}",
        "disk": f"{size(needed)}: cache {size(disk['cache'])}, checkpoint {size(disk['checkpoint'])}, "
        f"adapters {size(disk['adapters'])}; {size(disk['free'])} free",
        "memory": f"peak {found.peak_memory_mb:,.0f} MiB so far, in this process",
        "time": f"{duration(sum(seconds.values()))} per round, including {parts}; "
        f"{duration(found.seconds)} in {rounds}",
        "": f"estimated from {pluralize(int(timed['steps']), 'step', 'steps')} of client "
        f"{printable(str(timed['client']))!r} and "
        f"{pluralize(int(timed['pairs']), 'evaluated pair', 'evaluated pairs')}, "
        "without the initial evaluation of every pair by the base model",
    }
    if count := found.answers["number"]:
        tokens = found.answers["tokens"]
        rows["answers"] = (
            f"{count:,} to prompts, by all models and in all rounds; at most {tokens} tokens each"
        )
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(name, text)
    console.print(table, markup=False)
    for text in found.notes:
        console.print(printable(text), markup=False, soft_wrap=True)
    for text in found.warnings:
        console.print(f"warning: {printable(text)}", style="yellow", markup=False, soft_wrap=True)
    console.print("nothing was written" if found.warnings else "no problems found; nothing was written")


_PARTS = {
    "weights": "weights",
    "client": "client",
    "optimizer": "optimiser",
    "kept": "activations",
    "passing": "temporary",
    "total": "total",
}
"""Part of :class:`~prefed.runs.memory_plan.StepMemory` → heading."""


def print_memory_plan(found: MemoryPlan, console: Console) -> None:
    """Print the memory of a training step by parts, also with settings that save memory."""
    rows: list[Row] = []
    for each in found.variants:
        cells = [size(each.bytes[part]) for part in _PARTS]
        rows.append((_saving(each.settings) or "as it is", [*cells, f"{each.most_pairs:,}"]))
    pairs = pluralize(found.pass_pairs, "pair", "pairs")
    caption = f"{pairs} of {found.pair_tokens:,} tokens in a pass, {found.dtype}, {found.path} path"
    console.print(terminal(Table(caption, ["[model]", *_PARTS.values(), "pairs that fit"], rows)))
    console.print(plan_line(found), markup=False, soft_wrap=True)
    console.print("estimated without weights or a GPU; nothing was written")


def plan_line(found: MemoryPlan) -> str:
    """The result of a memory plan in one line."""
    own = found.variants[0]
    space = f"the {size(found.usable)} of {found.device} that tensors can use"
    if own.most_pairs:
        fits = "fits in" if own.fits else "does not fit in"
        return (
            f"a step takes {size(own.bytes['total'])}, which {fits} {space}; the largest [engine] max_tokens "
            f"is {own.max_tokens:,}"
        )
    best = next((each for each in found.variants if each.most_pairs), None)
    if best is None:
        return f"no pair fits in {space}: lower [data] max_length, or use a larger GPU"
    settings, most = _saving(best.settings), f"{best.max_tokens:,}"
    return f"no pair fits in {space}: set [model] {settings}; then the largest [engine] max_tokens is {most}"


def _saving(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())


_COUNTS = {
    **{name: f"left out: {text}" for name, (text, _) in LEFT_OUT.items()},
    "dropped": "clients left out: no training pairs",
    **{name: several for name, (_, several) in CUT.items()},
    "prefixes": "responses that repeated the prompt",
}
"""Field of :class:`~prefed.data.dataset.RowCounts` → text."""


def print_dataset_statistics(statistics: DatasetStatistics, console: Console) -> None:
    """Print a table with one line per client (the first 40), then a table of the whole dataset."""
    # Categories that only repeat the clients' ids are left out.
    categorised = any(client.categories.keys() - {client.id} for client in statistics.clients)
    thumbs = any(client.thumbs_up or client.thumbs_down for client in statistics.clients)
    rows: list[Row] = [_client_row(client, categorised, thumbs) for client in statistics.clients[:LISTED]]
    if len(statistics.clients) > LISTED:
        rows.append((f"… and {len(statistics.clients) - LISTED:,} more", []))
    heads = ["client", "train", *(["up", "down"] if thumbs else []), "val.", "test", "prompt", "response"]
    heads += ["JSD cat.", "JSD tok.", "category"] if categorised else ["JSD tok."]
    caption = pluralize(len(statistics.clients), "client", "clients")
    left = int(categorised)
    console.print(terminal(Table(caption, heads, rows, left=left, fold=("prompt", "response"))))
    console.print(
        "prompt, response: tokens (median/95%/max). JSD: distance from all clients' pairs together, 0 to 1."
    )
    whole = [(name, [text]) for name, text in _dataset_rows(statistics, categorised)]
    if thumbs:
        # Test rows may be pairs.
        whole = [(n.replace("test pairs", "test rows").replace("pairs", "thumbs"), t) for n, t in whole]
    console.print(terminal(Table("", ["all clients", ""], whole)))


def print_first_pairs(clients: Sequence[ShownClient], console: Console) -> None:
    """Print what is trained on: the given pairs of the first 40 clients, with their tokens marked."""
    console.print("[[ ]]: special tokens. {{ }}: counts in the loss.", markup=False)
    for client in clients[:LISTED]:
        of = f"{len(client.pairs):,} of {pluralize(client.train, 'training row', 'training rows')}"
        console.print(f"\n{printable(client.id)}: {of}", style="bold", markup=False, soft_wrap=True)
        for pair in client.pairs:
            head = f"  {printable(pair.source)}, row {pair.row}; {pair.form}"
            console.print(head, style="dim", markup=False, soft_wrap=True)
            for part in pair.parts:
                console.print(_marked(part), soft_wrap=True)
    if len(clients) > LISTED:
        console.print(f"\n… and {len(clients) - LISTED:,} more clients")
    console.print()


def _marked(part: Part) -> Text:
    """Mark special tokens, truncations and what counts in the loss."""
    text = Text(f"    {part.name:<11}")
    for scored, pieces in groupby(part.pieces, lambda piece: piece.scored):
        style = "green" if scored else ""
        text.append("{{" * scored, style)
        for piece in pieces:
            if piece.cut:
                text.append(f"[[{pluralize(piece.cut, 'token', 'tokens')} cut]]", "bold red")
            elif piece.special:
                text.append(f"[[{printable(piece.text)}]]", f"{style} reverse")
            else:
                text.append(printable_lines(piece.text).replace("\n", "\n" + " " * 15), style)
        text.append("}}" * scored, style)
    return text


def _client_row(client: ClientStatistics, categorised: bool, thumbs: bool) -> Row:
    feedback = (client.thumbs_up, client.thumbs_down) if thumbs else ()
    cells = [f"{count:,}" for count in (client.train, *feedback, client.validation, client.test)]
    cells += [_quantiles(client.prompt), _quantiles(client.response)]
    if categorised:
        cells.append("–" if client.category_distance is None else f"{client.category_distance:.2f}")
    cells.append(f"{client.token_distance:.2f}")
    if categorised:
        cells.append(_largest(client.categories))
    return client.id + (" (flipped)" if client.flipped else ""), cells


def _dataset_rows(statistics: DatasetStatistics, categorised: bool) -> list[tuple[str, str]]:
    clients, counts = statistics.clients, statistics.row_counts.model_dump()
    train = [client.train for client in clients]
    sizes = f"{min(train):,} / {np.median(train):,g} / {max(train):,}"
    categories = _with_random(statistics.category_distance, statistics.random_category_distance)
    tokens = _with_random(statistics.token_distance, statistics.random_token_distance)
    elsewhere = sum(client.test_elsewhere for client in clients)
    return [
        ("training pairs", f"{sum(train):,}"),
        ("training pairs per client (min / median / max)", sizes),
        ("Gini coefficient of sizes", f"{statistics.gini:.2f}"),
        *([("mean distance of categories (with random assignment)", categories)] if categorised else []),
        ("mean distance of tokens (with random assignment)", tokens),
        ("training prompts shared by several clients", f"{statistics.shared_prompts:,}"),
        ("training pairs shared by several clients", f"{statistics.shared_pairs:,}"),
        ("pairs that clients label differently", f"{statistics.contradictions:,}"),
        ("duplicate pairs within clients", f"{sum(client.duplicates for client in clients):,}"),
        ("test pairs that another client trains on", f"{elsewhere:,} of {sum(c.test for c in clients):,}"),
        (
            "test pairs whose prompt their client trains on",
            f"{sum(client.test_prompts for client in clients):,}",
        ),
        ("clients without test pairs", f"{sum(client.test == 0 for client in clients):,}"),
        ("rows read", f"{statistics.row_counts.rows:,}"),
        *((text, f"{counts[name]:,}") for name, text in _COUNTS.items() if counts[name]),
    ]


def _with_random(value: float | None, random: float | None) -> str:
    return "–" if value is None or random is None else f"{value:.2f} ({random:.2f})"


def _quantiles(lengths: Lengths) -> str:
    return f"{lengths.median:.0f}/{lengths.p95:.0f}/{lengths.max}"


def _largest(categories: dict[str, int], most: int = 2) -> str:
    total = sum(categories.values())
    ranked = sorted(categories.items(), key=lambda item: (-item[1], item[0]))
    listed = ", ".join(f"{name} {count / total:.0%}" for name, count in ranked[:most])
    return listed + (f", {len(ranked) - most} more" if len(ranked) > most else "")
