"""The plain path: padded batches through the model's own forward, full logits, log-softmax."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from prefed.data import Pair
from prefed.models import Backbone
from prefed.models.taste_map import tasting


def pad(
    pairs: Sequence[Pair], *, rejected: bool = True, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts with responses as rows of a padded batch, each pair's chosen response before its rejected one.

    Returns:
        Token ids, the attention mask, and a mask of the completion tokens (bool); each ``[n, T]``.
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
    return ids.to(device), attention.to(device), completion.to(device)


def by_response(tastes: torch.Tensor | None, *, rejected: bool = True) -> torch.Tensor | None:
    """``[B, d_z]`` tastes of pairs → those of the rows that :func:`pad` gives."""
    return tastes if tastes is None or not rejected else tastes.repeat_interleave(2, 0)


class PaddedForward:
    """Summed log-probability of every response, for any causal language model."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    def __call__(
        self,
        pairs: Sequence[Pair],
        *,
        rejected: bool = True,
        rewards: bool = False,
        tastes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """From pairs to the numbers that losses read.

        Args:
            rejected: ``False`` leaves the rejected responses out; their columns are 0.
            rewards: also run the reward head.
            tastes: ``[B, d_z]``, of each pair; ``None`` for a model that takes none.

        Returns:
            ``[B, 2]``, or ``[B, 4]`` with ``rewards``; see :func:`prefed.train.packed.top_outputs`.
        """
        backbone = self.backbone
        ids, attention, completion = pad(pairs, rejected=rejected, device=backbone.device)
        with tasting(backbone.taste_map, by_response(tastes, rejected=rejected)):
            out = backbone.causal(
                input_ids=ids, attention_mask=attention, use_cache=False, output_hidden_states=rewards
            )
        tokens = out.logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        columns = [(tokens * completion[:, 1:]).sum(1)]
        if rewards:
            assert backbone.reward is not None
            pooled = completion if backbone.config.reward.pool == "completion" else attention
            weights = pooled[..., None].float()
            final = out.hidden_states[-1].float()
            columns.append(backbone.reward((final * weights).sum(1) / weights.sum(1)))
        if rejected:
            return torch.cat([column.view(-1, 2) for column in columns], 1)
        return torch.cat([torch.stack([column, torch.zeros_like(column)], 1) for column in columns], 1)
