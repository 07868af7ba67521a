#!/usr/bin/env python3
"""The pictures of the README and the documentation: what `prefed demo` prints, and the page of its run.

    python scripts/pictures.py              # the page of the demo's run: docs/pictures/run-*.png
    python scripts/pictures.py --model HuggingFaceTB/SmolLM2-135M-Instruct
                                            # the terminal of the demo on a chat model, a folder or a hub
                                            # name: docs/pictures/demo-*.svg
    python scripts/pictures.py --demo DIR   # the demo runs in a folder that stays

The page is drawn by Debian's chromium through Playwright (`pip install playwright`).
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME, TerminalTheme

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
COLUMNS, ROWS = 110, 40
WIDTH, BELOW = 1280, 16
COLORS = 96
LIGHT = TerminalTheme(
    (250, 250, 250),
    (36, 41, 47),
    [
        (36, 41, 47),
        (207, 34, 46),
        (17, 99, 41),
        (122, 78, 0),
        (9, 105, 218),
        (130, 80, 223),
        (27, 124, 131),
        (110, 119, 129),
    ],
)
# An image on a page may load nothing: the reader's own monospaced font stands in for rich's.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}|<!--.*?-->", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code, monospace", "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
)


class Recorder(Console):
    """A console that wraps long lines as a terminal does, where rich leaves that to the terminal."""

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        """Print with ``soft_wrap`` off."""
        super().print(*objects, **options)


def demo(folder: Path, model: str | None) -> Console:
    """Run the demo, and return the console that has recorded what it printed."""
    from prefed.trackers import terminal
    from prefed.ui.cli.demo import demo

    # A terminal that can draw no bar: what a bar would leave on the screen is all that is recorded.
    os.environ["TERM"] = "dumb"
    console = Recorder(
        record=True, width=COLUMNS, height=ROWS, file=io.StringIO(), force_terminal=True, highlight=False
    )
    terminal.stdout_console = lambda: console
    console.print(
        "[bold]$ make demo[/bold]" if model is None else f"[bold]$ prefed demo --model {model}[/bold]"
    )
    if model is not None and Path(model).is_dir():
        model = str(Path(model).resolve())
    here = Path.cwd()
    os.chdir(folder)
    try:
        demo(Path("prefed-demo"), model=model)
    finally:
        os.chdir(here)
    return console


def draw_terminal(console: Console, out: Path) -> None:
    """What the console has recorded, as SVG for light and for dark pages."""
    for name, theme in {"light": LIGHT, "dark": SVG_EXPORT_THEME}.items():
        path = out / f"demo-{name}.svg"
        # A fixed name for its styles: the same output gives the same file.
        console.save_svg(
            str(path), title="prefed demo", theme=theme, code_format=FORMAT, unique_id="demo", clear=False
        )
        print(f"{path}: {path.stat().st_size:,} bytes")


def draw_page(page: Path, out: Path) -> None:
    """A run's page down to its first plot, as PNG in both colour schemes."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in ("light", "dark"):
            scheme: Any = name
            view = browser.new_page(viewport={"width": WIDTH, "height": WIDTH}, color_scheme=scheme)
            view.goto(page.resolve().as_uri())
            plot = view.locator("figure").first.bounding_box()
            if plot is None:
                sys.exit(f"{page}: no plot is shown on the page")
            clip: Any = {"x": 0, "y": 0, "width": WIDTH, "height": plot["y"] + plot["height"] + BELOW}
            shot = Image.open(io.BytesIO(view.screenshot(clip=clip, full_page=True))).convert("RGB")
            path = out / f"run-{name}.png"
            shot.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
            print(f"{path}: {path.stat().st_size:,} bytes")
        browser.close()


def main() -> None:
    """Parse the arguments and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--demo", type=Path, metavar="DIR", help="where the demo runs (default: a temporary folder)"
    )
    parser.add_argument("--model", help="a chat model: a folder or a hub name (default: the demo's own)")
    parser.add_argument("--out", type=Path, default=PICTURES, help="default: docs/pictures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.demo or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        console = demo(folder, args.model)
        if args.model:
            draw_terminal(console, args.out)
            return
        try:
            draw_page(folder / "prefed-demo" / "run-fedsdg" / "report.html", args.out)
        except ImportError as error:
            sys.exit(f"{error}: the run's page is drawn with Playwright and Pillow")


if __name__ == "__main__":
    main()
