"""In-context examples: prompts by hand, and scores of a run against plain transformers."""

import numpy as np
import pytest
import torch
import transformers

from prefed.core import Key
from prefed.data import Message, Record, Template
from prefed.data.examples import ExampleEncoder, with_examples
from prefed.models import ModelConfig, make_backbone
from prefed.train import PairTrainer
from preferences import tokenizer
from tastes import record

CHAT = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
TALK = [Record((Message("system", "S"), Message("user", f"Q{k}")), f"yes{k}", f"no{k}") for k in range(3)]


def encoder(length, template=None):
    tokens = tokenizer()
    tokens.chat_template = template
    return ExampleEncoder(tokens, Template(tokens), length, Key(3)), tokens


def test_examples_are_turns_of_the_chat_template():
    """The pair's system turn is first and those of examples are gone; a rejected response is nowhere."""
    made, tokens = encoder(200, CHAT)
    pair = made.encode(TALK[2], TALK[:2])
    assert tokens.decode(pair.prompt) == "<s>S<u>Q0<a>yes0<u>Q1<a>yes1<u>Q2<a>"
    assert [tokens.decode(ids) for ids in pair[1:]] == ["yes2<eos>", "no2<eos>"]


def test_as_many_examples_as_fit():
    """By bytes: a pair of 2 + 5 + 1 (text and end), each example 2 + 5 and a separator of 2. So 8, 17 and 26
    tokens hold 0, 1 and 2 examples; one less holds one less."""
    pairs = [Record(f"P{k}", f"good{k}", f"evil{k}") for k in range(3)]
    for length, count in ((8, 0), (16, 0), (17, 1), (25, 1), (26, 2), (99, 2)):
        made, tokens = encoder(length)
        expected = "".join(f"P{k}good{k}\n\n" for k in range(count)) + "P2"
        assert tokens.decode(made.encode(pairs[2], pairs[:2]).prompt) == expected, length


def test_a_repeat_of_the_judged_pair_is_no_example():
    """Nor is it with chosen and rejected swapped, which would say the opposite."""
    made, tokens = encoder(99)
    pair, other = record(1, True), record(2, True)
    prompt = made.encode(pair, [pair, record(1, False), other]).prompt
    assert tokens.decode(prompt) == with_examples(pair.prompt, [other])


def test_more_examples_only_add_to_fewer():
    made, _ = encoder(99)
    rows = np.arange(20)
    draws = [made.draw("a", rows, count).tolist() for count in (2, 8, 30)]
    assert [draws[1][:2], draws[2][:8], sorted(draws[2])] == [*draws[:2], rows.tolist()]
    assert made.draw("b", rows, 8).tolist() != draws[1]


@pytest.mark.parametrize("fast", [True, False])
def test_scores_are_those_of_plain_transformers(tmp_path, fast):
    """log π of both responses, of the text of examples, prompt and response, summed over the response."""
    from prefed.data.encoding import PolicyEncoder
    from prefed.data.tokens import write_records

    tokens = tokenizer()
    policy = PolicyEncoder(tokens, Template(tokens), max_length=160, too_long="error")
    data = write_records(tmp_path, policy, [record(k, k < 6) for k in range(12)], "pairs")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=261, n_positions=160, n_embd=32, n_layer=2, n_head=4)
    causal = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in causal.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    settings = ModelConfig(name="gpt2", device="cpu", fast=fast)
    backbone = make_backbone(causal, tokens, settings, Key(1), frozenset({"examples"}))
    made = ExampleEncoder(tokens, Template(tokens), 160, Key(3))
    trainer = PairTrainer(backbone, data, fast=fast, examples=made)
    shown, rows = [data.record(k) for k in (0, 7)], np.array([3, 9])
    scores = trainer.score(backbone.initial, rows, shown)
    none = trainer.score(backbone.initial, rows)
    for place, row in enumerate(rows):
        pair = data.record(int(row))
        start = "".join(f"{e.prompt}{e.chosen}\n\n" for e in shown)
        for side, response in enumerate((pair.chosen, pair.rejected)):
            for got, before in ((scores, start), (none, "")):
                ids = torch.tensor([tokens(f"{before}{pair.prompt}{response}<eos>")["input_ids"]])
                count = len(tokens(f"{response}<eos>")["input_ids"])
                with torch.no_grad():
                    logps = causal(ids).logits[0].log_softmax(-1)
                terms = [logps[k - 1, ids[0, k]] for k in range(ids.shape[1] - count, ids.shape[1])]
                assert got.policy[place, side] == pytest.approx(float(sum(terms)), rel=1e-4, abs=1e-3)
    assert np.array_equal(scores.reference, none.reference)
    assert np.abs(scores.policy - none.policy).min() > 0.01  # so the model reads the examples
