"""Personalised methods on quadratics, against closed forms.

Client i has the loss ½ (φ − a_i)ᵀ H_i (φ − a_i). A step of gradient descent of rate η maps φ − a_i to
(I − η H_i)(φ − a_i). With a pull μ/2 ‖φ − u‖² the gradient is (H_i + μ)(φ − b_i), its zero being
b_i(u) = (H_i + μ)⁻¹ (H_i a_i + μ u).
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from prefed.core import Entry, Key, Layout, Round, Tensors
from prefed.testing import Quadratic, simulate
from quadratics import LINE, RATE, make, model, problem, weighted

EYE = np.eye(3)
LATER = Round(9, 9, Key(0), {})
"""For a move that asks nothing of its round."""
power = np.linalg.matrix_power


def fixed_point(maps: list[np.ndarray], optima: list[np.ndarray]) -> np.ndarray:
    """Where φ = Σ p_i (a_i + M_i (φ − a_i))."""
    eye = np.eye(len(optima[0]))
    offsets = weighted([(eye - m) @ a for m, a in zip(maps, optima, strict=True)])
    return np.linalg.solve(eye - weighted(maps), offsets)


def close(ours: Tensors | np.ndarray, theirs: np.ndarray, rtol: float = 1e-9) -> None:
    flat = ours.flat.numpy() if isinstance(ours, Tensors) else ours
    np.testing.assert_allclose(flat, theirs, rtol=rtol, atol=1e-11)


# Per-FedAvg


def outer_maps(curvatures: list[np.ndarray], variant: str) -> list[np.ndarray]:
    """With inner rate α = 0.3 and K = 2, θ − a = P (w − a), P = (I − α H)², so ∇L(θ) = H P (w − a).

    An outer step takes w − a to [I − η H P](w − a) in first order, and to [I − η P H P](w − a) with the
    Hessians; four of them."""
    inner = [power(EYE - 0.3 * h, 2) for h in curvatures]
    if variant == "hf":
        return [power(EYE - RATE * p @ h @ p, 4) for p, h in zip(inner, curvatures, strict=True)]
    return [power(EYE - RATE * h @ p, 4) for p, h in zip(inner, curvatures, strict=True)]


@pytest.mark.parametrize("variant", ["first_order", "hf"])
@pytest.mark.parametrize("rounds", [1, 6])
def test_perfedavg_follows_its_closed_form(variant, rounds):
    """φ = φ* + Mᵗ (φ⁰ − φ*), M = Σ p_i M_i; and a client predicts from a_i + P_i (φ − a_i)."""
    curvatures, optima, clients, start = problem()
    maps = outer_maps(curvatures, variant)
    fixed = fixed_point(maps, optima)
    method = make("perfedavg", inner_lr=0.3, inner_steps=2, variant=variant)
    run = simulate(method, clients, start, rounds)
    close(model(run), fixed + power(weighted(maps), rounds) @ (start.flat.numpy() - fixed))
    own = run.models(method, clients, start)
    for client, h, a in zip(clients, curvatures, optima, strict=True):
        close(own[client], a + power(EYE - 0.3 * h, 2) @ (model(run) - a))


def test_perfedavg_with_hessians_rests_where_the_loss_after_adaptation_is_least():
    """One outer step a visit: Σ p_i P_i H_i P_i (φ − a_i) = 0 is the zero gradient of Σ p_i L_i(θ_i(φ)).

    In first order it rests where Σ p_i H_i P_i (φ − a_i) = 0, elsewhere."""
    curvatures, optima, clients, _ = problem()
    inner = [power(EYE - 0.3 * h, 2) for h in curvatures]
    rests = []
    for variant, slopes in {
        "hf": [p @ h @ p for p, h in zip(inner, curvatures, strict=True)],
        "first_order": [h @ p for p, h in zip(inner, curvatures, strict=True)],
    }.items():
        pull = weighted([s @ a for s, a in zip(slopes, optima, strict=True)])
        best = np.linalg.solve(weighted(slopes), pull)
        method = make("perfedavg", inner_lr=0.3, inner_steps=2, variant=variant, local_steps=1)
        close(model(simulate(method, clients, Tensors(LINE, torch.from_numpy(best)), 2)), best)
        rests.append(best)
    assert np.linalg.norm(rests[0] - rests[1]) > 0.1


def test_perfedavg_with_hessians_clips_the_outer_gradient():
    """H = I, w − a of length 9, K = 1, α = ½: the inner step's gradient is clipped to length 1, leaving θ − a
    of length 8.5; the outer gradient (1 − α)(θ − a) is clipped to 1, and w moves by η towards a."""
    clients = {"a": Quadratic.at([9.0, 0.0, 0.0])}
    start = Tensors.zeros(LINE, torch.float64)
    method = make("perfedavg", inner_lr=0.5, inner_steps=1, variant="hf", local_steps=1, clip=1)
    close(model(simulate(method, clients, start, 1)), np.array([RATE, 0, 0]))


def adamw(parameter: torch.Tensor, rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW([parameter], rate, betas=(0.8, 0.95), weight_decay=0.1)


@pytest.mark.parametrize("state", ["new", "kept"])
def test_perfedavg_by_adamw_is_torchs(state):
    """Written out with torch.optim.AdamW. At each outer step θ is a new parameter at w with an AdamW of its
    own for K = 2 steps; w's own AdamW, made once a visit, then steps with θ's gradient where w's would be.
    Kept, both continue where they stood, from visit to visit."""
    curvatures, optima, clients, start = problem()
    given = {"optimizer": "adamw", "betas": (0.8, 0.95), "weight_decay": 0.1, "clip": 2.0}
    method = make("perfedavg", inner_lr=0.3, inner_steps=2, optimizer_state=state, **given)
    run = simulate(method, clients, start, 2)

    def slope(at, client):
        h, a = torch.from_numpy(curvatures[client]), torch.from_numpy(optima[client])
        gradient = h @ (at - a)
        return gradient * min(1.0, 2.0 / (float(gradient.norm()) + 1e-6))  # torch's clip_grad_norm_

    def adapt(w, client, before):
        theta = torch.nn.Parameter(w.detach().clone())
        own = adamw(theta, 0.3)
        if before:
            own.state[theta] = before
        for _ in range(2):
            theta.grad = slope(theta.detach(), client)
            own.step()
        return theta.detach(), own.state[theta]

    shared, memory = start.flat.clone(), {}
    for _ in range(2):
        ends = []
        for client in range(3):
            w = torch.nn.Parameter(shared.clone())
            outer, inner = adamw(w, RATE), {}
            if state == "kept" and client in memory:
                outer.state[w], inner = memory[client]
            for _ in range(4):
                theta, after = adapt(w, client, inner)
                inner = after if state == "kept" else {}
                w.grad = slope(theta, client)
                outer.step()
            memory[client] = outer.state[w], inner
            ends.append(w.detach().numpy())
        shared = torch.from_numpy(weighted(ends))
    close(model(run), shared.numpy())
    own = run.models(method, clients, start)
    for number, client in enumerate(clients):
        close(own[client], adapt(shared, number, {})[0].numpy())


@dataclass
class Quartic(Quadratic):
    """A loss ¼ Σ (φ − a)⁴ whose Hessian 3 (φ − a)² depends on where it is taken."""

    def gradient(self, flat: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return ((flat - self.targets[rows]) ** 3).mean(0)


@pytest.mark.parametrize(("difference", "digits"), [(1e-4, 1e-7), (None, 1e-5)])
def test_hessians_are_taken_where_the_inner_steps_were(difference, digits):
    """The outer gradient against autograd through two inner steps of rate 0.1, which is exact. A product of
    Hessian and v is off by h² v³ / |v|² here: the default h of 1e-3 costs 1e-5 of the step at most, 0.01
    would cost a hundred times that."""
    start = Tensors(LINE, torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64))
    target = torch.tensor([[2.0, 1.0, -1.0]], dtype=torch.float64)
    settings = {"inner_lr": 0.1, "inner_steps": 2, "variant": "hf", "local_steps": 1}
    settings |= {} if difference is None else {"difference": difference}
    run = simulate(make("perfedavg", **settings), {"a": Quartic(target)}, start, 1)
    w = start.flat.clone().requires_grad_()
    theta = w
    for _ in range(2):
        theta = theta - 0.1 * (theta - target[0]) ** 3
    (slope,) = torch.autograd.grad(((theta - target[0]) ** 4).sum() / 4, w)
    moved = model(run) - start.flat.numpy()
    assert np.linalg.norm(moved + RATE * slope.numpy()) <= digits * np.linalg.norm(moved)


# FedAMP


def softmax(rows: np.ndarray) -> np.ndarray:
    raised = np.exp(rows - rows.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


def test_rounds_of_fedamp_by_cosines():
    """Everybody starts at φ⁰, after that client i at u_i = Σ_j a_ij φ_j; Δφ is taken from φ⁰ throughout."""
    curvatures, optima, clients, start = problem()
    maps = [power(EYE - RATE * h, 4) for h in curvatures]
    begin = start.flat.numpy()
    sent, ends = np.stack([begin] * 3), np.zeros((3, 3))
    for _ in range(3):
        ends = np.stack([a + m @ (u - a) for m, a, u in zip(maps, optima, sent, strict=True)])
        unit = (ends - begin) / np.linalg.norm(ends - begin, axis=1, keepdims=True)
        attention = np.maximum(softmax(unit @ unit.T / 0.25), 0.2)
        attention /= attention.sum(1, keepdims=True)
        assert (np.abs(attention - 1 / 3) > 0.02).any()
        sent = attention @ ends
    method = make("fedamp", temperature=0.25, floor=0.2)
    run = simulate(method, clients, start, 3)
    own = run.models(method, clients, start)
    for client, end, mixture in zip(clients, ends, sent, strict=True):
        close(own[client], end)
        close(run.server.tensors[f"client/{client}"], end)
        close(method.exchanges[0].send(run.server, client, LATER).tensors["model"], mixture)
    close(model(run), weighted(list(ends)))


@pytest.mark.parametrize("given", [20.0, None])
def test_two_rounds_of_fedamp_by_distances(given):
    """c_ij = (α/σ) e^(−‖φ_i − φ_j‖²/σ), α = σ/3, σ given or the mean squared distance of the three pairs.

    Round 1 starts everybody at φ⁰, with nothing to be pulled to; a visit of round 2 is pulled to u_i with
    μ = λ/α and ends at b + (I − η(H + μ))⁴ (u − b)."""
    curvatures, optima, clients, start = problem()
    maps = [power(EYE - RATE * h, 4) for h in curvatures]
    first = np.stack([a + m @ (start.flat.numpy() - a) for m, a in zip(maps, optima, strict=True)])
    apart = ((first[:, None] - first[None]) ** 2).sum(-1)
    sigma = given or (apart[0, 1] + apart[0, 2] + apart[1, 2]) / 3
    mu = 3.0 / (sigma / 3)
    c = np.exp(-apart / sigma) / 3
    np.fill_diagonal(c, 0)
    np.fill_diagonal(c, 1 - c.sum(1))
    second = []
    for h, a, u in zip(curvatures, optima, c @ first, strict=True):
        b = np.linalg.solve(h + mu * EYE, h @ a + mu * u)
        second.append(b + power(EYE - RATE * (h + mu * EYE), 4) @ (u - b))
    method = make("fedamp", attention="distance", sigma=given, lam=3.0)
    own = simulate(method, clients, start, 2).models(method, clients, start)
    for client, expected in zip(clients, second, strict=True):
        close(own[client], expected)


def test_too_long_a_step_of_fedamp_is_cut():
    """c_ij = e^(−d_ij/σ) / max_i Σ_{j≠i} e^(−d_ij/σ): the client closest to the others keeps 0 of its own."""
    _, _, clients, start = problem()
    method = make("fedamp", attention="distance", alpha=99.0, sigma=20.0)
    server = simulate(method, clients, start, 1).server
    ends = np.stack([server.tensors[f"client/{client}"].flat.numpy() for client in clients])
    c = np.exp(-((ends[:, None] - ends[None]) ** 2).sum(-1) / 20) - EYE
    assert server.values["alpha"] == pytest.approx(20 / c.sum(1).max())
    c /= c.sum(1).max()
    for client, mixture in zip(clients, (c + np.diag(1 - c.sum(1))) @ ends, strict=True):
        close(method.exchanges[0].send(server, client, LATER).tensors["model"], mixture)


def test_fedamps_fixed_point_of_two_opposed_clients():
    """H = 1, a = ±1, long visits. By symmetry φ = ±x, u = (1 − 2c) x with c = (α/σ) e^(−4x²/σ), and
    x = (1 + μ (1 − 2c) x) / (1 + μ), so x = 1 / (1 + 2 μ c); α = σ/2 = 1, μ = λ/α = 0.5."""
    layout = Layout((Entry("lora/0/q/B", (1, 1), "lora", 0, "B"),))
    clients = {"minus": Quadratic.at([-1.0]), "plus": Quadratic.at([1.0])}
    method = make("fedamp", layout, attention="distance", sigma=2.0, lam=0.5, local_steps=40)
    start = Tensors(layout, torch.zeros(1, dtype=torch.float64))
    own = simulate(method, clients, start, 30).models(method, clients, start)
    x = 1.0
    for _ in range(200):
        x = 1 / (1 + 2 * 0.5 * 0.5 * np.exp(-2 * x * x))
    close(own["plus"], np.array([x]), rtol=1e-6)
    close(own["minus"], np.array([-x]), rtol=1e-6)


# Ditto and pFedMe


def test_dittos_own_models_rest_between_their_optimum_and_the_shared_model():
    """The shared φ is FedDPO's, at its fixed point; v_i rests at b_i(φ) = (H_i + λ)⁻¹ (H_i a_i + λ φ)."""
    curvatures, optima, clients, start = problem()
    shared = fixed_point([power(EYE - RATE * h, 4) for h in curvatures], optima)
    method = make("ditto", lam=0.7, personal_lr=0.5)
    run = simulate(method, clients, Tensors(LINE, torch.from_numpy(shared)), 20)
    close(model(run), shared)
    own = run.models(method, clients, start)
    for client, h, a in zip(clients, curvatures, optima, strict=True):
        close(own[client], np.linalg.solve(h + 0.7 * EYE, h @ a + 0.7 * shared))


def test_pfedme_descends_on_the_moreau_envelopes():
    """With the inner problem solved, θ = b(w) and w − θ = (H + λ)⁻¹ H (w − a).

    So R local rounds take w − a to G^R (w − a), G = I − ηλ (H + λ)⁻¹ H, and the last θ_i is b_i at the last w
    but one; t rounds give φ = φ* + Mᵗ (φ⁰ − φ*), M = Σ p_i G_i^R."""
    curvatures, optima, clients, start = problem()
    lam, eta = 0.8, 0.5
    steps = [EYE - eta * lam * np.linalg.solve(h + lam * EYE, h) for h in curvatures]
    maps = [power(g, 2) for g in steps]
    fixed = fixed_point(maps, optima)
    after = [fixed + power(weighted(maps), t) @ (start.flat.numpy() - fixed) for t in (1, 2)]
    method = make("pfedme", lam=lam, outer_lr=eta, inner_steps=60, lr=0.45, local_steps=2)
    run = simulate(method, clients, start, 2)
    close(model(run), after[1])
    own = run.models(method, clients, start)
    for client, h, a, g in zip(clients, curvatures, optima, steps, strict=True):
        last = a + g @ (after[0] - a)
        close(own[client], np.linalg.solve(h + lam * EYE, h @ a + lam * last))


@pytest.mark.parametrize("eta", [0.3, 1.2])
def test_pfedme_rests_at_the_envelopes_optimum(eta):
    """R = 1: Σ p_i λ (φ − b_i(φ)) = 0 is the zero gradient of Σ p_i F_i, whatever η. From w = 0, the
    server mixing 0.5 takes half a step."""
    curvatures, optima, clients, _ = problem()
    slopes = [np.linalg.solve(h + 0.8 * EYE, h) for h in curvatures]
    best = np.linalg.solve(weighted(slopes), weighted([s @ a for s, a in zip(slopes, optima, strict=True)]))
    method = make("pfedme", lam=0.8, outer_lr=eta, inner_steps=60, lr=0.45, local_steps=1)
    close(model(simulate(method, clients, Tensors(LINE, torch.from_numpy(best)), 1)), best)
    zero = Tensors.zeros(LINE, torch.float64)
    whole, half = (model(simulate(make("pfedme", server_mixing=b), clients, zero, 1)) for b in (1.0, 0.5))
    close(half, whole / 2)


# FedALA

BLOCKS = Layout(tuple(Entry(f"lora/{block}/q/B", (1, 2), "lora", block, "B") for block in range(2)))


def after_one_round(grain: str, **settings: object):
    """H = I, two clients; the state after round 1 and after the weights were learnt in round 2."""
    clients = {"a": Quadratic.at([1.0, 2.0, -3.0, 4.0]), "b": Quadratic.at([4.0, 1.5, -2.0, -5.0], size=3)}
    more = {"first_weight_steps": 400, "weight_lr": 0.15, "local_steps": 2, **settings}
    method = make("fedala", BLOCKS, grain=grain, **more)
    start = Tensors.zeros(BLOCKS, torch.float64)
    before = simulate(method, clients, start, 1)
    shared = model(before)
    old = {client: state.tensors["own"].flat.numpy() for client, state in before.private.items()}
    return method, clients, start, shared, old, simulate(method, clients, start, 2, run=before)


@pytest.mark.parametrize("grain", ["block", "tensor", "element"])
def test_fedala_learns_the_best_weights(grain):
    """L(φ_i + w d) with d = φ − φ_i over a group is least at w = dᵀ(a − φ_i) / dᵀd, kept within 0 and 1; one
    weight for a block's two numbers, or one for each. Training then starts at φ_i + w d."""
    _, clients, _, shared, old, run = after_one_round(grain)
    some_inside = []
    for client, data in clients.items():
        a, d = data.targets[0].numpy(), shared - old[client]
        toward = d * (a - old[client])
        if grain != "element":
            toward, square = (np.repeat(v.reshape(2, 2).sum(1), 2) for v in (toward, d * d))
        else:
            square = d * d
        best = np.clip(toward / square, 0, 1)
        close(run.private[client].tensors["weights"], best, rtol=1e-6)
        started = old[client] + best * d
        close(run.private[client].tensors["own"], a + (1 - RATE) ** 2 * (started - a), rtol=1e-6)
        some_inside.append(bool(((best > 0.01) & (best < 0.99)).any()))
    assert any(some_inside)


def test_fedala_learns_its_weights_for_the_published_model_before_it_predicts():
    """W is fitted again, to d = φ − φ_i of the φ published after the visit: the minimum along each block, not
    the visit's weights, which its state keeps. After a first visit a client has a model of its own but no
    learnt weights yet, and predicts with the minimum all the same."""
    method, clients, start, _, _, second = after_one_round("block", weight_steps=400)
    first = simulate(method, clients, start, 1)
    for outcome in (first, second):
        before = {client: state.tensors["weights"].flat.clone() for client, state in outcome.private.items()}
        models, moved = outcome.models(method, clients, start), []
        for client, data in clients.items():
            state = outcome.private[client]
            own, a = state.tensors["own"].flat.numpy(), data.targets[0].numpy()
            d = model(outcome) - own
            toward, square = ((v.reshape(2, 2).sum(1)) for v in (d * (a - own), d * d))
            best = np.repeat(np.clip(toward / square, 0, 1), 2)
            close(models[client], own + best * d, rtol=1e-6)
            moved.append(np.abs(best - before[client].numpy()).max())
            assert state.tensors["weights"].flat.equal(before[client])
        assert max(moved) > 0.01


def test_fedala_predicts_with_its_visits_weights_and_takes_lower_layers_over():
    method, clients, start, _, _, run = after_one_round("block", adaptive_layers=1, relearn=False)
    models = run.models(method, clients, start)
    for client, state in run.private.items():
        weights, own = state.tensors["weights"].flat.numpy(), state.tensors["own"].flat.numpy()
        assert (weights[:2] == 1).all()
        assert (weights[2:] < 1).all()
        close(models[client], own + (model(run) - own) * weights)


# FedPDPO and FedRep: two phases in turn

TURNS = Layout((Entry("head/weight", (2,), "head"), Entry("lora/0/q/B", (1, 2), "lora", 0, "B")))


@pytest.mark.parametrize("name", ["fedpdpo", "fedrep"])
def test_personal_and_shared_phases_take_turns(name):
    """The curvature couples head h and LoRA φ, x = (h, φ). Phase 1 moves h alone, 3 steps of rate 0.3 by
    [H (x − a)]_h; phase 2 moves φ alone, 4 steps of rate 0.2 by [H (x − a)]_φ."""
    curvatures, optima, clients, start = problem(TURNS)
    ablated = {"bottleneck": False, "reward_head": False} if name == "fedpdpo" else {}
    method = make(name, TURNS, personal_lr=0.3, personal_steps=3, **ablated)
    run = simulate(method, clients, start, 2)
    heads = {client: start.flat.numpy()[:2] for client in clients}
    shared = start.flat.numpy()[2:]
    for _ in range(2):
        ends = []
        for client, h, a in zip(clients, curvatures, optima, strict=True):
            x = np.concatenate([heads[client], shared])
            for steps, rate, moves in ((3, 0.3, slice(0, 2)), (4, RATE, slice(2, 4))):
                for _ in range(steps):
                    x = x.copy()
                    x[moves] -= rate * (h @ (x - a))[moves]
            heads[client] = x[:2]
            ends.append(x[2:])
        shared = weighted(ends)
    close(model(run), shared)
    models = run.models(method, clients, start)
    for client in clients:
        close(models[client], np.concatenate([heads[client], shared]))


# FedSDG

GATED = Layout(
    (
        Entry("lora/0/q/B", (1, 2), "lora", 0, "B"),
        Entry("personal_lora/0/q/B", (1, 2), "personal_lora", 0, "B"),
        Entry("gate/0", (1,), "gate", 0),
    )
)


@pytest.mark.parametrize("alignment", ["mean", "leave_one_out"])
def test_fedsdg_weighs_updates_by_their_angle_to_the_others(alignment):
    """α_k = max(0, cos(Δ_k, Δ̄)), Δ̄ the plain mean of all or of the others; θ_g moves by Σ α_k Δ_k / Σ α_k.

    The clients' sizes do not matter. One client stands against the rest and has no say."""
    targets = {"a": [4.0, 1.0], "b": [3.0, 2.0], "c": [-2.0, -1.0], "d": [1.0, 3.0]}
    clients = {
        client: Quadratic.at([*target, 0, 0, 0], size=size)
        for size, (client, target) in enumerate(targets.items(), 1)
    }
    moved = np.stack([(1 - (1 - RATE) ** 4) * np.array(target) for target in targets.values()])
    alpha = []
    for k, delta in enumerate(moved):
        mean = moved.mean(0) if alignment == "mean" else np.delete(moved, k, 0).mean(0)
        alpha.append(max(0.0, delta @ mean / (np.linalg.norm(delta) * np.linalg.norm(mean))))
    assert alpha[2] == 0
    start = Tensors.zeros(GATED, torch.float64)
    method = make("fedsdg", GATED, alignment=alignment)
    run = simulate(method, clients, start, 1)
    close(model(run), np.array(alpha) @ moved / sum(alpha))
    assert run.report["aligned"] == 0.75
