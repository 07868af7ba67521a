"""What a site was asked for and sent, for its administrator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from prefed.core import files
from prefed.core.text import pluralize, printable, size
from prefed.networks.federation.audit_log import SentLog, line_of
from prefed.networks.federation.config import SiteConfig
from prefed.networks.federation.messages import is_run
from prefed.networks.federation.privacy_ledger import Releases, epsilon_of
from prefed.privacy.accountant import AccountantError


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
        yield f"  the hub is told {'names' if tell.names else 'made-up names'} and numbers of pairs"
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
    """Each client's own name with the one that this site made up for it, of all runs that it was told of."""
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
