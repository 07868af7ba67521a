"""Plots as SVG that stands in a page: its colours follow the page's, and its values show where one points.

Matplotlib draws and writes the SVG. What is done to it here:

- colours of the theme become the variables of ``page.css``, so one drawing serves light and dark screens;
- texts that :func:`~prefed.ui.pages.drawing.tell` gave to an artist become titles of what it drew;
- letters have the page's font, and what says nothing to a browser is left out.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import TYPE_CHECKING

from prefed.core.text import printable_lines
from prefed.ui.pages.drawing import LIGHT, TOLD, Theme, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NARROW = 3.7
"""Inches of a plot for a phone. A point of its letters is then about as large as one of the page's."""
COLUMNS = 2
"""Columns of a legend in a narrow plot at most."""
NUMBERED = 6
"""Columns of a narrow map that have room for their numbers."""

_VARIABLES = {
    LIGHT.text: "var(--text)",
    LIGHT.quiet: "var(--plot-quiet)",
    **{color: f"var(--plot-{number})" for number, color in enumerate(LIGHT.lines, 1)},
}
_COLOR = re.compile("|".join(_VARIABLES), re.IGNORECASE)
_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_NUMERIC = ("d", "x", "y", "width", "height", "transform")


def inline(draw: Callable[[Theme], Figure], salt: str) -> tuple[str, str, Figure]:
    """Draw a plot for a page; equal plots give equal texts.

    Args:
        draw: draws it in a theme.
        salt: tells this plot's names within the page from those of others.

    Returns:
        The plot as an ``<svg>`` element, a narrow version of it, and the figure.
    """
    from matplotlib import rc_context

    versions = []
    with style(LIGHT):
        figure = draw(LIGHT)
        for width in ("wide", "narrow"):
            if width == "narrow":
                make_narrow(figure)
            buffer = BytesIO()
            with rc_context({"svg.hashsalt": f"{printable_lines(salt)} {width}", "svg.fonttype": "none"}):
                figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
            # Names of figures are the method's: what they hold besides letters would break the page.
            versions.append(_cleaned(printable_lines(buffer.getvalue().decode())))
    return versions[0], versions[1], figure


def make_narrow(figure: Figure) -> None:
    """Make a figure as wide as a phone: axes that stand side by side come one below the other."""
    from matplotlib.collections import QuadMesh
    from matplotlib.gridspec import GridSpec

    _, height = figure.get_size_inches()
    axes = [each for each in figure.axes if each.get_subplotspec() is not None]
    specs = [each.get_subplotspec() for each in axes]
    rows, columns = specs[0].get_gridspec().get_geometry() if specs and specs[0] else (1, 1)
    if columns > 1:
        seen = [each for each in axes if each.get_visible()]
        grid = GridSpec(len(seen), 1, figure=figure)
        for number, each in enumerate(seen):
            each.set_subplotspec(grid[number])
        height *= len(seen) / rows
    figure.set_size_inches(NARROW, height)
    for legend in list(figure.legends):
        above = legend.get_window_extent().y0 > figure.bbox.height / 2
        texts = [text.get_text() for text in legend.get_texts()]
        legend.remove()
        handles = [handle for handle in legend.legend_handles if handle is not None]
        if above:
            figure.legend(handles, texts, loc="outside upper center", ncols=COLUMNS)
        else:
            figure.legend(handles, texts, loc="outside lower center", ncols=COLUMNS)
    for each in figure.axes:
        maps = [drawn for drawn in each.collections if isinstance(drawn, QuadMesh)]
        if maps and len(each.get_xticks()) > NUMBERED:
            for text in each.texts:
                text.set_visible(False)


def _cleaned(text: str) -> str:
    """The SVG that matplotlib wrote, as it stands in a page."""
    root = ET.fromstring(text.encode())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith("}metadata") or child.tag.endswith("}style"):
                parent.remove(child)
    referred = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    for element in root.iter():
        element.tag = element.tag.partition("}")[2]
        _clean_attributes(element, referred)
    for group in list(root.iter("g")):
        told = group.attrib.pop("data-told", None)
        if told is not None:
            _add_titles(group, json.loads(told))
    _drop_bare_groups(root)
    root.tail = None
    # Their sizes are those of the page.
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    return re.sub(r">\s+<", "><", ET.tostring(root, encoding="unicode"))


def _clean_attributes(element: ET.Element, referred: set[str]) -> None:
    attributes = {name.partition("}")[2] or name: value for name, value in element.attrib.items()}
    name = attributes.get("id", "")
    if name.startswith(TOLD):
        attributes["data-told"] = name.removeprefix(TOLD)
    if name not in referred:
        attributes.pop("id", None)
    for key in _NUMERIC:
        if key in attributes:
            short = _NUMBER.sub(
                lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), attributes[key]
            )
            attributes[key] = re.sub(r"\s*\n", " ", short).strip()
    if "style" in attributes:
        plain = re.sub(r"font-family:[^;]*;? ?", "", attributes["style"])
        attributes["style"] = _COLOR.sub(lambda match: _VARIABLES[match[0].lower()], plain)
    element.attrib.clear()
    element.attrib.update(attributes)


def _add_titles(group: ET.Element, texts: list[str]) -> None:
    """Give the elements that ``group`` draws a title each, in their order."""
    for (parent, place, element), text in zip(list(_drawn(group)), texts, strict=False):
        titled = ET.Element("g")
        ET.SubElement(titled, "title").text = text
        titled.append(element)
        parent[place] = titled


def _drawn(group: ET.Element) -> Iterator[tuple[ET.Element, int, ET.Element]]:
    """What a group draws: the parent, the place in it, and the element."""
    for place, element in enumerate(group):
        if element.tag in ("path", "use"):
            yield group, place, element
        elif element.tag == "g":
            yield from _drawn(element)


def _drop_bare_groups(element: ET.Element) -> None:
    """Put what is in groups without any attribute or title in their place."""
    children = []
    for child in element:
        _drop_bare_groups(child)
        bare = child.tag == "g" and not child.attrib and child.find("title") is None
        children.extend(list(child) if bare else [child])
    element[:] = children
