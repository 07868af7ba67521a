"""The usual moves of a federated round, those of FedAvg, with which method files are written.

They come with two changes to any method: optimisers that resume where a client's last visit left them, and
neighbours instead of a server.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from prefed.core import (
    OPTIMIZER,
    ClientTrainer,
    Download,
    Entry,
    Exchange,
    Layout,
    Method,
    Moments,
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
from prefed.merge import Aggregator, MergeConfig, WeightFunction, lora
from prefed.methods.base import lr_schedule
from prefed.methods.base.settings import VALUE, TrainingSettings


class _KeepingTrainer:
    """A client's trainer whose phases start with the optimiser state of the phases before them.

    Phases ``inner/0``, ``inner/1`` share one optimiser. Under RoLoRA a phase trains one set of tensors in
    odd rounds and another in even rounds; then each set has an optimiser.
    """

    def __init__(self, trainer: ClientTrainer, private: State) -> None:
        self._trainer, self._private = trainer, private

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def train(self, tensors: Tensors, phase: Phase) -> PhaseResult:
        name, moments = self._moments(phase)
        result = self._trainer.train(tensors, replace(phase, moments=moments))
        if result.moments is not None:
            groups = {f"{name}.{slot}": value for slot, value in result.moments.slots.items()}
            self._private = self._private.update(groups, {name: result.moments.steps})
        return result

    def _moments(self, phase: Phase) -> tuple[str, Moments]:
        """The name of the optimiser of ``phase``, and what it remembers."""
        first = OPTIMIZER + phase.name.partition("/")[0]
        for number in itertools.count(1):
            name = first if number == 1 else f"{first}+{number}"
            steps = self._private.values.get(name)
            if not isinstance(steps, int):
                break
            groups = self._private.tensors.items()
            slots = {g.rpartition(".")[2]: value for g, value in groups if g.rpartition(".")[0] == name}
            if all(set(value) == set(phase.train) for value in slots.values()):
                return name, Moments(slots, steps)
        return name, Moments()

    def keep(self, state: State) -> State:
        """``state`` with the optimisers' state, which never leaves the client."""
        return state.update(
            {name: group for name, group in self._private.tensors.items() if name.startswith(OPTIMIZER)},
            {name: value for name, value in self._private.values.items() if name.startswith(OPTIMIZER)},
        )


def keep_optimizer_state(exchange: Exchange) -> Exchange:
    """``exchange`` with the state of local optimisers kept in the client's private state."""

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        keeping = _KeepingTrainer(trainer, private)
        upload, state = exchange.work(cast("ClientTrainer", keeping), private, download)
        return upload, keeping.keep(state)

    return replace(exchange, work=work)


@dataclass(frozen=True)
class FedAvgServer:
    """Which tensors a method shares, and what the server does with them.

    The server's state holds the shared tensors φ, in one group, and whatever the merge rule keeps.

    Attributes:
        group: the name of φ's group in the server's state and in messages.
        apart: parts of the model that are no part of φ, though they are shared: they neither train nor merge.
    """

    settings: TrainingSettings
    aggregator: Aggregator
    rounds: int
    ownership: Ownership
    group: str = "model"
    apart: frozenset[str] = frozenset()

    # Names of tensors

    @property
    def shared(self) -> tuple[str, ...]:
        """All shared tensors, the LoRA rule's residuals among them.

        A model of a client's own consists of these. LoRA factors are worth nothing without the residual that
        they were trained on.
        """
        return self._together(self.ownership.names(Owner.SHARED))

    def _together(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of ``names`` that are not set apart."""
        return tuple(name for name in names if self.aggregator.layout[name].part not in self.apart)

    @property
    def shared_trainable(self) -> tuple[str, ...]:
        """The shared tensors that clients train in some round: all of them but the LoRA rule's residuals."""
        return tuple(name for name in self.shared if self.aggregator.layout[name].part != lora.RESIDUAL)

    def trainable(self, now: Round, *owners: Owner) -> tuple[str, ...]:
        """The tensors of ``owners`` (default: shared and personal) that train in this round.

        The LoRA rule may let some of the shared ones rest.
        """
        names = self._together(self.aggregator.trainable(self.ownership, now.number))
        return tuple(name for name in names if not owners or self.ownership.owners[name] in owners)

    # The server

    def init_server(self, initial: Tensors) -> State:
        """The shared tensors as they start, φ⁰."""
        state = self.aggregator.init(initial.select(self.shared), self.group)
        return state.update(values=lr_schedule.begin(self.settings))

    def send(self, server: State, client: str, now: Round) -> Download:
        """Broadcast: the shared tensors φ, and the learning-rate schedule's numbers."""
        return Download({self.group: server.tensors[self.group]}, lr_schedule.announce(server))

    def merge(
        self, server: State, uploads: Sequence[Upload], now: Round, weigh: WeightFunction | None = None
    ) -> State:
        """φ ← the merge of the φ_i: their mean by n_i, unless ``[merge]`` or ``weigh`` says otherwise."""
        names = self.trainable(now, Owner.SHARED)
        merged = self.aggregator.merge(server, uploads, now, self.group, weigh, names)
        return self.advance(merged, uploads)

    def advance(self, server: State, uploads: Sequence[Upload]) -> State:
        """The server's state with the learning-rate schedule advanced by one round."""
        return lr_schedule.advance(server, uploads, robust=self.aggregator.config.rule != "mean")

    def publish(self, server: State, client: str) -> Download:
        """What predictions need of the server: φ."""
        return Download({self.group: server.tensors[self.group]})

    def figures(self, server: State) -> dict[str, float]:
        """For the round log: the merge rule's own figures and, on a plateau schedule, the rate's factor."""
        return {**self.aggregator.figures(server, self.group), **lr_schedule.announce(server)}


@dataclass(frozen=True)
class FedAvgBase(FedAvgServer):
    """The usual moves of a federated round. A method file replaces those in which its method differs.

    Those of the server are :class:`~prefed.methods.base.fedavg.FedAvgServer`'s. A client's private state
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


def to_neighbours(method: Method, settings: TrainingSettings, merge: MergeConfig) -> Method:
    """``method`` with each client as a server of its own, whose next state is a mix of models.

    A visit stays what it is: the client starts from its own model in the place of the server's, and keeps
    what is personal. So any method can do without its server if all that its server does is to send a model
    and to average models (Distributed DPO, arXiv:2605.20696, algorithm 2, does so with FedDPO).

    Args:
        settings: of the method.
        merge: the ``[merge]`` table that the method was built with.

    Raises:
        ValueError: the method's server, or the table, does more than that.
    """
    (train, *others) = method.exchanges
    if others or method.pooled or train.to != "cohort" or train.late == "refused":
        raise ValueError(
            f"{method.name}, with its settings and those of [merge], has a server that does more than "
            "average models, so its clients cannot do without: leave out [graph], or take another method"
        )
    if merge.rule != "mean" or merge.optimizer.name != "none" or merge.weights == "mass":
        raise ValueError(
            "[graph]: clients mix their models by the weights of the graph: leave rule 'mean', weights "
            "'samples' or 'uniform', and optimizer 'none' in [merge]"
        )
    if settings.schedule == "plateau":
        raise ValueError(
            "[graph]: schedule 'plateau' follows the mean of all clients' losses, and without a server "
            "nobody has it: use 'constant' or 'cosine'"
        )
    alone = replace(train, to="neighbours", late="refused", max_ratio=merge.max_ratio)
    return replace(method, exchanges=(alone,))
