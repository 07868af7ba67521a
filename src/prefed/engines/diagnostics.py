"""Diagnostics: quantities from convergence theory, measured at the global model on pairs of every client.

With g_i the gradient of client i's loss F_i in the shared tensors, and p_i its weight in the objective::

    global_loss    Σ p_i F_i
    gradient_norm  ‖Σ p_i g_i‖, without clipping
    kappa2         κ² = Σ p_i ‖g_i − Σ_j p_j g_j‖², the heterogeneity of clients' gradients
    zeta2          ζ_g² = Σ p_i E‖g_i^batch − g_i‖², the variance of mini-batch gradients
    paper_gap      Σ p_i min(‖g_i^batch‖, 1)², the basis of the metrics of Distributed DPO

For a method without shared tensors there is no global model. Then g_i is the gradient in the client's
personal tensors at its own model, and ``gradient_norm`` and ``kappa2`` are missing.

Only for simulations: gradients of few pairs leave the clients, and their bytes are not counted.
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
    Merged,
    Method,
    Objective,
    Owner,
    Plain,
    Round,
    State,
    Tensors,
    Upload,
)
from prefed.engines.config import DIAGNOSE

NUMBERS = frozenset({"loss", "variance", "clipped"})


@dataclass(frozen=True)
class Diagnostics:
    """Settings of diagnostics.

    Attributes:
        pairs: pairs per client, in two batches of half of them; ``None``: all training pairs.
        objective: the loss to differentiate.
        batch: batch size of an optimiser step, for ``zeta2``.
        uniform: clients have equal weights in the objective, instead of their numbers of pairs.
    """

    every: int
    pairs: int | None
    objective: Objective
    batch: int
    uniform: bool = False

    @property
    def least(self) -> int | None:
        """The number of pairs in the smallest mean; ``None``: all pairs of a client."""
        return None if self.pairs is None else max(1, self.pairs // 2)

    def exchange(self, method: Method, layout: Layout) -> Exchange:
        """The exchange in which a client sends gradients at the model that is published to it."""
        shared = layout.select(method.ownership.names(Owner.SHARED))
        measured = shared.names or method.ownership.names(Owner.PERSONAL)

        def send(server: State, client: str, now: Round) -> Download:
            return method.publish(server, client)

        def merge(server: State, uploads: Sequence[Upload], now: Round) -> Merged:
            return server, {}

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
            sent = mean if shared.names else mean[:0]
            gradient = Tensors(shared, sent.to(model.flat.dtype))
            return trainer.upload({"gradient": gradient}, numbers), private

        groups = {"gradient": shared}
        return Exchange(DIAGNOSE, send, work, merge, to="all", scalars=NUMBERS, groups=lambda c, now: groups)


@dataclass
class Diagnosis:
    """Accumulates the uploads of a diagnosis, one at a time."""

    how: Diagnostics
    _gradient: torch.Tensor | None = None
    _rows: list[tuple[float, float, float, float, float]] = field(default_factory=list)

    def add(self, upload: Upload) -> None:
        """Add a client's upload of :meth:`Diagnostics.exchange`."""
        weight = 1.0 if self.how.uniform else upload.weight
        gradient, numbers = upload.tensors["gradient"].flat.double(), upload.scalars
        total = gradient * weight
        self._gradient = total if self._gradient is None else self._gradient + total
        square = float(gradient.square().sum())
        self._rows.append((weight, square, numbers["loss"], numbers["variance"], numbers["clipped"]))

    def figures(self) -> dict[str, Plain]:
        """The metrics for the round log; empty if no client answered.

        If g_i is estimated from few pairs, its variance is subtracted from κ², which may then be negative.
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
            # g_i is the mean of two batches.
            kappa -= math.fsum(p * (1 - p) * variance / 2 for p, _, _, variance, _ in rows)
            scale = self.how.least / self.how.batch
        return {
            "global_loss": math.fsum(p * loss for p, _, loss, _, _ in rows),
            **({"gradient_norm": norm, "kappa2": kappa} if together else {}),
            "zeta2": scale * math.fsum(p * variance for p, _, _, variance, _ in rows),
            "paper_gap": math.fsum(p * clipped for p, *_, clipped in rows),
        }
