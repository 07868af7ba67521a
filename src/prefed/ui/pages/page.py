"""Self-contained HTML report of a run: no external resources, and JavaScript is optional.

This module collects the values; ``templates/run.html`` lays them out.
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
from prefed.runs.finished_run import (
    Outcome,
    RunRecord,
    alignment_of,
    judged_of,
    read_run,
    read_summary,
    spent_with_votes,
)
from prefed.runs.track import logged_settings
from prefed.train.metrics import TEXT_REMEDY, broken_text
from prefed.train.metrics.run_warnings import flat_loss_warning
from prefed.ui.pages import clients, origin, outcomes, round_curves, selector_agreement, tastes, text_health
from prefed.ui.pages.html import render_template
from prefed.ui.pages.metric_text import Interval, interval_of, interval_of_mean, meanings, pairs_of, share
from prefed.ui.pages.terminal import best_line, privacy_line, verdict

TENTHS = 20
"""Minimum number of clients for cards with the worst tenth."""

SECTIONS = {
    "rounds": "Metrics over rounds",
    "clients": "Clients",
    "answers": "What the models write",
    "selectors": "Selectors",
    "tastes": "Latent tastes",
    "alignment": "Alignment with the selectors",
    "judged": "Win rates",
    "blocks": "Personalised layers",
    "evaluation": "Margins and losses on held-out pairs",
    "distributed": "Gradients, consensus and delays",
    "diagnostics": "Method metrics",
    "costs": "Costs",
    "data": "Data",
    "settings": "Settings",
    "meanings": "Metric definitions",
}
"""Section id → heading, in page order."""
ALWAYS = ("rounds", "costs", "settings", "meanings")
"""Sections on every page."""


@dataclass(frozen=True)
class Unfinished:
    """Notice at the top of the page of an unfinished run.

    Attributes:
        text: complete sentences.
        refresh: seconds until the browser reloads the page; ``None`` if the page is not rewritten.
    """

    text: str
    refresh: int | None


def write_page(run: RunRecord, path: Path, unfinished: Unfinished | None = None) -> None:
    """Write the page of a run to ``path`` atomically.

    Only the owner can read a page that quotes responses or shows latent tastes.
    """
    judged = judged_of(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o600 if run.tastes or run.answers or any(each.examples for each in judged) else 0o666
    files.write(path, _render(run, judged, unfinished).encode(), mode=mode)


def write_waiting(run: Path, path: Path, unfinished: Unfinished) -> None:
    """Write the page of a run that has no evaluation yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {"name": run.resolve().name, "text": unfinished.text, "refresh": unfinished.refresh}
    files.write(path, render_template("waiting.html", **values).encode())


def render(run: RunRecord) -> str:
    """Render the page of a run as HTML.

    Charts are inline SVG, each with a text alternative and its numbers as CSV. The content security policy
    forbids external resources and any script except the page's own.

    Raises:
        RunError: a file of a judge or of an alignment is damaged.
    """
    return _render(run, judged_of(run), None)


def _render(run: RunRecord, judged: Sequence[Outcome], unfinished: Unfinished | None) -> str:
    alignment = alignment_of(run.path)
    config = logged_settings(run.config)
    length = pluralize(run.summary["rounds"], "round", "rounds")
    evaluated, text = pluralize(run.evaluated, "client", "clients"), run.summary.get("text")
    # Optional parts, by section.
    parts: dict[str, Any] = {
        "clients_plot": clients.ends(run) if run.clients else None,
        "answers": outcomes.answers(run),
        "agreement": selector_agreement.agreement_table(run.agreements, f"{run.split} pairs"),
        "clusters": selector_agreement.clusters_table(run),
        "tastes": tastes.section(run.tastes) if run.tastes else None,
        "alignment": outcomes.alignment_facts(alignment) if alignment else None,
        "judged": outcomes.judged_table([each.summary for each in judged]),
        "blocks": clients.blocks(run),
        "evaluation": round_curves.numbers(run, round_curves.evaluated_metrics(run)),
        "distributed": round_curves.distributed(run),
        "diagnostics": round_curves.numbers(run, round_curves.own_metrics(run)),
        "data": origin.data_facts(run),
    }
    there = {*ALWAYS, *(name for name, part in parts.items() if part)}
    if parts["clients_plot"]:
        there.add("clients")
    if parts["agreement"] or parts["clusters"]:
        there.add("selectors")
    return render_template(
        "run.html",
        name=run.name,
        method=run.method,
        kind=origin.described_method(run),
        setup=f"base model {config['model']['name']}, {length}, {evaluated} evaluated, seed {config['seed']}",
        unfinished=unfinished.text if unfinished else None,
        refresh=unfinished.refresh if unfinished else None,
        sections={name: title for name, title in SECTIONS.items() if name in there},
        warnings=_warnings(run),
        cards=_cards(run),
        verdict=verdict(run.summary),
        text_line=text_health.text_line(text) if text else "",
        text_table=text_health.health_table(text) if text else None,
        notes=_notes(run, alignment),
        curves=[*round_curves.accuracy_charts(run), *text_health.text_charts(run)],
        rounds=round_curves.rounds_table(run),
        clients_curves=round_curves.clients(run),
        fairness=clients.fairness(run),
        unseen=clients.unseen(run),
        clients=clients.clients_table(run),
        clusters_plot=selector_agreement.clusters_chart(run),
        epochs=outcomes.epochs_table(alignment) if alignment else None,
        generations_plot=outcomes.generations_chart(alignment) if alignment else None,
        alignment_examples=[*outcomes.generation_answers(alignment), *outcomes.alignment_examples(alignment)]
        if alignment
        else [],
        judged_plot=outcomes.judged_chart(judged),
        judged_notes=outcomes.judged_notes(judged),
        judged_examples=outcomes.judged_examples(judged),
        costs=round_curves.costs(run),
        costs_plot=round_curves.cost(run),
        origin=origin.origin_facts(run),
        settings=origin.settings_table(run),
        experiment=tomli_w.dumps(config),
        versions=origin.versions(run),
        meanings=meanings(run),
        **parts,
    )


def _notes(run: RunRecord, alignment: Outcome | None) -> list[str]:
    lines = {"stop": best_line, "privacy": privacy_line}
    # Votes of clients are further releases.
    summary: Mapping[str, Any] = {**run.summary, **spent_with_votes(alignment)}
    texts = [line(summary[key]) for key, line in lines.items() if key in summary]
    return [f"{text[0].upper()}{text[1:]}." for text in texts]


def _warnings(run: RunRecord) -> list[str]:
    warnings = []
    if run.summary.get("left_out"):
        one, more = (f"{who} no {run.split} pairs and" for who in ("client has", "clients have"))
        warnings.append(f"{pluralize(run.summary['left_out'], f'{one} was', f'{more} were')} not evaluated.")
    if run.unlisted:
        warnings.append(f"{run.unlisted}.")
    if run.summary.get("not_finite"):
        pairs = run.summary["not_finite"]
        warnings.append(
            f"The models of {pluralize(len(pairs), 'client', 'clients')} diverged: "
            f"{pluralize(int(sum(pairs.values())), 'pair has', 'pairs have')} no finite log-probability and "
            "count as wrong. Try a lower method.lr."
        )
    if (text := run.summary.get("text")) and broken_text(text):
        warnings.append(f"The models' {text_health.text_line(text)}; {TEXT_REMEDY}.")
    if warning := flat_loss_warning([record.get("loss") for record in run.rounds]):
        warnings.append(f"{warning[0].upper()}{warning[1:]}.")
    drops = [(record["round"], drop) for record in run.rounds for drop in record.get("dropped", ())]
    if drops:
        number, first = drops[0]
        uploads = pluralize(len(drops), "upload was", "uploads were")
        where = f"The first was from client {first['client']} in round {number}"
        warnings.append(f"{uploads} dropped. {where}: {first['reason']}.")
    if excluded := run.summary.get("set_aside"):
        warnings.append(f"Clients excluded for invalid uploads: {', '.join(excluded)}.")
    return warnings


def _cards(run: RunRecord) -> list[tuple[str, str, str]]:
    titles = round_curves.accuracies(run)
    shown = ("mean", "worst") if run.clients else ("mean",)
    cards = [_card(run, name, title, of) for of in shown for name, title in titles.items()]
    if len(run.clients) >= TENTHS:
        cards += [
            (f"{title}, worst tenth", f"{run.figures[name].values['worst_decile']:.1%}", "")
            for name, title in titles.items()
        ]
    up, down = run.summary["bytes"]["up"], run.summary["bytes"]["down"]
    cards.append(("traffic", size(up + down), f"{size(up)} up, {size(down)} down"))
    length = pluralize(run.summary["rounds"], "round", "rounds")
    return [*cards, ("time", duration(run.summary["seconds"]), length)]


def _card(run: RunRecord, name: str, title: str, of: str) -> tuple[str, str, str]:
    """The card of an accuracy's mean over clients or, for ``of`` = ``"worst"``, of the worst client."""
    figure: Mapping[str, Any] = run.figures[name].values
    if of == "mean":
        interval, pairs = interval_of_mean(run, figure), pairs_of(run, figure)
        whose, who = "mean over clients", pluralize(run.evaluated, "client", "clients")
    else:
        who = min(figure["per_client"], key=lambda client: figure["per_client"][client])
        interval, pairs, whose = interval_of(run, who, figure["worst"]), run.pairs(who), "worst client"
    notes = [*_before(run, name, of, interval), who]
    if pairs is not None:
        notes.append(pluralize(pairs, "pair", "pairs"))
    return f"{title}, {whose}", share(figure[of], interval), ", ".join(notes)


def _before(run: RunRecord, name: str, of: str, interval: Interval | None) -> list[str]:
    """The base model's accuracy with matching digits; empty if the metric has no initial value."""
    if name != "preference_accuracy" or "baseline_accuracy" not in run.figures:
        return []
    before: Mapping[str, Any] = run.figures["baseline_accuracy"].values
    return [f"before {share(before[of], interval).partition(' ')[0]}"]


def public_page(run: Path) -> str:
    """Render a finished run without private content.

    The page leaves out judged responses, the alignment, latent tastes, and metrics of private states such as
    gates.

    Raises:
        RunError: the directory holds no finished run, or a file is damaged.
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
