"""The server's step as a whole: the order of its rules, its memory, its figures, its errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from prefed.core import Entry, Key, Layout, Owner, Round, State, Tensors, Upload
from prefed.core.plugins import Code
from prefed.merge import (
    Aggregator,
    BadUpload,
    MergeConfig,
    ServerOptimizer,
    Staleness,
    alignment_weights,
    check_update_sizes,
    lora,
)
from prefed.merge.config import MERGE_RULES, MergeRule
from prefed.merge.groups import merge_groups
from prefed.merge.means_distances import weighted_mean

A = Entry("lora/0/q/A", (1, 1), "lora", 0, "A")
B = Entry("lora/0/q/B", (1, 1), "lora", 0, "B")
HEAD = Entry("head/W", (2,), "head")
W = Entry("residual/0/q/W", (1, 1), "residual", 0)
PLAIN = Layout((A, B, HEAD))
DENSE = Layout((A, B, HEAD, W))


def tensors(layout: Layout, *numbers: float) -> Tensors:
    return Tensors(layout, torch.tensor(numbers, dtype=torch.float32))


def now(number: int = 1, **weights: float) -> Round:
    return Round(number, 10, Key(0), weights)


def aggregator(layout: Layout = PLAIN, **table: Any) -> Aggregator:
    return Aggregator(MergeConfig(**table), layout, 2.0)


def reply(client: str, weight: float, value: Tensors, sent_at: int = 1, group: str = "model") -> Upload:
    return Upload(client, weight, {group: value}, sent_at=sent_at)


def model(state: State) -> list[float]:
    return state.tensors["model"].flat.tolist()


def test_mean_and_figures() -> None:
    """Weights ¼ and ¾: A = ¼ + 9/4 = 2.5, B = ¼ + 15/4 = 4, head (0 + 3, 1 + 0); mean(B A) = ¼ + 45/4 = 11.5
    against B̄ Ā = 10; the step from zero has length ‖(2.5, 4, 3, 1)‖."""
    uploads = [reply("a", 1, tensors(PLAIN, 1, 1, 0, 4)), reply("b", 3, tensors(PLAIN, 3, 5, 4, 0))]
    rule = aggregator()
    before = rule.init(Tensors.zeros(PLAIN))
    after, report = rule.merge(before, uploads, now())
    assert model(after) == [2.5, 4, 3, 1]
    assert report == pytest.approx(
        {"merged": 2, "update_norm": math.sqrt(6.25 + 16 + 9 + 1), "product_error": 1.5 / 11.5}
    )
    assert model(before) == [0, 0, 0, 0]


def test_uniform_and_given_weights() -> None:
    uploads = [reply("a", 1, tensors(PLAIN, 1, 0, 0, 0)), reply("b", 3, tensors(PLAIN, 3, 0, 0, 0))]
    state = aggregator().init(Tensors.zeros(PLAIN))
    assert model(aggregator(weights="uniform").merge(state, uploads, now())[0])[0] == 2
    custom, _ = aggregator().merge(state, uploads, now(), weigh=lambda updates: {"a": 0.9, "b": 0.1})
    assert model(custom)[0] == pytest.approx(1.2)
    with pytest.raises(ValueError, match="weights = 'mass' cannot be combined with weights of the method"):
        aggregator(weights="mass").merge(
            state, uploads, now(a=1, b=3), weigh=lambda updates: {"a": 1, "b": 1}
        )


def test_staleness_discounts_before_weights_are_normalised() -> None:
    """In round 4, b's upload of round 1 counts (1 + 3)^−1 = ¼: (1 · 0 + ¼ · 5) / 1.25 = 1. By mass, p = ½ and
    ¼ · ½, the current model keeping the rest: ⅜ · 8 + ½ · 0 + ⅛ · 5."""
    uploads = [reply("a", 1, tensors(PLAIN, 0, 0, 0, 0), 4), reply("b", 1, tensors(PLAIN, 5, 0, 0, 0), 1)]
    staleness = Staleness(name="polynomial", exponent=1)
    rule = aggregator(staleness=staleness)
    assert model(rule.merge(rule.init(Tensors.zeros(PLAIN)), uploads, now(4))[0])[0] == 1
    rule = aggregator(staleness=staleness, weights="mass")
    state = rule.init(tensors(PLAIN, 8, 0, 0, 0))
    assert model(rule.merge(state, uploads, now(4, a=1, b=1))[0])[0] == pytest.approx(0.375 * 8 + 5 / 8)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("median", 2.0), ("trimmed_mean", 2.0), ("krum", 2.0), ("multi_krum", 1.5), ("norm_clip", 1.4)],
)
def test_robust_rules(rule: str, expected: float) -> None:
    """0, 1, 2, 3 and 1000 from a model at 0. The median and the trimmed mean are 2. Krum with f = 1 scores
    0: 1 + 4, 1: 1 + 1, 2: 1 + 1; of these two b, at 2, comes first. Multi-Krum takes all but 1000. At the
    median length 2, 3 and 1000 are cut to 2: (0 + 2 + 1 + 2 + 2) / 5."""
    numbers = {"a": 0.0, "b": 2.0, "c": 1.0, "d": 3.0, "e": 1000.0}
    uploads = [reply(client, 1, tensors(PLAIN, 0, 0, x, 0)) for client, x in numbers.items()]
    config = aggregator(rule=rule, liars=1, trim=0.2)
    state, report = config.merge(config.init(Tensors.zeros(PLAIN)), uploads, now())
    assert model(state) == pytest.approx([0, 0, expected, 0])
    assert report["merged"] == {"krum": 1, "multi_krum": 4}.get(rule, 5)
    if rule == "norm_clip":
        assert report["clipped"] == 0.4


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("mean", [(0, 0.1), (2, 0.2), (1, 0.1), (3, 0.1), (1000, 0.3)]),
        ("median", [(2, 0.8)]),
        ("trimmed_mean", [(2, 0.8)]),
        ("krum", [(2, 0.8)]),
        ("multi_krum", [(0, 0.16), (2, 0.32), (1, 0.16), (3, 0.16)]),
        ("norm_clip", [(0, 0.1), (2, 0.2), (1, 0.1), (2, 0.1), (2, 0.3)]),
    ],
)
def test_steps_next_to_the_model(rule: str, expected: list[tuple[float, float]]) -> None:
    """As :func:`test_robust_rules`, with weights whose sum is 0.8 before and after. The four of multi_krum
    have 0.1, 0.2, 0.1, 0.1; each becomes 8 / 5 times as much. ``max_norm`` bounds models, not steps."""
    values = [tensors(PLAIN, 0, 0, x, 0) for x in (0.0, 2.0, 1.0, 3.0, 1000.0)]
    bound = {"max_norm": 0.1} if rule == "norm_clip" else {}
    config = aggregator(rule=rule, liars=1, trim=0.2, **bound)
    terms = config.robust_steps(values, [0.1, 0.2, 0.1, 0.1, 0.3])
    assert [value.flat[2].item() for value, _ in terms] == pytest.approx([x for x, _ in expected])
    assert [weight for _, weight in terms] == pytest.approx([weight for _, weight in expected])
    assert config.robust_steps([], []) == []


def test_a_rule_from_outside_gets_weights_that_sum_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a model and for other steps. The mean of 0 and 4 with weights 1 to 3 is 3, and two steps whose
    weights 0.1 and 0.3 sum to 0.4 are one step of weight 0.4."""
    rule = MergeRule(lambda values, weights: weighted_mean(values, weights))
    monkeypatch.setitem(MERGE_RULES._loaded, ("own", ""), rule)
    monkeypatch.setattr(MERGE_RULES, "code", lambda name: Code("own", "") if name == "own" else None)
    config = aggregator(rule="own")
    values = [tensors(PLAIN, 0, 0, x, 0) for x in (0.0, 4.0)]
    uploads = [reply(client, weight, x) for client, weight, x in zip("ab", (1, 3), values, strict=True)]
    assert model(config.merge(config.init(Tensors.zeros(PLAIN)), uploads, now())[0])[2] == 3
    ((step, weight),) = config.robust_steps(values, [0.1, 0.3])
    assert (step.flat[2].item(), weight) == (pytest.approx(3), pytest.approx(0.4))


def at(*lengths: float) -> list[Upload]:
    """Uploads of clients a, b, … whose updates from zero have these lengths."""
    return [
        reply(client, 1, tensors(PLAIN, 0, 0, x, 0)) for client, x in zip("abcdef", lengths, strict=False)
    ]


def test_the_error_about_an_oversized_update_names_both_lengths() -> None:
    """Of 1, 2, 3, 40 and 500 the median is 3, so 500 is 167 times and 40 is 13 times as long. With two liars
    in five the median is an honest length: 1, 2 and 3 pass, whatever the two send."""
    zero = {"model": Tensors.zeros(PLAIN)}
    check_update_sizes(at(1, 2, 3, 40, 500), zero, 170)
    with pytest.raises(BadUpload, match=r"'model' has length 500, 167 times the median of the round, 3"):
        check_update_sizes(at(1, 2, 3, 40, 500), zero, 100)
    with pytest.raises(BadUpload, match=r"client 'd'.* length 40, 13.3 times the median of the round, 3,"):
        check_update_sizes(at(1, 2, 3, 40), {}, 10)
    check_update_sizes(at(1, 2, 3, 1e-30, 1e-30), zero, 10)
    check_update_sizes(at(1, 2, 3, 40, 500), zero, 0)


def test_half_of_the_clients_cannot_have_the_others_refused() -> None:
    """With an even number the upper middle length counts: of 1e-9, 1e-9, 1 and 2 it is 1. Of two it is the
    longer one. So in a round of two nobody is dropped if the server's model has length 0."""
    zero = {"model": Tensors.zeros(PLAIN)}
    check_update_sizes(at(1, 2, 1e-9, 1e-9), zero, 10)
    check_update_sizes(at(1, 1e9), zero, 10)
    check_update_sizes([], zero, 10)


def test_half_of_the_clients_cannot_send_what_they_like() -> None:
    """The server's model has length 5, and two updates have lengths 1 and x: x may be at most 10 times 5. The
    honest one also passes next to one of 1e-30. Of four, the lower middle one is honest: with 1, 7, 80 and 80
    the bound is 10 · 7."""
    there = {"model": tensors(PLAIN, 3, 4, 0, 0)}

    def moved(*lengths: float) -> list[Upload]:
        return [reply(c, 1, tensors(PLAIN, 3, 4, x, 0)) for c, x in zip("abcd", lengths, strict=False)]

    for fine in ((1, 49), (1, 1e-30), (1, 7, 69, 69), (1, 2, 1e-30, 1e-30)):
        check_update_sizes(moved(*fine), there, 10)
    for absurd, of in (((1, 51), "5"), ((1, 1e15), "5"), ((1, 7, 80, 81), "7")):
        with pytest.raises(
            BadUpload, match=f"times the length of the server's model and of half of the updates, {of},"
        ):
            check_update_sizes(moved(*absurd), there, 10)


def test_where_nearly_everybody_has_stopped_an_honest_client_may_go_on() -> None:
    """Three clients with a loss near zero move by 1e-9 from a model of length 5. A newcomer may move by 5. If
    nobody else moves at all, there is no length to compare with."""
    there = {"model": tensors(PLAIN, 3, 4, 0, 0)}
    still = [reply(client, 1, tensors(PLAIN, 3, 4, 1e-9, 0)) for client in "abc"]
    check_update_sizes([*still, reply("d", 1, tensors(PLAIN, 3, 4, 4.9, 0))], there, 1e4)
    with pytest.raises(BadUpload, match="client 'd'"):
        check_update_sizes([*still, reply("d", 1, tensors(PLAIN, 3, 4, 5.1, 0))], there, 1e4)
    check_update_sizes(at(0, 0, 0, 1), {"model": Tensors.zeros(PLAIN)}, 10)


PRODUCT = Layout((Entry("lora/0/q/A", (1, 2), "lora", 0, "A"), Entry("lora/0/q/B", (1, 1), "lora", 0, "B")))


def test_what_a_lora_changes_is_in_proportion_too() -> None:
    """The server has A = (3, 4) and B = 0, so its factors have length 5 and its product 0. Three clients send
    B = 0.01, which changes the weights by s B A = 2 · 0.01 · 5 = 0.1. One sends B = 4.9: its factors move
    less than 5, but its change of 49 is 490 times theirs. With a residual of length 60 the server's model is
    longer than that."""
    there = {"model": tensors(PRODUCT, 3, 4, 0)}
    sent = [reply(client, 1, tensors(PRODUCT, 3, 4, 0.01)) for client in "abc"]
    sent.append(reply("d", 1, tensors(PRODUCT, 3, 4, 4.9)))
    check_update_sizes(sent, there, 491, scaling=2.0)
    error = r"client 'd': the change of s B A in group 'model' has length 49, 490 times .* 0\.1, but"
    with pytest.raises(BadUpload, match=error):
        check_update_sizes(sent, there, 489, scaling=2.0)
    check_update_sizes(sent, there, 489, steps={"model"}, scaling=2.0)
    residual = Layout((*PRODUCT.entries, Entry("residual/0/q/W", (1, 2), "residual", 0)))
    check_update_sizes(sent, {"model": tensors(residual, 3, 4, 0, 36, 48)}, 10, scaling=2.0)
    # Squares overflow to infinity, and their sum to NaN.
    assert (
        lora.change_norm(Tensors(PRODUCT, torch.tensor([1e200, -1e200, 1e200], dtype=torch.float64)))
        == math.inf
    )


@pytest.mark.parametrize("rule", ["fedit", "flora"])
def test_a_merge_refuses_a_disproportionate_product(rule: str) -> None:
    """As in the test above, in a merge with max_ratio = 100, and in one that has a group for each client."""
    layout = Layout((*PRODUCT.entries, Entry("residual/0/q/W", (1, 2), "residual", 0)))
    rule_ = aggregator(layout, lora=rule, max_ratio=100)
    state = rule_.init(tensors(layout, 3, 4, 0, 0, 0))
    sizes = zip("abcd", (0.01, 0.01, 0.01, 4.9), strict=True)
    sent = [reply(client, 1, tensors(PRODUCT, 3, 4, size)) for client, size in sizes]
    merge = rule_.with_size_check(rule_.merge)
    with pytest.raises(BadUpload, match="client 'd': the change of s B A"):
        merge(state, sent, now())
    merged = merge(state, sent[:3], now())[0].tensors["model"]
    added = merged["residual/0/q/W"] + 2 * merged["lora/0/q/B"] @ merged["lora/0/q/A"]
    torch.testing.assert_close(added, torch.tensor([[0.06, 0.08]], dtype=added.dtype))
    groups = dict.fromkeys("abcd", "model")
    with pytest.raises(BadUpload, match="client 'd': the change of s B A"):
        merge_groups(rule_, state, sent, groups, now(), PRODUCT.names)


def test_the_length_of_a_step_does_not_depend_on_the_server() -> None:
    """Steps of length 1, 1 and 2000 of a variate of length 5: taken as models, they are 5.1, 5.1 and 2000
    away from it, and 2000 is 392 times the median. As a step it is 2000 times. One of length 5 passes."""
    there = {"control": tensors(PLAIN, 3, 4, 0, 0)}
    uploads = [
        reply(c, 1, tensors(PLAIN, 0, 0, x, 0), group="control")
        for c, x in zip("abc", (1, 1, 2000), strict=True)
    ]
    check_update_sizes(uploads, there, 1000)
    with pytest.raises(BadUpload, match=r"client 'c'.* length 2e\+03, 2e\+03 times the median"):
        check_update_sizes(uploads, there, 1000, {"control"})
    small = [reply(c, 1, tensors(PLAIN, 0, 0, 1e-9, 0), group="control") for c in "ab"]
    check_update_sizes(
        [*small, reply("c", 1, tensors(PLAIN, 0, 0, 5, 0), group="control")], there, 10, {"control"}
    )


@pytest.mark.parametrize(
    ("rule", "least", "expected"), [("median", 3, 2), ("krum", 5, 1), ("multi_krum", 5, 1.5)]
)
def test_a_rule_that_cannot_spare_an_upload_withstands_it(rule: str, least: int, expected: float) -> None:
    """There are as many uploads as the rule needs for one liar, who sends 1e9; without it nothing merges. The
    median of 1, 2 and 1e9 is 2. Of 1, 1, 2, 2 and 1e9 Krum takes the first, whose two nearest others are at
    distances 0 and 1 as each honest one's are, and multi-Krum the mean of these four. If the rule does
    not need the liar's upload, it is dropped."""
    config = aggregator(rule=rule, liars=1)
    merge = config.with_size_check(config.merge)
    honest = [1.0, 2.0] if least == 3 else [1.0, 1.0, 2.0, 2.0]
    state = config.init(Tensors.zeros(PLAIN))
    lies = at(*honest, 1e9)
    assert len(lies) == least
    assert model(merge(state, lies, now())[0])[2] == pytest.approx(expected)
    with pytest.raises(BadUpload, match=r"length 1e\+09"):
        merge(state, at(*honest, 2, 1e9), now())


def test_tensors_that_nobody_sends_keep_their_values() -> None:
    """RoLoRA's odd round: B alone travels; A and its momentum are as they were, and no product is lost."""
    rule = aggregator(lora="rolora", optimizer=ServerOptimizer(name="fedavgm", momentum=0.5))
    state = rule.init(tensors(PLAIN, 7, 0, 0, 0))
    part = PLAIN.select([B.name])
    uploads = [reply("a", 1, tensors(part, 2.0)), reply("b", 1, tensors(part, 4.0))]
    state, report = rule.merge(state, uploads, now(), names=[B.name])
    assert model(state) == [7, 3, 0, 0]
    assert state.tensors["momentum"].flat.tolist() == [0, 3, 0, 0]
    assert report["product_error"] == 0


def test_product_error_is_not_reported_if_b_is_personal() -> None:
    rule = aggregator(lora="fedsa")
    part = PLAIN.select([A.name])
    _, report = rule.merge(rule.init(tensors(part, 1.0)), [reply("a", 1, tensors(part, 2.0))], now())
    assert "product_error" not in report


def test_groups_do_not_meet() -> None:
    """Two selectors in one state. Nobody trained the second: its tensors and its memory stay the same."""
    rule = aggregator(optimizer=ServerOptimizer(name="fedavgm"))
    first, second = (rule.init(Tensors.zeros(PLAIN), group) for group in ("s0", "s1"))
    state = State({**first.tensors, **second.tensors})
    upload = reply("a", 1, tensors(PLAIN, 1, 1, 1, 1), group="s0")
    after, report = rule.merge(state, [upload], now(), "s0")
    after, nothing = rule.merge(after, [upload], now(), "s1")
    assert after.tensors["s0"].flat.tolist() == after.tensors["s0.momentum"].flat.tolist() == [1] * 4
    assert after.tensors["s1"] is state.tensors["s1"]
    assert (report["merged"], nothing) == (1, {})


def test_nothing_to_merge() -> None:
    rule = aggregator()
    state = rule.init(Tensors.zeros(PLAIN))
    for uploads, names in (([], None), ([Upload("a", 1.0, {"model": Tensors.empty()})], ())):
        after, report = rule.merge(state, uploads, now(), names=names)
        assert after is state
        assert report == {}


def test_fedex_with_the_mass_counts_the_current_model() -> None:
    """p = ½ for (3, 5), the current (1, 1) keeping ½: as in the mean of both, residual 2 · (8 − 6)."""
    rule = aggregator(DENSE, lora="fedex", weights="mass")
    state = rule.init(tensors(DENSE, 1, 1, 0, 0, 0))
    state, _ = rule.merge(state, [reply("a", 1, tensors(PLAIN, 3, 5, 0, 0))], now(a=1, b=1))
    assert model(state) == [2, 3, 0, 0, 4]


def test_fedex_needs_residuals() -> None:
    assert lora.needs("fedex") == {"residual"}
    with pytest.raises(ValueError, match="the model lacks residual/0/q/W"):
        aggregator(lora="fedex").init(Tensors.zeros(PLAIN))


def test_parts() -> None:
    """The LoRA rule decides about what the method would share, and a residual follows its factors."""
    shared, personal, frozen = Owner.SHARED, Owner.PERSONAL, Owner.FROZEN
    assert dict(aggregator(lora="ffa").ownership().owners) == {
        A.name: frozen,
        B.name: shared,
        HEAD.name: shared,
    }
    own = aggregator(DENSE, lora="fedex").ownership(lambda entry: personal if entry.block == 0 else shared)
    assert dict(own.owners) == {A.name: personal, B.name: personal, HEAD.name: shared, W.name: frozen}
    assert aggregator(DENSE, lora="fedex").ownership().owners[W.name] is shared
    assert aggregator(DENSE).ownership().owners[W.name] is frozen


def test_any_layout_and_dtype_of_an_upload_is_put_in_order() -> None:
    """Names in another order, numbers in bfloat16: the server's own layout and dtype stand."""
    turned = Layout((HEAD, B, A))
    upload = reply("a", 1, tensors(turned, 3, 4, 2, 1).to(torch.bfloat16))
    state, _ = aggregator().merge(aggregator().init(Tensors.zeros(PLAIN)), [upload], now())
    assert model(state) == [1, 2, 3, 4]
    assert state.tensors["model"].flat.dtype == torch.float32


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (tensors(PLAIN.select([A.name]), 1), "client 'b': missing tensor head/W in group 'model'"),
        (Tensors.empty(), "client 'b': missing tensor head/W in group 'model'"),
        (tensors(DENSE.select([A.name, B.name, HEAD.name]), 1, 1, 1, 1), None),
        (tensors(Layout((A, B, HEAD, Entry("z", (1,), "head"))), 1, 1, 1, 1, 1), "'b': unexpected tensor z"),
        (tensors(Layout((A, B, Entry(HEAD.name, (1,), "head"))), 1, 1, 1), r"has shape \(1,\), not \(2,\)"),
    ],
)
def test_uploads_that_do_not_fit(second: Tensors, message: str | None) -> None:
    """Whoever sends it is named, though it is sorted first."""
    uploads = [reply("c", 1, tensors(PLAIN, 1, 1, 1, 1)), reply("b", 1, second)]
    state = aggregator().init(Tensors.zeros(PLAIN))
    if message is None:
        assert model(aggregator().merge(state, uploads, now())[0]) == [1, 1, 1, 1]
    else:
        with pytest.raises(BadUpload, match=message):
            aggregator().merge(state, uploads, now())


@pytest.mark.parametrize("rule", ["norm_clip", "multi_krum"])
def test_alignment_weighs_what_the_robust_rule_lets_through(rule: str) -> None:
    """Five updates of +0.1 and one of −10. Clipped to the median length, 0.1, or left out, the sixth does not
    decide what the common direction is: FedSDG's α is 1 for the five and 0 for it, and the model moves
    by 0.1. By raw updates the mean is (0.5 − 10) / 6 < 0, and the sixth alone would count."""
    uploads = [reply(f"c{k}", 1, tensors(PLAIN, 0.1, 0, 0, 0)) for k in range(5)]
    uploads.append(reply("liar", 1, tensors(PLAIN, -10.0, 0, 0, 0)))
    robust = aggregator(rule=rule)
    after, _ = robust.merge(robust.init(Tensors.zeros(PLAIN)), uploads, now(), weigh=alignment_weights)
    assert model(after) == pytest.approx([0.1, 0, 0, 0], abs=1e-6)
