r"""MkDocs hook: formulas become MathML while pages are built, so that readers need no script and no network.

Arithmatex marks ``$…$`` and ``$$…$$`` in a page, and this hook translates each marked formula. A formula that
cannot be translated ends the build.
"""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ET
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_NAME = re.compile(r"[a-z]{2,}")
_SPACE = "http://www.w3.org/1998/Math/MathML"
_ROWS = {f"{{{_SPACE}}}{tag}" for tag in ("math", "mrow", "mtd", "mstyle")}


class FormulaError(ValueError):
    """A formula that cannot be translated."""


def mathml(formula: str, *, block: bool) -> str:
    """``formula`` (LaTeX, without its delimiters) as a ``<math>`` element.

    Raises:
        FormulaError: it holds something that the translator does not know.
    """
    # The translator knows only the starred environment, which looks the same in display mode.
    text = re.sub(r"\\(begin|end)\{aligned\}", r"\\\1{align*}", formula.strip())
    try:
        root = ET.fromstring(convert(text, display="block" if block else "inline"))
    except Exception as error:
        raise FormulaError(f"{formula!r}: {error}") from error
    unknown = _COMMAND.findall("".join(root.itertext()))
    if unknown:
        raise FormulaError(f"{formula!r}: unknown {', '.join(unknown)}")
    for element in list(root.iter()):
        if element.tag == f"{{{_SPACE}}}mo" and _NAME.fullmatch(element.text or ""):
            element.tag = f"{{{_SPACE}}}mi"
        if element.tag in _ROWS:
            _set_apart(element)
    ET.register_namespace("", _SPACE)
    return ET.tostring(root, encoding="unicode")


def _set_apart(row: ET.Element) -> None:
    """Put a space between the name of a function and an argument without brackets."""
    for index in reversed(range(len(row) - 1)):
        name, after = row[index][0] if len(row[index]) else row[index], row[index + 1]
        is_name = name.tag.endswith(("}mi", "}mo")) and _NAME.fullmatch(name.text or "")
        if is_name and after.text not in {"(", "["} and not after.tag.endswith("}mspace"):
            row.insert(index + 1, ET.Element(f"{{{_SPACE}}}mspace", width="0.167em"))


def translate(content: str) -> str:
    """A page's HTML with every marked formula in place."""

    def one(match: re.Match[str]) -> str:
        formula = html.unescape(match[2]).strip()
        return mathml(formula[2:-2], block=formula.startswith(r"\["))

    return _FORMULA.sub(one, content)


def on_page_content(content: str, *, page: Any, **_: Any) -> str:
    """MkDocs calls this with each page's HTML."""
    try:
        return translate(content)
    except FormulaError as error:
        raise FormulaError(f"{page.file.src_uri}: {error}") from error
