"""Diagnostics: what theory speaks of, measured at the global model on some pairs of every client.

With g_i the gradient of client i's loss in the shared tensors, and p_i its weight in the global objective::

    global_loss    Σ p_i F_i
    gradient_norm  ‖Σ p_i g_i‖, before any clip
    kappa2         κ² = Σ p_i ‖g_i − Σ_j p_j g_j‖², how much clients' gradients differ
    zeta2          ζ_g² = Σ p_i E‖g_i^batch − g_i‖², the variance of a mini-batch's gradient
    paper_gap      Σ p_i min(‖g_i^batch‖, 1)², from which Distributed DPO's figures are made

A method that shares no tensor has no global model. Then g_i is the gradient in the client's own tensors, at
its own model, and there is neither ``gradient_norm`` nor ``kappa2``.

They belong to simulations: gradients of few pairs leave the clients, and their bytes are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from prefed.core import (
    ClientTrainer,
    Download,
    Exchange,
    Layout,
    Method,
    Objective,
    Owner,
    Plain,
    Round,
    State,
    Tensors,
    Upload,
)

DIAGNOSE = "diagnose"
"""The name of the exchange in which clients send what is diagnosed."""
NUMBERS = frozenset({"loss", "variance", "clipped"})


@dataclass(frozen=True)
class Diagnostics:
    """How a run is diagnosed.

    Attributes:
        every: rounds from one diagnosis to the next.
        pairs: of each client, two batches of half of them each; ``None`` for all training pairs.
        objective: the loss whose gradient it is.
        batch: pairs of an optimiser step, whose gradient's variance is told.
        uniform: all clients weigh alike in the global objective, and not by their pairs.
    """

    every: int
    pairs: int | None
    objective: Objective
    batch: int
    uniform: bool = False

    @property
    def least(self) -> int | None:
        """How many pairs the smallest mean is over; ``None`` for all of a client."""
        return None if self.pairs is None else max(1, self.pairs // 2)

    def exchange(self, method: Method, layout: Layout) -> Exchange:
        """What is asked of a client: two gradients at the model that is published to it."""
        shared = layout.select(method.ownership.names(Owner.SHARED))
        measured = shared.names or method.ownership.names(Owner.PERSONAL)

        def send(server: State, client: str, now: Round) -> Download:
            return method.publish(server, client)

        def merge(server: State, uploads: Sequence[Upload], now: Round) -> State:
            return server

        def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
            parts = (*download.tensors.values(), private.tensors.get("personal"))
            model = trainer.assemble(*(part for part in parts if part is not None))

            def slope(name: str, size: int) -> tuple[torch.Tensor, float]:
                full, loss = trainer.gradient(model, self.objective, batch_size=size, name=name)
                return full.select(measured).flat.double(), loss

            size = self.batch if self.least is None else self.least
            one, loss = slope("first", size)
            if self.least is None:
                mean, loss = slope("all", 0)
                variance = float((one - mean).square().sum())
            else:
                other, second = slope("second", size)
                mean, loss = (one + other) / 2, (loss + second) / 2
                variance = float((one - other).square().sum()) / 2
            clipped = min(float(torch.linalg.vector_norm(one)), 1.0) ** 2
            numbers = {"loss": loss, "variance": variance, "clipped": clipped}
            told = mean if shared.names else mean[:0]
            gradient = Tensors(shared, told.to(model.flat.dtype))
            return trainer.upload({"gradient": gradient}, numbers), private

        groups = {"gradient": shared}
        return Exchange(DIAGNOSE, send, work, merge, to="all", scalars=NUMBERS, groups=lambda c, now: groups)


@dataclass
class Diagnosis:
    """Adds up what clients send, one at a time."""

    how: Diagnostics
    _gradient: torch.Tensor | None = None
    _rows: list[tuple[float, float, float, float, float]] = field(default_factory=list)

    def add(self, upload: Upload) -> None:
        """Count a client's upload of :meth:`Diagnostics.exchange`."""
        weight = 1.0 if self.how.uniform else upload.weight
        gradient, numbers = upload.tensors["gradient"].flat.double(), upload.scalars
        total = gradient * weight
        self._gradient = total if self._gradient is None else self._gradient + total
        square = float(gradient.square().sum())
        self._rows.append((weight, square, numbers["loss"], numbers["variance"], numbers["clipped"]))

    def figures(self) -> dict[str, Plain]:
        """The figures for the round log; none if no client answered.

        Where g_i is a mean over few pairs, its own variance is taken off κ², which may then be below 0.
        """
        if self._gradient is None:
            return {}
        whole = math.fsum(row[0] for row in self._rows)
        rows = [(weight / whole, *rest) for weight, *rest in self._rows]
        together = bool(self._gradient.numel())
        norm = float(torch.linalg.vector_norm(self._gradient)) / whole
        kappa = math.fsum(p * square for p, square, *_ in rows) - norm**2
        scale = 1.0
        if self.how.least is not None:
            # g_i is the mean of two such batches.
            kappa -= math.fsum(p * (1 - p) * variance / 2 for p, _, _, variance, _ in rows)
            scale = self.how.least / self.how.batch
        return {
            "global_loss": math.fsum(p * loss for p, _, loss, _, _ in rows),
            **({"gradient_norm": norm, "kappa2": kappa} if together else {}),
            "zeta2": scale * math.fsum(p * variance for p, _, _, variance, _ in rows),
            "paper_gap": math.fsum(p * clipped for p, *_, clipped in rows),
        }
