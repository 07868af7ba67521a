"""What is killed, frozen, filled up and lied about in a federation, and what follows.

    python benchmarks/federation.py --faults
    python benchmarks/federation.py --faults --only spared

Five sites with six clients, a small generated model, FedPDPO, whose clients have personal parts. Each fault
strikes while a visit is under way. Four tables:

- spared: what costs no visit. The run must be equal to one in one process, in every record and every bit.
- missed: what costs visits. The server's state and the private states must be, to the bit, those of a run in
  one process in which the same visits are left out.
- liars: one site of five sends 50 times what its visits changed, in every round, under several merge rules.
- absent: a site that cannot take part; how soon the hub says so.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from wards import Federation, below, differences, persona_lines, processes, rounds_of

from prefed import Experiment, run
from prefed.core import Key
from prefed.engines import BACKENDS, InProcess, Task, TaskResult
from prefed.models.tiny import make_tiny
from prefed.store.receipts import receipt_in

CLIENTS = {"north": 1, "south": 2, "east": 1, "west": 1, "centre": 1}
EXPERIMENT = """
seed = 42
rounds = {rounds}
[data]
train = "train.jsonl"
test = "test.jsonl"
partition = {{ by = "column", column = "persona" }}
limit = 32
max_length = 128
[model]
name = "{model}"
lora = {{ rank = 8, alpha = 16, dropout = 0.1 }}
[method]
name = "{method}"
lr = 3e-3
local_steps = 8
batch_size = 8
[evaluate]
every = 0
[engine]
threads = 1
{more}
"""
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

    def visits(self, site: str, number: int) -> None:
        """Wait until a site is in the middle of a visit of a round."""
        notes = self.federation.folder / f"{site}.visits"
        self.wait(
            lambda: notes.exists() and str(number) in notes.read_text().split(), f"{site}, round {number}"
        )
        time.sleep(0.1)

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


def write_experiment(
    federation: Federation, name: str, rounds: int, more: str = "", method: str = "fedpdpo"
) -> Path:
    """The file of an experiment, for one process and for the federation alike."""
    path = federation.folder / f"{name}.toml"
    path.write_text(EXPERIMENT.format(rounds=rounds, model=federation.model, method=method, more=more))
    return path


def alone(file: Path, out: Path, missed: Iterable[tuple[int, str]] = ()) -> Path:
    """The same run in this process, in which some visits are left out."""
    left_out = set(missed)

    class Present(InProcess):
        def run(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
            """The results of all but the visits that are left out."""
            return super().run(
                task for task in tasks if task.kind != "visit" or (task.round, task.client) not in left_out
            )

    usual = BACKENDS["in_process"]
    BACKENDS["in_process"] = lambda job, factory, states, settings: Present(job, states, settings.threads)  # type: ignore[index]
    try:
        run(Experiment.load(file), out)
    finally:
        BACKENDS["in_process"] = usual  # type: ignore[index]
    return out


def states_differ(federation: Federation, beside: Path, over: Path) -> list[str]:
    """Where the server's state and the private states are not, to the bit, those of a run in one process."""
    different = []
    server, theirs = ((out / "checkpoint").glob("server@*") for out in (beside, over))
    if [path.read_bytes() for path in server] != [path.read_bytes() for path in theirs]:
        different.append("the server's state")
    name = json.loads((over / "federation.json").read_text())["run"]
    kept, receipts = (
        {path.name: path.read_bytes() for path in (out / "checkpoint" / "clients").iterdir()}
        for out in (beside, over)
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
    return different


def spared(federation: Federation) -> None:
    """Faults that cost no visit, one a round; site south is what they happen to."""
    south, server = federation.of("south") / "kit", federation.folder / "wards" / "hub" / "server"

    def killed(*parts: str) -> Callable[[], None]:
        return lambda: signal_all(processes(*parts), signal.SIGKILL)

    def trainer() -> None:
        own = set(below(federation.sites["south"].pid))
        signal_all(own & set(processes("serve(int")), signal.SIGKILL)

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

    def hub() -> None:
        course.hub.kill()
        course.hub.wait()
        course.begin("--resume")

    faults: dict[str, Callable[[], None]] = {
        "the process that trains is killed": trainer,
        "a site's FLARE worker is killed": killed("worker_process", str(south.resolve())),
        "a site is killed, and started again after 3 s": again,
        "`prefed site` is frozen for 15 s": lambda: frozen(False),
        "all processes of a site are frozen for 15 s": lambda: frozen(True),
        "the hub's FLARE job is killed": killed("runner_process", str(server.resolve())),
        "the hub's FLARE server is killed": killed("server_train", str(server.resolve())),
        "the hub is killed, and resumed at once": hub,
    }
    file = write_experiment(federation, "spared", len(faults) + 2)
    beside = alone(file, federation.folder / "alone-spared")
    begun = time.monotonic()
    course = Course(federation, file, federation.folder / "over-spared")
    course.committed(1)
    say("the opening, and round 1 without a fault", 0, f"{time.monotonic() - begun:.0f} s")
    for number, (name, act) in enumerate(faults.items(), 2):
        course.visits("south", number)
        begun = time.monotonic()
        act()
        course.committed(number)
        missed = sum(at == number for at, _ in course.missed())
        say(name, missed, f"{time.monotonic() - begun:.0f} s")
    status = course.end()
    different = differences(beside, course.out) + states_differ(federation, beside, course.out)
    usual = rounds_of(course.out)[-1]["seconds"]
    say("the last round without a fault", 0, f"{usual:.1f} s")
    say(
        "the whole run beside one process", f"status {status}", "; ".join(different[:3]) or "equal to the bit"
    )


def missed(federation: Federation) -> None:
    """Faults that cost visits."""
    lies = {5: "not_a_number", 6: "wrong_shapes", 7: "another_name", 8: "earlier_round", 9: "fifty_times"}
    (federation.folder / "east.lies").write_text(json.dumps(lies))
    file = write_experiment(federation, "missed", 30, "[merge]\nmax_ratio = 10")
    course = Course(federation, file, federation.folder / "over-missed", "--visit", "40")

    def told(name: str, number: int, begun: float | None = None) -> None:
        course.committed(number)
        record = rounds_of(course.out)[number - 1]
        reasons = sorted({each["reason"] for each in record["dropped"]})
        clients = ", ".join(each["client"] for each in record["dropped"])
        took = f"{time.monotonic() - begun:.0f} s" if begun else f"{record['seconds']:.1f} s"
        say(name, f"round {number}: {clients}: {'; '.join(reasons)}", took)

    def back(name: str, site: str, since: int, begun: float) -> None:
        own = set(federation.homes[site])
        course.wait(
            lambda: any(
                own.isdisjoint(each["client"] for each in record["dropped"])
                for record in rounds_of(course.out)[since:]
            ),
            f"{site} is back",
        )
        say(name, f"round {len(rounds_of(course.out))}", f"{time.monotonic() - begun:.0f} s")

    course.visits("south", 2)
    begun = time.monotonic()
    federation.kill("south")
    told("a site is killed and stays away", 2, begun)
    federation.start("south")
    begun = time.monotonic()
    course.visits("north", 4)
    pid = federation.sites["north"].pid
    own = [pid, *set(below(pid)) & set(processes("serve(int"))]
    limit(own, 0)
    told("a site's disk is full: no file may grow", 4)
    limit(own, resource.RLIM_INFINITY)
    for number, lie in lies.items():
        told(f"a site lies: {lie.replace('_', ' ')}", number)
    back("the killed site was started, and is back", "south", 2, begun)
    number = len(rounds_of(course.out)) + 2
    course.visits("west", number)
    begun = time.monotonic()
    os.kill(federation.sites["west"].pid, signal.SIGSTOP)
    told("`prefed site` is frozen for longer than --visit 40", number, begun)
    os.kill(federation.sites["west"].pid, signal.SIGCONT)
    back("it goes on, and is back", "west", number, time.monotonic())
    at = len(rounds_of(course.out)) + 1
    course.visits("centre", at + 1)
    begun = time.monotonic()
    federation.kill(*CLIENTS)
    status = course.end()
    said = course.log.read_text().strip().splitlines()[-1]
    say("all sites are killed", f"status {status}: {said}", f"{time.monotonic() - begun:.0f} s")
    assert len(rounds_of(course.out)) == at
    federation.start(*CLIENTS)
    begun = time.monotonic()
    course.begin("--resume")
    course.committed(at + 1)
    say(
        "they are started, and the hub resumed", f"round {at + 1} counts", f"{time.monotonic() - begun:.0f} s"
    )
    status = course.end()
    (federation.folder / "east.lies").unlink()
    beside = alone(file, federation.folder / "alone-missed", course.missed())
    different = states_differ(federation, beside, course.out)
    say(
        f"the whole run, {len(course.missed())} visits missed, beside one process without these visits",
        f"status {status}",
        "; ".join(different[:3]) or "equal to the bit",
    )


def liars(federation: Federation) -> None:
    """One site of five sends 50 times what its visits changed, in every round."""
    rules = {
        "mean, nobody lies": "",
        "mean": "",
        "mean, max_ratio = 10": "max_ratio = 10",
        "median": 'rule = "median"',
        "norm_clip": 'rule = "norm_clip"',
        "multi_krum": 'rule = "multi_krum"',
    }
    honest = [client for site, own in federation.homes.items() if site != "east" for client in own]
    for number, (name, rule) in enumerate(rules.items()):
        lies = federation.folder / "east.lies"
        lies.write_text(json.dumps({"every": "fifty_times"} if number else {}))
        file = write_experiment(federation, f"liars-{number}", 4, f"[merge]\n{rule}", "feddpo")
        course = Course(federation, file, federation.folder / f"over-liars-{number}")
        if course.end():
            raise SystemExit(course.log.read_text())
        records = rounds_of(course.out)
        figures = records[-1]["evaluation"]
        means = {
            key: sum(figures[key]["per_client"][client] for client in honest) / len(honest)
            for key in ("reward_accuracy", "dpo_loss")
        }
        dropped = sum(len(record["dropped"]) for record in records)
        cells = [f"{means['reward_accuracy']:.3f}", f"{means['dpo_loss']:.4g}", f"{dropped} of 24"]
        if dropped:
            beside = alone(file, federation.folder / f"alone-liars-{number}", course.missed())
            cells.append("; ".join(states_differ(federation, beside, course.out)) or "equal to the bit")
        say(name, *cells)
        lies.unlink()


def absent(federation: Federation) -> None:
    """A site whose data or model is not where its file says."""
    path = federation.of("north") / "site.toml"
    text = path.read_text()
    for name, broken in {
        "a site's data file is missing": text.replace("train.jsonl", "nothing.jsonl"),
        "a site's model is missing": text.replace(str(federation.model), str(federation.folder / "nothing")),
    }.items():
        federation.kill("north")
        path.write_text(broken)
        federation.start("north")
        file = write_experiment(federation, "absent", 2)
        begun = time.monotonic()
        course = Course(federation, file, federation.folder / f"over-{name.split()[2]}")
        status = course.end()
        said = course.log.read_text().strip().splitlines()[-1]
        say(name, f"status {status}: {said}", f"{time.monotonic() - begun:.0f} s, the opening included")
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


TABLES: dict[str, Callable[[Federation], None]] = {
    "spared": spared,
    "missed": missed,
    "liars": liars,
    "absent": absent,
}


def faults(folder: Path, port: int, only: Iterable[str]) -> None:
    """All tables, or some."""
    model = folder / "model"
    if not model.exists():
        make_tiny(model, [json.loads(line)["prompt"] for line in persona_lines("train")], Key(0), steps=20)
    federation = Federation(folder, port, CLIENTS, model, watched=True)
    try:
        federation.start(*CLIENTS)
        for name in only:
            print(f"\n{name}: {TABLES[name].__doc__}\n", flush=True)
            TABLES[name](federation)
    finally:
        federation.stop()
