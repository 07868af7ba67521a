"""Stage ``train``: the policy learns the labels; the best of its checkpoints is kept."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prefed.align import labels, policy
from prefed.align.alignment import Alignment
from prefed.align.epochs import Training, train_epochs
from prefed.align.errors import AlignError
from prefed.align.lines import rows_in
from prefed.align.pairs import cache, write_pairs
from prefed.align.stages import Figures, Stage, check_outputs, output_digest
from prefed.core import Optimizer, Plain, Tensors
from prefed.data import Record
from prefed.data.prompts import parse_prompt
from prefed.metrics import PairScores, client_metrics
from prefed.models.adapters import atomic_folder
from prefed.train import PairTrainer
from prefed.train.trainer_factory import model_digest

ADAPTER, CHECKPOINTS, STATE = "adapter", "checkpoints", "train.state"


def held_out_rows(alignment: Alignment, prompts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which pairs are not trained on: those of a share of the labelled prompts, drawn by the seed.

    Args:
        prompts: ``int64 [n]``, the number of each pair's prompt.
    """
    numbers, share = np.unique(prompts), alignment.config.held_out
    # With a share above 0 at least one prompt is held out, and at least one is trained on.
    count = min(max(round(share * len(numbers)), 1), len(numbers) - 1) if share else 0
    drawn = alignment.key.at("held out").numpy().permutation(numbers)[:count]
    return np.isin(prompts, drawn)


def best_epoch(history: list[dict[str, Any]]) -> int:
    """The epoch with the highest agreement, the earliest of equals; without held-out pairs the last one.

    >>> best_epoch([{"epoch": k, "agreement": share} for k, share in ((1, 0.6), (2, 0.7), (3, 0.7))])
    2
    """
    if history[0]["agreement"] is None:
        return int(history[-1]["epoch"])
    return int(max(history, key=lambda epoch: (epoch["agreement"], -epoch["epoch"]))["epoch"])


def _work(alignment: Alignment) -> Figures:
    config, backbone = alignment.config, alignment.policy
    rows = list(rows_in(alignment.folder / labels.FILE))
    records = [
        Record(parse_prompt(row["prompt"]), row["chosen"], row["rejected"], margin=abs(row["margin"]))
        for row in rows
    ]
    tokens = write_pairs(alignment, backbone, records, "labels")
    prompts = np.array([row["index"] for row in rows], np.int64)[tokens.rows - 1]
    held_out = held_out_rows(alignment, prompts)
    if held_out.all():
        raise AlignError(
            f"{alignment.folder / labels.FILE}: of {len(rows):,} labelled pairs none is left to train on; "
            "give more prompts, or a longer data.max_length"
        )
    trainer = PairTrainer(
        backbone,
        tokens,
        cache=cache(alignment) / "reference",
        name=f"reference-{model_digest(backbone)[:12]}-{tokens.fingerprint[:12]}",
        max_tokens=alignment.max_tokens,
        fast=alignment.model.fast,
    )
    start = alignment.folder / policy.FOLDER

    def measure(epoch: int, tensors: Tensors) -> Mapping[str, Plain]:
        checkpoint = alignment.folder / CHECKPOINTS / f"epoch-{epoch}"
        policy.save_over_start(backbone, tensors, start, checkpoint)
        digest = output_digest(checkpoint)
        if not held_out.any():
            return {"digest": digest, "agreement": None}
        scores = trainer.score(tensors, np.flatnonzero(held_out))
        assert isinstance(scores, PairScores)
        figures = client_metrics(scores, config.beta or 0.1)
        return {"digest": digest, "agreement": figures["reward_accuracy"], "margin": figures["margin"]}

    training = Training(
        stage="train",
        rows=np.flatnonzero(~held_out),
        objective=config.goal(),
        optimizer=Optimizer(config.optimizer, lr=config.lr, clip=config.clip),
        batch_size=config.batch_size,
        epochs=config.epochs,
        state=alignment.folder / STATE,
        remedy="lower align.lr",
    )
    _, history = train_epochs(trainer, training, alignment.key.at("train"), alignment.callback, measure)
    # The process that wrote a checkpoint may have stopped long ago.
    digests = {f"{CHECKPOINTS}/epoch-{epoch['epoch']}": epoch.pop("digest") for epoch in history}
    check_outputs(alignment.folder, STAGE, digests)
    best = best_epoch(history)
    _copy(alignment.folder / CHECKPOINTS / f"epoch-{best}", alignment.folder / ADAPTER)
    return {
        "pairs": len(training.rows),
        "held_out": int(held_out.sum()),
        "too_long": len(rows) - len(tokens),
        "epochs": history,
        "kept": best,
    }


def _copy(checkpoint: Path, folder: Path) -> None:
    with atomic_folder(folder) as partial:
        for item in sorted(checkpoint.iterdir()):
            shutil.copyfile(item, partial / item.name)


def _settings(alignment: Alignment) -> dict[str, Any]:
    config = alignment.config
    names = ("optimizer", "lr", "clip", "batch_size", "epochs", "held_out")
    return {
        **{name: getattr(config, name) for name in names},
        "objective": {"name": config.objective, **config.goal().settings},
    }


STAGE = Stage("train", ("policy", "labels"), _settings, (ADAPTER, CHECKPOINTS), _work, (STATE,))
