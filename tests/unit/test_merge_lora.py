"""LoRA-aware rules: owners, what trains when, the product error, FedEx-LoRA, FlexLoRA."""

from __future__ import annotations

import pytest
import torch

from prefed.core import Entry, Key, Layout, Owner, Tensors
from prefed.merge.lora import (
    Module,
    flexlora,
    modules,
    needs,
    owner,
    product_error,
    restarted,
)
from prefed.merge.means_distances import weighted_mean

A = Entry("lora/0/attn.q/A", (2, 5), "lora", 0, "A")
B = Entry("lora/0/attn.q/B", (4, 2), "lora", 0, "B")
HEAD = Entry("head/W", (3,), "head")
W = Entry("residual/0/attn.q/W", (4, 5), "residual", 0)
LAYOUT = Layout((A, B, HEAD, W))
FACTORS = Layout((A, B))
ONE = Layout((Entry("lora/0/q/A", (1, 1), "lora", 0, "A"), Entry("lora/0/q/B", (1, 1), "lora", 0, "B")))


@pytest.mark.parametrize(
    ("rule", "owners"),
    [
        ("fedit", "shared shared shared frozen"),
        ("ffa", "frozen shared shared frozen"),
        ("rolora", "shared shared shared frozen"),
        ("fedsa", "shared personal shared frozen"),
        ("fedex", "shared shared shared shared"),
        ("flexlora", "shared shared shared frozen"),
        ("flora", "shared shared shared shared"),
    ],
)
def test_owners(rule: str, owners: str) -> None:
    """Of A, B, a head and a residual; only fedex and flora have use for the last."""
    assert [owner(rule, entry) for entry in LAYOUT.entries] == [Owner(name) for name in owners.split()]
    assert needs(rule) == ({"residual"} if rule in ("fedex", "flora") else set())


def test_modules_are_pairs() -> None:
    assert modules(LAYOUT) == (Module(A.name, B.name),)
    assert modules(Layout((A, HEAD))) == modules(Layout((B,))) == ()
    assert modules(LAYOUT)[0].residual == W.name


def rank_one(a: float, b: float) -> Tensors:
    """A 1 × 1 module of rank 1."""
    return Tensors(ONE, torch.tensor([a, b]))


def test_product_error_by_hand() -> None:
    """A, B = (1, 1) and (3, 5), equally: mean(B A) = 8, B̄ Ā = 3 · 2 = 6: 2/8. Weights ¾, ¼: mean(B A) =
    ¾ + 15/4 = 4.5, B̄ Ā = 2 · 1.5 = 3: 1.5/4.5."""
    values = [rank_one(1.0, 1.0), rank_one(3.0, 5.0)]
    assert product_error(values, [0.5, 0.5]) == 0.25
    assert product_error(values, [0.75, 0.25]) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "values",
    [
        [rank_one(2.0, 1.0), rank_one(2.0, 5.0)],
        [rank_one(2.0, 5.0), rank_one(3.0, 5.0)],
        [rank_one(0.1, 0.3)] * 3,
        [rank_one(1.0, 0.0), rank_one(2.0, 0.0)],
    ],
)
def test_product_error_is_zero_with_a_factor_in_common(values: list[Tensors]) -> None:
    """Σ w B_i A = B̄ A; zero products are no error either."""
    assert product_error(values, [1 / len(values)] * len(values)) == 0.0


def random(seed: int, count: int, spread: float = 1.0) -> list[Tensors]:
    draw = torch.Generator().manual_seed(seed)
    start = torch.randn(FACTORS.size, generator=draw)
    return [
        Tensors(FACTORS, start + spread * torch.randn(FACTORS.size, generator=draw)) for _ in range(count)
    ]


def mean_product(values: list[Tensors], weights: list[float]) -> torch.Tensor:
    """Σ w_i B_i A_i, one product at a time, in float64."""
    products = [w * v[B.name].double() @ v[A.name].double() for v, w in zip(values, weights, strict=True)]
    return torch.stack(products).sum(0)


@pytest.mark.parametrize("spread", [1e-3, 1.0])
@pytest.mark.parametrize("size", [4, 40])
def test_product_error_against_dense_products(spread: float, size: int) -> None:
    """On a module that three clients' ranks fill, where products are formed, and on one that they do not."""
    layout = Layout((Entry(A.name, (2, size), "lora", 0, "A"), Entry(B.name, (size, 2), "lora", 0, "B")))
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(layout.size, generator=draw)
    values = [Tensors(layout, start + spread * torch.randn(layout.size, generator=draw)) for _ in range(3)]
    weights = [0.5, 0.3, 0.2]
    mean = weighted_mean(values, weights)
    whole = mean_product(values, weights)
    dense = (whole - mean[B.name].double() @ mean[A.name].double()).norm() / whole.norm()
    assert product_error(values, weights) == pytest.approx(float(dense), rel=1e-6)


class TestFlexlora:
    def test_golden(self) -> None:
        """mean(B A) = ½ (1 · 2 + 3 · 4) = 7 of rank 1: B̂ = 7, Â = 1, nothing cut; signs by B̂ > 0."""
        factors, cut = flexlora([rank_one(2.0, 1.0), rank_one(4.0, 3.0)], [0.5, 0.5])
        assert factors["lora/0/q/B"].item() == pytest.approx(7.0)
        assert factors["lora/0/q/A"].item() == pytest.approx(1.0)
        assert cut == pytest.approx(0, abs=1e-7)
        factors, _ = flexlora([rank_one(-2.0, 1.0)], [1.0])
        assert (factors["lora/0/q/B"].item(), factors["lora/0/q/A"].item()) == (2.0, -1.0)

    @pytest.mark.parametrize("size", [4, 40])
    def test_best_approximation_of_its_rank(self, size: int) -> None:
        """By Eckart and Young nothing of rank 2 is closer to the mean product than its two leading singular
        triples. Three clients of rank 2 are merged by forming the product where 4 × 4, without at 40 × 40."""
        layout = Layout((Entry(A.name, (2, size), "lora", 0, "A"), Entry(B.name, (size, 2), "lora", 0, "B")))
        draw = torch.Generator().manual_seed(5)
        values = [Tensors(layout, torch.randn(layout.size, generator=draw).double()) for _ in range(3)]
        weights = [0.5, 0.3, 0.2]
        factors, cut = flexlora(values, weights)
        whole = mean_product(values, weights)
        left = whole - factors[B.name] @ factors[A.name]
        singular = torch.linalg.svdvals(whole)
        assert float(left.norm()) == pytest.approx(float(singular[2:].norm()), rel=1e-7)
        assert cut == pytest.approx(float(singular[2:].norm() / singular.norm()), rel=1e-9)

    @pytest.mark.parametrize("count", [1, 6])
    def test_factors_are_canonical(self, count: int) -> None:
        """Â has orthonormal rows; B̂'s columns are orthogonal, longest first, largest entry positive."""
        factors, _ = flexlora(random(6, count), [1 / count] * count)
        a, b = factors[A.name], factors[B.name]
        torch.testing.assert_close(a @ a.T, torch.eye(2), atol=1e-6, rtol=0)
        square = b.T @ b
        assert abs(float(square[0, 1])) < 1e-5
        assert square[0, 0] >= square[1, 1]
        assert (b.gather(0, b.abs().argmax(dim=0)[None]) > 0).all()

    def test_untrained_factors_stay_trainable(self) -> None:
        """Where every B is zero the product is zero, and B̂ = 0 still meets an Â of full rank."""
        values = [v.replace({B.name: torch.zeros(4, 2)}) for v in random(7, 2)]
        factors, cut = flexlora(values, [0.5, 0.5])
        assert cut == 0
        assert factors[B.name].abs().max() < 1e-12
        torch.testing.assert_close(factors[A.name] @ factors[A.name].T, torch.eye(2), atol=1e-6, rtol=0)

    def test_rank_above_the_module(self) -> None:
        """Rank 3 on a 2 × 2 module: the third factor is zero, the product is kept."""
        layout = Layout(
            (Entry("lora/0/q/A", (3, 2), "lora", 0, "A"), Entry("lora/0/q/B", (2, 3), "lora", 0, "B"))
        )
        draw = torch.Generator().manual_seed(8)
        value = Tensors(layout, torch.randn(12, generator=draw))
        factors, _ = flexlora([value], [1.0])
        a, b = factors["lora/0/q/A"], factors["lora/0/q/B"]
        assert (a.shape, b.shape) == ((3, 2), (2, 3))
        torch.testing.assert_close(b @ a, value["lora/0/q/B"] @ value["lora/0/q/A"])


def test_a_restarted_lora_is_drawn_as_a_new_one() -> None:
    """A ~ U(−1/√in, 1/√in), of variance 1/(3 in): of 10,000 draws the mean is within five of its deviations,
    1/(100 √(3 in)), of 0, and the variance within 5%, six of its deviations. B is 0."""
    a, b = Entry("lora/0/q/A", (100, 100), "lora", 0, "A"), Entry("lora/0/q/B", (4, 100), "lora", 0, "B")
    factors = restarted(Layout((a, b)), Key(0))
    drawn = factors[a.name]
    assert float(drawn.abs().max()) <= 0.1
    assert abs(float(drawn.mean())) < 5 * 0.01 / 300**0.5
    assert float(drawn.var()) == pytest.approx(1 / 300, rel=0.05)
    assert not factors[b.name].any()
