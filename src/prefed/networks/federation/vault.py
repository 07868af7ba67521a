"""Clients' private states on their site's disk, in versions that receipts name.

A visit starts from the version that the hub's receipt names and leaves another one. The hub commits receipts
with its rounds. So whichever side is killed, and whenever: the version that counts is the one that the hub's
last commit names, and it is there. The version is on the disk before its receipt leaves the site.

A receipt is a keyed digest of the state: it proves that a file is what was written, and does not reveal
to anybody else whether two states are equal.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from prefed.core import files
from prefed.store import StoreError
from prefed.store.commit import client_file

_RECEIPT = re.compile(r"([0-9]{6,9})-([0-9a-f]{32})")
_SECRET = "secret"


class Vault:
    """The private states of one run at a site. One process writes; others may read at the same time.

    Args:
        folder: of this run, only for its owner.
        secret: of the site, from :func:`site_secret`.
    """

    def __init__(self, folder: Path, secret: bytes) -> None:
        self._folder, self._secret = folder, secret

    def read(self, client: str, receipt: str | None) -> bytes | None:
        """The version that a receipt names; ``None`` for a client's first state, which has none.

        Raises:
            StoreError: there is no such version, or it is damaged.
        """
        if receipt is None:
            return None
        path = self._path(client, receipt)
        try:
            state = path.read_bytes()
        except FileNotFoundError:
            raise StoreError(
                f"{path} is missing, which the hub's last round names: put a copy of the state folder back"
            ) from None
        if self._receipt(client, _number(receipt), state) != receipt:
            raise StoreError(f"{path} is damaged: put a copy of it back")
        return state

    def keep(self, client: str, number: int, state: bytes) -> str:
        """Write the version that a visit of round ``number`` leaves; its receipt."""
        receipt = self._receipt(client, number, state)
        files.private_folder(self._folder)
        files.write(self._path(client, receipt), state, mode=0o600)
        return receipt

    def tidy(self, client: str, receipt: str | None, number: int) -> None:
        """Delete the versions of a client that a visit of round ``number``, from ``receipt``, leaves behind.

        A version of an earlier round than ``number`` that the hub names is committed there. What is older
        than it is in no commit that can come back. A hub that names none may have lost its receipts, so
        nothing is deleted then. What a killed process left half written is deleted too.
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

    def _path(self, client: str, receipt: str) -> Path:
        if not is_receipt(receipt):
            raise StoreError("the hub names a private state by what is no receipt")
        return self._folder / f"{client_file(client)}@{receipt}.safetensors"

    def _receipt(self, client: str, number: int, state: bytes) -> str:
        digest = hashlib.blake2b(f"{client}\0{number}\0".encode(), key=self._secret, digest_size=16)
        digest.update(state)
        return f"{number:06d}-{digest.hexdigest()}"


def site_secret(folder: Path) -> bytes:
    """The site's key for receipts and made-up names, from a file that is made at the first call."""
    path = folder / _SECRET
    if not path.exists():
        files.private_folder(folder)
        files.write(path, os.urandom(32), mode=0o600)
    return path.read_bytes()


def _number(receipt: str) -> int:
    return int(receipt.partition("-")[0])


def is_receipt(text: str) -> bool:
    """Whether a text has the form of a receipt.

    >>> is_receipt("000003-" + "c6" * 16), is_receipt("../../secret")
    (True, False)
    """
    return _RECEIPT.fullmatch(text) is not None
