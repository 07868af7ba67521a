"""CPU time of whole runs compared with TRL's DPOTrainer made anew for each client and round, as OpenFedLLM
does it.

    OMP_NUM_THREADS=1 python benchmarks/rounds.py
    OMP_NUM_THREADS=1 python benchmarks/rounds.py --data PAIRS.jsonl.gz --model FOLDER

The work: HH-RLHF harmless, 2,308 pairs on 5 clients, 3 of them a round, 3 steps of 4 pairs, a Llama of 4
layers of 256 with random weights and vocabulary 4,096 (or ``--model``), LoRA 8/16 on PEFT's default modules
(q and v), dropout 0, fp32. A file with fewer pairs is filled up with those of the ``.test.`` file next to it,
and then from its start again, with a number before each copy's prompt.

- ``prefed``: ``prefed.run`` with ``feddpo``, from an empty folder: reading, tokenising, loading, references,
  rounds, and every file that a run writes.
- ``anew``: what OpenFedLLM's ``main_dpo.py`` does for each client of a round, with the TRL that is installed:
  the round's pairs drawn, a ``DPOTrainer`` over them, the shared adapter put in, ``train``, the adapter
  copied; then the weighted mean. As there, the reference is the model with its adapter off, and gradients are
  checkpointed; ``--no-checkpointing`` turns that off, which takes less time.

A round of one is followed by a round of the other, in one process. Importing their libraries is measured
apart, in processes of their own, and counts towards the first rounds. Neither side evaluates: prefed, which
always does after its last round, is left one pair of one client.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import datasets
import torch
import transformers
from common import DATA, base_model, parse_with_model, records
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as MODULES
from trl import DPOConfig, DPOTrainer

from prefed import Experiment, run
from prefed.core import Callback
from prefed.core.records import RoundRecord
from prefed.data import Record
from prefed.data.record import plain_prompt

PAIRS, CLIENTS, COHORT, STEPS, BATCH = 2308, 5, 3, 3, 4
BETA, LR, RANK, ALPHA = 0.1, 5e-4, 8, 16
MAX_LENGTH, EARLY = 512, 4


def read(path: Path, pairs: int) -> list[dict[str, Any]]:
    """``pairs`` different pairs: the file's, those of the test file next to it, then numbered copies."""
    other = path.with_name(path.name.replace(".train.", ".test."))
    sources = dict.fromkeys([path, other] if other.exists() else [path])
    found = [record for source in sources for record in records(source)]
    copies = ((copied, record) for copied in itertools.count() for record in found)
    return [row(record, copied) for copied, record in itertools.islice(copies, pairs)]


def row(record: Record, copied: int) -> dict[str, Any]:
    """A pair as TRL and prefed read it: texts, or messages only."""
    prompt, number = plain_prompt(record.prompt), f"{copied}." if copied else ""
    if isinstance(prompt, str):
        return {"prompt": number + prompt, "chosen": record.chosen, "rejected": record.rejected}
    prompt[-1]["content"] = number + prompt[-1]["content"]
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in (record.chosen, record.rejected))
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


class Anew:
    """OpenFedLLM's federated DPO: a fresh trainer for each client and round."""

    def __init__(self, folder: Path, *, checkpointing: bool) -> None:
        self.folder, self.checkpointing = folder, checkpointing
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        with (folder / "train.jsonl").open(encoding="utf-8") as lines:
            whole = datasets.Dataset.from_list([json.loads(line) for line in lines]).shuffle(seed=0)
        self.clients = [whole.shard(CLIENTS, index) for index in range(CLIENTS)]
        self.shared: dict[str, torch.Tensor] | None = None
        self.losses: list[float] = []

    def round(self, number: int) -> None:
        """One round: its clients drawn, each trained from the shared adapter, the weighted mean."""
        draw = random.Random(number)
        cohort = sorted(draw.sample(range(CLIENTS), COHORT))
        uploads = [self._visit(self.clients[client], draw) for client in cohort]
        sizes = [len(self.clients[client]) for client in cohort]
        self.shared = {
            name: sum(
                (upload[name] * size / sum(sizes) for upload, size in zip(uploads, sizes, strict=True)),
                torch.zeros(()),
            )
            for name in uploads[0]
        }

    def _visit(self, pairs: datasets.Dataset, draw: random.Random) -> dict[str, torch.Tensor]:
        taken = pairs.select(draw.sample(range(len(pairs)), STEPS * BATCH))
        config = DPOConfig(
            output_dir=str(self.folder / "trl"),
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            beta=BETA,
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_length=MAX_LENGTH,
            gradient_checkpointing=self.checkpointing,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_steps=100,
            disable_tqdm=True,
            use_cpu=True,
        )
        lora = LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,
            lora_dropout=0.0,
            target_modules=MODULES[self.model.config.model_type],
            task_type="CAUSAL_LM",
        )
        # Given the bare model, TRL's reference is the model with its adapter off, as in OpenFedLLM; given a
        # model with an adapter, today's TRL takes the adapter that it finds for the reference.
        trainer = DPOTrainer(
            self.model, args=config, train_dataset=taken, processing_class=self.tokenizer, peft_config=lora
        )
        trainer.remove_callback(transformers.PrinterCallback)
        if self.shared is not None:
            set_peft_model_state_dict(trainer.model, self.shared)
        self.losses.append(trainer.train().training_loss)
        upload: dict[str, torch.Tensor] = copy.deepcopy(get_peft_model_state_dict(trainer.model))
        self.model = trainer.model.unload()
        return upload


def show(what: str, ours: float, theirs: float) -> None:
    """One line of the table."""
    print(f"  {what:<22}{ours:9.2f}{theirs:9.2f}{theirs / ours:7.2f}x", flush=True)


class Turns(Callback):
    """CPU seconds of each round, a round of the other side after each of ours; loading is in the first."""

    def __init__(self, folder: Path, *, checkpointing: bool) -> None:
        self.folder, self.checkpointing = folder, checkpointing
        self.peer: Anew | None = None
        self.times: dict[str, list[float]] = {"prefed": [], "anew": []}
        self.losses: list[float] = []
        self.mark = time.process_time()

    def _lap(self, name: str) -> None:
        self.times[name].append(time.process_time() - self.mark)
        self.mark = time.process_time()

    def on_round_end(self, record: RoundRecord) -> None:
        """A round of ours is committed: the other's turn."""
        self._lap("prefed")
        assert record["loss"] is not None
        self.losses.append(record["loss"])
        self.peer = self.peer or Anew(self.folder, checkpointing=self.checkpointing)
        self.peer.round(record["round"])
        self._lap("anew")
        show(f"round {record['round']}", self.times["prefed"][-1], self.times["anew"][-1])


def importing(statement: str) -> float:
    """CPU seconds of a process that imports and ends."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return spent() - before


def write(folder: Path, args: argparse.Namespace) -> str:
    """The pairs, one more for each client's evaluation, and the model with its tokenizer; its type."""
    rows = read(args.data, args.pairs + CLIENTS)
    for name, part in (("train", rows[: args.pairs]), ("test", rows[args.pairs :])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    model = base_model(args)
    model.save_pretrained(folder / "model")
    transformers.AutoTokenizer.from_pretrained(args.tokenizer).save_pretrained(folder / "model")
    return str(model.config.model_type)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8, help=f"more than {EARLY}")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    args = parse_with_model(parser, "llama-4k")
    if args.rounds <= EARLY:
        parser.error(f"--rounds = {args.rounds}: give more than {EARLY}")
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    imports = {
        "prefed": importing("import prefed, prefed.runs.run"),
        "anew": importing("import datasets, peft, transformers; from trl import DPOTrainer"),
    }
    print(
        f"{args.shape}, {args.pairs} pairs on {CLIENTS} clients, {COHORT} a round, {STEPS} steps of {BATCH}, "
        f"gradients {'' if args.checkpointing else 'not '}checkpointed anew"
    )
    print(f"  {'CPU seconds':<22}{'prefed':>9}{'anew':>9}{'ratio':>8}")
    show("imports", imports["prefed"], imports["anew"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kind = write(folder, args)
        experiment = Experiment.model_validate(
            {
                "rounds": args.rounds,
                "data": {
                    "train": str(folder / "train.jsonl"),
                    "test": str(folder / "test.jsonl"),
                    "partition": {"by": "iid", "clients": CLIENTS},
                    "max_length": MAX_LENGTH,
                },
                "model": {
                    "name": str(folder / "model"),
                    "lora": {"rank": RANK, "alpha": ALPHA, "dropout": 0.0, "targets": list(MODULES[kind])},
                    "device": "cpu",
                },
                "cohort": {"size": COHORT},
                "method": {
                    "name": "feddpo",
                    "lr": LR,
                    "beta": BETA,
                    "batch_size": BATCH,
                    "local_steps": STEPS,
                    "weight_decay": 0.0,
                },
                "evaluate": {"every": 0, "clients": 1},
                "engine": {"threads": 1},
            }
        )
        turns = Turns(folder, checkpointing=args.checkpointing)
        run(experiment, folder / "run", callbacks=[turns])
        # What is written after the last round belongs to it.
        turns.times["prefed"][-1] += time.process_time() - turns.mark
    assert turns.peer is not None
    ours, theirs = turns.times["prefed"], turns.times["anew"]
    first = {name: imports[name] + sum(turns.times[name][:EARLY]) for name in imports}
    show(f"the first {EARLY}, with all", first["prefed"], first["anew"])
    show("a later round", statistics.mean(ours[EARLY:]), statistics.mean(theirs[EARLY:]))
    mean = [statistics.mean(losses) for losses in (turns.losses, turns.peer.losses)]
    print(f"  mean training loss: prefed {mean[0]:.4f}, anew {mean[1]:.4f}")


if __name__ == "__main__":
    main()
