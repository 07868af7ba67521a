"""Forward passes over preference pairs by row, and cached reference outputs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
"""Row → output of the trunk for its pair, ``[K_i, d]``."""

MAX_FEATURES = 1 << 28
"""Maximum number of trunk output elements to keep for a phase that trains only the top (1 GiB in fp32)."""


MAX_LOGITS = 1 << 27
"""Maximum number of logits in a plain pass (0.5 GiB in fp32); about four such arrays exist at once."""


class PairModel:
    """A backbone, a set of pairs, and the forward pass for them.

    Args:
        tokens: all pairs; callers refer to them by row.
        max_tokens: maximum number of tokens per forward pass; larger batches are split into groups.
        fast: use packed batches if the model's family supports them.
        tastes: ``[len(tokens), d_z]``, the taste of each pair; ``None`` for a model without a taste map.
        longest: length of the longest sequence, if that of the pairs is shorter.

    Attributes:
        forward: pairs → log-probabilities, or log-odds of choices; see :func:`choose_forward`.

    Raises:
        ValueError: ``tastes`` has another length than ``tokens``.
    """

    def __init__(
        self,
        backbone: Backbone,
        tokens: TokenSet,
        *,
        max_tokens: int,
        fast: bool,
        tastes: torch.Tensor | None = None,
        longest: int = 0,
    ) -> None:
        if tastes is not None and len(tastes) != len(tokens):
            raise ValueError(f"got {len(tastes)} tastes for {len(tokens)} pairs; pass one taste per pair")
        self.backbone, self.tokens, self.max_tokens = backbone, tokens, max_tokens
        self._tastes = None if tastes is None else tastes.to(backbone.device)
        self._vocabulary = len(backbone.causal.get_output_embeddings().weight)
        longest = max(longest, longest_sequence(tokens))
        self.forward = choose_forward(backbone, fast=fast, longest=longest, letters=tokens.letters)
        self._packed = isinstance(self.forward, PackedForward)

    def pairs(self, rows: Rows) -> list[Pair]:
        """Return the token ids of ``rows``."""
        return [self.tokens.pair(*each) for each in rows.reshape(len(rows), -1).tolist()]

    def _lengths(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Return ``[n, 3]`` numbers of tokens of :meth:`pairs`."""
        lengths = self.tokens.lengths[rows].astype(np.int64)
        if rows.ndim == 1:
            return lengths
        prompts, responses = lengths[:, 0, 0], lengths[:, :, 1:].max(2)
        assert self.tokens.max_length is not None
        room = self.tokens.max_length - prompts
        return np.stack([prompts, responses[:, 0], np.minimum(responses[:, 1], room)], 1)

    def signs(self, rows: Rows) -> npt.NDArray[np.float32]:
        """Return ``[n]`` +1 if the alphabetically first response is the chosen one, else −1."""
        return np.where(self.tokens.orientations[rows] == 1, 1, -1).astype(np.float32)

    def groups(self, rows: Rows, *, rejected: bool = True) -> list[Rows]:
        """Split ``rows`` into consecutive groups for one pass each; an oversized pair is its own group.

        A pass has at most ``max_tokens`` tokens. On the packed path a prompt counts once. On the plain path
        it counts with each response, padded to the longest sequence of the group, and the group has at most
        :data:`MAX_LOGITS` completion logits.
        """
        lengths = self._lengths(rows)[:, : 3 if rejected else 2]
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
        """Return the tastes of ``rows``, ``[n, d_z]``, or ``None``."""
        return None if self._tastes is None else self._tastes[torch.from_numpy(rows).to(self._tastes.device)]

    def run(self, rows: Rows, *, rejected: bool = True, rewards: bool = False) -> torch.Tensor:
        """Apply :attr:`forward` to ``rows`` in one pass, each pair with its own taste."""
        return self.forward(self.pairs(rows), rejected=rejected, rewards=rewards, tastes=self.tastes(rows))

    def outputs(self, rows: Rows, *, rewards: bool = False) -> npt.NDArray[np.float32]:
        """Run :attr:`forward` on ``rows`` without gradients: ``[n, 2]``, or ``[n, 4]`` with ``rewards``."""
        with torch.inference_mode(), self.backbone.without_idle_lora():
            outputs = [self.run(group, rewards=rewards).cpu() for group in self.groups(rows)]
        return torch.cat(outputs).numpy()

    def features(self, rows: Rows, *, rejected: bool = True, rewards: bool = False) -> Features | None:
        """Compute the trunk output of every row, for a phase that trains only the top.

        Returns:
            ``None`` without a packed path, with tastes, or if the output exceeds :data:`MAX_FEATURES`.
        """
        size = self.tokens.lengths[rows].sum() * self.backbone.width
        if not isinstance(self.forward, PackedForward) or self._tastes is not None or size > MAX_FEATURES:
            return None
        features: Features = {}
        with torch.no_grad(), self.backbone.without_idle_lora():
            for group in self.groups(rows, rejected=rejected):
                outputs = self.forward.features(self.pairs(group), rejected=rejected, rewards=rewards)
                features.update(zip(group.tolist(), (output.clone() for output in outputs), strict=True))
        return features


def longest_sequence(tokens: TokenSet, rows: Rows | None = None) -> int:
    """Return the length of the longest prompt with one response, or with one branch of a choice.

    The final letter of a branch does not count, because it is not an input.

    Args:
        rows: restrict to these pairs; ``None``: all.
    """
    lengths = tokens.lengths if rows is None else tokens.lengths[rows]
    if not len(lengths):
        return 0
    return int((lengths[:, 0] + lengths[:, 1:].max(1)).max()) - (tokens.letters is not None)


def check_lengths(backbone: Backbone, tokens: TokenSet, rows: Rows | None = None) -> None:
    """Check that the longest pair fits into the model's context.

    For models with fixed rotary positions a longer pair only logs a warning: positions beyond the context
    exist but are untrained.

    Args:
        rows: restrict to these pairs; ``None``: all.

    Raises:
        ModelError: a pair is longer, and the model has no further positions.
    """
    window, longest = backbone.window, longest_sequence(tokens, rows)
    if window is None or longest <= window:
        return
    what = "response" if tokens.letters is None else "two responses"
    message = (
        f"[model] name = {backbone.config.name!r}: the context is {window} tokens, but the longest prompt "
        f"with its {what} has {longest}; set [data] max_length = {window} or shorten such pairs"
    )
    if not backbone.stretches:
        raise ModelError(message)
    _log.warning("%s; the model may not have been trained on positions beyond its context", message)


def longest_input(backbone: Backbone, max_length: int) -> int:
    """Return ``max_length``, or the context if it is shorter and has no positions beyond."""
    window = backbone.window
    return max_length if window is None or backbone.stretches else min(max_length, window)


def choose_forward(
    backbone: Backbone, *, fast: bool, longest: int, letters: Letters | None = None
) -> PairForward:
    """Return the packed path if the model's family supports it, else the plain one, and log the reason.

    Args:
        fast: ``False`` selects the plain path.
        longest: length of the longest prompt with response.
        letters: token ids of A and B if the pairs are choices.
    """
    obstacle = _obstacle(backbone, longest) if fast else ""
    if obstacle:
        _log.warning("training uses the slower plain path: %s", obstacle)
    if fast and not obstacle:
        return (PackedChoices if letters else PackedForward)(backbone, letters)
    return (PaddedChoices if letters else PaddedForward)(backbone, letters)


def _obstacle(backbone: Backbone, longest: int) -> str:
    """Return why the model cannot take packed input; if it can, enable packing and return ``""``."""
    head = backbone.causal.get_output_embeddings()
    if backbone.family is None:
        return f"there is no fast path for model type {backbone.causal.config.model_type!r}"
    if hasattr(head, "lora_A"):
        return "the head has a LoRA"
    if head.bias is not None:
        return "the head has a bias"
    return enable_packing(backbone, longest)


class ReferenceLogprobs:
    """Cached log π_ref of both responses of every pair; for choices, log-odds in both orders.

    Log-probabilities depend in the last digits on the other pairs in the forward pass. Scoring and training
    group pairs differently, so each has its own cache.

    Attributes:
        scoring: cache for scoring.
        training: cache for training steps.
        one_by_one: in training, pass each pair through the model by itself. This is cheap on a CPU but would
            leave other devices idle.
    """

    def __init__(self, model: PairModel, folder: Path | None, name: str) -> None:
        self._model = model
        self.scoring = PairScoreCache(len(model.tokens), folder, name)
        self.training = PairScoreCache(len(model.tokens), folder, f"{name}-training")
        self.one_by_one = model.backbone.device.type == "cpu"
        self._phase: dict[bytes, npt.NDArray[np.float32]] = {}
        self._mismatched: dict[bytes, npt.NDArray[np.float32]] = {}

    def fill_scoring(self, rows: Rows) -> None:
        """Compute all of ``rows`` for scoring if one of them is missing.

        ``rows`` is always a full split of a client, so its groups are the same each time. The policy is
        scored in the same groups: if it equals the reference, both outputs are bit-identical.
        """
        if self.scoring.missing(rows):
            self._compute(self.scoring, [rows])

    def fill_training(self, rows: Rows, client_rows: Rows) -> None:
        """Compute missing ``rows`` for training, with as few other pairs as possible.

        Groups depend only on ``client_rows``, all pairs of the client. Values are therefore bit-identical for
        any order of steps, and after a kill.
        """
        if not self.training.missing(rows):
            return
        blocks = (
            split_rows(np.unique(rows), 1) if self.one_by_one else self._model.groups(np.sort(client_rows))
        )
        wanted = [block for block in blocks if np.isin(block, rows).any() and self.training.missing(block)]
        # There are none if another run that shares the folder has stored them meanwhile.
        if wanted:
            self._compute(self.training, wanted)

    def fill(self, parts: Sequence[Rows], client_rows: Rows) -> None:
        """Compute the batches ``parts`` of a phase for :meth:`get`.

        Rows with unrelated responses are not cached, because batches are drawn anew in every phase.
        """
        if parts[0].ndim == 1:
            self.fill_training(np.concatenate(parts), client_rows)
        else:
            keys = (part.tobytes() for part in parts)
            self._phase = dict(zip(keys, self._outputs(parts), strict=True))

    def get(self, part: Rows) -> npt.NDArray[np.float32]:
        """Return ``[n, 2]`` outputs of a batch of the last :meth:`fill`."""
        return self.training.get(part) if part.ndim == 1 else self._phase[part.tobytes()]

    def for_scoring(self, rows: Rows) -> npt.NDArray[np.float32]:
        """Return ``[n, 2]`` outputs for scoring ``rows``, computed once; see :meth:`fill_scoring`."""
        if rows.ndim == 1:
            self.fill_scoring(rows)
            return self.scoring.get(rows)
        key = rows.tobytes()
        if key not in self._mismatched:
            (self._mismatched[key],) = self._outputs([rows])
        return self._mismatched[key]

    def _compute(self, cache: PairScoreCache, blocks: list[Rows]) -> None:
        """Store the outputs of ``blocks`` in ``cache``, one pass or more per block."""
        cache.put(np.concatenate(blocks), np.concatenate(self._outputs(blocks)))

    def _outputs(self, blocks: Sequence[Rows]) -> list[npt.NDArray[np.float32]]:
        backbone = self._model.backbone
        backbone.load(backbone.reference)
        # Only the first two numbers are needed. But rewards change how a batch is packed, and the reference
        # must be packed like the policy for bit-identical results.
        rewards = backbone.reward is not None
        return [self._model.outputs(block, rewards=rewards)[:, :2] for block in blocks]
