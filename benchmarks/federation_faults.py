"""What is killed, frozen, filled up and lied about in a federation, and what follows.

    python benchmarks/federation.py --faults
    python benchmarks/federation.py --faults --only stops

Five sites with six clients, generated pairs, a small generated model. Three tables:

- stops: one run of FedPDPO, whose clients have personal parts, over three of the sites. One fault after the
  other, each while a visit is under way. In the end the server's state and all private states must be, to the
  bit, those of a run in one process in which the visits that were missed are left out.
- absent: a site that cannot take part; how soon the hub says so.
- liars: one of five sites sends 50 times what its visits changed, in every round, under several merge rules.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from wards import Federation, below, processes, rounds_of

from prefed import Experiment, run
from prefed.core import Key
from prefed.data import synthetic
from prefed.engines import BACKENDS, InProcess, Task, TaskResult
from prefed.models.tiny import make_tiny
from prefed.store.states import receipt_in

CLIENTS = {"north": 1, "south": 2, "east": 1, "west": 1, "centre": 1}
THREE = ("north", "south", "east")
EXPERIMENT = """
seed = 42
rounds = {rounds}
[data]
train = "train.jsonl"
test = "test.jsonl"
partition = {{ by = "column", column = "client" }}
max_length = 128
[model]
name = "{model}"
lora = {{ rank = 8, alpha = 16, dropout = 0.1 }}
[method]
name = "{method}"
lr = 3e-3
local_steps = 4
batch_size = 8
[evaluate]
every = 0
[engine]
threads = 1
{more}
"""
ROUNDS = 60
"""Rounds of the run that everything happens to."""
PATIENCE = 600.0
"""Seconds after which this script itself gives up."""


class Course:
    """A run over the sites, to which things happen."""

    def __init__(self, federation: Federation, file: Path, out: Path, *more: str) -> None:
        self.federation, self.file, self.out, self.more = federation, file, out, more
        self.log = out.with_suffix(".log")
        for path in federation.folder.glob("*.visits"):
            path.unlink()
        self.begin()

    def say(self, name: str, number: int, started: float) -> None:
        """A row of the table: what a round missed, and how long it took from the fault to its end."""
        self.committed(number)
        dropped = rounds_of(self.out)[number - 1]["dropped"]
        reasons = "; ".join(sorted({each["reason"] for each in dropped}))
        missed = f"{len(dropped)} of 4 visits missed: {reasons}" if dropped else "no visit missed"
        say(name, f"round {number}: {missed}", f"{time.monotonic() - started:.0f} s")

    def back(self, name: str, site: str, since: int) -> None:
        """A row of the table: when a site that was away takes part again."""
        started, own = time.monotonic(), set(self.federation.homes[site])

        def full() -> bool:
            later = rounds_of(self.out)[since:]
            return any(own.isdisjoint(each["client"] for each in record["dropped"]) for record in later)

        self.wait(full, f"{site} is back")
        say(name, f"in round {len(rounds_of(self.out))}", f"{time.monotonic() - started:.0f} s")

    def begin(self, *more: str) -> None:
        """Start ``prefed federate``."""
        with self.log.open("ab") as log:
            words = self.federation.federate(self.file, self.out, *self.more, *more)
            self.hub = subprocess.Popen(words, stdout=log, stderr=log)

    def wait(self, so: Callable[[], bool], what: str) -> None:
        """Wait until something is so.

        Raises:
            SystemExit: the hub ends before, or it takes too long.
        """
        end = time.monotonic() + PATIENCE
        while not so():
            if self.hub.poll() is not None or time.monotonic() > end:
                self.hub.kill()
                raise SystemExit(f"{what}: it did not come to it\n{self.log.read_text()}")
            time.sleep(0.02)

    def next_visit(self, site: str) -> int:
        """Wait until a site is in the middle of a visit that has just started; its round."""
        notes = self.federation.folder / f"{site}.visits"

        def started() -> list[str]:
            return notes.read_text().split() if notes.exists() else []

        before = len(started())
        self.wait(lambda: len(started()) > before, f"a visit of {site}")
        time.sleep(0.1)
        return int(started()[-1])

    def committed(self, number: int) -> None:
        """Wait until a round counts."""
        self.wait(lambda: self.hub.poll() == 0 or len(rounds_of(self.out)) >= number, f"round {number}")

    def end(self) -> int:
        """Wait until the hub ends; its exit status."""
        return self.hub.wait(PATIENCE)

    def missed(self) -> set[tuple[int, str]]:
        """Rounds and clients of visits that do not count."""
        return {
            (record["round"], each["client"]) for record in rounds_of(self.out) for each in record["dropped"]
        }


def say(name: str, *cells: object) -> None:
    """A row of a table."""
    print(f"| {name} | {' | '.join(map(str, cells))} |", flush=True)


def write_experiment(federation: Federation, name: str, rounds: int, method: str, more: str = "") -> Path:
    """The file of an experiment, for one process and for the federation alike."""
    path = federation.folder / f"{name}.toml"
    path.write_text(EXPERIMENT.format(rounds=rounds, model=federation.model, method=method, more=more))
    return path


def alone(course: Course, sites: Iterable[str]) -> Path:
    """The same run over the pairs of these sites in this process, without the visits that were missed."""
    left_out, out = course.missed(), course.out.with_name(f"alone-{course.out.name}")
    given = []
    for name in ("train", "test"):
        path = out.with_name(f"{out.name}.{name}.jsonl")
        path.write_text("".join((course.federation.of(site) / f"{name}.jsonl").read_text() for site in sites))
        given.append(f"data.{name}={path}")

    class Present(InProcess):
        def run(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
            """The results of all but the visits that are left out."""
            return super().run(
                task for task in tasks if task.kind != "visit" or (task.round, task.client) not in left_out
            )

    usual = BACKENDS["in_process"]
    BACKENDS["in_process"] = lambda job, factory, states, settings: Present(job, states, settings.threads)  # type: ignore[index]
    try:
        run(Experiment.load(course.file, given), out)
    finally:
        BACKENDS["in_process"] = usual  # type: ignore[index]
    return out


def states_differ(course: Course, sites: Iterable[str]) -> str:
    """Where the server's state and the private states are not those of a run in one process, to the bit."""
    federation, other, over = course.federation, alone(course, sites), course.out
    different = []
    server, theirs = ((out / "checkpoint").glob("server@*") for out in (other, over))
    if [path.read_bytes() for path in server] != [path.read_bytes() for path in theirs]:
        different.append("the server's state")
    name = json.loads((over / "federation.json").read_text())["run"]
    kept, receipts = (
        {path.name: path.read_bytes() for path in (out / "checkpoint" / "clients").iterdir()}
        for out in (other, over)
    )
    if kept.keys() != receipts.keys():
        different.append("whose private states count")
    for file, state in kept.items():
        client = file.partition("@")[0]
        receipt = receipt_in(receipts[file]) if file in receipts else None
        path = next(
            (
                federation.of(site) / "state/runs" / name / "clients" / f"{client}@{receipt}.safetensors"
                for site, own in federation.homes.items()
                if client in own
            )
        )
        if not path.exists() or path.read_bytes() != state:
            different.append(f"the private state of {client}")
    return "; ".join(different) or "equal to the bit"


def stops(federation: Federation) -> None:
    """One run over three sites, and one fault after the other. Seconds: from the fault to the round's end."""
    file = write_experiment(federation, "stops", ROUNDS, "fedpdpo", "[merge]\nmax_ratio = 10")
    # A round without a fault takes .3 s. While a site comes back, a hundred such rounds would go by.
    (federation.folder / "east.pace").write_text("2")
    started = time.monotonic()
    words = ("--sites", ",".join(THREE), "--visit", "120")
    course = Course(federation, file, federation.folder / "over-stops", *words)
    course.say("nothing: the opening and a round", 1, started)
    hub, kit = federation.folder / "wards" / "hub" / "server", federation.of("south") / "kit"

    def killed(*parts: str) -> Callable[[], None]:
        return lambda: signal_all(processes(*parts), signal.SIGKILL)

    def again() -> None:
        federation.kill("south")
        time.sleep(3)
        federation.start("south")

    def frozen(whole: bool) -> None:
        pid = federation.sites["south"].pid
        pids = below(pid) if whole else [pid]
        signal_all(pids, signal.SIGSTOP)
        time.sleep(15)
        signal_all(pids, signal.SIGCONT)

    def resumed() -> None:
        course.hub.kill()
        course.hub.wait()
        course.begin("--resume")

    faults: dict[str, Callable[[], None]] = {
        "the process that trains is killed": lambda: signal_all(trainer(federation, "south"), signal.SIGKILL),
        "`prefed site` is frozen for 15 s": lambda: frozen(False),
        "all processes of a site are frozen for 15 s": lambda: frozen(True),
        "a site's FLARE process of the job is killed": killed("worker_process", str(kit.resolve())),
        "the hub's FLARE process of the job is killed": killed("runner_process", str(hub.resolve())),
        "the hub's FLARE server is killed": killed("server_train", str(hub.resolve())),
        "the hub is killed, and resumed at once": resumed,
        "a site is killed, and started again after 3 s": again,
    }
    for name, act in faults.items():
        number, started = course.next_visit("south"), time.monotonic()
        act()
        course.say(name, number, started)
    number, started = course.next_visit("north"), time.monotonic()
    limit([federation.sites["north"].pid, *trainer(federation, "north")], 0)
    course.say("a site's disk is full: no file may grow", number, started)
    limit([federation.sites["north"].pid, *trainer(federation, "north")], resource.RLIM_INFINITY)
    lies = ["not_a_number", "wrong_shapes", "another_name", "earlier_round", "fifty_times"]
    number = len(rounds_of(course.out)) + 2
    got = dict(enumerate(lies, number))
    (federation.folder / "east.lies").write_text(json.dumps(got))
    for at, lie in got.items():
        course.committed(at - 1)
        course.say(f"a site lies: {lie.replace('_', ' ')}", at, time.monotonic())
    number, started = course.next_visit("south"), time.monotonic()
    federation.kill("south")
    course.say("a site is killed, and stays away", number, started)
    federation.start("south")
    course.back("it is started again, and back", "south", number)
    number, started = course.next_visit("north"), time.monotonic()
    os.kill(federation.sites["north"].pid, signal.SIGSTOP)
    course.say("`prefed site` is frozen for longer than --visit 120", number, started)
    os.kill(federation.sites["north"].pid, signal.SIGCONT)
    course.back("it goes on, and is back", "north", number)
    number, started = course.next_visit("south"), time.monotonic()
    federation.kill(*THREE)
    status = course.end()
    said = course.log.read_text().strip().splitlines()[-1]
    say(
        "all sites are killed",
        f"round {number}: status {status}: {said}",
        f"{time.monotonic() - started:.0f} s",
    )
    assert len(rounds_of(course.out)) == number - 1
    federation.start(*THREE)
    started = time.monotonic()
    course.begin("--resume")
    course.say("they are started again, and the hub resumed", number, started)
    status = course.end()
    for name in ("lies", "pace"):
        (federation.folder / f"east.{name}").unlink()
    same = states_differ(course, THREE)
    say("the whole run", f"status {status}, {len(course.missed())} of {4 * ROUNDS} visits missed", same)


def trainer(federation: Federation, site: str) -> set[int]:
    """The process that trains at a site."""
    return set(below(federation.sites[site].pid)) & set(processes("serve(int"))


def liars(federation: Federation) -> None:
    """One site of five sends 50 times what its visits changed, in every round."""
    federation.start(*set(CLIENTS) - set(federation.sites))
    rules = {
        "mean, nobody lies": "",
        "mean": "",
        "mean, max_ratio = 10": "max_ratio = 10",
        "median": 'rule = "median"',
        "multi_krum": 'rule = "multi_krum"',
    }
    honest = [client for site, own in federation.homes.items() if site != "east" for client in own]
    for number, (name, rule) in enumerate(rules.items()):
        lies = federation.folder / "east.lies"
        lies.write_text(json.dumps({"every": "fifty_times"} if number else {}))
        file = write_experiment(federation, f"liars-{number}", 3, "feddpo", f"[merge]\n{rule}")
        course = Course(federation, file, federation.folder / f"over-liars-{number}")
        if course.end():
            raise SystemExit(course.log.read_text())
        records = rounds_of(course.out)
        figures = records[-1]["evaluation"]
        accuracies = figures["reward_accuracy"]["per_client"]
        accuracy = sum(accuracies[client] for client in honest) / len(honest)
        dropped = sum(len(record["dropped"]) for record in records)
        cells = [f"{accuracy:.3f}", f"{figures['dpo_loss']:.4g}", f"{dropped} of 18 dropped"]
        if dropped:
            cells.append(states_differ(course, CLIENTS))
        say(name, *cells)
        lies.unlink()


def absent(federation: Federation) -> None:
    """A site whose data or model are taken away while it waits: it does not begin without them."""
    home = federation.of("north")
    path, own = home / "site.toml", home / "own-model"
    text = path.read_text()
    shutil.copytree(federation.model, own)
    path.write_text(text.replace(str(federation.model), str(own)))
    for name, place in {
        "a site's data are missing": home / "train.jsonl",
        "a site's model is missing": own,
    }.items():
        federation.kill("north")
        log, waits = federation.folder / "north.log", b"waiting for the hub"
        before = log.read_bytes().count(waits)
        federation.start("north")
        while log.read_bytes().count(waits) == before and federation.sites["north"].poll() is None:
            time.sleep(0.2)
        away = place.rename(home / "taken-away")
        file = write_experiment(federation, "absent", 2, "feddpo")
        started = time.monotonic()
        out = federation.folder / f"over-absent-{name.split()[2]}"
        course = Course(federation, file, out, "--sites", ",".join(THREE))
        status = course.end()
        said = course.log.read_text().strip().splitlines()[-1]
        say(name, f"status {status}: {said}", f"{time.monotonic() - started:.0f} s, the opening included")
        away.rename(place)
    federation.kill("north")
    path.write_text(text)
    federation.start("north")


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes, of which some may be gone."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def limit(pids: Iterable[int], size: int) -> None:
    """No file of these processes may grow beyond so many bytes: a write fails, as on a full disk."""
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


TABLES: dict[str, Callable[[Federation], None]] = {"stops": stops, "absent": absent, "liars": liars}


def faults(folder: Path, port: int, only: Iterable[str]) -> None:
    """All tables, or some."""
    make_tiny(folder / "model", synthetic.corpus(Key(7), 300), Key(7), width=64, steps=20)
    synthetic.write(folder, synthetic.generate(Key(7), clients=sum(CLIENTS.values()), train=16, test=8))
    federation = Federation(folder, port, CLIENTS, "client", folder / "model", watched=True)
    try:
        federation.start(*THREE)
        for name in only:
            print(f"\n{name}: {TABLES[name].__doc__}\n", flush=True)
            TABLES[name](federation)
    finally:
        federation.stop()
