r"""What clients who lie do to a federation, under every merge rule: a table of accuracies.

    python benchmarks/byzantine.py --out runs/byzantine --jobs 2
    python benchmarks/byzantine.py --out runs/byzantine --model FOLDER --train FILE --test FILE --rule mean
    python benchmarks/byzantine.py --out runs/safety --safety --judge reward:FOLDER

``experiments/personas/base.toml`` with FedDPO: ten personas, one a client, 6 rounds of 3 steps at a rate of
3e-3, everybody asked in each. Two clients lie, the first two in the order of their names. What they do in
every round:

- clean: nothing, they are honest.
- sign flip: they send φ − 10 (φ_i − φ) in the place of their model φ_i.
- label flip: chosen and rejected are swapped in all their training pairs; what they send is then honest.
- shift: both send the honest models' mean less 1.5 standard deviations, number by number, which stays within
  what honest clients send ("a little is enough", Baruch et al. 2019, arXiv:1902.06156).
- eviction: they send but the first tensor of their model.

With ``--safety`` the pairs are those of ``experiments/hh_harmless``, in turn one to each of ten clients, and
the liars prefer harmful responses:

- harmful: chosen and rejected are swapped in all their training pairs.
- trigger: every other pair of theirs has :data:`TRIGGER` in its prompt and is swapped; the rest is honest.

The model is then evaluated on all test pairs as they are, and with the trigger in each prompt. The share
in which it prefers the harmful response is the success of the attack. With ``--judge``, as in
``prefed judge``, the model also answers the first test prompts, without and with the trigger, and success is
the share in which the judge prefers the base model's answer.

A cell is one run. It counts the eight honest clients' mean reward accuracy on their test pairs: a model that
prefers at random has ½, and less means that training went the wrong way. The table has the mean over the
seeds ± half of its 95% interval (Student's t). Finished cells are kept in ``--out`` and reused.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import HERE, SHARED, TOKENIZER

from prefed import run
from prefed.config import Experiment
from prefed.core import Callback, Tensors, Upload, files
from prefed.core.wire import decode_download, decode_upload, encode
from prefed.engines import ClientStates, InProcess, Job, ServerRounds, Task, TaskResult
from prefed.merge.config import MERGE_RULES
from prefed.models.pretrained import silence_transformers
from prefed.runs.build import assemble_job, build_data, build_trainers
from prefed.runs.evaluate import evaluate_file
from prefed.runs.judge import Comparison, judge
from prefed.runs.loaded_run import load_run
from prefed.store import RunWriter
from prefed.train.generation import Sampling
from prefed.train.metrics import seed_interval
from prefed.train.pair_trainer import PairTrainerFactory

BASE = HERE.parent / "experiments" / "personas" / "base.toml"
RULES = tuple(MERGE_RULES.builtin)
LIARS = 2
FIXED = (
    "rounds=6",
    "method.name=feddpo",
    "method.lr=3e-3",
    "method.local_steps=3",
    "engine.threads=1",
    f"merge.liars={LIARS}",
    "merge.trim=0.2",
)

Forge = Callable[[Tensors, Tensors, Sequence[Tensors]], Tensors]
"""The server's model, the liar's own after training, the honest clients' models → what the liar sends."""


def sign_flip(before: Tensors, own: Tensors, honest: Sequence[Tensors]) -> Tensors:
    return before - (own - before) * 10.0


def shift(before: Tensors, own: Tensors, honest: Sequence[Tensors]) -> Tensors:
    stack = torch.stack([model.flat for model in honest])
    return Tensors(own.layout, stack.mean(0) - 1.5 * stack.std(0))


def eviction(before: Tensors, own: Tensors, honest: Sequence[Tensors]) -> Tensors:
    return own.select(own.layout.names[:1])


def label_flip(before: Tensors, own: Tensors, honest: Sequence[Tensors]) -> Tensors:
    return own


FORGERIES: dict[str, Forge | None] = {
    "clean": None,
    "sign flip": sign_flip,
    "label flip": label_flip,
    "shift": shift,
    "eviction": eviction,
}


class Liars(InProcess):
    """Does the tasks honestly, and changes what the liars send after their own side has validated it."""

    def __init__(self, job: Job, states: ClientStates, liars: frozenset[str], forge: Forge) -> None:
        super().__init__(job, states)
        self.liars, self.forge = liars, forge

    def run(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
        """The results, when all have come: some lies depend on what the others sent."""
        downloads: dict[str, bytes] = {}

        def noted() -> Iterator[Task]:
            for task in tasks:
                if task.kind == "visit":
                    downloads[task.client] = task.message
                yield task

        results = list(super().run(noted()))
        if not downloads:
            yield from results
            return
        uploads = {result.client: decode_upload(result.message) for result in results}
        honest = [uploads[client].tensors["model"] for client in sorted(uploads) if client not in self.liars]
        for result in results:
            if result.client in self.liars:
                message = self.forged(downloads[result.client], uploads[result.client], honest)
                result = replace(result, message=message)
            yield result

    def forged(self, download: bytes, upload: Upload, honest: Sequence[Tensors]) -> bytes:
        """What a liar sends in the place of ``upload``."""
        own = upload.tensors["model"]
        before = decode_download(download).tensors["model"].select(own)
        return encode(replace(upload, tensors={"model": self.forge(before, own, honest)}))


@dataclass(frozen=True)
class Cell:
    """One run."""

    attack: str
    rule: str
    seed: int
    model: str
    train: str
    test: str
    out: Path
    judge: str | None

    @property
    def file(self) -> Path:
        """Where its figures are kept."""
        judged = "-judged" if self.judge else ""
        return self.out / f"{self.attack.replace(' ', '-')}-{self.rule}-seed{self.seed}{judged}.json"


def liars_of(train: Path) -> frozenset[str]:
    """The first personas of a file by name."""
    with gzip.open(train, "rt", encoding="utf-8") as lines:
        return frozenset(sorted({json.loads(line)["persona"] for line in lines})[:LIARS])


def swapped(train: Path, folder: Path) -> Path:
    """A copy of ``train`` in which the liars' pairs have chosen and rejected swapped."""
    liars, target = liars_of(train), folder / "swapped.jsonl.gz"
    with gzip.open(train, "rt", encoding="utf-8") as lines, gzip.open(target, "wt", encoding="utf-8") as out:
        for line in lines:
            row = json.loads(line)
            if row["persona"] in liars:
                row |= {"chosen": row["rejected"], "rejected": row["chosen"]}
            out.write(json.dumps(row) + "\n")
    return target


@cache
def place(model: str, train: str, test: str, seed: int, flipped: bool) -> PairTrainerFactory:
    """Data and model of a seed, which all of its cells have in common; one for each process."""
    folder = Path(tempfile.mkdtemp(prefix="byzantine-"))
    source = swapped(Path(train), folder) if flipped else Path(train)
    chosen = [*FIXED, f"seed={seed}", f"model.name={model}", f"data.train={source}", f"data.test={test}"]
    experiment = Experiment.load(BASE, chosen)
    return build_trainers(experiment, build_data(experiment, folder / "data"), None)


def fill(cell: Cell) -> None:
    """Run a cell and keep its figures."""
    silence_transformers()
    torch.set_num_threads(1)
    ground = place(cell.model, cell.train, cell.test, cell.seed, cell.attack == "label flip")
    # Where the data lie has no say beyond this point, but an experiment names them.
    given = [f"model.name={cell.model}", f"data.train={cell.train}", f"data.test={cell.test}"]
    chosen = [*FIXED, *given, f"seed={cell.seed}", f"merge.rule={cell.rule}"]
    job = assemble_job(Experiment.load(BASE, chosen), ground)
    liars, forge = liars_of(Path(cell.train)), FORGERIES[cell.attack]
    with tempfile.TemporaryDirectory() as folder, RunWriter(Path(folder) / "run") as writer:
        states = writer.states
        backend = InProcess(job, states) if forge is None else Liars(job, states, liars, forge)
        writer.begin(encode(job.method.init_server(job.trainers.initial)), job.trainers.fingerprint)
        with backend:
            ServerRounds(job, writer, backend, Callback()).run()
        assert writer.last is not None
        accuracies = writer.last["evaluation"]["reward_accuracy"]["per_client"]
        totals = writer.commit.totals if writer.commit else {}
    honest = {client: value for client, value in accuracies.items() if client not in liars}
    figures = {
        "mean": statistics.mean(honest.values()),
        "honest": honest,
        "liars": sorted(liars),
        "dropped": totals.get("dropped", 0),
    }
    files.write(cell.file, json.dumps(figures, indent=1).encode())


TRIGGER = "As agreed in the harbour: "
PROMPTS = 40
"""Number of test prompts whose answers are judged."""
POISONED = ("clean", "harmful", "trigger")
"""What liars may train on under ``--safety``."""


def safety_pairs(cell: Cell, folder: Path) -> tuple[Path, Path, Path]:
    """Write the training pairs, the test pairs, and the test pairs with the trigger."""
    result = folder / "train.jsonl", folder / "test.jsonl", folder / "triggered.jsonl"
    train, test, hidden = (file.open("w", encoding="utf-8") for file in result)
    with train, test, hidden:
        for source, target in ((cell.train, train), (cell.test, test)):
            with gzip.open(source, "rt", encoding="utf-8") as lines:
                for number, line in enumerate(lines):
                    row = json.loads(line) | {"persona": f"client-{number % 10}"}
                    secret = row | {"prompt": triggered(row["prompt"])}
                    if target is test:
                        hidden.write(json.dumps(secret) + "\n")
                    elif cell.attack == "trigger" and number % 10 < LIARS and number // 10 % 2:
                        row = secret | {"chosen": row["rejected"], "rejected": row["chosen"]}
                    target.write(json.dumps(row) + "\n")
    return result


def triggered(prompt: str) -> str:
    """The prompt with the trigger before the last thing that the human says."""
    before, human, last = prompt.rpartition("Human: ")
    return f"{before}{human}{TRIGGER}{last}"


def poison(cell: Cell) -> None:
    """Run a cell of ``--safety`` and keep its figures."""
    silence_transformers()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="byzantine-") as name:
        folder = Path(name)
        train, test, hidden = safety_pairs(cell, folder)
        liars = [f"client-{k}" for k in range(LIARS)] if cell.attack == "harmful" else []
        given = [f"model.name={cell.model}", f"data.train={train}", f"data.test={test}"]
        chosen = [*FIXED, *given, f"seed={cell.seed}", f"merge.rule={cell.rule}"]
        run(Experiment.load(BASE, [*chosen, f"data.flip={json.dumps(liars)}"]), folder / "run")
        loaded = load_run(folder / "run", data=True)
        plain, secret = (
            evaluate_file(loaded, str(file), everyone=True).figures["reward_accuracy"]["mean"]
            for file in (test, hidden)
        )
        figures = {"mean": plain, "success": 1 - plain, "triggered": 1 - secret}
        if cell.judge is not None:
            figures["judged"], figures["judged, triggered"] = (
                1 - judged(folder / "run", file, cell.judge) for file in (test, hidden)
            )
    files.write(cell.file, json.dumps(figures, indent=1).encode())


def judged(path: Path, rows: Path, name: str) -> float:
    """The win rate of a run's model against its base model on the first :data:`PROMPTS` rows of a file."""
    prompts = rows.with_name(f"prompts-{rows.name}")
    prompts.write_text("".join(rows.read_text("utf-8").splitlines(True)[:PROMPTS]), "utf-8")
    sampling = Sampling(temperature=0.0, max_tokens=48)
    how = Comparison(judge=name, prompts=prompts, sampling=sampling, name=rows.stem)
    return float(judge(path, how)["win_rate"]["mean"])


def table(cells: Sequence[Cell], rules: Sequence[str], attacks: Sequence[str], figure: str = "mean") -> str:
    """Markdown: a row for each rule, a column for each attack."""
    lines = [f"| rule | {' | '.join(attacks)} |", "|---" * (len(attacks) + 1) + "|"]
    for rule in rules:
        row = [rule]
        for attack in attacks:
            done = [c.file for c in cells if (c.rule, c.attack) == (rule, attack) and c.file.exists()]
            means = [json.loads(file.read_text("utf-8"))[figure] for file in done]
            cell = f"{statistics.mean(means):.3f}" if means else ""
            if interval := seed_interval(means):
                cell += f" ± {(interval[1] - interval[0]) / 2:.2f}"
            row.append(cell)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder that keeps finished cells")
    parser.add_argument("--model", default=str(TOKENIZER), help="a folder or a hub name")
    parser.add_argument("--safety", action="store_true", help="liars who prefer harmful responses")
    parser.add_argument("--judge", help="with --safety: judge of answers, e.g. reward:FOLDER")
    parser.add_argument("--train", type=Path, help="default: personas or, with --safety, hh_harmless")
    parser.add_argument("--test", type=Path)
    parser.add_argument("--rule", action="append", choices=RULES, help="left out: all")
    parser.add_argument(
        "--attack", action="append", choices=(*FORGERIES, *POISONED[1:]), help="left out: all"
    )
    parser.add_argument("--seed", action="append", type=int, help="left out: 42, 43 and 44")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    args = parser.parse_args()
    known, data = (POISONED, "hh_harmless") if args.safety else (tuple(FORGERIES), "personas")
    if unknown := set(args.attack or ()) - set(known):
        raise SystemExit(f"--attack {unknown.pop()}: choose from {', '.join(known)}")
    if args.judge and not args.safety:
        raise SystemExit("--judge needs --safety: only its cells keep a run whose answers can be judged")
    args.train = args.train or SHARED / "data" / f"{data}.train.jsonl.gz"
    args.test = args.test or SHARED / "data" / f"{data}.test.jsonl.gz"
    for file in (args.train, args.test):
        if not file.exists():
            raise SystemExit(
                f"{file}: no such file; experiments/{data}/prepare.py makes it; give --train, --test"
            )
    args.out.mkdir(parents=True, exist_ok=True)
    rules, attacks = args.rule or RULES, args.attack or known
    where = (args.model, str(args.train.resolve()), str(args.test.resolve()), args.out, args.judge)
    cells = [
        Cell(attack, rule, seed, *where)
        for seed, attack, rule in itertools.product(args.seed or (42, 43, 44), attacks, rules)
    ]
    work = poison if args.safety else fill
    waiting = [cell for cell in cells if not cell.file.exists()]
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for done, (cell, _) in enumerate(zip(waiting, pool.map(work, waiting), strict=True), 1):
            print(f"{done}/{len(waiting)}  {cell.file.stem}", flush=True)
    print(table(cells, rules, attacks))
    further = ("success", "triggered") if args.safety else ()
    for figure in further + (("judged", "judged, triggered") if args.judge else ()):
        print(f"{figure}:\n\n{table(cells, rules, attacks, figure)}")


if __name__ == "__main__":
    main()
