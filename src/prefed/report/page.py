"""One HTML page about a run: it loads nothing, runs nothing, and reads on a light or a dark screen."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.resources import files as resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefed import files
from prefed.core.text import duration, pluralize, printable_lines, size
from prefed.metrics import flat_loss_warning, spread
from prefed.report import plots
from prefed.report.tables import SPREAD, UNSEEN, unseen_rows, written
from prefed.runs.figures import REWARDED
from prefed.runs.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["render", "write_page"]

ROWS = 500
"""Rows that a table of clients or rounds has at most."""

NUMBERS = {
    "margin": "mean gain in likelihood of the chosen over that of the rejected response, in nats.",
    "explicit_margin": "mean of what the reward head gives the chosen response less the rejected one.",
    "dpo_loss": "mean of DPO's loss, −log of the sigmoid of beta times the margin.",
}
"""Figures of an evaluation that are no shares, and what they mean."""


def write_page(run: RunRecord, path: Path) -> None:
    """Write :func:`render` of a run to ``path``, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, render(run).encode())


def render(run: RunRecord) -> str:
    """The page: what came of the run, its curves, its clients, its costs, its settings.

    Images are inline, each in a light and a dark version with a text that says what it shows; there is no
    script, and the page's own policy forbids it to load anything.
    """
    style = resources("prefed.report").joinpath("page.css").read_text("utf-8")
    sections = [
        _head(run),
        _warnings(run),
        _cards(run),
        _curves(run),
        _clients(run),
        _blocks(run),
        _costs(run),
        _own_figures(run),
        _settings(run),
        _meanings(run),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(run.name)} – {escape(run.method)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )


def escape(text: str) -> str:
    """``text`` for HTML; control characters, which names from elsewhere may have, are written out."""
    return html.escape(printable_lines(text))


def _head(run: RunRecord) -> str:
    from prefed.methods import METHODS

    kind = METHODS.get(run.method)
    what = f"{kind.title} – {kind.source}" if kind else ""
    rounds = pluralize(run.summary["rounds"], "round", "rounds")
    judged = pluralize(run.judged, "client", "clients")
    facts = f"{run.config['model']['name']}, {rounds}, {judged} judged, seed {run.config['seed']}"
    return (
        f'<header>\n<h1>{escape(run.name)}</h1>\n<p class="lead"><strong>{escape(run.method)}</strong>'
        f"{': ' + escape(what) if what else ''}<br>{escape(facts)}</p>\n</header>\n"
    )


def _warnings(run: RunRecord) -> str:
    said = []
    if run.summary.get("left_out"):
        one, more = (f"{who} no {run.split} pair and" for who in ("client has", "clients have"))
        said.append(f"{pluralize(run.summary['left_out'], f'{one} was', f'{more} were')} not judged.")
    if run.unlisted:
        said.append(f"{run.unlisted}.")
    if run.summary.get("not_finite"):
        broken = run.summary["not_finite"]
        said.append(
            f"The models of {len(broken):,} clients diverged: {sum(broken.values()):,} pairs have no finite "
            "log-probability and count as not right; a lower method.lr may do."
        )
    if still := flat_loss_warning([record.get("loss") for record in run.rounds]):
        said.append(f"{still[0].upper()}{still[1:]}.")
    dropped = [(record["round"], drop) for record in run.rounds for drop in record.get("dropped", ())]
    if dropped:
        number, first = dropped[0]
        where = f"the first, of client {first['client']} in round {number}"
        gone = pluralize(len(dropped), "upload was", "uploads were")
        said.append(f"{gone} dropped; {where}: {first['reason']}.")
    if not said:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in said)
    return f'<div class="warn" role="note"><ul>{items}</ul></div>\n'


def _cards(run: RunRecord) -> str:
    of = ("mean over clients", "mean"), ("worst client", "worst"), ("worst tenth", "worst_decile")
    after, before = run.figures["preference_accuracy"], run.figures.get("baseline_accuracy")
    spreads = spread(after.values), before and spread(before.values)
    cards = []
    for label, name in of:
        note = f"before: {getattr(spreads[1], name):.1%}" if spreads[1] else ""
        cards.append((label, f"{getattr(spreads[0], name):.1%}", note))
    up, down = run.summary["bytes"]["up"], run.summary["bytes"]["down"]
    cards.append(("sent", size(up + down), f"{size(up)} up, {size(down)} down"))
    rounds = pluralize(run.summary["rounds"], "round", "rounds")
    cards.append(("time", duration(run.summary["seconds"]), rounds))
    items = "".join(
        f"<li><span>{escape(label)}</span><strong>{escape(text)}</strong><span>{escape(note)}</span></li>"
        for label, text, note in cards
    )
    return f'<ul class="cards" aria-label="The run in five figures">{items}</ul>\n'


def _curves(run: RunRecord) -> str:
    _, means = run.curve("preference_accuracy")
    _, worst = run.curve("preference_accuracy", "worst")
    text = f"Share of {run.split} pairs ordered rightly, over rounds. "
    if "baseline_accuracy" in run.figures:
        before = run.figures["baseline_accuracy"].values
        text += f"The mean over clients begins at {before['mean']:.1%} and ends at {means[-1]:.1%}"
        text += f"; the worst client goes from {before['worst']:.1%} to {worst[-1]:.1%}." if worst else "."
    elif means:
        text += f"The mean over clients ends at {means[-1]:.1%}."
    caption = "Round 0 is the untouched model. The worst client may be another one in each round."
    parts = [_figure(lambda theme: plots.accuracy(run, theme), text, caption)]
    _, losses = run.curve("loss")
    if losses:
        text = f"Training loss over rounds, from {losses[0]:.4g} to {losses[-1]:.4g}."
        caption = "Loss on the clients' training batches, weighted by their numbers of pairs."
        parts.append(_figure(lambda theme: plots.loss(run, theme), text, caption))
    ends = {name: run.curve(name)[1] for name in REWARDED if name in run.figures}
    if ends:
        text = "; ".join(
            f"{run.figures[n].label} ends at {values[-1]:.1%}" for n, values in ends.items() if values
        )
        caption = "The explicit reward head, means over clients; what each figure means is said below."
        parts.append(_figure(lambda theme: plots.reward_head(run, theme), f"{text}.", caption))
    names = [name for name in run.figures if name != "baseline_accuracy" and run.curve(name)[0]]
    heads = ["loss", *(run.figures[name].label for name in names), "up", "down", "seconds"]
    rows = []
    for record in run.rounds[-ROWS:]:
        held = [record.get("evaluation", {}).get(name, {}).get("mean") for name in names]
        sent = [size(record[way]) for way in ("bytes_up", "bytes_down")]
        figures = [_number(record.get("loss"), ".4f"), *(_number(value) for value in held)]
        rows.append((str(record["round"]), [*figures, *sent, _number(record.get("seconds"), ".1f")]))
    more = f"The last {ROWS:,} of {len(run.rounds):,} rounds. " if len(run.rounds) > ROWS else ""
    table = _table(f"{more}Means over clients where they were measured.", ["round", *heads], rows)
    parts.append(_details("Every round as a table", table))
    return _section("Over rounds", *parts)


def _clients(run: RunRecord) -> str:
    figures = list(run.figures.values())
    leading = run.figures["preference_accuracy"].values["per_client"]
    order = sorted(run.clients, key=lambda client: leading[client])
    text = f"{len(order):,} clients; lowest {order[0]} with {leading[order[0]]:.1%}, "
    text += f"highest {order[-1]} with {leading[order[-1]]:.1%}."
    caption = f"Share of each client's {run.split} pairs that its model orders rightly, lowest first."
    spreads = [spread(figure.values) for figure in figures]
    heads = [figure.label for figure in figures]
    fairness = _table(
        "How the figures are spread; every client counts alike.",
        ["over clients", *heads],
        [(name, [f"{of(s):.3f}" for s in spreads]) for name, of in SPREAD.items()],
    )
    rows = []
    for client in order[:ROWS]:
        pairs = run.pairs(client)
        held = [_number(figure.values["per_client"].get(client)) for figure in figures]
        rows.append((client, ["" if pairs is None else f"{pairs:,}", *held]))
    more = (
        f"The {ROWS:,} lowest of {len(order):,}; the others are in summary.json. "
        if len(order) > ROWS
        else ""
    )
    table = _table(f"{more}Lowest first.", ["client", "pairs", *heads], rows)
    return _section(
        "Clients",
        _figure(lambda theme: plots.clients(run, theme), text, caption),
        fairness,
        _unseen(run),
        _details("Every client as a table", table),
    )


def _unseen(run: RunRecord) -> str:
    held = run.summary.get("unseen_accuracy")
    if not held:
        return ""
    caption = "Clients that never took part, after some local steps from what was published."
    return _table(caption, ["steps", *UNSEEN], unseen_rows(held))


def _blocks(run: RunRecord) -> str:
    parts = []
    for profile in run.profiles.values():
        means = (
            f"block {block} {mean:.2f}" for block, mean in zip(profile.blocks, profile.means, strict=True)
        )
        text = (
            f"{profile.label.capitalize()}, means over {len(profile.clients):,} clients: {', '.join(means)}."
        )
        caption = (
            f"{profile.label.capitalize()}: {profile.meaning}. They are read from clients' private "
            "states and rounded to two digits: whoever has this page learns so much of each client named "
            "here. Clients that never took part have none."
        )
        parts.append(_figure(partial(plots.blocks, run, profile.name), text, caption))
        rows = [("mean", [f"{mean:.2f}" for mean in profile.means])]
        rows += [
            (client, ["" if value != value else f"{value:.2f}" for value in values])
            for client, values in zip(profile.clients[:ROWS], profile.values, strict=False)
        ]
        more = len(profile.clients) - ROWS
        left = f" The first {ROWS:,} clients; {more:,} more are in summary.json." if more > 0 else ""
        table = _table(f"By block.{left}", ["client", *map(str, profile.blocks)], rows)
        parts.append(_details(f"{profile.label.capitalize()} as a table", table))
    return _section("Which layers each client personalises", *parts) if parts else ""


def _costs(run: RunRecord) -> str:
    summary = run.summary
    traffic, parameters = summary["bytes"], summary.get("parameters", {})
    visits = sum(len(record.get("cohort", ())) for record in run.rounds)
    facts = [("sent by clients", size(traffic["up"])), ("sent to clients", size(traffic["down"]))]
    if visits:
        each = (f"{size(traffic[way] / visits)} {way}" for way in ("up", "down"))
        facts.append(("for each client and round", ", ".join(each)))
    if parameters:
        facts.append(("parameters trained by a client", f"{parameters['trainable']:,}"))
        facts.append(("parameters in an upload", f"{parameters['communicated']:,}"))
    facts.append(("time", duration(summary["seconds"])))
    if "peak_memory_mb" in summary:
        facts.append(("peak memory", f"{summary['peak_memory_mb']:,.0f} MiB"))
    text = f"In all {size(traffic['up'])} went up and {size(traffic['down'])} down."
    caption = "Bytes are those of the messages as sent."
    figure = _figure(lambda theme: plots.cost(run, theme), text, caption)
    return _section("Costs", _facts(facts), figure)


def _own_figures(run: RunRecord) -> str:
    if not run.own_figures:
        return ""
    ends = []
    for name in run.own_figures:
        _, values = run.curve(name)
        if values:
            ends.append(f"{name.replace('_', ' ')} from {values[0]:.4g} to {values[-1]:.4g}")
    figure = _figure(lambda theme: plots.figures(run, theme), "; ".join(ends[:12]) + ".", "")
    return _section("The method's own figures", figure)


def _settings(run: RunRecord) -> str:
    import tomli_w

    text = escape(tomli_w.dumps(dict(run.config)))
    parts = [_details("The whole experiment file, every default filled in", f"<pre>{text}</pre>")]
    facts = [(name, str(value)) for name, value in run.summary.get("versions", {}).items()]
    facts += [(f"{name} fingerprint", value) for name, value in run.fingerprint.items()]
    if facts:
        parts.append(_details("Versions and fingerprints", _facts(facts)))
    method = {name: value for name, value in run.config["method"].items() if not isinstance(value, dict)}
    rows = [(name, [written(value)]) for name, value in method.items()]
    parts.insert(0, _table("The [method] table.", ["setting", "value"], rows, "settings"))
    return _section("Settings", *parts)


def _meanings(run: RunRecord) -> str:
    facts = [(figure.label, figure.meaning + ".") for figure in run.figures.values()]
    facts += [(name.replace("_", " "), NUMBERS[name]) for name in run.own_figures if name in NUMBERS]
    facts += [
        ("worst tenth", "mean of the lowest tenth of the clients, at least one of them."),
        ("Jain index", "(Σx)² / (n Σx²): 1 where all clients have the same, 1/n where one has everything."),
    ]
    return _section("What the figures mean", _facts(facts))


def _figure(draw: Callable[[plots.Theme], Figure | None], text: str, caption: str) -> str:
    """A plot for both kinds of screen, with a text in its place for those who do not see it."""

    def source(theme: plots.Theme) -> str:
        drawn = plots.svg(draw, theme)  # type: ignore[arg-type]
        return "data:image/svg+xml;base64," + base64.b64encode(drawn.encode()).decode()

    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return (
        '<figure><picture><source media="screen and (prefers-color-scheme: dark)" '
        f'srcset="{source(plots.DARK)}"><img src="{source(plots.LIGHT)}" alt="{escape(text)}"></picture>'
        f"{below}</figure>\n"
    )


def _section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{''.join(parts)}</section>\n"


def _details(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>\n"


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f"<dl>{items}</dl>\n"


def _table(
    caption: str, heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], kind: str = ""
) -> str:
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(v)}</td>" for v in values)}</tr>\n'
        for name, values in rows
    )
    mark = f' class="{kind}"' if kind else ""
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(caption)}"><table{mark}>'
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n"
    )


def _number(value: Any, form: str = ".3f") -> str:
    return format(value, form) if isinstance(value, int | float) else ""
