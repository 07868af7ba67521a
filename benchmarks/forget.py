r"""Forgetting a client: equality with the run that never had it, its cost, and what both models disclose.

    python benchmarks/forget.py same [--only feddpo fedper]     # every method, rule, engine and stage
    python benchmarks/forget.py cost --out cost.svg             # by first visit and by what is kept
    python benchmarks/forget.py disclosure --seed 0             # membership of pairs, by model

``same`` runs the cases of ``same_numbers.py`` whose data name the clients: with the client, without it, and
with it and then forgotten. All files that hold numbers must be equal, and no text that only the client has
be left. ``disclosure`` has an observer score pairs with the model of before, that of after and both: AUC of
the margins of the removed client's training pairs, and a remaining one's, against those of one that never
took part.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import shutil
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import same_numbers
from common import save_picture

ADDED: dict[str, dict[str, Any]] = {
    "kept": {"rounds": 6, "cohort": {"size": 1}, "evaluate": {"every": 0}, "checkpoint": {"keep": "all"}},
}


def clients(place: Path) -> list[str]:
    return sorted({json.loads(line)["client"] for line in (place / "train.jsonl").read_text().splitlines()})


def texts(place: Path, client: str) -> list[bytes]:
    """The texts of a client that no other client has, each as JSON writes it and up to twelve words."""
    own, others = set[str](), ""
    for name in ("train", "test"):
        for row in map(json.loads, (place / f"{name}.jsonl").read_text().splitlines()):
            fields = [" ".join(row[key].split()[:12]) for key in ("prompt", "chosen", "rejected")]
            if row["client"] == client:
                own |= {*fields}
            else:
                others += json.dumps(row) + "\n"
    return [text.encode() for text in sorted(own) if json.dumps(text)[1:-1] not in others]


def first_visits(run: Path, names: list[str]) -> dict[str, int]:
    """Client → the round of its first visit, or the last one."""
    rows = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    return {name: min((r["round"] for r in rows if name in r["cohort"]), default=len(rows)) for name in names}


def run_of(place: Path, out: Path, changes: dict[str, Any], exclude: str | None = None) -> float:
    """Run a case, perhaps without a client; its seconds."""
    from prefed import Experiment, run

    tree = same_numbers.experiment(place, changes)
    if exclude:
        tree["data"]["exclude"] = [exclude]
    started = time.perf_counter()
    run(Experiment.model_validate(tree), out)
    return time.perf_counter() - started


def same(place: Path, only: list[str]) -> None:
    from prefed.methods import METHODS
    from prefed.runs.forget import forget, plan

    equal = 0
    found = {**same_numbers.cases(list(METHODS)), **ADDED}
    kept = {name: {"method": {"name": name}} for name in METHODS}
    kept |= {name: case for name, case in found.items() if name.startswith("merge") or name.endswith("noise")}
    found |= {f"kept {name}": {**case, **ADDED["kept"]} for name, case in kept.items()}
    found = {name: changes for name, changes in found.items() if name not in ("dirichlet", "iid")}
    for name, changes in found.items():
        if only and name not in only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            old, never = Path(folder, "run"), Path(folder, "never")
            try:
                seconds, client = run_of(place, old, changes), clients(place)[0]
                if "checkpoint" in changes:
                    first = first_visits(old, clients(place))
                    client = max(first, key=lambda each: first[each])
                run_of(place, never, changes, client)
                before = _holds(old, texts(place, client))
                planned, started = plan(old, [client]), time.perf_counter()
                forget(old, [client])
                took = time.perf_counter() - started
                a, b = same_numbers.digests(old), same_numbers.digests(never)
                a = {file: digest for file, digest in a.items() if not file.startswith("forgotten/")}
                differ = sorted(file for file in {*a, *b} if a.get(file) != b.get(file))
                after = _holds(old, texts(place, client))
                line = f"{len(a):3} files, {len(differ)} differ {differ or ''}; its texts in {before} files, "
                line += f"then {after}; {planned.rounds} rounds in {took:.1f} s (run: {seconds:.1f} s)"
                equal += not differ and not after and before > 0
            except Exception as error:
                line = traceback.format_exception_only(error)[-1].strip()[:300]
        print(f"{name:20} {line}", flush=True)
    print(f"{equal} cases are bit-identical to the run that never had the client")


def _holds(run: Path, needles: list[bytes]) -> int:
    return sum(
        any(needle in path.read_bytes() for needle in needles) for path in run.rglob("*") if path.is_file()
    )


def cost(args: argparse.Namespace) -> None:
    """One client a round, so that first visits are spread. CPU seconds: other processes do not count."""
    from prefed.runs.forget import forget, plan

    place, rounds = args.place, args.rounds
    base: dict[str, Any] = {"rounds": rounds, "cohort": {"size": 1}, "evaluate": {"every": 0}}
    base |= {"method": {"local_steps": args.steps}, "model": {"name": str(args.model or place / "model")}}
    found: dict[str, dict[int, tuple[int, float | None]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for keep in args.keep:
            run, kept = Path(folder, keep, "run"), int(keep) if keep.isdigit() else keep
            run_of(place, run, base | ({"checkpoint": {"keep": kept}} if keep != "none" else {}))
            first = first_visits(run, clients(place))
            size = sum(path.stat().st_size for path in (run / "checkpoint").rglob("*") if path.is_file())
            rows = found.setdefault(f"{keep} ({size / 1024:,.0f} KiB)", {})
            for index, client in enumerate(sorted(first, key=lambda each: -first[each])):
                replayed, share = plan(run, [client]).rounds, None
                if index < args.measured:
                    # Each time anew: CPU seconds depend on what else the machine does.
                    started = time.process_time()
                    run_of(place, Path(folder, "never", keep, client), base, client)
                    fresh = time.process_time() - started
                    copy = Path(folder, client, keep, "run")
                    shutil.copytree(run, copy)
                    started = time.process_time()
                    forget(copy, [client])
                    share = (time.process_time() - started) / fresh
                    print(f"{keep}: {first[client]}: {share:.2f} of {fresh:.1f} s", flush=True)
                rows[first[client]] = replayed, share
    names = sorted({number for rows in found.values() for number in rows})
    print("| kept | " + " | ".join(map(str, names)) + " |\n|" + "---|" * (len(names) + 1))
    for keep, rows in found.items():
        found_of = (rows[number] for number in names)
        cells = (f"{n}" if share is None else f"{n} ({share:.2f})" for n, share in found_of)
        print(f"| {keep} | " + " | ".join(cells) + " |")
    if args.out is not None:
        draw(found, rounds, args.out)


def draw(found: dict[str, dict[int, tuple[int, float | None]]], rounds: int, out: Path) -> None:
    """Rounds as lines and measured cost as points, by first visit, drawn as prefed draws its plots."""
    from prefed.store import CheckpointConfig
    from prefed.ui.pages.chart_data import Axis, Chart, Line, Panel, look_of

    lines, visits = [], range(1, rounds + 1)
    for index, (name, keep) in enumerate({"not set": None, "log": "log", "all": "all", "4": 4}.items()):
        rule = CheckpointConfig(keep=keep) if keep else None
        kept = [number for number in visits if rule and rule.keeps(number, rounds)]
        starts = [max((each for each in kept if each < first), default=0) for first in visits]
        points = [(float(n), (rounds - start) / rounds) for n, start in zip(visits, starts, strict=True)]
        lines.append(Line(f"keep: {name}", points, [""] * rounds, look_of(index)))
    measured = [(float(n), share) for rows in found.values() for n, (_, share) in rows.items() if share]
    if measured:
        lines.append(Line("CPU seconds", measured, [""] * len(measured), look_of(4), joined=False))
    x = Axis(f"round of the client's first visit, of {rounds}", whole=True)
    y = Axis("rounds replayed, relative to a new run", zero=True)
    save_picture(Chart("forget-cost", "cost of forgetting", "", [Panel(x, y, lines)]), out)


def disclosure(seed: int) -> None:
    """The rows of hh_harmless, drawn into eight clients of 119, of which one never takes part."""
    import common

    from prefed import Experiment, run
    from prefed.runs.disclosure import membership
    from prefed.runs.forget import forget
    from prefed.runs.loaded_run import load_run
    from prefed.train.feedback.pairs import PairScores

    with (
        tempfile.TemporaryDirectory() as folder,
        gzip.open(common.SHARED / "data/hh_harmless.train.jsonl.gz") as file,
    ):
        rows = [json.loads(line) for line in file]
        order, out = np.random.default_rng(seed).permutation(len(rows)), Path(folder, "run")
        lines = [json.dumps({**rows[row], "client": f"c{place % 8}"}) for place, row in enumerate(order)]
        Path(folder, "train.jsonl").write_text("\n".join(lines))
        tree = {
            "seed": seed,
            "rounds": 12,
            "data": {
                "train": f"{folder}/train.jsonl",
                "partition": {"by": "column", "column": "client"},
                "max_length": 192,
            },
            "model": {"name": str(common.SHARED / "models/tiny-lm"), "lora": {"rank": 8}},
            "method": {"name": "feddpo", "lr": 3e-3, "local_steps": 12, "batch_size": 8},
            "evaluate": {"every": 0, "unseen": ["c7"]},
            "engine": {"threads": 1},
        }
        run(Experiment.model_validate(tree), out)
        loaded = load_run(out, data=True)
        data, trainer = loaded.trainers.dataset.clients, loaded.trainers.pair_trainer
        models = {"before": loaded.published_model}
        forget(out, ["c0"])
        models["after"] = load_run(out).published_model
        names, margins = {"removed": "c0", "remaining": "c1", "never": "c7"}, {}
        for when, model in models.items():
            for who, name in names.items():
                scores = trainer.score(model, data[name].train)
                assert isinstance(scores, PairScores)
                margins[when, who] = np.subtract(*(scores.policy - scores.reference).T)
        for who in names:
            margins["before - after", who] = margins["before", who] - margins["after", who]
        for when in ("before", "after", "before - after"):
            for who in ("removed", "remaining"):
                member, other = margins[when, who], margins[when, "never"]
                found = membership(member, other)
                print(
                    f"seed {seed}: margin {when:14} {who:9} AUC {found['auc']:.3f} ± {found['error']:.3f} "
                    f"({len(member)} against {len(other)} pairs)",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["same", "cost", "disclosure"])
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir(), "prefed-place"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=24, help="of cost")
    parser.add_argument("--steps", type=int, default=20, help="of cost: steps of a visit")
    parser.add_argument("--model", type=Path, help="of cost: a folder (default: that of the place)")
    parser.add_argument("--keep", nargs="+", default=["none", "log", "all", "4"], help="of cost")
    parser.add_argument("--measured", type=int, default=6, help="of cost: clients to forget, latest first")
    parser.add_argument("--out", type=Path, help="of cost: the picture")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if args.what == "disclosure":
        disclosure(args.seed)
        return
    if not args.place.exists():
        same_numbers.make_place(args.place)
    if args.what == "same":
        same(args.place, args.only)
    else:
        cost(args)


if __name__ == "__main__":
    main()
