"""A site's connection to its hub: NVIDIA FLARE's client, started again whenever it ends."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

from prefed.config import ConfigError
from prefed.federation.config import SiteConfig, check_places
from prefed.federation.door import Door
from prefed.federation.flare.apps import SITE_DOOR
from prefed.federation.flare.kits import HEARTBEAT, organisation_of
from prefed.federation.flare.process import CLIENT, FlareProcess, longest
from prefed.federation.site import Site

LONGEST_PAUSE = 30.0
"""Seconds between two starts at most."""
OFTEN = 2
"""Ends of FLARE's client, with the hub there and no request between them, of which a person is told."""


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
    site, pause, ends = Site(config, tell), 1.0, _Ends(hub, kit, tell)
    process: FlareProcess | None = None
    tell(f"site {config.name} of {config.federation}: waiting for the hub at {hub}; Ctrl-C ends")

    def answer(request: bytes) -> bytes:
        ends.forget()
        return site.answer(request)

    with Door(answer) as door:
        settings = [f"uid={config.name}", f"org={organisation_of(config.name)}"]
        settings.append(f"heart_beat_interval={HEARTBEAT}")
        environment = {SITE_DOOR: str(door.path), **longest(config.limits.message_mb)}
        try:
            while True:
                begun = time.monotonic()
                process = FlareProcess(CLIENT, kit, settings, environment)
                while process.alive:
                    time.sleep(0.5)
                ends.add()
                # One that ran for long had its hub, or tried by itself: it is begun again soon.
                pause = 1.0 if time.monotonic() - begun > LONGEST_PAUSE else min(2 * pause, LONGEST_PAUSE)
                time.sleep(pause)
        finally:
            if process is not None:
                process.stop()
            site.close()


class _Ends:
    """Tells, once, that FLARE's client ends again and again although the hub is there.

    Args:
        hub: its address, ``host:port``.
    """

    def __init__(self, hub: str, kit: Path, tell: Callable[[str], None]) -> None:
        self._hub, self._kit, self._tell = hub, kit, tell
        self._number = 0

    def forget(self) -> None:
        """The hub asks something, so the client had a session with it."""
        self._number = 0

    def add(self) -> None:
        """The client has ended."""
        if not _answers(self._hub):
            return
        self._number += 1
        if self._number == OFTEN:
            self._tell(
                f"the hub at {self._hub} answers, but NVIDIA FLARE's client ends each time without a session "
                f"with it: {self._kit / 'error_log.txt'} says why; trying again"
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
        settings = json.loads((kit / "startup" / "fed_client.json").read_text("utf-8"))
        server = settings["servers"][0]
        address: str = server["service"]["target"]
        federation: str = server["name"]
        certificate = x509.load_pem_x509_certificate((kit / "startup" / "client.crt").read_bytes())
        name = str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    except (OSError, ValueError, KeyError, IndexError) as error:
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
    return address
