"""What method files share: the usual moves of a federated round."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prefed.core import (
    ClientTrainer,
    Download,
    Entry,
    Exchange,
    Layout,
    Method,
    Objective,
    Optimizer,
    Owner,
    Ownership,
    Phase,
    PhaseResult,
    Proximal,
    Round,
    State,
    Tensors,
    Upload,
)
from prefed.merge import Aggregator, Weigh, lora
from prefed.methods.base import schedule
from prefed.methods.base.moments import remembering
from prefed.methods.base.ppo import VALUE
from prefed.methods.base.settings import LocalSettings, TrainingSettings

__all__ = ["LORA", "FedAvgBase", "LocalSettings", "TrainingSettings", "lora_only"]

LORA = frozenset({"lora"})
"""The parts of a model that the usual method needs."""


def lora_only(settings: TrainingSettings) -> frozenset[str]:
    """``needs`` of a method that trains the LoRA adapter alone."""
    return LORA


@dataclass(frozen=True)
class FedAvgBase:
    """The usual moves of a federated round, for method files to be written with.

    The server's state holds the group ``"model"`` (the shared tensors) and whatever the merge rule
    keeps; a client's holds the group ``"personal"`` if any tensor is personal.

    Attributes:
        settings: how clients train.
        aggregator: how uploads merge, and which factors of a LoRA are shared.
        rounds: how many rounds the run has.
        ownership: who owns which tensor.
    """

    settings: TrainingSettings
    aggregator: Aggregator
    rounds: int
    ownership: Ownership

    @staticmethod
    def of(
        settings: TrainingSettings,
        aggregator: Aggregator,
        rounds: int,
        personal: Callable[[Entry], bool] = lambda entry: False,
    ) -> FedAvgBase:
        """A plan in which what ``personal`` says is personal and the merge rule decides about the rest.

        PPO's critic is always personal.
        """

        def owner(entry: Entry) -> Owner:
            return Owner.PERSONAL if entry.part == VALUE or personal(entry) else Owner.SHARED

        return FedAvgBase(settings, aggregator, rounds, aggregator.ownership(owner))

    @property
    def learnt(self) -> tuple[str, ...]:
        """The shared tensors that clients train in some round: all but a merge rule's residuals."""
        return tuple(name for name in self.common if self.aggregator.layout[name].part != lora.RESIDUAL)

    @property
    def common(self) -> tuple[str, ...]:
        """All shared tensors, a merge rule's residuals among them.

        A model of a client's own consists of these: factors are worth nothing without the residual that they
        were trained on.
        """
        return self.ownership.names(Owner.SHARED)

    # The server

    def init_server(self, initial: Tensors) -> State:
        """The shared tensors as they start, φ⁰."""
        return self.aggregator.init(self.ownership.select(initial, Owner.SHARED)).update(
            values=schedule.begin(self.settings)
        )

    def send(self, server: State, client: str) -> Download:
        """Broadcast: the shared tensors φ, and what the learning rate's schedule tells clients."""
        return Download({"model": server.tensors["model"]}, schedule.announce(server))

    def merge(
        self,
        server: State,
        uploads: Sequence[Upload],
        now: Round,
        weigh: Weigh | None = None,
    ) -> State:
        """φ ← the merge of the uploaded φ_i; the mean by n_i unless configured or given otherwise."""
        names = self.movable(now, Owner.SHARED)
        merged = self.aggregator.merge(server, uploads, now, weigh=weigh, names=names)
        return self.advance(merged, uploads)

    def advance(self, server: State, uploads: Sequence[Upload]) -> State:
        """The server's state with the learning rate's schedule taken on by a round."""
        return schedule.advance(server, uploads, robust=self.aggregator.config.rule != "mean")

    def publish(self, server: State, client: str) -> Download:
        """What predictions need of the server: φ."""
        return Download({"model": server.tensors["model"]})

    # The client

    def init_client(self, initial: Tensors, client: str) -> State:
        """The personal tensors as they start."""
        return self.keep(State(), initial)

    def start(self, trainer: ClientTrainer, private: State, download: Download) -> Tensors:
        """The client's model as a visit finds it: what was broadcast, and the client's own."""
        groups = download.tensors.get("model"), private.tensors.get("personal")
        return trainer.assemble(*(group for group in groups if group is not None))

    def share(self, tensors: Tensors, now: Round) -> Tensors:
        """The shared tensors that trained in this round: what a client sends."""
        return tensors.select(self.movable(now, Owner.SHARED))

    def upload(self, trainer: ClientTrainer, trained: PhaseResult) -> Upload:
        """The shared tensors after training, with the mean training loss."""
        return trainer.upload({"model": self.share(trained.tensors, trainer.round)}, {"loss": trained.loss})

    def groups(self, client: str, now: Round) -> dict[str, Layout]:
        """What an upload of this round holds, where it is made by :meth:`upload`."""
        return {"model": self.aggregator.layout.select(self.movable(now, Owner.SHARED))}

    def keep(self, private: State, tensors: Tensors) -> State:
        """The client's next private state: its personal tensors taken from ``tensors``."""
        personal = self.ownership.select(tensors, Owner.PERSONAL)
        return private.update({"personal": personal}) if personal else private

    def predict(self, trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        """The client's model: the shared tensors as published, and its own."""
        return self.start(trainer, private, published)

    def adapt(
        self, trainer: ClientTrainer, published: Download, steps: int, *, pull: float = 0.0, **changes: Any
    ) -> Tensors:
        """A newcomer's model: what was published, after so many steps of all that may move.

        It is new, so the rates are those of a first round.

        Args:
            visit: to the newcomer.
            published: the shared tensors; parts of its own start as everybody's did.
            steps: optimiser steps, at least 1.
            pull: strength of a pull towards what was published.
            changes: other fields of :meth:`phase`.
        """
        start = self.start(trainer, State(), published)
        train = (*self.learnt, *self.ownership.names(Owner.PERSONAL))
        given = {"goal": None, "lr": None, **changes}
        if pull:
            given["proximal"] = Proximal(pull, to=start.select(self.learnt))
        return trainer.train(start, self._phase("newcomer", train, steps=steps, **given)).tensors

    # Local training

    def movable(self, now: Round, *owners: Owner) -> tuple[str, ...]:
        """The tensors of ``owners`` (default: shared and personal) that train in this round.

        All of them, save what the LoRA rule holds still this round.
        """
        names = self.aggregator.trainable(self.ownership, now.number)
        return tuple(name for name in names if not owners or self.ownership.owners[name] in owners)

    def rate(self, trainer: ClientTrainer, download: Download, lr: float) -> float:
        """``lr`` as the schedule has it in this round."""
        return schedule.rate(lr, self.settings, trainer.round, self.rounds, download.scalars)

    def steps(self, trainer: ClientTrainer) -> int:
        """Optimiser steps of a phase as long as the settings say."""
        s, (width, count) = self.settings, self.settings.batches()
        if s.local_epochs is None:
            assert s.local_steps is not None
            return s.local_steps
        return s.passes(s.local_epochs) * math.ceil(trainer.size / (width * count))

    def phase(
        self,
        trainer: ClientTrainer,
        download: Download,
        name: str = "train",
        *,
        train: Iterable[str] | None = None,
        goal: Objective | None = None,
        lr: float | None = None,
        rates: Mapping[str, float] | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        **more: Any,
    ) -> Phase:
        """A phase as the settings describe it, at this round's learning rate.

        Args:
            visit: the visit it belongs to.
            download: what the server sent.
            name: names the phase's randomness.
            train: what moves; all that may move in this round unless given.
            goal: another objective than the settings'.
            lr: another learning rate; the schedule scales it as it scales ``lr`` of the settings.
            rates: rates of single tensors, scaled alike.
            steps: another length than the settings'.
            epochs: another length than the settings'.
            more: other fields of :class:`~prefed.core.Phase`, e.g. ``proximal``.
        """
        if steps is None and epochs is None:
            steps, epochs = self.settings.local_steps, self.settings.local_epochs
        names = self.movable(trainer.round) if train is None else tuple(train)
        more |= {"steps": steps, "epochs": None if epochs is None else self.settings.passes(epochs)}
        phase = self._phase(name, names, goal=goal, lr=lr, rates=rates or {}, **more)
        return phase.at_rates(lambda rate: self.rate(trainer, download, rate))

    def _phase(
        self, name: str, train: Iterable[str], *, goal: Objective | None, lr: float | None, **more: Any
    ) -> Phase:
        """A phase at the first round's rates."""
        s, (batch_size, accumulate) = self.settings, self.settings.batches()
        return Phase(
            name=name,
            train=tuple(train),
            objective=goal or s.goal(),
            optimizer=Optimizer(s.optimizer, lr or s.lr, s.betas, s.momentum, s.weight_decay, s.clip),
            batch_size=batch_size,
            accumulate=accumulate,
            **more,
        )

    # The whole

    def figures(self, server: State) -> dict[str, float]:
        """For the round log: the merge rule's own figures and, on a plateau schedule, the rate's factor."""
        return {**self.aggregator.figures(server), **schedule.announce(server)}

    def method(
        self, name: str, source: str, *exchanges: Exchange, steps: Collection[str] = (), **changes: Any
    ) -> Method:
        """The method, with the plan's own way where ``changes`` names no other field of :class:`Method`.

        Each exchange expects what :meth:`upload` makes, unless it says otherwise, and merges no upload whose
        size is out of all proportion: see :meth:`prefed.merge.Aggregator.proportionate`. ``steps`` are the
        groups in which clients send a step of what the server holds under that name.
        """
        usual: dict[str, Any] = {
            "init_server": self.init_server,
            "init_client": self.init_client,
            "publish": self.publish,
            "predict": self.predict,
            "adapt": self.adapt,
            "personal": any(
                self.aggregator.layout[n].part != VALUE for n in self.ownership.names(Owner.PERSONAL)
            ),
        }
        exchanges = tuple(
            replace(e, groups=e.groups or self.groups, merge=self.aggregator.proportionate(e.merge, steps))
            for e in exchanges
        )
        if self.settings.optimizer_state == "kept":
            exchanges = tuple(remembering(exchange) for exchange in exchanges)
        return Method(
            name=name, source=source, ownership=self.ownership, exchanges=exchanges, **{**usual, **changes}
        )
