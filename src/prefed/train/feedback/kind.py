"""A kind of feedback: which rows it is, how they pass through a model, what losses and metrics read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from prefed.data import TokenSet
    from prefed.train.forward_passes import PairModel
    from prefed.train.pair_cache import Rows

Array: TypeAlias = Any
"""A NumPy array."""
LossOutput: TypeAlias = "tuple[Tensor, dict[str, Tensor]]"
"""Losses per row ``[B]`` with gradient, and detached scalar metrics by name."""


class Scores(Protocol):
    """What metrics read of some rows of one kind."""

    def metrics(self, beta: float, weight: float = 1.0, jury: Sequence[Any] = ()) -> dict[str, float]:
        """Compute the metrics of one client; each kind uses the arguments that it needs.

        Args:
            beta: β of the DPO or KTO loss.
            weight: weight of the explicit margin of a reward head relative to the implicit one.
            jury: scores of the same rows by several models that vote.
        """


@dataclass(frozen=True, eq=False)
class Feedback:
    """A kind of feedback. Each objective declares its kind: see :class:`prefed.train.losses.PairLoss`.

    ``[n]`` rows pass through a model in the form of ``together``. Its outputs have ``[n, 2]`` columns, or
    ``[n, 4]`` with rewards: see :class:`~prefed.train.padded.PairForward`. The reference has two.

    Attributes:
        name: the rows, for messages.
        remedy: how to train on such rows, for messages.
        owns: which rows of a token set are of this kind, ``[n]`` bool.
        batch: model, rows, outputs, outputs of the reference (``None`` if the loss needs none), and loss →
            input of the loss.
        scores: model, ``[n]`` rows, outputs and outputs of the reference → what metrics read.
        stop_loss: the metric that ``[stop] metric = "loss"`` stands for; empty if there is none.
        pairing: rows of a batch → ``[n, 2]`` rows, the second of which lends its response to the first;
            ``None``: each row passes by itself.
    """

    name: str
    remedy: str
    owns: Callable[[TokenSet, Rows], Array]
    batch: Callable[[PairModel, Rows, Tensor, Array | None, Any], Any]
    scores: Callable[[PairModel, Rows, Array, Array], Scores]
    stop_loss: str = ""
    pairing: Callable[[Rows], Rows] | None = None

    def together(self, rows: Rows) -> Rows:
        """Return the rows of a batch as they pass through a model, ``[n]`` or ``[n, 2]``."""
        return rows if self.pairing is None else self.pairing(rows)
