"""The pieces of a variational selector together: two opposite tastes on the same pairs."""

from __future__ import annotations

import pytest
import torch

from prefed.core import Key
from prefed.models.config import VariationalSettings
from prefed.models.tastes import CAP, PROTOTYPES, VARIATIONAL, VariationalSelector
from prefed.train.losses.tastes import Gaussian, orthogonality, prototype_pull, standard_kl

PAIRS, DIM, CONTEXT = 96, 8, 8


def accuracies(decoder: str) -> tuple[float, float]:
    """Train on two clients that differ in every label; accuracy on the last third with own and the other's z.

    The first response is the better one for client 0 where its first coordinate is larger. The contexts are
    drawn from the training pairs outside the batch.
    """
    model = VariationalSelector(
        VariationalSettings(latent=4, widths=(32, 16), dropout=0.0, decoder=decoder), DIM
    )
    starts = model.starts(Key(0), capped=True)
    weights = {name: start.requires_grad_() for name, start in starts[VARIATIONAL].items()}
    prototypes = starts[PROTOTYPES][PROTOTYPES].requires_grad_()
    optimizer = torch.optim.AdamW([*weights.values(), prototypes], lr=3e-3)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(PAIRS, 2, DIM, generator=draw)
    first = (hidden[:, 0, 0] - hidden[:, 1, 0]).sign()
    labels, base, train = torch.stack([first, -first]), torch.zeros(PAIRS, 2), 2 * PAIRS // 3
    for step in range(120):
        client = step % 2
        signs = labels[client]
        rows = torch.randperm(train, generator=draw)
        context, batch = rows[:CONTEXT], rows[CONTEXT : CONTEXT + 32]
        features = model.pair_features(weights, hidden[context], signs[context])
        q = Gaussian(*model.posterior(weights, features, cap=CAP))
        z = q.sample(torch.randn(4, generator=draw))
        odds = model.log_odds(weights, hidden[batch], z, base[batch])
        loss = torch.nn.functional.softplus(-signs[batch, None] * odds).mean() + 0.1 * standard_kl(q)
        loss = loss + prototype_pull(z, prototypes[client]) + 0.1 * orthogonality(prototypes, 5.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        contexts = (model.pair_features(weights, hidden[:CONTEXT], s[:CONTEXT]) for s in labels)
        own = [model.posterior(weights, context)[0] for context in contexts]
        judged = slice(train, PAIRS)
        right = [
            [
                (signs[judged] * model.log_odds(weights, hidden[judged], z, base[judged]).mean(1) > 1e-4)
                for z in own
            ]
            for signs in labels
        ]
    table = torch.stack([torch.stack(row) for row in right]).double().mean(-1)
    return float(table.diagonal().mean()), float((table.sum() - table.trace()) / 2)


@pytest.mark.parametrize("decoder", ["conditioned", "residual"])
def test_only_a_conditioned_reward_serves_opposite_tastes(decoder: str) -> None:
    """One set of weights orders pairs both ways, by z alone: own z is right where the other's is wrong, so
    the two accuracies sum to at most 1. An additive z, the paper's letter, leaves the mean of both orders at
    the base's log-odds, which are 0 here: a tie, and ties are wrong."""
    own, another = accuracies(decoder)
    if decoder == "conditioned":
        assert own > 0.9
        assert another < 0.1
    else:
        assert (own, another) == (0, 0)
