"""Scores of all responses by a frozen reward model, computed once per record and stored with the run."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from prefed.data import Prompt, TokenSet
from prefed.data.encoding import MARK, SCORING_DATE, Template, token_ids
from prefed.models import ModelError, load_pretrained
from prefed.models.pretrained import placement
from prefed.train.pair_cache import PairScoreCache, Rows, split_rows

BATCH, BLOCK = 16, 512
"""Sequences per batch of the model; records tokenised at a time."""

_KEY, _KIND = "[method] reward_model", "sequence classification model"


class RewardModel:
    """A frozen sequence classification model r(x, y).

    Its tokenizer encodes prompt and response as a pair of texts. Conversations use its chat template, or the
    Human/Assistant format if it has none. Long texts are truncated at the start of the prompt. The score is
    the output of a model with one output, or the log-odds of the second of two outputs, e.g. that a review is
    positive.

    Args:
        name: a folder or a hub name.
        key: the setting that contains the name, for messages.

    Raises:
        ModelError: the model cannot be loaded, e.g. because it has no trained head, or it has more than two
            outputs.
    """

    def __init__(self, name: str, device: torch.device, key: str = _KEY) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.name, self.device = name, device
        self.tokenizer = load_pretrained(AutoTokenizer, key, name, "tokenizer", truncation_side="left")
        self.model = load_pretrained(
            AutoModelForSequenceClassification, key, name, _KIND, dtype=torch.float32, **placement(device)
        )
        if self.model.config.num_labels > 2:
            raise ModelError(
                f"{key} = {name!r} has {self.model.config.num_labels} outputs; a reward model must have one, "
                "or two with the second for good responses"
            )
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.model.to(device).eval().requires_grad_(False)
        self._template = Template(self.tokenizer, today=SCORING_DATE)
        places = getattr(self.model.config, "max_position_embeddings", None) or sys.maxsize
        self._limit = int(min(self.tokenizer.model_max_length, places))

    def encode(
        self, prompt: Prompt, chosen: str, rejected: str
    ) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Return the tokenizer's output for both responses, which may be empty."""
        whole = self._template.chat and not isinstance(prompt, str)
        prompt, chosen, rejected, _ = self._template.render(prompt, chosen, rejected)
        return self._tokens(prompt, chosen, whole), self._tokens(prompt, rejected, whole)

    def _tokens(self, prompt: str, response: str, whole: bool) -> dict[str, list[int]]:
        # The chat template includes the special tokens.
        texts: tuple[str, ...] = (prompt + response,) if whole else (prompt, response)
        options: dict[str, Any] = {"add_special_tokens": not whole, "verbose": False}
        if any(MARK in text for text in texts):
            return self._marked(texts, options)
        encoded = self.tokenizer(*texts, **options)
        if len(encoded["input_ids"]) > self._limit:
            alone = len(self.tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"])
            fits = alone + self.tokenizer.num_special_tokens_to_add(pair=True) < self._limit
            side = "only_first" if whole or fits else "longest_first"
            encoded = self.tokenizer(*texts, truncation=side, max_length=self._limit, **options)
        return dict(encoded)

    def _marked(self, texts: Sequence[str], options: Mapping[str, Any]) -> dict[str, list[int]]:
        """As :meth:`_tokens`, for texts in which control tokens are text.

        The special tokens and segments are those that the tokenizer gives to the same number of short texts.
        """
        frame = self.tokenizer(*["a"] * len(texts), return_special_tokens_mask=True, **options)
        special = frame.pop("special_tokens_mask")
        parts, fits = token_ids(self.tokenizer, texts), self._limit - sum(special)
        while sum(map(len, parts)) > fits:
            cut = 0 if len(parts[-1]) < fits else max(range(len(parts)), key=lambda n: len(parts[n]))
            del parts[cut][0]
        encoded: dict[str, list[int]] = {name: [] for name in frame}
        short, contents = special.count(0) // len(texts), iter(parts)
        places = [n for n, is_special in enumerate(special) if not is_special][::short]
        for n, is_special in enumerate(special):
            ids = [frame["input_ids"][n]] if is_special else next(contents) if n in places else []
            for name, values in frame.items():
                encoded[name] += ids if name == "input_ids" else values[n : n + 1] * len(ids)
        return encoded

    @torch.inference_mode()
    def score(self, encoded: list[dict[str, list[int]]]) -> npt.NDArray[np.float32]:
        """Return ``[n]`` scores; sequences of similar length share a batch."""
        order = sorted(range(len(encoded)), key=lambda n: len(encoded[n]["input_ids"]))
        scores = np.empty(len(encoded), np.float32)
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            inputs = self.tokenizer.pad([encoded[n] for n in batch], return_tensors="pt", verbose=False)
            logits = self.model(**inputs.to(self.device)).logits
            value = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
            scores[batch] = value.float().cpu().numpy()
        return scores


def model_fingerprint(name: str, key: str = _KEY, kind: str = _KIND) -> str:
    """Return SHA-256 over the files of a model's folder, or over a hub name and its commit.

    Args:
        key: the setting that contains the name, for messages.

    Raises:
        ModelError: there is no model with that name.
    """
    from transformers import AutoConfig

    config: Any = load_pretrained(AutoConfig, key, name, kind)
    folder = Path(name)
    if not folder.is_dir():
        commit = getattr(config, "_commit_hash", None)
        return hashlib.sha256(f"{name}@{commit}".encode()).hexdigest()
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with path.open("rb") as stream:
            digest.update(path.name.encode() + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


class Rewards:
    """r(x, y) of both responses of every record; the model is loaded when a score is missing.

    Args:
        model: folder or hub name of a sequence classification model.
        folder: where to store the scores; ``None`` keeps them in memory.
    """

    def __init__(
        self,
        model: str,
        records: TokenSet,
        folder: Path | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._name, self._records, self._folder = model, records, folder
        self._device = torch.device(device)

    @cached_property
    def fingerprint(self) -> str:
        """:func:`model_fingerprint` of the model."""
        return model_fingerprint(self._name)

    @cached_property
    def _model(self) -> RewardModel:
        return RewardModel(self._name, self._device)

    @cached_property
    def _scores(self) -> PairScoreCache:
        data = self._records.fingerprint[:12]
        name = f"rewards-{self.fingerprint[:12]}-{data}"
        if self._folder is not None:
            others = [path for path in self._folder.glob(f"rewards-*-{data}.f32") if path.stem != name]
            if others:
                raise ModelError(
                    f"[method] reward_model = {self._name!r} differs from the model that wrote "
                    f"{others[0].name}; restore that model or start a new run"
                )
        return PairScoreCache(len(self._records), self._folder, name)

    def get(self, rows: Rows) -> npt.NDArray[np.float32]:
        """Return ``[len(rows), 2]`` raw scores, chosen then rejected.

        Callers standardise over all rows of a client and therefore pass all of them, so blocks are the same
        each time and rounding does not depend on the order of calls. Each block is stored before the next one
        starts.

        Raises:
            ModelError: the model cannot be used, is not the one behind the stored scores, or gives a score
                that is not finite.
        """
        for block in split_rows(rows, BLOCK):
            if self._scores.missing(block):
                self._scores.put(block, self._score(block))
        return self._scores.get(rows)

    def _score(self, rows: Rows) -> npt.NDArray[np.float32]:
        records = [self._records.record(int(row)) for row in rows]
        encoded = [
            response for r in records for response in self._model.encode(r.prompt, r.chosen, r.rejected)
        ]
        scores = self._model.score(encoded).reshape(-1, 2)
        finite = np.isfinite(scores).all(1)
        if not finite.all():
            raise ModelError(
                f"[method] reward_model = {self._name!r} gives a response of record {rows[~finite][0]} a "
                "score that is not finite"
            )
        return scores
