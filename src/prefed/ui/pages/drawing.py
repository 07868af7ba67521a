"""What plots are drawn with: themes, canvases, lines, bars, axes, texts where one points, and files.

Each plot is a figure of its own, without pyplot and its global state. People with any colour vision can tell
its colours apart (Okabe and Ito 2008).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prefed.core import files
from prefed.core.text import printable

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BARS = 40
"""Clients that get a bar of their own at most; of more, the distribution is drawn."""

TOLD = "told:"
"""What the name of an artist begins with that tells what it shows; see :func:`tell`."""
TELLING = 120
"""Points of a curve that tell their values at most."""

SCRIPTS = (
    *(f"Noto Sans CJK {place}" for place in ("SC", "TC", "JP", "KR", "HK")),
    *(f"Noto Sans {place}" for place in ("SC", "TC", "JP", "KR", "HK")),
    *("Source Han Sans SC", "Source Han Sans", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei"),
    *("Droid Sans Fallback", "PingFang SC", "Hiragino Sans", "Apple SD Gothic Neo", "Microsoft YaHei"),
    *("Yu Gothic", "Malgun Gothic", "SimHei", "Arial Unicode MS", "Unifont"),
)
"""Fonts with Chinese, Japanese and Korean letters that systems come with."""


@dataclass(frozen=True)
class Theme:
    """Colours of plots, and of the page around them. A page has both themes, and its plots follow the screen.

    Attributes:
        text: of labels and titles.
        quiet: of grids, axes, and figures that others are compared with.
        page: behind the plot.
        lines: of runs and figures, in turn.
    """

    text: str
    quiet: str
    page: str
    lines: tuple[str, ...]


LIGHT = Theme(
    "#1f2328", "#8b949e", "#ffffff",
    ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#7a5195", "#444444"),
)  # fmt: skip
DARK = Theme(
    "#e6edf3", "#7d8590", "#0d1117",
    ("#56b4e9", "#ff9a3c", "#3fd6a4", "#e59ac6", "#f0e442", "#3b82f6", "#c3a6ff", "#c9d1d9"),
)  # fmt: skip


def file_format(path: Path) -> str:
    """The format that a plot's file name asks for: ``"png"``, ``"svg"`` or ``"pdf"``.

    Raises:
        ValueError: the name ends in something else, or is a folder's.
    """
    name = path.suffix.lower().removeprefix(".")
    if name not in ("png", "svg", "pdf"):
        raise ValueError(f"{path}: a plot's name ends in .png, .svg or .pdf")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file for the plot")
    return name


def save(draw: Callable[[Theme], Figure], path: Path, theme: Theme = LIGHT) -> None:
    """Write a plot as a file; the name's end says in which format, see :func:`file_format`.

    Raises:
        ValueError: the name ends in none.
    """
    name = file_format(path)
    buffer = BytesIO()
    with style(theme):
        figure = draw(theme)
        for artist in figure.findobj(lambda artist: (artist.get_gid() or "").startswith(TOLD)):
            artist.set_gid(None)
        figure.savefig(buffer, format=name, dpi=160, facecolor=theme.page)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, buffer.getvalue())


@cache
def _fonts() -> list[str]:
    """Matplotlib's own font, and for letters that it lacks those of :data:`SCRIPTS` that are installed."""
    from matplotlib import font_manager, rcParamsDefault

    installed = set(font_manager.get_font_names())
    return [*rcParamsDefault["font.family"], *(name for name in SCRIPTS if name in installed)]


@contextmanager
def style(theme: Theme) -> Iterator[None]:
    """Within it figures are drawn and written in the style of all plots."""
    from matplotlib import rc_context

    with (
        warnings.catch_warnings(),
        rc_context(
            {
                "font.family": _fonts(),
                "font.size": 9,
                "axes.titlesize": 9.5,
                "axes.titleweight": "bold",
                "axes.titlelocation": "left",
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.grid": True,
                "axes.axisbelow": True,
                "axes.edgecolor": theme.quiet,
                "axes.labelcolor": theme.text,
                "axes.titlecolor": theme.text,
                "axes.facecolor": "none",
                "grid.color": theme.quiet,
                "grid.alpha": 0.25,
                "grid.linewidth": 0.8,
                "lines.linewidth": 1.8,
                "lines.markersize": 3.5,
                "text.color": theme.text,
                "xtick.color": theme.text,
                "ytick.color": theme.text,
                "legend.frameon": False,
                "legend.fontsize": 8.5,
                "legend.handlelength": 3.0,
            }
        ),
    ):
        # A letter that no font has is drawn as a box; a warning for each would fill the terminal.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield


def canvas(
    width: float, height: float, rows: int = 1, columns: int = 1, heights: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    """An empty figure, ``width`` × ``height`` inches, and its axes row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    grid: Any = figure.subplots(rows, columns, squeeze=False, height_ratios=heights)
    return figure, list(grid.flat)


def color_of(theme: Theme, index: int, of: int) -> Any:
    """The colour of curve ``index`` of ``of`` curves: the theme's own if it has so many."""
    if of <= len(theme.lines):
        return theme.lines[index]
    from matplotlib import colormaps

    if of <= 20:
        return colormaps["tab20"](index)
    return colormaps["viridis"](0.1 + 0.85 * index / (of - 1))


def draw_line(
    axes: Axes,
    rounds: Sequence[int],
    values: Sequence[float],
    *,
    color: Any,
    style: str = "-",
    width: float | None = None,
    label: str | None = None,
    told: Sequence[str] | None = None,
) -> None:
    """A curve; up to :data:`BARS` points are marked.

    Args:
        width: in points; thin curves lie on wide ones.
        told: what each point shows, for :func:`tell_points`.
    """
    look: Any = {"color": color, "linewidth": width, "zorder": 2 - (width or 0.0) / 100, "label": label}
    axes.plot(rounds, values, style, marker="o" if len(rounds) <= BARS else "", **look)
    if told is not None:
        tell_points(axes, rounds, values, told)


def tell(artist: Artist, texts: Sequence[str]) -> None:
    """Say what each thing that an artist draws shows, in the order in which it draws them.

    On a page (:func:`prefed.ui.pages.inline_svg.inline`) a text shows where one points at its thing.
    """
    artist.set_gid(TOLD + json.dumps([printable(text) for text in texts]))


def tell_points(axes: Axes, x: Sequence[float], y: Sequence[float], texts: Sequence[str]) -> None:
    """Say what points show. One need not hit a point itself; of very many points some have a text."""
    every = -(-len(texts) // TELLING) if texts else 1
    targets = axes.scatter(x[::every], y[::every], s=110, alpha=0, linewidths=0)
    tell(targets, texts[::every])


Group = tuple[str, Any, Mapping[str, float]]
"""Accuracies that are drawn alike: a label, a colour, and client → accuracy."""


def draw_bars(axes: Axes, clients: Sequence[str], groups: Sequence[Group]) -> None:
    """Horizontal bars, one of each group per client, the first client at the top."""
    height = 0.8 / len(groups)
    at = np.arange(len(clients))[::-1]
    for index, (label, color, per_client) in enumerate(groups):
        values = [per_client.get(client) for client in clients]
        y = at + 0.4 - (index + 0.5) * height
        bars = axes.barh(y, [v or 0.0 for v in values], height * 0.9, color=color, label=label)
        for bar, client, value in zip(bars, clients, values, strict=True):
            tell(bar, [f"{client}, {label}: {'none' if value is None else f'{value:.1%}'}"])
        if len(groups) <= 4:
            for position, value in zip(y, values, strict=True):
                if value is not None:
                    axes.annotate(f" {value:.0%}", (value, position), va="center", fontsize=8)
    axes.set_yticks(at, [short_name(client) for client in clients])
    axes.set_ylim(-0.6, len(clients) - 0.4)
    axes.tick_params("y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.06)
    axes.set_xlabel("share of pairs")
    percent_axis(axes.xaxis)


def draw_distributions(axes: Axes, groups: Sequence[Group]) -> None:
    """For each accuracy the share of clients that have it or less, as steps."""
    for label, color, per_client in groups:
        values = np.sort(np.array(list(per_client.values()), dtype=np.float64))
        shares = np.arange(1, len(values) + 1) / len(values)
        axes.step(values, shares, where="post", color=color, label=label)
        told = [
            f"{label}: {share:.0%} of clients have at most {value:.1%}"
            for value, share in zip(values, shares, strict=True)
        ]
        tell_points(axes, values.tolist(), shares.tolist(), told)
    axes.set(xlabel="share of pairs", ylabel="clients with at most so much")
    percent_axis(axes.xaxis)
    percent_axis(axes.yaxis)


def short_name(name: str, most: int = 28) -> str:
    """A client's name for a plot: cut if it is long, and as :func:`plain_name`."""
    name = printable(name)
    return plain_name(name if len(name) <= most else f"{name[: most - 1]}…")


def plain_name(name: str) -> str:
    """A name for a plot: control characters written out, no mathematics."""
    return printable(name).replace("$", r"\$")


def legend(axes: Axes) -> None:
    """A legend, if any curve has a label."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="best")


def round_axis(axes: Axes) -> None:
    """Whole numbers along the horizontal axis."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def percent(value: float) -> str:
    """A share of pairs along an axis.

    >>> percent(0.5), percent(0.625)
    ('50%', '62.5%')
    """
    return f"{100 * value:.4g}%"


def percent_axis(axis: Axis) -> None:
    """Shares as percentages along an axis."""
    axis.set_major_formatter(lambda value, _: percent(value))
