"""Training on the server, epoch by epoch: what is kept after each lets a stopped process go on to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from prefed import files
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
)
from prefed.train import PairTrainer
from prefed.train.pair_cache import Rows
from prefed.wire import decode_state, encode

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
    """

    stage: str
    rows: Rows
    objective: Objective
    optimizer: Optimizer
    batch_size: int
    epochs: int
    state: Path
    remedy: str


def train_epochs(
    trainer: PairTrainer, training: Training, key: Key, callback: Callback, measure: Measure
) -> tuple[Tensors, list[dict[str, Any]]]:
    """Train all tensors from the backbone's start, and give them with the figures of each epoch.

    Raises:
        AlignError: a tensor is not finite after an epoch, or the file of the last epoch is damaged.
    """
    backbone = trainer.backbone
    ownership = Ownership.of(backbone.layout, lambda entry: Owner.SHARED)
    tensors, moments, history = backbone.initial, Moments(), cast(list[dict[str, Any]], [])
    if training.state.exists():
        tensors, moments, history = _decode(training)
    callback.on_stage_begin(training.stage, len(history), training.epochs)
    for epoch in range(len(history) + 1, training.epochs + 1):
        phase = Phase(
            f"epoch-{epoch}",
            backbone.layout.names,
            training.objective,
            training.optimizer,
            training.batch_size,
            epochs=1,
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


def _decode(training: Training) -> tuple[Tensors, Moments, list[dict[str, Any]]]:
    digest, _, data = training.state.read_bytes().partition(b"\n")
    if digest != files.digest(data).encode():
        raise AlignError(
            f"{training.state} is damaged: its content is not what was written; do the stage again: "
            f"--stage {training.stage}"
        )
    state = decode_state(data)
    slots = {
        name.removeprefix(_MOMENTS): group
        for name, group in state.tensors.items()
        if name.startswith(_MOMENTS)
    }
    history = cast(list[dict[str, Any]], state.values["history"])
    return state.tensors["policy"], Moments(slots, int(state.number("steps", 0))), history
