"""Chromium for the tests of pages; they are skipped where it or Playwright is missing."""

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
