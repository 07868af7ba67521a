"""Charts as PNG, SVG or PDF files, drawn with matplotlib."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prefed.core import files
from prefed.ui.pages.chart_data import BARS, CIVIDIS, LIGHT, Axis, Bars, Cells, Chart, Line, Panel, short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCRIPTS = (
    *(f"Noto Sans CJK {place}" for place in ("SC", "TC", "JP", "KR", "HK")),
    *(f"Noto Sans {place}" for place in ("SC", "TC", "JP", "KR", "HK")),
    *("Source Han Sans SC", "Source Han Sans", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei"),
    *("Droid Sans Fallback", "PingFang SC", "Hiragino Sans", "Apple SD Gothic Neo", "Microsoft YaHei"),
    *("Yu Gothic", "Malgun Gothic", "SimHei", "Arial Unicode MS", "Unifont"),
)
"""Common system fonts with Chinese, Japanese and Korean characters."""
WIDTH, INCH = 8.0, 85.0
"""Width of a plot in inches, and pixels of panel height per inch."""


NEEDS = "needs the package matplotlib: pip install 'prefed[plots]'"


def installed() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def file_format(path: Path) -> str:
    """The format of a plot by its extension: ``"png"``, ``"svg"`` or ``"pdf"``.

    Raises:
        ValueError: another extension, the path is a folder, or matplotlib is not installed.
    """
    name = path.suffix.lower().removeprefix(".")
    if name not in ("png", "svg", "pdf"):
        raise ValueError(f"{path}: the name of a plot must end in .png, .svg or .pdf")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file for the plot")
    if not installed():
        raise ValueError(f"{path}: a plot {NEEDS}")
    return name


def save(chart: Chart, path: Path) -> None:
    """Write a chart to a file, with its panels stacked.

    Raises:
        ValueError: see :func:`file_format`.
    """
    name = file_format(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    quiet, text = LIGHT.quiet, LIGHT.text
    style: Any = {
        "font.family": _fonts(),
        "font.size": 9,
        **{"axes.titlesize": 9.5, "axes.titleweight": "bold", "axes.titlelocation": "left"},
        **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True},
        **{"axes.axisbelow": True, "axes.edgecolor": quiet, "grid.color": quiet, "grid.alpha": 0.25},
        **{f"{place}.color": text for place in ("text", "xtick", "ytick")},
        **{"axes.labelcolor": text, "axes.titlecolor": text, "svg.hashsalt": chart.name},
        **{"legend.frameon": False, "legend.fontsize": 8.5, "legend.handlelength": 3.0},
    }
    buffer = BytesIO()
    with warnings.catch_warnings(), rc_context(style):
        # Characters missing from all fonts are drawn as boxes, without a warning for each.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        heights = [panel.height / INCH for panel in chart.panels]
        figure = Figure(figsize=(WIDTH, sum(heights) + 0.4), layout="constrained")
        grid: Any = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
        for axes, panel in zip(grid.flat, chart.panels, strict=True):
            _draw(axes, panel)
        handles, labels = grid.flat[0].get_legend_handles_labels()
        if labels:
            columns = 3 if max(map(len, labels)) < 24 else 1
            figure.legend(handles, labels, loc="outside upper left", ncols=columns)
        metadata = {"Date": None} if name == "svg" else None
        figure.savefig(buffer, format=name, dpi=160, facecolor=LIGHT.page, metadata=metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, buffer.getvalue())


@cache
def _fonts() -> list[str]:
    """Matplotlib's default font, with the installed fonts of :data:`SCRIPTS` as fallbacks."""
    from matplotlib import font_manager, rcParamsDefault

    installed = set(font_manager.get_font_names())
    return [*rcParamsDefault["font.family"], *(name for name in SCRIPTS if name in installed)]


def _draw(axes: Axes, panel: Panel) -> None:
    for each in panel.shown:
        if isinstance(each, Line):
            _line(axes, each)
        elif isinstance(each, Bars):
            _bars(axes, each)
        else:
            _cells(axes, each)
    if panel.x.log:
        axes.set_xscale("log")
    if panel.y.log:
        axes.set_yscale("log", nonpositive="mask")
    _axis(axes.xaxis, panel.x)
    _axis(axes.yaxis, panel.y)
    if panel.y.names:
        axes.set_ylim(len(panel.y.names) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
    if panel.x.zero:
        axes.set_xlim(left=0)
        axes.margins(x=0.35 if any(isinstance(e, Bars) and e.texts for e in panel.shown) else None)
    if panel.at_x is not None:
        axes.axvline(panel.at_x, color=LIGHT.quiet)
    if panel.at_y is not None:
        axes.axhline(panel.at_y, color=LIGHT.quiet)
    if ends := panel.diagonal_ends:
        axes.plot(ends, ends, ":", color=LIGHT.quiet)
    axes.set_title(_plain(panel.title))


def _line(axes: Axes, line: Line) -> None:
    x, y = np.array(line.points, dtype=np.float64).reshape(-1, 2).T
    color, look = _color(line.look.color), line.look
    form: Any = {"color": color, "linewidth": 0.7 * look.width, "label": _plain(line.name) or None}
    if line.low:
        axes.fill_between(x, line.low, line.high, color=color, alpha=0.15, linewidth=0)
    if line.step:
        axes.step(x, y, where="post", **form)
    else:
        dashes: Any = (0, [float(part) for part in look.dash.split()]) if look.dash else "-"
        marker = "o" if len(x) <= BARS or not line.joined else ""
        axes.plot(x, y, linestyle=dashes if line.joined else "", marker=marker, markersize=3.5, **form)


def _bars(axes: Axes, bars: Bars) -> None:
    at, start, end = np.array(bars.spans, dtype=np.float64).reshape(-1, 3).T
    look: Any = {"color": _color(bars.color), "alpha": 0.45 if bars.faint else None}
    look["label"] = _plain(bars.name) or None
    if bars.lying:
        axes.barh(at, end - start, bars.thickness, left=start, **look)
    else:
        axes.bar(at, end - start, bars.thickness, bottom=start, **look)
    for text, place, x in zip(bars.texts, at, end, strict=False):
        axes.annotate(f" {_plain(text)}", (x, place), va="center", fontsize=8)


def _cells(axes: Axes, cells: Cells) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("cividis", (CIVIDIS / 255).tolist())
    values = np.array(cells.values, dtype=np.float64)
    rows, columns = (np.arange(count + 1) - 0.5 for count in values.shape)
    axes.pcolormesh(columns, rows, values, cmap=colors, vmin=cells.low, vmax=cells.high)


def _axis(drawn: Any, axis: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    drawn.set_label_text(_plain(axis.label))
    if axis.names:
        drawn.set_ticks(range(len(axis.names)), [_plain(short_name(name)) for name in axis.names])
        return
    drawn.set_major_formatter(lambda value, _: axis.write(value))
    if axis.whole:
        drawn.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def _color(number: int) -> str:
    return LIGHT.lines[number - 1] if number else LIGHT.quiet


def _plain(name: str) -> str:
    return name.replace("$", r"\$")
