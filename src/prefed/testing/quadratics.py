"""A federation of quadratics, whose runs have a closed form, and the simplest engine.

A client has targets a_j (rows, one per preference pair) and a curvature H. The loss of a batch is the mean
over its targets of ½ (φ − a_j)ᵀ H (φ − a_j), where φ is the concatenation of all tensors of the model. Its
gradient is H (φ − mean a_j). Everything else (batches, optimiser, trained tensors) follows from the
:class:`~prefed.core.Phase`, as for a language model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from prefed.core import (
    NO_MINIMUM,
    Download,
    Entry,
    Key,
    Layout,
    Method,
    Moments,
    Objective,
    Ownership,
    Phase,
    PhaseResult,
    Plain,
    Privacy,
    Round,
    State,
    Tensors,
    Upload,
)
from prefed.engines.validation import withhold_scalars

TASTES: dict[str, dict[str, tuple[int, ...]]] = {
    "posterior": {"posterior/mean": (2,), "posterior/log_variance": (2,)},
    "latent": {"latent/z": (2,)},
    "prototypes": {"prototypes": (2, 2)},
}
"""Part → its tensors and their shapes, for a latent taste of two dimensions."""


def initial(parts: Iterable[str] = ("lora",), blocks: int = 2, seed: int = 0) -> Tensors:
    """Initial tensors, in float64, of a model with these parts.

    Each block has LoRA factors ``lora/0/q/A`` (2 × 3) and ``lora/0/q/B`` (2 × 2, zero), and, if in ``parts``,
    a residual and a gate, both zero. A part of a latent taste has its tensors, and any other part is one
    vector ``<part>/weight`` of 3 numbers.
    """
    entries: list[Entry] = []
    for part in sorted(set(parts) - {"outputs", "factors", "cap"}):
        if part in ("lora", "personal_lora"):
            for block in range(blocks):
                entries.append(Entry(f"{part}/{block}/q/A", (2, 3), part, block, "A"))
                entries.append(Entry(f"{part}/{block}/q/B", (2, 2), part, block, "B"))
        elif part == "residual":
            entries += [Entry(f"residual/{block}/q/W", (2, 3), "residual", block) for block in range(blocks)]
        elif part == "gate":
            entries += [Entry(f"gate/{block}", (1,), "gate", block) for block in range(blocks)]
        elif part in TASTES:
            entries += [Entry(name, shape, part) for name, shape in TASTES[part].items()]
        else:
            entries.append(Entry(f"{part}/weight", (3,), part))
    layout = Layout(tuple(entries))
    start = Tensors(layout, torch.from_numpy(Key(seed).at("initial").numpy().normal(size=layout.size)))
    still = [e for e in entries if (e.part, e.factor) == ("lora", "B") or e.part in ("residual", "gate")]
    return start.replace({e.name: torch.zeros(e.shape, dtype=torch.float64) for e in still})


def crowd(size: int, dimension: int, seed: int = 0, pairs: int = 5) -> dict[str, Quadratic]:
    """``size`` clients that disagree: ``client-0``, …, each with a few targets around its own centre.

    Args:
        dimension: number of elements of the model.
        pairs: a client has at least 2 and fewer than twice as many targets.
    """
    clients = {}
    for number in range(size):
        draw = Key(seed).at("crowd", number).numpy()
        centre, count = draw.normal(size=dimension), int(draw.integers(2, 2 * pairs))
        clients[f"client-{number}"] = Quadratic(
            torch.from_numpy(centre + 0.3 * draw.normal(size=(count, dimension)))
        )
    return clients


@dataclass
class Quadratic:
    """Data of a client.

    Attributes:
        targets: ``[n, d]`` targets that it trains on.
        curvature: ``[d, d]``; ``None``: the identity.
        validation: ``[m, d]`` validation targets; ``None``: the client has none.
    """

    targets: torch.Tensor
    curvature: torch.Tensor | None = None
    validation: torch.Tensor | None = None

    @staticmethod
    def at(optimum: Sequence[float], curvature: Sequence[float] | None = None, size: int = 1) -> Quadratic:
        """Return ``size`` equal targets at ``optimum``, with a diagonal curvature."""
        targets = torch.tensor([list(optimum)] * size, dtype=torch.float64)
        return Quadratic(
            targets, None if curvature is None else torch.diag(torch.tensor(curvature, dtype=torch.float64))
        )

    @property
    def size(self) -> int:
        """Number of targets."""
        return len(self.targets)

    def gradient(self, flat: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the loss of these rows at ``flat``."""
        away = flat - self.targets[rows].mean(0)
        return away if self.curvature is None else self.curvature @ away

    def loss(self, flat: torch.Tensor, rows: torch.Tensor) -> float:
        """Return the mean loss of these rows at ``flat``."""
        away = flat - self.targets[rows]
        bent = away if self.curvature is None else away @ self.curvature
        return float((away * bent).sum(-1).mean() / 2)


@dataclass
class QuadraticTrainer:
    """A :class:`~prefed.core.ClientTrainer` on a :class:`Quadratic`; ``phases`` lists the phases that it ran.

    The memory of an objective and the tensors in :attr:`Phase.auxiliary` grow by 1 with every step.
    Posteriors are the first two elements of each target and of the model.
    """

    client: str
    data: Quadratic
    round: Round
    key: Key
    ownership: Ownership
    initial: Tensors
    phases: list[Phase] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of targets."""
        return self.data.size

    def train(self, tensors: Tensors, phase: Phase) -> PhaseResult:
        """Run ``phase``."""
        phase.check(self.ownership)
        self.phases.append(phase)
        tensors = tensors.clone()
        moving = {name: torch.nn.Parameter(tensors[name].clone()) for name in phase.train}
        step = _optimizer(phase, moving)
        if phase.moments is not None and phase.moments.steps:
            for name, parameter in moving.items():
                slots = {slot: values[name].clone() for slot, values in phase.moments.slots.items()}
                step.state[parameter] = {"step": torch.tensor(float(phase.moments.steps)), **slots}
        losses, pairs = [], 0
        for rows in self._batches(phase):
            losses.append(self.data.loss(tensors.flat, rows))
            pairs += len(rows)
            gradient = Tensors(tensors.layout, self.data.gradient(tensors.flat, rows))
            for name, parameter in moving.items():
                parameter.grad = gradient[name] + _extra(phase, name, parameter.detach())
            if phase.optimizer.clip:
                torch.nn.utils.clip_grad_norm_(list(moving.values()), phase.optimizer.clip)
            step.step()
            tensors = tensors.replace({name: parameter.detach() for name, parameter in moving.items()})
        memory = {name: value + len(losses) for name, value in phase.memory.items()}
        moments = None if phase.moments is None else _moments(phase, tensors, step, moving, len(losses))
        return PhaseResult(
            tensors,
            sum(losses) / len(losses),
            len(losses),
            pairs,
            memory=memory,
            moments=moments,
            auxiliary=None if phase.auxiliary is None else phase.auxiliary + len(losses),
        )

    def gradient(
        self, tensors: Tensors, objective: Objective, *, batch_size: int, name: str
    ) -> tuple[Tensors, float]:
        """Return gradient and loss of one batch."""
        order = torch.from_numpy(self.key.at(name).numpy().permutation(self.size))
        rows = order[: batch_size or None]
        gradient = Tensors(tensors.layout, self.data.gradient(tensors.flat, rows))
        frozen = {
            n: torch.zeros_like(t) for n, t in gradient.items() if self.ownership.owners[n].value == "frozen"
        }
        return gradient.replace(frozen), self.data.loss(tensors.flat, rows)

    def loss(self, tensors: Tensors, objective: Objective, split: Literal["train", "validation"]) -> float:
        """Return the mean loss over the targets of a split; without validation targets, over the others."""
        own = self.data
        if split == "validation" and own.validation is not None:
            own = Quadratic(own.validation, own.curvature)
        return own.loss(tensors.flat, torch.arange(own.size))

    def posteriors(
        self, tensors: Tensors, objective: Objective, *, pairs: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first two elements of targets and model."""
        targets = self.data.targets[:pairs, :2]
        return targets, tensors.flat[:2].expand_as(targets)

    def assemble(self, *groups: Tensors) -> Tensors:
        """Return ``initial`` with the tensors of ``groups`` replaced."""
        whole = self.initial.clone()
        for group in groups:
            whole = whole.replace(group)
        return whole

    def upload(self, tensors: Mapping[str, Tensors], scalars: Mapping[str, float] | None = None) -> Upload:
        """Return an upload weighted by the number of targets."""
        return Upload(self.client, float(self.size), tensors, scalars or {}, self.round.number)

    def _batches(self, phase: Phase) -> Iterator[torch.Tensor]:
        """Batches of shuffled epochs."""
        width, taken, epoch = phase.batch_size * phase.accumulate, 0, 0
        while phase.epochs is None or epoch < phase.epochs:
            order = self.key.at(phase.name).at("epoch", epoch).numpy().permutation(self.size)
            for rows in torch.split(torch.from_numpy(order), width):
                if phase.steps is not None and taken == phase.steps:
                    return
                yield rows
                taken += 1
            epoch += 1


def _optimizer(phase: Phase, moving: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    how = phase.optimizer
    groups = [{"params": [p], "lr": phase.rates.get(name, how.lr)} for name, p in moving.items()]
    match how.name:
        case "sgd":
            return torch.optim.SGD(groups, how.lr, momentum=how.momentum, weight_decay=how.weight_decay)
        case "rmsprop":
            return torch.optim.RMSprop(groups, how.lr, weight_decay=how.weight_decay, momentum=how.momentum)
        case "adam":
            return torch.optim.Adam(groups, how.lr, how.betas, weight_decay=how.weight_decay)
    return torch.optim.AdamW(groups, how.lr, how.betas, weight_decay=how.weight_decay)


def _moments(
    phase: Phase,
    tensors: Tensors,
    step: torch.optim.Optimizer,
    moving: Mapping[str, torch.nn.Parameter],
    steps: int,
) -> Moments:
    """Return the state of the optimiser of the trained tensors after ``steps`` more steps."""
    assert phase.moments is not None
    own, states = tensors.select(phase.train), {n: step.state[p] for n, p in moving.items()}
    slots = sorted({slot for state in states.values() for slot in state} - {"step"})
    return Moments(
        {slot: own.replace({name: state[slot] for name, state in states.items()}) for slot in slots},
        phase.moments.steps + steps,
    )


def _extra(phase: Phase, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return what the phase adds to the gradient of the loss."""
    extra = torch.zeros_like(value)
    if phase.proximal is not None and name in phase.proximal.to:
        extra = extra + phase.proximal.strength * (value - phase.proximal.to[name])
    if phase.correction is not None and name in phase.correction:
        extra = extra + phase.correction[name]
    for penalty in phase.penalties:
        if name in penalty.names:
            slope = {
                "l1": value.sign(),
                "l2": 2 * value,
                "gate": value.sigmoid() * (1 - value.sigmoid()),
            }[penalty.kind]
            extra = extra + penalty.strength * slope
    return extra


@dataclass
class Run:
    """The states after the last round of a run, its last report, and all its messages and phases."""

    server: State
    private: dict[str, State]
    round: int = 0
    uploads: list[Upload] = field(default_factory=list)
    downloads: list[Download] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    report: Mapping[str, Plain] = field(default_factory=dict)

    def models(
        self, method: Method, clients: Mapping[str, Quadratic], initial: Tensors
    ) -> dict[str, Tensors]:
        """Return the model of each client after the last round."""
        now = Round(self.round, self.round, Key(0), {c: float(q.size) for c, q in clients.items()})
        return {
            client: method.predict(
                QuadraticTrainer(client, data, now, Key(0).at("client", client), method.ownership, initial),
                self.private[client],
                method.publish(self.server, client),
            )
            for client, data in clients.items()
        }


def sorted_by_client(uploads: list[Upload]) -> list[Upload]:
    """Return ``uploads`` in the order in which engines merge them."""
    return sorted(uploads, key=lambda upload: upload.client)


def simulate(
    method: Method,
    clients: Mapping[str, Quadratic],
    initial: Tensors,
    rounds: int,
    *,
    cohort: int | None = None,
    seed: int = 0,
    run: Run | None = None,
    privacy: Privacy = NO_MINIMUM,
    order: Callable[[list[Upload]], Sequence[Upload]] = sorted_by_client,
) -> Run:
    """Run ``method`` to the end of round ``rounds``, one client after the other, without validation.

    If it is ``pooled`` and there are several clients, one client ``"pooled"`` has all targets.

    Args:
        cohort: clients per round; by default all.
        run: continue this run, which changes.
        privacy: clients with too few pairs send no numbers.
        order: the order in which the server merges the uploads of an exchange.

    Returns:
        The states after the last round, and all messages as the clients sent them.
    """
    if method.pooled and len(clients) > 1:
        first = next(iter(clients.values()))
        clients = {"pooled": Quadratic(torch.cat([q.targets for q in clients.values()]), first.curvature)}
    method.ownership.check(initial.layout)
    run = run or Run(
        method.init_server(initial), {client: method.init_client(initial, client) for client in clients}
    )
    root, weights = Key(seed), {client: float(data.size) for client, data in clients.items()}
    for number in range(run.round + 1, rounds + 1):
        now = Round(number, rounds, root.at("round", number), weights, privacy)
        sampled = now.key.at("cohort").numpy().choice(sorted(clients), cohort or len(clients), replace=False)
        for exchange in method.exchanges:
            if not exchange.due(number):
                continue
            uploads = []
            for client in sorted(sampled if exchange.to == "cohort" else clients):
                client = str(client)
                download = exchange.send(run.server, client, now)
                key = now.key.at("exchange", exchange.name).at("client", client)
                trainer = QuadraticTrainer(client, clients[client], now, key, method.ownership, initial)
                upload, run.private[client] = exchange.work(trainer, run.private[client], download)
                uploads.append(upload)
                run.downloads.append(download)
                run.phases += trainer.phases
            sent = [withhold_scalars(upload, upload.client, exchange, now) for upload in uploads]
            run.server, run.report = exchange.merge(run.server, order(sent), now)
            run.uploads += uploads
        run.round = number
    return run
