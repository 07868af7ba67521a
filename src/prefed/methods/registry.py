"""The methods by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from prefed.core import Layout, Method
    from prefed.merge import Aggregator
    from prefed.methods.base import TrainingSettings


@dataclass(frozen=True)
class MethodKind:
    """A method before it is given a model. Its module is imported when it is first needed.

    Attributes:
        name: as in ``[method] name``, and of the module in this folder.
        title: one line for lists.
        personal: with default settings and merge rules, each client ends with a model of its own.
        rounds: what ``prefed init`` writes as ``rounds``; ``None``: the default of an experiment.
        serverless: it runs on a graph of neighbours: with the default graph where ``[graph]`` is left out.
    """

    name: str
    title: str
    personal: bool = False
    rounds: int | None = None
    serverless: bool = False

    @property
    def _module(self) -> ModuleType:
        return import_module(f"prefed.methods.{self.name}")

    @property
    def source(self) -> str:
        """Paper and equation or algorithm."""
        return str(self._module.SOURCE)

    @property
    def Settings(self) -> type[TrainingSettings]:  # noqa: N802
        """The record of its settings; every field has a default and a description."""
        settings: type[TrainingSettings] = self._module.Settings
        return settings

    @property
    def reads(self) -> Literal["policy", "choice"]:
        """What its models give a pair; see :class:`~prefed.core.Method`."""
        return self.Settings.reads

    @property
    def needs(self) -> Callable[[Any], frozenset[str]]:
        """Settings → the parts that the model must have, e.g. ``{"lora"}``.

        A merge rule may need more: :func:`prefed.merge.lora.needs`.
        """
        needs: Callable[[Any], frozenset[str]] = self._module.needs
        return needs

    @property
    def build(self) -> Callable[[Any, Layout, Aggregator, int], Method]:
        """``(settings, layout, aggregator, rounds) -> Method``."""
        build: Callable[[Any, Layout, Aggregator, int], Method] = self._module.build
        return build


METHODS: Mapping[str, MethodKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            MethodKind("feddpo", "DPO with federated averaging"),
            MethodKind(
                "decdpo", "DPO without a server: each client mixes with its neighbours", serverless=True
            ),
            MethodKind("fedsft", "federated averaging of fine-tuning on the chosen responses"),
            MethodKind("fedprox", "FedDPO with clients held near the shared model"),
            MethodKind("scaffold", "FedDPO with control variates against client drift"),
            MethodKind("centralized", "DPO on everybody's pairs in one place (the oracle)"),
            MethodKind("local", "every client alone: nothing travels", personal=True),
            MethodKind("fedpdpo", "shared LoRA; personal bottleneck, head and reward head", personal=True),
            MethodKind("fedper", "LoRA shared in the first blocks, personal in the others", personal=True),
            MethodKind("fedrep", "shared LoRA and a personal head, trained in turn", personal=True),
            MethodKind("perfedavg", "a shared start that adapts in a few steps", personal=True),
            MethodKind("fedamp", "each client receives its own mixture of all models", personal=True),
            MethodKind("fedsdg", "a shared and a personal LoRA with a gate per block", personal=True),
            MethodKind("ditto", "FedDPO beside a model of one's own, held near it", personal=True),
            MethodKind("pfedme", "averaging over Moreau envelopes of the clients' losses", personal=True),
            MethodKind("fedala", "each client weighs what it takes over, layer by layer", personal=True),
            MethodKind("fedbn", "FedDPO with norms of one's own", personal=True),
            MethodKind("fedbis", "averaging of a selector, which judges pairs"),
            MethodKind("fedbiscuit", "a selector for each cluster of clients"),
            MethodKind("fedvpl", "a selector with a latent taste", personal=True, rounds=60),
            MethodKind(
                "fedvpa",
                "a selector whose clients learn from each other's tastes",
                personal=True,
                rounds=60,
            ),
        )
    }
)
"""Name → method, in the order in which ``prefed methods`` lists them."""
