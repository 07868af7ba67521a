"""How long chromium takes to show the next pair of ``prefed collect``, with responses ready.

First contentful paint, as the browser itself counts it from the request on. Needs Playwright and chromium.

    python benchmarks/collect.py --pairs 200
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PAINT = "() => performance.getEntriesByName('first-contentful-paint').map(entry => entry.startTime)[0]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200, help="pairs that wait to be judged")
    parser.add_argument("--views", type=int, default=10, help="how often a pair is shown")
    args = parser.parse_args()
    if importlib.util.find_spec("playwright") is None:
        print("left out: there is no Playwright here (pip install playwright)")
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        texts = ("Which colour for the kitchen? ", "A warm white. ", "Whatever you like best. ")
        rows = [
            dict(zip(("prompt", "chosen", "rejected"), (f"{text * 8}{k}" for text in texts), strict=True))
            for k in range(args.pairs)
        ]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = [
            "collect",
            "--from",
            folder / "pairs.jsonl",
            "--out",
            folder / "out.jsonl",
            "--client",
            "ann",
        ]
        command = [sys.executable, "-m", "prefed", *map(str, words)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        link = next(line.strip() for line in process.stdout if line.strip().startswith("http"))
        try:
            print(f"first contentful paint: {sorted(paints(link, args.views))} ms")
        finally:
            process.terminate()
            process.wait()


def paints(link: str, views: int) -> list[float]:
    """Milliseconds until each view of a pair; each pair is answered, so that the next one is shown."""
    from playwright.sync_api import sync_playwright

    found = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(link)
        for _ in range(views):
            page.goto(link.partition("?")[0])
            page.wait_for_function(f"({PAINT})() !== undefined")
            found.append(round(page.evaluate(PAINT), 1))
            page.keyboard.press("1")
            page.wait_for_timeout(300)
        browser.close()
    print(f"median of {views} views: {statistics.median(found):.0f} ms")
    return found


if __name__ == "__main__":
    main()
