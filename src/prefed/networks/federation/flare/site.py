"""A site's connection to its hub: runs NVIDIA FLARE's client and restarts it whenever it ends."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from prefed.config import ConfigError
from prefed.networks.federation.config import SiteConfig, check_places
from prefed.networks.federation.flare.kits import HEARTBEAT, address, check_whole, organisation_of
from prefed.networks.federation.flare.process import CLIENT, REGISTERED, SITE_DOOR, FlareProcess, longest
from prefed.networks.federation.site import Site
from prefed.networks.federation.unix_socket import Door

LONGEST_PAUSE = 30.0
"""Maximum seconds between two starts."""
EVERY = 20.0
"""Seconds between two checks whether the hub has accepted the site."""
LOOKS = 3
"""Consecutive checks with the hub online and the site not accepted after which a message is printed."""


def take_part(config: SiteConfig, report: Callable[[str], None]) -> None:
    """Answer the hub's requests until this process is interrupted.

    Raises:
        ConfigError: the kit is missing or belongs to another site, or the data or the model do not exist.
        StoreError: another process uses the site's state folder.
    """
    kit = Path(config.kit)
    hub = check_kit(kit, config)
    check_places(config)
    site, pause, watch = Site(config, report), 1.0, _Watch(hub, kit, report)
    process: FlareProcess | None = None
    report(f"site {config.name} of {config.federation}: waiting for the hub at {hub}; press Ctrl-C to stop")

    def answer(request: bytes) -> bytes:
        watch.let_in()
        return b"" if request == REGISTERED else site.answer(request)

    with Door(answer) as door:
        settings = [f"uid={config.name}", f"org={organisation_of(config.name)}"]
        settings.append(f"heart_beat_interval={HEARTBEAT}")
        environment = {SITE_DOOR: str(door.path), **longest(config.limits.message_mb)}
        try:
            while True:
                started = time.monotonic()
                watch.begin()
                process = FlareProcess(CLIENT, kit, settings, environment)
                while process.alive:
                    time.sleep(0.5)
                    watch.look()
                # A client that ran for long was connected or kept trying, so it is restarted soon.
                pause = 1.0 if time.monotonic() - started > LONGEST_PAUSE else min(2 * pause, LONGEST_PAUSE)
                time.sleep(pause)
        finally:
            if process is not None:
                process.stop()
            site.close()


class _Watch:
    """Reports once if the hub is online but does not accept the site. FLARE's client only keeps trying.

    Args:
        hub: the hub's address, ``host:port``.
    """

    def __init__(self, hub: str, kit: Path, report: Callable[[str], None]) -> None:
        self._hub, self._kit, self._report = hub, kit, report
        self._outside, self._reported = 0, False
        self._next = time.monotonic() + EVERY
        self.begin()

    def begin(self) -> None:
        """Note that a client is about to start."""
        self._in = False

    def let_in(self) -> None:
        """Note that the hub has accepted the client."""
        self._in, self._outside, self._reported = True, 0, False

    def look(self) -> None:
        """Check the hub's port if a check is due."""
        if self._in or self._reported or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY
        self._outside = self._outside + 1 if _answers(self._hub) else 0
        if self._outside == LOOKS:
            self._reported = True
            with suppress(OSError):  # output that cannot be written must not end the site
                self._report(
                    f"the hub at {self._hub} is online but has not accepted this site; still trying. See "
                    f"log.txt and error_log.txt in {self._kit}, and log.txt at the hub"
                )


def _answers(hub: str) -> bool:
    host, _, port = hub.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5.0):
            return True
    except (OSError, ValueError):
        return False


def check_kit(kit: Path, config: SiteConfig) -> str:
    """Check that a kit belongs to this site; return the hub's address."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        check_whole(kit, "site")
        federation, host, port = address(kit / "startup")
        certificate = x509.load_pem_x509_certificate((kit / "startup" / "client.crt").read_bytes())
        name = str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(
            f"{config.where}: kit = {config.kit!r} is not a valid site kit ({error}): put the kit from the "
            "hub's organisation there"
        ) from None
    for key, own in (("federation", federation), ("name", name)):
        if (written := getattr(config, key)) != own:
            owner = "federation" if key == "federation" else "site"
            raise ConfigError(
                f"{config.where}: {key} = {written!r}: the kit in {kit} belongs to {owner} {own!r}: set "
                f"{key} = {json.dumps(own)}, or put this site's kit there"
            )
    return f"{host}:{port}"
