"""The ``[track]`` table: which tools are told how a run goes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from prefed.core.strict import StrictModel


class TrackConfig(StrictModel):
    """Which tools are told how a run goes. No number depends on it, and a resumed run may have another one.

    >>> TrackConfig(to="tensorboard").to
    ['tensorboard']
    """

    to: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(
        min_length=1, description="the tools, a name or a list of names"
    )
    project: str = Field(
        "prefed", min_length=1, description="the project of the run; MLflow calls it an experiment"
    )
    name: str | None = Field(
        None, min_length=1, description="the run's name there; left out: that of its run directory"
    )
    clients: bool = Field(
        True,
        description="tell every client's figures, by its id; false: nothing that names one, and no page",
    )
    page: bool = Field(
        True, description="add the page that prefed report makes, without what only its owner may read"
    )

    @field_validator("to", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value
