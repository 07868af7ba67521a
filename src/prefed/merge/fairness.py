"""Weights of the mean from the clients' losses, which favour the clients that the model serves worst.

The loss F_k of a client is the mean training loss of its visit, the number ``loss`` of its upload.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

from prefed.core import Plain, Round, Upload
from prefed.core.text import listed

LOSS = "loss"
MIXTURE = "mixture"
"""The value of a server's state with AFL's λ."""


def qffl_weights(uploads: Sequence[Upload], q: float) -> list[float]:
    """n_k F_k^q, up to a common factor: q-FFL (Li et al. 2020, arXiv:1905.10497), eq. 4.

    Steps with these weights descend on Σ n_k F_k^(q + 1). A client that may not send its loss counts with the
    mean loss of the others, and a negative loss as 0.

    >>> qffl_weights([Upload("a", 1, {}, {"loss": 4.0}), Upload("b", 3, {}, {"loss": 2.0})], 2)
    [1.0, 0.75]
    """
    losses = _losses(uploads)
    usual = sum(losses.values()) / max(len(losses), 1)
    values = [losses.get(upload.client, usual) for upload in uploads]
    most = max(values)
    return [
        upload.weight * (value / most if most else 1.0) ** q
        for upload, value in zip(uploads, values, strict=True)
    ]


def afl(
    mixture: Plain, uploads: Sequence[Upload], now: Round, lr: float
) -> tuple[list[float], dict[str, Plain]]:
    """The weights λ_k of the uploads, and λ ← Π(λ + η F): AFL (Mohri et al. 2019, arXiv:1902.00146), alg. 1.

    λ weights all clients, and descent on Σ λ_k F_k alternates with this ascent. Π is the Euclidean projection
    on the simplex. Clients without a loss in this round have F_k = 0. The weights are uniform if λ is 0 for
    every upload.

    Args:
        mixture: the last λ, client → weight; ``None`` before the first round, for λ_k = n_k / n.
        lr: η.

    >>> from prefed.core import Key
    >>> uploads = [Upload("a", 1, {}, {"loss": 1.0}), Upload("b", 1, {}, {"loss": 0.5})]
    >>> afl(None, uploads, Round(1, 9, Key(0), {"a": 1, "b": 1}), 0.5)
    ([0.5, 0.5], {'a': 0.625, 'b': 0.375})
    """
    pairs = sum(now.weights.values())
    start = {client: size / pairs for client, size in now.weights.items()}
    known = start if mixture is None else cast("dict[str, float]", mixture)
    if missing := [upload.client for upload in uploads if upload.client not in known]:
        raise ValueError(
            f"[merge] weights = 'afl': the server has no weight for {listed(missing)}; the clients of "
            "the run changed, so start a new run"
        )
    losses = _losses(uploads)
    raised = {client: weight + lr * losses.get(client, 0.0) for client, weight in known.items()}
    # Π ignores a common term. Less the largest, sums do not cancel if a client claims an enormous loss.
    top = max(raised.values())
    raised = {client: weight - top for client, weight in raised.items()}
    sums = itertools.accumulate(sorted(raised.values(), reverse=True))
    surplus = max((total - 1) / count for count, total in enumerate(sums, 1))
    weights = [known[upload.client] for upload in uploads]
    return (
        weights if any(weights) else [1.0] * len(uploads),
        {client: max(weight - surplus, 0.0) for client, weight in raised.items()},
    )


def _losses(uploads: Sequence[Upload]) -> dict[str, float]:
    return {upload.client: max(upload.scalars[LOSS], 0.0) for upload in uploads if LOSS in upload.scalars}
