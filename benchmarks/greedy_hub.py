"""A hub that was taken over, and two sites of ``prefed site`` over NVIDIA FLARE: what it can make them do.

    python benchmarks/greedy_hub.py
    python benchmarks/greedy_hub.py disk modes      # some of its parts

``open`` has few limits; ``careful`` asks for local noise and a budget, and allows no evaluation. Both have
the same twelve clients with eight pairs each. The hub asks with prefed's own requests, of its choice. Rows as
in ``strangers.py``, which has these too. The sites run with umask 0.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from attacked import HEAD, PATIENCE, free_port, logged, print_row
from common import trainers_of
from membership import score

from prefed.config import Experiment, to_toml
from prefed.core import Download, Key, Layout, Tensors
from prefed.core.wire import decode_upload, encode
from prefed.data import ClientSizes, FederatedDataset
from prefed.engines import Task
from prefed.engines.tasks import evaluate_client
from prefed.models.pretrained import silence_transformers
from prefed.models.tiny import make_tiny
from prefed.networks.federation.audit_log import SentLog
from prefed.networks.federation.federate import experiment_for_sites
from prefed.networks.federation.flare.kits import Kits, Project, make_kits
from prefed.networks.federation.flare.transport import FlareTransport
from prefed.networks.federation.hub import Sites
from prefed.networks.federation.messages import FORMAT, VERSION, SiteError
from prefed.networks.federation.privacy_ledger import Releases, epsilon_of
from prefed.networks.federation.unix_socket import pack, unpack
from prefed.runs.build import assemble_job, build_job, build_trainers

Row = tuple[str, str, str, str]
SITES = ("open", "careful")
CLIENTS = [f"ward-{number:02d}" for number in range(12)]
PAIRS = 8
FEW = CLIENTS[3]
"""It has three pairs to be judged on."""
MOVED = 0.05
"""What the hub adds to each number of a model that it has evaluated: with the first, all losses are log 2."""
NOISE = 20.0
DELTA = 1e-5
VISITS = 5
"""What a client of ``careful`` may be asked for in all runs."""
SITE = """
federation = "wards"
name = "{name}"
[data]
train = {{ {train} }}
test = {{ {test} }}
[model]
name = "{model}"
[disclose]
pairs = true
[limits]
minimum_cohort = 1
{limits}
"""
LIMITS = {
    "open": "minimum_pairs = 4",
    "careful": 'privacy = "local"\nevaluate = false\nepsilon = {epsilon}',
}


class Place:
    """A hub's transport, a model, and two sites as processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kits = folder / "wards"
        make_kits(Project(name="wards", hub="localhost", port=free_port(), sites=list(SITES)), self.kits)
        texts = []
        for number, client in enumerate(CLIENTS):
            for role, first in (("train", 0), ("test", 1000)):
                rows = [
                    {
                        "prompt": f"Question {first + 10 * number + k}?",
                        "chosen": f" {'yes' if (k + number) % 2 else 'no'} {k} {client}",
                        "rejected": f" {'no' if (k + number) % 2 else 'yes'} {k} {client}",
                    }
                    for k in range(3 if (role, client) == ("test", FEW) else PAIRS)
                ]
                (folder / f"{role}-{client}.jsonl").write_text(
                    "".join(json.dumps(row) + "\n" for row in rows)
                )
                texts += [row["prompt"] + row["chosen"] for row in rows]
        self.model = folder / "model"
        make_tiny(self.model, texts, Key(0), layers=2, width=32, heads=2, vocabulary=280, steps=2)
        for name in SITES:
            # So much that a client's last visit is just within it.
            epsilon = epsilon_of((VISITS + 0.5) * NOISE**-2, DELTA)
            (self.kits / name / "site.toml").write_text(
                SITE.format(
                    name=name,
                    model=self.model,
                    limits=LIMITS[name].format(epsilon=epsilon),
                    **{
                        role: ", ".join(f'{c} = "{folder}/{role}-{c}.jsonl"' for c in CLIENTS)
                        for role in ("train", "test")
                    },
                )
            )
            (folder / f"tmp-{name}").mkdir()
        self.sites = {name: self.begin(name) for name in SITES}

    def __enter__(self) -> Place:
        self.transport = FlareTransport(Kits.open(self.kits / "hub")).__enter__()
        while len(self.transport.connected()) < len(SITES):
            time.sleep(0.5)
        return self

    def __exit__(self, *exception: object) -> None:
        self.transport.__exit__()
        for process in self.sites.values():
            process.send_signal(signal.SIGINT)
            process.wait()

    def begin(self, name: str) -> subprocess.Popen[bytes]:
        """Start a site."""
        with (self.folder / f"{name}.out").open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "prefed", "site", str(self.kits / name / "site.toml")],
                stdout=out,
                stderr=out,
                umask=0,
                env=os.environ | {"TMPDIR": str(self.folder / f"tmp-{name}"), "OMP_NUM_THREADS": "1"},
            )

    def again(self, name: str) -> None:
        """Kill a site's process, and start it again."""
        self.sites[name].kill()
        self.sites[name].wait()
        self.sites[name] = self.begin(name)

    def state(self, name: str) -> Path:
        """A site's state folder."""
        return self.kits / name / "state"

    def log(self, name: str, what: str) -> str:
        """What the last line of a site's own log that has some words says."""
        return logged(SentLog(self.state(name) / "log"), name, what).replace(f"{self.folder}/", "")

    def spent(self, client: str) -> int:
        """How many visits of a client ``careful`` has counted."""
        return round(Releases(self.state("careful")).spent().get(client, 0.0) * NOISE**2)


class Asked:
    """A run that the hub begins with one site, which it then asks for what it likes.

    Args:
        changes: tables of the experiment, in place of the usual.
    """

    def __init__(self, place: Place, site: str, method: str = "feddpo", **changes: Any) -> None:
        self.place, self.site, self.run = place, site, secrets.token_hex(8)
        local = {"kind": "local", "clip": 0.05, "noise_multiplier": NOISE, "delta": DELTA}
        self.experiment = Experiment.model_validate(
            {
                "rounds": 50,
                "data": {"train": "a site's", "partition": {"by": "iid", "clients": 1}},
                "model": {"name": str(place.model), "lora": {"rank": 2, "dropout": 0.0}},
                "method": {"name": method, "lr": 0.01, "local_steps": 1, "batch_size": PAIRS},
                "merge": {"weights": "uniform"},
                "privacy": local if site == "careful" else {"minimum_pairs": 4},
                "engine": {"threads": 1},
                **changes,
            }
        )
        self.sites = Sites(place.transport, "wards", self.run, PATIENCE)
        self.clients = self.sites.join(site, experiment_for_sites(self.experiment)).clients
        sizes = {client: ClientSizes(*counts) for client, counts in self.clients.items()}
        dataset = FederatedDataset.without_pairs(dict(sorted(sizes.items())))
        self.job = assemble_job(self.experiment, build_trainers(self.experiment, dataset, None))
        self.server = self.job.method.init_server(self.job.trainers.initial)
        fingerprint = self.job.trainers.fingerprint["model"]
        self.sites.start(site, sorted(sizes), [], fingerprint)

    def visit(
        self, client: str, number: int = 1, receipt: str | None = None, asked: int = 0, **changes: Any
    ) -> tuple[dict[str, Any], bytes]:
        """A site's answer to a visit, from another model if there are changes."""
        sent = self.job.method.exchanges[0].send(self.server, client, self.job.round(number))
        task = Task("visit", client, number, "train", encode(changed(sent, **changes)), asked)
        return self.sites.do(self.site, task, receipt, PATIENCE)

    def evaluate(self, client: str) -> tuple[dict[str, Any], dict[str, float]]:
        """A client's metrics of the first model."""
        sent = changed(self.job.method.publish(self.server, client), MOVED)
        header, body = self.sites.do(self.site, Task("evaluate", client, 1, "", encode(sent)), None, PATIENCE)
        return header, json.loads(body or b"{}")

    def kept(self, client: str = "") -> list[Path]:
        """The private states, or the answers, that the site keeps of the run."""
        folder = self.place.state(self.site) / "runs" / self.run
        return sorted(
            path
            for name in ("clients", "answers")
            for path in (folder / name).glob("*")
            if client in path.name
        )


def changed(sent: Download, add: float = 0.0, twice: bool = False) -> Download:
    """A download with a number added to each of its numbers, or with tensors that are twice as large."""

    def other(group: Tensors) -> Tensors:
        if not twice:
            return Tensors(group.layout, group.flat + add)
        larger = [dataclasses.replace(entry, shape=(2 * entry.size,)) for entry in group.layout.entries]
        return Tensors(Layout(tuple(larger)), group.flat.repeat(2))

    return dataclasses.replace(sent, tensors={name: other(group) for name, group in sent.tensors.items()})


def said(header: dict[str, Any]) -> str:
    """Why a site sends nothing; or that it does."""
    return str(next((header[k] for k in ("refused", "failed", "withheld") if header.get(k)), "answered"))


def disk(place: Place) -> Iterator[Row]:
    """It asks for visits without end, of one round, and for runs."""
    honest, greedy = (Asked(place, "open", "fedpdpo") for _ in range(2))
    receipt = None
    for number in range(1, 11):
        header, _ = honest.visit(CLIENTS[0], number, receipt)
        receipt = header["receipt"]
    for number in range(10):
        greedy.visit(CLIENTS[0], add=number / 1000)
    control = f"10 rounds, each from the last state: {len(honest.kept())} states"
    yield (
        "the hub asks for 10 visits of one round",
        f"NOT STOPPED: {len(greedy.kept())} private states",
        control,
        "",
    )

    noisy = Asked(place, "careful")
    answers = [said(noisy.visit(CLIENTS[0], add=number / 1000)[0]) for number in range(2 * VISITS)]
    got, kept = answers.count("answered"), len(noisy.kept())
    yield (
        f"the same with local noise and `[limits] epsilon` for {VISITS} visits",
        f"{kept} answers kept, then refused",
        f"the first {got}: answered",
        place.log("careful", "[limits] epsilon"),
    )

    before = sizes(place, "open")
    for length in (300, 301, 302):
        Asked(
            place, "open", data={"train": "-", "partition": {"by": "iid", "clients": 1}, "max_length": length}
        )
    after = sizes(place, "open")
    Asked(place, "open", data={"train": "-", "partition": {"by": "iid", "clients": 1}, "max_length": 302})
    same = sizes(place, "open")
    yield (
        "the hub begins 3 runs with another `max_length` each",
        f"NOT STOPPED: {after[0] - before[0]} more orders, {after[1] - before[1]} more token caches",
        f"another run with the last: {same[0] - after[0]} order, {same[1] - after[1]} caches",
        place.log("open", '"join"'),
    )

    sent = encode(honest.job.method.publish(honest.server, CLIENTS[0]))
    folder = place.state("open") / "runs" / honest.run / "published"
    counts = []
    for add in (0.0, 0.1, 0.2):
        body = encode(changed(honest.job.method.publish(honest.server, CLIENTS[0]), add))
        honest.sites.publish("open", 10, dict.fromkeys(CLIENTS, None), body, PATIENCE)
        counts.append(len(list(folder.glob("*.safetensors"))))
    honest.sites.publish("open", 10, dict.fromkeys(CLIENTS, None), sent, PATIENCE)
    yield (
        "the hub sends 3 models of the end to the same clients",
        f"{counts[-1]} is kept",
        f"one: {counts[0]}",
        place.log("open", '"published"'),
    )


def sizes(place: Place, site: str) -> tuple[int, int]:
    """How many runs a site knows, and how many folders of tokens it has."""
    state = place.state(site)
    return len([*state.glob("runs/*/order.json")]), len([*(state / "cache").rglob("clients.json")])


def deleted(place: Place) -> Iterator[Row]:
    """It names another state than the last, so that later visits delete the client's progress."""
    control = ""
    for greedy in (False, True):
        run = Asked(place, "open", "fedpdpo")
        receipt, own = None, []
        for number in (1, 2, 3):
            receipt = run.visit(CLIENTS[0], number, receipt)[0]["receipt"]
            own.append(receipt)
        if not greedy:
            names = " ".join(path.name for path in run.kept())
            there = [str(number) for number, receipt in enumerate(own, 1) if receipt in names]
            control = f"3 rounds, each from the last state: those of rounds {' and '.join(there)} are there"
            continue
        receipt = run.visit(CLIENTS[0], 4)[0]["receipt"]
        kept = [any(own[2] in path.name for path in run.kept())]
        run.visit(CLIENTS[0], 5, receipt)
        kept.append(any(own[2] in path.name for path in run.kept()))
        words = ["there" if each else "deleted" for each in kept]
        yield (
            "a visit from no state, and one from what it left",
            f"round 3's state: {words[0]} after the first, NOT STOPPED: {words[1]} after the second",
            control,
            "",
        )
        header, _ = run.visit(CLIENTS[0], 5, own[2], add=0.1)
        yield (
            "a visit from a state that is gone",
            said(header),
            f"from round 4's: {said(run.visit(CLIENTS[0], 5, receipt, add=0.1)[0])}",
            place.log("open", "is missing"),
        )


def withheld(place: Place) -> Iterator[Row]:
    """It sends a model with which nothing finite comes out, and one that cannot be trained."""
    client = CLIENTS[1]
    noisy, plain = Asked(place, "careful"), Asked(place, "open")
    for who, changes, words in (
        ("a model with which numbers are not finite", {"add": 1e30}, "withheld"),
        ("tensors of another shape", {"twice": True}, "failed"),
    ):
        before = place.spent(client)
        answer = said(noisy.visit(client, **changes)[0])
        counted = place.spent(client) - before
        yield (
            f"the hub sends {who}",
            f"{answer}; counts {counted} against `[limits] epsilon`",
            f"without noise: {said(plain.visit(client, **changes)[0])}",
            place.log("careful", words),
        )
    answers = [said(noisy.visit(client, add=2e30 + number * 1e30)[0]) for number in range(VISITS - 1)]
    other = said(noisy.visit(CLIENTS[2])[0])
    yield (
        f"{VISITS + 1} such visits of one client",
        f"the last: {answers[-1]}",
        f"an ordinary one of another client: {other}, counts {place.spent(CLIENTS[2])}",
        place.log("careful", "[limits] epsilon"),
    )


def figures(place: Place) -> Iterator[Row]:
    """It looks at metrics over few pairs, and at those over sets that differ in one."""

    def over(site: str, rows: int) -> Asked:
        data = {"train": "-", "partition": {"by": "iid", "clients": 1}, "rows": rows}
        return Asked(place, site, data=data)

    enough, more = (over("open", rows) for rows in (4, 5))
    client = CLIENTS[4]
    answers = {run: run.evaluate(client) for run in (enough, more)}
    yield (
        "the hub asks for metrics over 3 pairs, with `[limits] minimum_pairs = 4`",
        said(enough.evaluate(FEW)[0]),
        f"over 4: {said(answers[enough][0])}",
        place.log("open", "pairs to be judged on"),
    )
    try:
        Asked(place, "open", privacy={"minimum_pairs": 3})
        refused = "LET IN"
    except SiteError as error:
        refused = str(error)
    yield (
        "the hub asks for a run with `minimum_pairs = 3`",
        refused,
        f"with 4: agreed, {len(enough.clients)} clients",
        place.log("open", "[limits] minimum_pairs"),
    )
    name = "dpo_loss"
    found = 5 * answers[more][1][name] - 4 * answers[enough][1][name]
    known = own_figures(place, client, 5)[4]
    guess = mean(own_figures(place, client, 5)[:4])
    yield (
        "the hub takes the difference of metrics over 5 and over 4 pairs",
        f"NOT STOPPED: a DPO loss of {found:.5f} for the fifth pair, which has {known:.5f}",
        f"the mean of the first four: {guess:.5f}",
        "",
    )
    header, _ = over("careful", 5).evaluate(client)
    yield (
        "the same with `[limits] evaluate = false`",
        said(header),
        f"without: {said(answers[more][0])}",
        place.log("careful", "evaluate = false"),
    )


def own_figures(place: Place, client: str, rows: int) -> list[float]:
    """The DPO loss of each of a client's first test pairs, from the pairs themselves."""
    found = []
    lines = (place.folder / f"test-{client}.jsonl").read_text().splitlines(keepends=True)[:rows]
    for number, line in enumerate(lines):
        folder = place.folder / f"alone-{number}"
        folder.mkdir(exist_ok=True)
        (folder / "test.jsonl").write_text(line)
        run = Known(place, folder, {client: str(folder / "test.jsonl")})
        job, server = run.job, run.server
        state = job.method.init_client(job.trainers.initial, client)
        published = changed(job.method.publish(server, client), MOVED)
        found.append(evaluate_client(job, client, state, published, 1)["dpo_loss"])
    return found


class Known:
    """The hub's own job over pairs that it knows."""

    def __init__(self, place: Place, folder: Path, test: dict[str, str]) -> None:
        experiment = Experiment.model_validate(
            {
                "rounds": 50,
                "data": {"train": {c: f"{place.folder}/train-{c}.jsonl" for c in CLIENTS}, "test": test},
                "model": {"name": str(place.model), "lora": {"rank": 2, "dropout": 0.0}},
                "method": {"name": "feddpo", "lr": 0.01, "local_steps": 1, "batch_size": PAIRS},
                "engine": {"threads": 1},
            }
        )
        self.goal = experiment.method.settings.goal()
        self.job = build_job(experiment, folder / "cache")
        self.server = self.job.method.init_server(self.job.trainers.initial)


def sides(place: Place) -> Iterator[Row]:
    """It knows a client's pairs without their order, and infers from one upload which side was chosen."""
    known = Known(place, place.folder, {c: f"{place.folder}/test-{c}.jsonl" for c in CLIENTS})
    shares = {}
    for site in SITES:
        run = Asked(place, site)
        right = []
        for client in CLIENTS[4:]:
            header, body = run.visit(client)
            assert said(header) == "answered", header
            sent = run.job.method.exchanges[0].send(run.server, client, run.job.round(1))
            initial = known.job.trainers.initial
            before = initial.replace(*sent.tensors.values())
            after = initial.replace(*decode_upload(body).tensors.values())
            update = (after - before).flat.double()
            for row in trainers_of(known.job).dataset.clients[client].train:
                slope, _ = score(known.job, client, int(row), before, after, update, known.goal)
                right.append(slope > 0)
        shares[site] = f"{mean(right):.0%} of {len(right)} pairs"
    yield (
        "the hub infers from an upload which response was chosen",
        f"with local noise: {shares['careful']}",
        f"NOT STOPPED without: {shares['open']}",
        place.log("careful", '"train"'),
    )


def drawn(place: Place) -> Iterator[Row]:
    """It asks for the same upload again, to average the noise away."""
    client, run = CLIENTS[5], Asked(place, "careful")
    before = place.spent(client)
    _, first = run.visit(client)
    _, second = run.visit(client)
    place.again("careful")
    _, third = run.visit(client)
    once = place.spent(client) - before
    _, other = run.visit(client, asked=1)
    counted = place.spent(client) - before - once
    yield (
        "the hub asks for an upload again, also after the site was killed",
        f"the same bytes: {first == second == third and bool(first)}; counts {once}",
        f"another request, `asked = 1`: other bytes: {other != first and bool(other)}; counts {counted}",
        place.log("careful", '"train"'),
    )


def bait(place: Place) -> Iterator[Row]:
    """Its experiment names data and a model that are there, and would change what the site says."""
    texts = [f"other words {number}" for number in range(30)]
    model = place.folder / "bait-model"
    make_tiny(model, texts, Key(1), layers=1, width=16, heads=2, vocabulary=270, steps=2)
    rows = [{"prompt": t, "chosen": f" a{t}", "rejected": f" b{t}"} for t in texts]
    (place.folder / "bait.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = Experiment.model_validate(
        {
            "rounds": 5,
            "data": {
                "train": {"bait": str(place.folder / "bait.jsonl")},
                "test_fraction": 0.2,
                "flip": ["bait"],
            },
            "model": {"name": str(model), "revision": "bait", "lora": {"rank": 2}},
            "method": {"name": "feddpo", "lr": 0.01, "local_steps": 1, "batch_size": 2},
            "privacy": {"minimum_pairs": 4},
            "engine": {"threads": 1},
        }
    )
    own = build_job(asked.model_copy(update={"model": asked.model.model_copy(update={"revision": None})}),
                    place.folder / "bait-cache")  # fmt: skip
    common: dict[str, Any] = {"format": FORMAT, "prefed": VERSION, "federation": "wards"}
    common["run"] = secrets.token_hex(8)

    def ask(**header: Any) -> dict[str, Any]:
        return unpack(place.transport.call("open", pack(**common, **header), PATIENCE, 1 << 24))[0]

    clients = ask(kind="join", experiment=to_toml(asked))["clients"]
    reported = ask(kind="start", members=sorted(clients), unseen=[])["fingerprint"]["model"]
    plain = Asked(place, "open")
    same = reported == plain.job.trainers.fingerprint["model"] and clients == plain.clients
    counts = {name: size.train for name, size in trainers_of(own).dataset.sizes.items()}
    differs = own.trainers.fingerprint["model"] != reported
    yield (
        "an experiment names data and a model at paths of the hub's choice",
        f"{'the site has its own' if same else 'READ'}: {len(clients)} clients, model {reported[:8]}",
        f"loaded by the hub itself: {counts}, another model: {differs}",
        place.log("open", '"join"'),
    )


def modes(place: Place) -> Iterator[Row]:
    """Everything that two sites have written by now, with umask 0: who may read it."""
    loose, deep, count = [], [], 0
    for name in SITES:
        for top in (place.state(name), place.kits / name / "kit", place.folder / f"tmp-{name}"):
            for path in top.rglob("*"):
                if not path.is_file() or path.is_symlink():
                    continue
                count += 1
                others = [part for part in (path, *path.parents) if part.is_relative_to(top)]
                if all(part.stat().st_mode & 0o077 for part in others):
                    loose.append(str(path.relative_to(place.folder)))
                if path.stat().st_mode & 0o077 and top == place.state(name):
                    deep.append(str(path.relative_to(top)))
    control = place.folder / "open.out"
    word = stat.filemode(control.stat().st_mode)
    yield (
        "a local user reads what a site has written",
        f"{count} files, of which others may reach {len(loose)} {loose[:3]}; in `state/` not 0600: "
        f"{len(deep)} {sorted({*deep})[:4]}",
        f"its screen's file, which a shell made: {word}",
        "",
    )


ATTACKS: tuple[Callable[[Place], Iterator[Row]], ...] = (
    disk, deleted, withheld, figures, sides, drawn, bait, modes,
)  # fmt: skip


def asked(folder: Path, only: Collection[str] = ()) -> Iterator[Row]:
    """All rows, or those of some attacks by name."""
    silence_transformers()
    torch.set_num_threads(1)
    with Place(folder) as place:
        for attack in ATTACKS:
            if only and attack.__name__ not in only:
                continue
            yield from attack(place)


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    os.umask(0o022)
    try:
        print(HEAD)
        for row in asked(folder, only=sys.argv[1:]):
            print_row(*row)
    except SiteError:
        for path in folder.glob("*.out"):
            print(path.read_text()[-3000:], file=sys.stderr)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
