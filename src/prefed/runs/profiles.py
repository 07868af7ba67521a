"""Figures of each block from clients' private states: they show which layers each client personalises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Profile", "profiles_of"]

MEANINGS: Mapping[str, tuple[str, str]] = {
    "gate": (
        "gates",
        "how much of its own LoRA a client lets in beside the shared one, block by block: "
        "0 is the shared model alone, 1 all of its own",
    ),
    "weight": (
        "weights of the shared model",
        "how much of the shared model a client takes in, block by block: 1 is all of it, 0 none",
    ),
}
"""Figure → its heading and its meaning. Other figures have their name as heading and meaning."""


@dataclass(frozen=True)
class Profile:
    """One figure of every block, for the clients that took part.

    Attributes:
        name: as in ``summary.json``.
        label: heading of its plot or table.
        meaning: one sentence.
        clients: sorted.
        blocks: numbers of the blocks, ascending.
        values: ``[clients, blocks]``, NaN where a client has no value.
    """

    name: str
    label: str
    meaning: str
    clients: tuple[str, ...]
    blocks: tuple[int, ...]
    values: npt.NDArray[np.float64]

    @cached_property
    def means(self) -> npt.NDArray[np.float64]:
        """``[blocks]`` mean over the clients that have a value."""
        means: npt.NDArray[np.float64] = np.nanmean(self.values, axis=0)
        return means

    @property
    def ends(self) -> str:
        """The means of the first and the last block, in words."""
        first, last = self.blocks[0], self.blocks[-1]
        if first == last:
            return f"{self.means[0]:.2f} in block {first}"
        return f"{self.means[0]:.2f} in block {first}, {self.means[-1]:.2f} in block {last}"


def profiles_of(summary: Mapping[str, Any]) -> dict[str, Profile]:
    """The profiles in a ``summary.json``, by name.

    >>> personal = {"gate": {"bob": {"0": 0.5, "1": 0.25}, "ann": {"0": 0.75, "1": 0.5}}}
    >>> gates = profiles_of({"personal": personal})["gate"]
    >>> gates.clients, gates.values[0].tolist(), gates.ends
    (('ann', 'bob'), [0.75, 0.5], '0.62 in block 0, 0.38 in block 1')
    """
    profiles = {}
    for name, by_client in summary.get("personal", {}).items():
        clients = tuple(sorted(client for client, values in by_client.items() if values))
        blocks = sorted({int(block) for client in clients for block in by_client[client]})
        if not blocks:
            continue
        rows = [[by_client[client].get(str(block), np.nan) for block in blocks] for client in clients]
        label, meaning = MEANINGS.get(name, (name.replace("_", " "), name.replace("_", " ")))
        profiles[name] = Profile(
            name, label, meaning, clients, tuple(blocks), np.array(rows, dtype=np.float64)
        )
    return profiles
