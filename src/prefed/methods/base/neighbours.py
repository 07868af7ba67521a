"""A method without a server: its clients mix their models with their neighbours'."""

from __future__ import annotations

from dataclasses import replace

from prefed.core import Method
from prefed.merge import MergeConfig
from prefed.methods.base.settings import TrainingSettings


def to_neighbours(method: Method, settings: TrainingSettings, merge: MergeConfig) -> Method:
    """``method`` with each client as a server of its own, whose next state is a mix of models.

    A visit stays what it is: the client starts from its own model in the place of the server's, and keeps
    what is personal. So any method can do without its server if all that its server does is to send a model
    and to average models (Distributed DPO, arXiv:2605.20696, algorithm 2, does so with FedDPO).

    Args:
        settings: of the method.
        merge: the ``[merge]`` table that the method was built with.

    Raises:
        ValueError: the method's server, or the table, does more than that.
    """
    (train, *others) = method.exchanges
    if others or method.pooled or train.to != "cohort" or train.late == "refused":
        raise ValueError(
            f"{method.name}, with its settings and those of [merge], has a server that does more than "
            "average models, so its clients cannot do without: leave out [graph], or take another method"
        )
    if merge.rule != "mean" or merge.optimizer.name != "none" or merge.weights == "mass":
        raise ValueError(
            "[graph]: clients mix their models by the weights of the graph: leave rule 'mean', weights "
            "'samples' or 'uniform', and optimizer 'none' in [merge]"
        )
    if settings.schedule == "plateau":
        raise ValueError(
            "[graph]: schedule 'plateau' follows the mean of all clients' losses, and without a server "
            "nobody has it: use 'constant' or 'cosine'"
        )
    alone = replace(train, to="neighbours", late="refused", max_ratio=merge.max_ratio)
    return replace(method, exchanges=(alone,))
