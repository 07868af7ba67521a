"""What was made of a finished run, for its page: win rates, an alignment, responses side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from prefed.runs.outcomes import Example, Outcome
from prefed.ui.pages.drawing import Theme, canvas, percent_axis, short_name, tell_points
from prefed.ui.pages.judged import interval, judge_of, sides
from prefed.ui.pages.parts import Facts, Plot, Table, number, plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LETTERS = 700
"""Characters of a prompt or a response that a page shows at most."""
DRAWN = 40
"""Comparisons that are drawn at most."""


@dataclass(frozen=True)
class Examples:
    """Responses side by side.

    Attributes:
        heads: what the two columns are.
        rows: the prompt, the two responses and what came of them.
    """

    title: str
    note: str
    heads: tuple[str, str]
    rows: Sequence[tuple[str, str, str, str]]


def judged_table(judged: Sequence[Outcome]) -> Table | None:
    """The win rates of all comparisons; ``None`` without any."""
    if not judged:
        return None
    heads = ["compared", "judge", "win rate", "95% interval", "wins", "length-controlled", "ties", "judged"]
    rows = []
    for each in judged:
        summary, rate = each.summary, each.summary["win_rate"]
        cells = [judge_of(summary), f"{rate['mean']:.1%}", interval(rate)]
        cells += [f"{summary['wins']:.1%}", number(summary["length_controlled"], ".1%")]
        cells += [f"{summary['ties']:,}", f"{summary['judged']:,}"]
        rows.append((sides(summary), cells))
    caption = (
        "How often a judge prefers the first model's responses, asked in both orders. In the win rate a tie "
        "counts half, in the wins nothing. The interval is of this run, for other prompts: it "
        "says nothing of other seeds."
    )
    return Table(caption, heads, rows)


def judged_notes(judged: Sequence[Outcome]) -> list[str]:
    """What a reader of the win rates should know, a text for each comparison that has such a note."""
    return [f"{sides(each.summary)}: {each.summary['note']}." for each in judged if each.summary["note"]]


def judged_plot(judged: Sequence[Outcome]) -> Plot | None:
    """The win rates with their intervals, beside one half; ``None`` without any."""
    if not judged:
        return None
    rates = (f"{sides(each.summary)}: {each.summary['win_rate']['mean']:.1%}" for each in judged[:DRAWN])
    more = f" The first {DRAWN} of {len(judged):,} comparisons." if len(judged) > DRAWN else ""
    caption = f"Win rates with their 95% intervals. At one half the two models are equal.{more}"
    return plot(partial(draw_win_rates, judged[:DRAWN]), f"Win rates. {'; '.join(rates)}.", caption)


def draw_win_rates(judged: Sequence[Outcome], theme: Theme) -> Figure:
    """A point for each comparison, and a line as long as its interval."""
    figure, (axes,) = canvas(7.2, 1.0 + 0.35 * len(judged))
    at = np.arange(len(judged))[::-1]
    rates = [each.summary["win_rate"] for each in judged]
    axes.axvline(0.5, color=theme.quiet, linewidth=1.2)
    axes.hlines(at, [r["low"] for r in rates], [r["high"] for r in rates], color=theme.lines[0])
    means = [rate["mean"] for rate in rates]
    axes.plot(means, at, "o", color=theme.lines[0], markersize=5)
    told = [
        f"{sides(each.summary)}: {r['mean']:.1%}, 95% interval {interval(r)}"
        for each, r in zip(judged, rates, strict=True)
    ]
    tell_points(axes, means, at.tolist(), told)
    axes.set_yticks(at, [short_name(each.summary["name"], 44) for each in judged])
    axes.set_ylim(-0.6, len(judged) - 0.4)
    axes.tick_params("y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set(xlim=(-0.02, 1.02), xlabel="win rate")
    percent_axis(axes.xaxis)
    return figure


def judged_examples(judged: Sequence[Outcome]) -> list[Examples]:
    """The first prompts of each comparison."""
    return [
        Examples(
            f"Responses: {sides(each.summary)}",
            "The first prompts of the file. The result is the first model's.",
            (each.summary["model"], each.summary["against"]),
            _rows(each.examples),
        )
        for each in judged
        if each.examples
    ]


def alignment_facts(alignment: Outcome) -> Facts:
    """What the stages of an alignment counted."""
    prompts, completions, labels, train = (
        alignment.summary[stage] for stage in ("prompts", "completions", "labels", "train")
    )
    no_label = ", ".join(
        f"{labels[name]:,} {words}"
        for name, words in (
            ("identical", "of equal completions"),
            ("blank", "with a completion without text"),
            ("too_long", "too long"),
            ("failed", "without a usable verdict"),
            ("ties", "ties"),
        )
        if labels.get(name)
    )
    left_out = f"{prompts['clients']:,} that clients hold, {prompts['duplicates']:,} repeats"
    return [
        ("prompts", f"{prompts['kept']:,} of {prompts['read']:,}; left out: {left_out}"),
        ("prompts without room for a completion", f"{completions['too_long']:,}"),
        ("completions", f"{completions['completions']:,}"),
        ("pairs of completions", f"{labels['pairs']:,}"),
        (
            ("labelled by the judge", f"{labels['labelled']:,}")
            if "failed" in labels
            else (
                "labelled by the selectors",
                f"{labels['labelled']:,}, {labels['unanimous']:,} by all alike",
            )
        ),
        *([("without a label", no_label)] if no_label else []),
        ("trained on", f"{train['pairs']:,} pairs, {train['held_out']:,} held out"),
    ]


def epochs_table(alignment: Outcome) -> Table:
    """The loss and the agreement after each epoch, or generation; the kept one is marked."""
    train = alignment.summary["train"]
    epochs, several = train["epochs"], "generation" in train["epochs"][0]
    # An epoch is counted over all generations, of which each has as many.
    each = len(epochs) // epochs[-1]["generation"] if several else len(epochs)
    rows = []
    for epoch in epochs:
        place = epoch["epoch"] if not several else epoch["generation"]
        within = f", epoch {(epoch['epoch'] - 1) % each + 1}" if several and each > 1 else ""
        kept = " (kept)" if epoch["epoch"] == train["kept"] else ""
        rows.append((f"{place}{within}{kept}", [number(epoch["loss"], ".4f"), number(epoch["agreement"])]))
    caption = "Agreement: share of held-out pairs that the aligned model orders as the selectors do."
    if several:
        caption += " The held-out pairs are those of the first generation."
    return Table(caption, ["generation" if several else "epoch", "loss", "agreement"], rows)


def alignment_examples(alignment: Outcome) -> list[Examples]:
    """The first prompts with a label, and the two completions that it is about."""
    if not alignment.examples:
        return []
    note = "The first label of each of the first prompts. Both completions are of the model before training."
    heads = ("the selectors prefer", "to")
    return [Examples("Labels of the selectors", note, heads, _rows(alignment.examples))]


def _rows(examples: Sequence[Example]) -> list[tuple[str, str, str, str]]:
    return [(_short(each.prompt), _short(each.first), _short(each.second), each.outcome) for each in examples]


def _short(text: str) -> str:
    """A text as a page shows it.

    >>> len(_short("a" * 5000)), _short(" few words "), _short(" ")
    (700, 'few words', '(no text)')
    """
    text = text.strip() or "(no text)"
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…"
