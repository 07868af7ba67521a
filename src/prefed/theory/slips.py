"""Where the paper's statements, proofs and algorithms do not agree with one another, or do not hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slip:
    """A slip of arXiv:2605.20696, version 1.

    Attributes:
        where: the place in the paper.
        text: what is wrong there.
        concerns: names of the statements that rest on it; ``"the constants"`` for L and ζ_g².
    """

    where: str
    text: str
    concerns: tuple[str, ...] = ()


_CONSTANTS, _FEDERATED, _ALL = "the constants", ("theorem 5.1", "corollary 5.2"), "the algorithms"

SLIPS: tuple[Slip, ...] = (
    Slip(
        "eq. 6; algorithm 1, line 16; algorithm 2, line 7",
        "They print βσ(−ω)(ν(τ⁺) − ν(τ⁻)), along which the loss falls, and subtract it. The gradient is its "
        "negative.",
        (_ALL,),
    ),
    Slip(
        "algorithm 1, line 15; algorithm 2, line 6",
        "β stands at the policy's term alone. In eq. 2 it is before the difference from the reference.",
        (_ALL,),
    ),
    Slip("algorithm 2, line 8", "The sum over neighbours j has θ_i in it. It is θ_j.", (_ALL,)),
    Slip(
        "remark 3.2",
        "The offset stands outside the logarithm, where it has no gradient. ODPO's offset is inside.",
        (_ALL,),
    ),
    Slip("table 1", "The maximum length is printed as 5. The code has 64.", (_ALL,)),
    Slip(
        "eq. 17",
        "It bounds ‖v‖² of every pair by a bound on its mean. L then bounds the Hessian for every pair only "
        "with C_mix = H and ζ_φ² above every squared score. With features that agree over all steps the norm "
        "is β H / (β C_mix + 2) times L: 1.67 L at β = 1, H = 5, C_mix = 1.",
        (_CONSTANTS,),
    ),
    Slip(
        "eq. 55",
        "The noise term loses L² and one E of three. Eq. 71 regains E².",
        _FEDERATED,
    ),
    Slip(
        "eq. 62",
        "It adds squares of S · E gradients as if their means were 0. For gradients with a mean the factor "
        "S · E is missing.",
        _FEDERATED,
    ),
    Slip(
        "eq. 71 and the step to eq. 9",
        "The proof ends with a term 2κ² that no step size makes small. Eq. 9 has 16 L²η²Eκ² in its place, "
        "said to follow for small η. But for small η that is far below 2κ².",
        _FEDERATED,
    ),
    Slip(
        "corollary 5.2",
        "Its drift term grows like E. For some quadratics the drift grows like E² and exceeds the bound.",
        ("corollary 5.2",),
    ),
    Slip(
        "corollary 5.2 and eq. 73",
        "The proof has a term 4 L²η²E²ζ_g², and the corollary none. The left side of eq. 73 prints the "
        "squared step in the place of the squared gradient.",
        ("corollary 5.2",),
    ),
    Slip(
        "assumption 5.3 and eq. 76",
        "The assumption bounds the mean norm of the drift, and the proof uses its square, citing assumption "
        "4.1.",
        ("theorem 5.4",),
    ),
    Slip(
        "section 7 and appendix F",
        "They cite theorem 5.5 for the penalty of staleness. It is theorem 5.4.",
        ("theorem 5.4",),
    ),
    Slip(
        "theorem 5.5 and corollary 5.2",
        "At E = 1 and S = N the upper bound goes to 0 with η → 0 and many rounds, and the lower bound κ²/N "
        "stays. Both cannot hold.",
        ("theorem 5.5", "corollary 5.2"),
    ),
    Slip(
        "theorem 5.5 and its proof",
        "The theorem has ζ_g/√(SR), the end of its proof ζ_g²/√(SR). The proof's κ² is a mean of norms "
        "without the square.",
        ("theorem 5.5",),
    ),
    Slip(
        "lemma D.2",
        "The proof derives 2ρ², and eq. 82 states ρ². With 2ρ² the recursion of theorem 6.1 contracts for "
        "ρ < 0.7071 alone, so for neither the path nor the star of five.",
        ("theorem 6.1",),
    ),
    Slip(
        "theorem 6.1 and eq. 90",
        "The mean of noisy gradients is treated as the mean of exact ones. A term Lηζ_g²/N is missing.",
        ("theorem 6.1",),
    ),
    Slip(
        "theorem 6.1 and section 7",
        "The theorem is about one local step after each mix. The experiments take five, then mix.",
        ("theorem 6.1",),
    ),
    Slip(
        "table 2",
        "For the star it prints ρ = 0.45, which comes of no rule. It is 0.8; the table has 0.80 as 1 − ρ².",
        ("theorem 6.1",),
    ),
)
