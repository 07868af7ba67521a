"""The steps of a FedAvg round, from which methods are built.

Also a transformation of any method: neighbours instead of a server.
"""

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
    Merged,
    Method,
    Owner,
    Ownership,
    Phase,
    Proximal,
    Round,
    State,
    Tensors,
    Upload,
)
from prefed.merge import Aggregator, MergeConfig, WeightFunction, lora
from prefed.merge.config import PRODUCT_RULES
from prefed.methods.base import lr_schedule
from prefed.methods.base.settings import VALUE, TrainingSettings


@dataclass(frozen=True)
class FedAvgBase:
    """The steps of a FedAvg round. A method replaces those in which it differs.

    The server state contains the group of the shared tensors φ, and the state of the merge rule. The private
    state of a client contains the group ``"personal"`` if any tensor is personal, and the group ``"own"`` if
    the method gives each client its own model in addition to the shared one.

    Attributes:
        aggregator: merges uploads.
        rounds: number of rounds of the run.
        group: name of the group φ in the server state and in messages.
        apart: shared parts of the model that are not in φ, so they neither train nor merge.
    """

    settings: TrainingSettings
    aggregator: Aggregator
    rounds: int
    ownership: Ownership
    group: str = "model"
    apart: frozenset[str] = frozenset()

    @staticmethod
    def of(
        settings: TrainingSettings,
        aggregator: Aggregator,
        rounds: int,
        personal: Callable[[Entry], bool] = lambda entry: False,
    ) -> FedAvgBase:
        """Return a base with personal tensors selected by ``personal``; the LoRA rule applies to the others.

        The critic of PPO is always personal.
        """

        def owner(entry: Entry) -> Owner:
            return Owner.PERSONAL if entry.part == VALUE or personal(entry) else Owner.SHARED

        return FedAvgBase(settings, aggregator, rounds, aggregator.ownership(owner))

    # Names of tensors

    @property
    def shared(self) -> tuple[str, ...]:
        """All shared tensors, including the residuals of the LoRA rule."""
        return self._without_apart(self.ownership.names(Owner.SHARED))

    def _without_apart(self, names: Sequence[str]) -> tuple[str, ...]:
        apart = {entry.name for entry in self.aggregator.layout.entries if entry.part in self.apart}
        return tuple(name for name in names if name not in apart)

    @property
    def shared_trainable(self) -> tuple[str, ...]:
        """All shared tensors that clients train in some round, i.e. without residuals."""
        return tuple(name for name in self.shared if self.aggregator.layout[name].part != lora.RESIDUAL)

    def trainable(self, now: Round, *owners: Owner) -> tuple[str, ...]:
        """Return the tensors of ``owners`` (default: shared and personal) that train in this round.

        The LoRA rule may pause some shared tensors.
        """
        shared, merge = self.shared, self.aggregator
        paused = set(shared) - set(lora.trainable(merge.config.lora, shared, merge.layout, now.number))
        names = self._without_apart(self.ownership.names(*(owners or (Owner.SHARED, Owner.PERSONAL))))
        return tuple(name for name in names if name not in paused)

    # The server

    def init_server(self, initial: Tensors) -> State:
        """Initialise the shared tensors φ⁰."""
        state = self.aggregator.init(initial.select(self.shared), self.group)
        return state.update(values=lr_schedule.begin(self.settings))

    def send(self, server: State, client: str, now: Round) -> Download:
        """Broadcast the shared tensors φ and the state of the learning-rate schedule."""
        return Download({self.group: server.tensors[self.group]}, lr_schedule.announce(server))

    def merge(
        self, server: State, uploads: Sequence[Upload], now: Round, weigh: WeightFunction | None = None
    ) -> Merged:
        """Merge the φ_i into φ: by default their mean, weighted by n_i.

        The report has the metrics of the merge rule, and the factor of a plateau schedule.
        """
        names = self.trainable(now, Owner.SHARED)
        merged, report = self.aggregator.merge(server, uploads, now, self.group, weigh, names)
        server = self.advance(merged, uploads)
        return server, {**report, **lr_schedule.announce(server)}

    def advance(self, server: State, uploads: Sequence[Upload]) -> State:
        """Advance the learning-rate schedule by one round."""
        return lr_schedule.advance(server, uploads, robust=self.aggregator.config.rule != "mean")

    def publish(self, server: State, client: str) -> Download:
        """Return φ, for predictions."""
        return Download({self.group: server.tensors[self.group]})

    # The client

    def init_client(self, initial: Tensors, client: str) -> State:
        """Initialise the personal tensors."""
        return self.keep(State(), initial)

    def start(self, trainer: ClientTrainer, private: State, download: Download) -> Tensors:
        """Return the model at the start of a visit, and for predictions: φ and the personal tensors."""
        groups = download.tensors.get(self.group), private.tensors.get("personal")
        return trainer.assemble(*(group for group in groups if group is not None))

    def work(
        self, trainer: ClientTrainer, private: State, download: Download, **changes: Any
    ) -> tuple[Upload, State]:
        """Visit: train φ_i ← φ and the personal tensors together, and send φ_i.

        ``changes`` are passed to :meth:`phase`.
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
        """Return the phase according to the settings, with the learning rates of this round.

        Args:
            download: the download, with the state of the learning-rate schedule.
            name: name of the phase and its randomness.
            train: tensors to train, by default all that train in this round.
            changes: arguments of :meth:`TrainingSettings.phase`. The schedule scales all learning rates.
        """
        names = self.trainable(trainer.round) if train is None else train
        phase = self.settings.phase(name, names, **changes)
        return phase.at_rates(lambda rate: self.rate(trainer, download, rate))

    def rates(self, **parts: float) -> dict[str, float]:
        """Convert learning rates by part of the model, ``rates(head=1e-4)``, to learning rates by tensor."""
        return {
            entry.name: parts[entry.part] for entry in self.aggregator.layout.entries if entry.part in parts
        }

    def rate(self, trainer: ClientTrainer, download: Download, lr: float) -> float:
        """Return the learning rate of this round, given that of the first round."""
        return lr_schedule.rate(lr, self.settings, trainer.round, self.rounds, download.scalars)

    def repeats(self, trainer: ClientTrainer, steps: int) -> int:
        """Return how often a visit repeats a loop of ``steps`` optimiser steps.

        It is ``local_steps``, or enough to cover ``local_epochs`` passes.
        """
        s = self.settings
        if s.local_epochs is None:
            assert s.local_steps is not None
            return s.local_steps
        total = s.passes(s.local_epochs) * math.ceil(trainer.size / s.step_pairs())
        return math.ceil(total / steps)

    def share(self, tensors: Tensors, now: Round) -> Tensors:
        """Return the shared tensors that train in this round, for an upload."""
        return tensors.select(self.trainable(now, Owner.SHARED))

    def upload(self, trainer: ClientTrainer, tensors: Tensors, loss: float) -> Upload:
        """Return an upload of φ_i, taken from ``tensors``, and the mean training loss of the visit."""
        return trainer.upload({self.group: self.share(tensors, trainer.round)}, {"loss": loss})

    def groups(self, client: str, now: Round) -> dict[str, Layout]:
        """Return the groups of tensors in an upload of this round."""
        return {self.group: self.aggregator.layout.select(self.trainable(now, Owner.SHARED))}

    def keep(self, private: State, tensors: Tensors) -> State:
        """Store the personal tensors, taken from ``tensors``, in the private state."""
        personal = self.ownership.select(tensors, Owner.PERSONAL)
        return private.update({"personal": personal}) if personal else private

    def keep_own(self, private: State, tensors: Tensors) -> State:
        """Store the personal tensors, and a copy of the shared tensors for :meth:`predict_own`."""
        return self.keep(private, tensors).update({"own": tensors.select(self.shared)})

    def predict_own(self, trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        """Return the client's own model or, before its first visit, the published model."""
        model, own = self.start(trainer, private, published), private.tensors.get("own")
        return model if own is None else model.replace(own)

    def adapt(
        self, trainer: ClientTrainer, published: Download, steps: int, *, pull: float = 0.0, **changes: Any
    ) -> Tensors:
        """Return the model of a newcomer: the published model after ``steps`` steps on all trainable tensors.

        Args:
            published: the shared tensors. Personal tensors have their initial values.
            steps: optimiser steps, at least 1, with the learning rates of the first round.
            pull: strength of the pull towards the published tensors.
            changes: arguments of :meth:`TrainingSettings.phase`.
        """
        start = self.start(trainer, State(), published)
        if pull:
            changes["proximal"] = Proximal(pull, to=start.select(self.shared_trainable))
        train = (*self.shared_trainable, *self.ownership.names(Owner.PERSONAL))
        return trainer.train(start, self.settings.phase("newcomer", train, steps=steps, **changes)).tensors

    # The method

    def exchange(self, name: str = "train", *, steps: Collection[str] = (), **changes: Any) -> Exchange:
        """Return an exchange of these steps, with the fields of :class:`Exchange` in ``changes`` replaced.

        Oversized updates are refused, see :meth:`prefed.merge.Aggregator.with_size_check`. With
        ``optimizer_state = "kept"``, optimisers resume from the last visit of the client.

        Args:
            name: name of the exchange and of the randomness of its visits.
            steps: groups in which clients send a step instead of new values.
            changes: e.g. ``work``, ``merge``, ``groups``.

        Raises:
            ValueError: optimisers keep their state, and the LoRA rule replaces A.
        """
        moves: Mapping[str, Any] = {
            "send": self.send,
            "work": self.work,
            "merge": self.merge,
            "groups": self.groups,
            "late": self.late(),
            "origins": dict.fromkeys(steps, 0.0),
        }
        exchange = Exchange(name, **{**moves, **changes})
        exchange = replace(exchange, merge=self.aggregator.with_size_check(exchange.merge, steps))
        if self.settings.optimizer_state == "new":
            return exchange
        if self.shared_trainable:
            self.aggregator.config.same_a("the optimiser states", " or optimizer_state 'new'")
        from prefed.methods.base.optimizer_state import keep_optimizer_state

        return keep_optimizer_state(exchange)

    def late(self, averages: bool = True) -> Literal["refused", "model", "delta"]:
        """Return how to merge late uploads: as configured in ``[merge]``, by default as models.

        They are refused unless the method ``averages`` models, and under four LoRA rules: ``rolora`` trains
        other tensors in the next round, ``fedex`` and ``flora`` change the residual, and ``flexlora`` changes
        the basis of the factors.
        """
        config = self.aggregator.config
        if not averages or config.lora in {"rolora", *PRODUCT_RULES}:
            return "refused"
        return config.late or "model"

    def method(self, name: str, source: str, *exchanges: Exchange, **changes: Any) -> Method:
        """Return the method of these steps, with the fields of :class:`Method` in ``changes`` replaced."""
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
    """Run ``method`` without a server: each client mixes its model with those of its neighbours.

    Visits do not change, but start from the client's own model. This works for all methods with a server
    that only broadcasts and averages models (for FedDPO: Distributed DPO, arXiv:2605.20696, algorithm 2).

    Args:
        merge: the ``[merge]`` table of the method.

    Raises:
        ValueError: the server does more than average models.
    """
    if merge.lora == "rolora" or merge.lora in PRODUCT_RULES:
        raise ValueError(
            f"[merge] lora = {merge.lora!r} needs a server, and neighbours have none: use 'fedit', 'ffa' or "
            "'fedsa'"
        )
    (train, *others) = method.exchanges
    if others or method.pooled or train.to != "cohort" or train.late == "refused":
        raise ValueError(
            f"{method.name} with these settings needs a server that does more than average models; remove "
            "[graph], or use another method"
        )
    if merge.rule != "mean" or merge.optimizer.name != "none" or not merge.plain_weights:
        raise ValueError(
            "[graph] determines how models are mixed; in [merge], use rule 'mean', weights 'samples' or "
            "'uniform', and optimizer 'none'"
        )
    if settings.schedule == "plateau":
        raise ValueError(
            "schedule 'plateau' needs a server that knows the losses of all clients: use 'constant' or "
            "'cosine'"
        )
    alone = replace(train, to="neighbours", late="refused", max_ratio=merge.max_ratio)
    return replace(method, exchanges=(alone,))
