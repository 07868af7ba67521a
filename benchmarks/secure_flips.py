"""Bytes of every message of secure sums are changed on the way between prefed's own hub and sites.

    OMP_NUM_THREADS=1 python benchmarks/secure_flips.py --minutes 5

A turn is a run of two rounds over four sites in this process, with FedPDPO, which has private states. One
byte of one message, as sites join or start, in round 2, or at the end, becomes another at random, in its
header or its body. ``relay`` does this on the way; ``hub`` is a hub that shows one site something else, with
the right digest of it, and does not check what that site signs. What came of it:

    refused   the site is named: in the error that ends the run, or in a warning of the round
    random    a sum is random words, and is not merged; of the last metrics, this ends the run
    exact     nothing changed that is merged or stored, e.g. only a count of pairs or the text of a reason
    WRONG     see below

All that the hub accepts is compared with what sites meant: the words and receipts of each answer, each sum
with the numbers that its sites added to it before their masks, and the last models that sites stored. A
difference is wrong, and so is an error that prefed does not expect, or that names no site. A client trains
once for all turns. Controls are a turn without a change, and ``no checks``: a hub that checks neither
signatures nor whether a sum can be.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np

from federating import Here, Within, experiment, site_config
from prefed.core import Callback
from prefed.engines import RoundError, Task, WorkerError
from prefed.engines.backends.worker_pool import TaskServer, answer_of
from prefed.models.pretrained import silence_transformers
from prefed.networks.federation import hub as hub_module
from prefed.networks.federation import site as site_module
from prefed.networks.federation.config import Terms
from prefed.networks.federation.federate import federate
from prefed.networks.federation.final_models import Published
from prefed.networks.federation.hub import FederationBackend, Sites
from prefed.networks.federation.messages import Sum
from prefed.networks.federation.site import Site
from prefed.networks.federation.transport import FederationError
from prefed.networks.federation.unix_socket import pack, unpack
from prefed.privacy import Grid
from prefed.privacy.secure import Identity, Participant, fingerprint, sum_words
from workers import make_place

NAMES = ("site-a", "site-b", "site-c", "site-d")
KINDS = ("join", "start", "updates", "metrics", "published", "leave")
NOISE = {"kind": "distributed", "clip": 0.05, "noise_multiplier": 2.0, "delta": 1e-5, "colluders": 0}
OUTCOMES = "refused", "random", "exact", "WRONG"


class Kept(Here):
    """A process that trains, in this process: each job is built once, and each client trains once."""

    built: ClassVar = dict[str, tuple[TaskServer, dict[str, Any]]]()
    done: ClassVar = dict[str, dict[str, Any]]()

    def build(self, factory: Any, threads: int) -> None:
        """As the class's."""
        about = json.loads(factory.text)
        about.pop("run")
        self.key = json.dumps(about)
        if self.key not in self.built:
            self.due = answer_of(lambda: super(Kept, self).build(factory, threads) or self.due)
            self.built[self.key] = self.server, self.due
        self.server, self.due = self.built[self.key]

    def give(self, task: Task, state: bytes | None, timeout: float) -> None:
        """As the class's."""
        key = json.dumps([self.key, task.kind, task.client, task.exchange])
        if key not in self.done:
            self.due = answer_of(lambda: super(Kept, self).give(task, state, timeout) or self.due)
            self.done[key] = self.due
        self.due = self.done[key]

    def receive(self) -> dict[str, Any]:
        """As the class's; with errors as a process reports them."""
        if "error" in self.due:
            raise WorkerError(self.due["error"], self.due["trace"])
        return self.due


class Flips(Within):
    """Carries messages to sites and changes a byte of one of them.

    Args:
        which: kind and way, ``to`` or ``from`` a site, of the message; ``None`` for none.
        lies: changes a request's digest as well.

    Attributes:
        meant: site → the answer that it gave to its last request.
        models: site → the last models that the hub sent.
    """

    def __init__(self, sites: Any, draw: random.Random, which: tuple[str, str] | None, lies: bool) -> None:
        super().__init__(sites)
        self.draw, self.which, self.lies = draw, which, lies
        self.site, self.where = draw.choice(NAMES), ""
        self.meant, self.models = dict[str, bytes](), dict[str, list[bytes]]()

    def call(self, site: str, request: bytes, timeout: float, most: int) -> bytes:
        """As the class's."""
        header, body = unpack(request)
        kind = header["kind"]
        if kind == "sum":
            kind = "updates" if header["exchange"] else "metrics"
        due = site == self.site and not self.where and header.get("round", 2) == 2
        way = self.which[1] if due and self.which and self.which[0] == kind else ""
        if kind == "published":
            self.models.setdefault(site, []).append(body)
        if way == "to":
            request = self._changed(request)
            request = self._signed(request) if self.lies else request
        self.meant[site] = answer = super().call(site, request, timeout, most)
        return self._changed(answer) if way == "from" else answer

    def _changed(self, message: bytes) -> bytes:
        body, changed = 8 + int.from_bytes(message[:8], "little"), bytearray(message)
        parts = {"length": range(8), "header": range(8, body), "body": range(body, len(message))}
        names = [name for name, part in parts.items() if part]
        self.where = self.draw.choices(names, [1, 10, 10][: len(names)])[0]
        at = self.draw.choice(parts[self.where])
        # Most other values of a byte of JSON are no text at all.
        changed[at] ^= self.draw.randrange(1, 256) if self.where == "body" else 1 << self.draw.randrange(8)
        around = message[max(8, at - 20) : at + 20] if self.where == "header" else b""
        self.what = f"{self.where} byte {at}: {message[at]} → {changed[at]} in {around!r}"
        return bytes(changed)

    def _signed(self, request: bytes) -> bytes:
        """A changed request with the digest of what it says now, if that can be read."""
        try:
            header, body = unpack(request)
            return pack(body, **Sum.model_validate(header).bound(body).model_dump())
        except ValueError:
            return request


class Watch(Callback, logging.Handler):
    """What happens in a turn: warnings, sums, and what is wrong.

    Args:
        signatures, sums: whether the hub checks signatures, and whether a sum can be.
    """

    def __init__(self, signatures: bool = True, sums: bool = True) -> None:
        logging.Handler.__init__(self, logging.ERROR)
        self.signatures, self.sums, self.exact = signatures, sums, True
        self.warned, self.wrong, self.random, self.merged = list[str](), list[str](), 0, 0
        self.added, self.patches = dict[str, np.ndarray[Any, Any]](), ExitStack()

    def on_warning(self, text: str) -> None:
        """As the class's."""
        self.warned.append(text)

    def emit(self, record: logging.LogRecord) -> None:
        """An error that was not expected, which is logged with its traceback."""
        self.wrong.append(self.format(record))

    def __enter__(self) -> Watch:
        mask, answers, total, plausible = (
            Participant.mask,
            Sites.sum,
            FederationBackend.sum,
            Grid.plausible,
        )

        def masked(own: Participant, words: Any, session: Any) -> Any:
            self.added[own.member.site] = words.copy()
            return mask(own, words, session)

        def answered(own: Sites, site: str, request: Sum, message: bytes, timeout: float) -> Any:
            transport: Any = own._transport
            answer, words = answers(own, site, request, message, timeout)
            if words:
                header, meant = unpack(transport.meant[site])
                if self.signatures and (answer.receipts, words) != (header.get("receipts"), meant):
                    self.wrong.append(f"{site}: the hub accepts another answer than it gave")
            return answer, words

        def summed(own: FederationBackend, *arguments: Any) -> Any:
            sites, words, reasons = total(own, *arguments)
            if words is not None:
                self.exact = bool((words == sum_words([self.added[site] for site in sites])).all())
            return sites, words, reasons

        def can_be(own: Grid, words: Any) -> bool:
            verdict = plausible(own, words) or not self.sums
            self.merged += verdict
            self.random += not verdict
            if verdict != self.exact:
                self.wrong.append("a wrong sum is merged" if verdict else "a right sum is not merged")
            return verdict

        for where, name, what in (
            (Participant, "mask", masked),
            (Sites, "sum", answered),
            (FederationBackend, "sum", summed),
            (Grid, "plausible", can_be),
        ):
            self.patches.enter_context(patch.object(where, name, what))
        if not self.signatures:
            self.patches.enter_context(patch.object(hub_module, "check_upload", lambda *arguments: None))
        logging.getLogger("prefed").addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("prefed").removeHandler(self)
        self.patches.close()


class Place:
    """Four sites with a worker each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sites = folder, dict[str, Site]()
        place = make_place(folder)
        fourth = (place / "w0.jsonl").read_text().replace('"w0"', '"w3"').replace("Question", "Why")
        (place / "w3.jsonl").write_text(fourth)
        with (place / "pairs.jsonl").open("a") as stream:
            stream.write(fourth)
        asked = experiment(place, rounds=2)
        tables = asked.tables() | {"merge": {"weights": "uniform"}, "privacy": NOISE}
        self.experiment = type(asked).from_tables(tables, "the benchmark")
        own = {name: Identity.at(folder / f"site-{name}" / "identity", create=True) for name in NAMES}
        pins = {name: fingerprint(identity.public) for name, identity in own.items()}
        for number, name in enumerate(NAMES):
            data = {
                "train": str(place / f"w{number}.jsonl"),
                "partition": {"by": "column", "column": "worker"},
            }
            others = {other: text for other, text in pins.items() if other != name}
            self.sites[name] = Site(site_config(place, folder, name, name=name, sites=others, data=data))

    def turn(self, flips: Flips, watch: Watch) -> str:
        """A run; what came of it."""
        out, refused, before = self.folder / "out", "", {*threading.enumerate()}
        with watch:
            try:
                federate(self.experiment, out, flips, Terms("wards", NAMES, wait=0.0), callbacks=[watch])
            except (FederationError, RoundError) as error:
                refused = str(error)
                if flips.site not in "".join([refused, *watch.warned]):
                    watch.wrong.append(f"no site is named: {refused}")
            except Exception:
                watch.wrong.append(traceback.format_exc())
            for thread in {*threading.enumerate()} - before:
                thread.join()
        if not (refused or watch.wrong):
            self.check_models(flips, watch)
        shutil.rmtree(out, ignore_errors=True)
        for name in NAMES:
            shutil.rmtree(self.folder / f"site-{name}" / "runs", ignore_errors=True)
        if watch.wrong:
            return "WRONG"
        if watch.random:
            return "random"
        named = any(flips.site in text for text in watch.warned)
        return "refused" if refused or named else "exact"

    def check_models(self, flips: Flips, watch: Watch) -> None:
        """Check that sites have stored the last models, or that the hub warns that one has not."""
        for name in NAMES:
            if any(name in text and "did not receive" in text for text in watch.warned):
                continue
            (run,) = (self.folder / f"site-{name}" / "runs").iterdir()
            stored = Published(run)
            models = [stored.read(client)[1] for client in stored.clients()]
            if not models or any(model not in flips.models[name] for model in models):
                watch.wrong.append(f"{name} has other last models than were sent")


def turns(place: Place, draw: random.Random, minutes: float) -> int:
    """Flip bytes for so many minutes and print the table; return the number of wrong outcomes."""
    counts, until = dict[tuple[str, str, str], Counter[str]](), time.monotonic() + 60 * minutes
    kinds = [
        (kind, "to", lies) for kind in KINDS for lies in ((False, True) if kind in KINDS[2:4] else (False,))
    ]
    kinds += [(kind, "from", False) for kind in KINDS]
    number = 0
    while time.monotonic() < until:
        kind, way, lies = kinds[number % len(kinds)]
        number += 1
        flips, watch = Flips(place.sites, draw, (kind, way), lies), Watch(signatures=not lies)
        outcome = place.turn(flips, watch)
        by = "hub" if lies else "relay"
        counts.setdefault((kind, f"{way} a site", by), Counter())[outcome] += 1
        if outcome == "WRONG":
            print(
                f"{kind} {way} {flips.site} by a {by}: {flips.what}\n  {'; '.join(watch.wrong)}", flush=True
            )
        elif os.environ.get("SHOW"):
            print(kind, way, by, outcome, flips.what if flips.where else "none", watch.warned[:1])
    print(f"\n| message | way | changed by | {' | '.join(OUTCOMES)} |\n{'|---' * (3 + len(OUTCOMES))}|")
    for about, outcomes in sorted(counts.items()):
        print(f"| {' | '.join(about)} | {' | '.join(str(outcomes[name]) for name in OUTCOMES)} |")
    total = sum(counts.values(), Counter[str]())
    print(f"| all {number} | | | {' | '.join(str(total[name]) for name in OUTCOMES)} |")
    return total["WRONG"]


def controls(place: Place, draw: random.Random) -> None:
    """Print what becomes of no change, and of changes without the hub's checks."""
    watch = Watch()
    print(
        f"no change: {place.turn(Flips(place.sites, draw, None, False), watch)}, {watch.merged} sums merged"
    )
    for kind, way, lies in (("updates", "from", False), ("updates", "to", True)):
        outcomes = Counter[str]()
        for _ in range(10):
            flips = Flips(place.sites, draw, (kind, way), lies)
            outcomes[place.turn(flips, Watch(signatures=False, sums=False))] += 1
        print(f"no checks, {kind} {way} a site: {dict(outcomes)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="in which to make a temporary one, e.g. /dev/shm")
    options = parser.parse_args()
    silence_transformers()
    draw, folder = random.Random(options.seed), Path(tempfile.mkdtemp(dir=options.folder))
    try:
        with patch.object(site_module, "Worker", Kept):
            place = Place(folder)
            controls(place, draw)
            wrong = turns(place, draw, options.minutes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
