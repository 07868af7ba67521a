"""A process's place of work: one bench, the federation's data, a desk for whoever visits."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from prefed.core import POOLED, Key, Ownership, Round, Tensors
from prefed.data import ClientData, FederatedDataset
from prefed.models import Backbone, ModelError
from prefed.models.adapters import save_adapter
from prefed.train.client_trainer import ClientPairTrainer
from prefed.train.pair_trainer import PairTrainer, Scores
from prefed.train.rewards import Rewards

__all__ = ["PairTrainerFactory", "check_lengths"]

_log = logging.getLogger("prefed")


class _Sizes(NamedTuple):
    train: int
    validation: int
    test: int


class _ClientSizes(Mapping[str, _Sizes]):
    """Sizes by client, read off the federation when asked for."""

    def __init__(self, clients: Mapping[str, ClientData]) -> None:
        self._clients = clients

    def __getitem__(self, client: str) -> _Sizes:
        data = self._clients[client]
        return _Sizes(len(data.train), len(data.validation), len(data.test))

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


class PairTrainerFactory:
    """The workplace of real models and real data (see :class:`prefed.engines.TrainerFactory`).

    Args:
        backbone: the frozen model; this place becomes its only user.
        federation: who holds which rows.
        cache: folder for the reference's log-probabilities, kept with the run.
        max_tokens: tokens of one forward pass.
        fast: use the bench's fast paths.
        unseen: clients whose pairs no method trains on, pooled or not.
        reward_model: a folder or hub name of what scores responses, for offline PPO.

    Raises:
        ModelError: the model has no positions for the longest pair of a client.
    """

    def __init__(
        self,
        backbone: Backbone,
        federation: FederatedDataset,
        *,
        cache: Path | None = None,
        max_tokens: int = 4096,
        fast: bool = True,
        unseen: Sequence[str] = (),
        reward_model: str | None = None,
    ) -> None:
        self.backbone, self.federation, self._unseen = backbone, federation, frozenset(unseen)
        held = [
            part for data in federation.clients.values() for part in (data.train, data.validation, data.test)
        ]
        check_lengths(backbone, federation.tokens.lengths[np.concatenate(held)])
        rewards = None
        if reward_model is not None:
            rewards = Rewards(reward_model, federation.tokens, cache, backbone.device)
        self._model = _digest(backbone)
        name = f"reference-{self._model[:12]}-{federation.tokens.fingerprint[:12]}"
        self.pair_trainer = PairTrainer(
            backbone,
            federation.tokens,
            cache=cache,
            name=name,
            max_tokens=max_tokens,
            fast=fast,
            rewards=rewards,
        )

    @property
    def initial(self) -> Tensors:
        """The tensors that every client starts from (full layout)."""
        return self.backbone.initial

    @property
    def clients(self) -> Mapping[str, _Sizes]:
        """Every client's number of training, validation and test pairs."""
        return _ClientSizes(self.federation.clients)

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Digests of the data and of the model with its adapter's start."""
        return {"data": self.federation.fingerprint, "model": self._model}

    def _data(self, client: str) -> ClientData:
        if client == POOLED and client not in self.federation.clients:
            seen = [data for name, data in self.federation.clients.items() if name not in self._unseen]
            splits = ("train", "validation", "test")
            pooled = (np.sort(np.concatenate([getattr(data, split) for data in seen])) for split in splits)
            return ClientData(POOLED, *pooled)
        return self.federation.clients[client]

    def trainer(self, client: str, now: Round, key: Key, ownership: Ownership) -> ClientPairTrainer:
        """A visit to a client; ``"pooled"`` is all of them as one."""
        data = self._data(client)
        return ClientPairTrainer(self.pair_trainer, client, data.train, data.validation, now, key, ownership)

    def score(self, client: str, tensors: Tensors, split: Literal["train", "validation", "test"]) -> Scores:
        """Log-probabilities of a client's pairs of one split under ``tensors`` (full layout)."""
        return self.pair_trainer.score(tensors, getattr(self._data(client), split))

    def save_adapter(self, tensors: Tensors, folder: Path) -> None:
        """Write ``tensors`` as an adapter folder that PEFT loads."""
        save_adapter(self.backbone, tensors, folder)


def check_lengths(backbone: Backbone, lengths: npt.NDArray[np.int32]) -> None:
    """See that the longest pair is within the model's context; rotary positions go on beyond it, untrained.

    Args:
        backbone: the model.
        lengths: ``int32 [n, 3]``, tokens of prompt, chosen and rejected.

    Raises:
        ModelError: it is not, and the model has no further positions.
    """
    config = backbone.causal.config
    window = getattr(config, "max_position_embeddings", None)
    longest = int((lengths[:, 0] + lengths[:, 1:].max(axis=1)).max(initial=0))
    if window is None or longest <= window:
        return
    message = (
        f"[model] name = {backbone.config.name!r} has a context of {window} tokens, and the longest prompt "
        f"with its response has {longest}: set [data] max_length = {window}, or shorten such pairs"
    )
    if not hasattr(config, "rope_parameters"):
        raise ModelError(message)
    _log.warning("%s; the model may not have been trained on positions beyond its context", message)


def _digest(backbone: Backbone) -> str:
    """SHA-256 over the architecture, a sample of every weight, and the adapter's start."""
    config = backbone.causal.config.to_dict()
    for where in ("_name_or_path", "transformers_version"):
        config.pop(where, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in backbone.causal.named_parameters():
        if ".lora_" in name:
            continue
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 1024)].to("cpu", torch.float32)
        digest.update(f"{name}{tuple(weight.shape)}".encode() + sample.numpy().tobytes())
    digest.update(backbone.initial.flat.numpy().tobytes())
    return digest.hexdigest()
