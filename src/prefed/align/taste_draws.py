"""Stage ``tastes``, and a taste for each prompt: of what clients told the server, and of nothing else."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from prefed.align.alignment import Alignment, KnownTastes
from prefed.align.errors import AlignError
from prefed.align.stages import Figures, Stage
from prefed.core import Key, files

FILE = "tastes.json"


@dataclass(frozen=True)
class Drawn:
    """The taste with which a prompt is completed, and its completions are labelled.

    Attributes:
        z: ``[d_z]``.
        origin: ``{"client": ID}`` or ``{"prototype": K}``, from which it was drawn.
    """

    z: torch.Tensor
    origin: Mapping[str, str | int] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**self.origin, "z": self.z.tolist()}


def parse_drawn(row: Mapping[str, Any]) -> Drawn:
    """The taste that :meth:`Drawn.plain` made a row of."""
    return Drawn(torch.tensor(row["z"]), {name: row[name] for name in ("client", "prototype") if name in row})


def check_told(tastes: str, clients: Collection[str], labelled: Collection[str]) -> None:
    """Refuse tastes to draw from of which there are none.

    Args:
        tastes: as :func:`draw` takes it.
        clients: those that tell the server a posterior.
        labelled: those that have a prototype.

    Raises:
        AlignError: no client told a posterior, or none has a prototype.
    """
    if tastes == "prototypes" and not labelled:
        raise AlignError(
            "[align] tastes = 'prototypes': the run has none; take 'posteriors', or a run of fedvpa with "
            "prototypes = true"
        )
    if tastes == "posteriors" and not clients:
        raise AlignError(
            "[align] tastes = 'posteriors': no client told the server of its taste; each has fewer "
            "pairs than [privacy] minimum_pairs"
        )


def draw(known: KnownTastes, tastes: str, key: Key) -> Drawn:
    """A taste for a prompt.

    Args:
        tastes: ``"posteriors"`` takes any client with equal probability, and z ~ N(μ̄, σ̄²) of that client;
            ``"prototypes"`` takes a prototype, each as often as clients have it.
        key: the randomness of the prompt.

    Raises:
        AlignError: see :func:`check_told`.
    """
    check_told(tastes, known.posteriors, known.labels)
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


def dumps(known: KnownTastes) -> bytes:
    """The tastes as a JSON file has them; :func:`load_tastes` gives them back to the bit."""
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
    """The tastes that the stage left in an alignment's folder.

    Raises:
        AlignError: the file is missing or damaged.
    """
    path = folder / FILE
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
            f"{path} is missing or damaged ({error}); do the stage again: --stage tastes"
        ) from error


def _work(alignment: Alignment) -> Figures:
    assert alignment.tastes is not None
    known = alignment.tastes()
    # Whoever may read a posterior can judge as its client would.
    files.write(alignment.folder / FILE, dumps(known), mode=0o600)
    return {"clients": len(known.posteriors), "prototypes": len(known.prototypes)}


STAGE = Stage("tastes", ("selectors",), lambda alignment: {}, (FILE,), _work)
