"""NVIDIA FLARE as the transport between hub and sites."""

from __future__ import annotations

from importlib.util import find_spec

from prefed.networks.federation.transport import FederationError


def check_installed() -> None:
    """Check that NVIDIA FLARE is installed.

    Raises:
        FederationError: it is not installed.
    """
    if find_spec("nvflare") is None:
        raise FederationError(
            "a federation needs the package nvflare: install it with pip install 'prefed[nvflare]'"
        )
