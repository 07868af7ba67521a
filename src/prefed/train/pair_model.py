"""Preference pairs through the backbone, by row of a token set; the reference's numbers, computed once."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from prefed.data import Pair, TokenSet
from prefed.models import Backbone, ModelError
from prefed.train.packed import PackedChoices, PackedForward, enable_packing
from prefed.train.padded import Letters, PaddedChoices, PaddedForward, PairForward
from prefed.train.pair_cache import PairScoreCache, Rows, split_rows

_log = logging.getLogger("prefed")

Features = dict[int, torch.Tensor]
"""Row → the trunk's output for its pair, ``[K_i, d]``."""

MAX_FEATURES = 1 << 28
"""Most elements of trunk output to hold for a phase that trains nothing in the trunk (1 GiB in fp32)."""


MAX_LOGITS = 1 << 27
"""Most logits of a plain pass (0.5 GiB in fp32); some four arrays of that size are held at once."""


class PairModel:
    """A backbone, the pairs that run through it, and the forward pass that they take.

    Args:
        tokens: all pairs; callers name them by row.
        max_tokens: tokens of one forward pass; larger batches are split into groups.
        fast: use packed batches where the model's family allows them.
        tastes: ``[len(tokens), d_z]``, at which the model takes each pair; ``None`` for no taste.

    Attributes:
        forward: pairs → log-probabilities, or log-odds of choices; see :func:`choose_forward`.

    Raises:
        ValueError: there is not one taste for each pair.
    """

    def __init__(
        self,
        backbone: Backbone,
        tokens: TokenSet,
        *,
        max_tokens: int,
        fast: bool,
        tastes: torch.Tensor | None = None,
    ) -> None:
        if tastes is not None and len(tastes) != len(tokens):
            raise ValueError(f"there are {len(tastes)} tastes for {len(tokens)} pairs: give one for each")
        self.backbone, self.tokens, self.max_tokens = backbone, tokens, max_tokens
        self._tastes = None if tastes is None else tastes.to(backbone.device)
        self._vocabulary = len(backbone.causal.get_output_embeddings().weight)
        longest = longest_sequence(tokens)
        self.forward = choose_forward(backbone, fast=fast, longest=longest, letters=tokens.letters)
        self._packed = isinstance(self.forward, PackedForward)

    def pairs(self, rows: Rows) -> list[Pair]:
        """Token ids of ``rows``."""
        return [self.tokens.pair(int(row)) for row in rows]

    def signs(self, rows: Rows) -> npt.NDArray[np.float32]:
        """``[n]`` +1 where the response that is first in alphabetical order is the chosen one, else −1."""
        return np.where(self.tokens.orientations[rows] == 1, 1, -1).astype(np.float32)

    def groups(self, rows: Rows, *, rejected: bool = True) -> list[Rows]:
        """Consecutive groups of ``rows`` that one pass takes; a pair that exceeds the limit is its own group.

        A pass has at most ``max_tokens`` tokens. On the packed path a pair has its prompt once. On the plain
        path it has the prompt with each response, all padded to the longest of the group, and the logits of
        the group's completion tokens are at most :data:`MAX_LOGITS`.
        """
        lengths = self.tokens.lengths[rows, : 3 if rejected else 2].astype(np.int64)
        completion = lengths[:, 1:].sum(1)
        longest, responses = lengths[:, 0] + lengths[:, 1:].max(1), lengths.shape[1] - 1
        packed, most = self._packed, MAX_LOGITS // self._vocabulary
        groups, start = [], 0
        for end in range(1, len(rows)):
            taken = slice(start, end + 1)
            if packed:
                tokens, logits = lengths[taken].sum(), 0
            else:
                tokens = responses * (end + 1 - start) * longest[taken].max()
                logits = 0 if self.tokens.letters else completion[taken].sum()
            if tokens > self.max_tokens or logits > most:
                groups.append(rows[start:end])
                start = end
        return [*groups, rows[start:]]

    def tastes(self, rows: Rows) -> torch.Tensor | None:
        """``[n, d_z]`` the tastes of ``rows``, if the pairs have any."""
        return None if self._tastes is None else self._tastes[torch.from_numpy(rows).to(self._tastes.device)]

    def run(self, rows: Rows, *, rejected: bool = True, rewards: bool = False) -> torch.Tensor:
        """:attr:`forward` of ``rows``, each at its own taste, in one pass."""
        return self.forward(self.pairs(rows), rejected=rejected, rewards=rewards, tastes=self.tastes(rows))

    def outputs(self, rows: Rows, *, rewards: bool = False) -> npt.NDArray[np.float32]:
        """``[n, 2]``, with ``rewards`` ``[n, 4]``: :attr:`forward` of ``rows``, without gradients."""
        with torch.inference_mode():
            outputs = [self.run(group, rewards=rewards).cpu() for group in self.groups(rows)]
        return torch.cat(outputs).numpy()

    def features(self, rows: Rows, *, rejected: bool = True, rewards: bool = False) -> Features | None:
        """The trunk's output for every row, for a phase that trains nothing inside the trunk.

        Returns:
            ``None`` where the model has no packed path, the pairs have tastes, or the output is too large to
            hold.
        """
        size = self.tokens.lengths[rows].sum() * self.backbone.width
        if not isinstance(self.forward, PackedForward) or self._tastes is not None or size > MAX_FEATURES:
            return None
        features: Features = {}
        with torch.no_grad():
            for group in self.groups(rows, rejected=rejected):
                outputs = self.forward.features(self.pairs(group), rejected=rejected, rewards=rewards)
                features.update(zip(group.tolist(), (output.clone() for output in outputs), strict=True))
        return features


def longest_sequence(tokens: TokenSet, rows: Rows | None = None) -> int:
    """Tokens of the longest prompt with a response, or with a branch of a choice.

    The letter at the end of a branch does not count: it is no input.

    Args:
        rows: only these pairs; ``None``: all.
    """
    lengths = tokens.lengths if rows is None else tokens.lengths[rows]
    if not len(lengths):
        return 0
    return int((lengths[:, 0] + lengths[:, 1:].max(1)).max()) - (tokens.letters is not None)


def check_lengths(backbone: Backbone, tokens: TokenSet, rows: Rows | None = None) -> None:
    """Check that the longest pair is within the model's context.

    A model with fixed rotary positions has positions beyond its context, but they are untrained: that is a
    warning.

    Args:
        rows: only these pairs; ``None``: all.

    Raises:
        ModelError: the pair is longer, and the model has no further positions.
    """
    window, longest = backbone.window, longest_sequence(tokens, rows)
    if window is None or longest <= window:
        return
    what = "response" if tokens.letters is None else "two responses"
    message = (
        f"[model] name = {backbone.config.name!r} has a context of {window} tokens, and the longest prompt "
        f"with its {what} has {longest}: set [data] max_length = {window}, or shorten such pairs"
    )
    if not backbone.stretches:
        raise ModelError(message)
    _log.warning("%s; the model may not have been trained on positions beyond its context", message)


def longest_input(backbone: Backbone, max_length: int) -> int:
    """``max_length``, or the model's context where this is shorter and there are no positions beyond it."""
    window = backbone.window
    return max_length if window is None or backbone.stretches else min(max_length, window)


def choose_forward(
    backbone: Backbone, *, fast: bool, longest: int, letters: Letters | None = None
) -> PairForward:
    """The packed path where the model's family allows it, else the plain one. The log says why, once.

    Args:
        fast: ``False`` asks for the plain path.
        longest: tokens of the longest prompt with response.
        letters: the pairs are choices between these two letters.
    """
    obstacle = _obstacle(backbone, longest) if fast else ""
    if obstacle:
        _log.warning("training takes the plain path: %s", obstacle)
    if fast and not obstacle:
        return PackedForward(backbone) if letters is None else PackedChoices(backbone, letters)
    return PaddedForward(backbone) if letters is None else PaddedChoices(backbone, letters)


def _obstacle(backbone: Backbone, longest: int) -> str:
    """Why the model cannot take packed input; empty, and packing enabled, if it can."""
    config, head = backbone.text_config, backbone.causal.get_output_embeddings()
    window = getattr(config, "sliding_window", None)
    if backbone.family is None:
        return f"no fast path is known for model type {backbone.causal.config.model_type!r}"
    if window is not None and getattr(config, "use_sliding_window", True) and window < longest:
        return f"the attention window of {window} tokens is shorter than the longest pair ({longest})"
    if hasattr(head, "lora_A"):
        return "the head has a LoRA"
    if head.bias is not None:
        return "the head has a bias"
    return "" if enable_packing(backbone) else "the model does not take registered attention functions"


class ReferenceLogprobs:
    """log π_ref of both responses of every pair; of a choice, the untouched model's log-odds in both orders.

    The last digits of a log-probability depend on the pairs that go through the model with it. Scoring and
    training group pairs differently, so each has its own cache.

    Attributes:
        scoring: the numbers that scoring reads.
        training: the numbers that steps read.
        one_by_one: for training, each pair goes through the model by itself. That costs little on a CPU,
            but would leave other devices idle.
    """

    def __init__(self, model: PairModel, folder: Path | None, name: str) -> None:
        self._model = model
        self.scoring = PairScoreCache(len(model.tokens), folder, name)
        self.training = PairScoreCache(len(model.tokens), folder, f"{name}-training")
        self.one_by_one = model.backbone.device.type == "cpu"

    def fill_scoring(self, rows: Rows) -> None:
        """Compute the numbers of ``rows`` for scoring, all of them if one is missing.

        Scoring takes a client's whole split, so a split's rows always go through in the same groups. The
        policy goes through in these groups too: where the two are the same model, their numbers are
        bit-identical.
        """
        if self.scoring.missing(rows):
            self._compute(self.scoring, [rows])

    def fill_training(self, rows: Rows, client_rows: Rows) -> None:
        """Compute the numbers of ``rows`` for training, of as few other pairs as possible.

        Only the client's pairs decide which pairs go through the model together. So a pair's numbers are
        bit-identical in any order of steps, and after a kill. ``client_rows`` are all pairs of the client,
        ``rows`` among them.
        """
        if not self.training.missing(rows):
            return
        blocks = (
            split_rows(np.unique(rows), 1) if self.one_by_one else self._model.groups(np.sort(client_rows))
        )
        self._compute(
            self.training,
            [block for block in blocks if np.isin(block, rows).any() and self.training.missing(block)],
        )

    def _compute(self, cache: PairScoreCache, blocks: list[Rows]) -> None:
        """Put the numbers of ``blocks`` into ``cache``; each block goes through the model by itself."""
        backbone = self._model.backbone
        backbone.load(backbone.reference)
        # Only the first two numbers are stored. But with a reward head the policy is scored with its rewards,
        # which packs the batch differently. The reference is packed like the policy, for equal bits.
        rewards = backbone.reward is not None
        values = [self._model.outputs(block, rewards=rewards)[:, :2] for block in blocks]
        cache.put(np.concatenate(blocks), np.concatenate(values))
