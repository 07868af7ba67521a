"""Packed pairs through unmodified Hugging Face models: no padding, and one prompt for both responses.

Attention and mask functions are registered through the public ``AttentionInterface`` and
``AttentionMaskInterface`` of transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from prefed.data import Pair
from prefed.models import Backbone
from prefed.models.families import Family
from prefed.models.tastes import tasting
from prefed.train.logprobs import token_logprobs
from prefed.train.padded import Letters, PairForward, log_odds


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
    _masks: dict[tuple[Segment | tuple[int, int], torch.dtype], torch.Tensor] = field(default_factory=dict)

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
                rows.append(start + np.array(segments[-1].ends))
                pick.append(known + np.arange(2))
                targets.append(np.array([chosen[-1], other[-1]]))
                response.append(2 * number + np.arange(2))
                start += p + c + r
                known += 2
                counts.append(2)
                continue
            skipped = 0 if whole else p - 1
            count = p + c + r - skipped
            rows.append(np.arange(start + skipped, start + p + c + r))
            first = known + p - 1 - skipped
            pick.append(np.arange(first, first + len(chosen)))
            targets.append(chosen)
            response.append(np.full(len(chosen), 2 * number))
            if rejected:
                pick += [np.array([first]), np.arange(first + c + 1, first + c + len(other))]
                targets.append(other)
                response.append(np.full(len(other), 2 * number + 1))
            start += p + c + r
            known += count
            counts.append(count)

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

    def mask(self, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive attention mask of a pair, ``[L, L]``: 0 where a token may attend, else −inf."""
        if (segment, dtype) not in self._masks:
            shape, device = (segment.length, segment.length), self.ids.device
            mask = torch.full(shape, -torch.inf, dtype=dtype, device=device).triu_(1)
            response = segment.prompt + segment.chosen
            mask[response:, segment.prompt : response] = -torch.inf
            self._masks[segment, dtype] = mask
        return self._masks[segment, dtype]

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


NAME = "prefed_packed"
Attend = Callable[..., torch.Tensor]
_NOT_FOR_ATTENTION = frozenset({"past_key_values", "attention_mask", "encoder_attention_mask", "use_cache"})


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packing: Packing | None = None,
    packing_tail: str = "",
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention ``[1, heads, T, width]`` → ``[1, T or K, heads, width]``, pair by pair.

    Input that is not packed uses transformers' SDPA attention.
    """
    if packing is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    attend = functools.partial(
        F.scaled_dot_product_attention, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    by_parts = _by_parts if query.device.type == "cpu" else _at_once
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
            result = by_parts(attend, packing, segment, q[:, :, first:], k, v)
            if packing_tail == "fill":
                result = F.pad(result, (0, 0, first, 0))
        results.append(result.transpose(1, 2))
    return torch.cat(results, 1), None


def _at_once(
    attend: Attend, packing: Packing, segment: Segment, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Run one masked attention call for a pair; ``q`` contains its last rows."""
    return attend(q, k, v, attn_mask=packing.mask(segment, q.dtype)[-q.shape[2] :])


def _by_parts(
    attend: Attend, packing: Packing, segment: Segment, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Run one attention call each for prompt, chosen and rejected rows, with the keys that they attend to.

    This halves the work. It does not pay off on a GPU, where kernel launches dominate.
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


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Return no mask for packed input, and the SDPA mask otherwise."""
    from transformers.masking_utils import sdpa_mask

    return None if kwargs.get("attention_mask") is None else sdpa_mask(*args, **kwargs)


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
    rows = hidden[:, packing.rows] + (mixed if family.shortens else mixed[:, packing.rows])
    packing.hidden = rows + mlp(norm2(rows))
    return hidden.detach()


def enable_packing(backbone: Backbone) -> bool:
    """Modify the backbone's model to accept packed input; return ``False`` if that is not possible."""
    from transformers import AttentionInterface, AttentionMaskInterface

    family, config = backbone.family, backbone.causal.config
    if family is None or not getattr(backbone.causal, "_supports_attention_backend", False):
        return False
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    backbone.causal.set_attn_implementation(NAME)
    if config._attn_implementation != NAME:
        return False
    block = getattr(backbone.trunk, family.blocks)[-1]
    block.forward = functools.partial(_tail, block, block.forward, family)
    return True


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
    lengths = [segment.length for segment in packing.segments]
    try:
        with tasting(backbone.taste_map, tastes, lengths):
            backbone.trunk(
                input_ids=packing.ids, position_ids=packing.positions, use_cache=False, packing=packing
            )
    finally:
        backbone.final.bypass = False
    hidden, packing.hidden = packing.hidden, None
    assert hidden is not None
    return hidden[0]


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

    def _pack(self, pairs: Sequence[Pair], rejected: bool, rewards: bool) -> Packing:
        return Packing.of(pairs, rejected=rejected, whole=rewards, device=self.backbone.device)

    def _read(self, packing: Packing, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm or bottleneck, the head, and for ``whole`` packings the reward head."""
        assert self.backbone.final is not None
        final = self.backbone.final.norm(hidden)
        weight = self.backbone.causal.get_output_embeddings().weight
        into = weight.grad if weight.requires_grad else None
        states, pick = final, packing.pick
        if packing.whole:
            # The reward head reads every row. The output embedding is applied to the predicting rows only.
            rows, pick = torch.unique(pick, return_inverse=True)
            states = final[rows]
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

    def __init__(self, backbone: Backbone, letters: Letters) -> None:
        super().__init__(backbone)
        self._letters = torch.tensor(letters, device=backbone.device)

    def _pack(self, pairs: Sequence[Pair], rejected: bool, rewards: bool) -> Packing:
        return Packing.of(pairs, ends=True, device=self.backbone.device)

    def _read(self, packing: Packing, hidden: torch.Tensor) -> torch.Tensor:
        assert self.backbone.final is not None
        final = self.backbone.final.norm(hidden)
        weight = self.backbone.causal.get_output_embeddings().weight[self._letters].to(final.dtype)
        return log_odds(final.float() @ weight.float().t(), packing.targets, self._letters)
