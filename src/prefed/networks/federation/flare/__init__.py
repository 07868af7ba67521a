"""NVIDIA FLARE as what carries messages between a federation's hub and its sites."""

from __future__ import annotations

from importlib.util import find_spec

from prefed.networks.federation.transport import FederationError


def check_installed() -> None:
    """Refuse to go on without NVIDIA FLARE.

    Raises:
        FederationError: it is not installed; the message has the command that installs it.
    """
    if find_spec("nvflare") is None:
        raise FederationError("a federation needs the package nvflare: pip install 'prefed[nvflare]'")
