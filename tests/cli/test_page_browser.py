"""The page about a run in chromium: both widths, both colour schemes, by keyboard, and without a script."""

import pytest

from browser import chromium as chromium
from browser import needs_chromium
from browser import screen as screen
from finished import write_run
from prefed.runs.finished_run import read_run
from prefed.train.metrics import federated_metric
from prefed.ui.pages.page import write_page

READABLE = 10
"""Pixels of the smallest letters of a plot at least."""
SMALLEST = """() => Math.min(...[...document.querySelectorAll("svg text")].flatMap(text => {
  const svg = text.closest("svg"), width = svg.getBoundingClientRect().width;
  return width ? [parseFloat(getComputedStyle(text).fontSize) * width / svg.viewBox.baseVal.width] : [];
}))"""

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """Twelve clients: the k-th has k/12, and a gate in each of eight blocks."""
    folder = tmp_path_factory.mktemp("page")
    clients = {f"client-{k}": (0.5, 0.25, k / 12) for k in range(12)}
    gates = {client: {str(block): 0.5 + block / 100 for block in range(8)} for client in clients}
    rewards = federated_metric({client: values[-1] for client, values in clients.items()})
    path = write_run(folder / "run", clients, personal={"gate": gates}, reward_accuracy=rewards)
    write_page(read_run(path), folder / "page.html")
    return folder / "page.html"


def test_the_page_fits_and_axe_finds_nothing(screen, page_file):
    context, _, check = screen
    page, errors = context.new_page(), []
    page.on("console", lambda message: errors.append(message.text))
    page.goto(page_file.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    check(page)
    assert page.evaluate(SMALLEST) >= READABLE
    assert errors == []


def test_clients_are_sorted_and_filtered_by_keyboard(chromium, page_file):
    """The page's own policy holds here: it runs this script and nothing else."""
    page, errors = chromium.new_page(), []
    page.on("console", lambda message: errors.append(message.text))
    page.goto(page_file.as_uri())
    page.get_by_text("Table of clients").click()
    table = page.locator("table.sortable")
    names = table.locator("tbody tr:visible th")
    head = table.get_by_role("columnheader", name="preference accuracy")
    assert names.all_inner_texts()[:2] == ["client-0", "client-1"]
    head.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "descending"
    assert names.all_inner_texts()[:3] == ["client-11", "client-10", "client-9"]
    table.get_by_role("button", name="client").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") is None
    assert names.all_inner_texts()[1:3] == ["client-1", "client-2"]
    page.get_by_label("Filter by name").focus()
    page.keyboard.type("T-1")
    assert names.all_inner_texts() == ["client-1", "client-10", "client-11"]
    assert page.get_by_role("status").inner_text() == "3 of 12 rows"
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')")
    page.wait_for_timeout(100)
    assert page.title() == "run – feddpo"
    assert all("Content Security Policy" in text for text in errors)
    page.close()


def test_the_page_is_whole_without_its_script(chromium, page_file):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_file.as_uri())
    page.get_by_text("Table of clients").click()
    assert page.locator("table.sortable tbody tr:visible").count() == 12
    assert page.get_by_role("searchbox").count() == 0
    context.close()


def test_the_numbers_of_a_plot_are_a_file(chromium, page_file, tmp_path):
    page = chromium.new_page()
    page.goto(page_file.as_uri())
    with page.expect_download() as download:
        page.get_by_role("link", name="Download CSV: loss.csv").click()
    download.value.save_as(tmp_path / "loss.csv")
    assert download.value.suggested_filename == "loss.csv"
    assert (tmp_path / "loss.csv").read_text() == "panel,x,y\ntraining loss,1,0.7\ntraining loss,2,0.35\n"
    page.close()
