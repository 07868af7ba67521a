"""``[model] train = "full"``: a model whose every weight trains, compared with plain transformers and
torch."""

import numpy as np
import pytest
import torch
from tests.small_models import FAMILIES, Pairs, away, backbone, causal

from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase
from prefed.models import ModelError, save_adapter, save_merged
from prefed.train import PairTrainer
from prefed.train.optimizer_steps import batches

PAIRS = Pairs(6)
ROWS = np.arange(6)


def full(family="gpt2"):
    """A small model, every weight of which is movable."""
    return backbone(family, frozenset({"weights"}))


def sums(model, pair):
    """log π of both responses, by the model's own forward on each sequence alone."""
    found = []
    for response in (pair.chosen, pair.rejected):
        ids = torch.from_numpy(np.concatenate([pair.prompt, response]).astype(np.int64))[None]
        tokens = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        found.append(tokens.gather(1, ids[0, 1:, None])[len(pair.prompt) - 1 :, 0].sum())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_part_is_every_weight_once(family):
    """As many elements as the model has parameters, which transformers counts with tied ones once. The start
    and the reference are the model as loaded."""
    model, plain = full(family), causal(family)
    assert model.layout.size == plain.num_parameters()
    expected = dict(plain.named_parameters())
    assert [f"weights/{name}" for name in expected] == list(model.layout.names)
    for name, weight in expected.items():
        assert torch.equal(model.initial[f"weights/{name}"], weight.detach())
    assert model.reference.equal(model.initial)
    blocks = {model.layout[name].block for name in model.layout.names}
    assert blocks == {None, 0, 1}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_three_steps_are_those_of_torch(family):
    """DPO by plain gradient steps with a clip of 1, three of two pairs each: transformers' forward, the
    formula of the loss, torch's optimiser and ``clip_grad_norm_`` on the plain model; the reference is its
    start. All weights agree to 1e-4 of the way that they went."""
    lr, beta = 0.1, 0.2
    model = full(family)
    sgd, goal = Optimizer("sgd", lr=lr), Objective("dpo", {"beta": beta})
    phase = Phase("train", model.layout.names, goal, sgd, batch_size=2, steps=3)
    key = Key(5)
    ownership = Ownership.of(model.layout, lambda entry: Owner.SHARED)
    start = away(model.layout, model.initial, 0.02)
    result = PairTrainer(model, PAIRS).visit(ROWS, key, ownership).train(start, phase)

    plain, reference = causal(family), causal(family)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            weight.copy_(start[f"weights/{name}"])
    steps = torch.optim.SGD(plain.parameters(), lr=lr, weight_decay=sgd.weight_decay)
    for rows in batches(ROWS, phase, key.at("phase", "train")):
        losses = []
        for row in rows:
            pair = PAIRS.pair(int(row))
            with torch.no_grad():
                before = sums(reference, pair)
            after = sums(plain, pair)
            margin = (after[0] - before[0]) - (after[1] - before[1])
            losses.append(-torch.nn.functional.logsigmoid(beta * margin))
        steps.zero_grad()
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), sgd.clip)
        steps.step()
    got = torch.cat([result.tensors[f"weights/{name}"].flatten() for name, _ in plain.named_parameters()])
    want = torch.cat([weight.detach().flatten() for weight in plain.parameters()])
    assert (got - want).norm() < 1e-4 * (want - start.flat).norm()


def test_a_merged_model_holds_the_weights(tmp_path):
    """``save_merged`` writes a folder from which transformers loads the trained weights; no adapter can."""
    from transformers import AutoModelForCausalLM

    model = full()
    moved = away(model.layout, model.initial)
    save_merged(model, moved, tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, moved[f"weights/{name}"])
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    with pytest.raises(ModelError, match="all weights were trained, which an adapter cannot contain"):
        save_adapter(model, moved, tmp_path / "adapter")
