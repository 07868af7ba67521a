"""Definitions of metrics, and shares of pairs formatted with 95% intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefed.runs.finished_run import RunRecord
from prefed.train.metrics import mean_interval
from prefed.ui.pages.tables import Facts
from prefed.ui.pages.text_health import definitions

NUMBERS = {
    "margin": "mean implicit reward margin: the gain in log-probability of the chosen response over that of "
    "the rejected response, in nats.",
    "chosen_shift": "mean gain in log-probability of chosen responses over the base model, in nats. If it "
    "falls below 0, answers may loop or become nonsense, whatever the accuracies say.",
    "rejected_shift": "the same of rejected responses.",
    "chosen_shift_error": "standard error of the chosen shift over pairs, of its mean over clients.",
    "explicit_margin": "mean reward-head score of the chosen response minus that of the rejected response.",
    "dpo_loss": "mean DPO loss: −log σ(beta × margin).",
    "kto_loss": "mean KTO loss of thumbs, with equal weights.",
    "reward_up": "mean gain in log-probability over the base model of responses with a thumb up, in nats, "
    "over the clients that have any.",
    "reward_down": "the same of responses with a thumb down.",
    "choice_loss": "mean cross-entropy of a selector's two answer letters, over both orders of each pair.",
    "global_loss": "loss of the global objective, with the merge's weights of the clients.",
    "gradient_norm": "norm of the global objective's gradient, before clipping.",
    "kappa2": "κ², dissimilarity of the clients' gradients.",
    "zeta2": "ζ_g², variance of mini-batch gradients.",
    "paper_gap": "mean squared norm of the clients' mini-batch gradients, clipped at 1.",
    "consensus_before": "mean squared distance of the clients' models from their mean, before mixing.",
    "consensus_after": "mean squared distance of the clients' models from their mean, after mixing.",
    "rho": "ρ, contraction factor of mixing: 0 averages completely, 1 does not mix at all.",
    "edges": "pairs of clients that mixed.",
    "staleness": "mean age of the models that uploads started from, in rounds.",
    "epsilon": "ε of the clients' differential privacy up to the end of the round, at the δ of [privacy].",
    "active_units": "dimensions of the latent taste whose variance over clients is above 0.01.",
    "time": "simulated seconds since the start of the run.",
}
"""Metric that is not a share of pairs → definition."""
CHOICE_NUMBERS = {"margin": "mean score margin of the chosen response over the rejected response, in nats."}
"""Definitions that differ for selectors."""
THUMB_NUMBERS = {
    "margin": "mean gain in log-probability over the base model minus its mean for unrelated responses, "
    "negated for thumbs down, in nats."
}
"""Definitions that differ for thumbs."""
WORST_TENTH = ("worst tenth", "mean over the lowest tenth of the clients (at least one client).")


def meanings(run: RunRecord) -> Facts:
    """Definitions of the metrics on a run's page."""
    facts = [(figure.label, f"{figure.meaning}.") for figure in run.figures.values()]
    numbers = NUMBERS | (CHOICE_NUMBERS if "choice_loss" in run.summary else {})
    numbers |= THUMB_NUMBERS if "kto_loss" in run.summary else {}
    facts += [(name.replace("_", " "), numbers[name]) for name in run.own_figures if name in numbers]
    facts += definitions() if "text" in run.summary else []
    facts += [
        (
            "95% interval",
            "Wilson interval for a client; for a mean, Wilson intervals combined over the clients. It covers "
            "variation from resampling pairs of the same clients.",
        ),
        WORST_TENTH,
        ("Jain index", "(Σx)² / (n Σx²): 1 if all clients are equal, 1/n if one client has everything."),
    ]
    return facts


Interval = tuple[float, float]


def share(value: float, interval: Interval | None = None) -> str:
    """Format a share with its interval; a wide interval drops the decimal.

    >>> share(5 / 12, (0.193, 0.68)), share(0.7125, (0.7084, 0.7164)), share(0.25)
    ('42% (19% to 68%)', '71.2% (70.8% to 71.6%)', '25.0%')
    """
    if interval is None:
        return f"{value:.1%}"
    low, high = interval
    digits = 0 if high - low >= 0.02 else 1
    return f"{value:.{digits}%} ({low:.{digits}%} to {high:.{digits}%})"


def interval_of(run: RunRecord, client: str, value: float) -> Interval | None:
    """The interval of a client's share; ``None`` if its number of pairs is unknown."""
    pairs = run.pairs(client)
    return mean_interval({client: value}, {client: pairs}) if pairs else None


def interval_of_mean(run: RunRecord, figure: Mapping[str, Any]) -> Interval | None:
    """The interval of a mean over clients, see :func:`prefed.train.metrics.mean_interval`.

    ``None`` if a number of pairs is unknown, or the mean includes clients that are not listed.
    """
    pairs = {client: run.pairs(client) for client in figure["per_client"]}
    known = {client: count for client, count in pairs.items() if count}
    if "mean_alone" in figure or len(known) < len(pairs):
        return None
    return mean_interval(figure["per_client"], known)


def pairs_of(run: RunRecord, figure: Mapping[str, Any]) -> int | None:
    """The number of pairs behind a metric; ``None`` if unknown."""
    pairs = [run.pairs(client) for client in figure["per_client"]]
    known = [count for count in pairs if count is not None]
    return sum(known) if len(known) == len(pairs) and "mean_alone" not in figure else None
