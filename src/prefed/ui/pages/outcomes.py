"""Win rates and alignment of a finished run, with responses side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefed.core.text import pluralize
from prefed.runs.finished_run import Answer, Example, Outcome, RunRecord
from prefed.ui.pages.chart_data import Axis, Bars, Chart, Line, Look, Panel, percent
from prefed.ui.pages.tables import Facts, Table, cell, terminal

if TYPE_CHECKING:
    from rich.console import Console

LETTERS = 700
"""Maximum number of characters of a prompt or response on a page."""
DRAWN = 40
"""Maximum number of comparisons in the chart."""
FIRST = 5
"""Number of held-out prompts whose answers are shown."""
_COLUMNS: Mapping[Any, str] = {
    "untouched": "base model",
    "shared": "shared model",
    "own": "the client's own model",
}
"""Model in ``answers.jsonl`` → heading."""


def sides(summary: Mapping[str, Any]) -> str:
    """The two models that a judge compared; ``summary`` is a comparison's ``summary.json``."""
    return f"{summary['model']} against {summary['against']}"


def judge_of(summary: Mapping[str, Any]) -> str:
    """The judge of a comparison, with its taste if it has one.

    >>> judge_of({"judge": "utility", "taste": "ward-7"}), judge_of({"judge": "utility"})
    ('utility, taste ward-7', 'utility')
    """
    taste = summary.get("taste")
    return str(summary["judge"]) if taste is None else f"{summary['judge']}, taste {taste}"


def interval(rate: Mapping[str, float]) -> str:
    """The 95% interval of a win rate.

    >>> interval({"mean": 0.625, "low": 0.5, "high": 0.75})
    '50.0% to 75.0%'
    """
    return f"{rate['low']:.1%} to {rate['high']:.1%}"


@dataclass(frozen=True)
class Examples:
    """Responses side by side.

    Attributes:
        heads: headings of the columns of responses.
        rows: prompt, responses, outcome (may be empty).
    """

    title: str
    note: str
    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str], str]]


def judged_table(judged: Sequence[Mapping[str, Any]], runs: Sequence[str] = ()) -> Table | None:
    """Win rates of comparisons, given by their ``summary.json``; ``None`` if there are none.

    ``runs`` names the run of each comparison; empty if all are from one run.
    """
    if not judged:
        return None
    heads = ["compared", "judge", "win rate", "95% interval", "wins", "judged"]
    heads += ["ties", "failed", "length-controlled"]
    rows = []
    for summary in judged:
        rate = summary["win_rate"]
        cells = [judge_of(summary), f"{rate['mean']:.1%}", interval(rate), f"{summary['wins']:.1%}"]
        cells += [f"{summary[name]:,}" for name in ("judged", "ties", "failed")]
        rows.append((sides(summary), [*cells, cell(summary["length_controlled"], ".1%")]))
    if runs:
        heads = ["run", *heads]
        rows = [(run, [name, *cells]) for run, (name, cells) in zip(runs, rows, strict=True)]
    caption = (
        "Share of prompts on which the judge prefers the first model's response, asked in both orders. A tie "
        "counts one half in the win rate and zero in the wins. The interval covers variation over prompts, "
        "not over seeds."
    )
    return Table(caption, heads, rows)


def judged_notes(judged: Sequence[Outcome]) -> list[str]:
    """Notes on the comparisons that have any."""
    return [f"{sides(each.summary)}: {each.summary['note']}." for each in judged if each.summary["note"]]


def judged_chart(judged: Sequence[Outcome]) -> Chart | None:
    """Win rates with their intervals and a line at 50%; ``None`` if ``judged`` is empty."""
    if not judged:
        return None
    drawn = judged[:DRAWN]
    rates = [each.summary["win_rate"] for each in drawn]
    texts = [f"{sides(e.summary)}: {r['mean']:.1%}" for e, r in zip(drawn, rates, strict=True)]
    notes = [f"{text}, 95% interval {interval(r)}" for text, r in zip(texts, rates, strict=True)]
    spans = [(float(at), rate["low"], rate["high"]) for at, rate in enumerate(rates)]
    points = [(rate["mean"], float(at)) for at, rate in enumerate(rates)]
    shown = (Bars("", spans, notes, thickness=0.12), Line("", points, notes, joined=False))
    names = [each.summary["name"] for each in drawn]
    panel = Panel(Axis("win rate", percent), Axis(names=names), shown, height=70 + 30 * len(drawn), at_x=0.5)
    more = f" The first {DRAWN} of {len(judged):,} comparisons." if len(judged) > DRAWN else ""
    caption = f"Win rates with 95% intervals. At 50% the two models are equally good.{more}"
    return Chart("win_rates", f"Win rates. {'; '.join(texts)}.", caption, [panel])


def judged_examples(judged: Sequence[Outcome]) -> list[Examples]:
    """Responses to the first prompts of each comparison."""
    return [
        Examples(
            f"Responses: {sides(each.summary)}",
            "The first prompts of the file. The outcome is from the first model's point of view.",
            (each.summary["model"], each.summary["against"]),
            _rows(each.examples),
        )
        for each in judged
        if each.examples
    ]


def alignment_facts(alignment: Outcome) -> Facts:
    """Counts from the stages of an alignment."""
    prompts, completions, labels, train = (
        alignment.summary[stage] for stage in ("prompts", "completions", "labels", "train")
    )
    no_label = ", ".join(
        f"{labels[name]:,} {words}"
        for name, words in (
            ("identical", "with equal completions"),
            ("blank", "with a blank completion"),
            ("too_long", "too long"),
            ("failed", "without a usable verdict"),
            ("ties", "ties"),
            ("less_clear", "less clear than another of the prompt, or near-ties"),
            ("cut", "whose chosen completion was cut"),
        )
        if labels.get(name)
    )
    left_out = f"{prompts['clients']:,} held by clients, {prompts['duplicates']:,} duplicates"
    return [
        ("prompts", f"{prompts['kept']:,} of {prompts['read']:,}; left out: {left_out}"),
        ("prompts too long for a completion", f"{completions['too_long']:,}"),
        ("completions", f"{completions['completions']:,}"),
        *([("cut at max_new_tokens", f"{completions['cut']:,}")] if "cut" in completions else []),
        ("pairs of completions", f"{labels['pairs']:,}"),
        (
            ("labelled by the judge", f"{labels['labelled']:,}")
            if "failed" in labels
            else (
                "labelled by the selectors",
                f"{labels['labelled']:,}, {labels['unanimous']:,} unanimously",
            )
        ),
        *([("without a label", no_label)] if no_label else []),
        ("trained on", f"{train['pairs']:,} pairs, {train['held_out']:,} held out"),
    ]


def epochs_table(alignment: Outcome) -> Table:
    """What was measured after each epoch, of one or several generations; the kept one is marked."""
    train = alignment.summary["train"]
    epochs, several = train["epochs"], "generation" in train["epochs"][0]
    each, rows = Counter(epoch.get("generation") for epoch in epochs), list[tuple[str, list[str]]]()
    done = Counter[int | None]()
    if text := next((epoch["text"] for epoch in epochs if epoch.get("text")), None):
        rows.append(("initial policy", ["", "", "", "", *_whole(text["base"])]))
    for epoch in epochs:
        generation = epoch.get("generation")
        done[generation] += 1
        within = f", epoch {done[generation]}" if several and each[generation] > 1 else ""
        place = generation if several else epoch["epoch"]
        kept = " (kept)" if epoch["epoch"] == train["kept"] else ""
        rate, text = epoch.get("win_rate"), epoch.get("text")
        cells = [cell(epoch["loss"], ".4f"), cell(epoch["agreement"]), cell(rate, ".1%")]
        cells.append(cell(epoch.get("kl"), ".2f"))
        rows.append((f"{place}{within}{kept}", [*cells, *(_whole(text["shared"]) if text else ("", ""))]))
    caption = (
        "Agreement: share of held-out pairs on which the aligned model agrees with the labels. Win rate: "
        "share of its answers to held-out prompts that the labeller prefers to the initial policy's. KL: "
        "how much more probable they are than under it, in nats per token. None "
        "shows broken text: see how many answers end and loop, and read some."
    )
    if several:
        caption += " Held-out prompts and pairs are from the first generation."
    heads = ["generation" if several else "epoch", "loss", "agreement", "win rate", "KL", "end", "loop"]
    return Table(caption, heads, rows)


def generations_chart(alignment: Outcome) -> Chart | None:
    """Shares and KL after the last epoch of each generation; ``None`` for fewer than two."""
    epochs = alignment.summary["train"]["epochs"]
    last = {epoch["generation"]: epoch for epoch in epochs if "generation" in epoch}
    if len(last) < 2:
        return None
    refreshes = alignment.summary.get("refresh", {}).get("refreshes", ())
    shares = {
        "win rate": {k: each.get("win_rate") for k, each in last.items()},
        "answers that end": {
            k: each["text"]["shared"]["ends"] for k, each in last.items() if each.get("text")
        },
        "that loop": {k: each["text"]["shared"]["loops"] for k, each in last.items() if each.get("text")},
        "selectors' accuracy": {each["generation"]: each["accuracy"] for each in refreshes},
    }
    kl = {k: each.get("kl") for k, each in last.items()}
    found, panels = list[str](), list[Panel]()
    for series, write, label in (
        (shares, percent, "shares"),
        ({"": kl}, "{:.2f}".format, "KL, nats per token"),
    ):
        lines = []
        for index, (name, values) in enumerate(series.items()):
            known = {k: value for k, value in values.items() if value is not None}
            if known:
                notes = [f"{name or 'KL'} of generation {k}: {write(value)}" for k, value in known.items()]
                found.append(notes[-1])
                points = [(float(k), value) for k, value in known.items()]
                lines.append(Line(name, points, notes, Look(index + 1, mark=index)))
        if lines:
            panels.append(Panel(Axis("generation", whole=True), Axis(write=write), lines, label, 240))
    caption = (
        "The win rate is by the labeller. The selectors' accuracy is on what clients judged of this "
        "generation's completions, before the refresh."
    )
    return Chart("generations", f"{'; '.join(found)}.", caption, panels) if panels else None


def generation_answers(alignment: Outcome) -> list[Examples]:
    """The first held-out prompts, answered by the initial policy and by each generation."""
    if not alignment.answers:
        return []
    count = max(len(texts) for _, texts in alignment.answers)
    heads = ["initial policy", *(f"generation {number}" for number in range(1, count))]
    rows = [(_short(prompt), [_short(text) for text in texts], "") for prompt, texts in alignment.answers]
    return [Examples("Answers by generation", "To held-out prompts, greedily.", heads, rows)]


def _whole(text: Mapping[str, float]) -> tuple[str, str]:
    """The shares of answers that end and that loop."""
    return cell(text["ends"], ".0%"), cell(text["loops"], ".0%")


def alignment_examples(alignment: Outcome) -> list[Examples]:
    """The first labelled prompts, each with its two completions."""
    if not alignment.examples:
        return []
    note = "One labelled pair for each of the first prompts. The base model wrote both completions."
    heads = ("preferred by the selectors", "other completion")
    return [Examples("Labels from the selectors", note, heads, _rows(alignment.examples))]


def answers(run: RunRecord) -> list[Examples]:
    """What the run's models write: to the prompts of ``[report]``, then to the first held-out ones."""
    return [*_to_report(run), *_to_held_out(run)]


def _to_held_out(run: RunRecord) -> list[Examples]:
    rows = [row for row in run.answers if row.holder is not None]
    if not rows:
        return []
    last = max(row.round for row in rows)
    texts: Mapping[Any, str] = {
        (row.model, row.prompt): _marked(row) for row in rows if row.round in (0, last)
    }
    holders = {row.prompt: row.holder for row in rows}
    models = [model for model in _COLUMNS if any(of == model for of, _ in texts)]
    shown = [
        (f"{client}: {prompt}", [texts[model, prompt] for model in models], "")
        for prompt, client in list(holders.items())[:FIRST]
    ]
    after = f"Answers after {pluralize(last, 'round', 'rounds')} to the first {len(shown)} of {len(holders)}"
    note = f"{after} held-out prompts. {_reading(rows)}"
    return [Examples("Held-out prompts", note, [_COLUMNS[model] for model in models], shown)]


def _marked(row: Answer) -> str:
    """An answer, with a mark where it was cut at the limit of tokens."""
    return _short(f"{row.text.rstrip()} [cut]" if row.ended is False else row.text)


def _reading(rows: Sequence[Answer]) -> str:
    """How to read the answers."""
    cut = any(row.ended is False for row in rows)
    note = "Each token is the most likely one."
    note += " [cut] marks answers that were cut at the limit of tokens." if cut else ""
    own = {"shared", "own"} <= {row.model for row in rows}
    return f"{note} No client uses the shared model by itself: each has its own." if own else note


def _to_report(run: RunRecord) -> list[Examples]:
    """All models after the last round, then each of them round by round."""
    rows = [row for row in run.answers if row.holder is None]
    texts = {((row.model, row.client), row.round, row.prompt): _marked(row) for row in rows}
    prompts = dict.fromkeys(prompt for _, _, prompt in texts)
    last = max((number for _, number, _ in texts), default=0)
    models = {model: answering(*model) for model, number, _ in texts if number == last}
    untouched: dict[str, Any] = {"base model": (("untouched", None), 0)}

    def side_by_side(title: str, note: str, columns: Mapping[str, Any]) -> Examples:
        rows = [(prompt, [texts[*column, prompt] for column in columns.values()], "") for prompt in prompts]
        return Examples(title, note, tuple(columns), rows)

    if not last:
        return [side_by_side("", "", untouched)] if texts else []
    note = f"After {pluralize(last, 'round', 'rounds')}. {_reading(rows)}"
    parts = [side_by_side("", note, untouched | {name: (model, last) for model, name in models.items()})]
    for model, name in models.items():
        rounds = sorted({number for own, number, _ in texts if own == model})
        course = {f"round {number}": (model, number) for number in rounds}
        parts.append(side_by_side(f"Round by round: {name}", "", untouched | course))
    return parts


def answering(model: str, client: str | None) -> str:
    """Whose answer a column has.

    >>> answering("own", "ada"), answering("shared", None)
    ("ada's own model", 'shared model')
    """
    return f"{client}'s own model" if client is not None else f"{model} model"


def _rows(examples: Sequence[Example]) -> list[tuple[str, Sequence[str], str]]:
    return [(_short(e.prompt), (_short(e.first), _short(e.second)), e.outcome) for e in examples]


def _short(text: str) -> str:
    """Strip and truncate a text for a page.

    >>> len(_short("a" * 5000)), _short(" few words "), _short(" ")
    (700, 'few words', '(no text)')
    """
    text = text.strip() or "(no text)"
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…"


def print_judged(summary: Mapping[str, Any], run: Path, console: Console) -> None:
    """Print the ``summary.json`` of a comparison and the path of its verdicts."""
    table = judged_table([summary])
    assert table is not None
    between = f"{sides(summary)}, judged by {judge_of(summary)}"
    console.print(between, markup=False, highlight=False, soft_wrap=True)
    console.print(terminal(table))
    if summary["note"]:
        console.print(summary["note"], markup=False, soft_wrap=True)
    path = run / "judge" / summary["name"] / "verdicts.jsonl"
    console.print(f"verdicts: {path}", markup=False, soft_wrap=True)
