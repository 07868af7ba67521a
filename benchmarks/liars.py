r"""What one client of six that lies does under each way to merge, on clients whose losses are quadratics.

    python benchmarks/liars.py

Each cell says how far the lie moves the model: the distance between the weights that the server publishes
after ten rounds with it and without it, over the distance that ten rounds without it move them. At 0.00 the
lie does nothing, at 1.00 it does as much as all clients together. Weights are W + s B A of each layer with
a LoRA, and all other shared numbers. "refused" means that every upload with the lie was dropped. In every
exchange the liar

- reversed: sends phi - 10 (phi_i - phi) instead of phi_i;
- NaN: has a NaN in the first number of each group;
- huge: sends a step 1e6 times as long;
- loss: sends its honest tensors with a loss of 1e30;
- loss and reversed: the second with the first;
- count: claims to have a million times as many pairs.

The row "KTO" is a real model (``--model``, tiny-lm by default) on thumbs about synthetic advice, since KTO's
loss, which compares a batch with mismatched responses, has no quadratic.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import TOKENIZER
from safetensors.torch import load_file

from prefed import Experiment, run
from prefed.core import Download, Exchange, Key, Method, Round, State, Tensors, Upload
from prefed.data import synthetic
from prefed.engines.aggregation import aggregate
from prefed.engines.validation import validate_upload
from prefed.merge import MergeConfig, lora
from prefed.methods import METHODS, feddpo
from prefed.methods.base import with_ranks
from prefed.testing import Problem, QuadraticTrainer

LIAR, CLIENTS, ROUNDS = "client-1", 6, 10
RANKS = {"client-0": 1, LIAR: 1, "client-2": 1}
SETTINGS = {"optimizer": "sgd", "lr": 0.1, "local_steps": 5, "batch_size": 2, "schedule": "constant"}
Lie = Callable[[Upload, Download, Exchange], Upload]


def stretched(factor: float) -> Lie:
    """A step that is ``factor`` times as long."""

    def lie(upload: Upload, download: Download, exchange: Exchange) -> Upload:
        groups = {}
        for name, group in upload.tensors.items():
            sent = None if name in exchange.origins else download.tensors.get(name)
            start = {n: torch.zeros_like(t) if sent is None else sent[n] for n, t in group.items()}
            groups[name] = group.replace({n: start[n] + factor * (t - start[n]) for n, t in group.items()})
        return replace(upload, tensors=groups)

    return lie


def not_a_number(upload: Upload, download: Download, exchange: Exchange) -> Upload:
    """A NaN in the first tensor."""
    groups = {name: group.clone() for name, group in upload.tensors.items()}
    for group in groups.values():
        group.flat[0] = torch.nan
    return replace(upload, tensors=groups)


def lossy(upload: Upload, download: Download, exchange: Exchange) -> Upload:
    """An enormous loss."""
    return replace(upload, scalars=dict.fromkeys(upload.scalars, 1e30))


def counting(upload: Upload, download: Download, exchange: Exchange) -> Upload:
    """A million times as many pairs."""
    return replace(upload, weight=1e6 * upload.weight)


def both(upload: Upload, download: Download, exchange: Exchange) -> Upload:
    """A reversed step with an enormous loss."""
    return lossy(stretched(-10.0)(upload, download, exchange), download, exchange)


LIES: Mapping[str, Lie] = {
    "reversed": stretched(-10.0),
    "NaN": not_a_number,
    "huge": stretched(1e6),
    "loss": lossy,
    "loss and reversed": both,
    "count": counting,
}
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mean": ("feddpo", {}),
    "fedex": ("feddpo", {"lora": "fedex"}),
    "flexlora": ("feddpo", {"lora": "flexlora"}),
    "ranks of 1 and 2": ("feddpo", {"ranks": RANKS}),
    "ranks of 1 and 2, flexlora": ("feddpo", {"ranks": RANKS, "lora": "flexlora"}),
    "weights = qffl": ("feddpo", {"weights": "qffl", "q": 1.0}),
    "weights = afl": ("feddpo", {"weights": "afl", "afl_lr": 0.1}),
    "KTO": ("kto", {}),
    "lore": ("lore", {}),
    "pal": ("pal", {}),
}


def play(name: str, merge: Mapping[str, Any], lie: Lie | None) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the weights before and after a run, and how many lies were not refused."""
    problem = Problem(METHODS[name], SETTINGS, MergeConfig(**merge), CLIENTS, ROUNDS)
    method, start = problem.build(), problem.initial
    if ranks := merge.get("ranks"):
        method = with_ranks(method, ranks, start.layout)
    sizes = {client: float(data.size) for client, data in problem.clients.items()}
    server, passed = method.init_server(start), 0
    private = {client: method.init_client(start, client) for client in problem.clients}
    for number in range(1, ROUNDS + 1):
        now = Round(number, ROUNDS, Key(0).at("round", number), sizes)
        for exchange in (each for each in method.exchanges if each.due(number)):
            valid, after = list[Upload](), dict[str, State]()
            for client, data in sorted(problem.clients.items()):
                download, key = exchange.send(server, client, now), now.key.at("client", client)
                trainer = QuadraticTrainer(client, data, now, key, method.ownership, start)
                upload, after[client] = exchange.work(trainer, private[client], download)
                if lie is not None and client == LIAR:
                    upload = lie(upload, download, exchange)
                if not validate_upload(upload, client, exchange, method.ownership, start, now):
                    valid.append(upload)
            merged = aggregate(server, valid, exchange, now)
            server = merged.server
            private |= {upload.client: after[upload.client] for upload in merged.uploads}
            passed += any(upload.client == LIAR for upload in merged.uploads)
    ends = method.init_server(start), server
    before, last = (
        weights(start.replace(*method.publish(each, "client-0").tensors.values())) for each in ends
    )
    return before, last, passed


def weights(model: Tensors) -> torch.Tensor:
    """Return the adapted weights of all layers, and all numbers outside a LoRA."""
    found, used = [], set[str]()
    for module in lora.modules(model.layout):
        used |= {module.a, module.b, module.residual}
        product = 2.0 * model[module.b] @ model[module.a]
        found.append(product + model[module.residual] if module.residual in model else product)
    found += [value for name, value in model.items() if name not in used]
    return torch.cat([value.flatten() for value in found])


def thumbs() -> dict[str, list[dict[str, Any]]]:
    """Return rows by client; each is a thumb up and a thumb down."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for pair in synthetic.generate(Key(0), clients=CLIENTS, train=40, test=0):
        own = rows.setdefault(str(pair.client), [])
        own.append({"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected})
    return {f"client-{number}": own for number, own in enumerate(rows.values())}


def play_kto(model: Path, merge: Mapping[str, Any], lie: Lie | None) -> tuple[torch.Tensor, int]:
    """Return B A of all layers after a run of KTO, and how many lies were not refused."""

    def build(*given: Any) -> Method:
        method = honest(*given)
        (exchange,) = method.exchanges

        def work(trainer: Any, private: State, download: Download) -> tuple[Upload, State]:
            upload, after = exchange.work(trainer, private, download)
            if lie is not None and upload.client == LIAR:
                upload = lie(upload, download, exchange)
            return upload, after

        return replace(method, exchanges=(replace(exchange, work=work),))

    experiment = Experiment(
        rounds=ROUNDS,
        data={"format": "thumbs", "max_length": 128},
        model={"name": str(model), "lora": {"rank": 4}},
        method={"name": "feddpo", "objective": "kto", "lr": 1e-3, "local_steps": 2, "batch_size": 8},
        merge=dict(merge),
    )
    honest = feddpo.build
    with tempfile.TemporaryDirectory() as folder, patch.object(feddpo, "build", build):
        out = Path(folder) / "run"
        result = run(experiment, out, data=thumbs())
        factors = load_file(out / "adapters" / "shared" / "adapter_model.safetensors")
        dropped = [each["client"] for record in result.rounds for each in record["dropped"]]
    products = [
        factors[name.replace("lora_A", "lora_B")] @ factors[name]
        for name in sorted(factors)
        if "lora_A" in name
    ]
    return torch.cat([each.flatten() for each in products]), ROUNDS - dropped.count(LIAR)


@cache
def honest_kto(model: Path, rule: str) -> tuple[torch.Tensor, int]:
    """The run without a lie."""
    return play_kto(model, {"rule": rule}, None)


def cell(name: str, merge: Mapping[str, Any], lie: Lie, model: Path) -> str:
    """Return a cell of the table."""
    if name == "kto":
        clean, _ = honest_kto(model, merge.get("rule", "mean"))
        moved, passed = play_kto(model, merge, lie)
        start = torch.zeros_like(clean)
    else:
        start, clean, _ = play(name, merge, None)
        _, moved, passed = play(name, merge, lie)
    share = float((moved - clean).norm() / (clean - start).norm())
    return "refused" if not passed else f"{share:.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=TOKENIZER, help="model for KTO")
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES])
    args = parser.parse_args()
    clipped = {"reversed": LIES["reversed"], "loss and reversed": both}
    columns = [*LIES, *(f"{name}, norm_clip" for name in clipped)]
    print("| merged by | " + " | ".join(columns) + " |\n|" + "---|" * (1 + len(columns)))
    for case in args.only:
        name, merge = CASES[case]
        cells = [cell(name, merge, lie, args.model) for lie in LIES.values()]
        cells += [cell(name, {**merge, "rule": "norm_clip"}, lie, args.model) for lie in clipped.values()]
        print(f"| {case} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
