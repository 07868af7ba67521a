"""Three clients with quadratic losses, ½ (φ − a_i)ᵀ H_i (φ − a_i), and what closed forms need of them."""

import numpy as np
import torch

from prefed.core import Entry, Layout, Method, Tensors
from prefed.merge import Aggregator, MergeConfig
from prefed.methods import METHODS
from prefed.testing import Quadratic

RATE, STEPS, SIZES = 0.2, 4, (1, 2, 5)
PLAIN = {
    "optimizer": "sgd",
    "clip": 0,
    "weight_decay": 0,
    "lr": RATE,
    "local_steps": STEPS,
    "batch_size": 64,
    "accumulate": 1,
    "schedule": "constant",
}
LINE = Layout((Entry("lora/0/q/B", (1, 3), "lora", 0, "B"),))


def make(name: str, layout: Layout = LINE, merge: MergeConfig | None = None, **settings: object) -> Method:
    kind = METHODS[name]
    aggregator = Aggregator(merge or MergeConfig(), layout, 1.0)
    return kind.build(kind.Settings(**{**PLAIN, **settings}), layout, aggregator, 50)


def problem(
    layout: Layout = LINE,
) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, Quadratic], Tensors]:
    """Full, different curvatures of eigenvalues in [0.3, 1.8], and SIZES pairs."""
    draw, size = np.random.default_rng(5), layout.size
    curvatures, optima, clients = [], [], {}
    for number, pairs in enumerate(SIZES):
        basis, _ = np.linalg.qr(draw.normal(size=(size, size)))
        curvatures.append(basis @ np.diag(draw.uniform(0.3, 1.8, size)) @ basis.T)
        optima.append(3 * draw.normal(size=size))
        targets = Quadratic.at(list(optima[-1]), size=pairs).targets
        clients[f"c{number}"] = Quadratic(targets, torch.from_numpy(curvatures[-1]))
    return curvatures, optima, clients, Tensors(layout, torch.from_numpy(draw.normal(size=size)))


def weighted(values: list[np.ndarray]) -> np.ndarray:
    """Σ p_i v_i with p_i = n_i / Σ n_j."""
    return sum(size * value for size, value in zip(SIZES, values, strict=True)) / sum(SIZES)


def model(run) -> np.ndarray:
    return run.server.tensors["model"].flat.numpy()
