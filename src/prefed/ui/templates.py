"""Jinja environments for pages and model cards, and sources of a content security policy."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def make_environment(package: str, **options: Any) -> Environment:
    """Make the environment of the templates in a package. Missing values are errors."""
    return Environment(
        loader=PackageLoader(package),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **options,
    )


def source(environment: Environment, name: str) -> str:
    """Read a file next to the templates, such as a script."""
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def allowed(text: str) -> str:
    """The source of an inline script or style for a content security policy: its digest."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
