"""Pages from templates: what may stand in them, and what a browser may do with them.

A template cannot be given text that changes the page. Jinja escapes every value for HTML, and writes out the
control characters that names from elsewhere may have. The page's own policy lets a browser run the one script
that stands in it, by its digest, and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from prefed.core.text import printable_lines
from prefed.ui.pages.chart import DARK, LIGHT
from prefed.ui.pages.svg import csv_address, drawings

SCRIPT = "page.js"


def render_template(template: str, /, **values: Any) -> str:
    """The page that a template makes of ``values``. It is an error if the template needs another value."""
    return environment().get_template(template).render(values)


@cache
def environment() -> Environment:
    """The templates of ``report/templates``, with the script, the policy and the themes for all of them."""
    loader = PackageLoader("prefed.ui.pages")
    made = Environment(
        loader=loader,
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals |= {"light": LIGHT, "dark": DARK, "drawings": drawings, "csv_address": csv_address}
    script = loader.get_source(made, SCRIPT)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    made.globals["script"] = Markup(script)
    made.globals["policy"] = "; ".join(
        (
            "default-src 'none'",
            f"script-src 'sha256-{digest}'",
            "style-src 'unsafe-inline'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return made


def _visible(value: Any) -> Any:
    """Jinja calls this with every value of a page before it escapes it. Macros give markup, which stays."""
    return printable_lines(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
