"""The stages of a policy that takes a taste, from generation to generation; the best policy of all is kept.

Source: FedVPA-GP (arXiv:2605.30873), stage 2. In a generation the policy, as it then is, completes each
prompt with a taste of its own, the frozen selector labels the completions with this taste, and the policy
takes steps on the labels. Labels of different generations cannot be compared. So what is kept is decided on
the held-out pairs of the first generation, whose prompts are completed no more and never trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from prefed.align import completions, labels, policy, taste_draws
from prefed.align.alignment import Alignment
from prefed.align.epochs import Training, read_state, train_epochs
from prefed.align.generation import STATE, Generation, held_out_prompts
from prefed.align.lines import dumps, rows_in
from prefed.align.stages import Figures, Stage, check_outputs
from prefed.align.training import (
    ADAPTER,
    CHECKPOINTS,
    agreement,
    best_epoch,
    check_rows,
    label_trainer,
    settings,
)
from prefed.config.align import AlignConfig
from prefed.core import Optimizer, Plain, Tensors, files

POLICY = "policy.safetensors"


def stages_of(count: int) -> tuple[Stage, ...]:
    """The stages of so many generations, and of what is kept of them."""
    stages = [taste_draws.STAGE]
    for number in range(1, count + 1):
        generation = Generation(number)
        stages += [completions.stage(generation), labels.stage(generation), _training(generation)]
    inputs = ("policy", *(stage.name for stage in stages))
    outputs = (POLICY, ADAPTER, completions.FILE, labels.FILE)
    return (*stages, Stage("train", inputs, lambda alignment: {"generations": count}, outputs, _keep))


def count_of(config: AlignConfig) -> int:
    """How many generations there are."""
    return config.generations or 3


def summarize(figures: Mapping[str, Figures]) -> dict[str, Figures]:
    """The figures of all stages as those of an alignment with a single generation, counts added up."""
    single = {name: own for name, own in figures.items() if "-" not in name}
    for kind in ("completions", "labels", "train"):
        own = [figures[name] for name in figures if name.startswith(f"{kind}-")]
        counts = {name: sum(each[name] for each in own) for name in own[0] if isinstance(own[0][name], int)}
        single[kind] = {**counts, "seconds": sum(each["seconds"] for each in own), **single.get(kind, {})}
    # The held-out pairs are the same ones in every generation.
    single["train"] = {**single["train"], "held_out": figures["train-1"]["held_out"]}
    return single


def _training(generation: Generation) -> Stage:
    name, current = generation.stage("train"), generation.stage("labels")
    inputs = dict.fromkeys(("policy", generation.stage("completions"), "completions-1", "labels-1", current))
    outputs = (generation.file(CHECKPOINTS), generation.file(STATE))
    before = () if generation.before is None else (generation.before.stage("train"),)
    return Stage(name, (*inputs, *before), _settings, outputs, partial(_train, generation=generation))


def _settings(alignment: Alignment) -> dict[str, Any]:
    shared, steps = settings(alignment), alignment.config.regenerate
    return shared if steps is None else {**shared, "epochs": None, "regenerate": steps}


def _train(alignment: Alignment, generation: Generation) -> Figures:
    config, path = alignment.config, generation.path(alignment, labels.FILE)
    held, sources = held_out_prompts(alignment), [generation]
    if generation.before is not None:
        sources.append(Generation(1))
    rows, z = [], []
    for source in sources:
        drawn = source.tastes(alignment) or {}
        for row in rows_in(source.path(alignment, labels.FILE)):
            if source is generation or row["index"] in held:
                rows.append(row)
                z.append(drawn[row["index"]].z)
    trainer, prompts = label_trainer(alignment, rows, generation.stage("labels"), torch.stack(z))
    out = np.isin(prompts, sorted(held))
    check_rows(out, rows, path)
    checkpoints = generation.path(alignment, CHECKPOINTS)
    checkpoints.mkdir(exist_ok=True)

    def measure(epoch: int, tensors: Tensors) -> Mapping[str, Plain]:
        file = checkpoints / f"epoch-{epoch}.safetensors"
        policy.save_policy(tensors, file)
        return {"digest": files.file_digest(file), **agreement(config, trainer, tensors, out)}

    training = Training(
        stage=generation.stage("train"),
        rows=np.flatnonzero(~out),
        objective=config.goal(),
        optimizer=Optimizer(config.optimizer, lr=config.lr, clip=config.clip),
        batch_size=config.batch_size,
        epochs=config.epochs if config.regenerate is None else 1,
        steps=config.regenerate,
        state=generation.path(alignment, STATE),
        before=None if generation.before is None else generation.before.path(alignment, STATE),
        remedy="lower align.lr",
    )
    key = generation.key(alignment).at("train")
    _, history = train_epochs(trainer, training, key, alignment.callback, measure)
    folder = generation.file(CHECKPOINTS)
    digests = {f"{folder}/epoch-{epoch['epoch']}.safetensors": epoch["digest"] for epoch in history}
    check_outputs(alignment.folder, _training(generation), digests)
    return {
        "pairs": len(training.rows),
        "held_out": int(out.sum()),
        "too_long": len(rows) - len(prompts),
        "loss": history[-1]["loss"],
        "agreement": history[-1]["agreement"],
    }


def _keep(alignment: Alignment) -> Figures:
    """Keep the best of all epochs, export it at the population's taste, and join the generations' rows."""
    generations = [Generation(number) for number in range(1, count_of(alignment.config) + 1)]
    epochs: list[dict[str, Any]] = []
    checkpoints = []
    for generation in generations:
        _, _, history = read_state(generation.path(alignment, STATE), generation.stage("train"))
        for figures in history:
            del figures["digest"]
            checkpoints.append(
                generation.path(alignment, CHECKPOINTS) / f"epoch-{figures['epoch']}.safetensors"
            )
            epochs.append({**figures, "epoch": len(checkpoints), "generation": generation.number})
    best, backbone, folder = best_epoch(epochs), alignment.policy, alignment.folder
    tensors = policy.read_policy(backbone, checkpoints[best - 1])
    policy.save_policy(tensors, folder / POLICY)
    taste = taste_draws.load_tastes(folder).population
    policy.save_over_start(backbone, tensors, folder / policy.FOLDER, folder / ADAPTER, taste=taste)
    for name in (completions.FILE, labels.FILE):
        rows = (
            {**row, "generation": generation.number}
            for generation in generations
            for row in rows_in(generation.path(alignment, name))
        )
        files.write(folder / name, dumps(rows))
    return {"epochs": epochs, "kept": best}
