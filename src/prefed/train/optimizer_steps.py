"""Optimiser steps of a phase: batches, the optimiser over the flat buffer, and metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from prefed.core import Key, Moments, Optimizer, Phase, PhaseResult, Tensors
from prefed.models import Backbone
from prefed.train.pair_cache import Rows


def make_optimizer(o: Optimizer, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    """Create a PyTorch optimiser over parameter groups, each with its own learning rate."""
    if o.name == "adamw":
        return torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, weight_decay=o.weight_decay, fused=True)
    if o.name == "adam":
        return torch.optim.Adam(groups, lr=o.lr, betas=o.betas, weight_decay=o.weight_decay, fused=True)
    if o.name == "rmsprop":
        return torch.optim.RMSprop(groups, lr=o.lr, momentum=o.momentum, weight_decay=o.weight_decay)
    return torch.optim.SGD(groups, lr=o.lr, momentum=o.momentum, weight_decay=o.weight_decay)


class FlatOptimizer:
    """Optimiser over the tensors that a phase trains, as slices of the backbone's flat buffer.

    Args:
        backbone: holds the client's tensors, and the gradient of the step in its gradient buffer.
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
            """Return the buffer slice and the value of each trained tensor in ``tensors``."""
            names = [name for name in tensors if name in trained]
            return [(slice(*layout.span(name)), tensors[name].reshape(-1).to(device)) for name in names]

        self._proximal = [] if phase.proximal is None else spans(phase.proximal.to)
        self._correction = [] if phase.correction is None else spans(phase.correction)
        self._penalties = [(p, layout.ranges(trained.intersection(p.names))) for p in phase.penalties]

    def _slices(self) -> Iterator[tuple[torch.nn.Parameter, slice]]:
        """Yield each parameter of the optimiser with its slice of the flat buffer."""
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
        """Return the optimiser state on the CPU after ``steps`` steps of this phase."""
        layout, whole = self._backbone.layout, dict[str, torch.Tensor]()
        for part, span in self._slices():
            for name, value in self._optimizer.state[part].items():
                if isinstance(value, torch.Tensor) and value.shape == part.shape and name != "step":
                    whole.setdefault(name, torch.zeros(layout.size))[span] = value.cpu()
        slots = {name: Tensors(layout, flat).select(self._phase.train) for name, flat in whole.items()}
        before = self._phase.moments.steps if self._phase.moments is not None else 0
        return Moments(slots, before + steps)

    def add(self) -> None:
        """Add the gradients of proximal term, penalties and correction."""
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
        """Clip the gradient and step; return the gradient norm before clipping."""
        grad, clip = self._backbone.grad, self._phase.optimizer.clip
        norm = float(torch.linalg.vector_norm(grad))
        if clip > 0 and norm > clip:
            grad.mul_(clip / (norm + 1e-6))
        self._optimizer.step()
        return norm


LOSS_SCALE = 2.0**10
"""Loss scale for float16 models; the smallest positive float16 is 6e-8."""


def batches(rows: Rows, phase: Phase, key: Key) -> Iterator[Rows]:
    """Yield the rows of each step of ``phase``, shuffled per epoch at ``key.at("epoch", epoch)``.

    The last batch of an epoch may be smaller. A client with fewer pairs than a batch uses all of them in each
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
    """Enable dropout within the block, and restore PyTorch's global random state afterwards."""
    devices = [backbone.device] if backbone.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        backbone.dropout(trunk=trunk, top=True)
        try:
            yield
        finally:
            backbone.dropout()


def first_loss_scale(backbone: Backbone) -> float:
    """Return the loss scale at the start of a phase."""
    return LOSS_SCALE if backbone.dtype == torch.float16 else 1.0


def backward(backbone: Backbone, loss: torch.Tensor) -> None:
    """Add the gradient of the scalar ``loss``, times the loss scale, to the gradient buffer."""
    if backbone.loss_scale != 1:
        loss = loss * backbone.loss_scale
    loss.backward()  # type: ignore[no-untyped-call]


def grouped_outputs(
    forward: Callable[[int], torch.Tensor], groups: Sequence[Rows]
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Return the outputs of all groups, and a function that backpropagates from their gradient.

    Memory is needed for one group at a time, because each group runs forward once without gradients and again
    in that function.

    Args:
        forward: number of a group → its outputs, the same in both calls.
        groups: the rows of each group.
    """
    with torch.no_grad():
        whole = torch.cat([forward(number) for number in range(len(groups))])
    whole.requires_grad_()

    def finish() -> None:
        assert whole.grad is not None
        for number, slope in enumerate(torch.split(whole.grad, [len(group) for group in groups])):
            outputs = forward(number)
            if outputs.requires_grad:
                outputs.backward(slope)  # type: ignore[no-untyped-call]

    return whole, finish


def read_gradient(backbone: Backbone) -> Tensors:
    """Return a CPU copy of the gradient buffer (full layout), without the loss scale."""
    gradient = backbone.grad.to("cpu", copy=True)
    return Tensors(backbone.layout, gradient if backbone.loss_scale == 1 else gradient / backbone.loss_scale)


class PhaseSteps:
    """Takes the optimiser steps of one phase and averages their metrics.

    For float16 models losses are scaled, starting each phase at :data:`LOSS_SCALE`. Steps whose gradient
    overflows are skipped, and the scale is halved (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).
    The metric ``skipped`` is the share of skipped steps.

    Args:
        backbone: holds the client's tensors. Only the tensors of the phase get gradients.

    Attributes:
        count: number of steps, including skipped ones.
    """

    def __init__(self, backbone: Backbone, phase: Phase) -> None:
        backbone.train_only(phase.train)
        self._backbone, self._phase = backbone, phase
        self._optimizer = FlatOptimizer(backbone, phase)
        self._sums: defaultdict[str, float] = defaultdict(float)
        self.count = self._pairs = self._skipped = 0
        backbone.loss_scale = first_loss_scale(backbone)

    def take(self, batch: Rows, metrics: dict[str, float]) -> bool:
        """Step along the gradient of ``batch`` in the gradient buffer; return ``False`` if it overflowed."""
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
        """Unscale the gradient; return whether it is not finite."""
        scale, grad = self._backbone.loss_scale, self._backbone.grad
        if scale == 1:
            return False
        grad.div_(scale)
        return not bool(grad.isfinite().all())

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add ``metrics`` to the running sums."""
        for name, value in metrics.items():
            self._sums[name] += value

    def result(self, memory: Mapping[str, float], **metrics: float) -> PhaseResult:
        """Return the tensors in the model, means over the steps, and ``metrics`` as given."""
        means = {name: value / max(self.count, 1) for name, value in self._sums.items()} | metrics
        stepped = self.count - self._skipped
        moments = None if self._phase.moments is None else self._optimizer.moments(stepped)
        # Frees the memory of the optimiser's state for the copy of the tensors.
        del self._optimizer
        self._backbone.loss_scale = first_loss_scale(self._backbone)
        loss = means.pop("loss", 0.0)
        return PhaseResult(self._backbone.extract(), loss, self.count, self._pairs, means, memory, moments)
