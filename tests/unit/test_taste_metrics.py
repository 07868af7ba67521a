"""Active units, KL by dimension, accuracy with others' tastes, the map: by hand and against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefed.merge.posteriors import active_units
from prefed.train.metrics.tastes import Transfer, kl_per_dimension, latent_map, transfer

SEEDS = st.integers(0, 2**16)


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def test_active_units_by_hand() -> None:
    """Variances of ±x are x²: 0.01 is not above 0.01, and a unit equal for all clients is not active."""
    means = np.array([[0.5, 0.09, 7.0, 0.11], [-0.5, -0.09, 7.0, -0.11]])
    assert active_units(means) == 2
    assert active_units(means, least=0.1) == 1
    assert active_units(means[:1]) == 0


@given(SEEDS)
def test_kl_against_torch(seed: int) -> None:
    means, log_variances = draw(seed, 6, 4), draw(seed + 1, 6, 4)
    own = torch.distributions.Normal(torch.from_numpy(means), torch.from_numpy(np.exp(log_variances / 2)))
    standard = torch.distributions.Normal(torch.zeros(4).double(), torch.ones(4).double())
    expected = torch.distributions.kl_divergence(own, standard).mean(0)
    np.testing.assert_allclose(kl_per_dimension(means, log_variances), expected.numpy(), atol=1e-12)


def test_transfer_by_hand() -> None:
    """Own (1 + 0.5 + 0.75)/3. Others: rows ½ and 0, ¾ and ¼, ¼ and ¼: (¼ + ½ + ¼)/3. The third client
    is alone with its taste: same taste (½ + ¾)/2; other tastes (0 + ¼ + ¼)/3."""
    table = [[1.0, 0.5, 0.0], [0.75, 0.5, 0.25], [0.25, 0.25, 0.75]]
    result = transfer(table, ["x", "x", "y"])
    assert result.own == pytest.approx(0.75)
    assert result.another == pytest.approx(1 / 3)
    assert result.same_taste == pytest.approx(0.625)
    assert result.other_taste == pytest.approx(1 / 6)
    assert transfer(table) == Transfer(result.own, result.another, None, None)
    assert transfer(table, ["x", "x", "x"]).other_taste is None
    assert transfer([[0.5]], ["x"]) == Transfer(0.5, None, None, None)


@pytest.mark.parametrize(("table", "tastes"), [([], None), ([[1.0, 0.5]], None), ([[1.0]], ["x", "y"])])
def test_transfer_refuses_other_tables(table: list[list[float]], tastes: list[str] | None) -> None:
    with pytest.raises(ValueError, match="a row and a column per client"):
        transfer(table, tastes)


@given(SEEDS)
def test_map_against_the_covariance(seed: int) -> None:
    """Along its axes the variances are the two largest eigenvalues of the covariance, and uncorrelated."""
    data = draw(seed, 9, 5) * [4, 3, 1, 1, 0.5]
    result, _ = latent_map(data)
    values = np.linalg.eigvalsh(np.cov(data.T, ddof=0))[::-1]
    np.testing.assert_allclose(np.cov(result.points.T, ddof=0), np.diag(values[:2]), atol=1e-9)
    np.testing.assert_allclose(result.shares, values[:2] / values.sum(), atol=1e-12)


@given(SEEDS)
def test_points_of_a_plane_keep_their_distances(seed: int) -> None:
    """Points that lie on a plane of 7 dimensions, and another point of that plane, are turned and no more."""
    plane = np.linalg.qr(draw(seed, 7, 2))[0].T
    data, more = draw(seed + 1, 6, 2) @ plane + 3, draw(seed + 2, 1, 2) @ plane + 3
    result, others = latent_map(data, more)
    np.testing.assert_allclose(
        np.linalg.norm(result.points - others, axis=1), np.linalg.norm(data - more, axis=1), atol=1e-9
    )
    again, _ = latent_map(data[::-1])
    np.testing.assert_allclose(again.points[::-1], result.points, atol=1e-9)


def test_map_of_one_client_and_of_equal_ones() -> None:
    for data in (np.ones((1, 4)), np.ones((3, 4)), np.ones((3, 1))):
        result, others = latent_map(data)
        assert result.points.shape == (len(data), 2)
        assert not result.points.any()
        assert result.shares == (0.0, 0.0)
        assert others.shape == (0, 2)
