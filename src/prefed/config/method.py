"""The table ``[method]``: a method by its name, with the settings that it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, SerializeAsAny, model_serializer, model_validator

from prefed.core.text import did_you_mean
from prefed.methods import METHODS, MethodKind, TrainingSettings


def method_kind(name: str) -> MethodKind:
    """Look a method up in the registry.

    Raises:
        ValueError: it has no such method; the message has the nearest name.
    """
    if name not in METHODS:
        raise ValueError(
            f"no method is called {name!r}{did_you_mean(name, METHODS)} (methods: {', '.join(METHODS)})"
        )
    return METHODS[name]


class MethodConfig(BaseModel):
    """A method's name and its settings.

    In a file and in a mapping they are in one table: ``{"name": "feddpo", "lr": 1e-4}``.

    Attributes:
        name: one of :data:`prefed.methods.METHODS`.
        settings: the record of that method's settings.
    """

    model_config = {"frozen": True, "extra": "forbid"}

    name: str
    settings: SerializeAsAny[TrainingSettings]

    @model_validator(mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping) or isinstance(value.get("settings"), TrainingSettings):
            return value
        name = value.get("name")
        if not isinstance(name, str):
            raise ValueError(f"name says which method to run: {', '.join(METHODS)}")
        settings = {key: item for key, item in value.items() if key != "name"}
        return {"name": name, "settings": method_kind(name).Settings.model_validate(settings)}

    @model_serializer
    def _join(self) -> dict[str, Any]:
        return {"name": self.name, **self.settings.model_dump(mode="json", exclude_none=True)}

    @property
    def kind(self) -> MethodKind:
        """The method's entry in the registry."""
        return METHODS[self.name]
