"""The audit log of a site: every request and what was sent, written before the answer leaves."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from prefed.core import files
from prefed.core.text import pluralize, printable, size
from prefed.core.wire import WireError, outline_upload
from prefed.networks.federation.config import SiteConfig
from prefed.networks.federation.messages import is_run
from prefed.networks.federation.privacy_ledger import Releases, epsilon_of
from prefed.networks.federation.versions import own_version
from prefed.privacy.accountant import AccountantError
from prefed.privacy.secure import SecureError
from prefed.runs.finished_run import ANSWERS, SITE_TEXT
from prefed.store.directory import at_work
from prefed.train.metrics import health_sentence


class SentLog:
    """The audit log of a site, one file per month.

    Each line has its number, and the SHA-256 of the line before it, so that a change is found. Lines that an
    earlier version of prefed wrote have neither.

    Args:
        folder: created with access for its owner only.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        files.private_folder(folder)

    @classmethod
    def of(cls, config: SiteConfig) -> SentLog:
        """The log of a site."""
        return cls(Path(config.state) / "log")

    def add(self, what: str, **fields: Any) -> str:
        """Append an entry; return the SHA-256 of its line. Empty fields are left out."""
        now = datetime.now(UTC)
        entry: dict[str, Any] = {"time": now.isoformat(timespec="seconds"), "what": what}
        entry |= {name: value for name, value in fields.items() if value not in (None, "", 0, {}, [])}
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            # The site and its administrator's commands may write at once.
            fcntl.flock(handle, fcntl.LOCK_EX)
            last, numbered, cut = b"", 0, False
            for at_end, line in self._backwards():
                last, cut = (last, cut) if last else (line, not at_end)
                if numbered := _parsed(line).get("number", 0):
                    break
            entry |= {"number": numbered + 1, "before": _sha256(last)}
            # The hub may send lone surrogates: they are written as JSON escapes.
            text = json.dumps(entry, ensure_ascii=False).encode(errors="backslashreplace")
            # If the clock was set back, the entry still follows the last one.
            path = max([self._folder / f"{now:%Y-%m}.jsonl", *self._folder.glob("*.jsonl")])
            # A line may have been cut off on a full disk: the next entry starts a new one.
            files.append(path, (b"\n" if cut else b"") + text + b"\n", mode=0o600)
        finally:
            os.close(handle)
        return _sha256(text)

    def lines(self) -> Iterator[tuple[str, bytes]]:
        """Yield the place and the bytes of each line, oldest first."""
        for path in sorted(self._folder.glob("*.jsonl")):
            for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
                if line:
                    yield f"{path}, line {number}", line

    def _backwards(self) -> Iterator[tuple[bool, bytes]]:
        """Yield each line, newest first, and whether a newline ends it."""
        for path in sorted(self._folder.glob("*.jsonl"), reverse=True):
            if not path.stat().st_size:
                continue
            with path.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as text:
                end = len(text)
                while end > 0:
                    start = text.rfind(b"\n", 0, end) + 1
                    if start < end:
                        yield end < len(text), text[start:end]
                    end = start - 1

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield all entries, oldest first. Truncated lines are skipped."""
        return filter(None, (_parsed(line) for _, line in self.lines()))


def _parsed(line: bytes) -> dict[str, Any]:
    """The entry of a line; empty if it was cut off."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _sha256(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


@dataclass
class Chain:
    """What a check of a log found.

    Attributes:
        lines: number of lines, with those from before the chain.
        older: number of lines from before the chain, which nothing protects.
        start: place of the first line of the chain.
        head: SHA-256 of the last line.
        faults: altered, missing and reordered lines, each with its place.
        cut: places of lines that were cut off while they were written.
    """

    lines: int = 0
    older: int = 0
    start: str = ""
    head: str = ""
    faults: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)


def check_chain(log: SentLog, known: str | None = None) -> Chain:
    """Check that no line of a log was altered, removed or moved.

    Args:
        known: SHA-256 of a line that the log had earlier. Only this reveals that the last lines were removed,
            or that all lines after a change were written again.
    """
    chain, number, before, last = Chain(), 1, _sha256(b""), ""
    hashes = set[str]()
    for place, line in log.lines():
        entry = _parsed(line)
        if not entry:
            chain.cut.append(place)
        elif "number" not in entry and not chain.start:
            chain.older += 1
        else:
            found = entry.get("number")
            first = not chain.start
            chain.start = chain.start or place
            if not isinstance(found, int):
                chain.faults.append(f"{place}: has no number, although the lines above have")
                found = number - 1
            elif found > number:
                missing = f"line {number}" if found == number + 1 else f"lines {number} to {found - 1}"
                chain.faults.append(f"{place}: {missing} of the log missing above")
            elif found < number:
                chain.faults.append(f"{place}: line {found} of the log is repeated or out of order")
            elif entry.get("before") != before:
                where = last if last else "the line above"
                chain.faults.append(f"{place}: {where} was altered" if not first else f"{place}: was altered")
            number = found + 1
        chain.lines += 1
        before, last = _sha256(line), place
        hashes.add(before)
    chain.head = before
    if known is not None and known not in hashes:
        chain.faults.append(f"no line has the SHA-256 {known}: lines were removed or written again")
    return chain


def evidence(config: SiteConfig, chain: Chain) -> dict[str, Any]:
    """The whole log and its check, for an auditor: the SHA-256 of each line is in the next one."""
    log = SentLog.of(config)
    return {
        "federation": config.federation,
        "site": config.name,
        "prefed": own_version("prefed"),
        "exported": datetime.now(UTC).isoformat(timespec="seconds"),
        **asdict(chain),
        "log": [line.decode(errors="backslashreplace") for _, line in log.lines()],
    }


def contents(kind: str, message: bytes) -> dict[str, Any]:
    """Summarise a message to the hub for the log: its scalars, and the size of each group of tensors."""
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
    """Format an entry as one line.

    >>> line_of({"time": "2026-11-22T10:40:12+00:00", "what": "train", "run": "3fa9b2c4d5e6f708", "round": 3,
    ...          "client": "ward-7", "bytes": 1290240, "tensors": {"model": 321000}, "weight": 41.0})
    '2026-11-22 10:40:12  run 3fa9b2c4  round 3  train  ward-7  1.3 MB: model 321,000 numbers, weight 41'
    """
    words = [entry["time"][:19].replace("T", " ")]
    words += [f"run {entry['run'][:8]}"] if "run" in entry else []
    words += [f"round {entry['round']}"] if "round" in entry else []
    words += [entry["what"], *([entry["client"]] if "client" in entry else [])]
    details = [f"{name} {count:,} numbers" for name, count in entry.get("tensors", {}).items()]
    details += [f"weight {entry['weight']:g}"] if "weight" in entry else []
    details += [pluralize(len(entry["votes"]), "vote", "votes")] if "votes" in entry else []
    metrics = {**entry.get("scalars", {}), **entry.get("figures", {})}
    details += [f"{name} {value:.4g}" for name, value in metrics.items()]
    labels = {"refused": "refused", "withheld": "withheld", "failed": "failed"}
    labels |= {"reported": "reported", "noted": "note"}
    details += [f"{label}: {entry[key]}" for key, label in labels.items() if key in entry]
    if "bytes" in entry:
        words.append(size(entry["bytes"]))
    return printable("  ".join(words) + (f": {', '.join(details)}" if details else ""))


def status_lines(config: SiteConfig, last: int) -> Iterator[str]:
    """Lines that describe the site's limits, its runs and the last entries of its log."""
    limits, disclose = config.limits, config.disclose
    yield f"site {config.name} of {config.federation}, state in {config.state}"
    methods, exchanges = (", ".join(names or ["all"]) for names in (limits.methods, limits.exchanges))
    yield f"  methods: {methods}; exchanges: {exchanges}"
    yield (
        f"  rounds: at most {limits.rounds}; cohort: at least {limits.minimum_cohort}; minimum_pairs: "
        f"at least {limits.minimum_pairs}; evaluation: {'yes' if limits.evaluate else 'no'}"
    )
    asked = [f"[privacy] kind {limits.privacy}"] if limits.privacy else []
    asked += [f"noise_multiplier at least {limits.noise_multiplier:g}"] if limits.noise_multiplier else []
    asked += [f"epsilon at most {limits.epsilon:g} at delta {limits.delta:g}"] if limits.epsilon else []
    yield f"  noise: {', '.join(asked) or 'optional'}"
    if limits.judgements:
        yield f"  judgements: each client at most {limits.judgements:,} pairs of completions in a run"
    yield from _spent(config)
    entries = list(SentLog.of(config).entries())
    yield from _keys(config, entries)
    if disclose.pairs:
        yield f"  reported to the hub: {'names' if disclose.names else 'pseudonyms'} and pair counts"
    else:
        yield "  [disclose] pairs = false: this site joins no run"
    yield from (f"  the hub knows {own} as {reported}" for own, reported in sorted(_pseudonyms(config)))
    idle = 0
    for run in _runs(config, entries):
        if not (run.messages or run.private):
            idle += 1
            continue
        count = pluralize(run.messages, "message", "messages")
        yield (
            f"run {run.name}: up to round {run.round}; sent {count}, {size(run.sent)}; "
            f"private states: {size(run.private) if run.private else 'none'}"
        )
        yield from _text(Path(config.state) / "runs" / run.name)
    if refused := sum("refused" in entry for entry in entries):
        yield f"{pluralize(refused, 'request', 'requests')} refused"
    if idle:
        yield f"{pluralize(idle, 'run', 'runs')} without any upload"
    yield from (line_of(entry) for entry in entries[len(entries) - last :] if last)


def _keys(config: SiteConfig, entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The site's key, the pinned ones, and the last request that was refused because of them."""
    if not (config.sites or config.identity.exists()):
        return
    try:
        yield f"  secure sums: {config.name} = {config.own_words()}"
    except SecureError as error:
        yield f"  no secure sums: {error}"
    yield from (f"  expects {name} = {words}" for name, words in sorted(config.sites.items()))
    refused = [str(entry["refused"]) for entry in entries if "[sites]" in str(entry.get("refused"))]
    yield from (f"  refused last: {printable(reason)}" for reason in refused[-1:])


def _text(run: Path) -> Iterator[str]:
    """The health of what clients' models wrote last, if they answered prompts."""
    path = run / SITE_TEXT
    if path.exists():
        try:
            text = json.loads(path.read_bytes())
            yield f"  text after round {text['round']}: {health_sentence(text['text'])}; {run / ANSWERS}"
        except (KeyError, TypeError, ValueError) as error:
            yield f"  {path} is damaged ({type(error).__name__}): restore it from a copy, or delete it"


@dataclass
class _Run:
    """What a site sent and keeps for a run; ``sent`` and ``private`` in bytes."""

    name: str
    messages: int = 0
    sent: int = 0
    round: int = 0
    private: int = 0


def _runs(config: SiteConfig, entries: Iterable[Mapping[str, Any]]) -> list[_Run]:
    runs = dict[str, _Run]()
    for entry in entries:
        name = entry.get("run")
        # A refused request may contain anything as the name of its run.
        if not (isinstance(name, str) and is_run(name)):
            continue
        run = runs.setdefault(name, _Run(name))
        if "bytes" in entry:
            run.messages, run.sent = run.messages + 1, run.sent + entry["bytes"]
            run.round = max(run.round, entry.get("round", 0))
    for run in runs.values():
        states = Path(config.state) / "runs" / run.name / "clients"
        run.private = files.folder_size(states) if states.is_dir() else 0
    return list(runs.values())


def prometheus_lines(config: SiteConfig) -> Iterator[str]:
    """The status of a site in the text format of Prometheus. It names no client.

    Source: https://prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4.
    """
    entries = list(SentLog.of(config).entries())
    runs = _runs(config, entries)
    site = {"federation": config.federation, "site": config.name}
    times = [datetime.fromisoformat(entry["time"]).timestamp() for entry in entries[-1:]]
    events = Counter(_event(entry) for entry in entries)
    spent = [epsilon_of(each, config.limits.delta) for each in Releases(Path(config.state)).spent().values()]
    limit = [] if config.limits.epsilon is None else [config.limits.epsilon]

    def of_runs(key: str) -> list[tuple[dict[str, str], float]]:
        # A hub could name runs without end in requests that are refused.
        return [({"run": r.name}, getattr(r, key)) for r in runs if r.messages or r.private]

    def single(values: Iterable[float]) -> list[tuple[dict[str, str], float]]:
        return [({}, value) for value in values]

    for name, kind, meaning, samples in (
        ("info", "gauge", "Always 1; the version of prefed.", [({"version": own_version("prefed")}, 1)]),
        ("up", "gauge", "1 while `prefed site` is running.", single([at_work(Path(config.state))])),
        ("events_total", "counter", "Log entries.", [({"event": e}, n) for e, n in sorted(events.items())]),
        ("last_event_timestamp_seconds", "gauge", "Time of the last log entry.", single(times)),
        ("messages_total", "counter", "Messages sent to the hub.", of_runs("messages")),
        ("sent_bytes_total", "counter", "Bytes of these messages.", of_runs("sent")),
        ("round", "gauge", "The last round with a message.", of_runs("round")),
        ("private_state_bytes", "gauge", "Bytes of private states on disk.", of_runs("private")),
        ("epsilon", "gauge", "Largest privacy loss of a client, over all runs.", single(sorted(spent)[-1:])),
        ("epsilon_limit", "gauge", "[limits] epsilon.", single(limit)),
    ):
        yield f"# HELP prefed_site_{name} {meaning}"
        yield f"# TYPE prefed_site_{name} {kind}"
        for labels, value in samples:
            # Prometheus escapes the same three characters as JSON.
            texts = {key: json.dumps(each, ensure_ascii=False) for key, each in {**site, **labels}.items()}
            text = ",".join(f"{key}={each}" for key, each in texts.items())
            yield f"prefed_site_{name}{{{text}}} {float(value):.17g}"


def _event(entry: Mapping[str, Any]) -> str:
    """The kind of a log entry: what a request was for, or that it was withheld, refused or failed."""
    return "withheld" if "withheld" in entry else str(entry["what"])


def _pseudonyms(config: SiteConfig) -> set[tuple[str, str]]:
    """Pairs of a client's name and its pseudonym at the hub, over all runs."""
    found = set[tuple[str, str]]()
    for path in (Path(config.state) / "runs").glob("*/order.json"):
        with suppress(files.DamagedError):
            names = files.loads_with_digest(path.read_bytes()).get("names", {})
            found |= {(printable(own), reported) for own, reported in names.items() if own != reported}
    return found


def _spent(config: SiteConfig) -> Iterator[str]:
    """The privacy loss of each client under local noise, over all runs."""
    delta = config.limits.delta
    for client, spent in sorted(Releases(Path(config.state)).spent().items()):
        name = printable(client)
        try:
            yield f"  {name}: epsilon {epsilon_of(spent, delta):.3g} at delta {delta:g}, in all runs so far"
        except AccountantError as error:
            yield f"  {name}: {error}"
