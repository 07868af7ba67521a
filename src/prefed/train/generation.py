"""Text generation with a client's tensors: one response, or a batch of prompts.

In a batch, tokens are sampled with the Gumbel-max trick. Let z be the processed logits and G_k independent
Gumbel variables, P(G_k ≤ g) = exp(−e^−g) with density p. Token k has the largest z_k + G_k with probability

    ∫ p(g − z_k) Π_{j≠k} P(G_j ≤ g − z_j) dg
        = ∫ e^{z_k − g} exp(−e^−g Σ_j e^{z_j}) dg = e^{z_k} / Σ_j e^{z_j},

so the argmax is a sample from the softmax. For exponential E, −log E is Gumbel. Tokens removed by a warper
have z = −∞ and are never sampled. Each sequence has its own generator, so its noise does not depend on the
rest of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch

from prefed.core import Key, Tensors
from prefed.data import Message, Pair, Prompt, Template
from prefed.data.encoding import continuation_text
from prefed.models import Backbone
from prefed.train.metrics.text import WrittenAnswer, without_numbers
from prefed.train.packed import NAME as PACKED
from prefed.train.padded import PaddedForward
from prefed.train.sampling import Sampling as Sampling

_CACHE = "cache" if tuple(map(int, version("transformers").split(".")[:2])) >= (5, 24) else "past_key_values"
"""The argument of ``generate`` and of models with a cache."""
_USER, _TURN = "\n\nHuman: ", "\n\nAssistant:"


_PIECE = 32
"""Tokens of a batch's responses until those that have ended are left out of it."""
BATCH = 32
"""Responses that are generated together, unless a setting says otherwise."""
SCORED = 4
"""Completions that :func:`surprises` scores together."""


class Completion(NamedTuple):
    """A generated response.

    Attributes:
        tokens: its token ids, without the end-of-text token.
        end: the end-of-text token that the model generated; ``None`` if the response was cut.
    """

    tokens: list[int]
    end: int | None

    @property
    def ended(self) -> bool:
        """Whether the model ended it."""
        return self.end is not None


def as_prompt(text: str, like: Prompt | None, *, raw: bool = False) -> Prompt:
    r"""Convert a user's text to the format of the prompts in a run's data.

    The text becomes a user turn if these prompts are conversations or end with the assistant's turn. Text
    that is already a dialogue is unchanged.

    Args:
        like: a prompt from the run's data; ``None`` if there is none.
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


def prompt_form(template: Template) -> Prompt | None:
    """Return the format of typed prompts if the data have none: a user turn of the chat template, if any."""
    return (Message("user", ""),) if template.chat else None


def room_for(backbone: Backbone, length: int, how: Sampling) -> int:
    """Return the maximum length of a response to a prompt of ``length`` tokens.

    Raises:
        ValueError: the prompt fills the model's context.
    """
    window = backbone.window
    room = how.max_tokens if window is None else min(how.max_tokens, window - length)
    if room < 1:
        raise ValueError(f"the prompt has {length} tokens but the model's context is {window}; shorten it")
    return room


def end_tokens(backbone: Backbone) -> set[int]:
    """Return the end-of-text tokens of the tokenizer and of the model's generation settings."""
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
    """Generate one response to a prompt.

    Args:
        tensors: full layout; ``backbone.reference`` for the base model.
        key: random key. Equal keys give equal random numbers, also with other tensors.
        taste: ``[d_z]``, for a policy with a taste map; ``None`` for none.

    Raises:
        ValueError: the prompt fills the model's context, or ``taste`` is given without a taste map.
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
    with torch.inference_mode(), torch.random.fork_rng(devices=devices), backbone.tasting(tastes):
        key.seed_device(backbone.device.type)
        output = backbone.causal.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings
        )
    return continuation_text(tokenizer, prompt, output[0, len(prompt) :].tolist())


def length_batches(
    prompts: Sequence[Sequence[int]], size: int, rooms: Sequence[int] | None = None
) -> list[list[int]]:
    """Group prompt indices into batches of at most ``size`` prompts of equal length, shortest first.

    Args:
        rooms: the room for each prompt's response: group prompts of equal room instead.

    >>> length_batches([[1, 2], [3], [4, 5], [6], [7]], 2)
    [[1, 3], [4], [0, 2]]
    >>> length_batches([[1, 2], [3], [4, 5], [6], [7]], 4, rooms=[8] * 5)
    [[1, 3, 4, 0], [2]]
    """
    alike = rooms or [len(prompt) for prompt in prompts]
    batches: list[list[int]] = []
    for number in sorted(range(len(prompts)), key=lambda number: len(prompts[number])):
        last = batches[-1] if batches else []
        if not last or len(last) == size or alike[last[0]] != alike[number]:
            batches.append(last := [])
        last.append(number)
    return batches


def padded_batches(
    backbone: Backbone, prompts: Sequence[Sequence[int]], how: Sampling, size: int
) -> list[list[int]]:
    """Group prompt indices into as few batches for :func:`complete_batch` as the model allows.

    Raises:
        ValueError: a prompt fills the model's context.
    """
    rooms = [room_for(backbone, len(prompt), how) for prompt in prompts]
    return length_batches(prompts, size, rooms if _pads(backbone) else None)


def complete_batch(
    backbone: Backbone,
    tensors: Tensors,
    prompts: Sequence[Sequence[int]],
    how: Sampling,
    keys: Sequence[Key],
    tastes: torch.Tensor | None = None,
) -> list[Completion]:
    """Generate one response to each prompt.

    Shorter prompts are padded on the left, if the model supports that. The noise of a sequence depends only
    on its key. Its logits depend on the rest of the batch in the last
    digits only, because the summation order of a matrix product may change with the number of rows. Equal
    batches give equal tokens. A prompt that occurs several times is read once.

    Args:
        tensors: full layout; ``backbone.reference`` for the base model.
        prompts: token ids of equal length, or with equal room for a response (:func:`padded_batches`).
        keys: one random key per response.
        tastes: ``[B, d_z]``, for a policy with a taste map; ``None`` for none.

    Raises:
        ValueError: prompts do not form a batch or fill the context, numbers of prompts, keys and tastes
            differ, or ``tastes`` is given without a taste map.
    """
    from transformers import GenerationConfig, StaticCache

    lengths = sorted({len(prompt) for prompt in prompts})
    rooms = {room_for(backbone, length, how) for length in lengths}
    if len(rooms if _pads(backbone) else lengths) != 1 or len(prompts) != len(keys):
        raise ValueError(
            f"got {len(prompts)} prompts of lengths {lengths} and {len(keys)} keys; a batch requires prompts "
            "of equal length and one key per prompt"
        )
    if tastes is not None and len(tastes) != len(prompts):
        raise ValueError(f"got {len(tastes)} tastes for {len(prompts)} prompts; pass one taste per prompt")
    length, ends, (room, *_) = lengths[-1], end_tokens(backbone), rooms
    # A growing cache is copied for every token. A static cache is not, but not every model supports it.
    fixed = _pads(backbone)
    cache = StaticCache(config=backbone.causal.config, max_cache_len=length + room) if fixed else None
    spaces = [length - len(prompt) for prompt in prompts]
    padded = [[min(ends)] * space + list(prompt) for space, prompt in zip(spaces, prompts, strict=True)]
    ids = torch.tensor(padded, device=backbone.device)
    mask = torch.tensor([[0] * space + [1] * (length - space) for space in spaces], device=backbone.device)
    backbone.load(tensors)
    head = backbone.causal.get_output_embeddings()
    # For a slice, a CPU would copy the head's weights once per prompt.
    contiguous = head.register_forward_pre_hook(lambda _, rows: tuple(each.contiguous() for each in rows))
    rows, written = list(range(len(prompts))), [list[int]() for _ in prompts]
    processors, done = _processors(how, keys), 0
    with contiguous, _inference(backbone):
        if cache is not None and tastes is None:
            _read_once(backbone, cache, ids, mask)
        while rows and done < room:
            settings = GenerationConfig(
                max_new_tokens=room if cache is None else min(_PIECE, room - done),
                do_sample=False,
                use_cache=True,
                disable_compile=True,
                repetition_penalty=1.0,
                eos_token_id=sorted(ends),
                pad_token_id=min(ends),
            )
            with backbone.tasting(None if tastes is None else tastes[rows]):
                output = backbone.causal.generate(
                    ids,
                    attention_mask=mask,
                    generation_config=settings,
                    logits_processor=processors,
                    **{_CACHE: cache},
                )
            piece = output[:, ids.shape[1] :]
            done += piece.shape[1]
            for row, tokens in zip(rows, piece.tolist(), strict=True):
                written[row] += tokens
            # Responses that have ended cost no further time.
            places = [place for place, row in enumerate(rows) if ends.isdisjoint(written[row])]
            rows = [rows[place] for place in places]
            ids, mask = output, torch.cat([mask, torch.ones_like(piece)], 1)
            if cache is not None and 0 < len(places) < len(ids):
                kept = torch.tensor(places, device=ids.device)
                ids, mask = ids[kept], mask[kept]
                cache.reorder_cache(kept)
                if processors:  # the noise is the last one
                    processors[-1].keep(places)
    return [_until_end(row, ends) for row in written]


def _read_once(backbone: Backbone, cache: Any, ids: torch.Tensor, mask: torch.Tensor) -> None:
    """Fill the cache of completions that have prompts in common, except for the prompts' last token."""
    first: dict[tuple[int, ...], int] = {}
    rows = [first.setdefault(tuple(prompt), len(first)) for prompt in ids.tolist()]
    if len(first) == len(rows) or ids.shape[1] == 1:
        return
    once = torch.tensor([rows.index(number) for number in range(len(first))], device=ids.device)
    ids, mask = ids[once, :-1], mask[once, :-1]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    backbone.trunk(ids, attention_mask=mask, position_ids=positions, use_cache=True, **{_CACHE: cache})
    cache.reorder_cache(torch.tensor(rows, device=ids.device))


def _pads(backbone: Backbone) -> bool:
    """Whether the model supports a cache of fixed size and padding: its blocks have attention only."""
    return backbone.family is not None and backbone.family.static_cache


def _until_end(row: list[int], ends: set[int]) -> Completion:
    """Split the output for a prompt at its first end-of-text token.

    >>> _until_end([5, 6, 2, 0], {2}), _until_end([5, 6], {2})
    (Completion(tokens=[5, 6], end=2), Completion(tokens=[5, 6], end=None))
    """
    place = next((place for place, token in enumerate(row) if token in ends), None)
    return Completion(row, None) if place is None else Completion(row[:place], row[place])


def surprises(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    tensors: Tensors | None = None,
) -> list[float]:
    """Return −log p of each completion under the base model, in nats per token, including its end.

    Args:
        prompts: token ids.
        tensors: full layout of another model, without tastes; ``None`` for the base model.
    """
    backbone.load(backbone.reference if tensors is None else tensors)
    forward, found = PaddedForward(backbone), list[float]()
    empty = np.empty(0, np.int32)
    scored = [
        Pair(
            np.array(prompt, np.int32), np.array([*tokens, *([] if end is None else [end])], np.int32), empty
        )
        for prompt, (tokens, end) in zip(prompts, completions, strict=True)
    ]
    with _inference(backbone):
        for start in range(0, len(scored), SCORED):
            batch = scored[start : start + SCORED]
            logprobs = forward(batch, rejected=False)[:, 0].tolist()
            found += [-value / len(pair.chosen) for value, pair in zip(logprobs, batch, strict=True)]
    return found


def write_answers(
    backbone: Backbone,
    tensors: Tensors,
    prompts: Sequence[tuple[str, Sequence[int]]],
    how: Sampling,
    size: int,
    tastes: torch.Tensor | None = None,
) -> list[WrittenAnswer]:
    """Write an answer to each prompt without dropout, and score it with the base model.

    Args:
        tensors: full layout; ``backbone.reference`` for the base model.
        prompts: text of the last turn, and the token ids.
        how: without sampling (temperature 0).
        size: maximum number of prompts in a batch (:func:`padded_batches`).
        tastes: ``[len(prompts), d_z]``, for a policy with a taste map; ``None`` for none.
    """
    backbone.dropout()
    tokenizer, answers = backbone.tokenizer, dict[int, WrittenAnswer]()
    for batch in padded_batches(backbone, [ids for _, ids in prompts], how, size):
        asked, z = [prompts[place][1] for place in batch], None if tastes is None else tastes[batch]
        completions = complete_batch(backbone, tensors, asked, how, [Key(0)] * len(batch), z)
        scores = surprises(backbone, asked, completions)
        for place, (tokens, end), score in zip(batch, completions, scores, strict=True):
            turn, ids = prompts[place]
            text, worded = continuation_text(tokenizer, ids, tokens), without_numbers(tokenizer, tokens)
            answers[place] = WrittenAnswer(turn, text, tokens, end is not None, score, worded)
    return [answers[place] for place in range(len(prompts))]


@contextmanager
def _inference(backbone: Backbone) -> Iterator[None]:
    """Read and write text within the block, without gradients or a LoRA that changes nothing.

    Models modified for packed input use the standard attention: theirs has no mask for a partly filled cache.
    """
    packed = backbone.causal.config._attn_implementation == PACKED
    if packed:
        backbone.causal.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode(), backbone.without_idle_lora():
            yield
    finally:
        if packed:
            backbone.causal.set_attn_implementation(PACKED)


def _processors(how: Sampling, keys: Sequence[Key]) -> Any:
    """Return logits processors that turn greedy decoding into sampling; none at temperature 0."""
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

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
    """Adds Gumbel noise to the logits of each sequence, from its own generator."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._generators = [key.numpy() for key in keys]

    def keep(self, places: Sequence[int]) -> None:
        """Go on with some of the sequences."""
        self._generators = [self._generators[place] for place in places]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Add noise to ``scores`` ``[B, V]``. It is drawn on the CPU, for equal numbers on any device."""
        noise = np.empty(scores.shape)
        for row, generator in zip(noise, self._generators, strict=True):
            generator.standard_exponential(out=row)
        return scores.float() - torch.from_numpy(noise).float().log_().to(scores.device)
