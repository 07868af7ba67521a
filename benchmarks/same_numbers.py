r"""Digests of small runs with every method, rule, loss, feedback, engine and stage, to compare two versions.

    python benchmarks/same_numbers.py --place /tmp/place --out before.json      # at the first commit
    python benchmarks/same_numbers.py --place /tmp/place --out after.json --compare before.json

The place keeps the generated data and model: make it once, and give both versions the same. Digests are of
every number that a run leaves: the server's state and the clients' private states after the last round,
adapters, and of ``rounds.jsonl`` and ``summary.json`` all that no clock decides.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import tempfile
import traceback
from pathlib import Path
from typing import Any

LOSSES = ("dpo", "hinge", "ipo", "cdpo", "robust", "odpo", "kto_pair", "simpo", "orpo", "sft")
OPTIMIZERS = ("fedavgm", "fedadam", "fedyogi", "fedadagrad")
RULES: dict[str, dict[str, Any]] = {
    "median": {"rule": "median", "weights": "uniform"},
    "trimmed_mean": {"rule": "trimmed_mean", "trim": 0.25, "weights": "uniform"},
    "krum": {"rule": "krum", "liars": 1, "weights": "uniform"},
    "multi_krum": {"rule": "multi_krum", "liars": 1, "weights": "uniform"},
    "norm_clip": {"rule": "norm_clip", "max_norm": 0.05},
    **{weights: {"weights": weights} for weights in ("uniform", "mass", "qffl", "afl")},
    "ranks": {"ranks": {"ada": 1, "ben": 1}},
    **{lora: {"lora": lora} for lora in ("ffa", "rolora", "fedsa", "fedex", "flexlora", "flora")},
    **{name: {"optimizer": {"name": name, "lr": 0.01}} for name in OPTIMIZERS},
}
NOISE = {"clip": 0.1, "noise_multiplier": 1.0, "delta": 1e-5}
ALIGN = {"completions": 2, "max_new_tokens": 5, "temperature": 1.0, "lr": 1e-3, "epochs": 1, "batch_size": 4}
CLOCKED = {"seconds", "tokens_per_second", "peak_memory_mb", "memory_mb", "digest", "origin", "virtual"}
"""Keys whose values a clock or the system decides."""
APART = {"LOCK", "COMMIT.json", "config.toml", "run.log", "manifest.json"}
"""Files of a run directory that a process number, a clock or the spelling of settings decides."""


def make_place(folder: Path) -> None:
    """Six clients of two tastes and a model of two small blocks."""
    from prefed.core import Key
    from prefed.data import synthetic
    from prefed.models.tiny import make_tiny

    folder.mkdir(parents=True)
    synthetic.write(folder, synthetic.generate(Key(5), clients=6, train=8, test=4))
    make_tiny(folder / "model", synthetic.corpus(Key(5), 60), Key(5), layers=2, width=32, heads=2, steps=2)
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Say {n}:"}) + "\n" for n in range(8))
    )
    make_reward_model(folder / "reward", folder / "model")


def make_reward_model(folder: Path, model: Path) -> None:
    """A random reward model of one small block, with the tokenizer of ``model``."""
    import torch
    from transformers import AutoTokenizer, GPT2Config, GPT2ForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(model)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=128, n_embd=16, n_layer=1, n_head=2, num_labels=1
    )
    GPT2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def cases(methods: list[str]) -> dict[str, dict[str, Any]]:
    """Name → what it changes in the experiment."""
    found: dict[str, dict[str, Any]] = {name: {"method": {"name": name}} for name in methods}
    found |= {f"loss {name}": {"method": {"name": "feddpo", "objective": name}} for name in LOSSES}
    found |= {f"merge {name}": {"merge": merge} for name, merge in RULES.items()}
    for name in ("feddpo", "fedamp", "fedper"):
        thumbs, ppo = ({"name": name, "objective": objective} for objective in ("kto", "ppo"))
        found |= {
            f"thumbs {name}": {"method": thumbs, "data": {"format": "thumbs"}},
            f"ppo {name}": {"method": ppo},
        }
    found |= {
        "workers": {"engine": {"workers": 2, "threads": 1}},
        "bfloat16": {"model": {"dtype": "bfloat16"}},
        "plain path": {"model": {"fast": False}},
        "buffered": {"fleet": {"server": "buffered", "buffer": 2}, "merge": {"late": "delta"}},
        "late model": {"fleet": {"max_delay": 2}, "merge": {"late": "model"}},
        "late delta": {"fleet": {"max_delay": 2}, "merge": {"late": "delta"}},
        **{
            f"{kind} noise": {"privacy": {"kind": kind, **NOISE}, "merge": {"weights": "uniform"}}
            for kind in ("central", "distributed", "local")
        },
        "stacked": {"engine": {"stack": 2, "threads": 1}},
        "answers": {"report": {"prompts": ["Hello?"]}, "evaluate": {"every": 2, "text": 2, "diagnose": 2}},
        "newcomers": {"method": {"name": "fedper"}, "evaluate": {"unseen": ["ada"], "unseen_steps": [0, 2]}},
        "cosine": {"method": {"name": "feddpo", "schedule": "cosine"}},
        "plateau": {"method": {"name": "feddpo", "schedule": "plateau"}},
        "dirichlet": {"data": {"partition": {"by": "dirichlet", "clients": 4, "alpha": 0.5}}},
        "iid": {"data": {"partition": {"by": "iid", "clients": 4}}},
        "best round": {
            "data": {"validation_fraction": 0.25},
            "stop": {"patience": 1},
            "evaluate": {"every": 1},
        },
        "stages by votes": {"method": {"name": "fedbiscuit"}, "align": {**ALIGN, "labels": "majority"}},
        "stages by a taste": {
            "method": {"name": "fedvpa"},
            "align": {**ALIGN, "tastes": "posteriors", "generations": 2},
        },
        "stages by judges": {
            "method": {"name": "fedbis"},
            "align": {**ALIGN, "generations": 2, "client_judge": "utility", "refresh": {"pairs": 4}},
        },
    }
    return found


def experiment(place: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """The whole experiment of a case."""
    base: dict[str, Any] = {
        "seed": 3,
        "rounds": 3,
        "data": {
            "train": str(place / "train.jsonl"),
            "test": str(place / "test.jsonl"),
            "partition": {"by": "column", "column": "client"},
        },
        "model": {"name": str(place / "model"), "lora": {"rank": 2, "dropout": 0.1}},
        "cohort": {"size": 4},
        "method": {"name": "feddpo", "lr": 0.01, "local_steps": 2, "batch_size": 4},
        "evaluate": {"every": 2},
        "engine": {"threads": 1},
    }
    for table, values in changes.items():
        base[table] = {**base.get(table, {}), **values} if isinstance(values, dict) else values
    name = base["method"]["name"]
    if name == "fedbiscuit":
        base["method"] |= {"selectors": 2, "warmup_rounds": 1, "regroup_every": 1}
    if name in ("fedvpl", "fedvpa"):
        base["model"]["variational"] = {"latent": 4, "widths": [16, 8]}
    if "liars" in base.get("merge", {}) or name in ("centralized", "decdpo"):
        del base["cohort"]
    if base["method"].get("objective") == "ppo":
        base["method"]["reward_model"] = str(place / "reward")
    if "align" in base:
        base["align"]["prompts"] = str(place / "prompts.jsonl")
    return base


def without_clock(value: Any) -> Any:
    """A record without what a clock or the system decides."""
    if isinstance(value, dict):
        return {key: without_clock(each) for key, each in value.items() if key not in CLOCKED}
    return [without_clock(each) for each in value] if isinstance(value, list) else value


def digests(run: Path) -> dict[str, str]:
    """File → digest, of the files of a run directory that hold numbers."""
    found = {}
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        apart = path.name in APART or path.name.startswith("COMMIT@")
        if path.is_dir() or "cache" in path.relative_to(run).parts or apart:
            continue
        content = path.read_bytes()
        if path.suffix in (".json", ".jsonl"):
            lines = content.splitlines() if path.suffix == ".jsonl" else [content]
            content = json.dumps([without_clock(json.loads(line)) for line in lines], sort_keys=True).encode()
        found[name] = hashlib.sha256(content).hexdigest()[:16]
    return found


def measure(place: Path, only: list[str]) -> dict[str, dict[str, str]]:
    """Case → the digests of its run; an error's last line where it failed."""
    from prefed import Experiment, run
    from prefed.methods import METHODS

    found = {}
    for name, changes in cases(list(METHODS)).items():
        if only and name not in only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(Experiment.model_validate(experiment(place, changes)), Path(folder, "run"))
                found[name] = digests(Path(folder, "run"))
            except Exception as error:
                found[name] = {"error": traceback.format_exception_only(error)[-1].strip()[:300]}
        print(f"{name:20} {len(found[name]):3} files  {found[name].get('error', '')}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir(), "prefed-place"))
    parser.add_argument("--out", type=Path, help="write the digests to this file")
    parser.add_argument("--compare", type=Path, help="digests of another version")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if not args.place.exists():
        make_place(args.place)
    found = measure(args.place, args.only)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.compare:
        before = json.loads(args.compare.read_text())
        differ = [
            f"{case}: {name}"
            for case in found
            for name in {*found[case], *before.get(case, {})}
            if found[case].get(name) != before.get(case, {}).get(name)
        ]
        same = sum(len(each) for each in found.values()) - len(differ)
        print(*sorted(differ), f"{len(found)} runs: {same} files bit-identical, {len(differ)} not", sep="\n")


if __name__ == "__main__":
    main()
