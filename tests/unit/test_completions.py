"""Completions of many prompts at once: draws from the softmax, each sequence by its own key."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare

from prefed.core import Key
from prefed.data import Message
from prefed.models import fused_lora
from prefed.train import generation
from prefed.train.generation import (
    GumbelNoise,
    Sampling,
    _pads,
    _processors,
    as_prompt,
    complete_batch,
    length_batches,
    padded_batches,
)
from prefed.train.packed import NAME, enable_packing
from small_models import FAMILIES, VOCABULARY, away, backbone, float64

PROMPTS = [[5, 9, 2], [7, 7, 3], [1, 50, 80], [6, 4, 33]]
KEYS = [Key(1).at("sequence", number) for number in range(4)]


def small(family="gpt2", end=0):
    """A backbone whose tokenizer is asked for nothing but its end-of-text token."""
    model = backbone(family)
    model.tokenizer = SimpleNamespace(eos_token_id=end)
    model.causal.generation_config.eos_token_id = end
    return model, away(model.layout, model.initial)


def alone(model, tensors, prompts, how, keys):
    """What each prompt gets by itself."""
    return [complete_batch(model, tensors, [p], how, [k])[0] for p, k in zip(prompts, keys, strict=True)]


def test_noise_makes_the_argmax_a_draw_from_the_softmax():
    """16,000 draws from the softmax of five logits. Under the law the chi-squared statistic has 4 degrees of
    freedom; the key is fixed, and p < 0.001 would be one key in a thousand."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -torch.inf], dtype=torch.float64)
    noise = GumbelNoise([Key(3).at("draw", number) for number in range(8)])
    counts = torch.zeros(5)
    for _ in range(2000):
        draws = noise(torch.empty(8, 0), logits.expand(8, 5)).argmax(1)
        counts += torch.bincount(draws, minlength=5)
    assert counts[4] == 0
    expected = 16_000 * logits.softmax(0)[:4]
    assert chisquare(counts[:4].double().numpy(), expected.numpy()).pvalue > 1e-3


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({"temperature": 0.5}, [4.0, 2.0, 0.0, -2.0]),
        ({"temperature": 0.5, "top_k": 2}, [4.0, 2.0]),
        ({"temperature": 1.0, "top_p": 0.8}, [2.0, 1.0]),
    ],
)
def test_temperature_and_cuts_come_before_the_noise(how, kept):
    """Logits 2, 1, 0, −1 over T = 0.5; top-k 2 keeps two. At T = 1 their probabilities are 0.64, 0.24, 0.09,
    0.03: the first two are the least that reach 0.8."""
    *warpers, noise = _processors(Sampling(**how), [Key(0)])
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    assert isinstance(noise, GumbelNoise)
    assert scores[scores > -torch.inf].tolist() == kept


def test_a_lora_is_left_out_only_while_all_its_b_are_zero(monkeypatch):
    """Its products are not computed for the base model, whose answers are the same; one B is enough to need
    them."""
    model, tensors = small("llama")
    with_lora = complete_batch(model, tensors, PROMPTS, Sampling(max_tokens=5, temperature=0), KEYS)
    b = next(entry.name for entry in model.layout.entries if entry.factor == "B")
    one = model.reference.replace({b: tensors[b]})
    calls, product = [], fused_lora.lora_linear
    monkeypatch.setattr(fused_lora, "lora_linear", lambda *args: calls.append(args) or product(*args))

    def complete(own):
        calls.clear()
        return complete_batch(model, own, PROMPTS, Sampling(max_tokens=5, temperature=0), KEYS), len(calls)

    plain, none = complete(model.reference)
    complete(one)
    assert none == 0
    assert calls
    assert complete(tensors)[0] == with_lora
    monkeypatch.setattr(type(model), "without_idle_lora", lambda self: nullcontext())
    assert complete(model.reference)[0] == plain
    assert calls


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_greedy_completions_are_those_of_generate(family):
    """The peer: ``model.generate`` for each prompt by itself. Both stop at the same end-of-text token, the
    fourth token that the first prompt gets."""
    model, tensors = small(family)
    model.load(tensors)

    def generate(prompt, **stop):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.causal.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9, **stop
            )
        return output[0, 3:].tolist()

    end = generate(PROMPTS[0], eos_token_id=None, pad_token_id=0)[3]
    model.tokenizer.eos_token_id = model.causal.generation_config.eos_token_id = end
    expected = [generate(prompt, eos_token_id=end, pad_token_id=end) for prompt in PROMPTS]
    expected = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in expected]
    assert len(expected[0]) <= 3
    completions = complete_batch(model, tensors, PROMPTS, Sampling(max_tokens=9, temperature=0), KEYS)
    assert [tokens for tokens, _ in completions] == expected


@pytest.mark.parametrize("packed", [False, True])
def test_the_head_gets_contiguous_rows(packed):
    """For a view of the last positions, PyTorch would copy the weights once per prompt on a CPU."""
    model, tensors = small("llama", end=VOCABULARY - 1)
    if packed:
        enable_packing(model)
    seen, head = [], model.causal.get_output_embeddings()
    head.register_forward_hook(
        lambda _, inputs, __: seen.append((inputs[0].is_contiguous(), *inputs[0].shape))
    )
    complete_batch(model, tensors, PROMPTS, Sampling(max_tokens=2), KEYS)
    assert seen == [(True, 4, 1, model.width)] * 2
    assert len(head._forward_pre_hooks) == 0


def test_a_sequence_draws_by_its_key_alone():
    """The same prompt and key with other prompts, in another place, and alone. With one key two equal
    prompts get equal tokens, with two keys they do not. The window leaves 64 − 3 tokens."""
    model, tensors = small(end=VOCABULARY - 1)
    how = Sampling(max_tokens=500, temperature=0.9)
    together = complete_batch(model, tensors, PROMPTS, how, KEYS)
    assert max(len(tokens) for tokens, _ in together) == 61
    turned = complete_batch(model, tensors, PROMPTS[::-1], how, KEYS[::-1])
    assert turned[::-1] == together
    assert alone(model, tensors, PROMPTS, how, KEYS) == together
    same = complete_batch(model, tensors, [PROMPTS[0]] * 3, how, [KEYS[0], KEYS[0], KEYS[1]])
    assert same[0] == same[1] == together[0]
    assert same[2] != same[0]


@pytest.mark.sample
@pytest.mark.parametrize("family", ["gemma", "gpt2", "llama"])
@pytest.mark.parametrize("packed", [False, True])
def test_prompts_of_different_lengths_get_what_they_get_by_themselves(family, packed):
    """In float64. Four fit into a batch, of those that have equal room for a response: 9 tokens, or 61, which
    the window of 64 leaves for all but the one of six tokens."""
    with float64():
        model, tensors = small(family, end=VOCABULARY - 1)
        if packed:
            enable_packing(model)
        prompts = [[5, 9, 2], [7], [1, 50, 80, 4, 4, 9], [6, 4], [8, 8]]
        for how in (Sampling(max_tokens=9, temperature=0), Sampling(max_tokens=61, temperature=0.9)):
            found, keys = {}, [*KEYS, Key(9)]
            batches = padded_batches(model, prompts, how, 4)
            for batch in batches:
                some = complete_batch(
                    model, tensors, [prompts[k] for k in batch], how, [keys[k] for k in batch]
                )
                found |= dict(zip(batch, some, strict=True))
            singles = alone(model, tensors, prompts, how, keys)
            assert [found[number] for number in range(5)] == singles
            assert [len(batch) for batch in batches] == [4, 1]


@pytest.mark.sample
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_prompt_of_several_completions_is_read_once(family):
    """In float64. Two different prompts of two and three tokens, padded to three: two tokens of each are read
    once, and then the last token of all four rows."""
    with float64():
        model, tensors = small(family, end=VOCABULARY - 1)
        prompts = [[5, 9, 2], [7, 4], [5, 9, 2], [7, 4]] if _pads(model) else [PROMPTS[0], PROMPTS[1]] * 2
        how = Sampling(max_tokens=9, temperature=0.9)
        singles = alone(model, tensors, prompts, how, KEYS)
        read = []
        model.causal.get_input_embeddings().register_forward_hook(
            lambda _, inputs, __: read.append(inputs[0].numel())
        )
        assert complete_batch(model, tensors, prompts, how, KEYS) == singles
        assert read[:2] == ([4, 4] if _pads(model) else [12, 4])


@pytest.mark.sample
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_response_that_has_ended_is_left_out_after_its_piece(family, monkeypatch):
    """In float64, in pieces of four tokens. The end is a token that the first response would have sixth, so
    that it takes part in two pieces; every response is what it is by itself."""
    monkeypatch.setattr(generation, "_PIECE", 4)
    how = Sampling(max_tokens=15, temperature=0.9)
    with float64():
        model, tensors = small(family, end=VOCABULARY - 1)
        free = complete_batch(model, tensors, PROMPTS[:1], how, KEYS[:1])[0].tokens
        model.tokenizer.eos_token_id = model.causal.generation_config.eos_token_id = free[5]
        singles = alone(model, tensors, PROMPTS, how, KEYS)
        read = []
        model.causal.get_input_embeddings().register_forward_hook(
            lambda _, inputs, __: read.append(inputs[0].numel())
        )
        assert complete_batch(model, tensors, PROMPTS, how, KEYS) == singles
    lengths = [len(tokens) + (end is not None) for tokens, end in singles]
    assert min(lengths) <= 6 < max(lengths)
    rows = [sum(length > step // 4 * 4 for length in lengths) for step in range(1, max(lengths))]
    assert read == [12, *(rows if _pads(model) else [4] * len(rows))]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_that_was_trained_on_packed_pairs_completes_alike(family):
    """Packing changes the model's attention, and its mask knows nothing of a cache that is not full."""
    model, tensors = small(family, end=VOCABULARY - 1)
    how = Sampling(max_tokens=20, temperature=0.9)
    before = complete_batch(model, tensors, PROMPTS, how, KEYS)
    assert enable_packing(model) == ""
    assert complete_batch(model, tensors, PROMPTS, how, KEYS) == before
    assert model.causal.config._attn_implementation == NAME


def test_batches_hold_each_prompt_once_and_one_length_each():
    prompts = [[0] * length for length in (3, 1, 3, 3, 2, 1, 3, 3)]
    batches = length_batches(prompts, 2)
    assert sorted(number for batch in batches for number in batch) == list(range(8))
    lengths = [[len(prompts[number]) for number in batch] for batch in batches]
    assert lengths == [[1, 1], [2], [3, 3], [3, 3], [3]]
    assert length_batches([], 4) == []


@pytest.mark.sample
@pytest.mark.parametrize("like", [None, (Message("user", "Hi"),), "\n\nHuman: Hi\n\nAssistant:"])
@pytest.mark.parametrize("text", ["\n\nHuman: A?\n\nAssistant: ", "\n\nHuman: A?", "A?\n\nAssistant:"])
def test_a_dialogue_is_no_turn_of_a_dialogue(text, like):
    """`prefed align`, `generate` and `judge` take a text in the Human/Assistant form as it is."""
    assert as_prompt(text, like) == text
