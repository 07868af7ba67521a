"""The ``[privacy]`` table: what must not leave a client, whatever the method, and the noise on the rest."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from prefed.core.strict_settings import StrictModel

_LEAST, _MOST = 1e-30, 1e30
"""Bounds of the noise: float32 holds numbers from 1e-38 to 3e38, and a sum of clients' needs room."""


def check_noise(noise: float, product: str) -> None:
    """Refuse noise that the numbers of a model cannot hold.

    Args:
        noise: standard deviation.
        product: the settings whose product it is, for the error.

    Raises:
        ValueError: they cannot.
    """
    if not _LEAST <= noise <= _MOST:
        raise ValueError(
            f"{product} is {noise:g}: outside {_LEAST:g} to {_MOST:g} a model's numbers cannot represent "
            "such noise, so nothing would be protected"
        )


class Privacy(StrictModel):
    """Which figures of one client may be sent or shown, and what hides one client among all.

    A mean over few pairs reveals much about each of them; over one pair it is that pair's figure.

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
        description="a client with fewer training pairs sends no loss, and one evaluated on fewer pairs "
        "appears "
        "only in means; 0: no bound, for simulations; 4 is a reasonable start where clients are people",
    )
    kind: Literal["central", "local"] | None = Field(
        None,
        description="differential privacy of clients: central, the server adds noise to the sum of a round's "
        "updates; local, each client adds it to its own upload; default: none",
    )
    clip: float | None = Field(
        None,
        gt=0,
        description="for kind: bound on the Euclidean norm of an upload's update, over all tensors; a "
        "larger one is scaled down to it; default: none, for which no noise suffices",
    )
    noise_multiplier: float | None = Field(
        None, ge=0, description="for kind: standard deviation of the Gaussian noise, over clip"
    )
    delta: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="for kind: the delta at which epsilon is reported; far below 1 / clients",
    )
    secret_cohorts: bool | None = Field(
        None,
        description="for central: no recipient of a model learns who took part in a round, or the seed, "
        "so that sampling cohorts lowers epsilon; default: false",
    )
    draws: Literal["seed", "system"] | None = Field(
        None,
        description="for kind: source of the noise: seed, the run's seed, which makes a simulation "
        "repeatable; "
        "system, the operating system's secure random numbers; default: seed if all clients are "
        "simulated, system if they are real",
    )

    @model_validator(mode="after")
    def _whole(self) -> Privacy:
        names = ("clip", "noise_multiplier", "delta", "secret_cohorts", "draws")
        if self.kind is None:
            given = [name for name in names if getattr(self, name) is not None]
            if given:
                raise ValueError(f"{given[0]} applies only with kind 'central' or 'local': set kind")
        elif self.noise_multiplier is None:
            raise ValueError(
                "kind needs noise_multiplier; `prefed privacy` computes it for an epsilon, 0 only clips"
            )
        elif self.noise_multiplier and (self.clip is None or self.delta is None):
            missing = "clip, the bound on what noise hides" if self.clip is None else "delta"
            raise ValueError(f"noise needs {missing}")
        elif self.noise_multiplier:
            check_noise(self.noise, "clip times noise_multiplier")
        if self.secret_cohorts and self.kind == "local":
            raise ValueError(
                "secret_cohorts: with kind 'local' the server knows the sender of each upload: remove it"
            )
        return self

    def may_report(self, pairs: float) -> bool:
        """Whether a mean over so many pairs of one client may be sent or shown for that client.

        All code that sends or shows such a mean asks this, at the client and at the server.
        """
        return pairs >= self.minimum_pairs

    @property
    def noise(self) -> float:
        """Standard deviation of the noise: on each number of an upload if local, of their sum if central."""
        return (self.clip or 0.0) * (self.noise_multiplier or 0.0)

    def federated(self) -> Privacy:
        """This table where clients are real: noise is the operating system's.

        Raises:
            ValueError: the table says ``draws = "seed"``.
        """
        if self.draws == "seed":
            raise ValueError(
                "[privacy] draws = 'seed': whoever knows the run's seed can remove the noise, and in a "
                "federation everyone knows it: remove draws"
            )
        return self if self.kind is None else self.model_copy(update={"draws": "system"})


NO_MINIMUM = Privacy()
"""No bound: the default of a simulation."""
