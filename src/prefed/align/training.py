"""Stage ``train``: train the policy on the labels, and keep its best checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from prefed.align import labels, policy
from prefed.align.alignment import Alignment, cache, write_pairs
from prefed.align.completions import limit
from prefed.align.held_out import ANSWERED, HeldOutAnswers
from prefed.align.kept_epoch import kept_epoch
from prefed.align.policy import AlignError, Training, train_epochs
from prefed.align.stages import Figures, Stage, check_outputs, output_digest, rows_in
from prefed.align.tastes import STATE, Generation, held_out, held_out_prompts
from prefed.config.align import AlignConfig
from prefed.core import Optimizer, Plain, Tensors
from prefed.data import Record
from prefed.data.record import parse_prompt
from prefed.models.backbone import model_digest
from prefed.models.first_learning_rate import first_rate
from prefed.train import PairTrainer
from prefed.train.metrics import SHIFT_ERROR, SHIFT_METRICS

ADAPTER, CHECKPOINTS = "adapter", "checkpoints"
CHECKED = 5
"""Largest number of epochs, evenly spaced up to the last one, after which held-out prompts are answered."""


def _rows(
    alignment: Alignment, generation: Generation
) -> tuple[list[Mapping[str, Any]], torch.Tensor | None]:
    """Read the labels of a generation and the held-out ones of the first, and the taste of each pair."""
    first = [] if generation.before is None else [Generation(1)]
    held = held_out_prompts(alignment) if first else frozenset[int]()
    rows, tastes = list[Mapping[str, Any]](), list[torch.Tensor]()
    for source in (generation, *first):
        drawn = source.tastes(alignment)
        for row in rows_in(source.path(alignment, labels.FILE)):
            if source is generation or row["index"] in held:
                rows.append(row)
                tastes += [] if drawn is None else [drawn[row["index"]]]
    return rows, torch.stack(tastes) if tastes else None


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
        Record(
            parse_prompt(row["prompt"]),
            row["chosen"],
            row["rejected"],
            margin=abs(row["margin"]),
            ended=row.get("ended", (True, True)),
        )
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


def agreement(
    config: AlignConfig, trainer: PairTrainer, tensors: Tensors, out: npt.NDArray[np.bool_]
) -> dict[str, Plain]:
    """Compute the agreement of the policy with the labels of held-out pairs, and its mean margin and shift.

    Args:
        out: marks the held-out pairs of the trainer; without any, the agreement is ``None``.
    """
    if not out.any():
        return {"agreement": None}
    scores = trainer.score(tensors, np.flatnonzero(out))
    figures = scores.metrics(config.beta or 0.1)
    shifts = {name: figures[name] for name in (SHIFT_METRICS[0], SHIFT_ERROR)}
    return {"agreement": figures["reward_accuracy"], "margin": figures["margin"], **shifts}


def checkpoint(generation: Generation, epoch: int) -> str:
    """Return the path of a checkpoint relative to the folder of the alignment."""
    ending = "" if generation.number is None else ".safetensors"
    return generation.file(f"{CHECKPOINTS}/epoch-{epoch}{ending}")


def answers_file(epoch: int) -> str:
    """Return the name of the file with an epoch's answers to held-out prompts, next to its checkpoint."""
    return f"answers-{epoch}.jsonl"


def _work(alignment: Alignment, generation: Generation) -> Figures:
    config = alignment.config
    rows, tastes = _rows(alignment, generation)
    trainer, prompts = label_trainer(alignment, rows, generation.stage("labels"), tastes)
    single = generation.number is None
    held = held_out(alignment, prompts) if single else sorted(held_out_prompts(alignment))
    out = np.isin(prompts, held)
    if out.all():
        raise AlignError(
            f"{generation.path(alignment, labels.FILE)}: none of {len(rows):,} labelled pairs can be used "
            "for training; use more prompts, or raise data.max_length"
        )
    before = generation.before
    lr = config.lr or first_rate(alignment.policy.causal.config.get_text_config().hidden_size)
    pairs = int((~out).sum())
    training = Training(
        stage=generation.stage("train"),
        rows=np.flatnonzero(~out),
        objective=config.goal(),
        optimizer=Optimizer(config.optimizer, lr=lr, clip=config.clip),
        batch_size=config.batch_size,
        epochs=config.epochs_for(pairs),
        steps=config.regenerate,
        state=generation.path(alignment, STATE),
        before=None if before is None else before.path(alignment, STATE),
        remedy=f"set align.lr below {lr:g}",
    )
    answered, held_out_answers = np.unique(prompts[out]).tolist(), None
    if answered:
        scorer, z = generation.scorer(alignment), Generation(1).tastes(alignment)
        held_out_answers = HeldOutAnswers(alignment, scorer, answered, limit(alignment), z)

    def measure(epoch: int, tensors: Tensors) -> Mapping[str, Plain]:
        path = alignment.folder / checkpoint(generation, epoch)
        if single:
            policy.save_over_start(alignment.policy, tensors, alignment.folder / policy.FOLDER, path)
        else:
            path.parent.mkdir(exist_ok=True)
            policy.save_policy(tensors, path)
        figures: dict[str, Any] = {"win_rate": None}
        # Answers take longer than a pass over few pairs.
        if held_out_answers is not None and (training.epochs - epoch) % -(-training.epochs // CHECKED) == 0:
            figures = held_out_answers.measure(tensors, path.with_name(answers_file(epoch)))
        return {"digest": output_digest(path), **agreement(config, trainer, tensors, out), **figures}

    key = generation.key(alignment).at("train")
    _, history = train_epochs(trainer, training, key, alignment.callback, measure)
    # Earlier processes may have written some of the checkpoints.
    digests = {checkpoint(generation, epoch["epoch"]): epoch.pop("digest") for epoch in history}
    check_outputs(alignment.folder, stage(generation), digests)
    counts = {
        "pairs": pairs,
        "held_out": int(out.sum()),
        "too_long": len(rows) - len(prompts),
        "answered": len(answered[:ANSWERED]),
        "lr": lr,
    }
    if not single:
        last = {name: history[-1].get(name) for name in ("loss", "agreement", "win_rate", "kl")}
        return {**counts, **last}
    best = kept_epoch(history, alignment.callback)
    policy.copy_adapter(alignment.folder / checkpoint(generation, best), alignment.folder / ADAPTER)
    return {**counts, "epochs": history, "kept": best}


def _settings(alignment: Alignment) -> dict[str, Any]:
    config = alignment.config
    names = ("optimizer", "lr", "clip", "batch_size", "epochs", "held_out")
    settings = {
        **{name: getattr(config, name) for name in names},
        "objective": {"name": config.objective, **config.goal().settings},
    }
    if config.regenerate is None:
        return settings
    return {**settings, "epochs": None, "regenerate": config.regenerate}


def stage(generation: Generation) -> Stage:
    """Return the stage of a generation."""
    name, labelled = generation.stage("train"), generation.stage("labels")
    work, checkpoints = partial(_work, generation=generation), generation.file(CHECKPOINTS)
    if generation.number is None:
        return Stage(name, ("policy", labelled), _settings, (ADAPTER, checkpoints), work, (STATE,))
    inputs = dict.fromkeys(
        ("policy", generation.stage("completions"), "completions-1", "labels-1", labelled, *generation.inputs)
    )
    return Stage(name, tuple(inputs), _settings, (checkpoints, generation.file(STATE)), work)


STAGE = stage(Generation())
