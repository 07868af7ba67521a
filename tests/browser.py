"""Chromium for the tests of pages; they are skipped where it or Playwright is missing."""

import itertools
import shutil

import pytest

from waiting import WATCHDOG

sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright

CHROMIUM = shutil.which("chromium")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


def _patient(make):
    def patient(**options):
        made = make(**options)
        made.set_default_timeout(1000 * WATCHDOG)
        return made

    return patient


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=0)
        for name in ("new_page", "new_context"):
            setattr(browser, name, _patient(getattr(browser, name)))
        yield browser
        browser.close()


@pytest.fixture(params=itertools.product([1280, 390], ["light", "dark"]), ids=str)
def screen(request, chromium):
    """A context, its width, and a check that a page fits into it and axe finds nothing."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    width, scheme = request.param
    context = chromium.new_context(
        viewport={"width": width, "height": 844}, color_scheme=scheme, bypass_csp=True
    )

    def check(page):
        assert axe.run(page).response["violations"] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width

    yield context, width, check
    context.close()
