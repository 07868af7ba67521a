"""A model card over a run's record that somebody else wrote."""

import json
import re

import pytest
from markdown_it import MarkdownIt

from finished import write_run
from prefed.models import ModelConfig
from prefed.runs.export import Export
from prefed.runs.finished_run import read_run
from prefed.ui.pages.card import model_card

EVIL = "x\n---\n\n# Evil"


def card(folder, licence=EVIL, **summary):
    base = folder / "base"
    base.mkdir()
    (base / "README.md").write_text(f"---\nlicense: {json.dumps(licence)}\n---\n")
    run = read_run(write_run(folder / "run", **summary))
    model = ModelConfig.model_validate({"name": str(base), "lora": {"rank": 1}})
    return model_card(
        run, Export(client=None, selector=None, aligned=False, taste=None, merged=False, more=(), model=model)
    )


def test_what_a_record_holds_adds_no_line(tmp_path):
    text = card(tmp_path, method=EVIL, versions={"torch": EVIL})
    assert "\n# Evil" not in text
    assert text.count(r"x\n---\n\n# Evil") == 5


HOSTILE = "<img src=x onerror=alert(1)> [a](http://eve) ![b](http://eve) `c` | <script>d</script>"


def tree(text):
    """The elements of a card as GitHub's Markdown makes them, with their links."""
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    for token in tokens:
        yield token.type, token.attrs
        yield from ((child.type, child.attrs) for child in token.children or ())


def test_what_a_record_holds_is_neither_html_nor_a_link_nor_a_cell(tmp_path):
    """Each place of the record holds the hostile text in one card and a word in the other: both have the same
    elements. The control: Markdown makes a link, an image, code and HTML of the text where it is not escaped.
    """
    cards = []
    for name, text in (("a", HOSTILE), ("b", "word")):
        origin = {"method": {"title": text, "source": text}}
        (tmp_path / name).mkdir()
        settings = {"method": {"name": text, "lr": 0.1, text: text}}
        promise = {**PROMISE, "epsilon": 1.0, "adjacency": text, "bound": text}
        summary = {"versions": {"torch": text}, "split": text, "origin": origin, "privacy": promise}
        cards.append(card(tmp_path / name, text, settings=settings, method=text, **summary))
    assert cards[0].count("alert(1)") >= 10
    body = [text.split("\n---\n", 1)[1] for text in cards]
    assert list(tree(body[0])) == list(tree(body[1]))
    assert {"link_open", "image", "code_inline", "html_inline"} <= {kind for kind, _ in tree(f"x {HOSTILE}")}


PROMISE = {
    **{"kind": "central", "clip": 0.3, "noise_multiplier": 4.0, "delta": 1e-5, "releases": 12},
    **{"adjacency": "one client sends nothing", "bound": "Rényi: Gaussian, cohorts known", "draws": "system"},
}


@pytest.mark.parametrize(("epsilon", "words"), [(2.5, "epsilon 2.5 at delta 1e-05"), (None, "have no noise")])
def test_the_card_says_what_privacy_the_run_promises(tmp_path, epsilon, words):
    text = card(tmp_path, privacy={**PROMISE, "epsilon": epsilon})
    assert words in text
    assert "no noise was added" not in text
    assert ("No guarantee" in text) is (epsilon is None)


def test_a_card_without_noise_promises_nothing(tmp_path):
    assert "No guarantee of differential privacy: no noise was added" in card(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "clip 0.3 and noise multiplier 4, over 12 releases of the client that took part most often"),
        ({}, "one client with all its pairs. In neighbouring data sets, one client sends nothing"),
        ({}, "Cohorts may be known, so sampling does not amplify privacy"),
        (
            {"bound": "Rényi: Gaussian on each client with probability 5/20"},
            "probability 5/20. This assumes that",
        ),
        ({}, "clients trust the server, which receives their updates without noise"),
        ({"kind": "local"}, "clients need not trust the server: each adds noise to its update"),
        ({"draws": "seed"}, "Whoever knows the seed can remove the noise"),
    ],
)
def test_the_card_says_for_whom_and_against_whom(tmp_path, changes, words):
    """Unit, sampling, trust and source of the noise, in words."""
    text = card(tmp_path, privacy={**PROMISE, "epsilon": 2.5, **changes})
    (section,) = re.findall(r"## Privacy\n\n(.*?)\n\n## ", text, re.DOTALL)
    assert words in section
    assert all(line.startswith("- **") for line in section.splitlines())
    assert ("Whoever knows the seed" in section) is (changes == {"draws": "seed"})
