"""Text from a backbone with a client's tensors in it: one response, or a batch of prompts of equal length.

In a batch the next token of a sequence is drawn by the Gumbel-max trick. Let z be its processed logits, and
let G_k be independent Gumbel variables, one for each token: P(G_k ≤ g) = exp(−e^−g). Token k has the largest
z_k + G_k with probability

    ∫ p(g − z_k) Π_{j≠k} P(G_j ≤ g − z_j) dg
        = ∫ e^{z_k − g} exp(−e^−g Σ_j e^{z_j}) dg = e^{z_k} / Σ_j e^{z_j},

where p(x) = e^−x exp(−e^−x) is the density. So the argmax is a draw from the softmax. With E exponential,
−log E is Gumbel. A token that a warper removed has z = −∞ and is never drawn.

Each sequence has its own generator, so its noise depends only on its key, not on the other sequences of the
batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from pydantic import Field

from prefed.core import Key, Tensors
from prefed.core.strict_settings import StrictModel
from prefed.data import Message, Prompt, Template
from prefed.data.encoding import continuation_text, start_tokens
from prefed.models import Backbone
from prefed.models.tastes import tasting
from prefed.train.packed import NAME as PACKED

_USER, _TURN = "\n\nHuman: ", "\n\nAssistant:"


class Sampling(StrictModel):
    """How the next token is drawn.

    Attributes:
        max_tokens: of a response; fewer where the model's window or its end-of-text token comes first.
        temperature: 0 always takes the most likely token.
        top_p: draw from the most likely tokens that together have this probability.
        top_k: draw from this many of the most likely tokens; 0: from all.
    """

    max_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.7, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)


def as_prompt(text: str, like: Prompt | None, *, raw: bool = False) -> Prompt:
    r"""A user's text in the form of the prompts of a run's data.

    The text becomes a user's turn where these prompts are conversations, or end where the assistant speaks.
    A text that is a dialogue already, by its beginning or its end, stays as it is.

    Args:
        like: a prompt of the run's data; ``None`` if there is none.
        raw: return the text unchanged.

    >>> as_prompt("Name a colour.", "\n\nHuman: Hi\n\nAssistant:")
    '\n\nHuman: Name a colour.\n\nAssistant:'
    >>> as_prompt("def add(a, b):", "def mul(a, b):")
    'def add(a, b):'
    """
    if raw or text.startswith(_USER) or text.endswith(_TURN):
        return text
    if like is not None and not isinstance(like, str):
        return (Message("user", text),)
    if like is not None and like.startswith(_USER) and like.endswith(_TURN):
        return f"{_USER}{text}{_TURN}"
    return text


def prompt_ids(tokenizer: Any, template: Template, prompt: Prompt) -> list[int]:
    """Token ids of a prompt as in a run's data, special tokens included."""
    ids: list[int] = list(tokenizer(template.prompt(prompt), add_special_tokens=False)["input_ids"])
    if not (template.chat and not isinstance(prompt, str)) and ids[:1] != [tokenizer.bos_token_id]:
        ids = [*start_tokens(tokenizer), *ids]
    return ids or [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id]


def room_for(backbone: Backbone, length: int, how: Sampling) -> int:
    """Tokens that a response to a prompt of ``length`` tokens may have.

    Raises:
        ValueError: the prompt fills the model's window.
    """
    window = backbone.window
    room = how.max_tokens if window is None else min(how.max_tokens, window - length)
    if room < 1:
        raise ValueError(f"the prompt has {length} tokens and the model's window {window}: shorten it")
    return room


def end_tokens(backbone: Backbone) -> set[int]:
    """The end-of-text tokens of the tokenizer and of the model's generation settings."""
    own = getattr(backbone.causal.generation_config, "eos_token_id", None)
    return {
        backbone.tokenizer.eos_token_id,
        *([] if own is None else own if isinstance(own, list) else [own]),
    }


def complete(
    backbone: Backbone,
    tensors: Tensors,
    prompt: list[int],
    how: Sampling,
    key: Key,
    taste: torch.Tensor | None = None,
) -> str:
    """One response to a prompt.

    Args:
        tensors: full layout; ``backbone.reference`` makes the untouched model.
        key: the randomness; equal keys draw with equal random numbers, also under other tensors.
        taste: ``[d_z]``, at which a policy that takes a taste responds; ``None`` for none.

    Raises:
        ValueError: the prompt fills the model's window; or a taste is given and the model takes none.
    """
    from transformers import GenerationConfig

    room, tokenizer, ends = room_for(backbone, len(prompt), how), backbone.tokenizer, end_tokens(backbone)
    sampling: dict[str, float] = {}
    if how.temperature:
        sampling = {"temperature": how.temperature, "top_p": how.top_p, "top_k": how.top_k}
    settings = GenerationConfig(
        max_new_tokens=room,
        do_sample=bool(sampling),
        **sampling,
        repetition_penalty=1.0,
        eos_token_id=sorted(ends),
        pad_token_id=min(ends) if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )
    ids = torch.tensor([prompt], device=backbone.device)
    backbone.load(tensors)
    devices = [backbone.device] if backbone.device.type == "cuda" else []
    tastes = None if taste is None else taste[None]
    with (
        torch.inference_mode(),
        torch.random.fork_rng(devices=devices),
        tasting(backbone.taste_map, tastes),
    ):
        torch.manual_seed(key.number())
        output = backbone.causal.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings
        )
    return continuation_text(tokenizer, prompt, output[0, len(prompt) :].tolist())


def length_batches(prompts: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Numbers of prompts in batches of at most ``size`` prompts of equal length, short prompts first.

    >>> length_batches([[1, 2], [3], [4, 5], [6], [7]], 2)
    [[1, 3], [4], [0, 2]]
    """
    batches: list[list[int]] = []
    for number in sorted(range(len(prompts)), key=lambda number: len(prompts[number])):
        last = batches[-1] if batches else []
        if not last or len(last) == size or len(prompts[last[0]]) != len(prompts[number]):
            batches.append(last := [])
        last.append(number)
    return batches


def complete_batch(
    backbone: Backbone,
    tensors: Tensors,
    prompts: Sequence[Sequence[int]],
    how: Sampling,
    keys: Sequence[Key],
    tastes: torch.Tensor | None = None,
) -> list[list[int]]:
    """One response to each prompt, as token ids without the end-of-text token.

    What a sequence draws depends only on its key. Its logits do not depend on its neighbours either, except
    in the last digits: the order in which a matrix product sums may change with the number of rows. Equal
    batches give equal tokens.

    Args:
        tensors: full layout; ``backbone.reference`` makes the untouched model.
        prompts: token ids, all of one length; see :func:`length_batches`.
        keys: one for each response; they set its random draws.
        tastes: ``[B, d_z]``, at which a policy that takes a taste writes each response; ``None`` for none.

    Raises:
        ValueError: the prompts have different lengths, are not as many as the keys or tastes, or fill the
            window; or tastes are given and the model takes none.
    """
    from transformers import GenerationConfig, StaticCache

    if len({len(prompt) for prompt in prompts}) != 1 or len(prompts) != len(keys):
        lengths = sorted({len(prompt) for prompt in prompts})
        raise ValueError(
            f"a batch has prompts of one length and a key for each; these are {len(prompts)} prompts of "
            f"lengths {lengths} and {len(keys)} keys"
        )
    if tastes is not None and len(tastes) != len(prompts):
        raise ValueError(f"there are {len(tastes)} tastes for {len(prompts)} prompts: give one for each")
    length, ends, room = len(prompts[0]), end_tokens(backbone), room_for(backbone, len(prompts[0]), how)
    # A cache that grows is copied for every token. One of fixed size is not, but not every model takes one.
    fixed = backbone.family is not None
    cache = StaticCache(config=backbone.causal.config, max_cache_len=length + room) if fixed else None
    ids = torch.tensor([list(prompt) for prompt in prompts], device=backbone.device)
    settings = GenerationConfig(
        max_new_tokens=room,
        do_sample=False,
        use_cache=True,
        disable_compile=True,
        repetition_penalty=1.0,
        eos_token_id=sorted(ends),
        pad_token_id=min(ends),
    )
    backbone.load(tensors)
    with _usual_attention(backbone), torch.inference_mode(), tasting(backbone.taste_map, tastes):
        output = backbone.causal.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            past_key_values=cache,
            logits_processor=_processors(how, keys),
        )
    return [_until_end(row, ends) for row in output[:, length:].tolist()]


@contextmanager
def _usual_attention(backbone: Backbone) -> Iterator[None]:
    """The library's own attention, also in a model that was changed for packed input.

    Packed attention makes no mask for a cache that is not full yet.
    """
    causal = backbone.causal
    packed = causal.config._attn_implementation == PACKED
    if packed:
        causal.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if packed:
            causal.set_attn_implementation(PACKED)


def _processors(how: Sampling, keys: Sequence[Key]) -> Any:
    """What makes the greedy choice of ``generate`` a draw; nothing at temperature 0."""
    from transformers import (
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = LogitsProcessorList()
    if how.temperature:
        processors.append(TemperatureLogitsWarper(float(how.temperature)))
        if how.top_k:
            processors.append(TopKLogitsWarper(how.top_k))
        if how.top_p < 1:
            processors.append(TopPLogitsWarper(how.top_p))
        processors.append(GumbelNoise(keys))
    return processors


class GumbelNoise:
    """Adds Gumbel noise to the logits of every sequence, from the sequence's own generator."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._generators = [key.numpy() for key in keys]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``scores`` ``[B, V]`` with noise, in fp32. Noise is drawn on the CPU, alike for every device."""
        noise = np.empty(scores.shape)
        for row, generator in zip(noise, self._generators, strict=True):
            generator.standard_exponential(out=row)
        return scores.float() - torch.from_numpy(noise).float().log_().to(scores.device)


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:end]
