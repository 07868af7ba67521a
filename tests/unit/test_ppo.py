"""Offline PPO: its gradient against a plain twin, its critic, its stops, its rewards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase, PhaseResult, Tensors
from prefed.data.tokens import Pair
from prefed.models import ModelConfig, make_backbone
from prefed.train import PairTrainer, logprobs
from small_models import float64

VOCABULARY = 61
PLAIN = {"kl": 0.0, "trace": 1.0, "entropy": 0.0, "value": 0.0, "scaled": 0.0, "sums": 1.0}


class Tokens:
    """Random pairs of a few tokens; token 0 ends a response."""

    letters = None

    def __init__(self, size: int, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)

        def some(least: int, most: int, end: bool) -> np.ndarray[Any, np.dtype[np.int32]]:
            ids = draw.integers(1, VOCABULARY, draw.integers(least, most)).astype(np.int32)
            return np.append(ids, np.int32(0)) if end else ids

        self.rows = [Pair(some(1, 7, False), some(0, 6, True), some(0, 6, True)) for _ in range(size)]
        self.lengths = np.array([[len(ids) for ids in row] for row in self.rows], np.int32)
        self.margins = np.full(size, np.nan, np.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def pair(self, row: int) -> Pair:
        return self.rows[row]


class Scored:
    """Fixed scores in place of a reward model's."""

    def __init__(self, scores: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        self.scores = scores

    def get(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.float32]]:
        return self.scores[rows]


def causal(kind: str) -> Any:
    torch.manual_seed(5)
    if kind == "gpt2":
        config = GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2)
        return GPT2LMHeadModel(config).eval()
    small = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**small, intermediate_size=64, num_key_value_heads=1)).eval()
    return OPTForCausalLM(
        OPTConfig(**small, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=32)
    ).eval()


def make(
    kind: str = "gpt2",
    size: int = 6,
    *,
    needs: frozenset[str] = frozenset({"lora", "value"}),
    rewards: bool = True,
    **pair_trainer: Any,
) -> tuple[PairTrainer, Tensors, Ownership]:
    """A trainer, a client's tensors away from their start (but for the critic), and who owns what."""
    config = ModelConfig(name=kind, lora={"rank": 2, "dropout": 0.3}, device="cpu")
    backbone = make_backbone(causal(kind), None, config, Key(1), needs)
    draw = torch.Generator().manual_seed(2)
    moved = backbone.initial.flat + 0.1 * torch.randn(backbone.layout.size, generator=draw)
    tensors = Tensors(backbone.layout, moved)
    for name in ("value/weight", "value/bias"):
        if name in tensors:
            tensors[name].zero_()
    scores = np.random.default_rng(3).normal(size=(size, 2)).astype(np.float32) if rewards else None
    store = PairTrainer(
        backbone, Tokens(size), rewards=None if scores is None else Scored(scores), **pair_trainer
    )
    return store, tensors, Ownership.of(backbone.layout, lambda entry: Owner.SHARED)


def phase(pair_trainer: PairTrainer, *, train: str = "", **changes: Any) -> Phase:
    names = [name for name in pair_trainer.backbone.layout.names if name.startswith(train)]
    settings = changes.pop("settings", {})
    optimizer = changes.pop("optimizer", Optimizer("sgd", lr=0.1, clip=0.0))
    options = {"batch_size": 2, "epochs": None if "steps" in changes else 1, **changes}
    return Phase("train", tuple(names), Objective("ppo", settings), optimizer, **options)


def twin(pair_trainer: PairTrainer, tensors: Tensors, rows: Any, settings: dict[str, float]) -> Tensors:
    """The first gradient on all ``rows`` by full padded logits, eager attention, and loops over tokens."""
    backbone = pair_trainer.backbone

    def look(at: Tensors) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        backbone.load(at)
        views = []
        for row in rows:
            pair = pair_trainer.model.tokens.pair(int(row))
            for y in (pair.chosen, pair.rejected):
                ids = torch.tensor(np.concatenate([pair.prompt, y]).astype(np.int64))[None]
                pad = torch.zeros(1, 3, dtype=torch.long)
                out = backbone.causal(
                    input_ids=torch.cat([ids, pad], 1),
                    attention_mask=torch.cat([torch.ones_like(ids), pad], 1),
                    output_hidden_states=True,
                )
                at_rows = slice(len(pair.prompt) - 1, len(pair.prompt) + len(y) - 1)
                log = out.logits[0, at_rows].log_softmax(1)
                hidden = out.hidden_states[-1][0, at_rows]
                v = hidden @ backbone.parameters["value/weight"][0] + backbone.parameters["value/bias"][0]
                own = log[torch.arange(len(y)), torch.tensor(y.astype(np.int64))]
                views.append((own, v, -(log.exp() * log).sum(1)))
        return views

    with torch.no_grad():
        reference = [own for own, _, _ in look(backbone.reference)]
        old = [(own, v) for own, v, _ in look(tensors)]
    scores = torch.tensor(pair_trainer.trainer_of("ppo")._rewards.scores[rows]).double()
    scores = ((scores - scores.mean()) / scores.std(correction=0)).clamp(-5, 5)
    signed = [s for r in scores for s in ((r[0] - r[1]) / 2, (r[1] - r[0]) / 2)]
    advantages, returns = [], []
    for (own, v), ref, reward in zip(old, reference, signed, strict=True):
        after, total = 0.0, 0.0
        gains = torch.zeros(len(own))
        for step in reversed(range(len(own))):
            r = -settings["kl"] * float(own[step] - ref[step])
            r += float(reward) if step == len(own) - 1 else 0.0
            total = r + after - float(v[step]) + settings["trace"] * total
            gains[step], after = total, float(v[step])
        advantages.append(gains)
        returns.append(gains + v)
    if settings["scaled"]:
        spread = torch.cat(advantages).std(correction=0)
        advantages = [a / spread for a in advantages]
    backbone.train_only(backbone.layout.names)
    losses = []
    for (own, v, entropy), (old_own, _), a, g in zip(look(tensors), old, advantages, returns, strict=True):
        losses.append(
            -(own - old_own).exp() * a + settings["value"] * (v - g) ** 2 - settings["entropy"] * entropy
        )
    total = torch.cat(losses).sum() / (len(rows) if settings["sums"] else len(torch.cat(losses)))
    backbone.grad.zero_()
    total.backward()
    return Tensors(backbone.layout, backbone.grad.clone())


SETTINGS = {"kl": 0.1, "trace": 0.95, "entropy": 0.05, "value": 0.5, "scaled": 1.0, "sums": 0.0}


@pytest.mark.sample
@pytest.mark.parametrize("kind", ["gpt2", "llama", "opt"])
@pytest.mark.parametrize("settings", [SETTINGS, {**SETTINGS, "sums": 1.0, "scaled": 0.0}])
@float64()
def test_first_gradient_is_that_of_the_plain_twin(kind: str, settings: dict[str, float]) -> None:
    """GPT-2 and Llama take the packed path, OPT the padded one. Dropout must not matter: it is off."""
    pair_trainer, tensors, parts = make(kind)
    tensors["value/weight"].normal_(generator=torch.Generator().manual_seed(0)).mul_(0.1)
    rows = np.arange(6)
    ours, _ = pair_trainer.visit(rows, Key(0), parts).gradient(tensors, Objective("ppo", settings))
    theirs = twin(pair_trainer, tensors, rows, settings)
    assert theirs["value/weight"].any()
    torch.testing.assert_close(ours.flat, theirs.flat, rtol=0, atol=1e-6 * float(theirs.flat.abs().max()))


@float64()
def test_the_policy_gradient_it_starts_from() -> None:
    """λ 1, V 0, no penalty, no entropy, sums, no scaling: −(d/2) ∇[log π(y_w) − log π(y_l)], the mean over
    pairs, here from the trainer's own sums."""
    pair_trainer, tensors, parts = make()
    rows = np.arange(6)
    ours, _ = pair_trainer.visit(rows, Key(0), parts).gradient(tensors, Objective("ppo", PLAIN))
    scores = torch.tensor(pair_trainer.trainer_of("ppo")._rewards.scores)
    scores = ((scores - scores.mean()) / scores.std(correction=0)).clamp(-5, 5)
    backbone = pair_trainer.backbone
    backbone.load(tensors)
    backbone.train_only(name for name in backbone.layout.names if name.startswith("lora"))
    backbone.grad.zero_()
    sums = pair_trainer.model.forward(pair_trainer.model.pairs(rows))
    half = (scores[:, 0] - scores[:, 1]) / 2
    (-half * (sums[:, 0] - sums[:, 1])).mean().backward()
    torch.testing.assert_close(ours.flat, backbone.grad, rtol=0, atol=1e-6)


@float64()
def test_split_batches_and_the_plain_path_train_alike() -> None:
    """Groups of few tokens, and padded batches: another order of the same sums, here of float64. Each of four
    steps adds some 2⁻⁵³ · √(all terms of a gradient) to the difference, far below 1e-12."""
    results, slow = [], Optimizer("sgd", lr=0.01, clip=0.0)
    for options in ({}, {"max_tokens": 20}, {"fast": False}):
        pair_trainer, tensors, parts = make(**options)
        trained = pair_trainer.visit(np.arange(6), Key(4), parts).train(
            tensors, phase(pair_trainer, batch_size=3, epochs=2, optimizer=slow)
        )
        assert trained.steps == 4
        assert trained.pairs == 12
        results.append(trained)
    for other in results[1:]:
        torch.testing.assert_close(other.tensors.flat, results[0].tensors.flat, rtol=0, atol=1e-12)
        assert other.figures == pytest.approx(results[0].figures, rel=1e-12, abs=1e-12)
    assert len(make(max_tokens=20)[0].model.groups(np.arange(6))) > 2


@float64()
def test_a_phase_above_the_trunk_runs_the_trunk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only head and critic train: the trunk runs once for the reference, once for the visit's start, and in
    no step. The numbers are the same as with the trunk run in every step."""
    results, calls = [], []
    for most in (1 << 28, 0):
        monkeypatch.setattr("prefed.train.forward_passes.MAX_FEATURES", most)
        pair_trainer, tensors, parts = make(needs=frozenset({"lora", "head", "value"}))
        names = tuple(n for n in pair_trainer.backbone.layout.names if not n.startswith("lora"))
        passes: list[int] = []
        pair_trainer.backbone.trunk.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        work = replace(phase(pair_trainer, epochs=3, settings={"target_kl": 0.0}), train=names)
        results.append(pair_trainer.visit(np.arange(6), Key(4), parts).train(tensors, work).tensors)
        calls.append(len(passes))
    assert calls == [2, 2 + 9]
    torch.testing.assert_close(results[0].flat, results[1].flat, rtol=0, atol=1e-7)
    assert not torch.equal(results[0]["head/weight"], tensors["head/weight"])
    assert torch.equal(
        results[0].select(n for n in tensors if n.startswith("lora")).flat,
        tensors.select(n for n in tensors if n.startswith("lora")).flat,
    )


def test_the_critic_learns_its_returns() -> None:
    """λ = 1 and no penalty: a token's return is its response's R, so the slope of c (V − G)² in the bias at
    V = 0 is −2c times the mean R over tokens, and a step of rate η moves it by 2cη of that mean."""
    pair_trainer, tensors, parts = make(size=1)
    pair_trainer.trainer_of("ppo")._rewards.scores[0] = (3.0, -1.0)
    lengths = pair_trainer.model.tokens.lengths[0, 1:]
    settings = {"kl": 0.0, "trace": 1.0, "value": 0.5}
    work = phase(pair_trainer, batch_size=1, settings=settings, optimizer=Optimizer("sgd", lr=0.2, clip=0.0))
    trained = pair_trainer.visit(np.arange(1), Key(0), parts).train(tensors, work)
    # Standardised over its two scores the pair stands at 1 and −1: R = ±1.
    mean = float(lengths[0] - lengths[1]) / float(lengths.sum())
    assert lengths[0] != lengths[1]
    assert float(trained.tensors["value/bias"][0]) == pytest.approx(0.2 * mean, rel=1e-5)
    assert trained.figures["value_loss"] == pytest.approx(1.0)
    assert trained.tensors["value/weight"].any()


def test_early_stop() -> None:
    """Without a bound, the means over k and k + 1 steps give the drift before each step. With a bound, the
    visit ends before the first step at which that drift is above 1.5 times the bound."""
    pair_trainer, tensors, parts = make()
    rows = np.arange(6)

    def run(**changes: Any) -> PhaseResult:
        return pair_trainer.visit(rows, Key(0), parts).train(
            tensors, phase(pair_trainer, batch_size=6, **changes)
        )

    free = [run(steps=k, settings={"target_kl": 0.0}) for k in range(1, 9)]
    assert not any(trained.figures["stopped"] for trained in free)
    totals = [0.0, *(trained.steps * trained.figures["kl"] for trained in free)]
    drifts = np.diff(totals)
    assert drifts[0] == pytest.approx(0, abs=1e-7)
    first = 5
    assert drifts[first] > 1.1 * drifts[:first].max()
    stopped = run(epochs=20, settings={"target_kl": float(drifts[first]) / 1.5 / 1.05})
    assert (stopped.steps, stopped.pairs, stopped.figures["stopped"]) == (first, 6 * first, 1.0)
    assert stopped.tensors.equal(free[first - 1].tensors)


def test_it_learns_what_the_reward_model_says() -> None:
    """Each pair's margin moves with the sign of the reward model's margin, also where the label disagrees.

    After 20 epochs. Later ones, without a penalty or a clip, swing margins by as much as they have grown.
    """
    pair_trainer, tensors, parts = make()
    rows, settings = np.array([0, 1, 2, 4, 5]), {"kl": 0.0, "entropy": 0.0, "target_kl": 0.0, "clip": 10.0}
    before = pair_trainer.score(tensors, rows).policy
    adam = Optimizer("adam", lr=0.01, clip=0.0)
    work = phase(pair_trainer, train="lora", epochs=20, batch_size=5, settings=settings, optimizer=adam)
    after = pair_trainer.score(
        pair_trainer.visit(rows, Key(0), parts).train(tensors, work).tensors, rows
    ).policy
    scores = pair_trainer.trainer_of("ppo")._rewards.scores[rows]
    signs = np.sign(scores[:, 0] - scores[:, 1])
    assert set(signs) == {1.0, -1.0}
    assert (np.sign((after - before) @ np.array([1.0, -1.0], np.float32)) == signs).all()


def test_a_run_is_a_function_of_its_key() -> None:
    """A trainer that has trained another client before gives the same bits; another key gives other bits."""
    first, tensors, parts = make()
    mine, other = np.array([0, 2, 4]), np.array([1, 3, 5])
    expected = first.visit(mine, Key(7), parts).train(tensors, phase(first))
    second, _, _ = make()
    second.visit(other, Key(1), parts).train(tensors, phase(second, steps=1))
    again = second.visit(mine, Key(7), parts).train(tensors, phase(second))
    assert again.tensors.equal(expected.tensors)
    assert again.figures == expected.figures
    assert not second.visit(mine, Key(8), parts).train(tensors, phase(second)).tensors.equal(expected.tensors)


def test_loss_and_gradient_agree() -> None:
    pair_trainer, tensors, parts = make()
    what = Objective("ppo", SETTINGS)
    _, value = pair_trainer.visit(np.arange(6), Key(0), parts).gradient(tensors, what)
    assert pair_trainer.loss(tensors, what, np.arange(6)) == pytest.approx(value, rel=1e-6)
    half, _ = pair_trainer.visit(np.arange(6), Key(0), parts).gradient(tensors, what, batch_size=3)
    assert half.flat.any()


def test_rewards_of_a_batch_are_standardised_over_the_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    pair_trainer, tensors, parts = make()
    ppo, seen = pair_trainer.trainer_of("ppo"), []
    roll_out = ppo._roll_out

    def record(rows: Any, rewards: torch.Tensor, *more: Any) -> Any:
        seen.append((rows, rewards))
        return roll_out(rows, rewards, *more)

    monkeypatch.setattr(ppo, "_roll_out", record)
    pair_trainer.visit(np.arange(6), Key(0), parts).gradient(
        tensors, Objective("ppo", SETTINGS), batch_size=3
    )
    ((rows, rewards),) = seen
    assert len(rows) == 3
    assert torch.equal(rewards, ppo._scores(np.arange(6))[torch.from_numpy(rows)])


@float64()
@pytest.mark.parametrize("at_a_time", [2048, 7])
def test_token_terms_against_full_logits(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients in the hidden states and the head, in one block and in blocks of seven entries."""
    monkeypatch.setattr(logprobs, "BLOCK", at_a_time)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 8, generator=draw).requires_grad_()
    weight = torch.randn(VOCABULARY, 8, generator=draw).requires_grad_()
    targets = torch.randint(VOCABULARY, (20,), generator=draw)
    up = torch.randn(2, 20, generator=draw)
    p = (hidden @ weight.t()).softmax(1)
    theirs = p[torch.arange(20), targets].log(), torch.distributions.Categorical(p).entropy()
    ours = logprobs.token_terms(hidden, weight, targets)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad((torch.stack(ours) * up).sum(), (hidden, weight)),
        torch.autograd.grad((torch.stack(theirs) * up).sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_visits_second_phase_goes_on_from_the_visits_start() -> None:
    """π_old is the policy that the visit starts from. After a step, the same batch has ρ ≠ 1 in the same
    visit, and ρ = 1, KL 0, in a new visit. If the first phase passed the bound, the second ends before its
    first step."""
    pair_trainer, tensors, parts = make()
    work = phase(pair_trainer, epochs=1, batch_size=6, settings={"target_kl": 0.0})
    visit = pair_trainer.visit(np.arange(6), Key(4), parts)
    once = visit.train(tensors, work)
    again = visit.train(once.tensors, work)
    alone = pair_trainer.visit(np.arange(6), Key(4), parts).train(once.tensors, work)
    assert once.figures["kl"] == pytest.approx(0, abs=1e-9)
    assert alone.figures["kl"] == pytest.approx(0, abs=1e-9)
    assert again.figures["kl"] > 1e-6
    tight = replace(work, objective=Objective("ppo", {"target_kl": again.figures["kl"] / 3}))
    ended = visit.train(once.tensors, tight)
    assert (ended.steps, ended.figures["stopped"]) == (0, 1.0)
    assert ended.loss == pytest.approx(again.loss, rel=1e-5)
    assert ended.tensors.equal(once.tensors)


def through(pair_trainer: PairTrainer) -> list[int]:
    """A list that records the rows that go through the reference, in order."""
    rows: list[int] = []
    number = {id(pair): row for row, pair in enumerate(pair_trainer.model.tokens.rows)}
    ppo = pair_trainer.trainer_of("ppo")
    outputs = ppo._outputs

    def record(group: Any, features: Any) -> Any:
        if pair_trainer.backbone.extract().equal(pair_trainer.backbone.reference):
            rows.extend(number[id(pair)] for pair in pair_trainer.model.pairs(group))
        return outputs(group, features)

    ppo._outputs = record
    return rows


MINE, OTHERS = np.array([0, 2, 4, 6, 8, 10]), np.array([1, 3, 5, 7, 9, 11])


def test_the_reference_sees_a_pair_once_and_none_that_is_not_read(tmp_path: Path) -> None:
    """The start of a visit reads all pairs of its client, because advantages are scaled over all of them. A
    gradient reads its batch, in the client's groups. A second process finds both on the disk."""
    small = {"size": 12, "max_tokens": 20, "cache": tmp_path}
    pair_trainer, tensors, parts = make(**small)
    rows = through(pair_trainer)
    pair_trainer.visit(MINE, Key(0), parts).train(tensors, phase(pair_trainer, steps=1))
    assert rows == MINE.tolist()
    rows.clear()
    groups = [group.tolist() for group in pair_trainer.model.groups(OTHERS)]
    shared = max(groups, key=len)
    assert len(groups) > 2
    assert len(shared) > 1
    batch = np.array(shared[1:2])
    objective = Objective("ppo", SETTINGS)
    others = pair_trainer.visit(OTHERS, Key(0), parts)
    pair_trainer.trainer_of("ppo").gradient(others, tensors, objective, batch, Key(0))
    assert rows == shared
    again, _, _ = make(**small)
    rows = through(again)
    again.visit(MINE, Key(0), parts).train(tensors, phase(again, steps=1))
    assert not rows


def test_who_asks_first_and_a_kill_change_no_bit(tmp_path: Path) -> None:
    """The bits are the same for two clients in either order, for a client of which one batch was computed
    before, and after a process that was killed when it had stored two of the client's groups."""

    def pair_trainer(folder: Path | None = None) -> PairTrainer:
        return make(size=12, max_tokens=20, cache=folder)[0]

    def visits(pair_trainer: PairTrainer, *clients: Any) -> list[Tensors]:
        return [
            pair_trainer.visit(rows, Key(7), parts).train(tensors, phase(pair_trainer)).tensors
            for rows in clients
        ]

    _, tensors, parts = make(size=12)
    mine, others = visits(pair_trainer(), MINE, OTHERS)
    swapped = visits(pair_trainer(), OTHERS, MINE)
    assert mine.equal(swapped[1])
    assert others.equal(swapped[0])
    before = pair_trainer(tmp_path / "before")
    before.trainer_of("ppo").fill_reference(max(before.model.groups(MINE), key=len)[1:], MINE)
    assert visits(before, MINE)[0].equal(mine)
    killed = pair_trainer(tmp_path / "killed")
    ppo, calls = killed.trainer_of("ppo"), []
    outputs = ppo._outputs

    def dies(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return outputs(*args)

    ppo._outputs = dies
    with pytest.raises(KeyboardInterrupt):
        visits(killed, MINE)
    second = pair_trainer(tmp_path / "killed")
    rows = through(second)
    assert visits(second, MINE)[0].equal(mine)
    assert rows == [row for group in second.model.groups(MINE)[2:] for row in group.tolist()]
