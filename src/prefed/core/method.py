"""A method is a value: states and messages, phases of training, exchanges, and how uploads merge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from prefed.core.privacy import NO_MINIMUM, Privacy
from prefed.core.random_keys import Key
from prefed.core.tensors import Layout, Owner, Ownership, Tensors

if TYPE_CHECKING:
    from torch import Tensor


OPTIMIZER = "optimizer."
"""The prefix of groups of a private state that are an optimiser's memory. They are stored in full."""

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
"""Values that JSON stores without loss."""


@dataclass(frozen=True)
class State:
    """The whole state of a server or a client: named groups of tensors and plain values.

    It is written as safetensors and JSON and read again without loss. So a method whose state is all in here
    can be stopped and resumed bit for bit.

    >>> state = State({"model": Tensors.empty()}, {"visits": 1})
    >>> state.update(values={"visits": 2}).values["visits"]
    2
    >>> state.number("visits", 0), state.number("scale", 1.0)
    (1.0, 1.0)
    """

    tensors: Mapping[str, Tensors] = field(default_factory=dict)
    values: Mapping[str, Plain] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))

    def number(self, name: str, default: float) -> float:
        """The number that is stored as ``name``, or ``default`` if nothing is.

        Raises:
            TypeError: the stored value is no number.
        """
        value = self.values.get(name, default)
        if not isinstance(value, int | float):
            raise TypeError(f"{name!r} of a state is {value!r}, not a number")
        return float(value)

    def update(
        self, tensors: Mapping[str, Tensors] | None = None, values: Mapping[str, Plain] | None = None
    ) -> State:
        """A copy with these groups and values added or replaced."""
        return replace(
            self, tensors={**self.tensors, **(tensors or {})}, values={**self.values, **(values or {})}
        )


@dataclass(frozen=True)
class Download:
    """A server's message to one client: groups of tensors and numbers."""

    tensors: Mapping[str, Tensors] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Upload:
    """A client's message to the server: all that the server sees of a visit.

    Attributes:
        weight: the client's number of training pairs n_i.
        tensors: groups of shared tensors, e.g. ``{"model": …}``.
        scalars: numbers that the exchange declares, e.g. the mean training loss.
        sent_at: the round in which the client got what it started from: the state that the round before
            left.
    """

    client: str
    weight: float
    tensors: Mapping[str, Tensors] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    sent_at: int = 0


@dataclass(frozen=True)
class Objective:
    """A loss by name with its settings, e.g. ``Objective("dpo", {"beta": 0.1})``.

    The names are those of :data:`prefed.train.losses.OBJECTIVES`, ``"ppo"``, and for selectors
    ``"choice"`` and ``"latent"``.
    """

    name: str
    settings: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))


@dataclass(frozen=True)
class Optimizer:
    """A local optimiser. ``clip`` bounds the gradient's Euclidean norm before the step (0: no bound)."""

    name: Literal["adamw", "adam", "sgd", "rmsprop"] = "adamw"
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 1.0


@dataclass(frozen=True)
class Proximal:
    """Adds ``strength / 2 · ‖φ − to‖²`` over the tensors of ``to`` to the loss."""

    strength: float
    to: Tensors


@dataclass(frozen=True)
class Penalty:
    """Adds ``strength · Σ|t|`` (``"l1"``), ``strength · ‖t‖²`` (``"l2"``) or, for ``"gate"``,
    ``strength · Σ sigmoid(t)`` over the named tensors to the loss.
    """

    kind: Literal["l1", "l2", "gate"]
    strength: float
    names: tuple[str, ...]


@dataclass(frozen=True)
class Moments:
    """What an optimiser remembers of the steps it took.

    Attributes:
        slots: e.g. ``"exp_avg"`` → one number for each element that trains; empty before the first step.
        steps: how many steps it took.
    """

    slots: Mapping[str, Tensors] = field(default_factory=dict)
    steps: int = 0


@dataclass(frozen=True)
class Phase:
    """One stretch of local training: which tensors, on what loss, for how long, with which optimiser.

    Exactly one of ``steps`` and ``epochs`` is given. A step draws ``batch_size · accumulate`` pairs.

    Attributes:
        name: names the phase's randomness; unique within a visit.
        train: names of the tensors that train; all others keep their values.
        rates: learning rates that differ from the optimiser's, by tensor name.
        proximal: a pull towards given tensors (FedProx, Ditto, pFedMe, FedAMP).
        correction: added to the gradient of the tensors it names (SCAFFOLD's c − c_i).
        penalties: norms added to the loss.
        memory: values that the objective carries from step to step (the PDPO loss's ``scale``).
        moments: what the optimiser remembers at the start. With ``None`` it is new, and the result has no
            ``moments``.
        constants: groups of tensors that the objective reads, such as what a server tells of other clients.
        beside: tensors that train with the model and are no part of it, since their size is not the model's.
            Their optimiser is new in each phase. ``rates`` may name them.

    Raises:
        ValueError: nothing is trained, or not exactly one of steps and epochs is given.
    """

    name: str
    train: tuple[str, ...]
    objective: Objective
    optimizer: Optimizer
    batch_size: int
    steps: int | None = None
    epochs: int | None = None
    accumulate: int = 1
    rates: Mapping[str, float] = field(default_factory=dict)
    proximal: Proximal | None = None
    correction: Tensors | None = None
    penalties: tuple[Penalty, ...] = ()
    memory: Mapping[str, float] = field(default_factory=dict)
    moments: Moments | None = None
    constants: Mapping[str, Tensors] = field(default_factory=dict)
    beside: Tensors | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"phase {self.name!r}: give exactly one of steps and epochs")
        if not self.train:
            raise ValueError(f"phase {self.name!r} trains nothing")

    def check(self, ownership: Ownership) -> None:
        """Check that every tensor that this phase trains may be trained.

        Raises:
            ValueError: it would train a frozen tensor, or one that the model does not have.
        """
        trainable = set(ownership.names(Owner.SHARED, Owner.PERSONAL))
        frozen = [name for name in self.train if name not in trainable]
        if frozen:
            raise ValueError(f"phase {self.name!r} would train frozen groups: {', '.join(frozen)}")

    def at_rates(self, change: Callable[[float], float]) -> Phase:
        """This phase with ``change(rate)`` in place of each learning rate."""
        return replace(
            self,
            optimizer=replace(self.optimizer, lr=change(self.optimizer.lr)),
            rates={name: change(rate) for name, rate in self.rates.items()},
        )


@dataclass(frozen=True)
class PhaseResult:
    """The result of a phase.

    Attributes:
        tensors: all tensors of the model, those of ``Phase.train`` with their new values.
        loss: mean over the steps of the batch loss (without proximal terms and penalties).
        steps: optimiser steps taken.
        pairs: preference pairs seen, repeats counted.
        figures: means over the steps of the objective's own figures, e.g. ``margin``.
        memory: the objective's values after the last step, as :attr:`Phase.memory` takes them.
        moments: what the optimiser remembers after the last step; ``None`` where ``Phase.moments`` is.
        beside: ``Phase.beside`` after the last step.
    """

    tensors: Tensors
    loss: float
    steps: int
    pairs: int
    figures: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    moments: Moments | None = None
    beside: Tensors | None = None


POOLED = "pooled"
"""The id of the only client of a method that trains on everybody's pairs."""


@dataclass(frozen=True)
class Round:
    """A round of a run.

    Attributes:
        number: 1 for the first round.
        rounds: how many rounds the run has.
        weights: client → number of training pairs n_i, over all clients that train.
        held_out: client → number of validation pairs, over those of these clients that have any.
    """

    number: int
    rounds: int
    key: Key
    weights: Mapping[str, float]
    privacy: Privacy = NO_MINIMUM
    held_out: Mapping[str, float] = field(default_factory=dict)


class ClientTrainer(Protocol):
    """A client, as a method's work sees it: it can train on the client's pairs, and never sees their text.

    Engines provide it. :class:`prefed.train.ClientPairTrainer` is the one for a language model.
    """

    @property
    def client(self) -> str:
        """The client's id."""

    @property
    def size(self) -> int:
        """Number of the client's training pairs n_i."""

    @property
    def round(self) -> Round:
        """The current round."""

    @property
    def key(self) -> Key:
        """Randomness of this client in this round and exchange."""

    @property
    def ownership(self) -> Ownership:
        """Who owns which tensor."""

    @property
    def initial(self) -> Tensors:
        """The tensors that every client starts from, with the values of frozen tensors."""

    def train(self, tensors: Tensors, phase: Phase) -> PhaseResult:
        """Run ``phase`` on the client's training pairs, from ``tensors`` (the model's full layout)."""

    def gradient(
        self, tensors: Tensors, objective: Objective, *, batch_size: int, name: str
    ) -> tuple[Tensors, float]:
        """Gradient and value of the mean loss over one batch drawn at ``key.at(name)``.

        ``batch_size`` 0 takes all of the client's training pairs. The gradient has the full layout,
        zero where a tensor is frozen.
        """

    def loss(self, tensors: Tensors, objective: Objective, split: Literal["train", "validation"]) -> float:
        """Mean loss over a split of the client's pairs, without dropout."""

    def posteriors(
        self, tensors: Tensors, objective: Objective, *, pairs: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """What a selector with a latent taste z infers of the client, from training pairs alone.

        The pairs are cut into contexts, the same ones in every round.

        Args:
            objective: ``"latent"``; it says how the posterior is bounded.
            pairs: only so many, drawn at the client's key and cut like all; ``None`` for all.

        Returns:
            μ and log σ² after each of m contexts, each ``[m, d_z]``. m is 0 for a client without pairs.
        """

    def assemble(self, *groups: Tensors) -> Tensors:
        """``initial`` with the tensors of ``groups`` put in; a later value replaces an earlier one."""

    def upload(self, tensors: Mapping[str, Tensors], scalars: Mapping[str, float] | None = None) -> Upload:
        """An upload from this client in this round, weighted by ``size``."""


@dataclass(frozen=True)
class Exchange:
    """One download to each client and one upload from it, within a round.

    Attributes:
        name: e.g. ``"train"``, ``"score"``.
        send: server state, client id and the round in which it is asked → the client's download.
        work: what the client does: trainer, private state and download → its upload and next private state.
        merge: server state, uploads sorted by client id, round → the server's next state.
        to: the round's sampled cohort, every client, or each client's neighbours. Among neighbours there is
            no server. Each client that trains has a state of its own, of the kind that the server has
            elsewhere: ``send`` makes of it what the client starts from, and ``publish`` what it predicts
            with. The upload goes to the neighbours of the round, and each client mixes the groups that it
            receives with its own, by the weights of the round's graph, in place of ``merge``. An upload to
            neighbours weighs 1 and holds no numbers: those of ``scalars`` go to the round log alone.
        due: round number → whether the exchange takes place in that round.
        scalars: names of the numbers in an upload of this exchange, each a mean over the client's pairs; see
            :meth:`numbers`.
        over: the pairs that each of ``scalars`` is a mean over. A client without validation pairs takes its
            training pairs in their place, as :meth:`ClientTrainer.loss` does.
        groups: client id and round → the groups of tensors in this client's upload of this round, each with
            its layout. An upload that does not hold exactly these groups and numbers is not merged.
            ``None``: all of the method's shared tensors, in the group ``"model"``.
        origins: name of a group or of a tensor in an upload → the number from which its numbers are measured
            where an update is clipped. All others are measured from what the download holds under their
            names, and what it lacks from 0.
        late: how an upload counts that started from an earlier round's state: ``"model"``, as the model that
            it is; ``"delta"``, as the step that the client took, from the server's newest state; or it is
            refused, and no schedule may ask for one. The groups of a late upload are groups of the server's
            state.
        max_ratio: among neighbours, two models do not mix if one is more than so many times as long as the
            other; 0: all do.
        figures: server state after the merge → what the method itself tells the round log: numbers, or names
            such as the members of a cluster.
    """

    name: str
    send: Callable[[State, str, Round], Download]
    work: Callable[[ClientTrainer, State, Download], tuple[Upload, State]]
    merge: Callable[[State, Sequence[Upload], Round], State]
    to: Literal["cohort", "all", "neighbours"] = "cohort"
    due: Callable[[int], bool] = lambda number: True
    scalars: frozenset[str] = frozenset({"loss"})
    over: Literal["train", "validation"] = "train"
    groups: Callable[[str, Round], Mapping[str, Layout]] | None = None
    origins: Mapping[str, float] = field(default_factory=dict)
    late: Literal["refused", "model", "delta"] = "refused"
    max_ratio: float = 0.0
    figures: Callable[[State], Mapping[str, Plain]] = lambda state: {}

    def numbers(self, client: str, now: Round) -> frozenset[str]:
        """Names of the numbers in ``client``'s upload of round ``now``.

        All of ``scalars``, or none if they are means over fewer pairs than ``[privacy] minimum_pairs``. With
        a ``kind`` of differential privacy there is none, for no noise is put on them.
        """
        if now.privacy.kind is not None:
            return frozenset()
        pairs = now.weights[client]
        if self.over == "validation":
            pairs = now.held_out.get(client) or pairs
        return self.scalars if now.privacy.may_report(pairs) else frozenset()


def lay_over(untouched: Tensors, published: Download) -> Mapping[str, Tensors]:
    """The one model ``"shared"``: the untouched model with every published group put in.

    Raises:
        ValueError: two groups hold one tensor, so that they are no parts of one model.
    """
    names = [name for group in published.tensors.values() for name in group]
    if len(set(names)) < len(names):
        raise ValueError(
            "the published groups have tensors with equal names; the method must declare their models"
        )
    return {"shared": untouched.replace(*published.tensors.values())}


@dataclass(frozen=True)
class Method:
    """A federated method, for any engine to run.

    Attributes:
        name: as in ``[method] name``.
        source: where it comes from: paper and equation or algorithm.
        ownership: an owner for every tensor of the model.
        init_server: initial tensors (full layout) → the server's first state.
        init_client: initial tensors and client id → that client's first private state.
        exchanges: in the order in which a round runs them.
        reads: what its models give a pair: ``"policy"``, log-probabilities of both responses; ``"choice"``,
            the two letters' logits with which a selector says which response is better.
        publish: server state and client id → what the client needs to use its model.
        shared_models: the untouched model (full layout) and what was published → name → the models (full
            layout) that have nothing of any client's own. Several selectors vote.
        predict: a client's trainer, its private state and what was published → the tensors (full layout) with
            which the client predicts.
        adapt: a newcomer's trainer, what was published and a number of local steps, at least 1 → the tensors
            (full layout) with which the newcomer then predicts. ``None`` if no step can be taken.
        newcomer: a newcomer's trainer and what was published → the tensors (full layout) with which it
            predicts before any step. ``None``: the shared model.
        pooled: all training pairs belong to one client (centralised training).
        personal: a client's model differs from the published one.
        reward_weight: a client's private state and a round's number → the weight of an explicit reward head's
            margin beside the implicit margin. It matters only where the model has such a head.
        profile: a client's private state → figures of the model's blocks, as figure → block → number, e.g.
            ``{"gate": {0: 0.52}}``. It is called where private states are kept, and no message holds it.
            ``None`` if the method has no such figures.
        infer: a newcomer's trainer, what was published and a number of pairs → the tensors (full layout) with
            which the newcomer predicts once it has shown so many pairs, without any step. ``None`` if the
            method learns from pairs by steps alone.
        trust: a client's private state, the server's, and the client → each other client that its prior
            comes from, and how much it trusts that one, 1 in sum. It is called where private states are
            kept, and no message holds it. It is empty before the first visit that has such others;
            ``None`` if the method has no such weights.
    """

    name: str
    source: str
    ownership: Ownership
    init_server: Callable[[Tensors], State]
    init_client: Callable[[Tensors, str], State]
    exchanges: tuple[Exchange, ...]
    publish: Callable[[State, str], Download]
    predict: Callable[[ClientTrainer, State, Download], Tensors]
    adapt: Callable[[ClientTrainer, Download, int], Tensors] | None = None
    newcomer: Callable[[ClientTrainer, Download], Tensors] | None = None
    reads: Literal["policy", "choice"] = "policy"
    shared_models: Callable[[Tensors, Download], Mapping[str, Tensors]] = lay_over
    pooled: bool = False
    personal: bool = False
    reward_weight: Callable[[State, int], float] = lambda private, number: 1.0
    profile: Callable[[State], Mapping[str, Mapping[int, float]]] | None = None
    infer: Callable[[ClientTrainer, Download, int], Tensors] | None = None
    trust: Callable[[State, State, str], Mapping[str, float]] | None = None
