"""The trainer of selectors with a latent taste: features, one step by hand, contexts, scores."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from prefed.core import Entry, Key, Layout, Objective, Optimizer, Owner, Ownership, Phase, Tensors
from prefed.data import Record, ResponseEncoder, SelectorConfig, Template, write_choices
from prefed.models.tastes import CAP, VariationalSelector
from prefed.train import PairTrainer, optimizer_steps
from prefed.train.losses.tastes import Gaussian, gumbel, mixture_kl, mixture_log_weights, standard_kl
from prefed.train.tastes import CONTEXT, LatentPrior, ResponseFeatures, draw_context
from tastes import ALL, LATENT, ROWS, backbone, half, ownership, record, taught, trained

GOAL = Objective("latent")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return half(tmp_path_factory.mktemp("pairs"))


def phase(model, objective=GOAL, **changes):
    fields = {"batch_size": 6, "steps": 2, "optimizer": Optimizer("sgd", lr=0.1, clip=0.0)}
    return Phase("train", trained(model), objective, **{**fields, **changes})


def hidden(model, text, layer):
    """h of a text's tokens, by plain transformers."""
    ids = torch.tensor([model.tokenizer(text)["input_ids"]])
    with torch.no_grad():
        out = model.causal(input_ids=ids, output_hidden_states=True)
    if layer is None:
        return out.hidden_states[-1][0]
    states = out.hidden_states[layer][0]
    return states / states.norm(dim=1, keepdim=True) * states.shape[1] ** 0.5


def test_a_layer_that_the_model_lacks_is_refused():
    """Of two blocks the second is the default's."""
    with pytest.raises(ValueError, match=r"layer = 2: the model has 2 blocks"):
        backbone(layer=2)


@pytest.mark.sample
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("pool", "layer"), [("end", None), ("mean", None), ("mean", 1)])
def test_features_are_the_hidden_states_of_plain_transformers(pairs, fast, pool, layer, tmp_path):
    """At end-of-text, which is fed; or the mean over the response's tokens. First in alphabetical order. Of
    an earlier block each state is divided by its root mean square, and so has length √d."""
    model, plain = (backbone(fast=one, pool=pool, layer=layer) for one in (fast, False))
    trainer = PairTrainer(model, pairs, fast=fast, cache=tmp_path)
    encoder = ResponseEncoder(model.tokenizer, Template(model.tokenizer), 160)
    features = ResponseFeatures(trainer.model, encoder, tmp_path, "x")
    rows = np.array([3, 25, 8])
    features.fill(rows)
    got = features.get(rows)
    for place, row in enumerate(rows):
        one = record(int(row), warm=row < 20)
        for response, text in enumerate(sorted((one.chosen, one.rejected))):
            prompt = one.prompt
            states = hidden(plain, prompt + text + "<eos>", layer)
            count = len(plain.tokenizer(text + "<eos>")["input_ids"])
            want = states[-1] if pool == "end" else states[-count:].mean(0)
            torch.testing.assert_close(got[place, response], want, rtol=1e-4, atol=1e-4)
    (path,) = tmp_path.glob("x-*.f32")
    assert path.stat().st_mode & 0o777 == 0o600
    again = ResponseFeatures(trainer.model, None, tmp_path, "x")
    again.fill(rows)
    assert torch.equal(again.get(rows), got)


@pytest.mark.parametrize("pool", ["end", "mean"])
def test_a_response_of_several_pairs_is_read_once(pool, tmp_path, monkeypatch):
    """Every two of four responses to each of two prompts, and of three to a third one: 15 pairs, 2 + 2 + 2
    passes of two responses. h is that of a pair by itself, up to rounding. After a stop, passes whose pairs
    are all stored are left out, and h is bit-identical."""
    records = [
        Record(f"Q{prompt}?", f" {one}", f" {other}")
        for prompt, count in enumerate((4, 4, 3))
        for one, other in combinations(("a", "bb", "ccc", "dd")[:count], 2)
    ]
    model, rows, reads = backbone(pool=pool), np.arange(15), []
    tokens = write_choices(tmp_path, model.tokenizer, SelectorConfig(), records, 160)
    trainer = PairTrainer(model, tokens)
    real = ResponseFeatures._hidden

    def features(name, stop=99):
        def read(self, pairs):
            if len(reads) == stop:
                raise InterruptedError
            reads.append(pairs)
            return real(self, pairs)

        reads.clear()
        monkeypatch.setattr(ResponseFeatures, "_hidden", read)
        encoder = ResponseEncoder(model.tokenizer, Template(model.tokenizer), 160)
        return ResponseFeatures(trainer.model, encoder, tmp_path, name)

    together = features("together")
    together.fill(rows)
    assert len(reads) == 6
    alone = features("alone")
    for row in rows:
        alone.fill(row[None])
    assert len(reads) == 15
    torch.testing.assert_close(together.get(rows), alone.get(rows), rtol=1e-4, atol=1e-5)
    with pytest.raises(InterruptedError):
        features("stopped", stop=3).fill(rows)
    again = features("stopped")
    again.fill(rows)
    assert len(reads) == 4  # the third one, too: four of its pairs need the fourth one
    assert torch.equal(again.get(rows), together.get(rows))


def test_a_long_response_leaves_half_of_the_room_to_the_prompt():
    """Of 10 tokens the prompt has its last 5; a response its first 4 bytes and end-of-text."""
    tokens = backbone().tokenizer
    (pair,) = ResponseEncoder(tokens, Template(tokens), 10).encode(
        [replace(record(1, True), prompt="abcdefg")]
    )
    assert [len(ids) for ids in pair] == [5, 4 + 1, 5]
    assert tokens.decode(pair.prompt) == "cdefg"
    assert [tokens.decode(ids) for ids in pair[1:]] == [" no 1"[:4] + "<eos>", " so <eos>"]


EACH = np.arange(40, dtype=np.uint64)
"""Forty pairs, none of them a repeat."""


def test_contexts_are_disjoint_from_the_batch_and_of_all_lengths():
    """c ~ U{1 … 16}: of 200 draws each length comes; with 3 pairs left, at most 3; with none, none."""
    rows, batch = np.arange(40), np.arange(8)
    drawn = [draw_context(rows, batch, Key(0).at("step", step), EACH) for step in range(200)]
    assert {len(context) for context in drawn} == set(range(1, CONTEXT + 1))
    for context in drawn:
        assert len(set(context.tolist())) == len(context)
        assert not set(context.tolist()) & set(batch.tolist())
    assert max(len(draw_context(rows[:11], batch, Key(step), EACH)) for step in range(50)) == 3
    assert len(draw_context(batch, batch, Key(0), EACH)) == 0


def test_a_repeat_of_a_judged_pair_is_in_no_context():
    """Rows 8 to 11 repeat rows 0 to 3 of the batch (`duplicates = "keep"`), so 12 to 39 alone are left."""
    rows, batch = np.arange(40), np.arange(8)
    pairs = rows.astype(np.uint64)
    pairs[8:12] = pairs[:4]
    drawn = np.concatenate([draw_context(rows, batch, Key(0).at("step", at), pairs) for at in range(200)])
    assert set(drawn.tolist()) == set(range(12, 40))


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_step_is_that_of_a_plain_loop(pairs, monkeypatch, scale):
    """Two steps of SGD, each from its draws by name: loss, prototypes' terms, base dropout, mixture prior.
    The scale of losses, with which a model in float16 begins, is in no result."""
    settings = {"capped": 1, "logit_dropout": 0.5, "prior": 1, "samples": 3, "temperature": 0.5}
    settings |= {"label": 1, "own": 2, "beta": 0.3, "pull": 0.7, "orthogonality": 0.01}
    model = backbone(ALL)
    trainer = PairTrainer(model, pairs)
    rows, key, n = ROWS[:20], Key(5), 4
    draw = torch.Generator().manual_seed(1)
    peers = {"mean": torch.randn(n, 4, generator=draw), "log_variance": torch.randn(n, 4, generator=draw)}
    present = torch.tensor([1.0, 0.0, 1.0, 1.0])
    layout = Layout((Entry("peers/mean", (n, 4), "peers"), Entry("peers/log_variance", (n, 4), "peers")))
    layout = Layout((*layout.entries, Entry("peers/present", (n,), "peers")))
    table = Tensors.gather(
        layout, {f"peers/{name}": value for name, value in {**peers, "present": present}.items()}
    )
    trust = Tensors(Layout((Entry("trust/logits", (n,), "trust"),)), torch.tensor([0.1, 0.2, 0.3, 0.4]))
    objective = Objective("latent", settings)
    chosen = phase(model, objective, constants={"peers": table}, auxiliary=trust, rates={"trust/logits": 0.5})
    monkeypatch.setattr(optimizer_steps, "first_loss_scale", lambda backbone: scale)
    result = trainer.visit(rows, key, ownership(model)).train(model.initial, chosen)

    # The plain loop, over copies of the tensors.
    selector = VariationalSelector(model.config.variational, 32)
    features = trainer.scorer._features
    weights = {name: value.clone().requires_grad_() for name, value in model.initial.items()}
    logits = trust.flat.clone().requires_grad_()
    key = key.at("phase", "train")
    order = np.concatenate([key.at("epoch", 0).numpy().permutation(rows)])
    nlls = []
    for step in range(2):
        at, batch = key.at("step", step), order[6 * step : 6 * step + 6]
        context = draw_context(rows, batch, at, pairs.pairs)
        signs = torch.ones(len(context)) * torch.from_numpy(trainer.model.signs(context))
        x = selector.pair_features(weights, features.get(context), signs)
        q = Gaussian(*selector.posterior(weights, x, cap=CAP))
        z = q.sample(torch.randn(4, generator=at.at("z").torch()))
        noise = gumbel(torch.rand(n, generator=at.at("gumbel").torch()))
        others = torch.tensor([True, False, False, True])
        log_weights = mixture_log_weights(logits, noise, 0.5, others)
        kl = mixture_kl(
            q, Gaussian(*peers.values()), log_weights, torch.randn(3, 4, generator=at.at("kl").torch())
        )
        keep = (torch.rand(6, generator=at.at("keep").torch()) >= 0.5).float()
        base = torch.from_numpy(trainer.references.training.get(batch))
        odds = selector.log_odds(weights, features.get(batch), z, base, keep)
        chosen_odds = odds * torch.from_numpy(trainer.model.signs(batch))[:, None]
        nll = torch.nn.functional.softplus(-chosen_odds).mean()
        p = weights["prototypes"]
        away = (p @ p.T - 4 * torch.eye(2)).square().sum()
        loss = nll + 0.3 * kl + 0.7 * (z - p[1]).square().mean() + 0.01 * away
        moving = [weights[name] for name in trained(model)]
        gradients = torch.autograd.grad(loss, [*moving, logits], allow_unused=True)
        with torch.no_grad():
            for value, gradient in zip(moving, gradients, strict=False):
                value -= 0.1 * (0 if gradient is None else gradient)
            logits -= 0.5 * gradients[-1]
        nlls.append(float(nll.detach()))
    for name in trained(model):
        torch.testing.assert_close(result.tensors[name], weights[name].detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(result.auxiliary["trust/logits"], logits.detach(), rtol=1e-4, atol=1e-6)
    assert result.auxiliary["trust/logits"][1:3].tolist() == pytest.approx([0.2, 0.3])
    assert result.figures["nll"] == pytest.approx(np.mean(nlls), rel=1e-5)
    assert (result.steps, result.pairs) == (2, 12)


def test_without_peers_the_prior_is_standard_and_the_weights_rest():
    """Also where the only peer is the client itself, and where no mixture is asked for."""
    q = Gaussian(torch.tensor([1.0, -2.0]), torch.tensor([-3.0, 0.5]))
    model = backbone()
    entries = [Entry(f"peers/{name}", (2, 2), "peers") for name in ("mean", "log_variance")]
    layout = Layout((*entries, Entry("peers/present", (2,), "peers")))
    table = Tensors(layout, torch.tensor([9.0] * 8 + [1.0, 0.0]))
    trust = Tensors(Layout((Entry("trust/logits", (2,), "trust"),)), torch.tensor([0.3, 0.7]))
    settings = {"prior": 1.0, "own": 0.0, "temperature": 1.0, "samples": 4.0}
    for changes, constants in (
        ({}, {"peers": table}),
        ({"own": -1.0}, {}),
        ({"prior": 0.0}, {"peers": table}),
    ):
        asked = phase(model, constants=constants, auxiliary=trust)
        prior = LatentPrior({**settings, **changes}, model.device, asked)
        assert torch.equal(prior.kl(q, Key(0)), standard_kl(q))
        prior.step(1.0)
        assert prior.auxiliary() is trust
        assert prior.mean(2).tolist() == [0.0, 0.0]
    mixture = LatentPrior(
        {**settings, "own": 1.0}, model.device, phase(model, constants={"peers": table}, auxiliary=trust)
    )
    assert mixture.mean(2).tolist() == [9.0, 9.0]


def test_own_row_of_the_peers_changes_no_bit(pairs):
    """A mistake of earlier code: a client's own posterior in its own prior."""
    model = backbone()
    results = []
    for own in (0.0, 50.0):
        entries = [Entry(f"peers/{name}", (2, 4), "peers") for name in ("mean", "log_variance")]
        layout = Layout((*entries, Entry("peers/present", (2,), "peers")))
        table = Tensors(layout, torch.tensor([own] * 4 + [1.0] * 4 + [0.0] * 8 + [1.0, 1.0]))
        trust = Tensors.zeros(Layout((Entry("trust/logits", (2,), "trust"),)))
        asked = phase(
            model, Objective("latent", {"prior": 1, "own": 0}), constants={"peers": table}, auxiliary=trust
        )
        results.append(
            PairTrainer(model, pairs).visit(ROWS[:20], Key(1), ownership(model)).train(model.initial, asked)
        )
    assert results[0].tensors.equal(results[1].tensors)
    assert results[0].figures == results[1].figures


def test_a_client_of_one_pair_trains_at_the_priors_mean(pairs):
    """Its batch leaves no context: no KL. z = 0, where the decoder has its bias alone."""
    model = backbone()
    result = (
        PairTrainer(model, pairs).visit(ROWS[:1], Key(1), ownership(model)).train(model.initial, phase(model))
    )
    assert "kl" not in result.figures
    assert torch.equal(
        result.tensors["variational/encoder/0/weight"], model.initial["variational/encoder/0/weight"]
    )
    assert not torch.equal(
        result.tensors["variational/decoder/bias"], model.initial["variational/decoder/bias"]
    )
    assert torch.equal(
        result.tensors["variational/decoder/weight"], model.initial["variational/decoder/weight"]
    )


@pytest.mark.parametrize("most", [4096, 130])
def test_a_lora_trains_through_the_base_log_odds(pairs, most):
    """Its gradient, in one group and in several, compared with central differences along that
    gradient: without dropout the loss is smooth in the LoRA."""
    model = backbone(LATENT | {"lora"})
    trainer = PairTrainer(model, pairs, max_tokens=most)
    batch = ROWS[:5]
    lora = Ownership.of(model.layout, lambda e: Owner.SHARED if e.part == "lora" else Owner.FROZEN)
    visit = trainer.visit(ROWS[:20], Key(2), lora)
    start = Tensors(model.layout, model.initial.flat + 0.02)
    latent = trainer.trainer_of("latent")
    gradient, _ = latent.gradient(visit, start, GOAL, batch, Key(2))
    along = gradient / gradient.norm()
    losses = [latent.gradient(visit, start + along * h, GOAL, batch, Key(2))[1] for h in (1e-2, -1e-2)]
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(gradient.norm(), rel=2e-2)


def test_posteriors_come_from_even_contexts_of_training_pairs(pairs):
    """17 pairs are contexts of 9 and 8, not of 16 and 1; the first few of them are one, and 18 of 20 two."""
    model = backbone()
    trainer = PairTrainer(model, pairs)
    seen = []
    spied = trainer.scorer._posterior
    trainer.scorer._posterior = lambda context, *rest: (seen.append(context), spied(context, *rest))[1]
    means, log_variances = trainer.scorer.posteriors(model.initial, GOAL, ROWS[:17], Key(3))
    assert means.shape == log_variances.shape == (2, 4)
    assert [len(context) for context in seen] == [9, 8]
    assert sorted(np.concatenate(seen).tolist()) == list(range(17))
    one, _ = trainer.scorer.posteriors(model.initial, GOAL, ROWS[:17][::-1], Key(3), pairs=4)
    assert seen[-1].tolist() == np.concatenate(seen[:2])[:4].tolist()
    assert one.shape == (1, 4)
    assert trainer.scorer.posteriors(model.initial, GOAL, ROWS[:20], Key(3), pairs=18)[0].shape == (2, 4)
    assert trainer.scorer.posteriors(model.initial, GOAL, ROWS[:0], Key(3))[0].shape == (0, 4)
    assert trainer.scorer.posteriors(model.initial, GOAL, ROWS[:3], Key(3), pairs=0)[0].shape == (0, 4)


def test_the_untouched_model_adds_nothing_to_the_base(pairs):
    """And its scores are those that a selector without taste gives."""
    model = backbone(ALL)
    scores = PairTrainer(model, pairs).score(model.reference, ROWS)
    np.testing.assert_array_equal(scores.orders, scores.baseline)
    plain = backbone(frozenset({"lora"}))
    want = PairTrainer(plain, pairs).score(plain.initial, ROWS)
    np.testing.assert_array_equal(scores.baseline, want.baseline)


def test_one_model_judges_by_both_tastes(pairs):
    """Clients of opposite taste train one selector in turn; each one's z, from its own pairs, then gives its
    labels, and the other's z gives the reverse. No plain selector can: the texts are alike."""
    trainer = PairTrainer(backbone(LATENT), pairs)
    tensors, halves = taught(trainer), (ROWS[:14], ROWS[20:34])
    means = [trainer.scorer.posteriors(tensors, GOAL, rows, Key(0))[0].mean(0) for rows in halves]
    for own, tested in enumerate((ROWS[14:20], ROWS[34:])):
        right = [
            float((trainer.score(tensors.replace({"latent/z": z}), tested).orders.mean(1) > 0).mean())
            for z in means
        ]
        assert right[own] >= 5 / 6
        assert right[1 - own] <= 1 / 6


@pytest.mark.parametrize("lora", [False, True])
def test_pairs_are_judged_each_at_its_own_taste(pairs, lora):
    """As if each were judged alone with this taste in the tensors; no taste given is that of the tensors."""
    model = backbone(LATENT | ({"lora"} if lora else set()))
    trainer, rows = PairTrainer(model, pairs), ROWS[[3, 25, 8]]
    tensors = Tensors(model.layout, model.initial.flat + 0.05)
    z = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    got = trainer.choice_scores(tensors, rows, z)
    alone = [
        trainer.choice_scores(tensors.replace({"latent/z": taste}), rows)[place]
        for place, taste in enumerate(z)
    ]
    np.testing.assert_allclose(got, alone, rtol=1e-5, atol=1e-6)
    one = trainer.choice_scores(tensors, rows, z[1])
    assert one[1] == pytest.approx(got[1], rel=1e-5)
    assert np.abs(one - got)[[0, 2]].min() > 1e-4
    np.testing.assert_array_equal(
        trainer.choice_scores(tensors, rows), trainer.choice_scores(tensors, rows, tensors["latent/z"])
    )
    with pytest.raises(ValueError, match=r"z has shape \[5\]"):
        trainer.choice_scores(tensors, rows, torch.zeros(5))


def test_another_taste_runs_no_text_again(pairs, monkeypatch):
    """Hidden states and the base's log-odds are kept: the second taste costs the small networks alone."""
    trainer = PairTrainer(backbone(), pairs)
    start = trainer.backbone.initial
    first = trainer.choice_scores(start, ROWS[:5], torch.ones(4))
    monkeypatch.setattr(trainer.model, "forward", None)
    assert not np.allclose(trainer.choice_scores(start, ROWS[:5], -torch.ones(4)), first)
    np.testing.assert_array_equal(trainer.choice_scores(start, ROWS[:5], torch.ones(4)), first)
