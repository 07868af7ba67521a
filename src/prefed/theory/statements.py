"""The statements of arXiv:2605.20696 with numbers in them, as stated in the paper and as its proofs end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from prefed.theory.constants import Constants
from prefed.theory.slips import SLIPS, Slip


@dataclass(frozen=True)
class Term:
    """A formula and its value."""

    formula: str
    value: float


@dataclass(frozen=True)
class Bound:
    """Terms of a bound on (1/R) Σ E‖∇ℒ(θ^r)‖².

    Attributes:
        where: the equation, and whose words it is.
        total: their sum; ``None`` where some hold only up to a constant that the paper does not give.
    """

    where: str
    terms: tuple[Term, ...]
    total: float | None


@dataclass(frozen=True)
class Statement:
    """A theorem or corollary.

    Attributes:
        name: ``"theorem 5.1"``.
        about: what it is about.
        limit: the largest step size for which it is stated; ``None`` for any.
        allowed: whether the constants' step size is within the limit.
        stated: the bound, as stated in the paper.
        derived: how the appendix has it instead, or what the statement lacks.
        complexity: what is said of reaching ε, without the constants that the paper leaves out.
        rounds: R from which the stated bound is below ε at this step size; ``None``: never, or not known.
        slips: what is known to be wrong with it.
    """

    name: str
    about: str
    limit: Term | None
    allowed: bool
    stated: Bound
    derived: Bound | None
    complexity: tuple[Term, ...]
    rounds: int | None
    slips: tuple[Slip, ...]


def statements(constants: Constants) -> tuple[Statement, ...]:
    """Theorems 5.1, 5.4, 5.5 and 6.1, and corollary 5.2.

    Nothing promises that a run obeys these bounds: see :data:`SLIPS`.

    >>> [one.name for one in statements(Constants())]
    ['theorem 5.1', 'corollary 5.2', 'theorem 5.4', 'theorem 5.5', 'theorem 6.1']
    """
    return tuple(_statements(constants))


def _statements(c: Constants) -> Iterator[Statement]:
    e, l, eta, n, s = c.local_steps, c.l, c.lr, c.clients, c.cohort  # noqa: E741 - the paper's letters
    noise, diversity = c.noise, c.diversity
    start = Term("2(ℒ(θ⁰) − ℒ*)/(ηER)", 2 * c.gap / (eta * e * c.rounds))
    lowest, squared = Term("2κ²", 2 * diversity), Term("4L²η²E²ζ_g²", 4 * (l * eta * e) ** 2 * noise)

    rate = min(
        1 / (l * e),
        _ratio(c.epsilon * s, l * noise),
        _ratio(math.sqrt(c.epsilon), l * e * math.sqrt(diversity + e * noise / s)),
    )
    rounds = c.gap / (rate * e * c.epsilon)
    yield _statement(
        c,
        "theorem 5.1",
        "FedDPO, partial participation",
        Term("min{1/(8LE), S/(16LNE)}", min(1 / (8 * l * e), s / (16 * l * n * e))),
        _bound(
            "eq. 9, as stated in the paper",
            start,
            Term("8Lηζ_g²/S", 8 * l * eta * noise / s),
            Term("16L²η²Eκ²", 16 * (l * eta) ** 2 * e * diversity),
            Term("16L²η²E²ζ_g²/S", 16 * (l * eta * e) ** 2 * noise / s),
        ),
        _bound(
            "eq. 71, where its proof ends",
            start,
            lowest,
            squared,
            Term("2Lηζ_g²/S", 2 * l * eta * noise / s),
        ),
        (
            Term("η = Θ(min{1/(LE), εS/(Lζ_g²), √ε/(LE√(κ² + Eζ_g²/S))})", rate),
            Term("R = O((ℒ(θ⁰) − ℒ*)/(ηEε)) at that η", rounds),
            Term("gradients of all clients, RSE", rounds * s * e),
        ),
    )
    yield _statement(
        c,
        "corollary 5.2",
        "FedDPO, full participation",
        Term("1/(8LE)", 1 / (8 * l * e)),
        _bound(
            "eq. 10, as stated in the paper",
            start,
            Term("2Lηζ_g²/N", 2 * l * eta * noise / n),
            Term("8L²η²Eκ²", 8 * (l * eta) ** 2 * e * diversity),
        ),
        _bound(
            "eq. 73, where its proof ends",
            start,
            lowest,
            squared,
            Term("2Lηζ_g²/N", 2 * l * eta * noise / n),
        ),
        (
            Term("R = O(1/ε²) with η = Θ(1/√R)", c.epsilon**-2),
            Term("local steps of a client, RE = O(E/ε²)", e * c.epsilon**-2),
        ),
    )
    yield _statement(
        c,
        "theorem 5.4",
        "FedDPO with staleness",
        Term(
            "min{1/(16LE), S/(32LNE(1 + q_max))}",
            min(1 / (16 * l * e), s / (32 * l * n * e * (1 + c.max_delay))),
        ),
        Bound(
            "as stated in the paper; all but the first term up to a constant",
            (
                start,
                Term("O(ηζ_g²)", eta * noise),
                Term("O(ηEκ²/S)", eta * e * diversity / s),
                Term("O(ηC_q q_max), C_q = cη²E(ζ_g² + κ²)", eta * c.c_q * c.max_delay),
            ),
            None,
        ),
        None,
        (Term("R: as of theorem 5.1 with η = Θ(1/√R), O(1/ε²)", c.epsilon**-2),),
    )
    yield _statement(
        c,
        "theorem 5.5",
        "lower bound for FedDPO, one or the other up to a constant",
        None,
        Bound(
            "as stated in the paper",
            (
                Term("Ω(Eκ²/S)", e * diversity / s),
                Term("Ω(ζ_g/√(SR))", math.sqrt(noise / (s * c.rounds))),
            ),
            None,
        ),
        Bound(
            "in its proof",
            (
                Term("Ω(E²κ²/S) for constant η", e**2 * diversity / s),
                Term("Ω(ζ_g²/√(SR))", noise / math.sqrt(s * c.rounds)),
            ),
            None,
        ),
        (),
    )
    apart = 1 - c.rho**2
    mixed = (
        Term("2(ℒ(θ̄⁰) − ℒ*)/(ηR)", 2 * c.gap / (eta * c.rounds)),
        Term("32L²η²ζ_g²/(1 − ρ²)", 32 * (l * eta) ** 2 * noise / apart),
        Term("16L²η²κ²/(1 − ρ²)", 16 * (l * eta) ** 2 * diversity / apart),
    )
    yield _statement(
        c,
        "theorem 6.1",
        "DecDPO, at the mean of the nodes",
        Term("√(1 − ρ²)/(4L)", math.sqrt(apart) / (4 * l)),
        _bound("eq. 12, as stated in the paper", *mixed),
        _bound("with the term that it lacks", *mixed, Term("Lηζ_g²/N", l * eta * noise / n)),
        (
            Term("O(1/√R + 1/(R(1 − ρ²))) with η = Θ(1/√R)", c.rounds**-0.5 + 1 / (c.rounds * apart)),
            Term("R = O(1/ε²)", c.epsilon**-2),
        ),
    )


def _ratio(above: float, below: float) -> float:
    return above / below if below else math.inf


def _bound(where: str, *terms: Term) -> Bound:
    return Bound(where, terms, sum(term.value for term in terms))


def _statement(
    c: Constants,
    name: str,
    about: str,
    limit: Term | None,
    stated: Bound,
    derived: Bound | None,
    complexity: tuple[Term, ...],
) -> Statement:
    rounds = None
    if stated.total is not None:
        first, *others = stated.terms
        # The first term falls like 1/R, and the others are what more rounds do not change.
        room = c.epsilon - sum(term.value for term in others)
        rounds = max(1, math.ceil(first.value * c.rounds / room)) if room > 0 else None
    slips = tuple(slip for slip in SLIPS if name in slip.concerns)
    allowed = limit is None or c.lr <= limit.value
    return Statement(name, about, limit, allowed, stated, derived, complexity, rounds, slips)
