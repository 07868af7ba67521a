"""What a request of the hub says of a run and of a task, once its form is checked."""

from __future__ import annotations

from typing import Any

from prefed.engines.tasks import Task
from prefed.federation.limits import RefusalError


def task_in(header: dict[str, Any], body: bytes) -> Task:
    """The task of a request.

    Raises:
        RefusalError: a part of it is missing, or of another form.
    """
    names = {"kind": str, "client": str, "round": int, "exchange": str, "asked": int}
    fields = {name: header.get(name) for name in names}
    if not all(isinstance(value, names[name]) for name, value in fields.items()):
        raise RefusalError("a task that is not whole")
    receipt = header.get("receipt")
    if receipt is not None and not isinstance(receipt, str):
        raise RefusalError("a task with a private state by another name than a receipt")
    task = Task(message=body, **fields)  # type: ignore[arg-type]
    if task.kind == "evaluate" and task.exchange:
        raise RefusalError("an evaluation with the name of an exchange")
    return task


def texts_in(header: dict[str, Any], name: str) -> list[str]:
    """Names of clients in a request.

    Raises:
        RefusalError: they are no list of texts.
    """
    value = header.get(name)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise RefusalError("a run without the names of its members")
    return value
