"""A site's connection to its hub: NVIDIA FLARE's client, started again whenever it ends."""

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
"""Seconds between two starts at most."""
EVERY = 20.0
"""Seconds between two looks at whether FLARE has let the site in."""
LOOKS = 3
"""Looks in a row that find the hub there and the site not let in, after which a person is told."""


def take_part(config: SiteConfig, tell: Callable[[str], None]) -> None:
    """Answer the hub's requests until this process is interrupted.

    Raises:
        ConfigError: the kit is missing, or that of another site; or data or model are not where the site's
            file says.
        StoreError: another process uses the site's state folder.
    """
    kit = Path(config.kit)
    hub = _check_kit(kit, config)
    check_places(config)
    site, pause, watch = Site(config, tell), 1.0, _Watch(hub, kit, tell)
    process: FlareProcess | None = None
    tell(f"site {config.name} of {config.federation}: waiting for the hub at {hub}; Ctrl-C ends")

    def answer(request: bytes) -> bytes:
        watch.let_in()
        return b"" if request == REGISTERED else site.answer(request)

    with Door(answer) as door:
        settings = [f"uid={config.name}", f"org={organisation_of(config.name)}"]
        settings.append(f"heart_beat_interval={HEARTBEAT}")
        environment = {SITE_DOOR: str(door.path), **longest(config.limits.message_mb)}
        try:
            while True:
                begun = time.monotonic()
                watch.begin()
                process = FlareProcess(CLIENT, kit, settings, environment)
                while process.alive:
                    time.sleep(0.5)
                    watch.look()
                # One that ran for long had its hub, or tried by itself: it is started again soon.
                pause = 1.0 if time.monotonic() - begun > LONGEST_PAUSE else min(2 * pause, LONGEST_PAUSE)
                time.sleep(pause)
        finally:
            if process is not None:
                process.stop()
            site.close()


class _Watch:
    """Reports, once, that FLARE does not let the site in although the hub is there.

    FLARE's client tries for ever, or ends and is started again.

    Args:
        hub: its address, ``host:port``.
    """

    def __init__(self, hub: str, kit: Path, tell: Callable[[str], None]) -> None:
        self._hub, self._kit, self._tell = hub, kit, tell
        self._outside, self._reported = 0, False
        self._next = time.monotonic() + EVERY
        self.begin()

    def begin(self) -> None:
        """A client is about to start."""
        self._in = False

    def let_in(self) -> None:
        """The client is in."""
        self._in, self._outside, self._reported = True, 0, False

    def look(self) -> None:
        """Look at the hub's port, if it is time to."""
        if self._in or self._reported or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY
        self._outside = self._outside + 1 if _answers(self._hub) else 0
        if self._outside == LOOKS:
            self._reported = True
            with suppress(OSError):  # a screen that is gone or full must not end the site
                self._tell(
                    f"the hub at {self._hub} answers, but NVIDIA FLARE has not let this site in: log.txt "
                    f"and error_log.txt in {self._kit} say more, and the hub's log.txt; trying on"
                )


def _answers(hub: str) -> bool:
    host, _, port = hub.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5.0):
            return True
    except (OSError, ValueError):
        return False


def _check_kit(kit: Path, config: SiteConfig) -> str:
    """The hub's address, from the kit, which must be this site's."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        check_whole(kit, "site")
        federation, host, port = address(kit / "startup")
        certificate = x509.load_pem_x509_certificate((kit / "startup" / "client.crt").read_bytes())
        name = str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(
            f"{config.where}: kit = {config.kit!r} is no kit of a site ({error}): put there what the hub's "
            "organisation gave you"
        ) from None
    for key, own in (("federation", federation), ("name", name)):
        if (written := getattr(config, key)) != own:
            whose = f"of the federation {own!r}" if key == "federation" else f"that of {own!r}"
            raise ConfigError(
                f"{config.where}: {key} = {written!r}: the kit in {kit} is {whose}; write {key} = "
                f"{json.dumps(own)}, or put this site's own kit there"
            )
    return f"{host}:{port}"
