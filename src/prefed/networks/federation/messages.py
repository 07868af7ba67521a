"""Schemas of the requests and answers between hub and sites. Both sides validate what they receive."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from prefed.core import files
from prefed.core.text import control_character, printable
from prefed.core.wire import WireError, decode_download
from prefed.engines.tasks import Task
from prefed.networks.federation.site_limits import RefusalError
from prefed.networks.federation.transport import FederationError
from prefed.networks.federation.vault import is_receipt
from prefed.networks.federation.versions import own_version
from prefed.privacy.secure import Member, Session, sha256

FORMAT = 1
"""Version of the message format. Hub and sites must have the same."""
VERSION = own_version("prefed")
"""The installed version of prefed. Hub and sites must have the same."""
LONGEST_NAME = 255
"""Maximum characters of a client's name."""
LONGEST_ERROR = 200
"""Maximum characters of a validation error."""


class SiteError(FederationError):
    """A site refuses or fails to take part in a run."""


def _receipt(text: str) -> str:
    if not is_receipt(text):
        raise ValueError("not a valid receipt of a private state")
    return text


def _name(text: str) -> str:
    if not 0 < len(text) <= LONGEST_NAME or control_character(text):
        raise ValueError(f"a name must have 1 to {LONGEST_NAME} characters and no control characters")
    return text


def _pairs(counts: list[int]) -> list[int]:
    if counts[0] == 0:
        # Splits leave every client a training pair. Hub and sites would treat such a client differently.
        raise ValueError("a client must have training pairs")
    return counts


RunName: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Key: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Signature: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
Receipt: TypeAlias = Annotated[str, AfterValidator(_receipt)]
Pairs: TypeAlias = Annotated[list[NonNegativeInt], Field(min_length=3, max_length=3), AfterValidator(_pairs)]
"""A client's number of training, validation and test pairs."""


class Message(BaseModel):
    """The header of a message. Values are not converted, and unknown keys are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)


class Request(Message):
    """A request of the hub in a run."""

    kind: str
    run: str
    federation: str
    format: int = FORMAT
    prefed: str = VERSION


class BoundRequest(Request):
    """A request that a site answers only if nothing of it was changed on its way.

    Attributes:
        digest: of all other fields and the body.
    """

    digest: str = ""

    def bound(self, body: bytes) -> Self:
        """This request, with its digest."""
        fields = json.dumps([self.model_dump(exclude={"digest"}), sha256(body)], sort_keys=True)
        return self.model_copy(update={"digest": sha256(fields.encode())})


class Hello(Request):
    """Check whether the site answers."""

    kind: Literal["hello"] = "hello"


class Judged(Message):
    """What a refresh trains on: pairs that clients judged in the alignment of a run.

    Attributes:
        run: the run.
        after: the run, or its last refresh, whose rounds continue.
        refreshes: the generations in which clients judged.
    """

    run: RunName
    after: RunName
    refreshes: Annotated[list[PositiveInt], Field(min_length=1)]


class Join(Request):
    """Read the experiment of a run and report the site's clients.

    Attributes:
        code: name → :meth:`~prefed.core.plugins.Code.record` of each object from outside prefed at the hub.
        judged: for the further rounds of a refresh.
    """

    kind: Literal["join"] = "join"
    experiment: str
    code: dict[str, dict[str, str]] = {}
    judged: Judged | None = None


class Start(Request):
    """Build the job of a run with these clients; ``unseen`` ones never train."""

    kind: Literal["start"] = "start"
    members: list[str]
    unseen: list[str]


class Visit(Request):
    """Run a :class:`~prefed.engines.Task`, whose fields this has.

    Attributes:
        order: from :func:`order_digest`.
        receipt: receipt of the client's private state; ``None`` for the initial state.
    """

    kind: Literal["visit", "evaluate", "judge"]
    client: str
    round: int
    exchange: str
    asked: int
    order: str
    receipt: Receipt | None = None

    @model_validator(mode="after")
    def _evaluates(self) -> Visit:
        refresh = self.kind == "judge" and re.fullmatch(r"refresh(-[0-9]{1,6})+", self.exchange)
        if self.kind != "visit" and self.exchange and not refresh:
            raise ValueError("only a visit names an exchange")
        return self

    @property
    def refreshes(self) -> list[int]:
        """The generations in which the client judged, up to this request; empty for votes."""
        return [int(number) for number in self.exchange.split("-")[1:]]

    def task(self, message: bytes) -> Task:
        """The task with its message."""
        return Task(self.kind, self.client, self.round, self.exchange, message, self.asked)


class Keys(Message):
    """A site's keys in a run: a :class:`~prefed.privacy.secure.Member` in hexadecimal."""

    site: str
    identity: Key
    key: Key
    signature: Signature

    @classmethod
    def of(cls, member: Member) -> Keys:
        """Encode a member."""
        fields = {name: getattr(member, name).hex() for name in ("identity", "key", "signature")}
        return cls(site=member.site, **fields)

    @property
    def member(self) -> Member:
        """The member."""
        return Member(self.site, *map(bytes.fromhex, (self.identity, self.key, self.signature)))


class Sum(BoundRequest):
    """Train, evaluate or ask clients, and send the masked sum of their updates, metrics or votes.

    Attributes:
        exchange: empty for an evaluation; ``votes-N`` for votes, where N is used for one request only.
        attempt, size, members: as in :class:`~prefed.privacy.secure.Session`.
        clients: client → receipt of its private state; ``None`` for the initial state.
        order: from :func:`order_digest`.
    """

    kind: Literal["sum"] = "sum"
    round: int
    exchange: str
    attempt: Literal[1, 2]
    size: PositiveInt
    members: list[Keys]
    clients: dict[str, Receipt | None]
    order: str

    @property
    def votes(self) -> bool:
        """Whether clients vote on pairs of completions."""
        return re.fullmatch("votes-[0-9]{1,6}", self.exchange) is not None

    def of(self, settings: str, body: bytes) -> Session:
        """The session that this request describes."""
        members = tuple(each.member for each in self.members)
        where = self.federation, self.run, self.round, self.exchange, self.attempt
        return Session(*where, settings, sha256(body), self.size, members)


class Publish(BoundRequest):
    """Store the download of the last round for these clients.

    Attributes:
        clients: client → the receipt of its private state; ``None`` for the initial state.
        order: from :func:`order_digest`.
        model: the fingerprint of the base model.
    """

    kind: Literal["published"] = "published"
    round: int
    clients: dict[str, Receipt | None]
    order: str
    model: str


class Forget(Request):
    """Delete everything of this run, which had clients that withdrew, and confirm it.

    Attributes:
        clients: all that withdrew, also those of other sites, as the hub knows them.
    """

    kind: Literal["forget"] = "forget"
    clients: list[str]


class Leave(Request):
    """End the run at the site."""

    kind: Literal["leave"] = "leave"


REQUESTS: Mapping[object, type[Request]] = {
    "hello": Hello,
    "join": Join,
    "start": Start,
    "visit": Visit,
    "evaluate": Visit,
    "judge": Visit,
    "sum": Sum,
    "published": Publish,
    "forget": Forget,
    "leave": Leave,
}


class Answer(Message):
    """An answer of a site.

    Attributes:
        refused: why the site's limits do not allow the request.
        failed: why the request failed.
        unknown: the site does not know the run in this form; the hub must send it again.
    """

    refused: str | None = None
    failed: str | None = None
    unknown: bool = False


class Joined(Answer):
    """Answer to :class:`Join`: clients' pair counts, and the versions of packages."""

    clients: dict[Annotated[str, AfterValidator(_name)], Pairs]
    versions: dict[str, str]


class Started(Answer):
    """Answer to :class:`Start`: fingerprints of the site's job. ``model`` must match the hub's.

    Attributes:
        keys: for secure sums.
        evaluates: whether the site's limits let metrics leave.
    """

    fingerprint: dict[str, str]
    keys: Keys | None = None
    evaluates: bool = True


class Done(Answer):
    """Answer to :class:`Visit`.

    Attributes:
        withheld: why nothing was sent; empty on success.
        receipt: receipt of the client's new private state; ``None`` if it did not change.
        broken: the answer is malformed, which no correct site sends.
    """

    withheld: str = ""
    receipt: Receipt | None = None
    broken: bool = False


class Summed(Answer):
    """Answer to :class:`Sum`. The masked words are the body.

    Attributes:
        receipts: client → receipt of its new private state, where it changed.
        signature: of the words, in hexadecimal.
        used: the site took part in another sum under this attempt: the next one is needed.
    """

    receipts: dict[str, Receipt] = {}
    signature: Signature | Literal[""] = ""
    used: bool = False


class Forgotten(Answer):
    """Answer to :class:`Forget`.

    Attributes:
        statement: from :func:`statement_of`.
        identity, signature: the site's public key and its signature of the statement; empty without a key.
    """

    statement: str
    identity: Key | Literal[""] = ""
    signature: Signature | Literal[""] = ""


def statement_of(federation: str, run: str, site: str, clients: list[str], **done: Any) -> str:
    """What a site confirms, as JSON.

    Args:
        done: when it deleted what, and the SHA-256 of the line about it in the site's log.
    """
    about = {"prefed": "forgotten", "federation": federation, "run": run, "site": site, "clients": clients}
    return json.dumps(about | done)


A = TypeVar("A", bound=Answer)


def read_request(header: dict[str, Any]) -> Request:
    """Parse the header of a request.

    Raises:
        RefusalError: the kind is unknown or the header is invalid.
    """
    kind = header.get("kind")
    if not isinstance(kind, str) or kind not in REQUESTS:
        raise RefusalError("unknown kind of request")
    try:
        return REQUESTS[kind].model_validate(header)
    except ValidationError as error:
        raise RefusalError(f"invalid request ({kind}): {what_is_wrong(error)}") from None


def read_answer(site: str, header: dict[str, Any], kind: type[A]) -> A:
    """Parse the header of a site's answer.

    Raises:
        SiteError: the header is invalid.
    """
    try:
        return kind.model_validate(header)
    except ValidationError as error:
        raise SiteError(
            f"the answer of site {site!r} is invalid: {what_is_wrong(error)}; install the same version of "
            "prefed there"
        ) from None


def what_is_wrong(error: ValidationError) -> str:
    """The key and the text of the first validation error."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part)[:LONGEST_NAME] for part in first["loc"])
    return printable(f"{where}: {first['msg']}" if where else first["msg"])[: LONGEST_NAME + LONGEST_ERROR]


def check_download(body: bytes, what: str) -> None:
    """Refuse a request whose body is not a valid download.

    Args:
        what: name of the body in the error message.

    Raises:
        RefusalError: it is not.
    """
    try:
        decode_download(body)
    except WireError as error:
        raise RefusalError(f"{what} cannot be read: {error}") from error


def is_run(text: str) -> bool:
    """Return whether a text is a valid name of a run: 16 hexadecimal digits.

    >>> is_run("3fa9b2c4d5e6f708"), is_run("../../etc")
    (True, False)
    """
    return re.fullmatch(r"[0-9a-f]{16}", text) is not None


def settings_of(experiment: str, members: list[str], unseen: list[str]) -> str:
    """What the sites of a secure sum must have the same: SHA-256 of a run's experiment and clients."""
    return sha256(json.dumps([VERSION, experiment, members, unseen]).encode())


def order_digest(experiment: str, members: list[str], unseen: list[str]) -> str:
    """Digest of a run's experiment and members. If a site has another one, the run must be sent again."""
    return files.digest(json.dumps([experiment, members, unseen]).encode())
