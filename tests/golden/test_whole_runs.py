"""Whole runs of two or three rounds against a federation in plain torch and float64, written from the papers.

Only the draws are prefed's: the first LoRA of a round and the order of a batch. Clients have five, three and
two of the pairs, all of which are in each of their steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from finished import small_experiment, small_place
from prefed import Callback, Experiment, run
from prefed.core import Key
from prefed.runs.loaded_run import load_run
from prefed.store import RunReader

SEED, BETA, STEPS, LR, OWN_LR, CLIP = 3, 0.3, 2, 2.0, 3.0, 0.2
SIZES = {"ann": 5, "bob": 3, "cyd": 2}
SHARES = [0.5, 0.3, 0.2]
METHOD = {"lr": LR, "clip": CLIP, "optimizer": "sgd", "weight_decay": 0.0, "batch_size": 8}
METHOD |= {"local_epochs": STEPS, "beta": BETA, "schedule": "constant"}
OWN = {"personal_lr": OWN_LR, "personal_epochs": STEPS}
RANKS = {"bob": 1, "cyd": 2}
Module = dict[str, Tensor]
"""Tensors of weights: ``0/attn.c_attn/A`` and ``…/B`` of an adapter, or ``0/attn.c_attn``, out × in."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = small_place(tmp_path_factory.mktemp("place"))
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    owners = [client for client, size in SIZES.items() for _ in range(size)]
    rows = [row | {"worker": owner} for row, owner in zip(rows, owners, strict=False)]
    # Prompts and responses that differ much, so that it matters which response follows which prompt.
    thumbs = [
        {
            "prompt": ("Case", "we go we go", "up")[number % 3] + "." * number,
            "completion": (" down", " up up up", " we", " go: go")[number % 4],
            "label": number % 3 != 1,
            "worker": row["worker"],
        }
        for number, row in enumerate(rows)
    ]
    test = [json.loads(line) | {"worker": "ann"} for line in (folder / "test.jsonl").read_text().splitlines()]
    for name, lines in (("train", rows), ("thumbs", thumbs), ("test", test[:1])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def finish(place, path, name="feddpo", *, rounds=3, settings=None, data="train", **merge):
    """The run, and what the server has after each round."""
    states = []

    class Watch(Callback):
        def on_round_end(self, record):
            states.append(RunReader(path).server().tensors["model"])

    content = small_experiment(place, seed=SEED, rounds=rounds, evaluate={"every": 0}, merge=merge)
    content["data"]["train"] = str(place / f"{data}.jsonl")
    content["model"]["lora"] = {"rank": 3, "alpha": 6.0, "dropout": 0.0}
    content["method"] = {"name": name, **METHOD, **(settings or {})}
    run(Experiment.model_validate(content), path, callbacks=[Watch()])
    return load_run(path, data=True), states


def strip(tensors, part: str = "lora") -> Module:
    """The tensors of one part, without its name."""
    return {
        name.removeprefix(f"{part}/"): value.double()
        for name, value in tensors.items()
        if name.startswith(f"{part}/")
    }


def product(adapter: Module, scale: float = 1.0) -> Module:
    """scale · B A of every weight."""
    return {
        name[:-2]: scale * adapter[name[:-1] + "B"] @ adapter[name] for name in adapter if name.endswith("/A")
    }


def total(*changes: Module) -> Module:
    return {name: sum(change[name] for change in changes) for name in changes[0]}


def mean(modules: list[Module], weights: list[float]) -> Module:
    return {
        name: sum(weight * each[name] for weight, each in zip(weights, modules, strict=True))
        for name in modules[0]
    }


def first(adapter: Module, rank: int) -> Module:
    """The first rows of A and columns of B."""
    return {name: value[:rank] if name.endswith("A") else value[:, :rank] for name, value in adapter.items()}


def padded(adapter: Module, rank: int) -> Module:
    """Zeros in the other rows of A and columns of B."""
    return {
        name: torch.cat([value, torch.zeros(rank - len(value), value.shape[1])])
        if name.endswith("A")
        else torch.cat([value, torch.zeros(len(value), rank - value.shape[1])], 1)
        for name, value in adapter.items()
    }


class Clients:
    """The clients of a run: a GPT-2 of transformers, one sequence at a time."""

    def __init__(self, loaded) -> None:
        name = loaded.record.config["model"]["name"]
        self.model = AutoModelForCausalLM.from_pretrained(name).double().eval()
        self.base = {name: value.detach() for name, value in self.model.named_parameters()}
        self.tokens = loaded.trainers.dataset.tokens
        self.rows = {client: data.train for client, data in loaded.trainers.dataset.clients.items()}
        assert {client: len(rows) for client, rows in self.rows.items()} == SIZES
        self.start = strip(loaded.backbone.initial)
        self.references: dict[object, Tensor] = {}
        self.points: list[float] = []

    def logprob(self, change: Module, prompt, response) -> Tensor:
        """log π(response | prompt) of the model whose weights are changed."""
        weights = dict(self.base)
        for name, value in change.items():
            block, module = name.split("/")
            # GPT-2 keeps its weights as in × out.
            path = f"transformer.h.{block}.{module}.weight"
            weights[path] = weights[path] + value.T
        ids = torch.tensor([[*prompt, *response]])
        logits = functional_call(self.model, weights, (ids,)).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).sum()

    def ratio(self, change: Module, prompt, response) -> Tensor:
        """log π(y | x) − log π_ref(y | x); π_ref is the untouched model."""
        key = (*prompt, -1, *response)
        if key not in self.references:
            with torch.no_grad():
                self.references[key] = self.logprob({}, prompt, response)
        return self.logprob(change, prompt, response) - self.references[key]

    def dpo(self, change: Module, rows) -> Tensor:
        """mean −log σ(β Δ)"""
        losses = []
        for row in rows:
            pair = self.tokens.pair(int(row))
            chosen, rejected = (self.ratio(change, pair.prompt, ids) for ids in (pair.chosen, pair.rejected))
            losses.append(-torch.nn.functional.logsigmoid(BETA * (chosen - rejected)))
        return torch.stack(losses).mean()

    def kto(self, change: Module, rows, desirable: float, undesirable: float) -> Tensor:
        """mean λ_y − v(x, y) of arXiv:2402.01306, eqs. 7 and 8, with z_0 of prompts and the next response."""
        records = [self.tokens.record(int(row)) for row in rows]
        pairs = [self.tokens.pair(int(row)) for row in rows]
        with torch.no_grad():
            others = [
                self.ratio(change, pair.prompt, follows.chosen)
                for pair, follows in zip(pairs, pairs[1:] + pairs[:1], strict=True)
            ]
            point = torch.stack(others).mean().clamp(min=0)
        self.points.append(float(point))
        losses = []
        for record, pair in zip(records, pairs, strict=True):
            reward = self.ratio(change, pair.prompt, pair.chosen)
            if record.label:
                losses.append(desirable * (1 - torch.sigmoid(BETA * (reward - point))))
            else:
                losses.append(undesirable * (1 - torch.sigmoid(BETA * (point - reward))))
        return torch.stack(losses).mean()

    def train(
        self,
        adapter: Module,
        client: str,
        number: int,
        loss: Callable[[Module, np.ndarray], Tensor],
        *,
        phase: str = "train",
        lr: float | Callable[[str], float] = LR,
    ) -> tuple[Module, float]:
        """Gradient descent on ``loss`` of the adapter; the adapter and its mean loss.

        ``lr`` may depend on the tensor.
        """
        visit = Key(SEED).at("round", number).at("exchange", "train").at("client", client).at("phase", phase)
        losses = []
        for step in range(STEPS):
            order = visit.at("epoch", step).numpy().permutation(self.rows[client])
            leaves = {name: value.detach().requires_grad_() for name, value in adapter.items()}
            value = loss(leaves, order)
            slopes = torch.autograd.grad(value, [*leaves.values()])
            norm = float(torch.cat([slope.reshape(-1) for slope in slopes]).norm())
            shorter = min(1.0, CLIP / norm)
            adapter = {
                name: leaf.detach() - (lr(name) if callable(lr) else lr) * shorter * slope
                for (name, leaf), slope in zip(leaves.items(), slopes, strict=True)
            }
            losses.append(float(value.detach()))
        return adapter, sum(losses) / len(losses)


def near(found: Module, expected: Module, start: Module | None = None) -> None:
    """Float32 against float64: to 1e-5 of the distance from the start."""
    assert found.keys() == expected.keys()
    start = zeros(expected) if start is None else start
    flat = [torch.cat([each[name].reshape(-1) for name in expected]) for each in (found, expected, start)]
    moved = float((flat[1] - flat[2]).norm())
    assert moved > 1e-3
    assert float((flat[0] - flat[1]).norm()) < 1e-5 * moved


def zeros(like: Module) -> Module:
    return {name: torch.zeros_like(value) for name, value in like.items()}


@pytest.mark.parametrize(
    ("rule", "ranks"), [("fedit", RANKS), ("fedex", {}), ("fedex", RANKS), ("flora", {}), ("flora", RANKS)]
)
def test_products_of_loras(place, tmp_path, rule, ranks):
    """The base W and what the server adds to it, with p_i ∝ n_i and s = α / r for all ranks:

    fedit: B̄ = Σ p_i [B_i 0] and Ā = Σ p_i [A_i; 0], zero-padded;  W + s B̄ Ā
    fedex: the same, and the residual grows by s (Σ p_i B_i A_i − B̄ Ā), B̄ Ā of the means (arXiv:2410.09432)
    flora: the residual grows by s [B_1 … B_K] [p_1 A_1; …; p_K A_K]; a new A, and B = 0 (arXiv:2409.05976)
    """
    loaded, states = finish(place, tmp_path / "run", lora=rule, ranks=ranks)
    clients = Clients(loaded)
    model, residual = clients.start, zeros(product(clients.start))
    for number, state in enumerate(states, 1):
        sent = []
        for client in SIZES:
            received = first(model, ranks.get(client, 3))
            loss = lambda own, rows, w=residual: clients.dpo(total(product(own, 2.0), w), rows)  # noqa: E731
            sent.append(clients.train(received, client, number, loss)[0])
        if rule == "flora":
            added = {
                name: 2.0
                * torch.cat([each[f"{name}/B"] for each in sent], 1)
                @ torch.cat([p * each[f"{name}/A"] for p, each in zip(SHARES, sent, strict=True)])
                for name in residual
            }
            old, model = model, strip(state)
            assert not any(value.any() for name, value in model.items() if name.endswith("B"))
            assert not any(torch.equal(model[name], old[name]) for name in model if name.endswith("A"))
        else:
            old, model = model, mean([padded(each, 3) for each in sent], SHARES)
            near(strip(state), model, old)
            added = total(mean([product(each, 2.0) for each in sent], SHARES), product(model, -2.0))
        residual = total(residual, added)
        if rule != "fedit":
            near(strip(state, "residual"), {f"{name}/W": value for name, value in residual.items()})
        else:
            residual = zeros(residual)


def onto_simplex(values: list[float]) -> list[float]:
    """The nearest point with non-negative coordinates of sum 1, by bisection for what is subtracted."""
    low, high = min(values) - 1, max(values)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(max(0, v - middle) for v in values) > 1 else (low, middle)
    return [max(0.0, value - low) for value in values]


@pytest.mark.parametrize(
    "weights", [{"weights": "qffl", "q": 4.0}, {"weights": "afl", "afl_lr": 0.9}], ids=str
)
def test_fair_weights(place, tmp_path, weights):
    """q-FFL: w_k ∝ n_k F_k^q (arXiv:1905.10497). AFL: w = λ, then λ ← Π(λ + η F), from λ_k = n_k / n
    (arXiv:1902.00146). F_k is the mean loss of the visit.
    """
    loaded, states = finish(place, tmp_path / "run", **weights)
    clients, mixture = Clients(loaded), SHARES
    model = clients.start
    for number, state in enumerate(states, 1):
        loss = lambda own, rows: clients.dpo(product(own, 2.0), rows)  # noqa: E731
        sent, losses = zip(*(clients.train(model, client, number, loss) for client in SIZES), strict=True)
        if weights["weights"] == "qffl":
            fair = [n * value ** weights["q"] for n, value in zip(SIZES.values(), losses, strict=True)]
            mixture = [each / sum(fair) for each in fair]
        old, model = model, mean(list(sent), mixture)
        near(strip(state), model, old)
        if weights["weights"] == "afl":
            ascent = [v + weights["afl_lr"] * loss for v, loss in zip(mixture, losses, strict=True)]
            mixture = onto_simplex(ascent)


def test_feddpa(place, tmp_path):
    """φ_i on W + s B_g A_g, averaged; v_i on W + s ((1 − α) B_g A_g + α B_l A_l) with φ as received, kept."""
    alpha = 0.3
    loaded, states = finish(place, tmp_path / "run", "feddpa", settings={**OWN, "local_weight": alpha})
    clients = Clients(loaded)
    model, first_own = clients.start, strip(loaded.backbone.initial, "personal_lora")
    first_own = {name: value * name.endswith("A") for name, value in first_own.items()}
    own = dict.fromkeys(SIZES, first_own)
    for number, state in enumerate(states, 1):
        sent, shared = [], product(model, 2.0 * (1 - alpha))
        for client in SIZES:
            loss = lambda it, rows: clients.dpo(product(it, 2.0), rows)  # noqa: E731
            both = lambda it, rows, g=shared: clients.dpo(total(g, product(it, 2.0 * alpha)), rows)  # noqa: E731
            sent.append(clients.train(model, client, number, loss)[0])
            own[client] = clients.train(own[client], client, number, both, phase="personal", lr=OWN_LR)[0]
        old, model = model, mean(sent, SHARES)
        near(strip(state), model, old)
    for client in SIZES:
        near(strip(loaded.private_state(client).tensors["personal"], "personal_lora"), own[client], first_own)


def test_fedsdg(place, tmp_path):
    """θ_g, θ_p and a together on W + s (B_g A_g + σ(a) B_p A_p) and L + λ_1 Σ m + λ_2 ‖θ_p‖²; the server adds
    Σ_k w_k Δ_k with w_k ∝ max(0, cos(Δ_k, Δ̄)) and the unweighted mean Δ̄."""
    rates = {"lora": LR, "personal_lora": OWN_LR, "gate": 8.0}
    penalties = {"gate_penalty": 0.03, "personal_penalty": 0.02}
    settings = {"personal_lr": OWN_LR, "gate_lr": rates["gate"], **penalties}
    loaded, states = finish(place, tmp_path / "run", "fedsdg", settings=settings)
    clients, start = Clients(loaded), {n: value.double() for n, value in loaded.backbone.initial.items()}
    assert {name.split("/")[2] for name in start if name.endswith("/A")} == {"attn.c_proj", "mlp.c_proj"}
    shared = {name: value for name, value in start.items() if name.startswith("lora/")}
    first_own = {name: value for name, value in start.items() if name not in shared}
    own = dict.fromkeys(SIZES, first_own)

    def loss(it, rows):
        gates = {name: value.sigmoid() for name, value in it.items() if name.startswith("gate/")}
        personal = {n: v for n, v in it.items() if n.startswith("personal_lora/")}
        gated = {n: gates[f"gate/{n[0]}"] * v for n, v in product(strip(personal, "personal_lora")).items()}
        changed = {n: 2.0 * v for n, v in total(product(strip(it)), gated).items()}
        penalty = penalties["gate_penalty"] * sum(gates.values()).sum()
        penalty = penalty + penalties["personal_penalty"] * sum(v.square().sum() for v in personal.values())
        return clients.dpo(changed, rows) + penalty

    for number, state in enumerate(states, 1):
        moves = []
        for client in SIZES:
            after, _ = clients.train(
                shared | own[client], client, number, loss, lr=lambda name: rates[name.split("/")[0]]
            )
            own[client] = {name: after[name] for name in own[client]}
            moves.append(torch.cat([(after[name] - shared[name]).reshape(-1) for name in shared]))
        middle = sum(moves) / len(moves)
        alpha = [max(0.0, float(torch.cosine_similarity(move, middle, dim=0))) for move in moves]
        step = sum(a / sum(alpha) * move for a, move in zip(alpha, moves, strict=True))
        parts = step.split([value.numel() for value in shared.values()])
        old, shared = (
            shared,
            {
                name: value + part.view_as(value)
                for (name, value), part in zip(shared.items(), parts, strict=True)
            },
        )
        near({name: state[name].double() for name in shared}, shared, old)
    for client in SIZES:
        found = loaded.private_state(client).tensors["personal"]
        near({name: found[name].double() for name in first_own}, own[client], first_own)


@pytest.mark.parametrize("name", ["feddpo", "ditto"])
def test_kto(place, tmp_path, name):
    """KTO of several clients, each with its own reference point per step, and of their own models v_i with
    the loss + λ/2 ‖v_i − φ‖²."""
    weights, pull = {"desirable": 1.3, "undesirable": 0.7}, 0.05
    # Fast enough for z_0 to matter: the response before instead of the next one changes the result.
    fast = 8.0
    settings = {"objective": "kto", "objective_settings": weights, "lr": fast}
    if name == "ditto":
        settings |= {**OWN, "lam": pull}
    loaded, states = finish(place, tmp_path / "run", name, rounds=2, settings=settings, data="thumbs")
    clients = Clients(loaded)
    model, own = clients.start, dict.fromkeys(SIZES, clients.start)

    def loss(it, rows):
        return clients.kto(product(it, 2.0), rows, **weights)

    def pulled(it, rows):
        away = sum((it[name] - model[name]).square().sum() for name in it)
        return loss(it, rows) + pull / 2 * away

    for number, state in enumerate(states, 1):
        sent = [clients.train(model, client, number, loss, lr=fast)[0] for client in SIZES]
        if name == "ditto":
            own = {
                client: clients.train(each, client, number, pulled, phase="personal", lr=OWN_LR)[0]
                for client, each in own.items()
            }
        old, model = model, mean(sent, SHARES)
        near(strip(state), model, old)
    assert max(clients.points) > 0 == min(clients.points)
    if name == "ditto":
        for client, each in own.items():
            near(strip(loaded.private_state(client).tensors["own"]), each, clients.start)
