"""The log of all that a site was asked for and sent, on the disk before the answer leaves, and its status."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefed.core import files
from prefed.core.text import pluralize, printable, size
from prefed.core.wire import WireError, outline_upload
from prefed.networks.federation.config import SiteConfig
from prefed.networks.federation.messages import is_run
from prefed.networks.federation.privacy_ledger import Releases, epsilon_of
from prefed.privacy.accountant import AccountantError


class SentLog:
    """A site's log, a file for each month.

    Args:
        folder: only for its owner.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        files.private_folder(folder)

    def add(self, what: str, **fields: Any) -> None:
        """Write a line; fields that are empty are left out."""
        now = datetime.now(UTC)
        entry = {"time": now.isoformat(timespec="seconds"), "what": what}
        entry |= {name: value for name, value in fields.items() if value not in (None, "", 0, {}, [])}
        # Half of a surrogate pair, which the hub may send, is written as JSON's own escape.
        line = json.dumps(entry, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        path = self._folder / f"{now:%Y-%m}.jsonl"
        # On a full disk a line may have been cut off: the next one begins after it.
        files.append(path, line if _is_whole(path) else b"\n" + line, mode=0o600)

    def entries(self) -> Iterator[dict[str, Any]]:
        """All entries, from the first. A line that was cut off is left out."""
        for path in sorted(self._folder.glob("*.jsonl")):
            for line in path.read_bytes().splitlines():
                try:
                    yield json.loads(line)
                except ValueError:
                    continue


def _is_whole(path: Path) -> bool:
    """Whether a file is absent, empty, or ends with a line's end."""
    if not path.exists() or not path.stat().st_size:
        return True
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read() == b"\n"


def contents(kind: str, message: bytes) -> dict[str, Any]:
    """What a message to the hub holds, for the log: the numbers in it, and how many are in tensors."""
    if not message:
        return {}
    if kind == "evaluate":
        return {"figures": json.loads(message)}
    try:
        numbers, weight, scalars = outline_upload(message)
    except WireError as error:
        return {"unreadable": str(error)}
    return {"tensors": numbers, "weight": weight, "scalars": scalars}


def line_of(entry: dict[str, Any]) -> str:
    """An entry for a person.

    >>> line_of({"time": "2026-11-22T10:40:12+00:00", "what": "train", "run": "3fa9b2c4d5e6f708", "round": 3,
    ...          "client": "ward-7", "bytes": 1290240, "tensors": {"model": 321000}, "weight": 41.0})
    '2026-11-22 10:40:12  run 3fa9b2c4  round 3  train  ward-7  1.3 MB: model 321,000 numbers, weight 41'
    """
    words = [entry["time"][:19].replace("T", " ")]
    words += [f"run {entry['run'][:8]}"] if "run" in entry else []
    words += [f"round {entry['round']}"] if "round" in entry else []
    words += [entry["what"], *([entry["client"]] if "client" in entry else [])]
    told = [f"{name} {count:,} numbers" for name, count in entry.get("tensors", {}).items()]
    told += [f"weight {entry['weight']:g}"] if "weight" in entry else []
    figures = {**entry.get("scalars", {}), **entry.get("figures", {})}
    told += [f"{name} {value:.4g}" for name, value in figures.items()]
    told += [
        f"{key}: {entry[key]}" for key in ("refused", "withheld", "failed", "told", "noted") if key in entry
    ]
    if "bytes" in entry:
        words.append(size(entry["bytes"]))
    return printable("  ".join(words) + (f": {', '.join(told)}" if told else ""))


def status_lines(config: SiteConfig, last: int) -> Iterator[str]:
    """The site's limits, its runs, and the last entries of its log.

    Args:
        last: so many entries.
    """
    limits, tell = config.limits, config.tell
    yield f"site {config.name} of {config.federation}, state in {config.state}"
    methods, exchanges = (", ".join(names or ["all"]) for names in (limits.methods, limits.exchanges))
    yield f"  methods: {methods}; exchanges: {exchanges}"
    yield (
        f"  rounds: {limits.rounds} at most; cohort: {limits.minimum_cohort} at least; minimum_pairs: "
        f"{limits.minimum_pairs} at least; evaluation: {'yes' if limits.evaluate else 'no'}"
    )
    asked = [f"[privacy] kind {limits.privacy}"] if limits.privacy else []
    asked += [f"noise_multiplier {limits.noise_multiplier:g} at least"] if limits.noise_multiplier else []
    asked += [f"epsilon {limits.epsilon:g} at most at delta {limits.delta:g}"] if limits.epsilon else []
    yield f"  noise: {', '.join(asked) or 'any, or none'}"
    yield from _spent(config)
    if tell.pairs:
        yield f"  the hub gets {'names' if tell.names else 'made-up names'} and numbers of pairs"
    else:
        yield "  [tell] pairs = false: this site takes part in no run"
    yield from (f"  {own} is {told} to the hub" for own, told in sorted(_made_up(config)))
    entries = list(SentLog(Path(config.state) / "log").entries())
    messages, sent, rounds = Counter[str](), Counter[str](), dict[str, int]()
    for entry in entries:
        run = entry.get("run")
        # What is refused may name anything as its run.
        if not (isinstance(run, str) and is_run(run)):
            continue
        messages[run] += "bytes" in entry
        if "bytes" in entry:
            sent[run] += entry["bytes"]
            rounds[run] = max(rounds.get(run, 0), entry.get("round", 0))
    idle = 0
    for run in messages:
        states = Path(config.state) / "runs" / run / "clients"
        kept = files.folder_size(states) if states.is_dir() else 0
        if not (messages[run] or kept):
            idle += 1
            continue
        count = pluralize(messages[run], "message", "messages")
        yield (
            f"run {run}: up to round {rounds.get(run, 0)}; sent {count}, {size(sent[run])}; "
            f"private states: {size(kept) if kept else 'none'}"
        )
    if refused := sum("refused" in entry for entry in entries):
        yield f"{pluralize(refused, 'request', 'requests')} refused"
    if idle:
        yield f"{pluralize(idle, 'run', 'runs')} in which nothing was sent"
    yield from (line_of(entry) for entry in entries[len(entries) - last :] if last)


def _made_up(config: SiteConfig) -> set[tuple[str, str]]:
    """Each client's own name with the one that this site made up for it, of all runs that it knows."""
    found = set[tuple[str, str]]()
    for path in (Path(config.state) / "runs").glob("*/order.json"):
        with suppress(files.DamagedError):
            names = files.loads_with_digest(path.read_bytes()).get("names", {})
            found |= {(printable(own), told) for own, told in names.items() if own != told}
    return found


def _spent(config: SiteConfig) -> Iterator[str]:
    """What each client has given away under local noise, in all runs."""
    delta = config.limits.delta
    for client, spent in sorted(Releases(Path(config.state)).spent().items()):
        name = printable(client)
        try:
            yield f"  {name}: epsilon {epsilon_of(spent, delta):.3g} at delta {delta:g}, in all runs so far"
        except AccountantError as error:
            yield f"  {name}: {error}"
