"""What a request of the hub says of a run, of a task or of its end, once its form is checked."""

from __future__ import annotations

from typing import Any

from prefed.core.wire import WireError, decode_download
from prefed.engines.tasks import Task
from prefed.networks.federation.limits import RefusalError
from prefed.networks.federation.vault import is_receipt


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


def published_in(header: dict[str, Any], body: bytes) -> tuple[int, dict[str, str | None], str]:
    """What a hub publishes after the last round: the round, client → receipt, the base model's fingerprint.

    Raises:
        RefusalError: a part of it is missing, or of another form, or the body is no download.
    """
    number, receipts, model = header.get("round"), header.get("clients"), header.get("model")
    if type(number) is not int or not isinstance(receipts, dict) or not isinstance(model, str):
        raise RefusalError("a model of the end that is not whole")
    if not all(each is None or (isinstance(each, str) and is_receipt(each)) for each in receipts.values()):
        raise RefusalError("a model of the end with a private state by another name than a receipt")
    check_download(body, "a model of the end")
    return number, receipts, model


def check_download(body: bytes, what: str) -> None:
    """Refuse a request whose body is no message of a server.

    Raises:
        RefusalError: it is none; the message says ``what`` cannot be read.
    """
    try:
        decode_download(body)
    except WireError as error:
        raise RefusalError(f"{what} that cannot be read: {error}") from error


def texts_in(header: dict[str, Any], name: str) -> list[str]:
    """Names of clients in a request.

    Raises:
        RefusalError: they are no list of texts.
    """
    value = header.get(name)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise RefusalError("a run without the names of its members")
    return value
