"""What hub and site send each other: the form of each request and answer, checked on both sides."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
    model_validator,
)

from prefed.core import files
from prefed.core.text import control_character, printable
from prefed.core.wire import WireError, decode_download
from prefed.engines.tasks import Task
from prefed.networks.federation.limits import RefusalError
from prefed.networks.federation.transport import FederationError
from prefed.networks.federation.vault import is_receipt

FORMAT = 1
"""Of requests and answers. A hub and a site of two formats do not work together."""
PACKAGES = ("prefed", "torch", "transformers")
"""A site reports its versions of these. That of prefed must be the hub's."""
LONGEST_NAME = 255
"""Characters of a client's name."""
LONGEST_ERROR = 200
"""Characters of what is wrong with a message; it may quote names in it."""


class SiteError(FederationError):
    """A site refuses to take part in a run, or cannot."""


def _receipt(text: str) -> str:
    if not is_receipt(text):
        raise ValueError("a private state by another name than a receipt")
    return text


def _name(text: str) -> str:
    if not 0 < len(text) <= LONGEST_NAME or control_character(text):
        raise ValueError(f"a name has 1 to {LONGEST_NAME} characters, and no control characters")
    return text


def _pairs(counts: list[int]) -> list[int]:
    if counts[0] == 0:
        # A split leaves each client a training pair. Hub and sites would count such a one differently.
        raise ValueError("a client without training pairs")
    return counts


Receipt: TypeAlias = Annotated[str, AfterValidator(_receipt)]
Pairs: TypeAlias = Annotated[list[NonNegativeInt], Field(min_length=3, max_length=3), AfterValidator(_pairs)]
"""A client's numbers of pairs: of training, of validation, of test."""


class Message(BaseModel):
    """A header. Values are not converted, and other keys than these are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)


class Request(Message):
    """What a hub asks of a site, in a run."""

    kind: str
    run: str
    federation: str
    format: int = FORMAT


class Hello(Request):
    """Are you there?"""

    kind: Literal["hello"] = "hello"


class Join(Request):
    """Read the experiment of a run, and report your clients."""

    kind: Literal["join"] = "join"
    experiment: str


class Start(Request):
    """Build the job of a run with these clients; those that never train are ``unseen``."""

    kind: Literal["start"] = "start"
    members: list[str]
    unseen: list[str]


class Visit(Request):
    """Do a task, whose other fields and message are those of :class:`~prefed.engines.Task`.

    Attributes:
        order: the digest of what the site was sent of the run.
        receipt: of the client's private state; ``None`` for its first.
    """

    kind: Literal["visit", "evaluate"]
    client: str
    round: int
    exchange: str
    asked: int
    order: str
    receipt: Receipt | None = None

    @model_validator(mode="after")
    def _evaluates(self) -> Visit:
        if self.kind == "evaluate" and self.exchange:
            raise ValueError("an evaluation with the name of an exchange")
        return self

    def task(self, message: bytes) -> Task:
        """The task, with its message."""
        return Task(self.kind, self.client, self.round, self.exchange, message, self.asked)


class Publish(Request):
    """Keep what the hub publishes to clients after the last round.

    Attributes:
        clients: client → the receipt of its private state that counts; ``None`` for its first.
        model: the fingerprint of the base model.
    """

    kind: Literal["published"] = "published"
    round: int
    clients: dict[str, Receipt | None]
    order: str
    model: str


class Leave(Request):
    """The run is over."""

    kind: Literal["leave"] = "leave"


REQUESTS: Mapping[object, type[Request]] = {
    "hello": Hello,
    "join": Join,
    "start": Start,
    "visit": Visit,
    "evaluate": Visit,
    "published": Publish,
    "leave": Leave,
}


class Answer(Message):
    """What a site answers.

    Attributes:
        refused: why its administrator's limits do not allow what was asked.
        failed: why it could not do it.
        unknown: it does not know the run, or another version of it, and is to be sent it again.
    """

    refused: str | None = None
    failed: str | None = None
    unknown: bool = False


class Joined(Answer):
    """The site's clients, each with its numbers of pairs, and its versions of :data:`PACKAGES`."""

    clients: dict[Annotated[str, AfterValidator(_name)], Pairs]
    versions: dict[str, str]


class Started(Answer):
    """Fingerprints of the site's job: that of ``model`` must be the hub's."""

    fingerprint: dict[str, str]


class Done(Answer):
    """The result of a task.

    Attributes:
        withheld: why nothing was sent; empty if all is well.
        receipt: of the client's next private state; ``None`` if it stays as it was.
        broken: what came is no answer of a site with our code.
    """

    withheld: str = ""
    receipt: Receipt | None = None
    broken: bool = False


A = TypeVar("A", bound=Answer)


def read_request(header: dict[str, Any]) -> Request:
    """The request of a header.

    Raises:
        RefusalError: it is of an unknown kind, or has another form.
    """
    kind = header.get("kind")
    if not isinstance(kind, str) or kind not in REQUESTS:
        raise RefusalError("a request of an unknown kind")
    try:
        return REQUESTS[kind].model_validate(header)
    except ValidationError as error:
        raise RefusalError(f"a request ({kind}) that is not whole: {what_is_wrong(error)}") from None


def read_answer(site: str, header: dict[str, Any], kind: type[A]) -> A:
    """A site's answer.

    Raises:
        SiteError: it has another form.
    """
    try:
        return kind.model_validate(header)
    except ValidationError as error:
        raise SiteError(
            f"the answer of site {site!r} cannot be used: {what_is_wrong(error)}: install the same prefed "
            "there"
        ) from None


def what_is_wrong(error: ValidationError) -> str:
    """The first error in a message, by the name of its key."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part)[:LONGEST_NAME] for part in first["loc"])
    return printable(f"{where}: {first['msg']}" if where else first["msg"])[: LONGEST_NAME + LONGEST_ERROR]


def check_download(body: bytes, what: str) -> None:
    """Refuse a request whose body is no message of a server.

    Raises:
        RefusalError: it is none; the message says ``what`` cannot be read.
    """
    try:
        decode_download(body)
    except WireError as error:
        raise RefusalError(f"{what} that cannot be read: {error}") from error


def is_run(text: str) -> bool:
    """Whether a text has the form of a run's name between hub and sites.

    >>> is_run("3fa9b2c4d5e6f708"), is_run("../../etc")
    (True, False)
    """
    return re.fullmatch(r"[0-9a-f]{16}", text) is not None


def order_digest(experiment: str, members: list[str], unseen: list[str]) -> str:
    """A digest of what a site was sent of a run: with another one it must be sent again."""
    return files.digest(json.dumps([experiment, members, unseen]).encode())


def own_version(name: str) -> str:
    """The version of a package here, without what says how it was built."""
    return version(name).partition("+")[0]
