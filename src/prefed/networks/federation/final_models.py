"""What the hub published to a site's clients after a run's last round, on the site's disk.

With a client's private state it makes the client's own model, for ``prefed site export``. An index says for
each client which message it is, and which version of its private state belongs to it. Messages are written
before the index names them, so that a process that is killed in between leaves what there was. Reading needs
no lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefed.core import files
from prefed.networks.federation.limits import RefusalError
from prefed.networks.federation.messages import Publish, check_download
from prefed.networks.federation.vault import Vault
from prefed.store import StoreError

_INDEX = "clients.json"


@dataclass(frozen=True)
class Parting:
    """What a client was given at the end.

    Attributes:
        round: the last one.
        receipt: of the private state that counts; ``None`` for the client's first.
        model: the fingerprint of the base model.
        file: the name of the message's file.
    """

    round: int
    receipt: str | None
    model: str
    file: str


class Published:
    """What the clients of one run were given.

    Args:
        folder: of the run, at the site.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "published"

    def keep(self, number: int, receipts: Mapping[str, str | None], model: str, message: bytes) -> None:
        """Keep ``message`` for these clients, in the place of what each of them had.

        Raises:
            WriteError: it cannot be written. What there was stays.
        """
        files.private_folder(self._folder)
        name = f"{number:06d}-{files.digest(message)}.safetensors"
        files.write(self._folder / name, message, mode=0o600)
        entries = {client: asdict(known) for client, known in self.clients().items()}
        entries |= {client: asdict(Parting(number, own, model, name)) for client, own in receipts.items()}
        index = {"time": datetime.now(UTC).isoformat(timespec="microseconds"), "clients": entries}
        files.write(self._folder / _INDEX, files.dumps_with_digest(index), mode=0o600)
        named = {_INDEX, *(entry["file"] for entry in entries.values())}
        for path in self._folder.iterdir():
            if path.name not in named:
                files.remove(path)

    @property
    def time(self) -> str:
        """When the last message came, as ISO 8601 in UTC; empty if none has."""
        return str(self._index().get("time", ""))

    def clients(self) -> dict[str, Parting]:
        """Client, by the name that the hub knows it by → what it was given.

        Raises:
            StoreError: the index is damaged.
        """
        return {client: Parting(**entry) for client, entry in self._index().get("clients", {}).items()}

    def read(self, client: str) -> tuple[Parting, bytes]:
        """What a client was given, and the message itself.

        Raises:
            KeyError: it was given nothing.
            StoreError: the message is missing or damaged.
        """
        while True:
            given = self.clients()[client]
            path = self._folder / given.file
            try:
                message = path.read_bytes()
            except FileNotFoundError:
                # A later message may have taken its place in the meantime.
                if self.clients()[client] == given:
                    raise StoreError(f"{path} is missing: have the hub send it again (--resume)") from None
                continue
            if files.digest(message) not in given.file:
                raise StoreError(f"{path} is damaged: have the hub send it again (--resume)")
            return given, message

    def _index(self) -> dict[str, Any]:
        path = self._folder / _INDEX
        try:
            return files.loads_with_digest(path.read_bytes()) if path.exists() else {}
        except files.DamagedError as error:
            raise StoreError(f"{path} is damaged: {error}; put a copy of it back") from error


def take_in(
    folder: Path, order: Mapping[str, Any], rounds: int, secret: bytes, request: Publish, body: bytes
) -> int:
    """Check and keep what a hub publishes to clients of this site. Gives the round.

    Args:
        folder: of the run.
        order: what the site keeps of the run.
        rounds: that the run has.
        secret: of the site's receipts.

    Raises:
        RefusalError: the body is no download, or the request is of an earlier round, or names a client or a
            private state that is not here.
        WriteError: it cannot be kept.
    """
    check_download(body, "a model of the end")
    number, receipts = request.round, request.clients
    if not 1 <= number <= rounds:
        raise RefusalError(f"round {number} of {rounds}")
    if number < order["round"]:
        raise RefusalError(f"round {number} is over: this site has answered in round {order['round']}")
    if set(receipts) - set(order["names"].values()):
        raise RefusalError("a client that is not here")
    vault = Vault(folder / "clients", secret)
    for client, receipt in receipts.items():
        try:
            vault.read(client, receipt)
        except StoreError as error:
            # The text names this machine's files.
            raise RefusalError(f"a private state of {client!r} that is not here") from error
    Published(folder).keep(number, receipts, request.model, body)
    return number
