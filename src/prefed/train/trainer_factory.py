"""The factory of client trainers: one frozen model and the data of all clients, once per process."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from prefed.core import POOLED, Key, Ownership, Round, Tensors
from prefed.data import ClientData, ClientSizes, FederatedDataset, ResponseEncoder, TokenSet
from prefed.models import Backbone, ModelError
from prefed.models.adapters import save_adapter
from prefed.models.parts import WEIGHTS
from prefed.train.metrics import ChoiceScores, PairScores
from prefed.train.pair_cache import Rows
from prefed.train.pair_model import longest_sequence
from prefed.train.pair_trainer import ClientPairTrainer, PairTrainer
from prefed.train.rewards import Rewards

_log = logging.getLogger("prefed")


class PairTrainerFactory:
    """Makes trainers of clients over a language model and preference pairs.

    It is the :class:`prefed.engines.TrainerFactory` of every real run.

    Args:
        backbone: the frozen model. Nothing else may use it.
        cache: folder for the log-probabilities of the reference model; ``None`` keeps them in memory.
        unseen: clients whose pairs no method trains on, pooled methods included.
        reward_model: folder or hub name of the model that scores responses, for offline PPO.
        responses: as :class:`~prefed.train.PairTrainer` takes it.

    Raises:
        ModelError: the model has fewer positions than the longest pair of a client has tokens.
    """

    def __init__(
        self,
        backbone: Backbone,
        dataset: FederatedDataset,
        *,
        cache: Path | None = None,
        max_tokens: int = 4096,
        fast: bool = True,
        unseen: Sequence[str] = (),
        reward_model: str | None = None,
        responses: ResponseEncoder | None = None,
    ) -> None:
        self.backbone, self.dataset, self._unseen = backbone, dataset, frozenset(unseen)
        rows = [
            split for data in dataset.clients.values() for split in (data.train, data.validation, data.test)
        ]
        check_lengths(backbone, dataset.tokens, np.concatenate(rows))
        rewards = None
        if reward_model is not None:
            rewards = Rewards(reward_model, dataset.tokens, cache, backbone.device)
        self._model = model_digest(backbone)
        kind = "reference" if dataset.tokens.letters is None else "choices"
        name = f"{kind}-{self._model[:12]}-{dataset.tokens.fingerprint[:12]}"
        self.pair_trainer = PairTrainer(
            backbone,
            dataset.tokens,
            cache=cache,
            name=name,
            max_tokens=max_tokens,
            fast=fast,
            rewards=rewards,
            responses=responses,
        )

    @property
    def initial(self) -> Tensors:
        """The tensors that every client starts from (full layout)."""
        return self.backbone.initial

    @property
    def clients(self) -> Mapping[str, ClientSizes]:
        """Every client's number of training, validation and test pairs."""
        return self.dataset.sizes

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Digests of the data, and of the model together with the start of its adapter."""
        return {"data": self.dataset.fingerprint, "model": self._model}

    def _data(self, client: str) -> ClientData:
        if client == POOLED and client not in self.dataset.clients:
            members = [data for name, data in self.dataset.clients.items() if name not in self._unseen]
            splits = ("train", "validation", "test")
            pooled = (np.sort(np.concatenate([getattr(data, split) for data in members])) for split in splits)
            return ClientData(POOLED, *pooled)
        return self.dataset.clients[client]

    def trainer(self, client: str, now: Round, key: Key, ownership: Ownership) -> ClientPairTrainer:
        """The trainer of one client in one exchange of a round; ``"pooled"`` is all clients as one."""
        data = self._data(client)
        return ClientPairTrainer(data.train, key, ownership, self.pair_trainer, client, data.validation, now)

    def score(
        self, client: str, tensors: Tensors, split: Literal["train", "validation", "test"]
    ) -> PairScores | ChoiceScores:
        """The scores of a client's pairs of one split under ``tensors`` (full layout)."""
        return self.pair_trainer.score(tensors, getattr(self._data(client), split))

    def save_adapter(self, tensors: Tensors, folder: Path) -> None:
        """Write ``tensors`` as an adapter folder that PEFT loads."""
        save_adapter(self.backbone, tensors, folder)


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


def model_digest(backbone: Backbone) -> str:
    """SHA-256 over the architecture, a sample of every weight, and the start of the adapter."""
    config = backbone.causal.config.to_dict()
    for where in ("_name_or_path", "transformers_version"):
        config.pop(where, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in backbone.causal.named_parameters():
        if ".lora_" in name or WEIGHTS in backbone.needs:
            continue  # ``initial`` has it
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 1024)].to("cpu", torch.float32)
        digest.update(f"{name}{tuple(weight.shape)}".encode() + sample.numpy().tobytes())
    digest.update(backbone.initial.flat.numpy().data)
    return digest.hexdigest()
