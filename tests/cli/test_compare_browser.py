"""The page over many runs in chromium: in both widths and colour schemes, and what pointing at it shows."""

from __future__ import annotations

import pytest

from browser import chromium as chromium
from browser import needs_chromium
from browser import screen as screen
from finished import write_run
from prefed.runs.finished_run import read_run
from prefed.train.metrics import federated_metric
from prefed.ui.pages.compare_page import write_comparison
from prefed.ui.pages.comparison_data import ChosenCase

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """Ten cases, the second with three seeds, one with a name that has no room, and a warning."""
    folder = tmp_path_factory.mktemp("runs")
    runs = []
    for k in range(10):
        for seed in range(3 if k == 1 else 1):
            clients = {f"client-{c}": (0.3, 0.4 + k / 50, 0.5 + (k + c) / 50) for c in range(12)}
            ends = {name: values[-1] for name, values in clients.items()}
            name = f"{'a-very-long-name-of-a-run-' * 4 * (k == 3)}case{k}-seed{seed}"
            summary = {"reward_accuracy": federated_metric(ends)}
            summary |= {"shared_accuracy": federated_metric(dict.fromkeys(ends, 0.6))} if k > 4 else {}
            settings = {"seed": seed, "method": {"name": "ditto" if k > 4 else "feddpo", "lr": k}}
            made = {"fingerprint": {"data": "other" if k == 9 else "x"}, **summary}
            runs.append(read_run(write_run(folder / name, clients, settings=settings, **made)))
    path = folder / "page.html"
    write_comparison(runs, path, [ChosenCase("case4 was chosen.", [runs[6].path], {})])
    return path


def test_the_page_fits_and_axe_finds_nothing(screen, page_file):
    """One of the two widths of each chart is seen; nothing is wider than the screen, nothing is asked for."""
    context, width, check = screen
    page, asked, errors = context.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(page_file.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    check(page)
    charts = page.evaluate(
        """[...document.querySelectorAll('svg.chart')].filter(each => each.checkVisibility()).map(
        each => [each.classList[1], each.getBoundingClientRect().width / each.viewBox.baseVal.width])"""
    )
    assert {kind for kind, _ in charts} == {"broad" if width == 1280 else "phone"}
    # Their letters are of 12 pixels before the chart is fitted into the page.
    assert min(12 * share for _, share in charts) >= 11
    assert asked == [page_file.as_uri()]
    assert errors == []


def test_a_link_of_the_contents_leads_to_its_section(chromium, page_file):
    """By keyboard: the first link is that to the choice, and the next to the results."""
    page = chromium.new_page()
    page.goto(page_file.as_uri())
    for _ in range(2):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.url.endswith("#results")
    top = page.evaluate("document.getElementById('results').getBoundingClientRect().top")
    assert -1 <= top < 844
    page.close()
