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

What KTO sends has the form of what DPO sends, so its row is "mean".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from prefed.core import Download, Exchange, Key, Round, State, Tensors, Upload
from prefed.engines.aggregation import aggregate
from prefed.engines.validation import validate_upload
from prefed.merge import MergeConfig, lora
from prefed.methods import METHODS
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
            sent = download.tensors.get(name)
            steps = name in exchange.origins or sent is None
            start = {n: torch.zeros_like(t) if steps else sent[n] for n, t in group.items()}
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


def cell(name: str, merge: Mapping[str, Any], lie: Lie) -> str:
    """Return a cell of the table."""
    start, clean, _ = play(name, merge, None)
    _, moved, passed = play(name, merge, lie)
    share = float((moved - clean).norm() / (clean - start).norm())
    return "refused" if not passed else f"{share:.2f}"


def main() -> None:
    """Print the table."""
    clipped = {"reversed": LIES["reversed"], "loss and reversed": both}
    columns = [*LIES, *(f"{name}, norm_clip" for name in clipped)]
    print("| merged by | " + " | ".join(columns) + " |\n|" + "---|" * (1 + len(columns)))
    for case, (name, merge) in CASES.items():
        cells = [cell(name, merge, lie) for lie in LIES.values()]
        cells += [cell(name, {**merge, "rule": "norm_clip"}, lie) for lie in clipped.values()]
        print(f"| {case} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
