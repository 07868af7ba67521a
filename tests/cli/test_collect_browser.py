"""The page of ``prefed collect`` in chromium: by keyboard alone, in both widths and colour schemes."""

import json

import pytest

from browser import chromium as chromium
from browser import needs_chromium
from browser import screen as screen
from collecting import serving, session
from prefed.data import Record
from prefed.ui.collect.pairs import DrawnPairs

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
CHANGED = "number => document.querySelector('[name=number]')?.value !== number"

pytestmark = needs_chromium


def press(page, key):
    """Press a key that answers or takes back, and wait for another question."""
    number = page.locator("[name=number]").get_attribute("value")
    page.keyboard.press(key)
    page.wait_for_function(CHANGED, arg=number)
    page.wait_for_load_state()


def test_twenty_choices_by_keyboard(chromium, tmp_path):
    """Every request goes to the page's own address, and the page's policy stops nothing that it needs. The
    first choice is taken back and made again, the third is a strong one."""
    records = [Record(f"Case {k}:", f" up {k}", f" down {k}") for k in range(20)]
    asked, errors = [], []
    with session(tmp_path, records, client=None) as opened, serving(opened) as links:
        page = chromium.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(links[0])
        page.keyboard.type("ann")
        page.keyboard.press("Enter")
        page.wait_for_selector("[name=number]", state="attached")
        press(page, "1")
        press(page, "u")
        for number in range(19):
            if number == 2:
                page.keyboard.press("s")
                page.keyboard.press("s")
            press(page, "0" if number == 5 else "12"[number % 2])
        # A key that is switched off does nothing.
        assert page.title().startswith("Pair 20 of 20")
        page.locator("#keys").focus()
        page.keyboard.press("Space")
        page.keyboard.press("1")
        page.wait_for_timeout(200)
        assert opened.progress().done == 19
        page.keyboard.press("Space")
        press(page, "2")
        assert page.title().startswith("The end")
        root = links[0].partition("?")[0]
        page.close()
    assert errors == []
    assert all(url.startswith(root) for url in asked)
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text("utf-8").splitlines()]
    assert [row.get("margin") for row in rows] == [None, None, 2] + [None] * 16
    sides = [row["side"] for row in rows]
    assert sides == [("left", "right")[number % 2] for number in range(20) if number != 5]
    assert len({row["prompt"] for row in rows}) == 19


def test_the_page_fits_and_axe_finds_nothing(screen, tmp_path):
    long = "word " * 200 + "x" * 300
    records = [Record(long, long + "a", long + "b"), Record("Case:", " a", " b")]
    (context, _, check), seen = screen, []
    with session(tmp_path, records, client=None) as opened, serving(opened, lambda text: None) as links:
        page = context.new_page()
        page.goto(links[0].partition("?")[0])

        def look():
            seen.append(page.title().partition(" –")[0])
            check(page)

        look()
        page.goto(links[0])
        look()
        page.fill("#client", "ann")
        page.keyboard.press("Enter")
        page.wait_for_selector("[name=number]", state="attached")
        look()
        press(page, "1")
        press(page, "0")
        look()
        page.get_by_role("button", name="Finish").click()
        page.wait_for_selector("h1:text('Thank you')")
        look()
    with (
        session(tmp_path / "slow", questions=lambda journal: DrawnPairs(["One"], journal, "slow")) as opened,
        serving(opened, lambda text: None) as links,
    ):
        page.goto(links[0])
        look()
        # The page looks by itself whether the responses are there.
        with opened.changed:
            opened.questions.keep(opened.questions.numbers()[0], ("first", "second"))
        page.wait_for_selector("[name=number]", state="attached")
        look()
    assert seen[:5] == ["No link", "Your name", "Pair 1 of 2", "The end", "Thank you"]
    assert seen[5:] == ["The model is writing", "Pair 1 of 1"]
