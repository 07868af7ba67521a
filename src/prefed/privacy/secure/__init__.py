"""Secure sums: a hub learns the sum of its sites' numbers, and nothing of any one of them.

Every two sites agree on a secret (X25519, keys signed by their identities). In a sum each adds one mask for
every other site and sends one upload; masks cancel in the sum over exactly the sites that all of them were
shown. A mask is bound to everything that sites must agree on (:class:`Session`), so a hub that shows two
sites different models, members or settings gets random words. So it does if a site is missing: the others
then take part in a new attempt, with fresh masks (Bonawitz et al. 2017, CCS '17, without recovery; Pasquini
et al. 2022, arXiv:2111.07380).

A site enters a sum only with sites whose identities its administrator has pinned. It needs
``prefed[secure]``. Noise in the sum is in :mod:`prefed.privacy.distributed`.
"""

from prefed.privacy.secure.identity import Identity, SecureError, fingerprint, signed
from prefed.privacy.secure.sums import (
    LEAST,
    Member,
    Participant,
    Session,
    check_key,
    check_members,
    check_upload,
    sha256,
    sum_words,
)

__all__ = [
    "LEAST",
    "Identity",
    "Member",
    "Participant",
    "SecureError",
    "Session",
    "check_key",
    "check_members",
    "check_upload",
    "fingerprint",
    "sha256",
    "signed",
    "sum_words",
]
