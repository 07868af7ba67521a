"""Run all stages of an alignment, and write its summary.

In each of several generations, the current policy completes each prompt, clients may refresh the selectors,
the labeller labels the completions, and the policy is trained on the labels. A policy that takes tastes
completes each prompt with one drawn for it, and the selector labels with this taste (FedVPA-GP,
arXiv:2605.30873, stage 2). The best policy is selected by its answers to the held-out prompts of the first
generation, at the tastes drawn there; training never uses these prompts.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from prefed.align import completions, labels, policy, refresh, tastes, training
from prefed.align.alignment import Alignment
from prefed.align.held_out import win_rate
from prefed.align.kept_epoch import kept_epoch
from prefed.align.policy import read_state
from prefed.align.prompts_and_policy import POLICY_STAGE, PROMPTS_STAGE, own_prompts
from prefed.align.stages import (
    Figures,
    Stage,
    check_settings,
    dumps,
    forget,
    left_anything,
    rows_in,
    run_stages,
)
from prefed.align.tastes import STATE, Generation
from prefed.config.align import AlignConfig
from prefed.core import files
from prefed.data.record import plain_prompt

POLICY, ANSWERS = "policy.safetensors", "answers.jsonl"
SHOWN = 3
"""Number of held-out prompts whose answers are shown by generation."""


def generation_stages(count: int, tasting: bool, refreshed: Callable[[int], int]) -> tuple[Stage, ...]:
    """Return the stages of ``count`` generations, and the one that selects the best policy.

    Args:
        tasting: the policy takes tastes.
        refreshed: returns the last generation up to one with a refresh; 0 for none.
    """
    stages, selectors = [tastes.STAGE] if tasting else [], "selectors"
    for number in range(1, count + 1):
        generation = Generation(number)
        stages += [completions.stage(generation, tasting)]
        if refreshed(number) == number:
            stages += [refresh.stage(generation, selectors)]
            selectors = stages[-1].name
        stages += [labels.stage(generation, selectors), training.stage(generation)]
    inputs = ("policy", *(stage.name for stage in stages))
    outputs = (*((POLICY,) if tasting else ()), training.ADAPTER, completions.FILE, labels.FILE, ANSWERS)
    return (*stages, Stage("train", inputs, lambda alignment: {"generations": count}, outputs, _keep_best))


def count_of(config: AlignConfig) -> int:
    """Return the number of generations."""
    return config.generations or 3


def summarize(figures: Mapping[str, Figures]) -> dict[str, Figures]:
    """Merge the metrics of generations into those of single stages, with summed counts."""
    single = {name: own for name, own in figures.items() if "-" not in name}
    if refreshes := [name for name in figures if name.startswith("refresh-")]:
        each = [{"generation": int(name.partition("-")[2]), **figures[name]} for name in refreshes]
        single["refresh"] = {"refreshes": each, "seconds": sum(own["seconds"] for own in each)}
    for kind in ("completions", "labels", "train"):
        own = [figures[name] for name in figures if name.startswith(f"{kind}-")]
        counts = {
            name: sum(each.get(name, 0) for each in own) for name in own[0] if isinstance(own[0][name], int)
        }
        single[kind] = {**counts, "seconds": sum(each["seconds"] for each in own), **single.get(kind, {})}
    # The held-out pairs and prompts are the same ones in every generation.
    same = {name: figures["train-1"][name] for name in ("held_out", "answered")}
    single["train"] = {**single["train"], **same}
    return single


def _keep_best(alignment: Alignment) -> Figures:
    """Select and export the best epoch, and join the rows of all generations.

    A policy that takes tastes is exported with the population's.
    """
    generations = [Generation(number) for number in range(1, count_of(alignment.config) + 1)]
    epochs: list[dict[str, Any]] = []
    checkpoints, written, scorer = list[Path](), list[Path](), generations[-1].scorer(alignment)
    for generation in generations:
        _, _, history = read_state(generation.path(alignment, STATE), generation.stage("train"))
        for figures in history:
            del figures["digest"]
            path = alignment.folder / training.checkpoint(generation, figures["epoch"])
            answers = path.with_name(training.answers_file(figures["epoch"]))
            if alignment.config.refresh is not None and figures["win_rate"] is not None:
                # Win rates by several labellers are not comparable.
                figures["win_rate"] = win_rate(alignment, scorer, list(rows_in(answers)))
            checkpoints.append(path)
            epochs.append({**figures, "epoch": len(checkpoints), "generation": generation.number})
        written.append(answers)
    _write_answers(alignment, written)
    best = kept_epoch(epochs, alignment.callback)
    backbone, folder = alignment.policy, alignment.folder
    tensors = policy.read_policy(backbone, checkpoints[best - 1])
    taste = None
    if alignment.config.tastes is not None:
        policy.save_policy(tensors, folder / POLICY)
        taste = tastes.load_tastes(folder).population
    policy.save_over_start(backbone, tensors, folder / policy.FOLDER, folder / training.ADAPTER, taste=taste)
    for name in (completions.FILE, labels.FILE):
        rows = (
            {**row, "generation": generation.number}
            for generation in generations
            for row in rows_in(generation.path(alignment, name))
        )
        files.write(folder / name, dumps(rows))
    return {"epochs": epochs, "kept": best}


def _write_answers(alignment: Alignment, written: Sequence[Path]) -> None:
    """Write the answers of the initial policy and of each generation to the first held-out prompts.

    Args:
        written: the file with the answers of each generation's last epoch; missing without held-out prompts.
    """
    prompts, texts = own_prompts(alignment), defaultdict[int, list[str]](list)
    for answers in written:
        for row in islice(rows_in(answers), SHOWN) if answers.exists() else ():
            if answers == written[0]:
                texts[row["prompt"]].append(row["initial"])
            texts[row["prompt"]].append(row["answer"])
    rows = ({"prompt": plain_prompt(prompts[k].prompt), "answers": own} for k, own in texts.items())
    files.write(alignment.folder / ANSWERS, dumps(rows))


SETTINGS, SUMMARY = "settings.json", "summary.json"
STAGES = (PROMPTS_STAGE, POLICY_STAGE, completions.STAGE, labels.STAGE, training.STAGE)
"""The stages of a single generation without tastes, in their order."""


def stages_of(config: AlignConfig) -> tuple[Stage, ...]:
    """Return the stages in their order."""
    tasting = config.tastes is not None
    if not tasting and config.generations is None:
        return STAGES
    stages = generation_stages(count_of(config), tasting, config.refreshed)
    return (PROMPTS_STAGE, POLICY_STAGE, *stages)


def align(alignment: Alignment, again: str | None = None) -> dict[str, Any]:
    """Run all unfinished stages, and write ``summary.json``.

    If the process is killed, another one can continue and ends with the same numbers.

    Args:
        again: the stage to run again, with all stages after it.

    Returns:
        The content of ``summary.json``: the metrics of each stage, and the total ``seconds``. The seconds and
        rates of a stage are those of the process that finished it.

    Raises:
        AlignError: a stage was run with other settings or inputs, there is no such stage, or no pairs are
            left to label or to train on.
        DataError, ModelError: prompts, rows, selectors or model cannot be used.
        OSError: a file cannot be written. Finished stages are kept.
    """
    stages = stages_of(alignment.config)
    check_settings(alignment, stages, again)
    (alignment.folder / "stages").mkdir(parents=True, exist_ok=True)
    settings = alignment.config.model_dump(mode="json", exclude_none=True)
    files.write(alignment.folder / SETTINGS, _pretty(settings))
    if again is not None:
        files.remove(alignment.folder / SUMMARY)
        _forget_others(alignment.folder, stages)
    figures = run_stages(alignment, stages, again)
    seconds = sum(float(stage["seconds"]) for stage in figures.values())
    spent = {} if alignment.privacy is None else {"privacy": alignment.privacy()}
    summary = {**(figures if stages is STAGES else summarize(figures)), **spent, "seconds": seconds}
    files.write(alignment.folder / SUMMARY, _pretty(summary))
    return summary


def _forget_others(folder: Path, stages: tuple[Stage, ...]) -> None:
    numbers = [int(path.name) for path in (folder / "generations").glob("*") if path.name.isdecimal()]
    names = {stage.name for stage in stages}
    wanted = {path for stage in stages for path in (*stage.outputs, *stage.parts)}
    for stage in (*STAGES, *generation_stages(max(numbers, default=0), True, lambda own: own)):
        left = tuple(path for path in (*stage.outputs, *stage.parts) if path not in wanted)
        if left or stage.name not in names:
            forget(folder, replace(stage, outputs=left, parts=()))


def has_alignment(folder: Path) -> bool:
    """Whether a folder contains files of a finished or unfinished alignment."""
    return left_anything(folder, STAGES)


def _pretty(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n"
