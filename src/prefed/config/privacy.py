"""What ``kind`` of ``[privacy]`` goes together with; where noise could not hide a client a run is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prefed.engines.fleet import FleetConfig
from prefed.merge import MergeConfig
from prefed.merge.graphs import GraphConfig
from prefed.methods import TrainingSettings

if TYPE_CHECKING:
    from prefed.config.experiment import Experiment

_NEVER = {
    "centralized": "it puts everybody's pairs in one place, and there is no client to hide",
    "local": "its clients send no tensor, and with a kind no loss: there is nothing to hide",
    "fedbiscuit": "it groups clients by the losses that each tells, and no noise is put on these",
}
"""Method → why it has no differential privacy."""
_SINGLE = {
    "fedamp": "its server keeps each client's model and mixes them for each client anew",
    "fedvpl": "its server keeps each client's posterior",
    "fedvpa": "its server keeps each client's posterior, and sends it to the others",
    "fedbiscuit": "its server groups clients by their losses, and has a model for each group",
}
"""Method → why its server cannot do with the mean of all uploads."""


def check_privacy(experiment: Experiment) -> None:
    """See that everything that leaves a client is covered by the noise, or is not sent.

    Raises:
        ValueError: it is not; the message says what does not go together.
    """
    kind, method = experiment.privacy.kind, experiment.method
    fleet, graph = experiment.fleet, experiment.whole_graph
    if kind is None:
        return
    problems = [*_of_any(experiment)]
    if kind == "central":
        single = needs_single_uploads(method.name, method.settings, experiment.merge, fleet, graph)
        problems += [f"{problem}, or take kind 'local'" for problem in single]
    if problems:
        raise ValueError(f"[privacy] kind = {kind!r}: {problems[0]}")


def _of_any(experiment: Experiment) -> Iterator[str]:
    name, merge = experiment.method.name, experiment.merge
    if name in _NEVER:
        yield f"{name} cannot be covered: {_NEVER[name]}"
    if merge.weights != "uniform" and experiment.whole_graph is None:
        yield (
            f"[merge] weights = {merge.weights!r} goes by clients' numbers of pairs, which are not sent then "
            "and give a client more than its share: set 'uniform'"
        )
    if experiment.method.settings.schedule == "plateau":
        yield "schedule 'plateau' follows clients' losses, which are not sent then: take another schedule"
    if experiment.evaluate.diagnose is not None:
        yield "[evaluate] diagnose has clients send gradients without noise: leave it out"
    if experiment.stop is not None:
        yield (
            "[stop] chooses a round by clients' validation metrics, which have no noise: leave it out, and "
            "set the number of rounds beforehand"
        )


def needs_single_uploads(
    name: str,
    settings: TrainingSettings,
    merge: MergeConfig,
    fleet: FleetConfig | None = None,
    graph: GraphConfig | None = None,
) -> Iterator[str]:
    """Why a server that knows the mean of a round's uploads alone cannot do its work; nothing if it can.

    It is what noise on a mean, and secure aggregation, have in common.

    >>> from prefed.methods import METHODS
    >>> [*needs_single_uploads("feddpo", METHODS["feddpo"].Settings(), MergeConfig())]
    []
    >>> len([*needs_single_uploads("fedamp", METHODS["fedamp"].Settings(), MergeConfig(rule="krum"))])
    2
    """
    if graph is not None:
        yield "without a server nobody has the mean of all uploads"
    if fleet is not None:
        yield "[fleet] lets one client upload twice in a round, or late, from another model: leave it out"
    if name in _SINGLE:
        yield f"{_SINGLE[name]}, and there is the mean of all alone"
    if merge.rule != "mean":
        yield f"[merge] rule = {merge.rule!r} chooses among single uploads: leave rule 'mean'"
    if merge.lora in ("fedex", "flexlora"):
        yield (
            f"[merge] lora = {merge.lora!r} needs the products of each client's factors, and there is the "
            "mean of the factors: take another"
        )
    if getattr(settings, "alignment", "off") != "off":
        yield "alignment weighs each upload by its angle to the others: set it to 'off'"
