"""A site's connection to its hub: NVIDIA FLARE's client, started again whenever it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from prefed.config import ConfigError
from prefed.federation.config import SiteConfig
from prefed.federation.door import Door
from prefed.federation.flare.apps import SITE_DOOR
from prefed.federation.flare.kits import HEARTBEAT, organisation_of
from prefed.federation.flare.process import CLIENT, FlareProcess, longest
from prefed.federation.site import Site

LONGEST_PAUSE = 30.0
"""Seconds between two starts at most."""


def take_part(config: SiteConfig, tell: Callable[[str], None]) -> None:
    """Answer the hub's requests until this process is interrupted.

    Raises:
        ConfigError: the kit is missing, or that of another site.
        StoreError: another process uses the site's state folder.
    """
    kit = Path(config.kit)
    hub = _check_kit(kit, config)
    site, pause = Site(config, tell), 1.0
    process: FlareProcess | None = None
    tell(f"site {config.name} of {config.federation}: waiting for the hub at {hub}; Ctrl-C ends")
    with Door(site.answer) as door:
        settings = [f"uid={config.name}", f"org={organisation_of(config.name)}"]
        settings.append(f"heart_beat_interval={HEARTBEAT}")
        environment = {SITE_DOOR: str(door.path), **longest(config.limits.message_mb)}
        try:
            while True:
                begun = time.monotonic()
                process = FlareProcess(CLIENT, kit, settings, environment)
                while process.alive:
                    time.sleep(0.5)
                # A hub that is away ends it after a while; one that runs for long has met its hub.
                pause = 1.0 if time.monotonic() - begun > LONGEST_PAUSE else min(2 * pause, LONGEST_PAUSE)
                time.sleep(pause)
        finally:
            if process is not None:
                process.stop()
            site.close()


def _check_kit(kit: Path, config: SiteConfig) -> str:
    """The hub's address, from the kit."""
    path = kit / "startup" / "fed_client.json"
    try:
        server = json.loads(path.read_text("utf-8"))["servers"][0]
        address: str = server["service"]["target"]
        federation: str = server["name"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{kit} is no kit of a site ({error}): put there what the hub gave you") from None
    if federation != config.federation:
        raise ConfigError(f"{kit} is a kit of the federation {federation!r}, not {config.federation!r}")
    return address
