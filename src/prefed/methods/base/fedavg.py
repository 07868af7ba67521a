"""The usual moves of a federated round, those of FedAvg, with which method files are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from prefed.core import (
    ClientTrainer,
    Download,
    Entry,
    Exchange,
    Layout,
    Method,
    Owner,
    Phase,
    Proximal,
    Round,
    State,
    Tensors,
    Upload,
)
from prefed.merge import Aggregator
from prefed.methods.base import lr_schedule
from prefed.methods.base.optimizer_state import keep_optimizer_state
from prefed.methods.base.ppo import VALUE
from prefed.methods.base.server import FedAvgServer
from prefed.methods.base.settings import TrainingSettings


@dataclass(frozen=True)
class FedAvgBase(FedAvgServer):
    """The usual moves of a federated round. A method file replaces those in which its method differs.

    Those of the server are :class:`~prefed.methods.base.server.FedAvgServer`'s. A client's private state
    holds the group ``"personal"`` if any tensor is personal, and the group ``"own"`` if the method gives each
    client a model of its own beside the shared one.
    """

    @staticmethod
    def of(
        settings: TrainingSettings,
        aggregator: Aggregator,
        rounds: int,
        personal: Callable[[Entry], bool] = lambda entry: False,
    ) -> FedAvgBase:
        """A base in which ``personal`` names the personal tensors and the LoRA rule decides about the others.

        PPO's critic is always personal.
        """

        def owner(entry: Entry) -> Owner:
            return Owner.PERSONAL if entry.part == VALUE or personal(entry) else Owner.SHARED

        return FedAvgBase(settings, aggregator, rounds, aggregator.ownership(owner))

    # The client

    def init_client(self, initial: Tensors, client: str) -> State:
        """The personal tensors as they start."""
        return self.keep(State(), initial)

    def start(self, trainer: ClientTrainer, private: State, download: Download) -> Tensors:
        """The client's model at the start of a visit, and in predictions: φ and its personal tensors."""
        groups = download.tensors.get(self.group), private.tensors.get("personal")
        return trainer.assemble(*(group for group in groups if group is not None))

    def work(
        self, trainer: ClientTrainer, private: State, download: Download, **changes: Any
    ) -> tuple[Upload, State]:
        """A visit: train φ_i ← φ and the personal tensors together; send φ_i, keep the personal tensors.

        ``changes`` are those of :meth:`phase`.
        """
        start = self.start(trainer, private, download)
        result = trainer.train(start, self.phase(trainer, download, **changes))
        return self.upload(trainer, result.tensors, result.loss), self.keep(private, result.tensors)

    def phase(
        self,
        trainer: ClientTrainer,
        download: Download,
        name: str = "train",
        *,
        train: Sequence[str] | None = None,
        **changes: Any,
    ) -> Phase:
        """The phase that the settings describe, at this round's learning rates.

        Args:
            name: names the phase's randomness.
            train: the tensors that train; all that may train in this round unless given.
            changes: as :meth:`TrainingSettings.phase` takes them. Their learning rates are a first round's;
                the schedule scales them as it scales ``lr`` of the settings.
        """
        names = self.trainable(trainer.round) if train is None else train
        phase = self.settings.phase(name, names, **changes)
        return phase.at_rates(lambda rate: self.rate(trainer, download, rate))

    def rates(self, **parts: float) -> dict[str, float]:
        """Learning rates by tensor, from learning rates by part of the model: ``rates(head=1e-4)``."""
        return {
            entry.name: parts[entry.part] for entry in self.aggregator.layout.entries if entry.part in parts
        }

    def rate(self, trainer: ClientTrainer, download: Download, lr: float) -> float:
        """This round's learning rate, where ``lr`` is the first round's."""
        return lr_schedule.rate(lr, self.settings, trainer.round, self.rounds, download.scalars)

    def repeats(self, trainer: ClientTrainer, steps: int) -> int:
        """How often a visit repeats a loop of ``steps`` optimiser steps.

        ``local_steps`` times, or as often as the steps of ``local_epochs`` passes make necessary.
        """
        s = self.settings
        if s.local_epochs is None:
            assert s.local_steps is not None
            return s.local_steps
        total = s.passes(s.local_epochs) * math.ceil(trainer.size / s.step_pairs())
        return math.ceil(total / steps)

    def share(self, tensors: Tensors, now: Round) -> Tensors:
        """The shared tensors that train in this round: what a client sends."""
        return tensors.select(self.trainable(now, Owner.SHARED))

    def upload(self, trainer: ClientTrainer, tensors: Tensors, loss: float) -> Upload:
        """φ_i, taken from ``tensors``, and the visit's mean training loss."""
        return trainer.upload({self.group: self.share(tensors, trainer.round)}, {"loss": loss})

    def groups(self, client: str, now: Round) -> dict[str, Layout]:
        """The groups of tensors in an upload of this round, as :meth:`upload` makes it."""
        return {self.group: self.aggregator.layout.select(self.trainable(now, Owner.SHARED))}

    def keep(self, private: State, tensors: Tensors) -> State:
        """The client's next private state: its personal tensors, taken from ``tensors``."""
        personal = self.ownership.select(tensors, Owner.PERSONAL)
        return private.update({"personal": personal}) if personal else private

    def keep_own(self, private: State, tensors: Tensors) -> State:
        """As :meth:`keep`, and the client's own copy of the shared tensors, for :meth:`predict_own`."""
        return self.keep(private, tensors).update({"own": tensors.select(self.shared)})

    def predict_own(self, trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        """The client's own model. Before its first visit that is the model as published."""
        model, own = self.start(trainer, private, published), private.tensors.get("own")
        return model if own is None else model.replace(own)

    def adapt(
        self, trainer: ClientTrainer, published: Download, steps: int, *, pull: float = 0.0, **changes: Any
    ) -> Tensors:
        """A newcomer's model: the published one after ``steps`` steps of all that may train.

        A newcomer trains at the rates of a first round.

        Args:
            published: the shared tensors. Personal tensors start as every client's did.
            steps: optimiser steps, at least 1.
            pull: strength of a pull towards the published tensors.
            changes: as :meth:`TrainingSettings.phase` takes them.
        """
        start = self.start(trainer, State(), published)
        if pull:
            changes["proximal"] = Proximal(pull, to=start.select(self.shared_trainable))
        train = (*self.shared_trainable, *self.ownership.names(Owner.PERSONAL))
        return trainer.train(start, self.settings.phase("newcomer", train, steps=steps, **changes)).tensors

    # The whole

    def exchange(self, name: str = "train", *, steps: Collection[str] = (), **changes: Any) -> Exchange:
        """An exchange of the usual moves, but for the fields of :class:`Exchange` that ``changes`` names.

        An upload whose size is out of all proportion is not merged: see
        :meth:`prefed.merge.Aggregator.with_size_check`. With ``optimizer_state = "kept"`` optimisers go on
        where they stood at the client's last visit. Uploads may be late, unless the LoRA rule forbids it.

        Args:
            name: names the exchange and the randomness of its visits.
            steps: the groups in which clients send a step of what the server holds under that name.
            changes: e.g. ``work``, ``merge``, ``groups``.
        """
        moves: Mapping[str, Any] = {
            "send": self.send,
            "work": self.work,
            "merge": self.merge,
            "groups": self.groups,
            "figures": self.figures,
            "late": self.late(),
            "origins": dict.fromkeys(steps, 0.0),
        }
        exchange = Exchange(name, **{**moves, **changes})
        exchange = replace(exchange, merge=self.aggregator.with_size_check(exchange.merge, steps))
        return keep_optimizer_state(exchange) if self.settings.optimizer_state == "kept" else exchange

    def late(self, averages: bool = True) -> Literal["refused", "model", "delta"]:
        """How a late upload counts: as ``[merge]`` says, and model by default.

        It is refused unless the method ``averages`` models. Three LoRA rules refuse it too: with ``rolora``
        another round trained other tensors, with ``fedex`` the model has another residual by then, and with
        ``flexlora`` the factors of two rounds have different bases.
        """
        config = self.aggregator.config
        if not averages or config.lora in ("rolora", "fedex", "flexlora"):
            return "refused"
        return config.late or "model"

    def method(self, name: str, source: str, *exchanges: Exchange, **changes: Any) -> Method:
        """The method of the usual moves, but for the fields of :class:`Method` that ``changes`` names."""
        parts = {self.aggregator.layout[n].part for n in self.ownership.names(Owner.PERSONAL)}
        moves: Mapping[str, Any] = {
            "init_server": self.init_server,
            "init_client": self.init_client,
            "publish": self.publish,
            "predict": self.start,
            "adapt": self.adapt,
            "personal": bool(parts - {VALUE}),
            "reads": self.settings.reads,
        }
        return Method(
            name=name, source=source, ownership=self.ownership, exchanges=exchanges, **{**moves, **changes}
        )
