"""Agreement with TRL's own loss code on given log-probabilities.

TRL's trainers read a model's output only through per-token log-probabilities, so a stub model that returns
them runs TRL's formulas, unchanged, on numbers of our choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from prefed.train.losses import OBJECTIVES, PairBatch

trl = pytest.importorskip("trl")

SIZE, LENGTH, PROMPT = 6, 9, 2
ACCELERATOR = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x, gather=lambda x: x)


class Rows:
    """Random completions, chosen rows before rejected ones: log-probabilities of their tokens."""

    def __init__(self, seed: int, scale: float) -> None:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, LENGTH - PROMPT + 1, (2 * SIZE,), generator=draw)
        place = torch.arange(LENGTH)
        self.mask = (place >= PROMPT) & (place < PROMPT + lengths[:, None])
        self.policy = -scale * torch.rand(2 * SIZE, LENGTH - 1, generator=draw) * self.mask[:, 1:]
        self.reference = -scale * torch.rand(2 * SIZE, LENGTH - 1, generator=draw) * self.mask[:, 1:]
        self.lengths = lengths

    def batch(self) -> PairBatch:
        policy, reference = self.policy.sum(1), self.reference.sum(1)
        return PairBatch(
            policy_chosen=policy[:SIZE],
            chosen_length=self.lengths[:SIZE],
            policy_rejected=policy[SIZE:],
            rejected_length=self.lengths[SIZE:],
            reference_chosen=reference[:SIZE],
            reference_rejected=reference[SIZE:],
        )

    def outputs(self, rows: Tensor) -> SimpleNamespace:
        log_probs = self.policy[rows]
        zero = torch.zeros_like(log_probs)
        return SimpleNamespace(log_probs=log_probs, entropy=zero, mean_logits=zero, is_top1=zero.bool())


@pytest.fixture(params=[(0, 0.2), (1, 3.0), (2, 30.0)], ids=str)
def rows(request: pytest.FixtureRequest) -> Rows:
    return Rows(*request.param)


def trainer(**settings: Any) -> SimpleNamespace:
    """What TRL's loss methods read of ``self``."""
    return SimpleNamespace(
        accelerator=ACCELERATOR,
        model=SimpleNamespace(training=False),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        **settings,
    )


def run_dpo_trainer(
    rows: Rows, loss_type: str, beta: float, smoothing: float, chosen: list[int], **added: float
) -> tuple[Tensor, dict[str, list[float]]]:
    """TRL's DPOTrainer loss over the given pairs, and what it logs; ``added``: weights of further losses."""
    from trl.trainer.dpo_trainer import DPOTrainer

    index = torch.tensor([*chosen, *(SIZE + i for i in chosen)])
    stub = trainer(
        loss_types=[loss_type, *added],
        loss_weights=[1.0, *added.values()],
        beta=beta,
        label_smoothing=smoothing,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
    )
    reference = rows.reference.sum(1)[index]
    inputs = {
        "input_ids": torch.zeros(len(index), LENGTH, dtype=torch.int64),
        "attention_mask": torch.ones(len(index), LENGTH, dtype=torch.int64),
        "completion_mask": rows.mask[index].long(),
        "ref_chosen_logps": reference[: len(chosen)],
        "ref_rejected_logps": reference[len(chosen) :],
    }
    loss = DPOTrainer._compute_loss(stub, lambda **_: rows.outputs(index), inputs, False)
    return loss, stub._metrics["eval"]


def dpo_trainer(rows: Rows, loss_type: str, beta: float, smoothing: float, chosen: list[int]) -> Tensor:
    return run_dpo_trainer(rows, loss_type, beta, smoothing, chosen)[0]


def agree(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.sample
@pytest.mark.parametrize(
    ("name", "loss_type", "smoothing"),
    [
        ("dpo", "sigmoid", 0.0),
        ("hinge", "hinge", 0.0),
        ("ipo", "ipo", 0.0),
        ("dpo_norm", "sigmoid_norm", 0.0),
        ("robust", "robust", 0.3),
        # TRL smooths labels in "aot", which on one pair is the smoothed logistic loss itself.
        ("cdpo", "aot", 0.3),
    ],
)
def test_pairwise(rows: Rows, name: str, loss_type: str, smoothing: float) -> None:
    """Pair by pair, and, except where TRL's loss is not a mean over pairs, over the batch."""
    beta = 0.7
    settings = {"beta": beta} | ({"label_smoothing": smoothing} if smoothing else {})
    ours = OBJECTIVES[name](rows.batch(), settings)[0]
    theirs = [dpo_trainer(rows, loss_type, beta, smoothing, [i]) for i in range(SIZE)]
    agree(ours, torch.stack(theirs))
    if loss_type != "aot":
        agree(ours.mean(), dpo_trainer(rows, loss_type, beta, smoothing, list(range(SIZE))))


def test_figures(rows: Rows) -> None:
    """TRL logs the same accuracy, margin and rewards."""
    _, figures = OBJECTIVES["dpo"](rows.batch(), {"beta": 0.3})
    _, logged = run_dpo_trainer(rows, "sigmoid", 0.3, 0.0, list(range(SIZE)))
    for ours, theirs in {
        "accuracy": "rewards/accuracies",
        "margin": "rewards/margins",
        "reward_chosen": "rewards/chosen",
        "reward_rejected": "rewards/rejected",
    }.items():
        assert float(figures[ours]) == pytest.approx(logged[theirs][0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_rpo(rows: Rows, alpha: float) -> None:
    """TRL's loss types ``["sigmoid", "sft"]`` with weights 1 and α, its former ``rpo_alpha``, pair by pair:
    TRL averages over the tokens of a batch, the paper over those of each pair."""
    ours = OBJECTIVES["rpo"](rows.batch(), {"beta": 0.3, "alpha": alpha})[0]
    theirs = [run_dpo_trainer(rows, "sigmoid", 0.3, 0.0, [i], sft=alpha)[0] for i in range(SIZE)]
    agree(ours, torch.stack(theirs))


def test_sft(rows: Rows) -> None:
    agree(OBJECTIVES["sft"](rows.batch())[0].mean(), dpo_trainer(rows, "sft", 0.1, 0.0, list(range(SIZE))))


def test_kto_pair(rows: Rows) -> None:
    """TRL's KTO reads unpaired responses and one baseline: the chosen ones against the rejected ones' mean
    log-ratio and the rejected ones against the chosen ones' are the two halves of a batch of pairs."""
    from trl.trainer.kto_trainer import KTOTrainer

    beta = 0.7

    def half(own: Tensor, other: Tensor, good: bool) -> Tensor:
        stub = trainer(
            loss_type="kto",
            beta=beta,
            desirable_weight=1.3,
            undesirable_weight=0.6,
            calculate_KL=True,
            _compute_kl_logps=lambda *_: rows.policy.sum(1)[other],
        )
        inputs = {
            "input_ids": torch.zeros(SIZE, LENGTH, dtype=torch.int64),
            "attention_mask": torch.ones(SIZE, LENGTH, dtype=torch.int64),
            "completion_mask": rows.mask[own].long(),
            "label": torch.full((SIZE,), good),
            "ref_logps": rows.reference.sum(1)[own],
            "ref_KL_logps": rows.reference.sum(1)[other],
        }
        return KTOTrainer._compute_loss(stub, lambda **_: rows.outputs(own), inputs, False)

    chosen, rejected = torch.arange(SIZE), torch.arange(SIZE, 2 * SIZE)
    theirs = (half(chosen, rejected, True) + half(rejected, chosen, False)) / 2
    ours, _ = OBJECTIVES["kto_pair"](rows.batch(), {"beta": beta, "desirable": 1.3, "undesirable": 0.6})
    agree(ours.mean(), theirs)


@pytest.fixture
def experimental(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def load(name: str) -> Any:
        module = pytest.importorskip(f"trl.experimental.{name}.{name}_trainer")
        return getattr(module, f"{name.upper()}Trainer")

    return load


def test_cdpo_as_cpo_smooths(rows: Rows, experimental: Callable[[str], Any]) -> None:
    """CPO's smoothed logistic loss, with log-ratios in place of log-probabilities, is cDPO's."""
    stub = SimpleNamespace(
        alpha=0.0, loss_type="sigmoid", beta=0.2, label_smoothing=0.15, accelerator=ACCELERATOR
    )
    batch = rows.batch()
    theirs = experimental("cpo").cpo_loss(stub, batch.chosen_ratio, batch.rejected_ratio)[0]
    agree(OBJECTIVES["cdpo"](batch, {"beta": 0.2, "label_smoothing": 0.15})[0], theirs)


@pytest.mark.parametrize(("beta", "gamma"), [(2.0, 0.5), (10.0, 5.0)])
def test_simpo(rows: Rows, experimental: Callable[[str], Any], beta: float, gamma: float) -> None:
    stub = SimpleNamespace(
        alpha=0.0,
        loss_type="simpo",
        beta=beta,
        simpo_gamma=gamma,
        label_smoothing=0.0,
        accelerator=ACCELERATOR,
    )
    batch = rows.batch()
    theirs = experimental("cpo").cpo_loss(stub, batch.average_chosen, batch.average_rejected)[0]
    agree(OBJECTIVES["simpo"](batch, {"beta": beta, "gamma": gamma})[0], theirs)


def test_orpo(rows: Rows, experimental: Callable[[str], Any]) -> None:
    """The odds-ratio term is TRL's; the likelihood term, here of the completion alone, is added to both."""
    batch = rows.batch()
    stub = SimpleNamespace(beta=0.4, accelerator=ACCELERATOR)
    theirs = experimental("orpo").odds_ratio_loss(stub, batch.average_chosen, batch.average_rejected)[0]
    agree(OBJECTIVES["orpo"](batch, {"beta": 0.4})[0], -batch.average_chosen - theirs)


def test_the_oracle_sees_a_wrong_sign(rows: Rows) -> None:
    """Swapping the responses changes TRL's figure: the stub does feed it our numbers."""
    batch = rows.batch()
    swapped = replace(batch, policy_chosen=batch.policy_rejected, policy_rejected=batch.policy_chosen)
    ours = OBJECTIVES["dpo"](swapped, {"beta": 0.7})[0].mean()
    assert abs(float(ours - dpo_trainer(rows, "sigmoid", 0.7, 0.0, list(range(SIZE))))) > 1e-3
