"""The table of metrics: what each is called and means, what has it, and how it is printed.

A metric is an entry here and the function that computes it. Checks of clients' metrics, files, terminal,
pages, comparisons, sweeps and the docs follow from the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from prefed.core.plugins import Registry

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FOURFOLD, LONG = 4, 12
"""A sequence of tokens loops if it occurs this often in a row, or three times over at least LONG tokens, the
last of which may be missing."""

_SCORED = "share of pairs whose chosen response scores higher than the rejected one, by {by}"
_THUMBS = (
    "balanced accuracy over thumbs up and down, where a thumb up is predicted if the gain in log-probability "
    "over the base model exceeds "
)
_CORRECT = {
    "pairs": "share of pairs in which {by} assigns the chosen response the higher probability",
    "thumbs": f"{_THUMBS}the mean of unrelated responses, by {{by}}",
    "choices": _SCORED,
}
_BY = {
    "baseline_accuracy": {"": "the base model"},
    "shared_accuracy": {
        "personal": "the shared model without the client's own parts",
        "tastes": "the selector with the population's taste",
    },
    "preference_accuracy": {
        "": "the model",
        "personal": "the client's own model",
        "choices": "the client's selector (with clusters, the selector of its cluster)",
        "tastes": "the selector with the client's own taste",
    },
    "reward_accuracy": {"": "the same selector, whose score is its only reward"},
}
"""Metric → models of a run → the model that scores."""


class Printed(NamedTuple):
    """How a metric is printed.

    Attributes:
        unit: ``"share"`` of a client's pairs or of answers, or a word after the value.
        better: ``"high"`` or ``"low"``; empty if neither.
        form: format of a value.
        compared: whether it is a column of comparisons and sweeps.
    """

    unit: str
    better: str
    form: str
    compared: bool = False


COLUMN, SHARE = Printed("share", "high", ".3f", compared=True), Printed("share", "high", ".3f")
MARGIN, SHIFT, LOSS = Printed("nats", "high", ".3f"), Printed("nats", "", "+.1f"), Printed("", "low", ".4f")
MANY, FEW = Printed("share", "high", ".0%"), Printed("share", "low", ".0%")


@dataclass(frozen=True)
class MetricRow:
    """A row of :data:`TABLE`.

    Attributes:
        name: its key in files.
        label: heading of its column or curve.
        of: what has it: ``"all"`` models; those on a kind of feedback, such as ``"pairs"`` (``"some pairs"``:
            not every client); ``"several selectors"`` that vote; models with ``"reward heads"``;
            ``"personal models"``; or the ``"answers"`` to held-out prompts, or ``"rounds"``.
        meaning: one sentence without its full stop, or one for each kind of feedback: ``"pairs"``,
            ``"thumbs"``, ``"choices"``. ``{by}`` is the model that scores.
    """

    name: str
    label: str
    of: str
    printed: Printed
    meaning: str | Mapping[str, str]

    @property
    def share(self) -> bool:
        """Whether it is a share."""
        return self.printed.unit == "share"

    @property
    def of_pairs(self) -> bool:
        """Whether it is measured on a client's held-out pairs or thumbs."""
        return self.of not in ("answers", "rounds")

    def format(self, value: float) -> str:
        """Format a value.

        >>> [TABLE[name].format(0.8) for name in ("ends", "length", "surprise", "dpo_loss")]
        ['80%', '1', '0.80', '0.8000']
        """
        return format(value, self.printed.form)

    def cell(self, values: Mapping[str, Any]) -> str:
        """Format its value among those of a model."""
        return self.format(values[self.name])

    def named(self, values: Mapping[str, Any]) -> str:
        """Format its value with label and unit."""
        return f"{self.label} {self.cell(values)} {'' if self.share else self.printed.unit}".strip()


_ROWS: Mapping[tuple[str, str, str, Printed], str | Mapping[str, str]] = {
    ("baseline_accuracy", "before", "all", COLUMN): _CORRECT,
    ("shared_accuracy", "shared model", "personal models", COLUMN): _CORRECT,
    ("preference_accuracy", "preference accuracy", "all", COLUMN): _CORRECT,
    ("reward_accuracy", "reward accuracy", "all", COLUMN): {
        "pairs": "share of pairs on which training raised the log-probability of the chosen response by more "
        "than that of the rejected one, both compared with the base model",
        "thumbs": f"{_THUMBS}KTO's reference point",
        "choices": _SCORED,
    },
    ("normalized_accuracy", "normalised accuracy", "pairs", SHARE): "share of pairs in which the model "
    "assigns the chosen response the higher probability per token",
    ("combined_accuracy", "combined accuracy", "reward heads", COLUMN): "share of pairs whose chosen "
    "response has the higher sum of both margins, the model's own and the reward head's, weighted as in the "
    "loss",
    ("explicit_accuracy", "explicit accuracy", "reward heads", COLUMN): "share of pairs whose chosen "
    "response the reward head scores higher",
    ("agreement", "agreement", "reward heads", SHARE): "share of pairs on which the reward head favours the "
    "response that gained more log-probability",
    ("majority_accuracy", "majority accuracy", "several selectors", COLUMN): _SCORED.format(
        by="the majority of the selectors"
    ),
    ("margin", "margin", "all", MARGIN): {
        "pairs": "mean implicit reward margin: the gain in log-probability of the chosen response over that "
        "of the rejected response, in nats",
        "thumbs": "mean gain in log-probability over the base model minus its mean for unrelated responses, "
        "negated for thumbs down, in nats",
        "choices": "mean score margin of the chosen response over the rejected response, in nats",
    },
    ("chosen_shift", "chosen shift", "pairs", SHIFT): "mean gain in log-probability of chosen responses "
    "over the base model, in nats. If it falls below 0, answers may loop or become nonsense, whatever the "
    "accuracies say",
    ("rejected_shift", "rejected shift", "pairs", SHIFT): "the same of rejected responses",
    ("chosen_shift_error", "chosen shift error", "pairs", Printed("nats", "", ".1f")): "standard error of "
    "the chosen shift over pairs, of its mean over clients",
    ("explicit_margin", "explicit margin", "reward heads", Printed("", "high", ".3f")): "mean reward-head "
    "score of the chosen response minus that of the rejected response",
    ("dpo_loss", "DPO loss", "pairs", LOSS): "mean DPO loss: −log σ(beta × margin)",
    ("choice_loss", "cross-entropy", "choices", LOSS): "mean cross-entropy of a selector's two answer "
    "letters, over both orders of each pair",
    ("kto_loss", "KTO loss", "thumbs", LOSS): "mean KTO loss of thumbs, with equal weights",
    ("reward_up", "reward up", "some thumbs", SHIFT): "mean gain in log-probability over the base model of "
    "responses with a thumb up, in nats, over the clients that have any",
    ("reward_down", "reward down", "some thumbs", SHIFT): "the same of responses with a thumb down",
    ("ends", "answers that end", "answers", MANY): "share of answers that end before the limit of tokens",
    ("loops", "looping", "answers", FEW): "share of answers in which a sequence of tokens occurs "
    f"{FOURFOLD} times in a row, or three times if that is at least {LONG} tokens (the last of which may be "
    "missing), with or without the numbers in between",
    (
        "empty",
        "empty or echoing",
        "answers",
        FEW,
    ): "share of answers without a letter or a digit, or that repeat the prompt",
    ("distinct_2", "distinct-2", "answers", MANY): "different pairs of adjacent tokens as a share of all of "
    "an answer's, mean over answers",
    ("length", "length", "answers", Printed("tokens", "", ".0f")): "tokens in an answer, mean over answers",
    ("surprise", "surprise", "answers", Printed("nats", "", ".2f")): "−log p of an answer under the base "
    "model, in nats a token, the end included; median over answers",
}
"""Name, label, who has it and how it is printed → its meaning."""
_ROUNDS = {
    "global_loss": "loss of the global objective, with the merge's weights of the clients",
    "gradient_norm": "norm of the global objective's gradient, before clipping",
    "kappa2": "κ², dissimilarity of the clients' gradients",
    "zeta2": "ζ_g², variance of mini-batch gradients",
    "paper_gap": "mean squared norm of the clients' mini-batch gradients, clipped at 1",
    "consensus_before": "mean squared distance of the clients' models from their mean, before mixing",
    "consensus_after": "mean squared distance of the clients' models from their mean, after mixing",
    "rho": "ρ, contraction factor of mixing: 0 averages completely, 1 does not mix at all",
    "edges": "pairs of clients that mixed",
    "staleness": "mean age of the models that uploads started from, in rounds",
    "epsilon": "ε of the clients' differential privacy up to the end of the round, at the δ of [privacy]",
    "active_units": "dimensions of the latent taste whose variance over clients is above 0.01",
    "time": "simulated seconds since the start of the run",
}
"""Number in the records of rounds → its meaning."""
TABLE: Mapping[str, MetricRow] = {row[0]: MetricRow(*row, meaning) for row, meaning in _ROWS.items()} | {
    name: MetricRow(name, name.replace("_", " "), "rounds", Printed("", "", ".4g"), meaning)
    for name, meaning in _ROUNDS.items()
}
"""Name → metric, in display order. Others are those of ``[evaluate] metrics`` and of each selector."""

ACCURACY_METRICS = tuple(row.name for row in TABLE.values() if row.of_pairs and row.share)
"""Metrics that are shares of a client's pairs. Runs record them per client."""
MEAN_METRICS = tuple(row.name for row in TABLE.values() if row.of_pairs and not row.share)
"""All other metrics of pairs. Runs record only their mean over clients."""
COMPARED_METRICS = tuple(row.name for row in TABLE.values() if row.printed.compared)
"""The columns of comparisons and sweeps."""
REWARD_SHARES = tuple(row.name for row in TABLE.values() if row.of == "reward heads" and row.share)
"""Shares of pairs that only models with an explicit reward head have."""
TEXT_METRICS = tuple(row for row in TABLE.values() if row.of == "answers")
"""The metrics of answers."""
LEADING_METRICS = ("preference_accuracy", "reward_accuracy")
"""The metrics for comparing runs; the second is adjusted by the reference model."""
SHIFT_METRICS = ("chosen_shift", "rejected_shift")
"""Gains in log-probability over the base model: if that of chosen responses falls below 0, text may break."""
SHIFT_ERROR = "chosen_shift_error"
"""Standard error of the chosen shift over pairs; for several clients, of the mean over them."""


def lower_is_better(name: str) -> bool:
    """Return whether the highest value of a metric is the worst."""
    return name in TABLE and TABLE[name].printed.better == "low"


def words_of(name: str, content: Mapping[str, Any]) -> tuple[str, str]:
    """Return the label and the meaning of a metric.

    Args:
        content: a summary or an evaluation, which shows the run's models and feedback.

    >>> words_of("shared_accuracy", {"shared_accuracy": {}, "choice_loss": 0.5})[1].partition(", ")[2]
    "by the selector with the population's taste"
    >>> words_of("selector_2_accuracy", {})
    ('selector 2', 'share of pairs whose chosen response scores higher than the rejected one, by selector 2')
    """
    row, plain = TABLE.get(name), name.replace("_", " ")
    if row is None:
        label = plain.removesuffix(" accuracy")
        selector = label.removeprefix("selector ").isdecimal()
        return label, _SCORED.format(by=label) if selector else plain
    own = "shared_accuracy" in content
    feedback = "thumbs" if "kto_loss" in content else "choices" if "choice_loss" in content else "pairs"
    models = ("tastes" if own else feedback) if feedback == "choices" else "personal" if own else ""
    by = _BY.get(name, {})
    meaning = row.meaning if isinstance(row.meaning, str) else row.meaning[feedback]
    label = "own model" if own and name == LEADING_METRICS[0] else row.label
    return label, meaning.format(by=by.get(models, by.get("")))


@dataclass(frozen=True)
class Metric:
    """A metric from outside prefed: a share of a client's pairs.

    Attributes:
        name: its key in ``summary.json``.
        function: scores of n pairs (:class:`~prefed.train.metrics.PairScores`; of selectors,
            :class:`~prefed.train.metrics.ChoiceScores`) or thumbs
            (:class:`~prefed.train.metrics.ThumbScores`) → ``[n]``, each from 0 to 1.
    """

    name: str
    function: Callable[[Any], npt.NDArray[np.floating | np.bool_]]


METRICS: Registry[Metric] = Registry("metrics", {}, "METRIC", Metric)
"""Name in ``[evaluate] metrics`` → metric."""


def find_metrics(names: Sequence[str]) -> tuple[Metric, ...]:
    """Return the metrics of ``[evaluate] metrics``.

    Raises:
        ValueError: there is no such metric, or two metrics have the same name.
    """
    for name in names:
        if name not in METRICS:
            raise ValueError(f"no metric of your own is called {name!r}{METRICS.hint(name)}")
    found = tuple(METRICS[name] for name in names)
    taken = [*ACCURACY_METRICS, *MEAN_METRICS]
    for metric in found:
        if metric.name in taken or not metric.name.isidentifier():
            raise ValueError(f"{metric.name!r} cannot name a metric: choose another name for it")
        taken.append(metric.name)
    return found
