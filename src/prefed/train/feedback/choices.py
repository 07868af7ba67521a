"""Choices: a selector's log-odds that one of two responses is the better one, asked in both orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefed.core.lazy import F, np, torch
from prefed.train.feedback.kind import Array, Feedback, LossOutput

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from prefed.train.forward_passes import PairModel
    from prefed.train.pair_cache import Rows


@dataclass(frozen=True)
class ChoiceBatch:
    """B pairs, each presented in both orders.

    Attributes:
        orders: ``[B, 2]`` log-odds, in nats, that the alphabetically first response is better, by order.
        sign: ``[B]`` +1 if the first response is the chosen one, else −1.

    Raises:
        ValueError: the shapes do not match.
    """

    orders: Tensor
    sign: Tensor

    def __post_init__(self) -> None:
        if self.orders.shape != (len(self), 2) or self.sign.shape != (len(self),):
            shapes = f"{tuple(self.orders.shape)} and {tuple(self.sign.shape)}"
            raise ValueError(f"orders and sign have shapes {shapes}; expected (B, 2) and (B,)")

    def __len__(self) -> int:
        return self.sign.numel()


def choice(batch: ChoiceBatch) -> LossOutput:
    """Cross-entropy over the two letters, averaged over both orders: FedBiscuit (ICLR 2025), eq. 3.

    A softmax over two logits is σ of their difference, so the loss of an order is −log σ(log-odds of the
    chosen response). Metrics: ``accuracy``, the share of pairs whose mean log-odds favour the chosen response
    (ties count as wrong), and ``margin``, the mean of the mean log-odds.

    >>> import torch
    >>> orders = torch.tensor([[0.0, 0.0], [-2.0, 0.0]])
    >>> loss, metrics = choice(ChoiceBatch(orders, torch.tensor([1.0, -1.0])))
    >>> loss, metrics["accuracy"].item(), metrics["margin"].item()
    (tensor([0.6931, 0.4100]), 0.5, 0.5)
    """
    chosen = batch.sign[:, None] * batch.orders
    margin = chosen.detach().mean(1)
    metrics = {"accuracy": (margin > 0).to(margin.dtype).mean(), "margin": margin.mean()}
    return -F.logsigmoid(chosen).mean(1), metrics


@dataclass(frozen=True)
class ChoiceScores:
    """Log-odds, in nats, that a selector assigns to the chosen response of n pairs.

    Attributes:
        orders: ``[n, 2]``, one column per presentation order.
        baseline: ``[n, 2]``, the same for the base model.
    """

    orders: npt.NDArray[np.float32]
    baseline: npt.NDArray[np.float32]

    def metrics(self, beta: float = 0.1, weight: float = 1.0, jury: Sequence[Any] = ()) -> dict[str, float]:
        """Compute the metrics of one client for a selector (FedBiscuit, ICLR 2025).

        The score of a pair is the mean of its log-odds over both presentation orders, so a selector that
        always picks the same letter scores 0.

        Args:
            jury: scores of several selectors for the same pairs.

        Returns:
            Shares of pairs:

            - ``preference_accuracy`` and ``reward_accuracy``, which are equal: the score is above 0.
            - ``baseline_accuracy``: the score of the base model is above 0.
            - with a jury, the metrics of :func:`jury_metrics`.

            Means over pairs: ``margin`` is the score in nats, ``choice_loss`` the cross-entropy over the two
                letters, averaged over both orders.

            Ties, and pairs whose log-odds are not finite, count as wrong. ``not_finite`` is the number of the
            latter, if there are any.

        Raises:
            ValueError: there are no pairs.

        >>> pairs = ChoiceScores(np.array([[3.0, -1.0], [1.0, -2.0]]), np.zeros((2, 2)))
        >>> metrics = pairs.metrics()
        >>> metrics["preference_accuracy"], metrics["baseline_accuracy"], metrics["margin"]
        (0.5, 0.0, 0.25)
        """
        if len(self.orders) == 0:
            raise ValueError("no pairs to measure")
        orders = self.orders.astype(np.float64)
        finite = np.isfinite(orders).all(1)
        with np.errstate(invalid="ignore"):
            margin, losses = orders.mean(1), np.logaddexp(0.0, -orders)
        correct = finite & (margin > 0)
        metrics: dict[str, npt.NDArray[np.float64 | np.bool_]] = {
            "preference_accuracy": correct,
            "reward_accuracy": correct,
            "baseline_accuracy": self.baseline.astype(np.float64).mean(1) > 0,
        }
        metrics |= {"margin": margin, "choice_loss": losses}
        means = {name: float(values.mean()) for name, values in metrics.items()}
        means |= jury_metrics(jury) if jury else {}
        broken = int((~finite).sum())
        return means | ({"not_finite": broken} if broken else {})


def jury_metrics(jury: Sequence[ChoiceScores]) -> dict[str, float]:
    """Compute the metrics of U ≥ 1 selectors that vote on one client's pairs.

    Returns:
        Shares of pairs. ``majority_accuracy``: more selectors score above 0 than below; the sum of the scores
            decides an even vote. ``selector_0_accuracy`` and so on: this selector scores above 0.

        Ties count as wrong. A selector whose log-odds for a pair are not finite does not vote and counts as
        wrong.

    >>> pairs = np.array([[[1.0, 1.0], [1.0, 1.0]], [[2.0, 0.0], [-9.0, 1.0]], [[3.0, -3.0], [2.0, -1.0]]])
    >>> jury_metrics([ChoiceScores(orders, orders) for orders in pairs])["majority_accuracy"]
    1.0
    """
    votes = np.stack([_votes(each.orders) for each in jury])
    single = (votes > 0).mean(1).tolist()
    return {
        "majority_accuracy": float((majority(votes) > 0).mean()),
        **dict(zip(selector_metrics(len(jury)), single, strict=True)),
    }


def selector_metrics(count: int) -> tuple[str, ...]:
    """Return the names of the individual accuracies of ``count`` selectors.

    >>> selector_metrics(2)
    ('selector_0_accuracy', 'selector_1_accuracy')
    """
    return tuple(f"selector_{u}_accuracy" for u in range(count))


def majority(scores: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Return the vote of U selectors on n pairs.

    Args:
        scores: ``[U, n]`` log-odds; 0 is an abstention.

    Returns:
        ``[n]``: votes for minus votes against, or the sum of the scores if they are even. 0 is a tie.

    >>> majority(np.array([[0.1, 2.0, 1.0], [0.2, -1.0, -1.0], [-9.0, 0.0, 0.0]]))
    array([1., 1., 0.])
    """
    scores = scores.astype(np.float64)
    votes = np.sign(scores).sum(0)
    result: npt.NDArray[np.float64] = np.where(votes != 0, votes, scores.sum(0))
    return result


def _votes(orders: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return ``[n]`` scores; 0 if the log-odds are not finite."""
    finite = np.isfinite(orders).all(1, keepdims=True)
    result: npt.NDArray[np.float64] = np.where(finite, orders.astype(np.float64), 0.0).mean(1)
    return result


def _batch(model: PairModel, rows: Rows, outputs: Tensor, reference: Array | None, loss: Any) -> ChoiceBatch:
    return ChoiceBatch(outputs, torch.from_numpy(model.signs(rows)).to(outputs.device))


def _scores(model: PairModel, rows: Rows, outputs: Array, reference: Array) -> ChoiceScores:
    signs = model.signs(rows)[:, None]
    return ChoiceScores(orders=signs * outputs, baseline=signs * reference)


CHOICES = Feedback(
    "choices",
    "use objective 'choice'",
    lambda tokens, rows: np.full(len(rows), tokens.letters is not None),
    _batch,
    _scores,
    stop_loss="choice_loss",
)
"""Two responses, shown to a selector in both orders."""
