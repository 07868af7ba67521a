"""One HTML page about a run: it loads nothing, is whole without its script, and reads on any screen.

This file puts the parts of the page together; ``templates/run.html`` decides how they look.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from prefed.core import files
from prefed.core.text import duration, pluralize, size
from prefed.methods import METHODS
from prefed.runs.record import Outcome, RunRecord, alignment_of, judged_of, read_run, read_summary
from prefed.runs.track import told_settings
from prefed.train.metrics import flat_loss_warning
from prefed.ui.pages import clients, origin, outcomes, rounds, selector_agreement, tastes
from prefed.ui.pages.html import render_template
from prefed.ui.pages.metric_text import Interval, interval_of, interval_of_mean, meanings, pairs_of, share
from prefed.ui.pages.terminal import best_line, privacy_line, verdict

TENTHS = 20
"""Clients from which on the worst tenth has a card: of fewer it is the worst client."""

SECTIONS = {
    "rounds": "Over rounds",
    "clients": "Clients",
    "selectors": "Selectors",
    "tastes": "Tastes",
    "alignment": "Alignment with the selectors",
    "judged": "Win rates",
    "blocks": "Which layers each client personalises",
    "evaluation": "Margins and losses on held-out pairs",
    "distributed": "Gradients, consensus and delays",
    "diagnostics": "The method's own figures",
    "costs": "Costs",
    "data": "Data",
    "settings": "Settings",
    "meanings": "What the figures mean",
}
"""Ids of sections and their headings, in the order of the page."""
ALWAYS = ("rounds", "clients", "costs", "settings", "meanings")
"""Sections that every page has."""


@dataclass(frozen=True)
class Unfinished:
    """What a page says of a run that is not finished.

    Attributes:
        text: a sentence.
        refresh: after how many seconds a browser loads the page again; ``None`` where nobody writes it anew.
    """

    text: str
    refresh: int | None


def write_page(run: RunRecord, path: Path, going: Unfinished | None = None) -> None:
    """Write :func:`render` of a run to ``path``, whole or not at all.

    A page that quotes what a judge read, or shows tastes, can be read only by its owner, as these files.
    """
    judged = judged_of(run.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o600 if run.tastes or any(each.examples for each in judged) else 0o666
    files.write(path, _render(run, judged, going).encode(), mode=mode)


def write_waiting(run: Path, path: Path, going: Unfinished) -> None:
    """Write a page that says that a run has no evaluation yet, and looks again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    page = render_template("waiting.html", name=run.resolve().name, text=going.text, refresh=going.refresh)
    files.write(path, page.encode())


def render(run: RunRecord) -> str:
    """The page: what came of the run, its curves, its clients, its costs, its data and its settings.

    Plots are inline, each with a text that says what it shows and with its numbers. The page's own policy
    forbids it to load anything, and to run anything but its own script.

    Raises:
        RunError: a file of a judge's or of an alignment is damaged.
    """
    return _render(run, judged_of(run.path), None)


def _render(run: RunRecord, judged: Sequence[Outcome], going: Unfinished | None) -> str:
    alignment = alignment_of(run.path)
    config = told_settings(run.config)
    length = pluralize(run.summary["rounds"], "round", "rounds")
    evaluated = pluralize(run.evaluated, "client", "clients")
    # Parts that a run may not have, by the section that shows them.
    parts: dict[str, Any] = {
        "agreement": selector_agreement.agreement_table(run.agreements, f"{run.split} pairs"),
        "clusters": selector_agreement.clusters_table(run),
        "tastes": tastes.section(run.tastes) if run.tastes else None,
        "alignment": outcomes.alignment_facts(alignment) if alignment else None,
        "judged": outcomes.judged_table([each.summary for each in judged]),
        "blocks": clients.blocks(run),
        "evaluation": rounds.numbers(run, rounds.evaluated_metrics(run)),
        "distributed": rounds.distributed(run),
        "diagnostics": rounds.numbers(run, rounds.own_metrics(run)),
        "data": origin.data_facts(run),
    }
    there = {*ALWAYS, *(name for name, part in parts.items() if part)}
    if parts["agreement"] or parts["clusters"]:
        there.add("selectors")
    return render_template(
        "run.html",
        name=run.name,
        method=run.method,
        kind=METHODS.get(run.method),
        setup=f"{config['model']['name']}, {length}, {evaluated} judged, seed {config['seed']}",
        going=going.text if going else None,
        refresh=going.refresh if going else None,
        sections={name: title for name, title in SECTIONS.items() if name in there},
        warnings=_warnings(run),
        cards=_cards(run),
        verdict=verdict(run.summary),
        told=_told(run),
        curves=rounds.accuracy_charts(run),
        rounds=rounds.rounds_table(run),
        clients_plot=clients.ends(run),
        clients_curves=rounds.clients(run),
        fairness=clients.fairness(run),
        unseen=clients.unseen(run),
        clients=clients.clients_table(run),
        clusters_plot=selector_agreement.clusters_chart(run),
        epochs=outcomes.epochs_table(alignment) if alignment else None,
        alignment_examples=outcomes.alignment_examples(alignment) if alignment else [],
        judged_plot=outcomes.judged_chart(judged),
        judged_notes=outcomes.judged_notes(judged),
        judged_examples=outcomes.judged_examples(judged),
        costs=rounds.costs(run),
        costs_plot=rounds.cost(run),
        origin=origin.origin_facts(run),
        settings=origin.settings_table(run),
        experiment=tomli_w.dumps(config),
        versions=origin.versions(run),
        meanings=meanings(run),
        **parts,
    )


def _told(run: RunRecord) -> list[str]:
    """Which round was the best, and what noise promises, where the run has these."""
    lines = {"stop": best_line, "privacy": privacy_line}
    summary: Mapping[str, Any] = run.summary
    texts = [line(summary[key]) for key, line in lines.items() if key in summary]
    return [f"{text[0].upper()}{text[1:]}." for text in texts]


def _warnings(run: RunRecord) -> list[str]:
    warnings = []
    if run.summary.get("left_out"):
        one, more = (f"{who} no {run.split} pair and" for who in ("client has", "clients have"))
        warnings.append(f"{pluralize(run.summary['left_out'], f'{one} was', f'{more} were')} not judged.")
    if run.unlisted:
        warnings.append(f"{run.unlisted}.")
    if run.summary.get("not_finite"):
        pairs = run.summary["not_finite"]
        warnings.append(
            f"The models of {len(pairs):,} clients diverged: {sum(pairs.values()):,} pairs have no finite "
            "log-probability and count as not right; a lower method.lr may do."
        )
    if warning := flat_loss_warning([record.get("loss") for record in run.rounds]):
        warnings.append(f"{warning[0].upper()}{warning[1:]}.")
    drops = [(record["round"], drop) for record in run.rounds for drop in record.get("dropped", ())]
    if drops:
        number, first = drops[0]
        where = f"the first, of client {first['client']} in round {number}"
        uploads = pluralize(len(drops), "upload was", "uploads were")
        warnings.append(f"{uploads} dropped; {where}: {first['reason']}.")
    if aside := run.summary.get("set_aside"):
        warnings.append(f"Set aside for bad uploads: {', '.join(aside)}.")
    return warnings


def _cards(run: RunRecord) -> list[tuple[str, str, str]]:
    """Label, value and note of each: both accuracies, of the mean and of the worst client, and the costs."""
    titles = rounds.accuracies(run)
    cards = [_mean_card(run, name, title) for name, title in titles.items()]
    cards += [_worst_card(run, name, title) for name, title in titles.items()]
    if len(run.clients) >= TENTHS:
        cards += [
            (f"{title}, worst tenth", f"{run.figures[name].values['worst_decile']:.1%}", "")
            for name, title in titles.items()
        ]
    up, down = run.summary["bytes"]["up"], run.summary["bytes"]["down"]
    cards.append(("sent", size(up + down), f"{size(up)} up, {size(down)} down"))
    length = pluralize(run.summary["rounds"], "round", "rounds")
    return [*cards, ("time", duration(run.summary["seconds"]), length)]


def _mean_card(run: RunRecord, name: str, title: str) -> tuple[str, str, str]:
    figure = run.figures[name].values
    interval, pairs = interval_of_mean(run, figure), pairs_of(run, figure)
    notes = [*_before(run, name, "mean", interval), pluralize(run.evaluated, "client", "clients")]
    if pairs is not None:
        notes.append(pluralize(pairs, "pair", "pairs"))
    return f"{title}, mean over clients", share(figure["mean"], interval), ", ".join(notes)


def _worst_card(run: RunRecord, name: str, title: str) -> tuple[str, str, str]:
    figure = run.figures[name].values
    worst = min(figure["per_client"], key=lambda client: figure["per_client"][client])
    interval, pairs = interval_of(run, worst, figure["worst"]), run.pairs(worst)
    notes = [*_before(run, name, "worst", interval), worst]
    if pairs is not None:
        notes.append(pluralize(pairs, "pair", "pairs"))
    return f"{title}, worst client", share(figure["worst"], interval), ", ".join(notes)


def _before(run: RunRecord, name: str, of: str, interval: Interval | None) -> list[str]:
    """What the untouched model came to, with as many digits; nothing of a figure that it cannot have."""
    if name != "preference_accuracy" or "baseline_accuracy" not in run.figures:
        return []
    before: Mapping[str, Any] = run.figures["baseline_accuracy"].values
    return [f"before {share(before[of], interval).partition(' ')[0]}"]


def public_page(run: Path) -> str:
    """The page about the finished run in a directory, made from three of its files and nothing else.

    So it has no response that a judge read, none of an alignment, and nothing of clients' tastes. Metrics of
    private states, such as gates, are left out of the summary.

    Raises:
        RunError: there is no finished run, or a file is damaged.
    """
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / run.resolve().name
        copy.mkdir()
        shutil.copyfile(run / "rounds.jsonl", copy / "rounds.jsonl")
        shutil.copyfile(run / "config.toml", copy / "config.toml")
        summary = read_summary(run / "summary.json")
        summary.pop("personal", None)
        (copy / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
        return render(read_run(copy))
