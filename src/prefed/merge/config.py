"""The ``[merge]`` table: how a server turns uploads into its next model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from prefed.core.strict_settings import StrictModel

LoraRule = Literal["fedit", "ffa", "rolora", "fedsa", "fedex", "flexlora"]
"""How the two factors of a LoRA merge."""


CENTERS = ("median", "trimmed_mean")
"""Merge rules that replace the mean."""

UNWEIGHTED = (*CENTERS, "krum")
"""Merge rules that give no upload a weight."""


class ServerOptimizer(StrictModel):
    """The server's optimiser on the pseudo-gradient: the merged model minus the current one.

    >>> ServerOptimizer(name="fedadam").rate, ServerOptimizer(name="fedavgm").rate
    (0.01, 1.0)
    """

    name: Literal["none", "fedavgm", "fedadam", "fedyogi", "fedadagrad"] = Field(
        "none", description="none takes the merged model as it is"
    )
    lr: float | None = Field(
        None, gt=0, description="server learning rate; left out, 1 for fedavgm and 0.01 for the adaptive ones"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of fedavgm, beta1 of the adaptive ones")
    beta2: float = Field(0.99, ge=0, lt=1, description="decay of fedadam's and fedyogi's second moment")
    tau: float = Field(1e-3, gt=0, description="degree of adaptivity; the smallest divisor of a step")

    @property
    def rate(self) -> float:
        """The learning rate in force."""
        if self.lr is not None:
            return self.lr
        return 1.0 if self.name in ("none", "fedavgm") else 0.01


class Staleness(StrictModel):
    """How an upload that started from an older model counts: by (1 + rounds late)^−exponent.

    >>> Staleness(name="polynomial", exponent=1).discount(3)
    0.25
    """

    name: Literal["none", "polynomial"] = Field("none", description="none counts late uploads in full")
    exponent: float = Field(0.5, ge=0, description="exponent of the polynomial discount")

    def discount(self, late: int) -> float:
        """The factor on the weight of an upload that is ``late`` rounds old (FedAsync, arXiv:1903.03934)."""
        return 1.0 if self.name == "none" else float((1 + late) ** -self.exponent)


class MergeConfig(StrictModel):
    """How uploads merge.

    Raises:
        ValueError: two of the rules cannot serve together; the error says why.
    """

    rule: Literal["mean", "median", "trimmed_mean", "krum", "multi_krum", "norm_clip"] = Field(
        "mean",
        description="mean, or a rule that tolerates clients who send nonsense; median and trimmed_mean "
        "work number by number, krum takes one upload whole, multi_krum the mean of the most central, "
        "norm_clip the mean after bounding each update's length",
    )
    trim: float = Field(
        0.1, gt=0, lt=0.5, description="share of uploads that trimmed_mean drops at either end, rounded up"
    )
    liars: int = Field(1, ge=0, description="bad uploads that median, krum and multi_krum must withstand")
    max_norm: float | None = Field(
        None, gt=0, description="norm_clip's bound; left out, the median length of the round's updates"
    )
    max_ratio: float = Field(
        1e4,
        ge=0,
        description="under every rule, an upload is dropped if its update is more than so many times as long "
        "as the median of its round's, and longer than the server's model itself; 0: never",
    )
    weights: Literal["samples", "uniform", "mass"] = Field(
        "samples",
        description="of a client in the mean: its number of training pairs; all alike; or its share of all "
        "clients' pairs, the current model keeping the share of those who did not reply",
    )
    lora: LoraRule = Field(
        "fedit",
        description="fedit averages A and B apart; ffa freezes A; rolora trains B and A in turn; fedsa keeps "
        "B on the client; fedex puts what averaging loses into the base; flexlora splits the mean product",
    )
    optimizer: ServerOptimizer = Field(
        default_factory=ServerOptimizer, description="server optimiser on the merged model"
    )
    staleness: Staleness = Field(default_factory=Staleness, description="discount on late uploads")
    late: Literal["model", "delta"] | None = Field(
        None,
        description="how a late upload counts: model, as the model that it is; delta, as the step that its "
        "client took, made from the newest model and shortened by the discount; left out: delta for a "
        "buffered server, else model",
    )

    @model_validator(mode="after")
    def _coherent(self) -> MergeConfig:
        if self.rule in UNWEIGHTED and self.staleness.name != "none":
            raise ValueError(
                f"rule {self.rule!r} gives no upload a weight that staleness could discount; "
                "use mean, multi_krum or norm_clip"
            )
        if self.weights == "mass" and self.rule not in ("mean", "norm_clip"):
            raise ValueError(
                f"weights 'mass' moves the model by each client's share of the data, and rule {self.rule!r} "
                "drops clients or their weights; use mean or norm_clip"
            )
        if self.lora in ("fedex", "flexlora"):
            if self.rule in CENTERS:
                raise ValueError(
                    f"lora {self.lora!r} needs the mean of the clients' products BA, and rule {self.rule!r} "
                    "mixes clients number by number, so no such mean exists; use mean, krum, multi_krum or "
                    "norm_clip"
                )
            if self.optimizer.name != "none":
                raise ValueError(
                    f"lora {self.lora!r} makes the server's product the mean of the clients' products, which "
                    f"a step of {self.optimizer.name!r} on the factors would undo; use optimizer 'none'"
                )
        return self
