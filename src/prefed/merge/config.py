"""The tables ``[merge]`` and ``[graph]``: how a server merges uploads, and how clients mix without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from prefed.core import Tensors
from prefed.core.plugins import OWN, Registry, is_code
from prefed.core.strict_settings import StrictModel

LoraRule = Literal["fedit", "ffa", "rolora", "fedsa", "fedex", "flexlora", "flora"]
"""How to merge the two factors of a LoRA."""
PRODUCT_RULES: frozenset[LoraRule] = frozenset({"fedex", "flexlora", "flora"})
"""The rules that merge the products B A, so they need each client's factors."""
NEW_A_RULES: frozenset[LoraRule] = frozenset({"flexlora", "flora"})
"""The rules after which a LoRA has another A: singular vectors, or a new draw."""


@dataclass(frozen=True)
class MergeRule:
    """A merge rule.

    Attributes:
        function: ``(values, weights, **settings)`` → the merged tensors. There is one value and one weight
            for each client, in the order of their ids; the weights sum to 1. ``None`` for a rule of
            :mod:`prefed.merge.rules`.
        defaults: setting → default, for ``function``; they are set in ``[merge] rule_settings``.
        least: the fewest uploads that the rule can merge.
        replaces_mean: the rule replaces the mean, instead of selecting its terms.
        weighted: the rule uses the weights.
    """

    function: Callable[..., Tensors] | None = None
    defaults: Mapping[str, float] = field(default_factory=dict)
    least: int = 0
    replaces_mean: bool = True
    weighted: bool = True


MERGE_RULES = Registry(
    "merge_rules",
    {
        "mean": MergeRule(replaces_mean=False),
        "median": MergeRule(weighted=False),
        "trimmed_mean": MergeRule(weighted=False),
        "krum": MergeRule(replaces_mean=False, weighted=False),
        "multi_krum": MergeRule(replaces_mean=False),
        "norm_clip": MergeRule(replaces_mean=False),
    },
    "MERGE_RULE",
    MergeRule,
)
"""Name → merge rule."""


class ServerOptimizer(StrictModel):
    """The server optimiser on the pseudo-gradient, the merged minus the current model.

    >>> ServerOptimizer(name="fedadam").rate, ServerOptimizer(name="fedavgm").rate
    (0.01, 1.0)
    """

    name: Literal["none", "fedavgm", "fedadam", "fedyogi", "fedadagrad"] = Field(
        "none", description="none uses the merged model unchanged"
    )
    lr: float | None = Field(
        None, gt=0, description="server learning rate; default: 1 for fedavgm, 0.01 for adaptive optimisers"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of fedavgm, beta1 of adaptive optimisers")
    beta2: float = Field(0.99, ge=0, lt=1, description="decay of the second moment of fedadam and fedyogi")
    tau: float = Field(1e-3, gt=0, description="degree of adaptivity: the smallest divisor of a step")

    @property
    def rate(self) -> float:
        """``lr`` or its default."""
        if self.lr is not None:
            return self.lr
        return 1.0 if self.name in ("none", "fedavgm") else 0.01


class Staleness(StrictModel):
    """Discount (1 + rounds late)^−exponent on uploads that started from an older model.

    >>> Staleness(name="polynomial", exponent=1).discount(3)
    0.25
    """

    name: Literal["none", "polynomial"] = Field("none", description="none counts late uploads in full")
    exponent: float = Field(0.5, ge=0, description="exponent of the polynomial discount")

    def discount(self, late: int) -> float:
        """Return the factor on the weight of an upload ``late`` rounds late (FedAsync, arXiv:1903.03934)."""
        return 1.0 if self.name == "none" else float((1 + late) ** -self.exponent)


class MergeConfig(StrictModel):
    """The ``[merge]`` table.

    Raises:
        ValueError: two settings cannot be combined.
    """

    rule: str = Field(
        "mean",
        description="mean, or a robust rule: median and trimmed_mean are coordinate-wise, krum selects one "
        "upload, multi_krum averages the most central uploads, norm_clip averages clipped updates",
    )
    rule_settings: dict[str, float] = Field({}, description="settings of a rule from outside prefed")
    trim: float = Field(
        0.1, gt=0, lt=0.5, description="share of uploads that trimmed_mean drops at each end, rounded up"
    )
    liars: int = Field(1, ge=0, description="bad uploads that median, krum and multi_krum must tolerate")
    max_norm: float | None = Field(
        None, gt=0, description="bound of norm_clip; default: median norm of the updates of the round"
    )
    max_ratio: float = Field(
        1e4,
        ge=0,
        description="refuse an update that is longer than the server's model and than this multiple of the "
        "median norm of the round, under every rule; 0: never",
    )
    weights: Literal["samples", "uniform", "mass", "qffl", "afl"] = Field(
        "samples",
        description="weight of a client in the mean: samples, its number of training pairs; uniform; mass, "
        "its share of the pairs of all clients, with the remaining weight on the current model; qffl and afl "
        "favour clients with a high training loss",
    )
    q: float = Field(
        1.0, ge=0, description="for qffl: a client's weight is its pairs times its loss to this power"
    )
    afl_lr: float = Field(0.1, gt=0, description="for afl: learning rate of the clients' weights")
    lora: LoraRule = Field(
        "fedit",
        description="fedit averages A and B separately; ffa freezes A; rolora alternates between B and A; "
        "fedsa keeps B on the client; fedex adds the error of averaging to the base; flexlora factors the "
        "mean product; flora stacks the factors, adds the mean product to the base and starts a new LoRA",
    )
    ranks: dict[str, Annotated[int, Field(ge=1)]] = Field(
        {},
        description="client → rank of its LoRA, if it is below that of [model.lora]; the server pads its "
        "uploads with zeros",
    )
    optimizer: ServerOptimizer = Field(
        ServerOptimizer(), description="server optimiser, applied to the merged model"
    )
    staleness: Staleness = Field(Staleness(), description="discount on late uploads")
    late: Literal["model", "delta"] | None = Field(
        None,
        description="how to merge a late upload: model, as a model; delta, as a step from the newest model, "
        "shortened by the discount; default: delta for a buffered server, else model",
    )

    @field_validator("rule")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in MERGE_RULES:
            known = ", ".join(map(repr, MERGE_RULES))
            raise ValueError(MERGE_RULES.hint(value) if is_code(value) else f"should be {known}; {OWN}")
        return value

    @property
    def by_loss(self) -> bool:
        """Whether the weights depend on the clients' losses."""
        return self.weights in ("qffl", "afl")

    @property
    def counts_clients(self) -> bool:
        """Whether the weights in a round depend on clients that do not take part in it."""
        return self.weights in ("mass", "afl")

    @property
    def plain_weights(self) -> bool:
        """Whether the weights are the clients' numbers of pairs, or uniform."""
        return self.weights in ("samples", "uniform")

    def same_a(self, what: str, otherwise: str = "") -> None:
        """Check that the factors of one round are comparable to those of the next.

        Args:
            what: what a client keeps between rounds, e.g. the control variates of SCAFFOLD. The gradient of B
                depends on A, and that of A on B, so what is kept belongs to the factors at which it was
                computed.
            otherwise: what to change instead of ``lora``.

        Raises:
            ValueError: the LoRA rule replaces A.
        """
        if self.lora in NEW_A_RULES:
            raise ValueError(
                f"lora {self.lora!r} in [merge] replaces the LoRA's A in every round, so {what} of earlier "
                f"rounds would belong to other directions; use another lora{otherwise}"
            )

    @property
    def kind(self) -> MergeRule:
        """The merge rule."""
        return MERGE_RULES[self.rule]

    @model_validator(mode="after")
    def _coherent(self) -> MergeConfig:
        if unknown := sorted(self.rule_settings.keys() - self.kind.defaults.keys()):
            known = ", ".join(self.kind.defaults) or "none"
            raise ValueError(f"rule {self.rule!r} has no setting {unknown[0]!r}; it has: {known}")
        if self.max_norm is not None and self.rule != "norm_clip":
            raise ValueError(f"max_norm bounds updates only under rule 'norm_clip', not {self.rule!r}")
        if not self.kind.weighted and self.staleness.name != "none":
            raise ValueError(
                f"rule {self.rule!r} has no weights that staleness could discount; use rule mean, multi_krum "
                "or norm_clip"
            )
        if not self.plain_weights and self.rule not in ("mean", "norm_clip"):
            raise ValueError(
                f"weights {self.weights!r} cannot be combined with rule {self.rule!r}, which drops clients "
                "or weights; use rule mean or norm_clip"
            )
        if self.ranks and self.rule not in ("mean", "norm_clip"):
            raise ValueError(
                f"ranks cannot be combined with rule {self.rule!r}, which counts the zeros of the padding "
                "as values of clients; use rule mean or norm_clip"
            )
        if self.ranks and self.lora == "ffa":
            raise ValueError(
                "ranks cannot be combined with lora 'ffa', whose frozen A has the rank of the model; use "
                "another lora"
            )
        if self.lora in PRODUCT_RULES:
            if self.kind.replaces_mean:
                raise ValueError(
                    f"lora {self.lora!r} needs the mean of the products BA, which the coordinate-wise rule "
                    f"{self.rule!r} does not have; use rule mean, krum, multi_krum or norm_clip"
                )
            if self.optimizer.name != "none":
                raise ValueError(
                    f"lora {self.lora!r} cannot be combined with optimizer {self.optimizer.name!r}, which "
                    "would change the mean of the products BA; use optimizer 'none'"
                )
        return self


GraphName = Literal[
    "path",
    "ring",
    "star",
    "complete",
    "torus",
    "hypercube",
    "exponential",
    "erdos_renyi",
    "edges",
    "matrix",
]
WeightsName = Literal["metropolis", "max_degree"]


class GraphConfig(StrictModel):
    """Who exchanges models with whom where there is no server, and how much a neighbour's model counts.

    Raises:
        ValueError: two settings cannot be combined.
    """

    name: GraphName = Field(
        "ring",
        description="exponential connects i to i ± 1, 2, 4 … on a ring; erdos_renyi draws edges at random; "
        "edges reads edges from a file, matrix a mixing matrix",
    )
    probability: float | None = Field(
        None, gt=0, le=1, description="edge probability of an erdos_renyi graph"
    )
    file: str | None = Field(
        None,
        description="for edges: two clients per line; for matrix: rows of sorted clients as text, or .mtx",
    )
    weights: WeightsName = Field(
        "metropolis",
        description="weight of neighbour j at i: metropolis, 1/(1 + max(deg i, deg j)); max_degree, "
        "1/(1 + the largest degree)",
    )
    placement: Literal["sorted", "random"] = Field(
        "sorted",
        description="order of clients on the nodes: sorted by name (the first is a star's hub) or random",
    )
    changes: Literal["never", "redrawn", "matching"] = Field(
        "never",
        description="redrawn: a new erdos_renyi graph in each round; matching: a random matching of "
        "neighbours in each round",
    )
    order: Literal["train_mix", "mix_train"] = Field(
        "train_mix", description="order of training and mixing in a round"
    )
    edge_failure: float = Field(0.0, ge=0, lt=1, description="probability that an edge fails in a round")
    window: int = Field(
        10, ge=1, description="number of rounds in which a changing graph must connect all clients"
    )

    @property
    def varies(self) -> bool:
        """Whether the graph may differ between rounds."""
        return self.changes != "never" or self.edge_failure > 0

    @model_validator(mode="after")
    def _coherent(self) -> GraphConfig:
        if (self.name == "erdos_renyi") != (self.probability is not None):
            raise ValueError("set probability for graph 'erdos_renyi', and only for this graph")
        if (self.name in ("edges", "matrix")) != (self.file is not None):
            raise ValueError("set file for graphs 'edges' and 'matrix', and only for these")
        if self.changes == "redrawn" and self.name != "erdos_renyi":
            raise ValueError(
                f"graph {self.name!r} is not random and cannot be redrawn; use 'erdos_renyi', or changes "
                "'matching'"
            )
        if self.name == "matrix" and (self.changes == "matching" or "weights" in self.model_fields_set):
            raise ValueError("graph 'matrix' defines all weights; remove weights and changes")
        return self
