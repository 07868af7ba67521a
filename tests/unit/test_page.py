"""The HTML page about a run, on runs written by hand."""

import base64
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from jinja2 import UndefinedError

from finished import write_run
from prefed.report import drawing, plots
from prefed.report.page import _environment, render, write_page
from prefed.runs.record import read_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "first"))


@pytest.fixture(scope="module")
def text(run):
    return render(run)


def test_rounds_without_a_loss_have_a_page(tmp_path):
    path = write_run(tmp_path / "run")
    lines = (path / "rounds.jsonl").read_text()
    (path / "rounds.jsonl").write_text(lines.replace('"loss"', '"lost"'))
    assert "Training loss over rounds" not in render(read_run(path))


class Page(HTMLParser):
    """What a page is made of."""

    VOID = frozenset({"meta", "img", "source", "br"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.data = [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "pre"} & set(self.open):
            self.data += data


def test_the_page_is_complete_in_itself(text):
    """Nothing is loaded: every address is inline data; and nothing runs."""
    page = Page(text)
    addresses = [v for _, a in page.tags for n, v in a.items() if n in ("src", "srcset", "href")]
    assert len(addresses) == 2 * sum(tag == "img" for tag, _ in page.tags) >= 8
    for address in addresses:
        kind, _, data = address.partition(",")
        assert kind == "data:image/svg+xml;base64"
        image = base64.b64decode(data).decode()
        assert "<svg" in image
        assert not re.search(r'(href|src)="(?!#)', image)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "url(" not in text.split("</style>")[0]


def test_the_page_says_in_words_what_its_plots_show(text):
    page = Page(text)
    texts = [attributes["alt"] for tag, attributes in page.tags if tag == "img"]
    assert "begins at 25.0% and ends at 66.7%; the worst client goes from 0.0% to 25.0%." in texts[0]
    assert "lowest cyd with 25.0%, highest bob with 100.0%." in " ".join(texts)
    for words in ("sent by clients", "2.0 kB", "1,234", "every default filled in", "Jain index"):
        assert words in page.data
    assert [tag for tag, _ in page.tags].count("h1") == 1
    assert ("html", {"lang": "en"}) in page.tags
    assert all("scope" in attributes for tag, attributes in page.tags if tag == "th")


def test_names_cannot_break_the_page(tmp_path):
    nasty = '<script>alert("x")</script> & $\\alpha$ 日本'
    run = read_run(write_run(tmp_path / "run", {nasty: (0.2, 0.3), "b": (0.1, 0.4)}))
    text = render(run)
    assert "<script" not in text
    assert nasty in Page(text).data
    drawing.save(lambda theme: plots.comparison([run, run], theme), tmp_path / "p.png")


def test_dropped_uploads_and_silent_clients_are_said(tmp_path):
    path = write_run(tmp_path / "run", left_out=3)
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    lines[1]["dropped"] = [{"client": "bob", "exchange": "train", "reason": "NaN or infinity in 'model'"}]
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = Page(render(read_run(path))).data
    assert "1 upload was dropped; the first, of client bob in round 2: NaN or infinity in 'model'." in text
    assert "3 clients have no test pair and were not judged." in text


def test_equal_runs_give_equal_pages(tmp_path, run, text):
    write_page(run, tmp_path / "deep/page.html")
    assert (tmp_path / "deep/page.html").read_text() == text


def test_importing_reports_loads_neither_matplotlib_nor_transformers():
    code = "import sys, prefed.report.page; print({'matplotlib', 'transformers'} & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "set()"


def test_a_page_says_which_models_diverged(tmp_path):
    page = render(read_run(write_run(tmp_path / "run", not_finite={"ann": 4, "cyd": 1})))
    assert "The models of 2 clients diverged: 5 pairs have no finite log-probability" in page


def test_a_template_cannot_be_given_text_that_changes_the_page():
    """In a text, a macro, a sum of texts and an attribute, and a value that is forgotten is an error."""
    macro = "{% macro bold(text) %}<b>{{ text }}</b>{% endmacro %}"
    source = macro + "{{ name }}{{ bold(name) }}{{ name ~ '!' }}<i title=\"{{ name }}\"></i>"
    environment = _environment()
    safe = "&lt;&#34;\\x1b[2J\\u202e"
    page = environment.from_string(source).render(name='<"\x1b[2J\u202e')
    assert page == f'{safe}<b>{safe}</b>{safe}!<i title="{safe}"></i>'
    with pytest.raises(UndefinedError):
        environment.from_string("{{ name }}").render()
