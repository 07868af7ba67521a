"""The optimiser steps of a phase: their batches, the optimiser over the flat buffer, and their metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from prefed.core import Key, Moments, Optimizer, Ownership, Phase, PhaseResult, Tensors
from prefed.models import Backbone
from prefed.train.pair_cache import Rows


def make_optimizer(o: Optimizer, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    """PyTorch's optimiser with these settings, over groups of parameters, each with its own rate."""
    if o.name == "adamw":
        return torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, weight_decay=o.weight_decay, fused=True)
    if o.name == "adam":
        return torch.optim.Adam(groups, lr=o.lr, betas=o.betas, weight_decay=o.weight_decay, fused=True)
    if o.name == "rmsprop":
        return torch.optim.RMSprop(groups, lr=o.lr, momentum=o.momentum, weight_decay=o.weight_decay)
    return torch.optim.SGD(groups, lr=o.lr, momentum=o.momentum, weight_decay=o.weight_decay)


class FlatOptimizer:
    """Steps the tensors that a phase trains; they are a few slices of the backbone's flat buffer.

    Args:
        backbone: its buffer holds the client's tensors, and its gradient buffer the step's gradient.
    """

    def __init__(self, backbone: Backbone, phase: Phase) -> None:
        self._backbone, self._phase = backbone, phase
        optimizer, layout = phase.optimizer, backbone.layout
        by_rate: dict[float, list[str]] = defaultdict(list)
        for name in phase.train:
            by_rate[phase.rates.get(name, optimizer.lr)].append(name)
        groups = []
        for rate, names in by_rate.items():
            slices = []
            for start, stop in layout.ranges(names):
                part = torch.nn.Parameter(backbone.flat[start:stop])
                part.grad = backbone.grad[start:stop]
                slices.append(part)
            groups.append({"params": slices, "lr": rate})
        self._optimizer = make_optimizer(optimizer, groups)
        if phase.moments is not None and phase.moments.steps:
            self._resume(phase.moments)
        device = backbone.device
        trained = set(phase.train)

        def spans(tensors: Tensors) -> list[tuple[slice, torch.Tensor]]:
            """Where each trained tensor of ``tensors`` lies in the flat buffer, and its value."""
            names = [name for name in tensors if name in trained]
            return [(slice(*layout.span(name)), tensors[name].reshape(-1).to(device)) for name in names]

        self._proximal = [] if phase.proximal is None else spans(phase.proximal.to)
        self._correction = [] if phase.correction is None else spans(phase.correction)
        self._penalties = [(p, layout.ranges(trained.intersection(p.names))) for p in phase.penalties]

    def _slices(self) -> Iterator[tuple[torch.nn.Parameter, slice]]:
        """The optimiser's parameters, and where each lies in the flat buffer."""
        origin = self._backbone.flat.storage_offset()
        for group in self._optimizer.param_groups:
            for part in group["params"]:
                start = part.storage_offset() - origin
                yield part, slice(start, start + part.numel())

    def _resume(self, moments: Moments) -> None:
        flat = self._backbone.flat
        whole = {
            name: Tensors.zeros(self._backbone.layout).replace(slot).flat.to(flat.device)
            for name, slot in moments.slots.items()
        }
        for part, span in self._slices():
            state = self._optimizer.state[part]
            state["step"] = torch.tensor(float(moments.steps), device=flat.device)
            state.update({name: values[span].clone() for name, values in whole.items()})

    def moments(self, steps: int) -> Moments:
        """The optimiser's state, on the CPU, after ``steps`` steps of this phase."""
        layout, whole = self._backbone.layout, dict[str, torch.Tensor]()
        for part, span in self._slices():
            for name, value in self._optimizer.state[part].items():
                if isinstance(value, torch.Tensor) and value.shape == part.shape and name != "step":
                    whole.setdefault(name, torch.zeros(layout.size))[span] = value.cpu()
        slots = {name: Tensors(layout, flat).select(self._phase.train) for name, flat in whole.items()}
        before = self._phase.moments.steps if self._phase.moments is not None else 0
        return Moments(slots, before + steps)

    def add(self) -> None:
        """Add the gradients of the proximal term and the penalties, and the correction."""
        flat, grad, phase = self._backbone.flat, self._backbone.grad, self._phase
        for span, centre in self._proximal:
            assert phase.proximal is not None
            grad[span] += phase.proximal.strength * (flat[span] - centre)
        for span, correction in self._correction:
            grad[span] += correction
        for penalty, ranges in self._penalties:
            for start, stop in ranges:
                values = flat[start:stop]
                if penalty.kind == "l2":
                    slope = 2 * values
                elif penalty.kind == "l1":
                    slope = values.sign()
                else:
                    gate = values.sigmoid()
                    slope = gate * (1 - gate)
                grad[start:stop] += penalty.strength * slope

    def step(self) -> float:
        """Clip and step; return the gradient's Euclidean norm before the clip."""
        grad, clip = self._backbone.grad, self._phase.optimizer.clip
        norm = float(torch.linalg.vector_norm(grad))
        if clip > 0 and norm > clip:
            grad.mul_(clip / (norm + 1e-6))
        self._optimizer.step()
        return norm


LOSS_SCALE = 2.0**10
"""Factor of a loss whose gradient passes a model in float16, which has no number but 0 below 6e-8."""


@dataclass(frozen=True, eq=False)
class Visit:
    """One client's turn in one exchange of one round, with one or more phases.

    Attributes:
        rows: the client's training pairs.
        key: the randomness.
        ownership: who owns which tensor.
    """

    rows: Rows
    key: Key
    ownership: Ownership


def batches(rows: Rows, phase: Phase, key: Key) -> Iterator[Rows]:
    """The rows of every step of ``phase``, shuffled epoch by epoch at ``key.at("epoch", epoch)``.

    An epoch's last batch may be smaller. A client with fewer pairs than a batch takes all of them in each
    step.

    >>> import numpy as np
    >>> from prefed.core import Objective, Optimizer
    >>> phase = Phase("train", ("a",), Objective("dpo"), Optimizer(), batch_size=2, steps=3)
    >>> [len(batch) for batch in batches(np.arange(5), phase, Key(1))]
    [2, 2, 1]
    """
    size = min(phase.batch_size * phase.accumulate, len(rows))
    steps, epoch = 0, 0
    while phase.epochs is None or epoch < phase.epochs:
        order = key.at("epoch", epoch).numpy().permutation(rows)
        for start in range(0, len(order), size):
            if phase.steps is not None and steps == phase.steps:
                return
            yield order[start : start + size]
            steps += 1
        epoch += 1


@contextmanager
def dropout(backbone: Backbone, *, trunk: bool) -> Iterator[None]:
    """Switch dropout on; PyTorch's global random state is restored at the end."""
    devices = [backbone.device] if backbone.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        backbone.dropout(trunk=trunk, top=True)
        try:
            yield
        finally:
            backbone.dropout()


def first_loss_scale(backbone: Backbone) -> float:
    """The loss scale at the start of a phase, and of a single gradient."""
    return LOSS_SCALE if backbone.dtype == torch.float16 else 1.0


def backward(backbone: Backbone, loss: torch.Tensor, slope: torch.Tensor | None = None) -> None:
    """Add the gradient of ``loss`` to the backbone's buffer, times the backbone's loss scale.

    Args:
        slope: gradient of the scalar loss in ``loss``, if ``loss`` holds several numbers.
    """
    if backbone.loss_scale != 1:
        loss = loss * backbone.loss_scale
    loss.backward(slope)  # type: ignore[no-untyped-call]


def read_gradient(backbone: Backbone) -> Tensors:
    """A copy of the gradient (full layout) in the backbone's buffer, on the CPU, without the loss scale."""
    gradient = backbone.grad.to("cpu", copy=True)
    return Tensors(backbone.layout, gradient if backbone.loss_scale == 1 else gradient / backbone.loss_scale)


class PhaseSteps:
    """Takes the optimiser steps of one phase and averages their metrics.

    Where the frozen model is in float16, losses are scaled, and each phase starts with :data:`LOSS_SCALE`. A
    step whose gradient overflows is skipped, and the scale is halved (Micikevicius et al. 2018,
    arXiv:1710.03740, section 3.2). The metric ``skipped`` is then the share of such steps.

    Args:
        backbone: holds the client's tensors. The phase's tensors are the only ones that get gradients.

    Attributes:
        count: steps, including those that were skipped.
    """

    def __init__(self, backbone: Backbone, phase: Phase) -> None:
        backbone.train_only(phase.train)
        self._backbone, self._phase = backbone, phase
        self._optimizer = FlatOptimizer(backbone, phase)
        self._sums: defaultdict[str, float] = defaultdict(float)
        self.count = self._pairs = self._skipped = 0
        backbone.loss_scale = first_loss_scale(backbone)

    def take(self, batch: Rows, metrics: dict[str, float]) -> bool:
        """Step along the gradient in the backbone's buffer, which is that of ``batch``.

        Returns:
            Whether there was a step: a gradient that overflowed is skipped.
        """
        self.count, self._pairs = self.count + 1, self._pairs + len(batch)
        if self._overflows():
            self._backbone.loss_scale /= 2
            self._skipped += 1
            self.add_metrics({**metrics, "skipped": 1.0})
            return False
        self._optimizer.add()
        self.add_metrics({**metrics, "grad_norm": self._optimizer.step()})
        return True

    def _overflows(self) -> bool:
        """Take the loss scale out of the gradient; whether that made it infinite."""
        scale, grad = self._backbone.loss_scale, self._backbone.grad
        if scale == 1:
            return False
        grad.div_(scale)
        return not bool(grad.isfinite().all())

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add ``metrics`` to the means."""
        for name, value in metrics.items():
            self._sums[name] += value

    def result(self, memory: Mapping[str, float], **metrics: float) -> PhaseResult:
        """The tensors in the model, the means over the steps, and ``metrics`` as they are."""
        means = {name: value / max(self.count, 1) for name, value in self._sums.items()} | metrics
        stepped = self.count - self._skipped
        moments = None if self._phase.moments is None else self._optimizer.moments(stepped)
        # Frees the memory of the optimiser's state for the copy of the tensors.
        del self._optimizer
        self._backbone.loss_scale = first_loss_scale(self._backbone)
        loss = means.pop("loss", 0.0)
        return PhaseResult(self._backbone.extract(), loss, self.count, self._pairs, means, memory, moments)
