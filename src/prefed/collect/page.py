"""The page: whole without its script, which adds keys and looks whether the model is ready."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from prefed.collect.session import STRENGTHS, Session


def state_of(session: Session) -> str:
    """What the page shows next: ``name``, ``pair``, ``wait`` or ``end``."""
    if session.client is None:
        return "name"
    if session.current() is not None:
        return "pair"
    progress = session.progress()
    return "wait" if progress.done < progress.of and session.failure is None else "end"


def render(session: Session, state: str, *, typed: bool, problem: str | None = None) -> str:
    """The page in a state, which is one of :func:`state_of`, or ``finished``.

    Args:
        typed: whether the person may type prompts.
        problem: what is wrong, in words.
    """
    progress = session.progress()
    number = min(progress.done + 1, progress.of)
    title = f"Pair {number} of {progress.of}" if state == "pair" else TITLES[state]
    if session.failure is not None and state == "end":
        problem = f"The model stopped: {session.failure}"
    return _render(
        state=state,
        title=title,
        problem=problem,
        client=session.client,
        progress=None if session.client is None else progress,
        of=progress.of,
        shown=session.current() if state == "pair" else None,
        strengths=STRENGTHS,
        typed=typed,
        out=session.choices.path,
        agreement=session.agreement() if state in ("end", "finished") else None,
    )


def render_refusal() -> str:
    """The page for a browser without a link. It says nothing of the session."""
    names = ("problem", "progress", "typed", "agreement")
    return _render(state="refused", title=TITLES["refused"], **dict.fromkeys(names))


TITLES = {
    "refused": "No link",
    "name": "Your name",
    "wait": "The model is writing",
    "end": "The end",
    "finished": "Thank you",
}


@cache
def policy() -> str:
    """The content security policy: the style and the script that stand in the page, by their digests."""

    def allowed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assets = _assets()
    return "; ".join(
        (
            "default-src 'none'",
            f"style-src {allowed(assets['css'])}",
            f"script-src {allowed(assets['script'])}",
            "connect-src 'self'",
            "form-action 'self'",
            "img-src data:",
            "base-uri 'none'",
            "frame-ancestors 'none'",
        )
    )


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("prefed.collect"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _assets() -> dict[str, Any]:
    """What stands in the page as it is in its file."""
    environment = _environment()
    loader = environment.loader
    assert loader is not None
    files = {"css": "collect.css", "script": "collect.js"}
    return {name: Markup(loader.get_source(environment, file)[0]) for name, file in files.items()}


def _render(**values: Any) -> str:
    text: str = _environment().get_template("collect.html").render(**_assets(), **values)
    return text
