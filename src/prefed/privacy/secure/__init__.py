"""Secure aggregation: a server learns the sum of its clients' numbers, and nothing of any one of them.

The protocol with pairwise masks of Bonawitz et al. 2017 (CCS '17, figure 4), for a server that may lie::

    advertise   client → two X25519 public keys, signed            server → all of them
    share       client → for each other one, sealed: shares of its mask key and of its own mask's seed
    mask        client → its numbers + its own mask + Σ ± a mask shared with each other client
    confirm     server → whose numbers came                        client → a signature of these names
    reveal      server → the signatures            client → of each that sent a share of the seed, of each
                                                            that did not a share of the mask key
    sum         server: takes off the masks that are left

No client gives away both kinds of share of one client, and no two lists of names have enough signatures. It
needs ``prefed[secure]``.

No engine calls it. It hides a client in one sum. Two sums that differ by one client give its numbers away,
and a server that asks for a round again gets both: see ``docs/privacy.md``.
"""

from prefed.privacy.secure.primitives import SecureError
from prefed.privacy.secure.protocol import Keys, Reveal, SecureClient, SecureServer, threshold

__all__ = ["Keys", "Reveal", "SecureClient", "SecureError", "SecureServer", "threshold"]
