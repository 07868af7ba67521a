"""Stage ``tastes``, and generations: their files, and the taste drawn for each prompt.

Tastes are only drawn from what clients sent to the server.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from prefed.align.alignment import Alignment, KnownTastes, Scorer
from prefed.align.policy import AlignError, read_state
from prefed.align.stages import Figures, Stage, dumps, rows_in
from prefed.core import Key, Tensors, files

KNOWN = "tastes.json"


@dataclass(frozen=True)
class Drawn:
    """The taste for completing a prompt and labelling its completions.

    Attributes:
        z: ``[d_z]``.
        origin: what it was drawn from: ``{"client": ID}`` or ``{"prototype": K}``.
    """

    z: torch.Tensor
    origin: Mapping[str, str | int]


def check_known(tastes: str, clients: Collection[str], labelled: Collection[str]) -> None:
    """Check that there are tastes to draw from.

    Args:
        tastes: as for :func:`draw`.
        clients: those that sent a posterior.
        labelled: those that have a prototype.

    Raises:
        AlignError: no client sent a posterior, or none has a prototype.
    """
    if tastes == "prototypes" and not labelled:
        raise AlignError(
            "[align] tastes = 'prototypes': the run has no prototypes; use 'posteriors', or a run of fedvpa "
            "with prototypes = true"
        )
    if tastes == "posteriors" and not clients:
        raise AlignError(
            "[align] tastes = 'posteriors': no client sent a posterior, since all have fewer pairs than "
            "[privacy] minimum_pairs; lower it and run again"
        )


def draw(known: KnownTastes, tastes: str, key: Key) -> Drawn:
    """Draw a taste for a prompt.

    Args:
        tastes: ``"posteriors"`` draws a client uniformly, and z ~ N(μ̄, σ̄²) of that client; ``"prototypes"``
            draws a prototype in proportion to its number of clients.
        key: the key of the prompt.

    Raises:
        AlignError: as :func:`check_known`.
    """
    check_known(tastes, known.posteriors, known.labels)
    generator = key.numpy()
    if tastes == "prototypes":
        numbers = [known.labels[client] for client in sorted(known.labels)]
        number = numbers[int(generator.integers(len(numbers)))]
        return Drawn(known.prototypes[number], {"prototype": number})
    clients = sorted(known.posteriors)
    client = clients[int(generator.integers(len(clients)))]
    mean, log_variance = known.posteriors[client]
    noise = torch.from_numpy(generator.standard_normal(len(mean))).to(mean.dtype)
    return Drawn(mean + (log_variance / 2).exp() * noise, {"client": client})


def dumps_tastes(known: KnownTastes) -> bytes:
    """Format tastes as JSON; :func:`load_tastes` restores them bit for bit."""
    content = {
        "population": known.population.tolist(),
        "clients": {
            client: {"mean": mean.tolist(), "log_variance": log_variance.tolist()}
            for client, (mean, log_variance) in sorted(known.posteriors.items())
        },
        "prototypes": known.prototypes.tolist(),
        "labels": {client: known.labels[client] for client in sorted(known.labels)},
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def load_tastes(folder: Path) -> KnownTastes:
    """Read the tastes in the folder of an alignment.

    Raises:
        AlignError: the file is missing or damaged.
    """
    path = folder / KNOWN
    try:
        content = json.loads(path.read_text("utf-8"))
        population = torch.tensor(content["population"])
        return KnownTastes(
            population,
            {
                client: (torch.tensor(own["mean"]), torch.tensor(own["log_variance"]))
                for client, own in content["clients"].items()
            },
            torch.tensor(content["prototypes"]).reshape(-1, len(population)),
            {client: int(label) for client, label in content["labels"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AlignError(
            f"{path} is missing or damaged ({error}); run the stage again: --stage tastes"
        ) from error


def _keep_tastes(alignment: Alignment) -> Figures:
    assert alignment.tastes is not None
    known = alignment.tastes()
    # A posterior reveals the preferences of its client.
    files.write(alignment.folder / KNOWN, dumps_tastes(known), mode=0o600)
    return {"clients": len(known.posteriors), "prototypes": len(known.prototypes)}


STAGE = Stage("tastes", ("selectors",), lambda alignment: {}, (KNOWN,), _keep_tastes)


TASTES, LABELS, STATE, REFRESH = "tastes.jsonl", "labels.jsonl", "train.state", "refresh"


@dataclass(frozen=True)
class Generation:
    """Names of files and stages of a generation, and its key.

    Attributes:
        number: from 1; ``None`` for a single generation without tastes.
    """

    number: int | None = None

    def stage(self, name: str) -> str:
        """Return the name of a stage in this generation.

        >>> Generation().stage("labels"), Generation(2).stage("labels")
        ('labels', 'labels-2')
        """
        return name if self.number is None else f"{name}-{self.number}"

    def file(self, name: str) -> str:
        """Return the path of a file relative to the folder of the alignment.

        >>> Generation().file("labels.jsonl"), Generation(2).file("labels.jsonl")
        ('labels.jsonl', 'generations/2/labels.jsonl')
        """
        return name if self.number is None else f"generations/{self.number}/{name}"

    def path(self, alignment: Alignment, name: str) -> Path:
        """Return the path of a file."""
        return alignment.folder / self.file(name)

    def key(self, alignment: Alignment) -> Key:
        """Return the key of all random draws."""
        return alignment.key if self.number is None else alignment.key.at("generation", self.number)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The stages of earlier generations that this one depends on.

        >>> Generation(1).inputs, Generation(3).inputs
        ((), ('labels-1', 'train-2'))
        """
        return () if self.before is None else ("labels-1", self.before.stage("train"))

    @property
    def before(self) -> Generation | None:
        """The previous generation; ``None`` for the first one."""
        return Generation(self.number - 1) if self.number and self.number > 1 else None

    def scorer(self, alignment: Alignment) -> Scorer:
        """Return the labeller, with the selectors of the last refresh up to this generation."""
        return alignment.scorer(self.refreshed(alignment))

    def refreshed(self, alignment: Alignment) -> Path | None:
        """Return the folder of the last refresh up to this generation, if there is one."""
        number = 0 if self.number is None else alignment.config.refreshed(self.number)
        return Generation(number).path(alignment, REFRESH) if number else None

    def draw_tastes(
        self, alignment: Alignment, prompts: Iterable[tuple[int, int]]
    ) -> dict[int, torch.Tensor]:
        """Draw a taste for each prompt, and write :data:`TASTES`.

        Args:
            prompts: number and hash of each prompt. The taste of a prompt depends only on its hash.
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
        rows = ({"index": number, **own.origin, "z": own.z.tolist()} for number, own in drawn.items())
        files.write(path, dumps(rows), mode=0o600)
        return {number: own.z for number, own in drawn.items()}

    def tastes(self, alignment: Alignment) -> dict[int, torch.Tensor] | None:
        """Read number of a prompt → its taste; ``None`` for a policy without tastes."""
        if alignment.config.tastes is None:
            return None
        return {row["index"]: torch.tensor(row["z"]) for row in rows_in(self.path(alignment, TASTES))}


def policy_before(alignment: Alignment, generation: Generation) -> Tensors:
    """Return the policy (full layout) at the start of a generation."""
    if generation.before is None:
        return alignment.start
    path = generation.before.path(alignment, STATE)
    tensors, _, _ = read_state(path, generation.before.stage("train"))
    return tensors


def held_out(alignment: Alignment, prompts: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Draw the numbers of the held-out prompts.

    Args:
        prompts: numbers of prompts, which may repeat.
    """
    numbers, share = np.unique(np.asarray(prompts, np.int64)), alignment.config.held_out
    # With a share above 0 at least one prompt is held out, and at least one is trained on.
    count = min(max(round(share * len(numbers)), 1), len(numbers) - 1) if share else 0
    return alignment.key.at("held out").numpy().permutation(numbers)[:count]


def held_out_prompts(alignment: Alignment) -> frozenset[int]:
    """Return the held-out prompts among those with a label in the first generation."""
    rows = rows_in(Generation(1).path(alignment, LABELS))
    return frozenset(held_out(alignment, [row["index"] for row in rows]).tolist())


def at_prompts(drawn: Mapping[int, torch.Tensor] | None, prompts: Iterable[int]) -> torch.Tensor | None:
    """Stack the tastes of prompts, ``[n, d_z]``; ``None`` without tastes."""
    return None if drawn is None else torch.stack([drawn[number] for number in prompts])
