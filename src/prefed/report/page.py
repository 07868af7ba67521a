"""One HTML page about a run: it loads nothing, runs nothing, and reads on a light or a dark screen.

This file prepares the values; ``templates/run.html`` decides how they look. A template cannot be given text
that changes the page. Jinja escapes every value for HTML, and writes out the control characters that names
from elsewhere may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import tomli_w
from jinja2 import Environment, PackageLoader, StrictUndefined

from prefed import files
from prefed.core.text import duration, pluralize, printable_lines, size
from prefed.methods import METHODS
from prefed.metrics import flat_loss_warning, spread
from prefed.report import distributed, outcomes, plots, selectors, tastes
from prefed.report.parts import ROWS, Facts, Plot, Table, number, plot
from prefed.report.tables import SPREAD, UNSEEN, setting, unseen_rows
from prefed.runs.figures import REWARDED
from prefed.runs.outcomes import Outcome, alignment_of, judged_of
from prefed.runs.record import RunRecord

NUMBERS = {
    "margin": "mean gain in likelihood of the chosen over that of the rejected response, in nats.",
    "explicit_margin": "mean of what the reward head gives the chosen response less the rejected one.",
    "dpo_loss": "mean of DPO's loss, −log of the sigmoid of beta times the margin.",
    "choice_loss": "mean cross-entropy over the two letters of a selector, both orders of each pair.",
    **distributed.MEANINGS,
}
"""Figures of an evaluation or of the round log that are no shares, and what they mean."""
CHOICE_NUMBERS = {"margin": "mean score of the chosen response over the rejected one, in nats."}
"""What they mean of a selector, where that is another thing."""


def write_page(run: RunRecord, path: Path) -> None:
    """Write :func:`render` of a run to ``path``, whole or not at all.

    A page that quotes what a judge read, or tells of tastes, can be read by its owner alone, as these files.
    """
    judged = judged_of(run.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o600 if run.tastes or any(each.examples for each in judged) else 0o666
    files.write(path, _render(run, judged).encode(), mode=mode)


def render(run: RunRecord) -> str:
    """The page: what came of the run, its curves, its clients, its costs, its settings.

    Images are inline, each in a light and a dark version with a text that says what it shows. There is no
    script, and the page's own policy forbids it to load anything.

    Raises:
        RunError: a file of a judge's or of an alignment is damaged.
    """
    return _render(run, judged_of(run.path))


def _render(run: RunRecord, judged: Sequence[Outcome]) -> str:
    alignment = alignment_of(run.path)
    rounds = pluralize(run.summary["rounds"], "round", "rounds")
    clients = pluralize(run.judged, "client", "clients")
    method = {name: value for name, value in run.config["method"].items() if not isinstance(value, dict)}
    settings = [(name, [setting(value)]) for name, value in method.items()]
    return _render_template(
        "run.html",
        name=run.name,
        method=run.method,
        kind=METHODS.get(run.method),
        setup=f"{run.config['model']['name']}, {rounds}, {clients} judged, seed {run.config['seed']}",
        warnings=_warnings(run),
        cards=_cards(run),
        curves=_curves(run),
        rounds=_rounds(run),
        clients_plot=_clients_plot(run),
        fairness=_fairness(run),
        unseen=_unseen(run),
        clients=_clients(run),
        agreement=selectors.agreement_table(run),
        clusters=selectors.clusters_table(run),
        clusters_plot=selectors.clusters_plot(run),
        tastes=tastes.section(run.tastes) if run.tastes else None,
        alignment=outcomes.alignment_facts(alignment) if alignment else None,
        epochs=outcomes.epochs_table(alignment) if alignment else None,
        alignment_examples=outcomes.alignment_examples(alignment) if alignment else [],
        judged=outcomes.judged_table(judged),
        judged_plot=outcomes.judged_plot(judged),
        judged_notes=outcomes.judged_notes(judged),
        judged_examples=outcomes.judged_examples(judged),
        blocks=_blocks(run),
        distributed=distributed.distributed(run),
        costs=_costs(run),
        costs_plot=_costs_plot(run),
        own_figures=_own_figures(run),
        settings=Table("The [method] table.", ["setting", "value"], settings),
        experiment=tomli_w.dumps(dict(run.config)),
        versions=_versions(run),
        meanings=_meanings(run),
    )


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
    return warnings


def _cards(run: RunRecord) -> list[tuple[str, str, str]]:
    after, before = run.figures["preference_accuracy"], run.figures.get("baseline_accuracy")
    cards = []
    for name in ("mean", "worst client", "worst tenth"):
        note = f"before: {SPREAD[name](spread(before.values)):.1%}" if before else ""
        label = "mean over clients" if name == "mean" else name
        cards.append((label, f"{SPREAD[name](spread(after.values)):.1%}", note))
    up, down = run.summary["bytes"]["up"], run.summary["bytes"]["down"]
    cards.append(("sent", size(up + down), f"{size(up)} up, {size(down)} down"))
    rounds = pluralize(run.summary["rounds"], "round", "rounds")
    cards.append(("time", duration(run.summary["seconds"]), rounds))
    return cards


def _curves(run: RunRecord) -> list[Plot]:
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
    curves = [plot(partial(plots.accuracy, run), text, caption)]
    _, losses = run.curve("loss")
    if losses:
        text = f"Training loss over rounds, from {losses[0]:.4g} to {losses[-1]:.4g}."
        caption = "Loss on the clients' training batches, weighted by their numbers of pairs."
        curves.append(plot(partial(plots.loss, run), text, caption))
    ends = {name: run.curve(name)[1] for name in REWARDED if name in run.figures}
    if ends:
        text = "; ".join(
            f"{run.figures[name].label} ends at {values[-1]:.1%}" for name, values in ends.items() if values
        )
        caption = "The explicit reward head, means over clients; what each figure means is said below."
        curves.append(plot(partial(plots.reward_head, run), f"{text}.", caption))
    return curves


def _rounds(run: RunRecord) -> Table:
    names = [name for name in run.figures if name != "baseline_accuracy" and run.curve(name)[0]]
    heads = ["round", "loss", *(run.figures[name].label for name in names), "up", "down", "seconds"]
    rows = []
    for record in run.rounds[-ROWS:]:
        means = [record.get("evaluation", {}).get(name, {}).get("mean") for name in names]
        figures = [number(record.get("loss"), ".4f"), *map(number, means)]
        traffic = [size(record[way]) for way in ("bytes_up", "bytes_down")]
        rows.append((str(record["round"]), [*figures, *traffic, number(record.get("seconds"), ".1f")]))
    more = f"The last {ROWS:,} of {len(run.rounds):,} rounds. " if len(run.rounds) > ROWS else ""
    return Table(f"{more}Means over clients where they were measured.", heads, rows)


def _clients_plot(run: RunRecord) -> Plot:
    ranking, accuracies = plots.ranking(run), run.figures["preference_accuracy"].values["per_client"]
    text = f"{len(ranking):,} clients; lowest {ranking[0]} with {accuracies[ranking[0]]:.1%}, "
    text += f"highest {ranking[-1]} with {accuracies[ranking[-1]]:.1%}."
    caption = f"Share of each client's {run.split} pairs that its model orders rightly, lowest first."
    return plot(partial(plots.clients, run), text, caption)


def _fairness(run: RunRecord) -> Table:
    spreads = [spread(figure.values) for figure in run.figures.values()]
    return Table(
        "How the figures are spread; every client counts alike.",
        ["over clients", *(figure.label for figure in run.figures.values())],
        [(name, [f"{of(s):.3f}" for s in spreads]) for name, of in SPREAD.items()],
    )


def _unseen(run: RunRecord) -> Table | None:
    accuracies = run.summary.get("unseen_accuracy")
    if not accuracies:
        return None
    caption = "Clients that never took part, after some local steps from what was published."
    return Table(caption, ["steps", *UNSEEN], unseen_rows(accuracies))


def _clients(run: RunRecord) -> Table:
    ranking, figures = plots.ranking(run), run.figures.values()
    clusters = run.groupings[-1].clusters if run.groupings else ()
    own = {client: f"selector-{u}" for u, clients in enumerate(clusters) for client in clients}
    rows = []
    for client in ranking[:ROWS]:
        pairs = run.pairs(client)
        values = [number(figure.values["per_client"].get(client)) for figure in figures]
        cluster = [own.get(client, "")] if own else []
        rows.append((client, ["" if pairs is None else f"{pairs:,}", *cluster, *values]))
    more = f"The {ROWS:,} lowest of {len(ranking):,}; the others are in summary.json. "
    caption = f"{more if len(ranking) > ROWS else ''}Lowest first."
    return Table(
        caption, ["client", "pairs", *(["cluster"] if own else []), *(f.label for f in figures)], rows
    )


def _blocks(run: RunRecord) -> list[tuple[str, Plot, Table]]:
    """What clients personalise, figure by figure: its heading, its plot and its table."""
    blocks = []
    for profile in run.profiles.values():
        label, clients = profile.label.capitalize(), len(profile.clients)
        means = [f"{mean:.2f}" for mean in profile.means]
        text = ", ".join(f"block {block} {mean}" for block, mean in zip(profile.blocks, means, strict=True))
        caption = (
            f"{label}: {profile.meaning}. They are read from clients' private "
            "states and rounded to two digits: whoever has this page learns so much of each client named "
            "here. Clients that never took part have none."
        )
        draw = partial(plots.blocks, run, profile.name)
        rows = [("mean", means)]
        rows += [
            (client, ["" if value != value else f"{value:.2f}" for value in values])
            for client, values in zip(profile.clients[:ROWS], profile.values, strict=False)
        ]
        more = f" The first {ROWS:,} clients; {clients - ROWS:,} more are in summary.json."
        more = more if clients > ROWS else ""
        table = Table(f"By block.{more}", ["client", *map(str, profile.blocks)], rows)
        text = f"{label}, means over {clients:,} clients: {text}."
        blocks.append((label, plot(draw, text, caption), table))
    return blocks


def _costs(run: RunRecord) -> Facts:
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
    return facts


def _costs_plot(run: RunRecord) -> Plot:
    traffic = run.summary["bytes"]
    text = f"In all {size(traffic['up'])} went up and {size(traffic['down'])} down."
    return plot(partial(plots.cost, run), text, "Bytes are those of the messages as sent.")


def _own_figures(run: RunRecord) -> Plot | None:
    names = plots.other_figures(run)
    if not names:
        return None
    curves = ((name.replace("_", " "), run.curve(name)[1]) for name in names)
    ends = [f"{name} from {values[0]:.4g} to {values[-1]:.4g}" for name, values in curves if values]
    return plot(partial(plots.figures, run), "; ".join(ends[:12]) + ".")


def _versions(run: RunRecord) -> Facts:
    versions = [(name, str(version)) for name, version in run.summary.get("versions", {}).items()]
    return versions + [(f"{name} fingerprint", digest) for name, digest in run.fingerprint.items()]


def _meanings(run: RunRecord) -> Facts:
    facts = [(figure.label, f"{figure.meaning}.") for figure in run.figures.values()]
    numbers = NUMBERS | (CHOICE_NUMBERS if "choice_loss" in run.summary else {})
    facts += [(name.replace("_", " "), numbers[name]) for name in run.own_figures if name in numbers]
    facts += [
        ("worst tenth", "mean of the lowest tenth of the clients, at least one of them."),
        ("Jain index", "(Σx)² / (n Σx²): 1 where all clients have the same, 1/n where one has everything."),
    ]
    return facts


def _render_template(template: str, /, **values: Any) -> str:
    """The page that a template makes of ``values``. It is an error if the template needs another value."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("prefed.report"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _visible(value: Any) -> Any:
    """Jinja calls this with every value of a page before it escapes it. Macros give markup, which stays."""
    return printable_lines(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
