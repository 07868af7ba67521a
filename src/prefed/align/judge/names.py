"""Names of judges."""

from __future__ import annotations

from collections.abc import Mapping

from prefed.core.plugins import OWN, entry_points, is_code
from prefed.core.text import did_you_mean

ARGUMENTS: Mapping[str, str] = {
    "reward": "FOLDER",
    "endpoint": "MODEL",
    "local": "FOLDER",
    "selector": "RUN",
    "utility": "",
    "people": "FOLDER",
}
"""Name → metavariable of the argument in ``NAME:ARGUMENT``; empty without an argument."""
ALIKE = ("reward", "endpoint", "local")
"""Judges that have no taste and judge alike for all clients."""


def split_name(text: str) -> tuple[str, str]:
    """Split the name and the argument of a judge.

    Raises:
        ValueError: there is no such judge, or an argument is missing or superfluous.

    >>> split_name("endpoint:org/model:free"), split_name("utility")
    (('endpoint', 'org/model:free'), ('utility', ''))
    """
    name, _, argument = text.partition(":")
    if name not in ARGUMENTS and ((is_code(text) and "." in name) or text in entry_points("judges")):
        return text, ""
    known = ", ".join(f"{judge}:{what}" if what else judge for judge, what in ARGUMENTS.items())
    if name not in ARGUMENTS:
        raise ValueError(f"--judge {text!r}: the judges are {known}{did_you_mean(name, ARGUMENTS)}; {OWN}")
    if bool(argument) != bool(ARGUMENTS[name]):
        form = f"{name}:{ARGUMENTS[name]}" if ARGUMENTS[name] else name
        raise ValueError(f"--judge {text!r}: write it as {form}")
    return name, argument
