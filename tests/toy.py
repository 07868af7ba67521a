"""A whole federation without a language model: each client's loss is a quadratic.

:func:`build` makes a :class:`prefed.engines.Job` from a line of JSON, so that worker processes and
killed subprocesses build the same one. The method shares ``lora``, keeps ``head`` and a count of its
visits private, and has two exchanges: ``score`` asks everybody every second round, ``train`` the cohort.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from prefed.core import (
    POOLED,
    Callback,
    ClientTrainer,
    Download,
    Entry,
    Exchange,
    Key,
    Layout,
    Merged,
    Method,
    Objective,
    Optimizer,
    Owner,
    Ownership,
    Phase,
    Privacy,
    Round,
    State,
    Tensors,
    Upload,
)
from prefed.core.wire import encode
from prefed.engines import BACKENDS, BackendSettings, InProcess, Job, JobFactory, ServerRounds
from prefed.engines.config import CohortConfig, EvaluateConfig, StopConfig
from prefed.engines.tasks import MemoryStates as MemoryStates
from prefed.merge import Aggregator, BadUpload, MergeConfig
from prefed.methods import METHODS
from prefed.methods.base import TrainingSettings
from prefed.store import RunWriter
from prefed.testing import Quadratic, QuadraticTrainer
from prefed.train.feedback import CHOICES, PAIRS, Feedback
from prefed.train.metrics import ChoiceScores, PairScores

LAYOUT = Layout(
    (
        Entry("lora/0/A", (2, 3), "lora", 0, "A"),
        Entry("lora/0/B", (3, 2), "lora", 0, "B"),
        Entry("head", (4,), "head"),
        Entry("norm", (1,), "norm"),
    )
)
DEFAULTS: dict[str, Any] = {
    "clients": 6,
    "rounds": 4,
    "cohort": 3,
    "every": 1,
    "seed": 7,
    "personal": True,
    "pooled": False,
    "faults": {},
    "pause": 0.0,
    "untested": [],
    "untrained": [],
    "evaluation_cohort": None,
    "order": 1,
    "minimum_pairs": 0,
    "method": None,
    "settings": {},
    "merge": {},
    "privacy": {},
    "stop": None,
}


class Sizes(NamedTuple):
    """Pairs of one client."""

    train: int
    validation: int
    test: int


class ToyTrainers:
    """Quadratic clients. A pair's "log-probabilities" are minus the distances to its target and to 0."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        names = [f"Client {number}/ü" for number in range(options["clients"])][:: options["order"]]
        self.data = {}
        for name in names:
            draw = Key(3).at("data", name).numpy()
            centre = draw.normal(size=LAYOUT.size)
            self.data[name] = Quadratic(
                torch.from_numpy(centre + 0.3 * draw.normal(size=(int(draw.integers(3, 9)), LAYOUT.size)))
            )
        start = Key(3).at("initial").numpy().normal(size=LAYOUT.size)
        self.initial = Tensors(LAYOUT, torch.from_numpy(start))
        self.clients = {
            name: Sizes(
                0 if name in options["untrained"] else data.size,
                data.size if options["stop"] else 0,
                0 if name in options["untested"] else data.size,
            )
            for name, data in self.data.items()
        }
        self.fingerprint = {"data": str(options["clients"]), "model": "toy"}
        self.adapters: list[Path] = []
        self.dataset = None  # no pair has a text

    def trainer(self, client: str, now: Round, key: Key, ownership: Ownership) -> ClientTrainer:
        time.sleep(self.options["pause"])
        match self.options["faults"].get(client):
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                print("hanging", flush=True)
                while True:
                    pass
        if client == POOLED:
            targets = torch.cat([self.data[name].targets for name in sorted(self.data)])
            return QuadraticTrainer(client, Quadratic(targets), now, key, ownership, self.initial)
        return QuadraticTrainer(client, self.data[client], now, key, ownership, self.initial)

    def score(self, client: str, tensors: Tensors, split: str) -> PairScores | ChoiceScores:
        # On validation pairs the clients want the opposite.
        targets = self.data[client].targets * (-1 if split == "validation" else 1)

        def distances(flat: torch.Tensor) -> np.ndarray:
            return -torch.stack([(flat - targets).norm(dim=1), (flat + targets).norm(dim=1)], 1).numpy()

        policy, base = distances(tensors.flat), distances(self.initial.flat)
        if kind_of(self.options) is CHOICES:
            return ChoiceScores(*(np.repeat(each[:, :1] - each[:, 1:], 2, axis=1) for each in (policy, base)))
        return PairScores(policy, base, np.full((len(targets), 2), 5))

    def save_adapter(self, tensors: Tensors, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter.bin").write_bytes(encode(State({"model": tensors})))


def owner(entry: Entry, personal: bool = True) -> Owner:
    """``lora`` is shared, ``head`` personal (or shared), ``norm`` frozen."""
    if entry.part == "norm":
        return Owner.FROZEN
    return Owner.PERSONAL if personal and entry.part == "head" else Owner.SHARED


def toy_method(options: Mapping[str, Any]) -> Method:
    """Averages what is shared; ``faults`` (client → kind) make clients misbehave."""
    ownership = Ownership.of(LAYOUT, lambda entry: owner(entry, options["personal"]))
    faults = options["faults"]

    def init_server(initial: Tensors) -> State:
        return State({"model": ownership.select(initial, Owner.SHARED)}, {"merges": 0, "scores": {}})

    def init_client(initial: Tensors, client: str) -> State:
        return State({"personal": ownership.select(initial, Owner.PERSONAL)} if options["personal"] else {})

    def send(server: State, client: str, now: Round) -> Download:
        return Download({"model": server.tensors["model"]}, {"merges": server.values["merges"]})

    def train(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        start = trainer.assemble(*download.tensors.values(), *private.tensors.values())
        phase = Phase(
            "train",
            ownership.names(Owner.SHARED, Owner.PERSONAL),
            Objective("dpo"),
            Optimizer("sgd", lr=0.1, clip=0.0),
            batch_size=2,
            epochs=1,
        )
        trained = trainer.train(start, phase)
        shared = ownership.select(trained.tensors, Owner.SHARED)
        upload = trainer.upload({"model": shared}, {"loss": trained.loss})
        if options["personal"]:
            own = ownership.select(trained.tensors, Owner.PERSONAL)
            visits = private.values.get("visits", 0)
            private = State({"personal": own}, {"visits": visits + 1})
        return misbehave(upload, trained.tensors, faults.get(trainer.client)), private

    def score(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        loss = trainer.loss(trainer.assemble(*download.tensors.values()), Objective("dpo"), "validation")
        if options["personal"]:
            private = private.update(values={"scored": trainer.round.number})
        return trainer.upload({}, {"score": loss}), private

    def merge(server: State, uploads: Sequence[Upload], now: Round) -> Merged:
        for upload in uploads:
            if faults.get(upload.client) == "unmerged":
                raise BadUpload(upload.client, "not to be merged")
        total = sum(upload.weight for upload in uploads)
        mean = sum(
            (u.tensors["model"] * (u.weight / total) for u in uploads[1:]),
            uploads[0].tensors["model"] * (uploads[0].weight / total),
        )
        merges = server.values["merges"] + 1
        return server.update({"model": mean}, {"merges": merges}), {"merges": merges}

    def tally(server: State, uploads: Sequence[Upload], now: Round) -> Merged:
        return server.update(values={"scores": dict(scores(uploads))}), {}

    def scores(uploads: Sequence[Upload]) -> Iterator[tuple[str, float]]:
        """Of those that may report."""
        return ((u.client, u.scalars["score"]) for u in uploads if "score" in u.scalars)

    def predict(trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        return trainer.assemble(*published.tensors.values(), *private.tensors.values())

    return Method(
        name="toy",
        source="a test",
        ownership=ownership,
        init_server=init_server,
        init_client=init_client,
        exchanges=(
            Exchange(
                "score",
                send,
                score,
                tally,
                to="all",
                due=lambda number: number % 2 == 0,
                scalars=frozenset({"score"}),
                groups=lambda client, now: {},
            ),
            Exchange("train", send, train, merge),
        ),
        publish=lambda server, client: Download({"model": server.tensors["model"]}),
        predict=predict,
        pooled=options["pooled"],
        personal=options["personal"],
    )


def settings_of(options: Mapping[str, Any]) -> TrainingSettings:
    """``options["settings"]`` of the registered method ``options["method"]``, with small steps."""
    kind = METHODS[options["method"]]
    return kind.Settings(**{"lr": 0.05, "local_steps": 2, "batch_size": 2, **options["settings"]})


def real_method(options: Mapping[str, Any]) -> Method:
    """The registered method ``options["method"]`` with :func:`settings_of`."""
    kind, chosen = METHODS[options["method"]], settings_of(options)
    return kind.build(
        chosen, LAYOUT, Aggregator(MergeConfig(**options["merge"]), LAYOUT, 2.0), options["rounds"]
    )


def misbehave(upload: Upload, tensors: Tensors, fault: str | None) -> Upload:
    """What a client with this fault sends instead."""
    model = upload.tensors["model"]
    match fault:
        case "nan":
            return replace(upload, tensors={"model": model * float("nan")})
        case "leak":
            return replace(upload, tensors={"model": model, "extra": tensors.select(["head"])})
        case "number":
            return replace(upload, scalars={"loss": 1.0, "first_prompt_length": 17.0})
        case "infinite":
            return replace(upload, scalars={"loss": float("inf")})
        case "heavy":
            return replace(upload, weight=1e6)
        case "light":
            return replace(upload, weight=1.0)
        case "shape":
            first, *rest = model.layout.entries
            layout = Layout((replace(first, shape=first.shape[::-1]), *rest))
            return replace(upload, tensors={"model": Tensors(layout, model.flat)})
        case "stranger":
            return replace(upload, client="somebody else")
    return upload


def kind_of(options: Mapping[str, Any]) -> Feedback:
    """The kind of feedback of the method."""
    return settings_of(options).feedback if options["method"] else PAIRS


def options(**changes: Any) -> dict[str, Any]:
    """All options, those given changed."""
    assert not set(changes) - set(DEFAULTS)
    return {**DEFAULTS, **changes}


def text(**changes: Any) -> str:
    """The options as JSON, for :func:`build`."""
    return json.dumps(options(**changes))


def build(text: str) -> Job:
    """The job with these options."""
    chosen = json.loads(text)
    return Job(
        trainers=ToyTrainers(chosen),
        method=real_method(chosen) if chosen["method"] else toy_method(chosen),
        seed=chosen["seed"],
        rounds=chosen["rounds"],
        cohort=CohortConfig(size=chosen["cohort"]),
        evaluate=EvaluateConfig(every=chosen["every"], clients=chosen["evaluation_cohort"]),
        privacy=Privacy(minimum_pairs=chosen["minimum_pairs"], **chosen["privacy"]),
        stop=StopConfig(**chosen["stop"]) if chosen["stop"] else None,
        feedback=kind_of(chosen),
    )


def of_experiment(experiment: Any, folder: Path) -> Job:
    """In the place of :func:`prefed.runs.build.build_job`: the toy, at the experiment's seed and length.

    ``data.limit``, which the toy has no other use for, is the pause of a visit in milliseconds.
    """
    chosen = options(pause=(experiment.data.limit or 0) / 1000)
    return Job(
        ToyTrainers(chosen),
        toy_method(chosen),
        experiment.seed,
        experiment.rounds,
        experiment.cohort,
        EvaluateConfig(every=experiment.evaluate.every),
    )


class InterruptAt(Callback):
    """Interrupts a run after so many tasks."""

    def __init__(self, task):
        self.left = task

    def on_task_end(self, what, done, of):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class Warned(Callback):
    """Keeps warnings and notes."""

    def __init__(self):
        self.texts, self.notes = [], []

    def on_warning(self, text):
        self.texts.append(text)

    def on_note(self, text):
        self.notes.append(text)


def run(
    path: Path,
    *,
    resume: bool = False,
    backend: Any = InProcess,
    callback: Any = None,
    answers: Any = None,
    **changes: Any,
) -> State:
    """Run the toy in ``path`` to its end.

    ``backend`` makes a backend of the job and the store of private states, or is the name of one.
    """
    make = partial(registered, backend, text(**changes)) if isinstance(backend, str) else backend
    return run_job(path, build(text(**changes)), make, callback, resume=resume, answers=answers)


def registered(name: str, options: str, job: Job, states: Any, workers: int = 1) -> Any:
    """The backend of that name, for a job with these options (as JSON); a test is skipped without Ray.

    A process that is not forked imports PyTorch, which takes longer than a run of the toy: a test asks for
    more than one where their number matters.
    """
    if name == "ray":
        from ray_cluster import two_nodes

        two_nodes()
    return BACKENDS[name](job, lambda: JobFactory("toy:build", options), states, BackendSettings(workers))


def run_job(
    path: Path,
    job: Job,
    make: Any = InProcess,
    callback: Any = None,
    *,
    resume: bool = False,
    answers: Any = None,
) -> State:
    """Run any job in ``path`` to its end."""
    with RunWriter(path, resume=resume) as writer, make(job, writer.states) as backend:
        writer.begin(encode(job.method.init_server(job.trainers.initial)), job.trainers.fingerprint)
        return ServerRounds(job, writer, backend, callback or Callback(), answers=answers).run()


def outcome(path: Path) -> dict[str, Any]:
    """All that a run leaves behind, without what a clock or the system decides: file → content."""
    content: dict[str, Any] = {}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if file.is_dir() or file.name in ("LOCK", "run.log"):
            continue
        if file.name == "rounds.jsonl":
            records = [json.loads(line) for line in file.read_text().splitlines()]
            content[name] = [{k: v for k, v in record.items() if k != "seconds"} for record in records]
        elif file.name == "summary.json" or file.name.startswith("COMMIT"):
            tables = json.loads(file.read_text())
            for table in (tables, tables.get("totals", {})):
                for clocked in ("seconds", "peak_memory_mb", "digest", "origin"):
                    table.pop(clocked, None)
            # The log's digest is one over the rounds' seconds too.
            tables.get("digests", {}).pop("rounds", None)
            content[name] = tables
        else:
            content[name] = file.read_bytes()
    return content


def left(path: Path) -> dict[str, Any]:
    """The same without what is only kept for speed."""
    return {name: value for name, value in outcome(path).items() if not name.startswith("cache/")}


def records(path: Path) -> list[dict[str, Any]]:
    """The log of a run's rounds."""
    return [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
