"""The HTML page of ``prefed collect``. JavaScript is optional: it adds shortcuts and automatic reloads."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from prefed.data import Prompt
from prefed.ui.collect.session import STRENGTHS, Session
from prefed.ui.templates import allowed, make_environment, source


def state_of(session: Session) -> str:
    """The current state of the page: ``name``, ``pair``, ``wait`` or ``end``."""
    if session.client is None:
        return "name"
    if session.current() is not None:
        return "pair"
    progress = session.progress()
    return "wait" if progress.done < progress.of and session.failure is None else "end"


def render(session: Session, state: str, *, typed: bool, problem: str | None = None) -> str:
    """Render the page.

    Args:
        state: a value of :func:`state_of`, or ``finished``.
        typed: whether the annotator may type prompts.
    """
    progress = session.progress()
    shown = session.current() if state == "pair" else None
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
        shown=shown,
        turns=turns(shown.question.prompt) if shown is not None else [],
        strengths=STRENGTHS,
        typed=typed,
        out=session.choices.path,
        thumbs=None if session.thumbs is None else session.thumbs.path,
        agreement=session.agreement() if state in ("end", "finished") else None,
    )


ROLES = {"user": "Person", "human": "Person", "assistant": "Assistant", "system": "Instructions"}
"""Role of a turn → label on the page."""
_TURN = re.compile(r"(?:^|\n)\s*(Human|Assistant):")


def turns(prompt: Prompt) -> list[tuple[str, str]]:
    r"""Split a prompt into turns: label and text. A single turn has an empty label.

    Text in the "Human: … Assistant:" format is split as well.

    >>> turns("\n\nHuman: Hello\n\nAssistant: Hi\n\nHuman: Why?\n\nAssistant:")
    [('Person', 'Hello'), ('Assistant', 'Hi'), ('Person', 'Why?')]
    >>> turns("Q: Human: why?")
    [('', 'Q: Human: why?')]
    """
    if isinstance(prompt, str):
        dialogue = prompt.rstrip().endswith("Assistant:")
        first, *parts = _TURN.split(prompt) if dialogue else [prompt]
        known = [("", first), *zip(parts[::2], parts[1::2], strict=True)]
    else:
        known = [(turn.role, turn.content) for turn in prompt]
    read = [(ROLES.get(role.lower(), role), text.strip()) for role, text in known if text.strip()]
    return [("", read[0][1])] if len(read) == 1 else read


def render_refusal() -> str:
    """The page for a browser without a valid link. It reveals nothing about the session."""
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
    """The content security policy, which allows only the page's own style and script, by digest."""
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
    return make_environment("prefed.ui.collect", autoescape=True)


@cache
def _assets() -> dict[str, Any]:
    files = {"css": "collect.css", "script": "collect.js"}
    return {name: Markup(source(_environment(), file)) for name, file in files.items()}


def _render(**values: Any) -> str:
    text: str = _environment().get_template("collect.html").render(**_assets(), **values)
    return text
