"""Clients' votes on completions under ``[privacy] kind``: the server learns only their sum, with noise."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prefed.align import AlignError, Clients
from prefed.align.stages import append
from prefed.config.align import CLIENTS
from prefed.core import Callback, files
from prefed.data import Record
from prefed.data.record import plain_prompt
from prefed.engines.privacy import guarantee
from prefed.runs.loaded_run import LoadedRun

ATTEMPTS = 3
"""How often clients are asked for one sum before an alignment stops."""


@dataclass(frozen=True)
class NoisedVotes:
    """Labels pairs with the sum of clients' votes, with noise.

    The file has each request before it is made, which counts as a release, and its answer before that is
    used. So a repeated request gets the same answer.

    Attributes:
        run: the run, whose noise multiplier and ε these are.
        path: the file.
    """

    run: LoadedRun
    clients: Clients
    path: Path
    callback: Callback

    def scores(
        self, pairs: Sequence[Record], tastes: torch.Tensor | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the noised sum on all pairs over the number of clients, ``[1, n]``.

        Raises:
            AlignError: there is no sum.
        """
        rows = [[plain_prompt(each.prompt), each.chosen, each.rejected, dict(each.extra)] for each in pairs]
        about = [self.run.job.privacy.model_dump(), self.clients.identity, rows]
        # Noise of other votes must be another one.
        request = sha256(json.dumps(about).encode()).hexdigest()
        known = [row["sum"] for row in _rows(self.path) if row["request"] == request and "sum" in row]
        total = known[0] if known else self._ask(pairs, request)
        return np.arange(len(pairs)), np.array([total]) / len(self.clients.names)

    def _ask(self, pairs: Sequence[Record], request: str) -> list[int]:
        rows = [row for row in _rows(self.path) if "number" in row]
        number = max((row["number"] for row in rows if row["request"] == request), default=0)
        for _ in range(ATTEMPTS):
            if not number:
                number = len(rows) + 1
                rows.append({"request": request, "number": number})
                append(self.path, rows[-1:], mode=0o600)
            found = self.clients.noised(pairs, request, number)
            if found is not None:
                total: list[int] = found.tolist()
                append(self.path, [{"request": request, "sum": total}], mode=0o600)
                self._report(len(pairs))
                return total
            number = 0
        raise AlignError(
            f"no sum of votes in {ATTEMPTS} requests, each a release: the warnings above say why; then "
            "continue with --resume"
        )

    def _report(self, pairs: int) -> None:
        clients, noise = len(self.clients.names), self.clients.noise(pairs)
        epsilon = spent(self.run, self.path)["epsilon"]
        total = "no epsilon" if epsilon is None else f"epsilon is now {epsilon:.3g}"
        text = f"votes of {clients:,} clients on {pairs:,} pairs have noise {noise:.3g} on each sum; {total}"
        if noise <= clients:
            self.callback.on_note(text)
            return
        self.callback.on_warning(
            f"{text}. The noise exceeds the largest possible sum, so most labels are random: use fewer "
            "prompts or completions, or more clients"
        )


def spent(run: LoadedRun, path: Path) -> Mapping[str, Any]:
    """The entry ``privacy`` of the run's ``summary.json``, with the releases of votes in its ε.

    Args:
        path: the file of :class:`NoisedVotes`.

    Raises:
        AlignError: the file is damaged, or has fewer sums than labels were made from.
    """
    before: Mapping[str, Any] = run.record.summary["privacy"]
    votes = sum("number" in row for row in _rows(path))
    stages = [json.loads(stage.read_text("utf-8")) for stage in path.parent.glob("stages/labels*.json")]
    if votes < sum(stage["settings"]["labels"] == CLIENTS for stage in stages):
        raise AlignError(
            f"{path} lacks sums of votes that labels were made from, so what they have spent is unknown: "
            "restore a copy"
        )
    epsilon = guarantee(run.job).epsilon(before["releases"], before["delta"] or 0.0, votes)
    return {**before, "epsilon": epsilon, "votes": votes, "epsilon_without_votes": before["epsilon"]}


def _rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith(b"\n"):
        # A killed process left half a row, on which nothing was done.
        files.truncate(path, sum(map(len, lines[:-1])))
        del lines[-1]
    try:
        return [files.loads_with_digest(line) for line in lines]
    except files.DamagedError as error:
        raise AlignError(
            f"{path} is damaged: {error}; without it, what votes have spent is unknown: restore a copy"
        ) from error
