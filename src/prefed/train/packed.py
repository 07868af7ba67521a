"""Packed pairs through unmodified Hugging Face models: no padding, and one prompt for both responses.

Attention and mask functions are registered through the public ``AttentionInterface`` and
``AttentionMaskInterface`` of transformers.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from prefed.data import Pair
from prefed.models import Backbone
from prefed.models.families import Family
from prefed.models.pretrained import brief, own_forward
from prefed.train.logprobs import token_logprobs
from prefed.train.padded import PairForward, log_odds

if TYPE_CHECKING:
    from prefed.models.stacked_lora import Stack


@dataclass(frozen=True)
class Segment:
    """Part of the packed sequence for one pair: ``prompt`` tokens, then the inputs of both responses."""

    prompt: int
    chosen: int
    rejected: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.prompt + self.chosen + self.rejected

    @property
    def ends(self) -> tuple[int, int]:
        """Last position of each response within the segment."""
        return self.prompt + self.chosen - 1, self.length - 1


@dataclass(frozen=True)
class Sequences:
    """Attention over a packing as N causal sequences, with the last query aligned to the last key.

    A pair is two sequences: its prompt and chosen response, and the rejected response over the prompt and
    itself.

    Attributes:
        rows: ``[Q]`` position of each query; ``None`` for all positions.
        keys: ``[S]`` position of each key; ``None`` for all positions.
        query_counts: queries per sequence.
        key_counts: keys per sequence.
        query_ends: ``[N + 1]`` int32, 0 and the end of each sequence in the queries.
        key_ends: ``[N + 1]`` int32, the same in the keys.
    """

    rows: torch.Tensor | None
    keys: torch.Tensor | None
    query_counts: tuple[int, ...]
    key_counts: tuple[int, ...]
    query_ends: torch.Tensor
    key_ends: torch.Tensor


@dataclass
class Packing:
    """A batch of B pairs as one sequence of T tokens.

    A pair occupies ``prompt, chosen[:-1], rejected[:-1]``. The last token of a response is a target but not
    an input. Positions restart at the prompt's length for the second response, and the responses do not
    attend to each other.

    Attributes:
        ids: ``[1, T]``.
        positions: ``[1, T]``.
        segments: one per pair, in order.
        rows: ``[K]`` positions whose final hidden state is needed: those that predict a completion token.
        pick: ``[M]`` index into ``rows`` for each target. Both responses use the last row of the prompt.
        targets: ``[M]`` token ids to predict.
        response: ``[M]`` 2 · pair for tokens of the chosen response, 2 · pair + 1 for the rejected response.
        counts: number of ``rows`` per pair.
        whole: last tokens are inputs too, and ``rows`` contains all positions, as the reward head requires.
        ends: pairs are choices: two branches that each end with a letter, the only target. ``rows`` contains
            the last positions of both branches.
        hidden: output of the last block at ``rows``, during a forward pass.

    >>> pair = Pair(*(np.array(ids, np.int32) for ids in ([5, 6], [7, 0], [8, 9, 0])))
    >>> p = Packing.of([pair])
    >>> p.ids.tolist(), p.positions.tolist()
    ([[5, 6, 7, 8, 9]], [[0, 1, 2, 2, 3]])
    >>> p.rows.tolist(), p.pick.tolist(), p.targets.tolist()
    ([1, 2, 3, 4], [0, 1, 0, 2, 3], [7, 0, 8, 9, 0])
    """

    ids: torch.Tensor
    positions: torch.Tensor
    segments: tuple[Segment, ...]
    rows: torch.Tensor
    pick: torch.Tensor
    targets: torch.Tensor
    response: torch.Tensor
    counts: tuple[int, ...]
    whole: bool = False
    ends: bool = False
    hidden: torch.Tensor | None = None
    _masks: dict[tuple[tuple[int, int], torch.dtype], torch.Tensor] = field(default_factory=dict)
    _sequences: dict[tuple[bool, torch.device], Sequences] = field(default_factory=dict)

    @staticmethod
    def of(
        pairs: Sequence[Pair],
        *,
        rejected: bool = True,
        whole: bool = False,
        ends: bool = False,
        device: torch.device | str = "cpu",
    ) -> Packing:
        """Pack ``pairs``; with ``rejected=False`` only the chosen responses.

        Raises:
            ValueError: with ``ends``, a branch is empty before its letter.
        """
        ids, positions, segments, counts = [], [], [], []
        rows, pick, targets, response = [], [], [], []
        start = known = 0
        last = 0 if whole else 1
        for number, pair in enumerate(pairs):
            prompt, chosen = pair.prompt, pair.chosen
            other = pair.rejected if rejected else pair.chosen[:last]
            p, c, r = len(prompt), len(chosen) - last, max(len(other) - last, 0)
            ids += [prompt, chosen[:c], other[:r]]
            positions += [np.arange(p + c), np.arange(p, p + r)]
            segments.append(Segment(p, c, r))
            if ends:
                if not min(c, r):
                    raise ValueError(f"pair {number} of the batch has an empty branch before its letter")
                needed, branches = np.array(segments[-1].ends), [chosen[-1:], other[-1:]]
                pick.append(known + np.arange(2))
            else:
                needed = np.arange(0 if whole else p - 1, p + c + r)
                branches = [chosen, other][: 1 + rejected]
                first = known + p - 1 - needed[0]
                pick.append(np.arange(first, first + len(chosen)))
                if rejected:
                    pick += [np.array([first]), np.arange(first + c + 1, first + c + len(other))]
            rows.append(start + needed)
            targets += branches
            response += [np.full(len(branch), 2 * number + side) for side, branch in enumerate(branches)]
            start += p + c + r
            known += len(needed)
            counts.append(len(needed))

        def tensor(parts: list[npt.NDArray[np.int64]] | list[npt.NDArray[np.int32]]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

        return Packing(
            tensor(ids)[None],
            tensor(positions)[None],
            tuple(segments),
            tensor(rows),
            tensor(pick),
            tensor(targets),
            tensor(response),
            tuple(counts),
            whole,
            ends,
        )

    def mean(self, hidden: torch.Tensor, completion: bool) -> torch.Tensor:
        """Average ``[T, d]`` hidden states over the tokens of each response: ``[2B, d]`` fp32.

        Requires ``whole``. Prompt tokens count for both responses, or for none with ``completion``.
        """
        rows, responses = [], []
        start = 0
        for number, segment in enumerate(self.segments):
            p, c, r = segment.prompt, segment.chosen, segment.rejected
            prompt = np.arange(start, start if completion else start + p)
            chosen = np.arange(start + p, start + p + c)
            other = np.arange(start + p + c, start + p + c + r)
            rows += [prompt, chosen, prompt, other]
            responses += [np.full(len(prompt) + c, 2 * number), np.full(len(prompt) + r, 2 * number + 1)]
            start += segment.length
        index = torch.from_numpy(np.concatenate(rows)).to(hidden.device)
        response = torch.from_numpy(np.concatenate(responses)).to(hidden.device)
        count = 2 * len(self.segments)
        total = torch.zeros(count, hidden.shape[1], device=hidden.device)
        total = total.index_add(0, response, hidden[index].float())
        return total / torch.bincount(response, minlength=count).clamp(min=1)[:, None]

    def sequences(self, tail: bool, device: torch.device) -> Sequences:
        """Return the sequences for all queries, or with ``tail`` for those at ``rows``."""
        if (tail, device) not in self._sequences:
            keys, queries, lengths, start = [], [], [], 0
            for segment in self.segments:
                p, c, r = segment.prompt, segment.chosen, segment.rejected
                first = 0 if self.whole or not tail else p - 1
                keys.append(np.arange(start, start + p + c))
                queries.append(1 if tail and self.ends else p + c - first)
                if r:
                    keys += [np.arange(start, start + p), np.arange(start + p + c, start + p + c + r)]
                    queries.append(1 if tail and self.ends else r)
                lengths += [p + c, p + r] if r else [p + c]
                start += segment.length
            query_ends, key_ends = (
                torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
                for counts in (queries, lengths)
            )
            self._sequences[tail, device] = Sequences(
                self.rows.to(device) if tail and not self.whole else None,
                torch.from_numpy(np.concatenate(keys)).to(device) if sum(lengths) > start else None,
                tuple(queries),
                tuple(lengths),
                query_ends,
                key_ends,
            )
        return self._sequences[tail, device]

    def causal(self, prompt: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask ``[count, prompt + count]`` of a response: causal after the prompt."""
        key = (prompt, count), dtype
        if key not in self._masks:
            shape, device = (count, prompt + count), self.ids.device
            self._masks[key] = torch.full(shape, -torch.inf, dtype=dtype, device=device).triu_(prompt + 1)
        return self._masks[key]

    def ends_mask(self, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask of the last positions of both branches, ``[2, L]``."""
        mask = torch.zeros(2, segment.length, dtype=dtype, device=self.ids.device)
        response = segment.prompt + segment.chosen
        mask[0, response:] = -torch.inf
        mask[1, segment.prompt : response] = -torch.inf
        return mask


class _AttentionInBfloat16(torch.autograd.Function):
    """PyTorch's attention with a backward pass in fp32, which takes a third of the time on a CPU.

    The forward pass remains in bfloat16, so that scores equal those of transformers.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, options: dict[str, Any]
    ) -> torch.Tensor:
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        result, normalizer = forward(q, k, v, 0.0, causal, **options)
        ctx.save_for_backward(q, k, v, result, normalizer)
        ctx.causal, ctx.options = causal, options
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wide = [t.float() for t in (*grads, *ctx.saved_tensors)]
        options = {k: v.float() if isinstance(v, torch.Tensor) else v for k, v in ctx.options.items()}
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return *(g.bfloat16() for g in backward(*wide, 0.0, ctx.causal, **options)), None, None


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, **options: Any
) -> torch.Tensor:
    """Run PyTorch's attention, with a faster backward pass in bfloat16 on a CPU."""
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and q.shape[3] == v.shape[3]:
        options.pop("enable_gqa", None)  # the kernel groups heads by itself
        return _AttentionInBfloat16.apply(q, k, v, is_causal, options)  # type: ignore[no-any-return, no-untyped-call]
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, **options)


NAME = "prefed_packed"
Attend = Callable[..., torch.Tensor]
Kernel = Callable[
    [Sequences, torch.Tensor, torch.Tensor, torch.Tensor, float | None, int | None], torch.Tensor
]
_WITHOUT_EFFECT = {"position_ids", "cache_position", "use_cache", "dropout", "is_causal"}
"""Arguments that change no packed attention."""
_NOT_FOR_ATTENTION = frozenset(
    {"cache", "past_key_values", "attention_mask", "encoder_attention_mask", "use_cache"}
)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packing: Packing | None = None,
    packing_tail: str = "",
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention ``[1, heads, T, width]`` → ``[1, T or K, heads, width]``.

    Input that is not packed uses transformers' SDPA attention.
    """
    if packing is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        kwargs |= {"scaling": scaling, "sliding_window": sliding_window}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
    given = {"a mask": attention_mask, **kwargs}
    absent = {name for name, value in given.items() if value is None or value is False}
    if unknown := sorted(given.keys() - absent - _WITHOUT_EFFECT):
        raise NotImplementedError(f"packed attention does not support {', '.join(unknown)}")
    window = sliding_window
    if window and window >= max(each.prompt + max(each.chosen, each.rejected) for each in packing.segments):
        window = None
    if kernel := _kernel(query) or (_one_by_one if window else None):
        sequences = packing.sequences(bool(packing_tail), query.device)
        result = _by_sequences(kernel, sequences, query, key, value, scaling, window)
        if packing_tail == "fill" and sequences.rows is not None:
            result = result.new_zeros(query.shape[2], *result.shape[1:]).index_copy(0, sequences.rows, result)
        return result.unsqueeze(0), None
    attend = functools.partial(_attend, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    results = []
    lengths = [segment.length for segment in packing.segments]
    parts = zip(*(torch.split(t, lengths, 2) for t in (query, key, value)), strict=True)
    for segment, (q, k, v) in zip(packing.segments, parts, strict=True):
        if packing_tail and packing.ends:
            result = attend(q[:, :, segment.ends], k, v, attn_mask=packing.ends_mask(segment, q.dtype))
            if packing_tail == "fill":
                rows = zip(torch.split(result, 1, 2), (segment.ends[0], segment.rejected - 1), strict=True)
                result = torch.cat([F.pad(row, (0, 0, before, 0)) for row, before in rows], 2)
        else:
            first = segment.prompt - 1 if packing_tail and not packing.whole else 0
            result = _by_parts(attend, packing, segment, q[:, :, first:], k, v)
            if packing_tail == "fill":
                result = F.pad(result, (0, 0, first, 0))
        results.append(result.transpose(1, 2))
    return torch.cat(results, 1), None


def _by_sequences(
    kernel: Kernel,
    sequences: Sequences,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Run ``kernel`` on ``[1, heads, T, width]`` tensors; return ``[Q, heads, width]``."""
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    if sequences.rows is not None:
        q = q.index_select(0, sequences.rows)
    if sequences.keys is not None:
        # The gradient of a key is a sum of at most two terms, so the order of atomic additions is irrelevant.
        k, v = k.index_select(0, sequences.keys), v.index_select(0, sequences.keys)
    return kernel(sequences, q, k, v, scaling, window)


def _kernel(query: torch.Tensor) -> Kernel | None:
    """Return the attention kernel for a GPU, and ``None`` for a CPU.

    Flash attention requires 16-bit tensors. Some GPUs lack its backward pass for heads wider than 192.
    """
    if query.device.type == "cpu":
        return None
    width = query.shape[3]
    if query.dtype not in (torch.float16, torch.bfloat16) or width % 8 or width > 192:
        return _one_by_one
    return _varlen if _has_varlen(query.device) else _one_by_one


@functools.cache
def _has_varlen(device: torch.device) -> bool:
    """Return whether PyTorch's variable-length attention runs on a device, with grouped heads.

    It requires an NVIDIA GPU of compute capability 8.0 or later.
    """
    planned = device.type == "meta"  # of a GPU whose memory is estimated
    if not planned and (device.type != "cuda" or torch.version.hip is not None):
        return False
    try:  # here because the import takes long
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:
        return False
    if planned or not torch.cuda.is_available():  # fake tensors
        return True
    available: bool = torch.backends.cuda.is_flash_attention_available()
    return available and torch.cuda.get_device_capability(device) >= (8, 0)


def _varlen(
    sequences: Sequences,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Run flash attention once for all sequences. It aligns causal windows with the lower right corner."""
    from torch.nn.attention import varlen

    ends = sequences.query_ends, sequences.key_ends
    longest = max(sequences.query_counts), max(sequences.key_counts)
    before = -1 if window is None else window - 1
    causal: dict[str, Any] = {"window_size": (before, 0), "scale": scale, "enable_gqa": True}
    result: Any = varlen.varlen_attn(q, k, v, *ends, *longest, **causal)
    return result  # type: ignore[no-any-return]


def _one_by_one(
    sequences: Sequences,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Run one call of PyTorch's attention for each sequence, without a mask unless a window is shorter.

    PyTorch aligns a causal window with the upper left corner, so zeros before the queries make it square.
    Fused kernels in fp32 do not support grouped heads, hence the expanded keys and values.
    """
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    queries = torch.split(q, list(sequences.query_counts), 2)
    keys, values = (torch.split(t, list(sequences.key_counts), 2) for t in (k, v))
    groups = q.shape[1] // k.shape[1]
    results = []
    for query, key, value in zip(queries, keys, values, strict=True):
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        rows = query.shape[2]
        if window and window < key.shape[2]:
            results.append(_in_window(query, key, value, scale, window))
            continue
        if causal := rows > 1:  # a single query attends to all keys
            query = F.pad(query, (0, 0, key.shape[2] - rows, 0))
        result = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)
        results.append(result.narrow(2, result.shape[2] - rows, rows))
    return torch.cat(results, 2).squeeze(0).transpose(0, 1)


def _in_window(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, window: int
) -> torch.Tensor:
    """Attend from the last positions to ``window`` keys each, in blocks with masks of at most two windows."""
    results, start = [], key.shape[2] - query.shape[2]
    for rows in torch.split(query, window, 2):
        first, end = max(0, start + 1 - window), start + rows.shape[2]
        i, j = (torch.arange(*span, device=query.device) for span in ((start, end), (first, end)))
        hidden = (j > i[:, None]) | (j <= i[:, None] - window)
        mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
        mask.masked_fill_(hidden, -torch.inf)
        keys, values = key[:, :, first:end], value[:, :, first:end]
        results.append(_attend(rows, keys, values, attn_mask=mask, scale=scale))
        start = end
    return torch.cat(results, 2)


def _by_parts(
    attend: Attend, packing: Packing, segment: Segment, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Run one attention call each for prompt, chosen and rejected rows, with the keys that they attend to.

    This halves the work compared with one masked call.
    """
    prompt, sizes = segment.prompt, [segment.prompt, segment.chosen, segment.rejected]
    first = q.shape[2] - segment.chosen - segment.rejected
    qp, *queries = torch.split(q, [first, *sizes[1:]], 2)
    (kp, *keys), (vp, *values) = (torch.split(t, sizes, 2) for t in (k, v))
    # PyTorch aligns a causal mask with the upper left corner. If ``qp`` is the last row of the prompt, it
    # attends to the whole prompt and needs no mask.
    results = [attend(qp, kp, vp, is_causal=first == prompt)]
    for q, k, v in zip(queries, keys, values, strict=True):
        if count := q.shape[2]:
            mask = packing.causal(prompt, count, q.dtype)
            results.append(attend(q, torch.cat([kp, k], 2), torch.cat([vp, v], 2), attn_mask=mask))
    return torch.cat(results, 2)


_packed = ContextVar("_packed", default=False)
"""Whether the model's input is packed."""


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Return no mask for packed input, and the SDPA mask otherwise."""
    from transformers.masking_utils import sdpa_mask

    return None if _packed.get() else sdpa_mask(*args, **kwargs)


def _tail(block: Any, original: Any, family: Family, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Forward of the last block: keys and values at all rows, everything else at completion rows only.

    Some attention modules must return as many rows as they receive; their other rows are zero.
    """
    packing = kwargs.get("packing")
    if packing is None:
        return original(hidden, *args, **kwargs)
    norm1, attention = getattr(block, family.norm1), getattr(block, family.attention)
    norm2, mlp = getattr(block, family.norm2), getattr(block, family.mlp)
    options = {name: value for name, value in kwargs.items() if name not in _NOT_FOR_ATTENTION}
    tail = "shorten" if family.shortens else "fill"
    mixed = attention(norm1(hidden), attention_mask=None, packing_tail=tail, **options)[0]
    at = packing.rows.to(hidden.device)
    rows = hidden[:, at] + (mixed if family.shortens else mixed[:, at])
    packing.hidden = rows + mlp(norm2(rows))
    return hidden.detach()


def _whole(original: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Forward of the last block at all rows, for blocks of any structure."""
    output = original(hidden, *args, **kwargs)
    packing = kwargs.get("packing")
    if packing is not None:
        states = output[0] if isinstance(output, tuple) else output
        packing.hidden = states[:, packing.rows.to(states.device)]
    return output


_OTHER_ATTENTION = "the model does not take registered attention functions"
_FACTORS = ("logit_scale", "logits_scaling")
"""Names in a configuration of a factor of the logits, or of its reciprocal."""


def _probe(longest: int, vocabulary: int) -> Pair:
    """Return the pair that checks packed input: short, or with a sequence of ``longest`` tokens."""
    parts = [np.arange(*span, dtype=np.int32) for span in ((1, 5), (5, 9), (9, 12))]
    if longest > 7:
        parts[0] = (1 + 7919 * np.arange(longest - 3) % (vocabulary - 1)).astype(np.int32)
    return Pair(*parts)


def _logit_factor(config: Any, product: torch.Tensor, logits: torch.Tensor) -> float:
    """Return f for logits that are f times ``product``.

    Raises:
        ValueError: there is none.
    """
    if torch.equal(product, logits):
        return 1.0
    for value in filter(None, (getattr(config, name, None) for name in _FACTORS)):
        if torch.equal(product * value, logits):
            return float(value)
        if torch.equal(product / value, logits):
            return float(1 / value)
    raise ValueError("its logits are not the product of its last hidden states and its head")


def _own_states(backbone: Backbone, probe: Pair) -> tuple[torch.Tensor, float]:
    """Return what the head reads in the model's own forward, and the factor of the logits.

    The states are those at the rows of the packed ``probe``, ``[K, d]`` fp32.

    Raises:
        ValueError: the logits are not the head's product with them.
    """
    causal, head, states = backbone.causal, backbone.causal.get_output_embeddings(), list[torch.Tensor]()
    factors = set[float]()

    def last(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        states.append(args[0][:, -len(response) :])
        return (states[-1],)

    handle = head.register_forward_pre_hook(last)
    try:
        for response in (probe.chosen, probe.rejected):
            ids = torch.from_numpy(np.append(probe.prompt, response[:-1]).astype(np.int64))[None]
            logits = causal(input_ids=ids.to(backbone.device), use_cache=False).logits
            product = F.linear(states[-1], head.weight.to(states[-1].dtype)).to(logits.dtype)
            factors.add(_logit_factor(backbone.text_config, product, logits))
    finally:
        handle.remove()
    return torch.cat([states[0][0], states[1][0, 1:]]).float(), factors.pop()


def enable_packing(backbone: Backbone, longest: int = 0) -> str:
    """Modify the backbone's model to accept packed input; return ``""``, or why that is not possible.

    Afterwards, the model must compute the hidden states of its own forward on a few tokens. This does not use
    random numbers. A model without data only has to accept packed input.

    Args:
        longest: length of the longest sequence. If the model attends to fewer tokens, the check has a
            sequence of this length.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    family, causal, final = backbone.family, backbone.causal, backbone.final
    assert family is not None
    assert final is not None
    if causal.config._attn_implementation == NAME:
        return ""
    block = getattr(backbone.trunk, family.blocks)[-1]
    own = own_forward(block)
    usual, forward = causal.config._attn_implementation, getattr(block, own)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    check = backbone.device.type != "meta"
    window = getattr(backbone.text_config, "sliding_window", None) or longest
    probe = _probe(longest if window < longest else 0, causal.get_output_embeddings().weight.shape[0])
    problem = "" if getattr(causal, "_supports_attention_backend", False) else _OTHER_ATTENTION
    try:
        with torch.no_grad():
            expected, factor = _own_states(backbone, probe) if check and not problem else (None, 1.0)
            causal.set_attn_implementation(NAME)
            if causal.config._attn_implementation != NAME:
                problem = _OTHER_ATTENTION
            whole = functools.partial(_whole, forward)
            setattr(block, own, functools.partial(_tail, block, forward, family) if family.norm1 else whole)
            if not problem:
                hidden = final.norm(trunk_hidden(backbone, Packing.of([probe], device=backbone.device)))
            if expected is not None and not problem:
                apart = float((hidden - expected).norm() / expected.norm())
                if not apart < (1e-4 if backbone.dtype in (torch.float32, torch.float64) else 0.05):
                    problem = f"packed input changes its hidden states by {apart:.2%}"
    except Exception as error:  # code of some two hundred architectures
        problem = brief(error)
    if problem:
        causal.set_attn_implementation(usual)
        setattr(block, own, forward)
    else:
        backbone.logit_factor = factor
    return problem


def trunk_hidden(backbone: Backbone, packing: Packing, tastes: torch.Tensor | None = None) -> torch.Tensor:
    """Return the output of the last block at the packing's rows, before the final norm.

    Args:
        backbone: modified by :func:`enable_packing`.
        tastes: ``[B, d_z]``, the taste of each pair; ``None`` for a model without a taste map.

    Returns:
        ``[K, d]``, in the model's dtype.
    """
    assert backbone.final is not None
    backbone.final.bypass = True
    token = _packed.set(True)
    lengths = [segment.length for segment in packing.segments]
    try:
        with backbone.tasting(tastes, lengths):
            backbone.trunk(
                input_ids=packing.ids, position_ids=packing.positions, use_cache=False, packing=packing
            )
    finally:
        backbone.final.bypass = False
        _packed.reset(token)
    hidden, packing.hidden = packing.hidden, None
    assert hidden is not None
    return hidden[0].to(backbone.device)


class PackedForward(PairForward):
    """Forward pass over packed batches, for models modified by :func:`enable_packing`.

    A call runs trunk and top. :meth:`features` and :meth:`top` run them separately.
    """

    def _forward(
        self, pairs: Sequence[Pair], rejected: bool, rewards: bool, tastes: torch.Tensor | None
    ) -> torch.Tensor:
        packing = self._pack(pairs, rejected, rewards)
        return self._read(packing, trunk_hidden(self.backbone, packing, tastes))

    def features(
        self, pairs: Sequence[Pair], *, rejected: bool = True, rewards: bool = False
    ) -> list[torch.Tensor]:
        """Return each pair's rows of the last block's output, ``[K_i, d]``, for :meth:`top`."""
        packing = self._pack(pairs, rejected, rewards)
        return list(torch.split(trunk_hidden(self.backbone, packing), list(packing.counts)))

    def top(
        self,
        pairs: Sequence[Pair],
        features: Sequence[torch.Tensor],
        *,
        rejected: bool = True,
        rewards: bool = False,
    ) -> torch.Tensor:
        """Return the result of a call, from the ``features`` of the same pairs."""
        packing = self._pack(pairs, rejected, rewards)
        return self._read(packing, torch.cat(list(features)))

    def stacked(
        self, pairs: Sequence[Pair], counts: Sequence[int], stack: Stack, *, rejected: bool = True
    ) -> torch.Tensor:
        """Return the result of a call, with each client's own LoRA.

        Args:
            pairs: the pairs of all clients, one client after the other.
            counts: number of pairs of each client.
        """
        packing = self._pack(pairs, rejected, False)
        tokens = [segment.length for segment in packing.segments]
        ends = [0, *itertools.accumulate(counts)]
        stack.place(
            *([sum(each[a:b]) for a, b in itertools.pairwise(ends)] for each in (tokens, packing.counts))
        )
        return self._read(packing, trunk_hidden(self.backbone, packing))

    def _pack(self, pairs: Sequence[Pair], rejected: bool, rewards: bool) -> Packing:
        return Packing.of(pairs, rejected=rejected, whole=rewards, device=self.backbone.device)

    def _read(self, packing: Packing, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm or bottleneck, the head, and for ``whole`` packings the reward head."""
        assert self.backbone.final is not None
        final = self.backbone.final.norm(hidden)
        weight = self.backbone.causal.get_output_embeddings().weight
        into = weight.grad if weight.requires_grad else None
        states, pick = self.backbone.for_head(final), packing.pick
        if packing.whole:
            # The reward head reads every row. The output embedding is applied to the predicting rows only.
            rows, pick = torch.unique(pick, return_inverse=True)
            states = states[rows]
        tokens = token_logprobs(states, weight, pick, packing.targets, into)
        count = 2 * len(packing.segments)
        sums = torch.zeros(count, device=tokens.device).index_add(0, packing.response, tokens)
        if not packing.whole:
            return sums.view(-1, 2)
        assert self.backbone.reward is not None
        rewards = self.backbone.reward(packing.mean(final, self.backbone.config.reward.pool == "completion"))
        return torch.cat([sums.view(-1, 2), rewards.view(-1, 2)], 1)


class PackedChoices(PackedForward):
    """Forward pass over packed choices, for models modified by :func:`enable_packing`.

    A call returns ``[B, 2]`` fp32 log-odds, one per presentation order, that the first response is better.
    The last block, the final norm and two rows of the head run only at the last positions of the branches.
    ``rejected`` and ``rewards`` have no effect.
    """

    def _pack(self, pairs: Sequence[Pair], rejected: bool, rewards: bool) -> Packing:
        return Packing.of(pairs, ends=True, device=self.backbone.device)

    def _read(self, packing: Packing, hidden: torch.Tensor) -> torch.Tensor:
        assert self.backbone.final is not None
        final = self.backbone.for_head(self.backbone.final.norm(hidden))
        weight = self.backbone.causal.get_output_embeddings().weight[self._letters].to(final.dtype)
        return log_odds(final.float() @ weight.float().t(), packing.targets, self._letters)
