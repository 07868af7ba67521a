"""Clients at a site that judge completions of the hub: what is sent, and who votes how.

A request has pairs of completions as JSON, and its answer one signed byte for each: 1 if the client prefers
the first, −1 the second, and 0 for a tie or without a verdict.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from prefed.align.judge.local import MEAN
from prefed.align.judge.names import ALIKE
from prefed.align.judge.people import WaitingError
from prefed.align.refresh import HELD_OUT, PAIRS, pair_row
from prefed.config.align import judge_kind
from prefed.core import files
from prefed.data import FederatedDataset, Message, Record
from prefed.data.record import plain_prompt
from prefed.networks.federation.config import SiteConfig, SiteJudge
from prefed.networks.federation.messages import what_is_wrong
from prefed.networks.federation.site_limits import RefusalError
from prefed.runs.labels import ClientVotes, JudgeLabels, judge_over
from prefed.runs.refresh import BY_CLIENT
from prefed.store import client_file

LONGEST_TEXT = 100_000
"""Maximum characters of a prompt's turn, a completion or a further column."""
MOST_COLUMNS = 64

_Text = Annotated[str, Field(max_length=LONGEST_TEXT)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Turn(_Part):
    role: Literal["system", "user", "assistant"]
    content: _Text


class _Pair(_Part):
    prompt: _Text | list[_Turn]
    first: _Text
    second: _Text
    extra: dict[_Text, _Text | int | float] = Field(max_length=MOST_COLUMNS)


_PAIRS = TypeAdapter(Annotated[list[_Pair], Field(min_length=1)])


def write_pairs(pairs: Sequence[Record]) -> bytes:
    """Encode pairs of completions for the sites."""
    rows = [
        {
            "prompt": plain_prompt(pair.prompt),
            "first": pair.chosen,
            "second": pair.rejected,
            "extra": dict(pair.extra),
        }
        for pair in pairs
    ]
    return json.dumps(rows, separators=(",", ":")).encode()


def read_pairs(body: bytes) -> list[Record]:
    """Decode what the hub sent.

    Raises:
        RefusalError: these are no pairs of texts, or a text is too long.
    """
    try:
        rows = _PAIRS.validate_json(body)
    except ValidationError as error:
        raise RefusalError(f"invalid pairs of completions: {what_is_wrong(error)}") from None
    found = list[Record]()
    for number, row in enumerate(rows, 1):
        turns = row.prompt
        prompt = turns if isinstance(turns, str) else tuple(Message(t.role, t.content) for t in turns)
        try:
            found.append(Record(prompt, row.first, row.second, extra=row.extra))
        except ValueError as error:
            raise RefusalError(f"invalid pair of completions {number}: {error}") from None
    return found


def read_votes(message: bytes, pairs: int) -> NDArray[np.float32]:
    """Decode a client's votes, ``[pairs]``.

    Raises:
        ValueError: there are more or fewer, or one is not 1, 0 or −1.
    """
    votes = np.frombuffer(message, np.int8)
    if len(votes) != pairs:
        raise ValueError(f"{len(votes):,} votes on {pairs:,} pairs")
    if np.abs(votes.astype(np.int64)).max(initial=0) > 1:
        raise ValueError("a vote is not 1, 0 or -1")
    return votes.astype(np.float32)


class SiteJudges:
    """Lets the clients of a site vote, in the training process.

    Args:
        dataset: the pairs of the site, with its own names of clients.
        names: client → the name that the hub knows.
        run: the folder of the run.
    """

    def __init__(
        self, judge: SiteJudge, dataset: FederatedDataset, names: Mapping[str, str], run: Path
    ) -> None:
        self._judge, self._dataset, self._run = judge, dataset, run
        self._own = {reported: own for own, reported in names.items()}
        self._made = dict[str, JudgeLabels]()

    def __call__(self, client: str, message: bytes) -> tuple[bytes, str]:
        """Return a client's votes on pairs; or whom to ask first, if people judge and have not yet.

        Raises:
            JudgeError, ModelError, RunError: as :func:`prefed.runs.labels.judge_over`.
        """
        taste = MEAN if judge_kind(self._judge.name) in ALIKE else self._own[client]
        if taste not in self._made:
            options = self._judge.model_copy(update={"taste": taste})
            self._made[taste] = JudgeLabels(judge_over(self._judge.name, options, self._dataset, self._run))
        try:
            _, votes = ClientVotes([self._made[taste]]).scores(read_pairs(message))
        except WaitingError as error:
            return b"", str(error)
        return votes[0].astype(np.int8).tobytes(), ""


def keep_pairs(
    run: Path, refreshes: Sequence[int], own: str, pairs: Sequence[Record], votes: Sequence[int]
) -> int:
    """Write what a client prefers, for the last refresh; return the number of pairs in all of them.

    Args:
        run: the folder of the run at the site.
        own: the client's name at the site.
    """
    rows = (
        pair_row(own, pair if vote > 0 else pair.swapped())
        for pair, vote in zip(pairs, votes, strict=True)
        if vote
    )
    path = _judged(run, refreshes[-1], own)
    files.private_folder(path.parent.parent)
    files.private_folder(path.parent)
    files.write(path, b"".join(_line(row) for row in rows), mode=0o600)
    return len(list(_lines(run, refreshes, [own])))


def write_judged(
    run: Path, refreshes: Sequence[int], dataset: FederatedDataset, split: str, folder: Path
) -> None:
    """Write the pairs of a refresh, and those that its clients are evaluated on.

    Args:
        run: the folder of the run whose policy was judged.
        dataset: its data.
        split: of the pairs to evaluate on.
        folder: of the refresh.

    Raises:
        RefusalError: no client of this site judged in these refreshes.
    """
    lines = list(_lines(run, refreshes, dataset.clients))
    if not lines:
        raise RefusalError("no client of this site prefers a completion in these refreshes")
    judging = {json.loads(line)["client"] for line in lines}
    held_out = (
        pair_row(client, dataset.tokens.record(row))
        for client in sorted(judging)
        for row in getattr(dataset.clients[client], split)
    )
    files.private_folder(folder)
    files.write(folder / PAIRS, b"".join(lines), mode=0o600)
    files.write(folder / HELD_OUT, b"".join(map(_line, held_out)), mode=0o600)


def config_of(config: SiteConfig, order: Mapping[str, Any], folder: Path) -> SiteConfig:
    """The settings of a site for a run; the data of a refresh are what its clients judged.

    Args:
        order: the site's record of the run.
        folder: of the run.
    """
    if not order.get("judged"):
        return config
    test = {"test": str(folder / HELD_OUT)} if (folder / HELD_OUT).stat().st_size else {}
    data = {"train": str(folder / PAIRS), **test, "partition": BY_CLIENT}
    return config.model_copy(update={"data": data})


def _judged(run: Path, refresh: int, own: str) -> Path:
    return run / "judged" / str(refresh) / f"{client_file(own)}.jsonl"


def _lines(run: Path, refreshes: Sequence[int], clients: Iterable[str]) -> Iterator[bytes]:
    """Yield the rows of all refreshes, for each client in their order."""
    for own in sorted(clients):
        for path in (_judged(run, refresh, own) for refresh in refreshes):
            if path.exists():
                yield from path.read_bytes().splitlines(keepends=True)


def _line(row: Mapping[str, Any]) -> bytes:
    # Escapes keep control characters out of the file.
    return json.dumps(row).encode() + b"\n"


class Votes:
    """A client's votes in a run, by request, so that a repeated request gets the same answer.

    Args:
        folder: of the run at the site.

    Raises:
        RefusalError: the client voted with another judge before.
    """

    def __init__(self, folder: Path, client: str, judge: SiteJudge) -> None:
        self._path = folder / "votes" / f"{client_file(client)}.json"
        self._judge = files.digest(judge.model_dump_json().encode())
        kept: dict[str, Any] = {"judge": self._judge, "votes": {}}
        if self._path.exists():
            kept = files.loads_with_digest(self._path.read_bytes())
        if kept["judge"] != self._judge:
            raise RefusalError("[judge] of this site changed since the run's first votes: restore it")
        self.given: dict[str, list[int]] = kept["votes"]

    @property
    def count(self) -> int:
        """The number of pairs with a vote."""
        return sum(map(len, self.given.values()))

    def keep(self, request: str, votes: bytes) -> None:
        """Store the votes of a request."""
        self.given[request] = np.frombuffer(votes, np.int8).tolist()
        content = files.dumps_with_digest({"judge": self._judge, "votes": self.given})
        files.private_folder(self._path.parent)
        files.write(self._path, content, mode=0o600)
