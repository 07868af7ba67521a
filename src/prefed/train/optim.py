"""A phase's optimiser over the flat buffer, and the terms that a phase adds to the gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch

from prefed.core import Moments, Optimizer, Phase, Tensors
from prefed.models import Backbone


def make_optimizer(o: Optimizer, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    """PyTorch's optimiser with these settings, over groups of parameters with rates of their own."""
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
