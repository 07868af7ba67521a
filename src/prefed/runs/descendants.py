"""What descends from clients that are forgotten: the plan of :mod:`prefed.runs.forget`."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from prefed.align.judge.people import files_of
from prefed.config import Experiment
from prefed.config.align import ENDPOINT, PEOPLE, SITE, judge_kind
from prefed.core import files
from prefed.runs.align import FOLDER as ALIGN
from prefed.runs.align import read_settings
from prefed.runs.exports_log import EXPORTS, read_copies
from prefed.runs.finished_run import RunError, RunRecord
from prefed.runs.pairs_from_memory import FOLDER as MEMORY
from prefed.runs.reference_cache import SHARED
from prefed.store import client_file

FORGOTTEN = "forgotten"
"""Folder of a run with the certificates, ``NAME.json`` for each client."""
STAGING = ".forgetting"
"""Suffix of the folder next to a run in which the replay is made."""
REPLAYED = (
    *("config.toml", "rounds.jsonl", "summary.json", "run.log", "checkpoint", "cache", "data"),
    *("tastes.json", "answers.jsonl", "track.json", "tensorboard", "wandb", "federation.json"),
)
"""Names in a run directory that the replay makes again, where the run has them."""
DELETED = ("merged", "report.html", "judge", "judged-test.json")
"""Names in a run directory that other commands wrote."""

Action = Literal["made again", "deleted", "kept", "not reached"]


@dataclass(frozen=True)
class Descendant:
    """Something that descends from what is forgotten.

    Attributes:
        where: a path in the run directory, or another place.
        action: what happens to it; ``"not reached"``: it must be deleted by hand.
        note: what it is, or what to do.
    """

    where: str
    action: Action
    note: str = ""
    bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """What forgetting will do.

    Attributes:
        clients: the clients; of ``--rows``, the one whose pairs are forgotten.
        digests: of the pairs, if not all of a client's are forgotten.
        pairs: numbers of training, validation and test pairs that are forgotten.
        after: the kept commit from which rounds are replayed; 0: the start.
        why: why not from a later commit; empty if from the last one that is unaffected.
        rounds: number of rounds to replay.
        similar: names that may denote the same clients.
    """

    run: str
    clients: tuple[str, ...]
    digests: tuple[str, ...]
    pairs: tuple[int, int, int]
    after: int
    why: str
    rounds: int
    guarantee: str
    descendants: tuple[Descendant, ...]
    similar: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def aligns(self) -> bool:
        """Whether the alignment of the run is made again."""
        return any(each.where == ALIGN and each.action == "made again" for each in self.descendants)


NOISED = "differential privacy only: the system drew the noise, so no two runs are equal"


def staging_of(run: Path) -> Path:
    """The folder next to a run in which the replay is made."""
    return run.with_name(run.name + STAGING)


def in_the_run(record: RunRecord, clients: Sequence[str]) -> Iterator[Descendant]:
    """What is in a run directory.

    Raises:
        RunError: it has a file that no command of prefed writes, or is a mounted folder.
    """
    run, own = record.path.resolve(), {f"client-{client_file(name)}" for name in clients}
    if run.is_mount():
        raise RunError(f"{run} is a mounted folder, which cannot be replaced; forget in the folder above")
    known = {*REPLAYED, *DELETED, "adapters", ALIGN, FORGOTTEN, EXPORTS}
    for entry in sorted(run.iterdir()):
        name, size = entry.name, files.folder_size(entry) if entry.is_dir() else entry.stat().st_size
        if name not in known:
            raise RunError(
                f"{entry} is not a file of the run, and may hold its texts: move or delete it first"
            )
        if name == "adapters":
            again = {"shared", *record.summary.get("selectors", ())}
            for folder in sorted(entry.iterdir()):
                kind: Action = "made again" if folder.name in again else "deleted"
                note = "the client's own model" if folder.name in own else ""
                note = note or ("" if kind == "made again" else "export it again: prefed export")
                yield Descendant(f"adapters/{folder.name}", kind, note, files.folder_size(folder))
        elif name == ALIGN:
            yield Descendant(ALIGN, *_alignment(record, clients), size)
            yield from _choices(record, clients)
        elif name in DELETED:
            yield Descendant(name, "deleted", "repeat the command that wrote it", size)
        else:
            yield Descendant(name, "kept" if name in (FORGOTTEN, EXPORTS) else "made again", "", size)
    for name in clients:
        for path in sorted((run / "checkpoint" / "clients").glob(f"{client_file(name)}@*")):
            yield Descendant(str(path.relative_to(run)), "deleted", "its private state", path.stat().st_size)


def _alignment(record: RunRecord, clients: Sequence[str]) -> tuple[Action, str]:
    """What happens to the alignment of a run."""
    if not (record.path / ALIGN / "summary.json").exists():
        return "deleted", "it was not finished"
    try:
        config = read_settings(record)
    except ValueError as error:
        return "deleted", f"it cannot be repeated: {error}"
    if {config.taste, config.judge and config.judge.taste} & {*clients}:
        return "deleted", "it used the client's taste"
    if PEOPLE in config.judge_kinds:
        return "deleted", "people judge other completions without the client: repeat it with prefed align"
    if config.client_judge == SITE:
        return "deleted", "sites judge other completions without the client: repeat it with prefed align"
    if config.endpoint is not None or ENDPOINT in config.judge_kinds:
        return "deleted", "a server's answers are not reproducible: repeat it with prefed align"
    return "made again", ""


def _choices(record: RunRecord, clients: Sequence[str]) -> Iterator[Descendant]:
    """What the clients were asked and chose in the folder of a judge ``people:FOLDER``."""
    try:
        judges = read_settings(record).judges.values()
    except ValueError:
        return
    for judge in (name for name in judges if judge_kind(name) == PEOPLE):
        for path in (file for name in clients for file in files_of(judge.partition(":")[2], name)):
            if path.exists():
                yield Descendant(str(path.resolve()), "not reached", "completions, and what the client chose")


def in_the_sources(run: Path, experiment: Experiment) -> Iterator[Descendant]:
    """The sources of a run's pairs, and what is shared with other runs that read them."""
    for place in dict.fromkeys(source.path for _, _, source in experiment.data.sources()):
        if not is_in_memory(run, place):
            yield Descendant(place, "not reached", "the rows in the source; you may delete them")
    if shared := os.environ.get(SHARED):
        yield Descendant(shared, "not reached", f"numbers of the base model for its pairs ({SHARED})")


def elsewhere(run: Path) -> Iterator[Descendant]:
    """Copies and descendants outside the run directory, as far as they are known."""
    yield from _of_run(run.resolve(), {run.resolve()})
    tracked = run / "track.json"
    for tool, state in json.loads(tracked.read_text("utf-8")).items() if tracked.exists() else ():
        yield Descendant(f"{tool} run {state.get('known')}", "not reached", "logged metrics")
    for near in sorted(run.parent.glob(f"{glob.escape(run.name)}.*")):
        if near.is_file():
            yield Descendant(str(near), "not reached", "a file next to the run")
    tables = (run.parent, *(folder / "leaderboard" for folder in run.parents[:2]))
    for table in (path.with_name(path.name + suffix) for path in tables for suffix in (".json", ".md")):
        if table.is_file():
            yield Descendant(str(table), "not reached", "may have a row of this run: repeat prefed sweep")


def _of_run(run: Path, known: set[Path]) -> Iterator[Descendant]:
    """What a run's :data:`EXPORTS` names, the runs next to it whose settings name it, and all of those."""
    copies = {row["to"]: row for row in read_copies(run) if not Path(row["to"]).is_relative_to(run)}
    for place, row in copies.items():
        yield Descendant(place, "not reached", f"{row['what']} of {row['at'][:10]}")
    for near in sorted(run.parent.iterdir()):
        config = near / "config.toml"
        if near in known or near == staging_of(run) or not os.access(config, os.R_OK):
            continue
        text = config.read_text("utf-8", "replace")
        if any(f"{place}{end}" in text for place in (run, *copies) for end in '"/'):
            known.add(near)
            yield Descendant(str(near), "not reached", f"its settings name {run.name}: start it again")
            yield from _of_run(near, known)


def is_in_memory(run: Path, place: str) -> bool:
    """Whether a source is a copy in the run directory of pairs that were passed from Python."""
    path = Path(place)
    return (run / MEMORY / path.name).exists() and path.parent.name == MEMORY
