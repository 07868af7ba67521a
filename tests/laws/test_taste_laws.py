"""Laws of FedVPL and FedVPA-GP over a small model: what is bit-identical, what leaves, what leaks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from prefed.core import Objective, Privacy, Tensors
from prefed.core.wire import encode
from prefed.engines.validation import validate_upload
from prefed.merge import MergeConfig
from prefed.merge.posteriors import summarize
from prefed.methods.base import tastes as posteriors
from prefed.train.losses import LATENT
from tastes import ROWS, TESTS, TRAIN, Federation, half, taught

PLAIN = {"prior": "standard", "prototypes": False, "cap": "off", "logit_dropout": 0.0}
Z = "latent/z"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return half(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def learned(pairs):
    """FedVPL with a selector that has learned both tastes."""
    run = Federation("fedvpl", {}, pairs)
    model = taught(run.trainer).select(run.server.tensors["model"])
    run.server = run.server.update({"model": model})
    return run


def test_with_the_standard_prior_and_all_else_off_it_is_fedvpl_to_the_bit(pairs):
    """The server's state and every upload; the client of one visit fewer included."""
    one = Federation("fedvpl", {}, pairs).run(3, ["abc", "abcd"])
    other = Federation("fedvpa", PLAIN, pairs).run(3, ["abc", "abcd"])
    assert encode(one.server) == encode(other.server)
    assert [encode(upload) for upload in one.uploads] == [encode(upload) for upload in other.uploads]


def test_each_term_changes_the_numbers(pairs):
    """So the law above is not empty: each switch alone gives other tensors."""
    plain = Federation("fedvpa", PLAIN, pairs).run(2).server.tensors["model"]
    for switch in ("prior", "prototypes", "cap", "logit_dropout"):
        settings = {name: value for name, value in PLAIN.items() if name != switch}
        model = Federation("fedvpa", settings, pairs).run(2).server.tensors["model"]
        assert not model.select(plain).equal(plain), switch


def test_peers_are_others_that_sent_and_absent_ones_are_masked(pairs):
    """After rounds of a, b and b, d: c never sent; the last round alone leaves a out."""
    run = Federation("fedvpa", {}, pairs).run(2, ["ab", "bd"])
    for client, latest, present in (
        ("a", False, [0, 1, 0, 1]),
        ("b", False, [1, 0, 0, 1]),
        ("c", False, [1, 1, 0, 1]),
        ("b", True, [0, 0, 0, 1]),
    ):
        peers = posteriors.peers_of(run.server, client, latest=latest)
        assert peers["peers/present"].tolist() == present
        assert not peers["peers/mean"][peers["peers/present"] == 0].any()
    last = {upload.client: upload for upload in run.uploads}
    got = posteriors.posteriors(run.server)
    assert list(got) == ["a", "b", "d"]
    torch.testing.assert_close(got["b"].mean, last["b"].tensors["posterior"]["posterior/mean"])
    mean = torch.stack([posterior.mean for posterior in got.values()]).mean(0)
    torch.testing.assert_close(run.server.tensors["taste"][Z], mean)


@pytest.mark.parametrize(("latest", "others"), [("all", {"a", "d"}), ("last_round", {"d"})])
def test_trust_is_in_those_whose_posteriors_are_in_the_prior(pairs, latest, others):
    """After rounds of a, b and of b, d: the softmax of b's logits over a and d, or over d alone; c never
    sent. In its only visit a had no peers."""
    run = Federation("fedvpa", {"prior_from": latest}, pairs).run(2, ["ab", "bd"])
    trust = run.method.trust(run.private["b"], run.server, "b")
    logits = dict(zip("abcd", run.private["b"].tensors["trust"].flat.double().exp().tolist(), strict=True))
    whole = sum(logits[name] for name in others)
    assert trust == pytest.approx({name: logits[name] / whole for name in others})
    assert run.method.trust(run.private["a"], run.server, "a") == {}


def test_an_upload_has_two_latents_more_and_nothing_else(pairs):
    """2 · 4 numbers next to φ_i; no hidden state, no z of a step, no log π, in either direction."""
    run = Federation("fedvpa", {}, pairs).run(2)
    (exchange,) = run.method.exchanges
    for upload in run.uploads[-4:]:
        sizes = {group: tensors.layout.size for group, tensors in upload.tensors.items()}
        assert sizes == {"model": len(run.server.tensors["model"].flat), "posterior": 2 * 4}
        assert set(upload.scalars) == {"loss"}
        assert not validate_upload(
            upload, upload.client, exchange, run.method.ownership, run.model.initial, run.now(2)
        )
    features = run.trainer.scorer._features
    for client, rows in TRAIN.items():
        trust = run.private[client].tensors["trust"].flat
        assert torch.unique(trust).numel() > 1
        secrets = [trust.numpy()[:2].tobytes()]
        secrets += [
            features.get(rows[k : k + 1])[0, side, :4].numpy().tobytes() for k in range(3) for side in (0, 1)
        ]
        sent = [encode(upload) for upload in run.uploads]
        sent += [
            encode(exchange.send(run.server, client, run.now(3))),
            encode(run.method.publish(run.server, client)),
        ]
        assert not any(secret in message for secret in secrets for message in sent)


def test_a_client_sends_its_taste_under_the_model_that_all_got(pairs):
    """Not under its own after the visit's steps, by which two clients of one taste may come to lie apart."""
    run = Federation("fedvpl", {}, pairs)
    start = run.model.initial
    run.run(1)
    for upload in run.uploads:
        client = run.client(upload.client, 1)
        got = upload.tensors["posterior"]
        for tensors, same in ((start, True), (start.replace(upload.tensors["model"]), False)):
            found = summarize(*client.posteriors(tensors, Objective(LATENT.name, {})))
            assert torch.equal(got["posterior/mean"], found.mean) is same


def test_a_small_client_sends_no_posterior_and_none_is_taken_from_it(pairs):
    """Clients c and d have 10 pairs, and 12 are the least."""
    run = Federation("fedvpa", {}, pairs, privacy=Privacy(minimum_pairs=12)).run(1)
    (exchange,) = run.method.exchanges
    assert [sorted(upload.tensors) for upload in run.uploads] == [["model", "posterior"]] * 2 + [
        ["model"]
    ] * 2
    assert list(posteriors.posteriors(run.server)) == ["a", "b"]
    assert "label" not in exchange.send(run.server, "c", run.now(2)).scalars
    small = replace(run.uploads[2], scalars={})
    lying = replace(small, tensors={**small.tensors, "posterior": run.uploads[0].tensors["posterior"]})
    check = (exchange, run.method.ownership, run.model.initial, run.now(1))
    assert validate_upload(small, "c", *check) == ""
    assert "posterior" in validate_upload(lying, "c", *check)


@pytest.mark.parametrize("value", [1e30, -1e30])
def test_a_hostile_posterior_leaves_the_others_finite(pairs, value):
    """Finite as it is, it passes validation; the merge bounds it, and the next visits stay finite."""
    run = Federation("fedvpa", {}, pairs).run(1)
    (exchange,) = run.method.exchanges
    bad = run.uploads[0].tensors["posterior"]
    lying = replace(run.uploads[0], tensors={**run.uploads[0].tensors, "posterior": bad * 0 + value})
    start, merge = run.method.init_server(run.model.initial), exchange.merge
    with pytest.raises(ValueError, match="posterior"):
        merge(start, [lying, *run.uploads[1:4]], run.now(1))
    # With one upload in a round there is no median to compare it with.
    run.server, _ = merge(run.server, [lying], run.now(2))
    upload, _ = exchange.work(
        run.client("b", 2), run.private["b"], exchange.send(run.server, "b", run.now(2))
    )
    assert all(tensors.isfinite() for tensors in upload.tensors.values())


@pytest.mark.parametrize("prototypes", [False, True])
@pytest.mark.parametrize("teller", ["a", "ab"])
def test_a_hostile_posterior_among_the_first_leaves_the_others_finite(pairs, prototypes, teller):
    """Nobody, or one client, sent a taste before, so no median bounds it: c's whole prior is the liar, and it
    still trains, and judges with the population's taste, in finite numbers."""
    run = Federation("fedvpa", {"prototypes": prototypes}, pairs).run(1, [teller])
    (exchange,) = run.method.exchanges
    got = run.uploads[0].tensors["posterior"]
    far = {"posterior/mean": torch.full((4,), 1e30), "posterior/log_variance": torch.full((4,), -1e30)}
    lying = replace(
        run.uploads[0], tensors={**run.uploads[0].tensors, "posterior": Tensors.gather(got.layout, far)}
    )
    server = run.method.init_server(run.model.initial)
    server, _ = exchange.merge(server, [lying, *run.uploads[1:]], run.now(1))
    assert float(server.tensors["taste"][Z].norm()) < 10
    upload, _ = exchange.work(run.client("c", 2), run.private["c"], exchange.send(server, "c", run.now(2)))
    assert all(tensors.isfinite() for tensors in upload.tensors.values())


def test_under_a_robust_rule_one_liar_does_not_move_the_populations_taste_out_of_the_others(pairs):
    """Each number is the median of four: between the least and the most of the three honest ones. The plain
    mean has the liar in it, a quarter of three times the honest length."""
    rule = MergeConfig.model_validate({"rule": "median", "liars": 1})
    run = Federation("fedvpa", {}, pairs, merge=rule).run(1)
    (exchange,) = run.method.exchanges
    honest = torch.stack([u.tensors["posterior"]["posterior/mean"] for u in run.uploads[1:]])
    got = run.uploads[0].tensors["posterior"]
    far = got.replace({"posterior/mean": -1e3 * honest.mean(0).sign()})
    lying = replace(run.uploads[0], tensors={**run.uploads[0].tensors, "posterior": far})
    server = run.method.init_server(run.model.initial)
    taste = exchange.merge(server, [lying, *run.uploads[1:]], run.now(1))[0].tensors["taste"][Z]
    assert (taste >= honest.min(0).values).all()
    assert (taste <= honest.max(0).values).all()


def test_prototypes_that_an_upload_brings_do_not_widen_the_bound_on_its_posterior(pairs):
    """The prototypes that were sent have length 2; one upload alone makes them as long as it likes."""
    run = Federation("fedvpa", {}, pairs).run(1)
    (exchange,) = run.method.exchanges
    upload = run.uploads[0]
    model, got = upload.tensors["model"], upload.tensors["posterior"]
    long = model.replace({"prototypes": 1e3 * model["prototypes"]})
    far = got.replace({"posterior/mean": torch.full((4,), 1e4)})
    lying = replace(upload, tensors={"model": long, "posterior": far})
    server, _ = exchange.merge(run.method.init_server(run.model.initial), [lying], run.now(1))
    assert posteriors.posteriors(server)["a"].mean.norm() <= 3 * 2.0 + 1e-5


@pytest.mark.parametrize("bias", [-1000.0, 1000.0])
def test_a_saturated_selector_still_gives_numbers(pairs, bias):
    """σ = e^±500 is 0 or infinite in float32, and so would be log σ̄² over one context: no client could ever
    send, nor train the bias back."""
    run = Federation("fedvpl", {}, pairs)
    name = "variational/log_variance/bias"
    tensors = run.model.initial.replace({name: torch.full((4,), bias)})
    found = run.client("c", 1).posteriors(tensors, Objective(LATENT.name, {}))
    assert summarize(*found).log_variance.abs().max() == 12


def test_a_table_of_other_clients_is_refused(pairs):
    """One row more than this client knows members: log π would not fit, or a wrong row would be masked."""
    run = Federation("fedvpa", {}, pairs).run(1)
    (exchange,) = run.method.exchanges
    now = replace(run.now(2), weights={**run.now(2).weights, "e": 1.0})
    with pytest.raises(ValueError, match=r"^the server sent posteriors of 4 clients, but there are 5$"):
        exchange.work(
            replace(run.client("a", 2), round=now), run.private["a"], exchange.send(run.server, "a", now)
        )


def test_noise_on_a_posterior_is_named_and_changes_nothing_else(pairs):
    """A clip of 1 bounds (μ̄, log σ̄² + 3); with noise, two runs agree and differ from the run without."""
    clipped, noisy, again = (
        Federation("fedvpl", {"posterior_clip": 1.0, "posterior_noise": noise}, pairs).run(1)
        for noise in (0.0, 0.5, 0.5)
    )
    for upload in clipped.uploads:
        got = upload.tensors["posterior"]
        vector = torch.cat([got["posterior/mean"], got["posterior/log_variance"] + 3])
        assert float(vector.norm()) <= 1 + 1e-5
    assert encode(noisy.server) == encode(again.server)
    assert clipped.server.tensors["model"].equal(noisy.server.tensors["model"])
    assert not clipped.server.tensors["taste"].equal(noisy.server.tensors["taste"])


# Leaks


def leak(predict, labels, rows) -> float:
    """Accuracy on ``rows`` whose labels are drawn anew: 0.5 in the mean for whoever does not see them."""
    draw, right = np.random.default_rng(0), []
    for _ in range(40):
        labels[rows] = draw.integers(0, 2, len(rows))
        right.append(predict(rows))
    return float(np.mean(right))


@pytest.fixture
def shuffled(learned, monkeypatch):
    """The labels of all pairs, which a test may change."""
    labels = np.array(learned.tokens.orientations)
    monkeypatch.setattr(learned.tokens, "orientations", labels)
    return labels


def test_own_taste_judges_right_and_anothers_wrong(learned):
    for client in TRAIN:
        other = "b" if client in "ac" else "a"
        own, strange = learned.predict(client), learned.predict(other)
        assert learned.accuracy(own, TESTS[client]) >= 5 / 6
        assert learned.accuracy(own.replace({Z: strange[Z]}), TESTS[client]) <= 1 / 6


def test_test_labels_reach_no_prediction(learned, shuffled):
    """240 draws: accuracy is within 4 standard errors of 0.5, and no log-odds change by a bit."""
    rows, seen = TESTS["a"], set()

    def predict(tested):
        model = learned.predict("a")
        seen.add(learned.trainer.choice_scores(model, tested).tobytes())
        return learned.accuracy(model, tested)

    assert leak(predict, shuffled, rows) == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(240))
    assert len(seen) == 1


def test_a_predictor_that_is_given_the_judged_label_is_found(learned, shuffled):
    """The mistake of public code: z inferred from the very pair that is judged."""

    def cheat(tested):
        right = []
        for row in tested:
            trainer = learned.client("a", 1, rows=np.array([row]))
            published = learned.method.publish(learned.server, "a")
            right.append(learned.accuracy(learned.method.infer(trainer, published, 1), np.array([row])))
        return np.mean(right)

    assert leak(cheat, shuffled, TESTS["a"]) > 0.5 + 4 * 0.5 / np.sqrt(240)


def test_reversed_labels_of_the_context_reverse_the_taste(learned, shuffled):
    """Accuracy with own z falls to nearly 1 − a: z is made of the context's labels."""
    before = learned.accuracy(learned.predict("a"), TESTS["a"])
    shuffled[TRAIN["a"]] = 1 - shuffled[TRAIN["a"]]
    assert learned.accuracy(learned.predict("a"), TESTS["a"]) == pytest.approx(1 - before, abs=1 / 6)


def test_a_prediction_reads_training_pairs_alone(learned, monkeypatch):
    """Neither the features nor the labels of any other pair are asked for."""
    asked, features = set(), learned.trainer.scorer._features
    get, signs = features.get, learned.trainer.model.signs
    monkeypatch.setattr(features, "get", lambda rows: (asked.update(rows.tolist()), get(rows))[1])
    monkeypatch.setattr(
        learned.trainer.model, "signs", lambda rows: (asked.update(rows.tolist()), signs(rows))[1]
    )
    learned.predict("c")
    assert asked == set(TRAIN["c"].tolist())


def test_a_newcomers_taste_comes_from_its_first_pairs(learned):
    """No step is taken; without a pair it has the taste of the population."""
    published = learned.method.publish(learned.server, "a")
    for rows, tested in ((ROWS[4:14], TESTS["a"]), (ROWS[24:34], TESTS["b"])):
        newcomer = learned.client("new", 1, rows=rows)
        for count in (4, 8):
            model = learned.method.infer(newcomer, published, count)
            means, _ = newcomer.posteriors(model, Objective(LATENT.name), pairs=count)
            torch.testing.assert_close(model[Z], means[0])
            assert learned.accuracy(model, tested) >= 5 / 6
            assert model.select(learned.server.tensors["model"]).equal(learned.server.tensors["model"])
        nobody = learned.method.infer(learned.client("new", 1, rows=ROWS[:0]), published, 4)
        assert torch.equal(nobody[Z], learned.server.tensors["taste"][Z])
    adapted = learned.method.adapt(learned.client("new", 1, rows=ROWS[24:34]), published, 2)
    assert not adapted.select(learned.server.tensors["model"]).equal(learned.server.tensors["model"])
    assert learned.accuracy(adapted, TESTS["b"]) >= 5 / 6


def test_own_taste_is_the_mean_over_contexts(learned):
    """And figures of it are those of any selector's scores."""
    model = learned.predict("a")
    means, logs = learned.client("a", 1).posteriors(model, Objective(LATENT.name))
    assert torch.equal(model[Z], summarize(means, logs).mean)
    scores = learned.trainer.score(model, TESTS["a"])
    assert scores.metrics()["preference_accuracy"] == learned.accuracy(model, TESTS["a"])
