"""What a run's page says of its clients: each before and after, how they are spread, what is their own."""

from __future__ import annotations

from functools import partial

from prefed.runs.figures import Profile
from prefed.runs.record import RunRecord
from prefed.train.metrics import spread
from prefed.ui.pages import curves, plots
from prefed.ui.pages.parts import ROWS, Plot, Table, number, plot
from prefed.ui.pages.shares import Interval, interval_of, interval_of_mean
from prefed.ui.pages.tables import SPREAD, UNSEEN, unseen_rows, unseen_words

WITH_INTERVALS = ("preference_accuracy", "reward_accuracy")
"""Columns of the clients' table that have intervals."""


def ends_plot(run: RunRecord) -> Plot:
    """Every client before and after."""
    ranking, accuracies = plots.ranking(run), run.figures["preference_accuracy"].values["per_client"]
    text = f"{len(ranking):,} clients; lowest {ranking[0]} with {accuracies[ranking[0]]:.1%}, "
    text += f"highest {ranking[-1]} with {accuracies[ranking[-1]]:.1%}."
    caption = f"Preference accuracy on each client's {run.split} pairs, lowest first."
    return plot(partial(plots.clients, run), text, caption)


def curves_plot(run: RunRecord) -> Plot | None:
    """The clients over rounds; ``None`` where there was one evaluation or none."""
    rounds, _ = run.curve("preference_accuracy")
    if len(rounds) < 2:
        return None
    if len(run.clients) > curves.FEW:
        caption = "The clients over rounds: the lowest and the highest, the middle half, and the median."
    else:
        caption = "Each client over rounds."
    after = run.figures["preference_accuracy"].values["per_client"].values()
    text = f"Shares of {len(run.clients):,} clients over {len(rounds):,} evaluations; at the end they lie "
    text += f"between {min(after):.1%} and {max(after):.1%}."
    return plot(partial(curves.clients, run), text, caption)


def fairness(run: RunRecord) -> Table:
    """How the figures are spread over clients."""
    figures = run.figures.values()
    spreads = [spread(figure.values) for figure in figures]
    intervals = [interval_of_mean(run, figure.values) for figure in figures]
    rows = [(name, [f"{of(s):.3f}" for s in spreads]) for name, of in SPREAD.items()]
    if any(intervals):
        rows.insert(1, ("95% interval of the mean", [_between(each, ".3f") for each in intervals]))
    return Table(
        "How the figures are spread; every client counts alike.",
        ["over clients", *(figure.label for figure in figures)],
        rows,
    )


def unseen(run: RunRecord) -> Table | None:
    """Clients that never took part; ``None`` where there are none."""
    accuracies = run.summary.get("unseen_accuracy")
    if not accuracies:
        return None
    words, first = unseen_words(accuracies)
    return Table(f"{words.capitalize()}.", [first, *UNSEEN], unseen_rows(accuracies))


def clients_table(run: RunRecord) -> Table:
    """Every client's figures, the lowest first."""
    ranking, figures = plots.ranking(run), run.figures
    clusters = run.groupings[-1].clusters if run.groupings else ()
    own = {client: f"selector-{u}" for u, clients in enumerate(clusters) for client in clients}
    rows = []
    for client in ranking[:ROWS]:
        pairs = run.pairs(client)
        values = [_cell(run, client, name) for name in figures]
        cluster = [own.get(client, "")] if own else []
        rows.append((client, ["" if pairs is None else f"{pairs:,}", *cluster, *values]))
    more = f"The {ROWS:,} lowest of {len(ranking):,}; the others are in summary.json. "
    caption = f"{more if len(ranking) > ROWS else ''}Lowest first; in brackets the 95% interval of a share."
    labels = [figure.label for figure in figures.values()]
    return Table(caption, ["client", "pairs", *(["cluster"] if own else []), *labels], rows)


def _cell(run: RunRecord, client: str, name: str) -> str:
    value = run.figures[name].values["per_client"].get(client)
    interval = interval_of(run, client, value) if value is not None and name in WITH_INTERVALS else None
    return number(value) + (f" ({_between(interval, '.2f')})" if interval else "")


def _between(interval: Interval | None, form: str) -> str:
    return f"{interval[0]:{form}} to {interval[1]:{form}}" if interval else ""


def blocks(run: RunRecord) -> list[tuple[str, Plot | str, Table]]:
    """What clients personalise, figure by figure: its heading, its plot and its table.

    Where every client has the same in every block, a line takes the place of the plot.
    """
    return [(profile.label.capitalize(), *_block(run, profile)) for profile in run.profiles.values()]


def _block(run: RunRecord, profile: Profile) -> tuple[Plot | str, Table]:
    label, clients = profile.label.capitalize(), len(profile.clients)
    means = [f"{mean:.2f}" for mean in profile.means]
    text = ", ".join(f"block {block} {mean}" for block, mean in zip(profile.blocks, means, strict=True))
    low, high = profile.range
    told = (
        f"{label}: {profile.meaning}. They are read from clients' private "
        "states and rounded to two digits: whoever has this page learns so much of each client named "
        "here. Clients that never took part have none."
    )
    rows = [("mean", means)]
    rows += [
        (client, ["" if value != value else f"{value:.2f}" for value in values])
        for client, values in zip(profile.clients[:ROWS], profile.values, strict=False)
    ]
    more = f" The first {ROWS:,} clients; {clients - ROWS:,} more are in summary.json."
    more = more if clients > ROWS else ""
    table = Table(f"By block.{more}", ["client", *map(str, profile.blocks)], rows)
    if low == high:
        return f"{label}: {low:.2f} in every block of every client. {told}", table
    caption = f"From {low:.2f} to {high:.2f}, which the colours or the axis span. {told}"
    draw = partial(plots.blocks, run, profile.name)
    return plot(draw, f"{label}, means over {clients:,} clients: {text}.", caption), table
