"""Griffe extension: docstrings in Sphinx's markup become Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`(~?)([\w.]+)`")
_EXAMPLE = re.compile(r"^>>> .*(?:\n.*\S.*)*", re.MULTILINE)


def markdown(text: str) -> str:
    """A docstring whose roles are links, whose examples are code blocks, and with ``:`` for each ``::``.

    A link to something without a page, for instance a private name, stays plain text.

    >>> markdown("see :class:`~prefed.core.Phase`::")
    'see <autoref identifier="prefed.core.Phase" optional><code>Phase</code></autoref>:'
    """

    def link(match: re.Match[str]) -> str:
        short, target = match.groups()
        text = target.rpartition(".")[2] if short else target
        return f'<autoref identifier="{target}" optional><code>{text}</code></autoref>'

    text = re.sub(r"::$", ":", _ROLE.sub(link, text), flags=re.MULTILINE)
    return _EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", text)


class Roles(griffe.Extension):
    """Rewrites every docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe calls this for each object it has read."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
