"""Settings of a method that stand for a key of another table, so that the method reads like its paper."""

from __future__ import annotations

from typing import Any

from prefed.core.strict import StrictModel
from prefed.engines.fleet import FleetConfig
from prefed.merge.graphs import GraphConfig
from prefed.methods import TrainingSettings


def fleet_of(settings: TrainingSettings, fleet: FleetConfig | None) -> FleetConfig | None:
    """The fleet of an experiment: ``[fleet]``, with ``max_staleness`` of its method as ``max_delay``.

    Raises:
        ValueError: the two do not go together.

    >>> from prefed.methods import METHODS
    >>> fleet_of(METHODS["feddpo"].Settings(max_staleness=2), None).max_delay
    2
    """
    delay = getattr(settings, "max_staleness", None)
    if delay is None:
        return fleet
    made: FleetConfig = _with(fleet or FleetConfig(), "fleet", max_delay=("max_staleness", delay))
    return made


def graph_of(settings: TrainingSettings, graph: GraphConfig | None) -> GraphConfig | None:
    """The graph of an experiment: ``[graph]``, with ``topology`` and ``mixing`` of DecDPO as its ``name`` and
    ``weights``; ``None`` where there is a server.

    Raises:
        ValueError: they do not go together.

    >>> from prefed.methods import METHODS
    >>> graph_of(METHODS["decdpo"].Settings(topology="star"), GraphConfig(placement="random")).name
    'star'
    """
    names = {"topology": "name", "mixing": "weights"}
    if not names.keys() <= type(settings).model_fields.keys():
        return graph
    given = {key: (name, getattr(settings, name)) for name, key in names.items()}
    given = {key: value for key, value in given.items() if value[1] is not None}
    made: GraphConfig = _with(graph or GraphConfig(), "graph", **given)
    return made


def _with(config: StrictModel, table: str, **values: tuple[str, Any]) -> Any:
    """``config`` with each key at its value; it may be there already, if the value is the same.

    Args:
        values: key → the setting of the method that it comes from, and the value.
    """
    tables = config.model_dump(exclude_unset=True)
    for key, (setting, value) in values.items():
        if tables.setdefault(key, value) != value:
            raise ValueError(
                f"[method] {setting} = {value!r} is {table}.{key} by another name, which is {tables[key]!r}: "
                "leave one of them out"
            )
    return type(config).model_validate(tables)
