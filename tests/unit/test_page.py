"""The HTML page about a run, on runs written by hand."""

import base64
import hashlib
import json
import re
from functools import partial

import pytest
from jinja2 import UndefinedError

import pages
from finished import CLIENTS, write_run
from prefed.runs.finished_run import read_run
from prefed.train.metrics import federated_metric
from prefed.ui.pages import origin, round_curves
from prefed.ui.pages.html import environment
from prefed.ui.pages.page import render, write_page

Page = partial(pages.Page, without=("style", "pre", "svg"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "first"))


@pytest.fixture(scope="module")
def text(run):
    return render(run)


def test_the_page_is_complete_in_itself(text):
    """Nothing is loaded: every address is a place in the page or holds the file itself. What runs is the one
    script that the page's policy names by its digest."""
    page = Page(text)
    addresses = [v for _, a in page.tags for n, v in a.items() if n in ("src", "srcset", "href")]
    assert {address.partition(",")[0] for address in addresses if not address.startswith("#")} == {
        "data:text/csv;charset=utf-8;base64"
    }
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    places = {address for address in addresses if address.startswith("#")}
    assert {place.removeprefix("#") for place in places} <= ids
    assert not {"link", "iframe", "object", "image", "img"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "url(" not in text.split("</style>")[0]
    assert not re.search(r"url\((?!#)", text)
    (policy,) = (a["content"] for a in page.named("meta") if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(page.script.encode()).digest()).decode()
    assert len(page.named("script")) == 1
    assert re.findall(r"script-src ([^;]*)", policy) == [f"'sha256-{digest}'"]
    assert policy.startswith("default-src 'none';")


def test_the_page_says_in_words_what_its_plots_show(text):
    """Wilson's intervals of 0 to 4 of 4 pairs: 0 to 0.490, 0.046 to 0.699, 0.150 to 0.850, 0.301 to 0.954,
    0.510 to 1. Of the mean, the root of the squared distances over 3. Before, of ¼, ½ and 0: 0.204, 0.350 and
    0 below, 0.135 in all, and 0.449, 0.350 and 0.490 above, 0.250. After, of ¾, 1 and ¼: 0.232 and 0.165."""
    page = Page(text)
    texts = [attributes["aria-label"] for attributes in page.named("svg") if attributes.get("role") == "img"]
    assert texts[::2] == texts[1::2]
    assert (
        "starts at 25% (11% to 50%) and ends at 67% (43% to 83%); the worst client goes from 0.0% to 25.0%."
        in texts[0]
    )
    assert "3 clients: 25.0% (cyd) to 100.0% (bob) preference accuracy." in " ".join(texts)
    for words in (
        "total upload",
        "2.0 kB",
        "1,234",
        "Complete experiment file, including defaults",
        "Jain index",
    ):
        assert words in page.data
    assert [tag for tag, _ in page.tags].count("h1") == 1
    assert ("html", {"lang": "en"}) in page.tags
    assert all("scope" in attributes for attributes in page.named("th"))
    assert page.named("pre") == [{"tabindex": "0", "role": "region", "aria-label": "Experiment file"}]


def test_cards_have_both_accuracies_with_their_intervals(tmp_path):
    """The worst client by policy is cyd with 1 of 4 pairs: 0.046 to 0.699. By reward it is ann with 2: 0.150
    to 0.850. The mean reward is ⅔: 0.350, 0.490 and 0.350 below are 0.232 in all, and 0.350, 0 and 0.350
    above 0.165."""
    rewards = federated_metric({"ann": 0.5, "bob": 1.0, "cyd": 0.5})
    run = with_rewards(write_run(tmp_path / "run", reward_accuracy=rewards), rewards)
    page = Page(render(run)).data
    for words in (
        "preference accuracy, mean over clients67% (43% to 83%)before 25%, 3 clients, 12 pairs",
        "reward accuracy, mean over clients67% (43% to 83%)3 clients, 12 pairs",
        "preference accuracy, worst client25% (5% to 70%)before 0%, cyd, 4 pairs",
        "reward accuracy, worst client50% (15% to 85%)ann, 4 pairs",
    ):
        assert words in page
    cards, heading, _ = page.partition("Metrics over rounds")
    assert heading
    assert "worst tenth" not in cards
    chart = round_curves.accuracy(run)
    policy, reward = chart.panels
    assert (policy.title, reward.title, chart.same) == ("preference accuracy", "reward accuracy", True)
    assert [[y for _, y in line.points] for line in reward.shown] == [[pytest.approx(2 / 3)] * 2, [0.5, 0.5]]
    each = {line.name: [y for _, y in line.points] for line in round_curves.clients(run).panels[0].shown}
    assert each == {client: list(values) for client, values in CLIENTS.items()}


def with_rewards(path, rewards):
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        line["evaluation"]["reward_accuracy"] = rewards
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(path)


def test_clients_with_equal_curves_all_show(tmp_path):
    """Each later curve is thinner than the one that it lies on."""
    run = read_run(write_run(tmp_path / "run", dict.fromkeys("abcdefghij", (0.5,) * 3)))
    widths = [line.look.width for line in round_curves.clients(run).panels[0].shown]
    assert len(widths) == 10
    assert widths == sorted(set(widths), reverse=True)


def test_of_more_clients_quantiles_are_drawn_over_rounds(tmp_path):
    """The k-th of 21 clients has k/20 after the only round: the quartiles are ¼, ½ and ¾."""
    run = read_run(write_run(tmp_path / "run", {f"c{k:02}": (0.5, k / 20) for k in range(21)}))
    assert round_curves.clients(run) is None  # one evaluation is shown by the bars
    run = read_run(write_run(tmp_path / "two", {f"c{k:02}": (0.5, 0.5, k / 20) for k in range(21)}))
    lines = round_curves.clients(run).panels[0].shown
    assert [line.name for line in lines] == list(round_curves.QUANTILES)
    assert [line.points[-1][1] for line in lines] == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert "preference accuracy, worst tenth" in render(run)


def test_contents_name_every_section_once(text):
    page = Page(text)
    ids = [attributes["id"] for attributes in page.named("h2")]
    inside = text[text.index("<nav") : text.index("</nav>")]
    assert re.findall(r'href="#([^"]*)"', inside) == ids == list(dict.fromkeys(ids))
    assert ids[:2] + ids[-2:] == ["rounds", "clients", "settings", "meanings"]


def test_the_page_says_what_the_data_are_and_where_the_run_was_made(tmp_path):
    """Training sizes 1, 1, 4: of the sorted x, G = 2 Σ i x_i / (n Σ x) − (n + 1)/n = 2·15/18 − 4/3 = 1/3."""
    sizes = {
        name: {"train": n, "validation": 0, "test": 4} for name, n in zip(CLIENTS, (1, 4, 1), strict=True)
    }
    distances = {"token_distance": 0.5, "random_token_distance": 0.25, "category_distance": None}
    hardware = {"processor": "Abacus", "cores": 1, "memory_mb": 2048, "devices": ["Beads"], "system": "Wood"}
    path = write_run(tmp_path / "run")
    summary = json.loads((path / "summary.json").read_text())
    summary |= {"clients": sizes, "data": {**distances, "contradictions": 3}}
    made = {"finished": "2026-11-22T12:30:00+02:00", "command": "prefed run 'a b.toml'", "hardware": hardware}
    (path / "summary.json").write_text(json.dumps(summary | {"origin": made}))
    run = read_run(path)
    assert origin.data_facts(run) == [
        ("clients", "3"),
        ("training pairs", "6; per client (min / median / max): 1 / 1 / 4"),
        ("test pairs", "12; per client (min / median / max): 4 / 4 / 4"),
        ("Gini coefficient of sizes", "0.33 (0: equal sizes)"),
        ("mean distance of clients' tokens from all clients'", "0.50; 0.25 with random assignment"),
        ("pairs that clients label differently", "3"),
    ]
    assert origin.origin_facts(run) == [
        ("finished", "2026-11-22 10:30 UTC"),
        ("command", "prefed run 'a b.toml'"),
        ("machine", "Abacus, 1 core, 2 GiB memory, Beads, Wood"),
    ]
    assert "prefed run &#39;a b.toml&#39;" in render(run)


def test_equal_runs_give_equal_pages(tmp_path, run, text):
    write_page(run, tmp_path / "deep/page.html")
    assert (tmp_path / "deep/page.html").read_text() == text


def test_a_template_cannot_be_given_text_that_changes_the_page():
    """In a text, a macro, a sum of texts and an attribute, and a value that is forgotten is an error."""
    macro = "{% macro bold(text) %}<b>{{ text }}</b>{% endmacro %}"
    source = macro + "{{ name }}{{ bold(name) }}{{ name ~ '!' }}<i title=\"{{ name }}\"></i>"
    safe = "&lt;&#34;\\x1b[2J\\u202e"
    page = environment().from_string(source).render(name='<"\x1b[2J\u202e')
    assert page == f'{safe}<b>{safe}</b>{safe}!<i title="{safe}"></i>'
    with pytest.raises(UndefinedError):
        environment().from_string("{{ name }}").render()
