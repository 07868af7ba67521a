"""Calculator for the constants and bounds of the theory of distributed DPO (arXiv:2605.20696)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import Field, model_validator

from prefed.core.strict_settings import StrictModel


class Constants(StrictModel):
    """Constants of the theorems. Defaults are from table 1 of the paper where it lists them.

    >>> constants = Constants(beta=0.1, horizon=10)
    >>> round(constants.l, 6), round(constants.noise, 6)
    (2.1, 0.4)

    Raises:
        ValueError: ``cohort`` is larger than ``clients``.
    """

    beta: float = Field(0.2, gt=0, description="inverse temperature of DPO")
    horizon: int = Field(64, ge=1, description="H, steps of a trajectory: tokens of a response")
    zeta_phi2: float = Field(1.0, gt=0, description="ζ_φ², bound on the squared score of a step")
    c0: float = Field(1.0, ge=1, description="C₀, constant of the mixing of trajectories")
    varsigma: float = Field(
        0.0, ge=0, lt=1, description="ς, mixing rate: correlation of steps k apart is ς^k"
    )
    smoothness: float | None = Field(None, gt=0, description="L; default: its closed form")
    zeta_g2: float | None = Field(
        None, ge=0, description="ζ_g², variance of a client's gradient; default: its closed form"
    )
    kappa2: float | None = Field(
        None,
        ge=0,
        description="κ², gradient diversity of clients; default: its bound, the closed form of ζ_g²",
    )
    gap: float = Field(math.log(2), ge=0, description="ℒ(θ⁰) − ℒ*; default: log 2, the initial DPO loss")
    clients: int = Field(5, ge=1, description="N, number of clients")
    cohort: int = Field(3, ge=1, description="S, clients per round")
    local_steps: int = Field(3, ge=1, description="E, local steps per round")
    rounds: int = Field(80, ge=1, description="R, number of rounds")
    lr: float = Field(1e-4, gt=0, description="η, learning rate of plain gradient descent")
    max_delay: int = Field(0, ge=0, description="q_max, maximum delay of a client's model in rounds")
    drift: float = Field(1.0, gt=0, description="c of C_q, an absolute constant that the paper does not give")
    rho: float = Field(
        0.5393, ge=0, lt=1, description="ρ of the mixing matrix; default: ring of five clients"
    )
    epsilon: float = Field(0.1, gt=0, description="ε, target for the mean squared gradient norm")

    @model_validator(mode="after")
    def _coherent(self) -> Constants:
        if self.cohort > self.clients:
            raise ValueError(f"cohort = {self.cohort} is larger than clients = {self.clients}")
        return self

    @property
    def c_mix(self) -> float:
        """C_mix = 1 + 2 C₀ ς / (1 − ς) (eq. 8)."""
        return 1 + 2 * self.c0 * self.varsigma / (1 - self.varsigma)

    @property
    def l(self) -> float:  # noqa: E743 - the paper's letter
        """L, or (β² C_mix + 2β) ζ_φ² H (section 4 and appendix B)."""
        if self.smoothness is not None:
            return self.smoothness
        return (self.beta**2 * self.c_mix + 2 * self.beta) * self.zeta_phi2 * self.horizon

    @property
    def second_moment(self) -> float:
        """4 β² C_mix ζ_φ² H, a bound on the mean squared gradient of a pair (section 4)."""
        return 4 * self.beta**2 * self.c_mix * self.zeta_phi2 * self.horizon

    @property
    def noise(self) -> float:
        """ζ_g², or :attr:`second_moment`."""
        return self.second_moment if self.zeta_g2 is None else self.zeta_g2

    @property
    def diversity(self) -> float:
        """κ², or :attr:`second_moment`, which bounds every client's mean gradient."""
        return self.second_moment if self.kappa2 is None else self.kappa2

    @property
    def c_q(self) -> float:
        """C_q = c η² E (ζ_g² + κ²), the drift in a round (eq. 77)."""
        return self.drift * self.lr**2 * self.local_steps * (self.noise + self.diversity)

    @property
    def aligned_norm(self) -> float:
        """Norm of the Hessian divided by the closed form of L, if all steps are aligned.

        Suppose every step has two actions with features ±a, ζ_φ² = a², and a pair differs in every step. The
        norm at equal probabilities is then β² a² H. It exceeds L for β H > β C_mix + 2, although scores of
        different steps are uncorrelated under the policy.

        >>> round(Constants(beta=1, horizon=5).aligned_norm, 2)
        1.67
        """
        return self.beta * self.horizon / (self.beta * self.c_mix + 2)

    def derived(self) -> dict[str, float]:
        """Return the derived constants by name."""
        return {
            "C_mix": self.c_mix,
            "L": self.l,
            "ζ_g²": self.noise,
            "κ²": self.diversity,
            "C_q": self.c_q,
            "‖∇²ℓ‖ over closed form of L, all steps aligned": self.aligned_norm,
        }


@dataclass(frozen=True)
class Bound:
    """A bound on (1/R) Σ E‖∇ℒ(θ^r)‖².

    Attributes:
        where: equation, and whether the theorem or its proof contains it.
        terms: formula → value.
        total: sum of the terms; ``None`` if some are known only up to a constant.
    """

    where: str
    terms: dict[str, float]
    total: float | None = None


@dataclass(frozen=True)
class Statement:
    """A theorem or corollary.

    Attributes:
        name: ``"theorem 5.1"``.
        about: its subject.
        limit: formula and value of the largest step size allowed; ``None`` for any.
        allowed: whether the step size is within the limit.
        stated: the bound as stated in the paper.
        derived: the bound as the appendix derives it, or with a term missing from the statement.
        rounds: number of rounds from which the stated bound is below ε at this step size; ``None`` if there
            is none or it is unknown.
    """

    name: str
    about: str
    limit: tuple[str, float] | None
    allowed: bool
    stated: Bound
    derived: Bound | None
    rounds: int | None


def statements(constants: Constants) -> tuple[Statement, ...]:
    """Return theorems 5.1, 5.4, 5.5 and 6.1, and corollary 5.2.

    Runs need not obey these bounds: ``experiments/distributed_dpo/slips.md`` lists known errors in them.

    >>> [one.name for one in statements(Constants())]
    ['theorem 5.1', 'corollary 5.2', 'theorem 5.4', 'theorem 5.5', 'theorem 6.1']
    """
    return tuple(_statements(constants))


def _statements(c: Constants) -> Iterator[Statement]:
    e, l, eta, n, s = c.local_steps, c.l, c.lr, c.clients, c.cohort  # noqa: E741 - the paper's letters
    noise, diversity = c.noise, c.diversity
    start = {"2(ℒ(θ⁰) − ℒ*)/(ηER)": 2 * c.gap / (eta * e * c.rounds)}
    proof = {"2κ²": 2 * diversity, "4L²η²E²ζ_g²": 4 * (l * eta * e) ** 2 * noise}
    yield _statement(
        c,
        "theorem 5.1",
        "FedDPO, partial participation",
        ("min{1/(8LE), S/(16LNE)}", min(1 / (8 * l * e), s / (16 * l * n * e))),
        _bound(
            "eq. 9, as stated in the paper",
            start
            | {
                "8Lηζ_g²/S": 8 * l * eta * noise / s,
                "16L²η²Eκ²": 16 * (l * eta) ** 2 * e * diversity,
                "16L²η²E²ζ_g²/S": 16 * (l * eta * e) ** 2 * noise / s,
            },
        ),
        _bound("eq. 71, the end of its proof", start | proof | {"2Lηζ_g²/S": 2 * l * eta * noise / s}),
    )
    yield _statement(
        c,
        "corollary 5.2",
        "FedDPO, full participation",
        ("1/(8LE)", 1 / (8 * l * e)),
        _bound(
            "eq. 10, as stated in the paper",
            start | {"2Lηζ_g²/N": 2 * l * eta * noise / n, "8L²η²Eκ²": 8 * (l * eta) ** 2 * e * diversity},
        ),
        _bound("eq. 73, the end of its proof", start | proof | {"2Lηζ_g²/N": 2 * l * eta * noise / n}),
    )
    late = min(1 / (16 * l * e), s / (32 * l * n * e * (1 + c.max_delay)))
    yield _statement(
        c,
        "theorem 5.4",
        "FedDPO with staleness",
        ("min{1/(16LE), S/(32LNE(1 + q_max))}", late),
        Bound(
            "as stated in the paper; all but the first term up to a constant",
            start
            | {
                "O(ηζ_g²)": eta * noise,
                "O(ηEκ²/S)": eta * e * diversity / s,
                "O(ηC_q q_max), C_q = cη²E(ζ_g² + κ²)": eta * c.c_q * c.max_delay,
            },
        ),
    )
    yield _statement(
        c,
        "theorem 5.5",
        "lower bound for FedDPO, one or the other up to a constant",
        None,
        Bound(
            "as stated in the paper",
            {"Ω(Eκ²/S)": e * diversity / s, "Ω(ζ_g/√(SR))": math.sqrt(noise / (s * c.rounds))},
        ),
        Bound(
            "in its proof",
            {
                "Ω(E²κ²/S) for constant η": e**2 * diversity / s,
                "Ω(ζ_g²/√(SR))": noise / math.sqrt(s * c.rounds),
            },
        ),
    )
    apart = 1 - c.rho**2
    mixed = {
        "2(ℒ(θ̄⁰) − ℒ*)/(ηR)": 2 * c.gap / (eta * c.rounds),
        "32L²η²ζ_g²/(1 − ρ²)": 32 * (l * eta) ** 2 * noise / apart,
        "16L²η²κ²/(1 − ρ²)": 16 * (l * eta) ** 2 * diversity / apart,
    }
    yield _statement(
        c,
        "theorem 6.1",
        "DecDPO, at the mean of the nodes",
        ("√(1 − ρ²)/(4L)", math.sqrt(apart) / (4 * l)),
        _bound("eq. 12, as stated in the paper", mixed),
        _bound("with the term that it lacks", mixed | {"Lηζ_g²/N": l * eta * noise / n}),
    )


def _bound(where: str, terms: dict[str, float]) -> Bound:
    return Bound(where, terms, sum(terms.values()))


def _statement(
    c: Constants,
    name: str,
    about: str,
    limit: tuple[str, float] | None,
    stated: Bound,
    derived: Bound | None = None,
) -> Statement:
    rounds = None
    if stated.total is not None:
        first = next(iter(stated.terms.values()))
        # The first term falls like 1/R; more rounds do not change the others.
        room = c.epsilon - (stated.total - first)
        rounds = max(1, math.ceil(first * c.rounds / room)) if room > 0 else None
    return Statement(name, about, limit, limit is None or c.lr <= limit[1], stated, derived, rounds)
