"""The plain path: padded batches through the model's own forward, and a log-softmax of completion logits.

The prompt of a selector's pair contains the instruction and the query. Branch 1 shows the first response as A
and the second as B; branch 2 swaps them. Each branch ends with the letter that means "the first is better",
and the forward passes return the log-odds of that letter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from prefed.data import Pair
from prefed.models import Backbone

Letters = tuple[int, int]
"""Token ids of the letters A and B."""


def pad(
    pairs: Sequence[Pair], *, rejected: bool = True, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad prompts with responses to one batch, each pair's chosen response before its rejected one.

    Returns:
        Token ids, attention mask, and a bool mask of the completion tokens; each ``[n, T]``. The last is on
        the CPU, where the number of tokens that it selects is known without waiting for the device.
    """
    responses = [(p.prompt, y) for p in pairs for y in ((p.chosen, p.rejected) if rejected else (p.chosen,))]
    longest = max(len(x) + len(y) for x, y in responses)
    ids = torch.zeros(len(responses), longest, dtype=torch.long)
    attention = torch.zeros(len(responses), longest, dtype=torch.long)
    completion = torch.zeros(len(responses), longest, dtype=torch.bool)
    for number, (x, y) in enumerate(responses):
        length = len(x) + len(y)
        ids[number, :length] = torch.from_numpy(np.concatenate([x, y]).astype(np.int64))
        attention[number, :length] = 1
        completion[number, len(x) : length] = True
    return ids.to(device), attention.to(device), completion


def by_response(tastes: torch.Tensor | None, *, rejected: bool = True) -> torch.Tensor | None:
    """Repeat the tastes of pairs ``[B, d_z]`` for the rows of :func:`pad`."""
    return tastes if tastes is None or not rejected else tastes.repeat_interleave(2, 0)


def logits_at(causal: Any, rows: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, Any]:
    """Run the model's own forward, with the head applied only to the hidden states at ``rows``.

    Args:
        rows: ``[n, T]`` bool on the CPU, M of them true.

    Returns:
        ``[M, V]`` logits in the order of ``rows``, and the model's output.
    """

    def gathered(head: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *others = args
        return (hidden[rows][None], *others)

    handle = causal.get_output_embeddings().register_forward_pre_hook(gathered)
    try:
        out = causal(**inputs, use_cache=False)
    finally:
        handle.remove()
    # Some models do not apply their head as a module. They return the logits of all positions.
    every = out.logits.shape[:2] == rows.shape and rows.numel() > 1
    return (out.logits[rows] if every else out.logits[0]), out


def shifted(completion: torch.Tensor) -> torch.Tensor:
    """Return ``[n, T]``, true at the positions that predict a completion token."""
    return torch.cat([completion[:, 1:], torch.zeros_like(completion[:, :1])], 1)


class PairForward(ABC):
    """Forward pass of one model over preference pairs.

    Args:
        letters: token ids of A and B if the pairs are choices.
    """

    def __init__(self, backbone: Backbone, letters: Letters | None = None) -> None:
        self.backbone, self._letters = backbone, torch.tensor(letters or (), device=backbone.device)

    def __call__(
        self,
        pairs: Sequence[Pair],
        *,
        rejected: bool = True,
        rewards: bool = False,
        tastes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the forward pass of B pairs as one batch.

        Args:
            rejected: ``False`` skips the rejected responses; their columns are 0.
            rewards: also run the reward head.
            tastes: ``[B, d_z]``, the taste of each pair; ``None`` for a model without a taste map.

        Returns:
            ``[B, 2]`` fp32: log π(y_w|x) and log π(y_l|x) in nats, end-of-text included. With ``rewards``
            ``[B, 4]``: the reward head's h2(x, y_w) and h2(x, y_l) follow. For choices: log-odds that the
            first response is better, by presentation order.
        """
        return self._forward(pairs, rejected, rewards, tastes)

    @abstractmethod
    def _forward(
        self, pairs: Sequence[Pair], rejected: bool, rewards: bool, tastes: torch.Tensor | None
    ) -> torch.Tensor: ...


class PaddedForward(PairForward):
    """Summed log-probabilities of responses, for any causal language model."""

    def _forward(
        self, pairs: Sequence[Pair], rejected: bool, rewards: bool, tastes: torch.Tensor | None
    ) -> torch.Tensor:
        backbone = self.backbone
        ids, attention, completion = pad(pairs, rejected=rejected, device=backbone.device)
        predicting = shifted(completion)
        with backbone.tasting(by_response(tastes, rejected=rejected)):
            logits, out = logits_at(
                backbone.causal,
                predicting,
                input_ids=ids,
                attention_mask=attention,
                output_hidden_states=rewards,
            )
        # Targets have the order of the mask's true positions: by response, then by token.
        tokens = logits.float().log_softmax(1).gather(1, ids[completion][:, None])[:, 0]
        response = predicting.nonzero()[:, 0].to(ids.device)
        columns = [torch.zeros(len(ids), device=ids.device).index_add(0, response, tokens)]
        if rewards:
            assert backbone.reward is not None
            pooled = completion if backbone.config.reward.pool == "completion" else attention
            weights = pooled[..., None].to(ids.device, torch.float32)
            final = out.hidden_states[-1].float()
            columns.append(backbone.reward((final * weights).sum(1) / weights.sum(1)))
        if rejected:
            return torch.cat([column.view(-1, 2) for column in columns], 1)
        return torch.cat([torch.stack([column, torch.zeros_like(column)], 1) for column in columns], 1)


class PaddedChoices(PaddedForward):
    """Log-odds of choices, for any causal language model."""

    def _forward(
        self, pairs: Sequence[Pair], rejected: bool, rewards: bool, tastes: torch.Tensor | None
    ) -> torch.Tensor:
        # Without the letter, which would not fit if the sequence fills the context.
        inputs = [Pair(prompt, first[:-1], second[:-1]) for prompt, first, second in pairs]
        ids, attention, _ = pad(inputs, device=self.backbone.device)
        lengths = [len(prompt) + len(branch) for prompt, *branches in inputs for branch in branches]
        last = F.one_hot(torch.tensor(lengths) - 1, ids.shape[1]).bool()
        with self.backbone.tasting(by_response(tastes)):
            logits, _ = logits_at(self.backbone.causal, last, input_ids=ids, attention_mask=attention)
        targets = [int(branch[-1]) for pair in pairs for branch in (pair.chosen, pair.rejected)]
        return log_odds(
            logits[:, self._letters].float(), torch.tensor(targets, device=ids.device), self._letters
        )


def log_odds(logits: torch.Tensor, targets: torch.Tensor, letters: torch.Tensor) -> torch.Tensor:
    """Convert ``[2B, 2]`` logits of A and B to ``[B, 2]``; ``[2B]`` targets name the first response."""
    margin = logits[:, 0] - logits[:, 1]
    return torch.where(targets == letters[0], margin, -margin).view(-1, 2)
