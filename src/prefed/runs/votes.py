"""Clients' votes on completions under ``[privacy] kind``: the server learns only their sum, with noise."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prefed.align import Clients
from prefed.align.stages import append, rows_in, whole_batches
from prefed.core import Callback, Key
from prefed.data import Record
from prefed.data.record import plain_prompt
from prefed.engines.privacy import guarantee
from prefed.privacy import noised_votes, vote_noise
from prefed.runs.loaded_run import LoadedRun


@dataclass(frozen=True)
class NoisedVotes:
    """Labels pairs with the sum of clients' votes, with noise.

    Each answer is stored before it is used. So a repeated request gets the same one, and the number of stored
    answers is that of the releases.

    Attributes:
        run: the run, whose noise multiplier and ε these are.
        path: the file of answers.
    """

    run: LoadedRun
    clients: Clients
    path: Path
    callback: Callback

    def scores(
        self, pairs: Sequence[Record], tastes: torch.Tensor | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the noised sum on all pairs over the number of clients, ``[1, n]``."""
        privacy, clients = self.run.job.privacy, len(self.clients.names)
        rows = [[plain_prompt(each.prompt), each.chosen, each.rejected, dict(each.extra)] for each in pairs]
        about = [privacy.model_dump(), self.clients.identity, rows]
        # Noise of other votes must be another one.
        request = sha256(json.dumps(about).encode()).hexdigest()
        answers = _answers(self.path)
        if request not in answers:
            key = Key(self.run.experiment.seed).at("align").at("votes", request)
            own = None if privacy.draws == "system" else key
            answers[request] = noised_votes(self.clients.votes.scores(pairs)[1], privacy, own).tolist()
            append(self.path, [{"request": request, "sum": answers[request]}], mode=0o600)
            self._report(clients, len(pairs))
        return np.arange(len(pairs)), np.array([answers[request]]) / clients

    def _report(self, clients: int, pairs: int) -> None:
        noise = vote_noise(self.run.job.privacy, clients, pairs)
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
    """
    before: Mapping[str, Any] = run.record.summary["privacy"]
    votes = len(_answers(path))
    epsilon = guarantee(run.job).epsilon(before["releases"], before["delta"] or 0.0, votes)
    return {**before, "epsilon": epsilon, "votes": votes, "epsilon_without_votes": before["epsilon"]}


def _answers(path: Path) -> dict[str, list[int]]:
    # A killed process may have left half an answer, which nobody used.
    whole_batches(path, repeat(1))
    return {row["request"]: row["sum"] for row in rows_in(path)} if path.exists() else {}
