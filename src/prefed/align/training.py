"""Stage ``train``: train the policy on the labels, and select its best checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from prefed.align import labels, policy
from prefed.align.alignment import Alignment, cache, write_pairs
from prefed.align.policy import AlignError, Training, train_epochs
from prefed.align.stages import Figures, Stage, check_outputs, output_digest, rows_in
from prefed.align.tastes import STATE, held_out
from prefed.config.align import AlignConfig
from prefed.core import Optimizer, Plain, Tensors
from prefed.data import Record
from prefed.data.record import parse_prompt
from prefed.models.backbone import model_digest
from prefed.train import PairTrainer
from prefed.train.metrics import PairScores, client_metrics

ADAPTER, CHECKPOINTS = "adapter", "checkpoints"


def best_epoch(history: list[dict[str, Any]]) -> int:
    """Return the first epoch with the highest agreement or, without held-out pairs, the last epoch.

    >>> best_epoch([{"epoch": k, "agreement": share} for k, share in ((1, 0.6), (2, 0.7), (3, 0.7))])
    2
    """
    if history[0]["agreement"] is None:
        return int(history[-1]["epoch"])
    return int(max(history, key=lambda epoch: (epoch["agreement"], -epoch["epoch"]))["epoch"])


def label_trainer(
    alignment: Alignment, rows: Sequence[Mapping[str, Any]], name: str, tastes: torch.Tensor | None = None
) -> tuple[PairTrainer, npt.NDArray[np.int64]]:
    """Make a trainer of the policy on labelled pairs; also return the prompt number of each of its pairs.

    Args:
        rows: rows of ``labels.jsonl``.
        name: name of the token folder in the cache.
        tastes: ``[len(rows), d_z]``, the taste of each pair, for a policy that takes tastes.
    """
    backbone = alignment.policy
    records = [
        Record(parse_prompt(row["prompt"]), row["chosen"], row["rejected"], margin=abs(row["margin"]))
        for row in rows
    ]
    tokens = write_pairs(alignment, backbone, records, name)
    # Pairs that are too long are left out.
    there = tokens.rows.astype(np.int64) - 1
    trainer = PairTrainer(
        backbone,
        tokens,
        cache=cache(alignment) / "reference",
        name=f"reference-{model_digest(backbone)[:12]}-{tokens.fingerprint[:12]}",
        max_tokens=alignment.max_tokens,
        fast=alignment.model.fast,
        tastes=None if tastes is None else tastes[there],
    )
    return trainer, np.array([row["index"] for row in rows], np.int64)[there]


def check_rows(out: npt.NDArray[np.bool_], rows: Sequence[Any], path: Path) -> None:
    """Check that there are pairs to train on.

    Raises:
        AlignError: all pairs are held out.
    """
    if out.all():
        raise AlignError(
            f"{path}: none of {len(rows):,} labelled pairs can be used for training; use more prompts, or "
            "raise data.max_length"
        )


def agreement(
    config: AlignConfig, trainer: PairTrainer, tensors: Tensors, out: npt.NDArray[np.bool_]
) -> dict[str, Plain]:
    """Compute the agreement of the policy with the labels of held-out pairs, and its mean margin.

    Args:
        out: marks the held-out pairs of the trainer; without any, the agreement is ``None``.
    """
    if not out.any():
        return {"agreement": None}
    scores = trainer.score(tensors, np.flatnonzero(out))
    assert isinstance(scores, PairScores)
    figures = client_metrics(scores, config.beta or 0.1)
    return {"agreement": figures["reward_accuracy"], "margin": figures["margin"]}


def _work(alignment: Alignment) -> Figures:
    config, backbone, path = alignment.config, alignment.policy, alignment.folder / labels.FILE
    rows = list(rows_in(path))
    trainer, prompts = label_trainer(alignment, rows, "labels")
    out = np.isin(prompts, held_out(alignment, prompts))
    check_rows(out, rows, path)
    start = alignment.folder / policy.FOLDER

    def measure(epoch: int, tensors: Tensors) -> Mapping[str, Plain]:
        checkpoint = alignment.folder / CHECKPOINTS / f"epoch-{epoch}"
        policy.save_over_start(backbone, tensors, start, checkpoint)
        return {"digest": output_digest(checkpoint), **agreement(config, trainer, tensors, out)}

    training = Training(
        stage="train",
        rows=np.flatnonzero(~out),
        objective=config.goal(),
        optimizer=Optimizer(config.optimizer, lr=config.lr, clip=config.clip),
        batch_size=config.batch_size,
        epochs=config.epochs,
        state=alignment.folder / STATE,
        remedy="lower align.lr",
    )
    _, history = train_epochs(trainer, training, alignment.key.at("train"), alignment.callback, measure)
    # Earlier processes may have written some of the checkpoints.
    digests = {f"{CHECKPOINTS}/epoch-{epoch['epoch']}": epoch.pop("digest") for epoch in history}
    check_outputs(alignment.folder, STAGE, digests)
    best = best_epoch(history)
    policy.copy_adapter(alignment.folder / CHECKPOINTS / f"epoch-{best}", alignment.folder / ADAPTER)
    return {
        "pairs": len(training.rows),
        "held_out": int(out.sum()),
        "too_long": len(rows) - len(prompts),
        "epochs": history,
        "kept": best,
    }


def settings(alignment: Alignment) -> dict[str, Any]:
    """Return the settings that the trained policy depends on."""
    config = alignment.config
    names = ("optimizer", "lr", "clip", "batch_size", "epochs", "held_out")
    return {
        **{name: getattr(config, name) for name in names},
        "objective": {"name": config.objective, **config.goal().settings},
    }


STAGE = Stage("train", ("policy", "labels"), settings, (ADAPTER, CHECKPOINTS), _work, (STATE,))
