"""A method as a value: states, messages, training phases, exchanges and how uploads are merged."""

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
"""Prefix of the groups of a private state that hold optimiser state. They are stored at full precision."""

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
"""Values that JSON stores without loss."""


@dataclass(frozen=True)
class State:
    """The complete state of a server or a client: named groups of tensors and plain values.

    States are saved as safetensors and JSON without loss, so a method that keeps all its state here resumes
    bit for bit.

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
        """Return the number stored as ``name``, or ``default`` if there is none.

        Raises:
            TypeError: the stored value is not a number.
        """
        value = self.values.get(name, default)
        if not isinstance(value, int | float):
            raise TypeError(f"state value {name!r} must be a number, not {value!r}")
        return float(value)

    def update(
        self, tensors: Mapping[str, Tensors] | None = None, values: Mapping[str, Plain] | None = None
    ) -> State:
        """Return a copy with the given groups and values added or replaced."""
        return replace(
            self, tensors={**self.tensors, **(tensors or {})}, values={**self.values, **(values or {})}
        )


@dataclass(frozen=True)
class Download:
    """Message from the server to one client: groups of tensors and numbers."""

    tensors: Mapping[str, Tensors] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Upload:
    """Message from a client to the server: everything the server learns from a visit.

    Attributes:
        weight: number of training pairs n_i of the client.
        tensors: groups of shared tensors, e.g. ``{"model": …}``.
        scalars: the numbers that the exchange declares, e.g. the mean training loss.
        sent_at: round of the download. It contains the state after the previous round.
    """

    client: str
    weight: float
    tensors: Mapping[str, Tensors] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    sent_at: int = 0


@dataclass(frozen=True)
class Objective:
    """Name and settings of a loss, e.g. ``Objective("dpo", {"beta": 0.1})``.

    Valid names are those in :data:`prefed.train.losses.OBJECTIVES`, ``"ppo"``, and for selectors ``"choice"``
    and ``"latent"``.
    """

    name: str
    settings: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))


@dataclass(frozen=True)
class Optimizer:
    """Local optimiser. ``clip`` bounds the Euclidean norm of the gradient before each step (0: no bound)."""

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
    """A penalty on the named tensors t, added to the loss.

    ``"l1"``: ``strength · Σ|t|``; ``"l2"``: ``strength · ‖t‖²``; ``"gate"``: ``strength · Σ sigmoid(t)``.
    """

    kind: Literal["l1", "l2", "gate"]
    strength: float
    names: tuple[str, ...]


@dataclass(frozen=True)
class Moments:
    """Optimiser state after some steps.

    Attributes:
        slots: e.g. ``"exp_avg"`` → one number per trained element; empty before the first step.
        steps: number of steps taken.
    """

    slots: Mapping[str, Tensors] = field(default_factory=dict)
    steps: int = 0


@dataclass(frozen=True)
class Phase:
    """A stretch of local training: which tensors, on what loss, for how long, with which optimiser.

    Exactly one of ``steps`` and ``epochs`` is given. A step draws ``batch_size · accumulate`` pairs.

    Attributes:
        name: names the random draws of the phase; unique within a visit.
        train: names of the tensors to train. All others keep their values.
        rates: tensor name → learning rate, where it differs from the optimiser's.
        proximal: pull towards given tensors (FedProx, Ditto, pFedMe, FedAMP).
        correction: added to the gradient of the tensors that it contains (SCAFFOLD's c − c_i).
        penalties: norms added to the loss.
        memory: values that the objective carries from step to step, such as ``scale`` of the PDPO loss.
        moments: initial optimiser state. ``None`` starts a new optimiser and returns no moments.
        constants: groups of tensors that the objective reads, such as data about other clients.
        auxiliary: tensors that train alongside the model but are not in its layout. Their optimiser is new in
            each phase, and ``rates`` may contain their names.

    Raises:
        ValueError: ``train`` is empty, or not exactly one of ``steps`` and ``epochs`` is given.
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
    auxiliary: Tensors | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"phase {self.name!r}: give exactly one of steps and epochs")
        if not self.train:
            raise ValueError(f"phase {self.name!r} has no tensors to train")

    def check(self, ownership: Ownership) -> None:
        """Check that this phase trains only trainable tensors of the model.

        Raises:
            ValueError: it trains a frozen or unknown tensor.
        """
        trainable = set(ownership.names(Owner.SHARED, Owner.PERSONAL))
        frozen = [name for name in self.train if name not in trainable]
        if frozen:
            raise ValueError(
                f"phase {self.name!r} cannot train frozen or unknown tensors: {', '.join(frozen)}"
            )

    def at_rates(self, change: Callable[[float], float]) -> Phase:
        """Return this phase with each learning rate replaced by ``change(rate)``."""
        return replace(
            self,
            optimizer=replace(self.optimizer, lr=change(self.optimizer.lr)),
            rates={name: change(rate) for name, rate in self.rates.items()},
        )


@dataclass(frozen=True)
class PhaseResult:
    """Result of a phase.

    Attributes:
        tensors: all tensors of the model, including those that did not train.
        loss: mean batch loss over the steps, without proximal terms and penalties.
        pairs: number of preference pairs seen, including repeats.
        figures: means over the steps of the objective's metrics, e.g. ``margin``.
        memory: :attr:`Phase.memory` after the last step.
        moments: optimiser state after the last step; ``None`` if ``Phase.moments`` is ``None``.
        auxiliary: ``Phase.auxiliary`` after the last step.
    """

    tensors: Tensors
    loss: float
    steps: int
    pairs: int
    figures: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    moments: Moments | None = None
    auxiliary: Tensors | None = None


POOLED = "pooled"
"""Id of the single client of a method that trains on the pairs of all clients."""


@dataclass(frozen=True)
class Round:
    """A round of a run.

    Attributes:
        number: 1 for the first round.
        rounds: number of rounds in the run.
        weights: client → number of training pairs n_i, for all training clients.
        held_out: client → number of validation pairs, for those of these clients that have any.
    """

    number: int
    rounds: int
    key: Key
    weights: Mapping[str, float]
    privacy: Privacy = NO_MINIMUM
    held_out: Mapping[str, float] = field(default_factory=dict)


class ClientTrainer(Protocol):
    """The client as seen by a method: it trains on the client's pairs without access to their text.

    Engines provide it. :class:`prefed.train.ClientPairTrainer` is the implementation for language models.
    """

    @property
    def client(self) -> str:
        """Id of the client."""

    @property
    def size(self) -> int:
        """Number of training pairs n_i of the client."""

    @property
    def round(self) -> Round:
        """The current round."""

    @property
    def key(self) -> Key:
        """Random key of this client in this round and exchange."""

    @property
    def ownership(self) -> Ownership:
        """Owner of each tensor."""

    @property
    def initial(self) -> Tensors:
        """Initial tensors, equal for all clients; they include the values of frozen tensors."""

    def train(self, tensors: Tensors, phase: Phase) -> PhaseResult:
        """Run ``phase`` on the client's training pairs, starting from ``tensors`` (full layout)."""

    def gradient(
        self, tensors: Tensors, objective: Objective, *, batch_size: int, name: str
    ) -> tuple[Tensors, float]:
        """Compute gradient and value of the mean loss over one batch drawn at ``key.at(name)``.

        ``batch_size`` 0 takes all training pairs. The gradient has the full layout and is zero for frozen
        tensors.
        """

    def loss(self, tensors: Tensors, objective: Objective, split: Literal["train", "validation"]) -> float:
        """Compute the mean loss over a split of the client's pairs, without dropout."""

    def posteriors(
        self, tensors: Tensors, objective: Objective, *, pairs: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Infer the posterior of the latent taste z from the client's training pairs.

        The pairs are split into contexts, the same in every round.

        Args:
            objective: ``"latent"``; its settings determine the cap on the posterior.
            pairs: number of pairs to use, drawn at the client's key; ``None`` for all.

        Returns:
            μ and log σ² after each of m contexts, each ``[m, d_z]``. m is 0 for a client without pairs.
        """

    def assemble(self, *groups: Tensors) -> Tensors:
        """Return ``initial`` with the tensors of ``groups`` replaced; later groups override earlier ones."""

    def upload(self, tensors: Mapping[str, Tensors], scalars: Mapping[str, float] | None = None) -> Upload:
        """Return an upload from this client in this round, weighted by ``size``."""


Merged: TypeAlias = tuple[State, Mapping[str, Plain]]
"""The next state of a server, and entries for the round log."""


@dataclass(frozen=True)
class Exchange:
    """One download to each client and one upload from each, within a round.

    With ``to="neighbours"`` there is no server. Each training client keeps a state like the server's:
    ``send`` turns it into the client's starting point and ``publish`` into the model that it predicts with.
    The client sends its upload to its neighbours in the round's graph and mixes the groups that it receives
    with its own, using the graph's weights; ``merge`` is not called. Such an upload has weight 1 and no
    numbers: ``scalars`` are only written to the round log.

    Attributes:
        name: e.g. ``"train"``, ``"score"``.
        send: server state, client id and round of the request → download for the client.
        work: trainer, private state and download → upload and next private state.
        merge: server state, uploads in any order, round → next server state, and entries for the round log:
            numbers, or names such as the members of a cluster.
        to: recipients: the cohort of the round, all clients, or the neighbours of each client.
        due: round number → whether the exchange takes place in that round.
        scalars: names of the numbers in an upload, each a mean over the client's pairs; see :meth:`numbers`.
        over: split over which ``scalars`` are averaged. A client without validation pairs uses its training
            pairs, as in :meth:`ClientTrainer.loss`.
        groups: client id and round → layout of each group in the client's upload. Uploads with other groups
            or numbers are not merged. ``None``: all shared tensors, in the group ``"model"``.
        origins: name of a group or tensor in an upload → value that updates are measured from when they are
            clipped. By default this is the value in the download under the same name, or 0.
        late: treatment of an upload that started from the state of an earlier round: ``"model"`` merges it as
            a model, ``"delta"`` as an update relative to the newest server state, ``"refused"`` forbids
            schedules with late uploads. Groups of a late upload must exist in the server state.
        max_ratio: among neighbours, do not mix two models if one norm exceeds the other by more than this
            factor; 0 for no limit.
    """

    name: str
    send: Callable[[State, str, Round], Download]
    work: Callable[[ClientTrainer, State, Download], tuple[Upload, State]]
    merge: Callable[[State, Sequence[Upload], Round], Merged]
    to: Literal["cohort", "all", "neighbours"] = "cohort"
    due: Callable[[int], bool] = lambda number: True
    scalars: frozenset[str] = frozenset({"loss"})
    over: Literal["train", "validation"] = "train"
    groups: Callable[[str, Round], Mapping[str, Layout]] | None = None
    origins: Mapping[str, float] = field(default_factory=dict)
    late: Literal["refused", "model", "delta"] = "refused"
    max_ratio: float = 0.0

    def numbers(self, client: str, now: Round) -> frozenset[str]:
        """Return the names of the numbers in ``client``'s upload of round ``now``.

        These are all of ``scalars``. There are none if they are means over fewer pairs than ``[privacy]
        minimum_pairs``, or with differential privacy, since no noise is added to them.
        """
        if now.privacy.kind is not None:
            return frozenset()
        pairs = now.weights[client]
        if self.over == "validation":
            pairs = now.held_out.get(client) or pairs
        return self.scalars if now.privacy.may_report(pairs) else frozenset()


def lay_over(untouched: Tensors, published: Download) -> Mapping[str, Tensors]:
    """Return the single model ``"shared"``: the base model with all published groups applied.

    Raises:
        ValueError: two groups contain the same tensor.
    """
    names = [name for group in published.tensors.values() for name in group]
    if len(set(names)) < len(names):
        raise ValueError("published groups contain the same tensor; set shared_models in the method")
    return {"shared": untouched.replace(*published.tensors.values())}


@dataclass(frozen=True)
class Method:
    """A federated method that any engine can run.

    Models are tensors in the full layout. "Published" is the download that ``publish`` returns, and a
    newcomer is a client that did not train.

    Attributes:
        name: as in ``[method] name``.
        source: paper and equation or algorithm.
        ownership: owner of each tensor of the model.
        init_server: initial tensors → first server state.
        init_client: initial tensors and client id → first private state of that client.
        exchanges: in the order in which a round runs them.
        publish: server state and client id → everything the client needs to use its model.
        predict: trainer, private state, published → the client's model.
        adapt: trainer of a newcomer, published, number of local steps (at least 1) → model of the newcomer
            after these steps. ``None`` if the method cannot take steps.
        newcomer: trainer of a newcomer, published → its model before any step. ``None``: the shared model.
        reads: model outputs for a pair: ``"policy"``, log-probabilities of both responses; ``"choice"``, a
            selector's logits of the two letters that name the better response.
        shared_models: base model, published → name → models without personal parts. Several selectors
            vote.
        pooled: all training pairs belong to one client (centralised training).
        personal: client models differ from the published model.
        reward_weight: private state and round number → weight of the explicit reward margin relative to the
            implicit margin, for models with a reward head.
        profile: private state → metric → block → number, e.g. ``{"gate": {0: 0.52}}``. It is computed where
            private states are stored and never sent. ``None`` if there are no such metrics.
        infer: trainer of a newcomer, published, number of pairs → model of the newcomer inferred from that
            many pairs. ``None`` if the method cannot infer one.
        tastes: models have a latent taste z, which ``infer`` infers without training.
        trust: private state, server state, client → other client → weight in this client's prior; weights sum
            to 1, and are empty before the first visit with peers. It is computed where private states are
            stored and never sent. ``None`` if the method has no such weights.
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
    tastes: bool = False
    trust: Callable[[State, State, str], Mapping[str, float]] | None = None
