"""Health of the models' text: a table for the terminal and pages, curves over rounds, and runs compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from prefed.core.records import TextRecord
from prefed.core.text import pluralize
from prefed.runs.finished_run import RunRecord
from prefed.train.metrics import TEXT_METRICS, health_sentence, last_health
from prefed.ui.pages.chart_data import ROUNDS, Axis, Chart, Look, Panel, number, over_rounds, percent
from prefed.ui.pages.tables import Table

MODELS = {"base": "base model", "shared": "shared model", "own": "clients' own models"}
"""Key of a summary's ``text`` → whose answers."""


def text_line(text: TextRecord) -> str:
    """The health of the models that clients use as a sentence, next to the base model's; empty if unknown."""
    sentence = health_sentence(text)
    return sentence and f"text: {sentence}"


def health_table(text: TextRecord) -> Table:
    """The metrics of answers, one column for each model."""
    healths = _healths(text)
    rows = [(metric.label, [metric.cell(own) for own in healths.values()]) for metric in TEXT_METRICS]
    low, high = text["base"]["surprise_band"]
    prompts = pluralize(text["base"]["answers"], "prompt", "prompts")
    caption = (
        f"Health of text: answers to {prompts}, each token the most likely one. Surprise in nats a token; "
        f"80% of the base model's answers have {low:.2f} to {high:.2f}."
    )
    return Table(caption, ["", *(MODELS[name] for name in healths)], rows)


def runs_text_table(runs: Sequence[RunRecord], names: Sequence[str]) -> Table | None:
    """The health of each run's text after the last round, with the base model's; ``None`` without any."""
    rows = []
    for name, run in zip(names, runs, strict=True):
        text = run.summary.get("text")
        own = last_health(text) if text else None
        if text is None or own is None:
            continue
        before = text["base"]
        cells = [f"{m.cell(own)} ({m.cell(before)})" for m in TEXT_METRICS]
        rows.append((name, [str(own["answers"]), *cells]))
    heads = ["run", "answers", *(metric.label for metric in TEXT_METRICS)]
    caption = "Health of text after the last round; in brackets, of the base model."
    return Table(caption, heads, rows) if rows else None


def text_charts(run: RunRecord) -> list[Chart]:
    """Curves of the health of text, if it was measured more than once."""
    measured = [
        (record["round"], cast(TextRecord, record["evaluation"]["text"]))
        for record in run.rounds
        if "text" in record.get("evaluation", {})
    ]
    return [_health(measured)] if len(measured) > 1 else []


def _health(measured: Sequence[tuple[int, TextRecord]]) -> Chart:
    rounds, panels = [at for at, _ in measured], []
    for metric in TEXT_METRICS:
        y = Axis(zero=True, write=percent if metric.share else number)
        curves: Mapping[str, list[float]] = {
            name: [_healths(text)[name][metric.name] for _, text in measured]
            for name in _healths(measured[-1][1])
        }
        lines = [
            over_rounds(MODELS[name], rounds, values, Look(index + 1, mark=index), metric.format)
            for index, (name, values) in enumerate(curves.items())
        ]
        panels.append(Panel(ROUNDS, y, lines, metric.label, 220))
    caption = "The base model's answers do not change. Definitions are under Metric definitions."
    return Chart("text", f"Health of text. {text_line(measured[-1][1])}.", caption, panels)


def _healths(text: TextRecord) -> dict[str, Mapping[str, Any]]:
    """The health of each model's answers, in display order."""
    every: Mapping[str, Any] = text
    return {name: every[name] for name in MODELS if name in every}
