"""Private states of clients on their site's disk, in versions identified by receipts.

A visit reads the version that the hub's receipt names and writes a new version before its receipt is sent.
The hub commits receipts with its rounds. If either side is killed, the version of the last commit still
exists.

A receipt is a keyed digest of the state: it proves that a file is unchanged, and does not reveal to others
whether two states are equal.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from prefed.core import files
from prefed.store import StoreError
from prefed.store.states import client_file

_RECEIPT = re.compile(r"([0-9]{6,9})-([0-9a-f]{32})")
_SECRET = "secret"


class Vault:
    """The private states of one run at a site. One process writes; others may read concurrently.

    Args:
        folder: folder of this run's states, created with access for its owner only.
        secret: the site's key, from :func:`site_secret`.
    """

    def __init__(self, folder: Path, secret: bytes) -> None:
        self._folder, self._secret = folder, secret

    def read(self, client: str, receipt: str | None) -> bytes | None:
        """Read the version that a receipt names; ``None`` for the initial state, which has no receipt.

        Raises:
            StoreError: the version is missing or damaged.
        """
        if receipt is None:
            return None
        path = self._path(client, receipt)
        try:
            state = path.read_bytes()
        except FileNotFoundError:
            raise StoreError(
                f"{path} is missing, and the hub's last round needs it: restore the state folder from a copy"
            ) from None
        if self._receipt(client, _number(receipt), state) != receipt:
            raise StoreError(f"{path} is damaged: restore it from a copy")
        return state

    def keep(self, client: str, number: int, state: bytes) -> str:
        """Write the state after a visit of round ``number``; return its receipt."""
        receipt = self._receipt(client, number, state)
        files.private_folder(self._folder)
        files.write(self._path(client, receipt), state, mode=0o600)
        return receipt

    def tidy(self, client: str, receipt: str | None, number: int) -> None:
        """Delete a client's obsolete versions after a visit of round ``number`` that read ``receipt``.

        If ``receipt`` is of an earlier round, the hub has committed it, and older versions are obsolete.
        Without a receipt nothing is deleted, because the hub may have lost its receipts. Temporary files of
        interrupted writes are deleted too.
        """
        for path in self._folder.glob(f"*{files.TEMPORARY}"):
            files.remove(path)
        base = _number(receipt) if receipt else -1
        if base >= number:
            return
        name = client_file(client)
        for path in self._folder.glob("*.safetensors"):
            stem, _, version = path.name.removesuffix(".safetensors").rpartition("@")
            match = _RECEIPT.fullmatch(version)
            if stem == name and match and int(match[1]) < base:
                files.remove(path)

    def copy_from(self, folder: Path) -> None:
        """Copy all states of another run of the site that are not here."""
        files.private_folder(self._folder)
        for path in folder.glob("*.safetensors"):
            if not (here := self._folder / path.name).exists():
                files.write(here, path.read_bytes(), mode=0o600)

    def _path(self, client: str, receipt: str) -> Path:
        if not is_receipt(receipt):
            raise StoreError("the hub sent an invalid receipt of a private state")
        return self._folder / f"{client_file(client)}@{receipt}.safetensors"

    def _receipt(self, client: str, number: int, state: bytes) -> str:
        digest = hashlib.blake2b(f"{client}\0{number}\0".encode(), key=self._secret, digest_size=16)
        digest.update(state)
        return f"{number:06d}-{digest.hexdigest()}"


def site_secret(folder: Path) -> bytes:
    """The site's key for receipts and pseudonyms, from a file that the first call creates."""
    path = folder / _SECRET
    if not path.exists():
        files.private_folder(folder)
        files.write(path, os.urandom(32), mode=0o600)
    return path.read_bytes()


def _number(receipt: str) -> int:
    return int(receipt.partition("-")[0])


def is_receipt(text: str) -> bool:
    """Return whether a text is a well-formed receipt.

    >>> is_receipt("000003-" + "c6" * 16), is_receipt("../../secret")
    (True, False)
    """
    return _RECEIPT.fullmatch(text) is not None
