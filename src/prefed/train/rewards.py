"""A frozen reward model's scores of every response, computed once per record and kept with the run."""

from __future__ import annotations

import hashlib
import math
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from prefed.data import Prompt, Record, TokenSet
from prefed.data.encoding import Template
from prefed.models import ModelError, load_pretrained
from prefed.train.pair_cache import PairScoreCache, Rows, split_rows

BATCH, BLOCK = 16, 512
"""Sequences in a batch of the model; records whose token ids are in memory at once."""

_KEY, _KIND = "[method] reward_model", "sequence classification model"


class RewardModel:
    """A sequence classification model r(x, y), frozen.

    Its own tokenizer joins prompt and response as it joins two texts. Conversations go through the
    tokenizer's chat template, or take the Human/Assistant form if it has none. A text that is too long loses
    the beginning of its prompt. A model with one output scores by that output. A model with two scores by the
    log odds of the second, e.g. that a review is positive.

    Args:
        name: a folder or a hub name.
        key: the setting that holds the name, for messages.

    Raises:
        ModelError: there is no such model, its head is not trained, or it has more than two outputs.
    """

    def __init__(self, name: str, device: torch.device, key: str = _KEY) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.name, self.device = name, device
        self.tokenizer = load_pretrained(AutoTokenizer, key, name, "tokenizer", truncation_side="left")
        self.model, report = load_pretrained(
            AutoModelForSequenceClassification,
            key,
            name,
            _KIND,
            dtype=torch.float32,
            output_loading_info=True,
        )
        missing = set(report["missing_keys"]) & {key for key, _ in self.model.named_parameters()}
        if missing:
            raise ModelError(
                f"{key} = {name!r}: this is no reward model; it has no weights for "
                f"{', '.join(sorted(missing))}"
            )
        if self.model.config.num_labels > 2:
            raise ModelError(
                f"{key} = {name!r} has {self.model.config.num_labels} outputs; a reward "
                "model has one, or two of which the second is the good one"
            )
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.model.to(device).eval().requires_grad_(False)
        self._template = Template(self.tokenizer)
        places = getattr(self.model.config, "max_position_embeddings", None) or math.inf
        self._limit = min(self.tokenizer.model_max_length, places)

    def encode(self, record: Record) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """The tokenizer's output, token ids among others, for the chosen and for the rejected response."""
        return self.encode_texts(record.prompt, record.chosen, record.rejected)

    def encode_texts(
        self, prompt: Prompt, chosen: str, rejected: str
    ) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """As :meth:`encode`, of responses that may be empty."""
        whole = self._template.chat and not isinstance(prompt, str)
        prompt, chosen, rejected = self._template.pair(prompt, chosen, rejected)
        return self._tokens(prompt, chosen, whole), self._tokens(prompt, rejected, whole)

    def _tokens(self, prompt: str, response: str, whole: bool) -> dict[str, list[int]]:
        # The chat template has written the special tokens.
        texts = (prompt + response,) if whole else (prompt, response)
        options: dict[str, Any] = {"add_special_tokens": not whole, "verbose": False}
        encoded = self.tokenizer(*texts, **options)
        if len(encoded["input_ids"]) > self._limit:
            alone = len(self.tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"])
            fits = alone + self.tokenizer.num_special_tokens_to_add(pair=True) < self._limit
            side = "only_first" if whole or fits else "longest_first"
            encoded = self.tokenizer(*texts, truncation=side, max_length=int(self._limit), **options)
        return dict(encoded)

    @torch.inference_mode()
    def score(self, encoded: list[dict[str, list[int]]]) -> npt.NDArray[np.float32]:
        """``[n]`` scores; sequences of similar length share a batch."""
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
    """SHA-256 over the files of a model's folder, or over a hub name and its commit.

    Args:
        key: the setting that holds the name, for messages.
        kind: the kind of model in words, for messages.

    Raises:
        ModelError: there is no model of that name.
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
    """r(x, y) of both responses of every record; the model is loaded when the first score is missing.

    Args:
        model: a folder with a sequence classification model, or a hub name.
        folder: where to keep the scores; ``None`` keeps them in memory.
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
                    f"[method] reward_model = {self._name!r} is not what {others[0].name} was written by; "
                    "put the model back, or start a new run"
                )
        return PairScoreCache(len(self._records), self._folder, name)

    def get(self, rows: Rows) -> npt.NDArray[np.float32]:
        """``[len(rows), 2]`` raw scores of the model, chosen then rejected.

        Callers pass all rows of a client at once, because they standardise over all of them. So the rows go
        through the model in the same blocks each time, and the order of calls changes no rounding. A block
        with a missing score is computed and stored before the next one starts.

        Raises:
            ModelError: the model cannot be used, it is not the model that the folder's scores come from, or
                it gives a score that is not finite.
        """
        for block in split_rows(rows, BLOCK):
            if self._scores.missing(block):
                self._scores.put(block, self._score(block))
        return self._scores.get(rows)

    def _score(self, rows: Rows) -> npt.NDArray[np.float32]:
        encoded = [
            response for row in rows for response in self._model.encode(self._records.record(int(row)))
        ]
        scores = self._model.score(encoded).reshape(-1, 2)
        finite = np.isfinite(scores).all(1)
        if not finite.all():
            raise ModelError(
                f"[method] reward_model = {self._name!r} gives no finite score to a response of record "
                f"{rows[~finite][0]}"
            )
        return scores
