"""Masks over rows: what clients share, and where they disagree. Pure functions of columns.

A column holds one number per row, ``[n]``. ``pairs`` and ``item`` hold codes: equal pairs, or prompts, have
equal codes. ``side`` says which of the two responses is preferred, 0 or 1. ``client`` holds the index
of the client. Each function returns ``bool [n]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["contradiction_mask", "overlap_mask", "shared_mask"]


def shared_mask(item: NDArray[Any], client: NDArray[Any]) -> NDArray[np.bool_]:
    """Rows whose item another client has too."""
    return overlap_mask(item, client, item, client, same_client=False)


def contradiction_mask(pairs: NDArray[Any], side: NDArray[Any], client: NDArray[Any]) -> NDArray[np.bool_]:
    """Rows whose pair another client has with the opposite preference."""
    code = 2 * np.unique(pairs, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return overlap_mask(code + 1 - side, client, code + side, client, same_client=False)


def overlap_mask(
    item: NDArray[Any],
    client: NDArray[Any],
    other_item: NDArray[Any],
    other_client: NDArray[Any],
    *,
    same_client: bool,
) -> NDArray[np.bool_]:
    """Rows whose item occurs in a second set of rows too.

    Args:
        item: the items of the first set, ``[n]``.
        client: their clients, ``[n]``.
        other_item: the items of the second set, ``[m]``.
        other_client: their clients, ``[m]``.
        same_client: look at the second set's rows of the same client; otherwise at those of all others.
    """
    codes, of_row = np.unique(np.concatenate([item, other_item]), return_inverse=True)
    of_row = of_row.reshape(-1).astype(np.int64)
    clients = int(max(client.max(initial=0), other_client.max(initial=0))) + 1
    first = of_row[: len(item)] * clients + client
    second = np.unique(of_row[len(item) :] * clients + other_client)
    own = np.isin(first, second)
    if same_client:
        return own
    clients_of_code = np.bincount(second // clients, minlength=len(codes))[of_row[: len(item)]]
    return np.asarray(clients_of_code > own)
