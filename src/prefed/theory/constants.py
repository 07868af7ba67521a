"""The constants of the theory, given or by the paper's closed forms."""

from __future__ import annotations

import math

from pydantic import Field, model_validator

from prefed.core.strict import StrictModel


class Constants(StrictModel):
    """What the statements are about. Defaults are those of the paper's table 1 where it has them.

    >>> constants = Constants(beta=0.1, horizon=10)
    >>> round(constants.l, 6), round(constants.noise, 6)
    (2.1, 0.4)

    Raises:
        ValueError: the cohort has more clients than there are.
    """

    beta: float = Field(0.2, gt=0, description="inverse temperature of DPO")
    horizon: int = Field(64, ge=1, description="H, steps of a trajectory: tokens of a response")
    zeta_phi2: float = Field(1.0, gt=0, description="ζ_φ², bound on the squared score of a step")
    c0: float = Field(1.0, ge=1, description="C₀ of the mixing of trajectories")
    varsigma: float = Field(
        0.0, ge=0, lt=1, description="ς, its rate: steps that lie k apart have ς^k in common"
    )
    smoothness: float | None = Field(None, gt=0, description="L; left out: its closed form")
    zeta_g2: float | None = Field(
        None, ge=0, description="ζ_g², variance of a client's gradient; left out: its closed form"
    )
    kappa2: float | None = Field(
        None,
        ge=0,
        description="κ², gradient diversity of clients; left out: ζ_g²'s closed form, which bounds it",
    )
    gap: float = Field(
        math.log(2), ge=0, description="ℒ(θ⁰) − ℒ*; DPO starts at log 2, and no loss is below 0"
    )
    clients: int = Field(5, ge=1, description="N")
    cohort: int = Field(3, ge=1, description="S, clients of a round")
    local_steps: int = Field(3, ge=1, description="E, local steps of a round")
    rounds: int = Field(80, ge=1, description="R")
    lr: float = Field(1e-4, gt=0, description="η, learning rate of plain gradient descent")
    max_delay: int = Field(0, ge=0, description="q_max, rounds by which a client's model may be late")
    drift: float = Field(1.0, gt=0, description="c of C_q, an absolute constant that the paper does not give")
    rho: float = Field(0.5393, ge=0, lt=1, description="ρ of the mixing matrix; that of a ring of five")
    epsilon: float = Field(0.1, gt=0, description="ε, mean squared gradient norm to be reached")

    @model_validator(mode="after")
    def _coherent(self) -> Constants:
        if self.cohort > self.clients:
            raise ValueError(f"a cohort of {self.cohort} cannot be had of {self.clients} clients")
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
        """4 β² C_mix ζ_φ² H, which bounds the squared gradient of a pair in the mean (section 4)."""
        return 4 * self.beta**2 * self.c_mix * self.zeta_phi2 * self.horizon

    @property
    def noise(self) -> float:
        """ζ_g², or :attr:`second_moment`."""
        return self.second_moment if self.zeta_g2 is None else self.zeta_g2

    @property
    def diversity(self) -> float:
        """κ², or :attr:`second_moment`: no client's mean gradient is longer."""
        return self.second_moment if self.kappa2 is None else self.kappa2

    @property
    def c_q(self) -> float:
        """C_q = c η² E (ζ_g² + κ²), the drift of a round (eq. 77)."""
        return self.drift * self.lr**2 * self.local_steps * (self.noise + self.diversity)

    @property
    def aligned_norm(self) -> float:
        """The Hessian's norm over the closed form of L, where all steps pull one way.

        With two actions of features ±a in every step, ζ_φ² = a², and a pair that differs in every step, the
        norm at equal probabilities is β² a² H². It is above L for β H > β C_mix + 2, though the scores of
        different steps have no correlation under the policy.

        >>> round(Constants(beta=1, horizon=5).aligned_norm, 2)
        1.67
        """
        return self.beta * self.horizon / (self.beta * self.c_mix + 2)

    def derived(self) -> dict[str, float]:
        """What follows from the constants alone: name → value."""
        return {
            "C_mix": self.c_mix,
            "L": self.l,
            "ζ_g²": self.noise,
            "κ²": self.diversity,
            "C_q": self.c_q,
            "‖∇²ℓ‖ over closed form of L, all steps aligned": self.aligned_norm,
        }
