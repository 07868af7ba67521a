"""Means, robust rules, server optimisers, alignment, attention: numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from pydantic import ValidationError

from prefed.core import Entry, Key, Layout, Round, Tensors, Upload
from prefed.merge import (
    Aggregator,
    BadUpload,
    MergeConfig,
    ServerOptimizer,
    alignment_weights,
    check_upload,
    distance_attention,
    similarity_attention,
    sort_uploads,
)
from prefed.merge.optimizers import slots, step
from prefed.merge.rules import clip_norms, coordinate_median, krum_scores, multi_krum, trimmed_mean


def vector(*numbers: float, dtype: torch.dtype = torch.float32) -> Tensors:
    return Tensors(Layout((Entry("x", (len(numbers),), "lora"),)), torch.tensor(numbers, dtype=dtype))


def reply(client: str, weight: float, *numbers: float, sent_at: int = 1) -> Upload:
    return Upload(client, weight, {"model": vector(*numbers)}, sent_at=sent_at)


def numbers(tensors: Tensors) -> list[float]:
    return tensors.flat.tolist()


def weighted_mean(replies: list[Upload], by: str = "samples") -> Tensors:
    """What a server that starts from zero makes of ``replies``."""
    layout = replies[0].tensors["model"].layout
    aggregator = Aggregator(MergeConfig(weights=by), layout, 1.0)
    now = Round(1, 1, Key(0), {reply.client: reply.weight for reply in replies})
    return aggregator.merge(aggregator.init(Tensors.zeros(layout)), replies, now)[0].tensors["model"]


def mass_mean(current: Tensors, replies: list[Upload], total: float) -> Tensors:
    """What a server at ``current`` makes of them where all clients together hold ``total`` pairs."""
    aggregator = Aggregator(MergeConfig(weights="mass"), current.layout, 1.0)
    now = Round(1, 1, Key(0), {"all": total})
    return aggregator.merge(aggregator.init(current), replies, now)[0].tensors["model"]


def mixtures(rows: Mapping[str, Mapping[str, float]], models: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """Each receiver's mixture."""
    aggregator = Aggregator(MergeConfig(), next(iter(models.values())).layout, 1.0)
    return {i: aggregator.blend([models[j] for j in row], list(row.values())) for i, row in rows.items()}


class TestMeans:
    def test_by_samples_and_uniform(self) -> None:
        """(30 · 1 + 10 · 5) / 40 = 2; (1 + 5) / 2 = 3."""
        replies = [reply("b", 30, 1.0), reply("a", 10, 5.0)]
        assert numbers(weighted_mean(replies)) == [2.0]
        assert numbers(weighted_mean(replies, by="uniform")) == [3.0]

    def test_mass(self) -> None:
        """p = 2/8 and 1/8: (1 − 3/8) · 8 + 2/8 · 4 + 1/8 · 16 = 5 + 1 + 2."""
        replies = [reply("a", 2, 4.0), reply("b", 1, 16.0)]
        assert numbers(mass_mean(vector(8.0), replies, total=8)) == [8.0]
        assert numbers(mass_mean(vector(0.0), replies, total=8)) == [3.0]

    def test_mass_of_everybody_is_the_mean(self) -> None:
        replies = [reply("a", 2, 4.0), reply("b", 6, 16.0)]
        assert numbers(mass_mean(vector(99.0), replies, total=8)) == numbers(weighted_mean(replies))

    def test_mass_above_the_whole_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"the uploads report 1\.5 times the data of all clients"):
            mass_mean(vector(0.0), [reply("a", 3, 1.0)], total=2)

    def test_an_outlier_of_no_weight_does_not_cost_digits(self) -> None:
        """0 · 1e30 + ½ · 1 + ½ · 3 = 2, though 1e30 has no digits to spare at 1."""
        replies = [reply("a", 0, 1e30), reply("b", 1, 1.0), reply("c", 1, 3.0)]
        assert numbers(weighted_mean(replies)) == [2.0]

    def test_order_and_repeats(self) -> None:
        late = [reply("b", 1, 0.0), reply("a", 1, 0.0, sent_at=2), reply("a", 1, 0.0)]
        assert [(u.client, u.sent_at) for u in sort_uploads(late)] == [("a", 1), ("a", 2), ("b", 1)]
        with pytest.raises(ValueError, match="client 'a' sent two uploads"):
            sort_uploads([*late, reply("a", 2, 1.0)])

    def test_weights_that_cannot_serve(self) -> None:
        with pytest.raises(ValueError, match="not all 0"):
            weighted_mean([reply("a", 0, 1.0)])
        with pytest.raises(ValueError, match="at least 0"):
            weighted_mean([reply("a", -1, 1.0), reply("b", 3, 1.0)])


class TestRobust:
    def test_median(self) -> None:
        """Odd: the middle one. Even: the mean of the two middle ones, (1 + 4) / 2."""
        values = [vector(9.0, 1.0), vector(1.0, 4.0), vector(5.0, -7.0)]
        assert numbers(coordinate_median(values)) == [5.0, 1.0]
        assert numbers(coordinate_median([*values, vector(5.0, 8.0)])) == [5.0, 2.5]

    def test_trimmed_mean(self) -> None:
        """⌈0.2 · 4⌉ = 1 off either end: (2 + 4) / 2; of 5 also 1: (2 + 4 + 9) / 3; of 6 two: (4 + 5) / 2."""
        values = [vector(x) for x in (100.0, 2.0, 4.0, -50.0)]
        assert numbers(trimmed_mean(values, 0.2)) == [3.0]
        assert numbers(trimmed_mean([*values, vector(9.0)], 0.2)) == [5.0]
        assert numbers(trimmed_mean([*values, vector(5.0), vector(6.0)], 0.2)) == [4.5]

    def test_krum(self) -> None:
        """0, 1, 2, 3 and 10 on a line with f = 1: two nearest others each. Squared distances:
        0: 1 + 4; 1: 1 + 1; 2: 1 + 1; 3: 1 + 4; 10: 49 + 64. Of the two best the first wins; without 10, the
        n − f = 4 best are the rest."""
        values = [vector(x) for x in (0.0, 1.0, 2.0, 3.0, 10.0)]
        torch.testing.assert_close(
            krum_scores(values, vector(0.5), 1), torch.tensor([5.0, 2.0, 2.0, 5.0, 113.0]).double()
        )
        assert multi_krum(values, vector(0.5), 1, keep=1) == [1]
        assert multi_krum(values, vector(0.5), 1) == [0, 1, 2, 3]
        assert multi_krum(values, vector(0.5), 1, keep=2) == [1, 2]

    def test_krum_far_outlier_costs_no_digits(self) -> None:
        """The same in steps of 1e-3 next to an upload at 1e20, whose square has no digit left for 1e-6."""
        values = [vector(1e20), *(vector(x * 1e-3) for x in (0.0, 1.0, 2.0, 4.0))]
        assert multi_krum(values, vector(0.0), 1, keep=1) == [2]

    def test_krum_far_from_zero(self) -> None:
        """The same again as steps of 1e-6 on a model at 1e6: distances of 1e-12 next to squares of 1e12."""
        values = [vector(1e6 + x * 1e-6, dtype=torch.float64) for x in (9.0, 0.0, 1.0, 2.0, 4.0)]
        assert multi_krum(values, vector(1e6, dtype=torch.float64), 1, keep=1) == [2]

    def test_clip(self) -> None:
        """From (1, 1): an update of length 5 becomes 1/5 of itself; one of length 1 stays untouched."""
        values = clip_norms([vector(4.0, 5.0), vector(1.0, 2.0)], vector(1.0, 1.0), 1.0)
        torch.testing.assert_close(values[0].flat, torch.tensor([1.6, 1.8]))
        assert numbers(values[1]) == [1.0, 2.0]

    def test_clip_at_the_median(self) -> None:
        """Lengths 1, 3 and 1000: the bound is 3. Of 1 and 1000, the lower: half the clients may be liars."""
        values = clip_norms([vector(1.0), vector(1000.0), vector(-3.0)], vector(0.0))
        torch.testing.assert_close(torch.cat([v.flat for v in values]), torch.tensor([1.0, 3.0, -3.0]))
        values = clip_norms([vector(1.0), vector(1000.0)], vector(0.0))
        torch.testing.assert_close(torch.cat([v.flat for v in values]), torch.tensor([1.0, 1.0]))

    @pytest.mark.parametrize(
        ("rule", "least"),
        [
            (lambda values: coordinate_median(values, liars=2), 5),
            (lambda values: multi_krum(values, values[0], liars=2), 7),
            (lambda values: trimmed_mean(values, 0.4), 3),
        ],
    )
    def test_too_few(self, rule: object, least: int) -> None:
        """The median needs 2 f + 1, Krum 2 f + 3; ⌈0.4 · 3⌉ = 2 off either end of 3 is all there is."""
        values = [vector(float(k)) for k in range(least)]
        assert callable(rule)
        if least > 3:
            rule(values)
            with pytest.raises(
                ValueError, match=f"needs at least {least} uploads to tolerate liars = 2, got {least - 1}"
            ):
                rule(values[:-1])
        else:
            with pytest.raises(ValueError, match="trimming 2 of 3 uploads at each end leaves none"):
                rule(values)


DELTAS = [0.3, -1.2, 0.05, 2.0]


class TestOptimizers:
    def run(self, name: str, deltas: list[float], **settings: float) -> list[float]:
        """Positions after each pseudo-gradient, from 1.0, in float64."""
        config = ServerOptimizer.model_validate({"name": name, **settings})
        at = vector(1.0, dtype=torch.float64)
        memory, path = slots(config, at), []
        for delta in deltas:
            at, memory = step(config, at, at + delta, memory)
            path.append(at.flat.item())
        return path

    def of_torch(self, weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> list[float]:
        """Where a gradient of −Δ takes a weight."""
        path = []
        for delta in DELTAS:
            weight.grad = torch.tensor([-delta], dtype=torch.float64)
            optimizer.step()
            path.append(weight.item())
        return path

    def test_fedadam(self) -> None:
        """τ = 1: v = ½ · 1 + ½ · 3² = 5, m = ½ · 3; φ = 1 + 1.5 / (√5 + 1). Then Δ = 0: m = 0.75, v = 2.5."""
        settings = {"lr": 1.0, "momentum": 0.5, "beta2": 0.5, "tau": 1.0}
        first = 1 + 1.5 / (math.sqrt(5) + 1)
        expected = [first, first + 0.75 / (math.sqrt(2.5) + 1)]
        assert self.run("fedadam", [3.0, 0.0], **settings) == pytest.approx(expected)

    def test_fedyogi(self) -> None:
        """τ = 1: v = 1 − ½ · 9 · sign(1 − 9) = 5.5; then Δ² = 1: v = 5.5 − ½ · 1 · sign(4.5) = 5."""
        settings = {"lr": 1.0, "momentum": 0.0, "beta2": 0.5, "tau": 1.0}
        first = 1 + 3 / (math.sqrt(5.5) + 1)
        expected = [first, first + 1 / (math.sqrt(5) + 1)]
        assert self.run("fedyogi", [3.0, 1.0], **settings) == pytest.approx(expected)

    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_fedavgm_is_torch_sgd(self, momentum: float) -> None:
        """SGD with momentum whose gradient is −Δ."""
        weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
        path = self.of_torch(weight, torch.optim.SGD([weight], lr=0.7, momentum=momentum))
        assert self.run("fedavgm", DELTAS, lr=0.7, momentum=momentum) == pytest.approx(path, abs=1e-12)

    def test_fedadagrad_is_torch_adagrad(self) -> None:
        """Adagrad from an accumulator of τ² with ε = τ; without momentum, as torch has it."""
        weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
        optimizer = torch.optim.Adagrad([weight], lr=0.7, initial_accumulator_value=0.01**2, eps=0.01)
        path = self.of_torch(weight, optimizer)
        ours = self.run("fedadagrad", DELTAS, lr=0.7, momentum=0.0, tau=0.01)
        assert ours == pytest.approx(path, abs=1e-12)

    def test_fedadam_is_torch_rmsprop_without_momentum(self) -> None:
        weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
        optimizer = torch.optim.RMSprop([weight], lr=0.7, alpha=0.9, eps=0.01)
        weight.grad = torch.zeros_like(weight)
        optimizer.step()  # creates the state, which torch starts from 0 and the paper from τ²
        optimizer.state[weight]["square_avg"].fill_(0.01**2)
        path = self.of_torch(weight, optimizer)
        ours = self.run("fedadam", DELTAS, lr=0.7, momentum=0.0, beta2=0.9, tau=0.01)
        assert ours == pytest.approx(path, abs=1e-12)


class TestAlignment:
    def test_golden(self) -> None:
        """Δ = (1, 0), (0, 1): Δ̄ = (½, ½), both cosines 1/√2, so halves. With (3, 0) for the first,
        Δ̄ = (1.5, ½): cosines 3/√10 and 1/√10, weights ¾ and ¼."""
        weights = alignment_weights({"a": vector(1.0, 0.0), "b": vector(0.0, 1.0)})
        assert weights == pytest.approx({"a": 0.5, "b": 0.5})
        weights = alignment_weights({"b": vector(0.0, 1.0), "a": vector(3.0, 0.0)})
        assert weights == pytest.approx({"a": 0.75, "b": 0.25})
        assert list(weights) == ["a", "b"]

    def test_leave_one_out(self) -> None:
        """a = (1, 0), b = (1, 1), c = (0, 1). The others of a have mean (½, 1): cosine 1/√5; of b, (½, ½):
        cosine 1; of c as of a. Weights in the ratio 1/√5 : 1 : 1/√5."""
        updates = {"a": vector(1.0, 0.0), "b": vector(1.0, 1.0), "c": vector(0.0, 1.0)}
        total = 1 + 2 / math.sqrt(5)
        expected = {"a": 1 / math.sqrt(5) / total, "b": 1 / total, "c": 1 / math.sqrt(5) / total}
        assert alignment_weights(updates, leave_one_out=True) == pytest.approx(expected)

    def test_unrelated_update_is_flattered_only_by_itself(self) -> None:
        """a and b are orthogonal: each is at 45° to the mean of both, and at 90° to the other."""
        updates = {"a": vector(1.0, 0.0), "b": vector(0.0, 1.0), "c": vector(0.0, 2.0)}
        assert alignment_weights(updates)["a"] > 0.1
        assert alignment_weights(updates, leave_one_out=True)["a"] == 0

    @pytest.mark.parametrize("leave_one_out", [False, True])
    @pytest.mark.parametrize(
        "updates", [{"a": vector(1.0), "b": vector(-1.0)}, {"a": vector(0.0), "b": vector(0.0)}]
    )
    def test_no_common_direction_is_the_mean(self, updates: dict[str, Tensors], leave_one_out: bool) -> None:
        assert alignment_weights(updates, leave_one_out=leave_one_out) == {"a": 0.5, "b": 0.5}

    def test_alone(self) -> None:
        assert alignment_weights({"a": vector(2.0)}, leave_one_out=True) == {"a": 1.0}
        assert alignment_weights({"a": vector(2.0)}) == pytest.approx({"a": 1.0})


class TestAttention:
    def test_similarity(self) -> None:
        """Updates (1, 0), (2, 0), (0, 1) and τ = ½: s = 2 where parallel, 0 where orthogonal. Rows of a
        and b: e², e², 1 over 2e² + 1; of c: 1, 1, e² over e² + 2. All are above the floor of 0.05."""
        initial = vector(5.0, 5.0)
        models = {"a": vector(6.0, 5.0), "b": vector(7.0, 5.0), "c": vector(5.0, 6.0)}
        weights, e2 = similarity_attention(models, initial), math.e**2
        close = {"a": e2 / (2 * e2 + 1), "b": e2 / (2 * e2 + 1), "c": 1 / (2 * e2 + 1)}
        assert weights["a"] == pytest.approx(close)
        assert weights["b"] == pytest.approx(close)
        assert weights["c"] == pytest.approx({"a": 1 / (e2 + 2), "b": 1 / (e2 + 2), "c": e2 / (e2 + 2)})
        mixed = mixtures(weights, models)
        expected = close["a"] * 6 + close["b"] * 7 + close["c"] * 5
        assert mixed["a"].flat[0].item() == pytest.approx(expected, rel=1e-6)

    def test_floor(self) -> None:
        """τ = 0.01 gives 0 to the orthogonal one: raised to 0.05, then 1 and 0.05 over 1.05."""
        models = {"a": vector(1.0, 0.0), "b": vector(0.0, 1.0)}
        weights = similarity_attention(models, vector(0.0, 0.0), temperature=0.01)
        assert weights["a"] == pytest.approx({"a": 1 / 1.05, "b": 0.05 / 1.05})
        none = similarity_attention(models, vector(0.0, 0.0), temperature=0.01, floor=0.0)
        assert none["a"]["b"] < 1e-40

    def test_clients_that_have_not_moved(self) -> None:
        """No direction, no preference: uniform, and no NaN."""
        weights = similarity_attention({"a": vector(1.0), "b": vector(1.0)}, vector(1.0))
        assert weights["a"] == pytest.approx({"a": 0.5, "b": 0.5})

    def test_distance(self) -> None:
        """‖φ_a − φ_b‖² = 4, σ = 4, α = 1: c = e^(−1) / 4; own weight 1 − c, and u_a = 0 + 2 c."""
        models = {"a": vector(0.0), "b": vector(2.0)}
        weights, c = distance_attention(models, alpha=1.0, sigma=4.0), math.exp(-1) / 4
        assert weights["a"] == pytest.approx({"a": 1 - c, "b": c})
        assert mixtures(weights, models)["a"].flat.item() == pytest.approx(2 * c)

    def test_distance_that_would_repel(self) -> None:
        """Three equal models with α = σ: each other one weighs 1, leaving −1. α = σ / 2 leaves 0."""
        models = {name: vector(1.0) for name in "abc"}
        with pytest.raises(ValueError, match=r"would give its own model the weight -1; .*N - 1\) = 2.5"):
            distance_attention(models, alpha=5.0, sigma=5.0)
        assert distance_attention(models, alpha=2.5, sigma=5.0)["a"]["a"] == pytest.approx(0)
        assert distance_attention({"a": vector(1.0)}, alpha=1.0, sigma=1.0) == {"a": {"a": 1.0}}


LAYOUT = Layout((Entry("x", (2,), "lora"), Entry("y", (1,), "lora")))


@pytest.mark.parametrize(
    ("upload", "message"),
    [
        (Upload("w", 0.0), "weight must be a positive number, not 0.0"),
        (Upload("w", math.nan), "weight must be a positive number, not nan"),
        (Upload("w", 1.0, {}, {"loss": math.inf}), "scalar 'loss' is inf"),
        (Upload("w", 1.0, {}, {"loss": 10**400}), "scalar 'loss' is 1000"),
        (Upload("w", 1.0, {}, {"loss": 2.9e307}), r"scalar 'loss' is 2\.9e\+307"),
        (Upload("w", 1.0, {"model": vector(1.0, math.nan)}), "x in group 'model' has NaN or infinity"),
        (Upload("w", 1.0, {"model": vector(1.0)}), r"x in group 'model' has shape \(1,\), not \(2,\)"),
        (
            Upload("w", 1.0, {"s": Tensors(Layout((Entry("z", (1,), "lora"),)), torch.zeros(1))}),
            "unexpected tensor z in group 's'",
        ),
        (
            Upload("w", 1.0, {"model": Tensors(LAYOUT, torch.zeros(3, dtype=torch.int32))}),
            "x in group 'model' has dtype torch.int32",
        ),
        # 1e300 is finite here and infinite as the model's float32.
        (Upload("w", 1.0, {"model": vector(1.0, 1e300, dtype=torch.float64)}), "x in group 'model'.*64"),
    ],
)
def test_bad_uploads(upload: Upload, message: str) -> None:
    with pytest.raises(BadUpload, match=f"upload of client 'w': {message}") as error:
        check_upload(upload, {"model": LAYOUT})
    assert error.value.client == "w"


def test_good_upload() -> None:
    numbers = {"loss": 0.7, "largest": 3.4e38}
    check_upload(Upload("w", 1.0, {"model": vector(1.0, -1.0)}, numbers), {"model": LAYOUT})


class TestConfig:
    @pytest.mark.parametrize(
        ("table", "message"),
        [
            ({"rule": "median", "staleness": {"name": "polynomial"}}, "has no weights that staleness could"),
            ({"rule": "krum", "weights": "mass"}, "use rule mean or norm_clip"),
            ({"max_norm": 1.0}, "bounds updates only under rule 'norm_clip', not 'mean'"),
            ({"rule": "median", "lora": "fedex"}, "needs the mean of the products BA, which the coordinate"),
            ({"rule": "trimmed_mean", "lora": "flexlora"}, "mean of the products BA"),
            ({"lora": "fedex", "optimizer": {"name": "fedadam"}}, "which would change the mean"),
            ({"trim": 0.5}, "less than 0.5"),
            ({"liars": -1}, "greater than or equal to 0"),
            ({"momentum": 0.9}, "Extra inputs"),
        ],
    )
    def test_refused(self, table: dict[str, object], message: str) -> None:
        with pytest.raises(ValidationError, match=message):
            MergeConfig.model_validate(table)


@pytest.mark.sample
@pytest.mark.parametrize(
    ("numbers", "finite"),
    [
        ((), True),
        ((0.0, -1.0), True),
        ((3e38, 3e38), True),
        ((3e38, 3e38, math.inf), False),
        ((math.inf, -math.inf), False),
        ((math.nan, 0.0), False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_is_each_element_and_not_their_sum(numbers, finite, dtype):
    """The largest float32 is 3.4e38: two of 3e38 are finite, and their sum is not. ∞ − ∞ is NaN."""
    assert vector(*numbers, dtype=dtype).isfinite() == finite
