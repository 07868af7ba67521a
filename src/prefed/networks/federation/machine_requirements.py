"""What a hub or a site needs of its machine: its kit, valid certificates, and the port."""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from prefed.core.text import listed
from prefed.networks.federation.config import SiteConfig, check_places
from prefed.networks.federation.flare import check_installed
from prefed.networks.federation.flare.kits import Kits, address
from prefed.networks.federation.flare.process import is_loopback
from prefed.networks.federation.flare.site import check_kit
from prefed.networks.federation.transport import FederationError
from prefed.runs.machine_requirements import Finding, check_model_folder, checked

TIMEOUT = 5.0
"""Seconds to wait for the hub's machine."""


def hub_needs(folder: Path) -> Iterator[Finding]:
    """Check the hub's folder, the dates of its certificate, and that its port is free."""
    installed = yield from _installed()
    if not installed:
        return
    kits: list[Kits] = []

    def opened() -> str:
        kits.append(Kits.open(folder))
        return f"{folder}: hub of {kits[0].federation}"

    yield checked("kit", opened)
    if kits:
        startup = kits[0].server / "startup"
        yield checked("certificate", lambda: _dates(startup / "server.crt"))
        yield checked("port", lambda: _free(address(startup)[2]))


def site_needs(config: SiteConfig) -> Iterator[Finding]:
    """Check a site's kit, the dates of its certificate, its data and model, and the connection to the hub."""
    installed = yield from _installed()
    if not installed:
        return
    kit = Path(config.kit)
    found = checked("kit", lambda: f"{kit}, hub at {check_kit(kit, config)}")
    yield found

    def places() -> str:
        check_places(config)
        for name in (config.model.name, config.model.reward_model):
            if name is not None and (folder := Path(name).expanduser()).is_dir():
                check_model_folder(name, folder)
        return config.model.name

    yield checked("data and model", places)
    if config.identity.exists() or config.sites or config.limits.privacy == "distributed":
        yield checked("secure sums", lambda: f"{config.own_words()}; pinned: {', '.join(config.sites)}")
    if not found.missing:
        startup = kit / "startup"
        yield checked("certificate", lambda: _dates(startup / "client.crt"))
        yield checked("hub", lambda: _reached(*address(startup)[1:]))


def _installed() -> Generator[Finding, None, bool]:
    """Check NVIDIA FLARE and the name localhost; return whether FLARE is installed."""
    package = checked("nvflare", _nvflare)
    yield package
    if not package.missing:
        yield checked("localhost", _localhost)
    return not package.missing


def _nvflare() -> str:
    check_installed()
    return "installed"


def _localhost() -> str:
    """FLARE's processes of one machine reach each other at this name."""
    found = "no address"
    with suppress(OSError):
        found = listed(sorted({str(each[4][0]) for each in socket.getaddrinfo("localhost", None)}))
    if not is_loopback("localhost"):
        raise FederationError(
            f"the name localhost has {found}, so NVIDIA FLARE's processes cannot reach each other: add "
            "the line `127.0.0.1 localhost` to /etc/hosts"
        )
    return found


def _dates(path: Path) -> str:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    first, last, now = certificate.not_valid_before_utc, certificate.not_valid_after_utc, datetime.now(UTC)
    if now < first:
        raise FederationError(f"{path} is valid from {first:%Y-%m-%d %H:%M} UTC: set this machine's clock")
    if now > last:
        raise FederationError(
            f"{path} expired on {last:%Y-%m-%d}: the hub's organisation must make new kits (`prefed "
            "federation init PROJECT --out NEW`)"
        )
    return f"valid until {last:%Y-%m-%d}"


def _free(port: int) -> str:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            raise FederationError(
                f"{port} cannot be used ({error.strerror}): stop the program that uses it, or another hub"
            ) from error
    return f"{port} is free"


def _reached(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), TIMEOUT).close()
    except ConnectionRefusedError:
        return f"{host} is reachable; port {port} is closed until the hub starts a run"
    except OSError as error:
        raise FederationError(
            f"{host}:{port} cannot be reached ({error.strerror or error}): check the name, the network and "
            "the firewall"
        ) from error
    return f"{host}:{port} is open"
