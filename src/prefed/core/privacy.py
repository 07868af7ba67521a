"""The ``[privacy]`` table: data that must not leave a client, and noise added to the rest."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from prefed.core.strict_settings import StrictModel

_LEAST, _MOST = 1e-30, 1e30
"""Bounds on the noise. float32 covers 1e-38 to 3e38, and the sum over clients needs headroom."""


def check_noise(noise: float, product: str) -> None:
    """Check that float32 parameters can represent the noise.

    Args:
        noise: standard deviation.
        product: the settings that ``noise`` is the product of, for the error message.

    Raises:
        ValueError: the noise is too small or too large.
    """
    if not _LEAST <= noise <= _MOST:
        raise ValueError(
            f"{product} is {noise:g}; it must be between {_LEAST:g} and {_MOST:g}, because float32 "
            "parameters cannot represent other noise"
        )


class Privacy(StrictModel):
    """Which statistics of a single client may be sent or shown, and the noise that hides a client.

    A mean over few pairs reveals much about each of them.

    >>> four = Privacy(minimum_pairs=4)
    >>> four.may_report(4), four.may_report(3), Privacy().may_report(1)
    (True, False, True)
    >>> private = Privacy(kind="local", clip=0.5, noise_multiplier=2.0, delta=1e-5)
    >>> private.noise, private.federated().draws, private.draws
    (1.0, 'system', None)
    """

    minimum_pairs: int = Field(
        0,
        ge=0,
        description="clients with fewer training pairs send no loss, and clients evaluated on fewer pairs "
        "appear only in means; 0: no minimum, for simulations; 4 is reasonable if clients are people",
    )
    kind: Literal["central", "distributed", "local"] | None = Field(
        None,
        description="client-level differential privacy: central, the server adds noise to the sum of the "
        "updates of a round; distributed, each site adds a share of this noise, and the server learns only "
        "the sum; local, each client adds noise to its own upload; default: none",
    )
    clip: float | None = Field(
        None,
        gt=0,
        description="for kind: maximum Euclidean norm of an update, over all tensors; larger updates are "
        "scaled down; required for noise",
    )
    noise_multiplier: float | None = Field(
        None, ge=0, description="for kind: standard deviation of the Gaussian noise divided by clip"
    )
    delta: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="for kind: the delta at which epsilon is reported; far below 1 / clients",
    )
    colluders: int | None = Field(
        None,
        ge=0,
        description="for distributed: number of sites that may pass what they know to the hub; the noise of "
        "the others suffices without theirs; default: a third of the sites, rounded down",
    )
    sites: int | None = Field(
        None,
        ge=3,
        description="for distributed, in a simulation: number of sites that add noise; default: every client "
        "is a site. A federation has its own sites",
    )
    secret_cohorts: bool | None = Field(
        None,
        description="for central: recipients of a model learn neither the cohort of a round nor the seed, "
        "so sampling cohorts lowers epsilon; default: false",
    )
    draws: Literal["seed", "system"] | None = Field(
        None,
        description="for kind: source of the noise: seed, the run's seed, which makes a simulation "
        "reproducible; system, secure random numbers of the operating system; default: seed for simulated "
        "clients, system for real clients",
    )

    @model_validator(mode="after")
    def _whole(self) -> Privacy:
        names = ("clip", "noise_multiplier", "delta", "colluders", "sites", "secret_cohorts", "draws")
        if self.kind is None:
            given = [name for name in names if getattr(self, name) is not None]
            if given:
                kind = "'distributed'" if given[0] in ("colluders", "sites") else "'central' or 'local'"
                raise ValueError(f"{given[0]} requires kind = {kind}")
        elif self.noise_multiplier is None:
            raise ValueError(
                "kind requires noise_multiplier; `prefed privacy` computes it for an epsilon, 0 only clips"
            )
        elif self.noise_multiplier and (self.clip is None or self.delta is None):
            raise ValueError(f"noise_multiplier above 0 requires {'clip' if self.clip is None else 'delta'}")
        elif self.noise_multiplier:
            check_noise(self.noise, "clip * noise_multiplier")
        if self.secret_cohorts and self.kind in ("distributed", "local"):
            raise ValueError(
                f"secret_cohorts requires kind = 'central': with {self.kind!r} the server knows who sent "
                "each upload"
            )
        if self.kind == "distributed" and not self.noise_multiplier:
            raise ValueError(
                "kind = 'distributed' requires noise_multiplier above 0: without noise, two sums that differ "
                "by one site give its update away. To find a clip, use kind = 'central'"
            )
        if self.kind in ("central", "local") and (self.colluders is not None or self.sites is not None):
            raise ValueError(
                f"{'sites' if self.colluders is None else 'colluders'} requires kind = 'distributed'"
            )
        return self

    def may_report(self, pairs: float) -> bool:
        """Return whether a mean over ``pairs`` pairs of a single client may be sent or shown.

        All code that sends or shows such a mean calls this, on the client and on the server.
        """
        return pairs >= self.minimum_pairs

    def colluding(self, sites: int) -> int:
        """The number of sites that may collude with the server, of so many."""
        return sites // 3 if self.colluders is None else self.colluders

    @property
    def noise(self) -> float:
        """Standard deviation of the noise: on each number of an upload if local, else on their sum."""
        return (self.clip or 0.0) * (self.noise_multiplier or 0.0)

    def federated(self) -> Privacy:
        """Return these settings for a federation of real clients, with noise from the operating system.

        Raises:
            ValueError: ``draws = "seed"`` is set.
        """
        if self.draws == "seed":
            raise ValueError(
                "[privacy] draws = 'seed': all members of a federation know the seed and could remove the "
                "noise; remove draws"
            )
        return self if self.kind is None else self.model_copy(update={"draws": "system"})


NO_MINIMUM = Privacy()
"""Default of a simulation: no minimum and no noise."""
