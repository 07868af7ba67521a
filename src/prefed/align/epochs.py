"""Training on the server, epoch by epoch: what is kept after each lets a stopped process go on to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from prefed.align.errors import AlignError
from prefed.core import (
    Callback,
    Key,
    Moments,
    Objective,
    Optimizer,
    Owner,
    Ownership,
    Phase,
    Plain,
    State,
    Tensors,
    files,
)
from prefed.core.wire import decode_state, encode
from prefed.train import PairTrainer
from prefed.train.pair_cache import Rows

_MOMENTS = "moments."
"""The prefix of the groups that are the optimiser's memory."""

Measure = Callable[[int, Tensors], Mapping[str, Plain]]
"""Is called with the number of an epoch and the tensors after it; gives the epoch's figures."""


@dataclass(frozen=True)
class Training:
    """What is trained on what, and for how long.

    Attributes:
        stage: names the randomness, and the stage for callbacks.
        rows: the pairs, by their rows in the trainer's set.
        state: the file that is kept after each epoch.
        remedy: what to do if training diverges.
        steps: of an epoch; ``None`` for one pass over the rows.
        before: the state of an earlier training, from whose tensors and optimiser this one goes on.
    """

    stage: str
    rows: Rows
    objective: Objective
    optimizer: Optimizer
    batch_size: int
    epochs: int
    state: Path
    remedy: str
    steps: int | None = None
    before: Path | None = None


def train_epochs(
    trainer: PairTrainer, training: Training, key: Key, callback: Callback, measure: Measure
) -> tuple[Tensors, list[dict[str, Any]]]:
    """Train all tensors, from the backbone's start unless ``before`` names another.

    Returns:
        The tensors, and the figures of each epoch.

    Raises:
        AlignError: a tensor is not finite after an epoch, or the file of the last epoch is damaged.
    """
    backbone = trainer.backbone
    ownership = Ownership.of(backbone.layout, lambda entry: Owner.SHARED)
    tensors, moments, history = backbone.initial, Moments(), cast(list[dict[str, Any]], [])
    if training.state.exists():
        tensors, moments, history = read_state(training.state, training.stage)
    elif training.before is not None:
        tensors, moments, _ = read_state(training.before, training.stage)
    callback.on_stage_begin(training.stage, len(history), training.epochs)
    for epoch in range(len(history) + 1, training.epochs + 1):
        phase = Phase(
            f"epoch-{epoch}",
            backbone.layout.names,
            training.objective,
            training.optimizer,
            training.batch_size,
            steps=training.steps,
            epochs=1 if training.steps is None else None,
            moments=moments,
        )
        result = trainer.train(tensors, phase, training.rows, key, ownership)
        tensors, moments = result.tensors, result.moments or Moments()
        if not bool(torch.isfinite(tensors.flat).all()):
            raise AlignError(f"epoch {epoch} of stage {training.stage} diverged: {training.remedy}")
        figures = {"epoch": epoch, "loss": result.loss, "steps": result.steps, **measure(epoch, tensors)}
        history.append(figures)
        # From here on the epoch counts.
        files.write(training.state, _encode(tensors, moments, history))
        numbers = {name: float(value) for name, value in figures.items() if isinstance(value, float)}
        callback.on_stage_step(training.stage, epoch, training.epochs, numbers)
    return tensors, history


def _encode(tensors: Tensors, moments: Moments, history: list[dict[str, Any]]) -> bytes:
    groups = {f"{_MOMENTS}{name}": slot for name, slot in moments.slots.items()}
    data = encode(
        State({"policy": tensors, **groups}, {"steps": moments.steps, "history": cast(Any, history)})
    )
    return files.digest(data).encode() + b"\n" + data


def read_state(path: Path, stage: str) -> tuple[Tensors, Moments, list[dict[str, Any]]]:
    """Tensors, optimiser's memory and figures after the last epoch in a file.

    Args:
        stage: that wrote it, for messages.

    Raises:
        AlignError: the file is damaged.
    """
    digest, _, data = path.read_bytes().partition(b"\n")
    if digest != files.digest(data).encode():
        raise AlignError(
            f"{path} is damaged: its content is not what was written; do the stage again: --stage {stage}"
        )
    state = decode_state(data)
    slots = {
        name.removeprefix(_MOMENTS): group
        for name, group in state.tensors.items()
        if name.startswith(_MOMENTS)
    }
    history = cast(list[dict[str, Any]], state.values["history"])
    return state.tensors["policy"], Moments(slots, int(state.number("steps", 0))), history
