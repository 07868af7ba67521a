"""Which pairs each step of a phase takes."""

from __future__ import annotations

from collections.abc import Iterator

from prefed.core import Key, Phase
from prefed.train.pair_cache import Rows

__all__ = ["batches"]


def batches(rows: Rows, phase: Phase, key: Key) -> Iterator[Rows]:
    """The rows of every step of ``phase``, shuffled epoch by epoch at ``key.at("epoch", epoch)``.

    An epoch's last batch may be smaller, and a client with fewer pairs than a batch takes them all in
    each step.

    >>> import numpy as np
    >>> from prefed.core import Objective, Optimizer
    >>> phase = Phase("train", ("a",), Objective("dpo"), Optimizer(), batch_size=2, steps=3)
    >>> [len(batch) for batch in batches(np.arange(5), phase, Key(1))]
    [2, 2, 1]
    """
    size = min(phase.batch_size * phase.accumulate, len(rows))
    steps, epoch = 0, 0
    while phase.epochs is None or epoch < phase.epochs:
        order = key.at("epoch", epoch).numpy().permutation(rows)
        for start in range(0, len(order), size):
            if phase.steps is not None and steps == phase.steps:
                return
            yield order[start : start + size]
            steps += 1
        epoch += 1
