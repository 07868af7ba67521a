"""One generation: completions by one policy, and their labels. Without tastes there is a single one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from prefed.align.alignment import Alignment
from prefed.align.epochs import read_state
from prefed.align.lines import dumps, rows_in
from prefed.align.taste_draws import Drawn, draw, load_tastes, parse_drawn
from prefed.core import Key, Tensors, files

TASTES, LABELS, STATE = "tastes.jsonl", "labels.jsonl", "train.state"


@dataclass(frozen=True)
class Generation:
    """Where the files of a generation lie, and what it draws with.

    Attributes:
        number: from 1; ``None`` for the single one of a policy that takes no taste.
    """

    number: int | None = None

    def stage(self, name: str) -> str:
        """The name of its stage of this kind.

        >>> Generation().stage("labels"), Generation(2).stage("labels")
        ('labels', 'labels-2')
        """
        return name if self.number is None else f"{name}-{self.number}"

    def file(self, name: str) -> str:
        """The path of its file of this name, in the alignment's folder.

        >>> Generation().file("labels.jsonl"), Generation(2).file("labels.jsonl")
        ('labels.jsonl', 'generations/2/labels.jsonl')
        """
        return name if self.number is None else f"generations/{self.number}/{name}"

    def path(self, alignment: Alignment, name: str) -> Path:
        """Its file of this name."""
        return alignment.folder / self.file(name)

    def key(self, alignment: Alignment) -> Key:
        """Its randomness."""
        return alignment.key if self.number is None else alignment.key.at("generation", self.number)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The stages of earlier generations that this one goes on from.

        >>> Generation(1).inputs, Generation(3).inputs
        ((), ('labels-1', 'train-2'))
        """
        return () if self.before is None else ("labels-1", self.before.stage("train"))

    @property
    def before(self) -> Generation | None:
        """The generation before; ``None`` for the first one."""
        return Generation(self.number - 1) if self.number and self.number > 1 else None

    def draw_tastes(self, alignment: Alignment, prompts: Iterable[tuple[int, int]]) -> dict[int, Drawn]:
        """Draw a taste for each prompt, and write :data:`TASTES`.

        Args:
            prompts: the prompts' numbers, with a hash that names the randomness of each: what is drawn for a
                prompt does not depend on the others.
        """
        tastes = alignment.config.tastes
        assert tastes is not None
        assert self.number is not None
        known, key = load_tastes(alignment.folder), alignment.key
        drawn = {
            number: draw(known, tastes, key.at("taste", name).at("generation", self.number))
            for number, name in prompts
        }
        path = self.path(alignment, TASTES)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = ({"index": number, **own.plain()} for number, own in drawn.items())
        files.write(path, dumps(rows), mode=0o600)
        return drawn

    def tastes(self, alignment: Alignment) -> dict[int, Drawn] | None:
        """Number of a prompt → the taste that was drawn for it; ``None`` where the policy takes none."""
        if self.number is None:
            return None
        return {row["index"]: parse_drawn(row) for row in rows_in(self.path(alignment, TASTES))}


def policy_before(alignment: Alignment, generation: Generation) -> Tensors:
    """The policy (full layout) with which a numbered generation begins."""
    if generation.before is None:
        return alignment.policy.initial
    path = generation.before.path(alignment, STATE)
    tensors, _, _ = read_state(path, generation.before.stage("train"))
    return tensors


def held_out(alignment: Alignment, prompts: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The numbers of the prompts that are not trained on: a share of those given, drawn by the seed.

    Args:
        prompts: numbers of prompts; one may be there several times.
    """
    numbers, share = np.unique(np.asarray(prompts, np.int64)), alignment.config.held_out
    # With a share above 0 at least one prompt is held out, and at least one is trained on.
    count = min(max(round(share * len(numbers)), 1), len(numbers) - 1) if share else 0
    return alignment.key.at("held out").numpy().permutation(numbers)[:count]


def held_out_prompts(alignment: Alignment) -> frozenset[int]:
    """The held-out prompts of a policy that takes a taste: of those with a label in the first generation."""
    rows = rows_in(Generation(1).path(alignment, LABELS))
    return frozenset(held_out(alignment, [row["index"] for row in rows]).tolist())


def at_prompts(drawn: dict[int, Drawn] | None, prompts: Iterable[int]) -> torch.Tensor | None:
    """``[n, d_z]`` the tastes of prompts; ``None`` where none are drawn."""
    return None if drawn is None else torch.stack([drawn[number].z for number in prompts])
