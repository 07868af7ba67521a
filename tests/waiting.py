"""Waits of tests. They end when what they wait for happens, however busy the machine is."""

import time

WATCHDOG = 7200.0
"""Seconds after which a wait counts as endless: hours, so that no correct run takes as long. Shorter than
pytest's own ``timeout`` in pyproject.toml, which would end the whole process."""


def until(happened, what, every=0.02):
    """Wait until ``happened()`` is true, and return its value."""
    end = time.monotonic() + WATCHDOG
    while not (value := happened()):
        assert time.monotonic() < end, f"waited {WATCHDOG:g} s for {what}"
        time.sleep(every)
    return value
