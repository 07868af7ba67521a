"""The trainers of clients, and what makes them for a whole run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from prefed.core import POOLED, Key, Objective, Ownership, Round, Tensors, Upload
from prefed.core.tensors import Layered
from prefed.data import ClientData, ClientSizes, FederatedDataset, Record
from prefed.models import Backbone
from prefed.models.adapter_files import save_adapter
from prefed.models.backbone import model_digest
from prefed.models.trainable_parts import EXAMPLE_COUNT
from prefed.train.feedback import PAIRS
from prefed.train.feedback.kind import Feedback, Scores
from prefed.train.forward_passes import check_lengths
from prefed.train.pair_cache import Rows
from prefed.train.trainers import PairTrainer, Visit

if TYPE_CHECKING:
    from prefed.data.examples import ExampleEncoder
    from prefed.data.response_encoder import ResponseEncoder


@dataclass(frozen=True, eq=False)
class ClientPairTrainer(Visit):
    """The :class:`~prefed.core.ClientTrainer` of a language model: a visit to the pairs of one client."""

    client: str
    validation_rows: Rows
    round: Round

    @property
    def size(self) -> int:
        """Number of training pairs."""
        return len(self.rows)

    @property
    def initial(self) -> Tensors:
        """The tensors that every client starts from."""
        return self.pair_trainer.backbone.initial

    def loss(self, tensors: Tensors, objective: Objective, split: Literal["train", "validation"]) -> float:
        """Return the mean loss over a split; clients without validation pairs use their training pairs."""
        validate = split == "validation" and len(self.validation_rows)
        return self.pair_trainer.loss(tensors, objective, self.validation_rows if validate else self.rows)

    def posteriors(
        self, tensors: Tensors, objective: Objective, *, pairs: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return μ and log σ² after contexts of training pairs, the same contexts in every round."""
        key = Key(self.round.key.seed).at("contexts").at("client", self.client)
        return self.pair_trainer.scorer.posteriors(tensors, objective, self.rows, key, pairs)

    def assemble(self, *groups: Tensors) -> Tensors:
        """Return ``initial`` with the given tensors replaced; later groups override earlier ones."""
        if isinstance(self.initial, Layered):
            # A large model. The result is only copied into the backbone.
            return Layered(self.initial.layout, self.initial, *groups)
        return self.initial.replace(*groups)

    def upload(self, tensors: Mapping[str, Tensors], scalars: Mapping[str, float] | None = None) -> Upload:
        """Return an upload from this client in this round, weighted by its number of training pairs."""
        return Upload(self.client, float(self.size), tensors, scalars or {}, self.round.number)


class PairTrainerFactory:
    """Create client trainers for a language model and preference pairs.

    This is the :class:`prefed.engines.TrainerFactory` of all real runs.

    Args:
        backbone: the frozen model; nothing else may use it.
        cache: folder for outputs of the reference model; ``None`` keeps them in memory.
        features: the same for hidden states of the frozen model.
        unseen: clients whose pairs are never trained on, even by pooled methods.
        reward_model: folder or hub name of the model that scores responses, for offline PPO.
        responses: see :class:`~prefed.train.PairTrainer`.
        examples: see :class:`~prefed.train.PairTrainer`.
        feedback: the kind that clients train on.

    Raises:
        ModelError: the longest pair of a client exceeds the model's context.
    """

    def __init__(
        self,
        backbone: Backbone,
        dataset: FederatedDataset,
        *,
        cache: Path | None = None,
        features: Path | None = None,
        max_tokens: int = 4096,
        fast: bool = True,
        unseen: Sequence[str] = (),
        reward_model: str | None = None,
        responses: ResponseEncoder | None = None,
        examples: ExampleEncoder | None = None,
        feedback: Feedback = PAIRS,
    ) -> None:
        self.backbone, self.dataset, self._unseen = backbone, dataset, frozenset(unseen)
        rows = [
            split for data in dataset.clients.values() for split in (data.train, data.validation, data.test)
        ]
        check_lengths(backbone, dataset.tokens, np.concatenate(rows))
        rewards = None
        if reward_model is not None:
            from prefed.train.reward_model import Rewards

            rewards = Rewards(reward_model, dataset.tokens, cache, backbone.device)
        self._model = model_digest(backbone)
        clients = hashlib.sha256(b"".join(split.tobytes() + b"|" for split in rows)).hexdigest()
        digests = (model_digest(backbone, idle=False), dataset.tokens.fingerprint, clients)
        frozen = "-".join(digest[:12] for digest in digests)
        kind = "reference" if dataset.tokens.letters is None else "choices"
        self.pair_trainer = PairTrainer(
            backbone,
            dataset.tokens,
            cache=cache,
            name=f"{kind}-{frozen}",
            # Only a model that reads hidden states has responses to encode.
            features=None if features is None or responses is None else features / f"features-{frozen}",
            max_tokens=max_tokens,
            fast=fast,
            rewards=rewards,
            responses=responses,
            examples=examples,
            feedback=feedback,
        )

    @property
    def initial(self) -> Tensors:
        """The tensors that every client starts from (full layout)."""
        return self.backbone.initial

    @property
    def clients(self) -> Mapping[str, ClientSizes]:
        """Number of training, validation and test pairs of each client."""
        return self.dataset.sizes

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Digests of the data, and of the model with its initial adapter."""
        return {"data": self.dataset.fingerprint, "model": self._model}

    def _data(self, client: str) -> ClientData:
        if client == POOLED and client not in self.dataset.clients:
            members = [data for name, data in self.dataset.clients.items() if name not in self._unseen]
            splits = ("train", "validation", "test")
            pooled = (np.sort(np.concatenate([getattr(data, split) for data in members])) for split in splits)
            return ClientData(POOLED, *pooled)
        return self.dataset.clients[client]

    def trainer(self, client: str, now: Round, key: Key, ownership: Ownership) -> ClientPairTrainer:
        """Return the trainer of a client in one exchange of a round; ``"pooled"`` is all clients as one."""
        data = self._data(client)
        return ClientPairTrainer(data.train, key, ownership, self.pair_trainer, client, data.validation, now)

    def score(self, client: str, tensors: Tensors, split: Literal["train", "validation", "test"]) -> Scores:
        """Return the scores of a split of a client's pairs under ``tensors`` (full layout)."""
        rows = getattr(self._data(client), split)
        return self.pair_trainer.score(tensors, rows, self.examples(client, tensors))

    def examples(self, client: str, tensors: Tensors) -> list[Record]:
        """Return the training pairs of a client that come before the prompts of its model ``tensors``."""
        encoder = self.pair_trainer.examples
        if encoder is None:
            return []
        rows = encoder.draw(client, self._data(client).train, int(tensors[EXAMPLE_COUNT]))
        return [self.dataset.tokens.record(int(row)) for row in rows]

    def save_adapter(self, tensors: Tensors, folder: Path) -> None:
        """Write ``tensors`` as a PEFT adapter folder."""
        save_adapter(self.backbone, tensors, folder)
