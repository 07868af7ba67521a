"""HTML pages from Jinja templates.

Values are escaped, including control characters. The content security policy allows only the page's own
script, by digest, and no external resources.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from prefed.core.text import printable_lines
from prefed.ui.pages.chart_data import DARK, LIGHT
from prefed.ui.pages.svg import csv_address, drawings
from prefed.ui.templates import allowed, make_environment, source


def render_template(template: str, /, **values: Any) -> str:
    """Render a template. Missing values are errors."""
    return environment().get_template(template).render(values)


@cache
def environment() -> Environment:
    """The Jinja environment, with the script, the policy and the themes as globals."""
    made = make_environment("prefed.ui.pages", autoescape=True, finalize=_visible)
    made.globals |= {"light": LIGHT, "dark": DARK, "drawings": drawings, "csv_address": csv_address}
    script = source(made, "page.js")
    made.globals["script"] = Markup(script)
    made.globals["policy"] = "; ".join(
        (
            "default-src 'none'",
            f"script-src {allowed(script)}",
            "style-src 'unsafe-inline'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return made


def _visible(value: Any) -> Any:
    """Escape control characters in a value, except in markup from macros."""
    return printable_lines(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
