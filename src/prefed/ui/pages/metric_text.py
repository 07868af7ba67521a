"""Metrics in words: what they mean, and shares of pairs with their 95% intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefed.runs.record import RunRecord
from prefed.train.metrics import mean_interval
from prefed.ui.pages.tables import Facts

NUMBERS = {
    "margin": "mean gain in likelihood of the chosen over that of the rejected response, in nats.",
    "explicit_margin": "mean of what the reward head gives the chosen response less the rejected one.",
    "dpo_loss": "mean of DPO's loss, −log of the sigmoid of beta times the margin.",
    "choice_loss": "mean cross-entropy over the two letters of a selector, both orders of each pair.",
    "global_loss": "loss of the global objective, which weighs clients as the merge does.",
    "gradient_norm": "length of its gradient, before any clip.",
    "kappa2": "κ², how much the gradients of clients differ.",
    "zeta2": "ζ_g², the variance of a mini-batch's gradient.",
    "paper_gap": "mean squared length, clipped at 1, of the gradients of clients' mini-batches.",
    "consensus_before": "mean squared distance of clients' models from their mean, before the mix.",
    "consensus_after": "the same after the mix.",
    "rho": "by how much a mix shrinks what parts the clients, at the least.",
    "edges": "pairs of clients that mixed.",
    "staleness": "how many rounds old uploads' models were, on the mean.",
    "epsilon": "ε of the clients' differential privacy by the end of a round, at the δ of [privacy].",
    "active_units": "dimensions of the latent taste that differ between clients: variance above 0.01.",
    "time": "simulated seconds since the run's start.",
}
"""Figures of an evaluation or of the round log that are no shares, and what they mean."""
CHOICE_NUMBERS = {"margin": "mean score of the chosen response over the rejected one, in nats."}
"""What they mean of a selector, where that is another thing."""
WORST_TENTH = ("worst tenth", "mean of the lowest tenth of the clients, at least one of them.")
"""A figure that several pages have."""


def meanings(run: RunRecord) -> Facts:
    """What each figure of a run's page means."""
    facts = [(figure.label, f"{figure.meaning}.") for figure in run.figures.values()]
    numbers = NUMBERS | (CHOICE_NUMBERS if "choice_loss" in run.summary else {})
    facts += [(name.replace("_", " "), numbers[name]) for name in run.own_figures if name in numbers]
    facts += [
        ("95% interval", "Wilson's, of a share of n pairs; of a mean, for other pairs of the same clients."),
        WORST_TENTH,
        ("Jain index", "(Σx)² / (n Σx²): 1 where all clients have the same, 1/n where one has everything."),
    ]
    return facts


Interval = tuple[float, float]


def share(value: float, interval: Interval | None = None) -> str:
    """A share with its interval, and with no more digits than that leaves it.

    >>> share(5 / 12, (0.193, 0.68)), share(0.7125, (0.7084, 0.7164)), share(0.25)
    ('42% (19% to 68%)', '71.2% (70.8% to 71.6%)', '25.0%')
    """
    if interval is None:
        return f"{value:.1%}"
    low, high = interval
    digits = 0 if high - low >= 0.02 else 1
    return f"{value:.{digits}%} ({low:.{digits}%} to {high:.{digits}%})"


def interval_of(run: RunRecord, client: str, value: float) -> Interval | None:
    """The interval of one client's share; ``None`` where the number of its pairs is not known."""
    pairs = run.pairs(client)
    return mean_interval({client: value}, {client: pairs}) if pairs else None


def interval_of_mean(run: RunRecord, figure: Mapping[str, Any]) -> Interval | None:
    """The interval of a mean over clients, see :func:`prefed.train.metrics.mean_interval`.

    ``None`` where the numbers of pairs are not known, or the mean is also over clients that are not listed.
    """
    pairs = {client: run.pairs(client) for client in figure["per_client"]}
    known = {client: count for client, count in pairs.items() if count}
    if "mean_alone" in figure or len(known) < len(pairs):
        return None
    return mean_interval(figure["per_client"], known)


def pairs_of(run: RunRecord, figure: Mapping[str, Any]) -> int | None:
    """How many pairs a figure is about; ``None`` where that is not known."""
    pairs = [run.pairs(client) for client in figure["per_client"]]
    known = [count for count in pairs if count is not None]
    return sum(known) if len(known) == len(pairs) and "mean_alone" not in figure else None
