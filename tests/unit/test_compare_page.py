"""The page over many runs, its charts, and the same as JSON, on runs written by hand."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from finished import config, write_run
from pages import Page
from prefed.runs.finished_run import read_run
from prefed.train.metrics import federated_metric
from prefed.ui.cli import app
from prefed.ui.pages.compare_charts import Shown, gains_of, over_rounds, strips
from prefed.ui.pages.compare_page import render_comparison
from prefed.ui.pages.comparison_data import Compared
from prefed.ui.pages.comparison_tables import print_comparison

NAMES = ("ann", "bob", "cyd", "dee")


def run(folder, method, seed, ends, reward=0.0, shared=None, **options):
    """A run of two rounds: accuracies after the last one of ann, bob, …; rewards are so much higher."""
    clients = {name: (0.4, (0.4 + end) / 2, end) for name, end in zip(NAMES, ends, strict=False)}
    settings = {"seed": seed, "method": {"name": method, "lr": 0.01}, **options.pop("settings", {})}
    summary = {"reward_accuracy": federated_metric({n: v[-1] + reward for n, v in clients.items()})}
    if shared is not None:
        summary["shared_accuracy"] = federated_metric(dict.fromkeys(clients, shared))
    path = folder / f"{method}-seed{seed}"
    write_run(path, clients, settings=settings, **summary, **options)
    # A round's evaluation has all that the summary has.
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        own = line["evaluation"]["preference_accuracy"]["per_client"]
        line["evaluation"]["reward_accuracy"] = federated_metric({n: v + reward for n, v in own.items()})
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three seeds of a shared model, of a personalised one, and one run at another rate."""
    folder = tmp_path_factory.mktemp("runs")
    made = [run(folder, "feddpo", s, (0.5, 0.6, 0.7 + s / 100, 0.5), 0.1) for s in (1, 2, 3)]
    made += [run(folder, "ditto", s, (0.9, 0.6, 0.5, 0.5), 0.05, 0.6) for s in (1, 2, 3)]
    other = config()["method"] | {"lr": 0.03}
    return [*made, run(folder, "fedprox", 1, (0.4, 0.4, 0.4, 0.4), settings={"method": other})]


def test_the_page_says_what_came_of_each_case(runs):
    """The mean of feddpo is 0.575 + s/400 with seed s: 0.580 with a deviation of 0.0025. With ditto cyd loses
    0.22 on the mean of seeds, and most of all."""
    page = Page(render_comparison(runs))
    text = re.sub(r"\s+", " ", page.data)
    assert "3 cases with 1 to 3 seeds; tiny; 4 clients evaluated on test pairs, 4 each." in text
    assert "0.580 ± 0.003" in text
    assert "0.680 ± 0.003" in text
    for words in ("preference accuracy", "reward accuracy", "worst client", "worst tenth", "before"):
        assert words in text
    assert "Against A feddpo: preference accuracy, in percentage points" in text
    assert "-22.0 cyd" in text
    assert "With only 3 seeds in common, Wilcoxon's p cannot be below 0.25." in text
    assert "method.lr" in text
    settings = text.split("Differing settings")[2]
    assert "method.lr" in settings.split("Accuracy over rounds")[0]
    assert "model.name" not in settings.split("Accuracy over rounds")[0]


def test_the_page_is_complete_in_itself(runs):
    """It loads nothing and runs nothing of its own; charts have words, each twice for two widths."""
    page = Page(render_comparison(runs))
    addresses = [v for _, a in page.tags for n, v in a.items() if n in ("src", "srcset", "href")]
    files = [address for address in addresses if not address.startswith("#")]
    assert {file.partition(",")[0] for file in files} == {"data:text/csv;charset=utf-8;base64"}
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {address[1:] for address in addresses if address not in files} <= set(ids)
    charts = [a for tag, a in page.tags if tag == "svg" and a.get("class", "").startswith("chart")]
    assert len(charts) == 2 * 8
    assert all(chart["role"] == "img" and chart["aria-label"] for chart in charts)
    assert charts[0]["aria-label"].startswith(
        "Preference accuracy over rounds, 3 cases, means over clients. Highest at the end: ditto, 0.625"
    )
    assert all("scope" in attributes for tag, attributes in page.tags if tag == "th")


def test_a_strip_has_a_dot_for_each_client_where_its_gain_is(runs):
    """The widest gain lies 124 pixels from the middle, at 130; of four clients one gains, one loses."""
    compared = Compared(tuple(runs))
    cases = [Shown(*each) for each in zip(compared.keys, compared.names, range(3), strict=True)]
    own, against, _ = gains_of(compared, cases, ["preference_accuracy", "reward_accuracy"])
    ((shown, cells, strip),) = own.rows
    # Of 0.9, 0.6, 0.5 and 0.5 less 0.6: +30, 0, −10 twice.
    assert (shown.name, cells) == ("ditto", ["1", "2", "1", "+2.5", "-10.0 cyd"])
    places = [float(x) for x, *_ in strip.dots]
    assert places == pytest.approx([130 - 124 / 3] * 2 + [130, 254], abs=0.05)
    assert [kind for *_, kind, _ in strip.dots] == ["loss", "loss", "even", "gain"]
    assert [row[0].name for row in against.rows] == ["ditto", "fedprox"]
    (many,), most = strips([{f"c{k}": k / 1000 for k in range(1001)}])
    assert (len(many.dots), most) == (200, 1.0)
    assert (many.dots[0][3], many.dots[-1][3]) == ("c0: +0.0", "c1000: +100.0")


# The command


def compare(*words, code=0):
    result = CliRunner().invoke(app, ["compare", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def test_json_says_all_that_the_page_says(runs):
    """Ditto's mean is 0.625; less feddpo's 0.5775, 0.58 and 0.5825 that is 0.045, deviation 0.0025."""
    got = json.loads(compare(*(run.path for run in runs), "--json"))
    assert [(case["name"], case["seeds"]) for case in got["cases"]] == [
        ("feddpo", [1, 2, 3]),
        ("ditto", [1, 2, 3]),
        ("fedprox", [1]),
    ]
    assert got["cases"][0]["figures"]["preference_accuracy"]["mean"] == pytest.approx(
        {"mean": 0.58, "std": 0.0025}
    )
    first = got["paired"][0]
    assert (first["figure"], first["case"], first["against"]) == ("preference_accuracy", "ditto", "feddpo")
    assert (first["mean"], first["std"]) == pytest.approx((0.045, 0.0025))
    assert got["differences"]["method.lr"] == {"feddpo": "0.01", "ditto": "0.01", "fedprox": "0.03"}
    assert got["runs"][0]["reward_accuracy"]["per_client"]["ann"] == pytest.approx(0.6)
    assert got["not_comparable"] == {}


def test_compare_writes_what_is_asked_for(runs, tmp_path, monkeypatch):
    """A page alone, of all runs in a folder too; a plot besides if it is named; without either the plot."""
    monkeypatch.chdir(tmp_path)
    folder = runs[0].path.parent
    assert "page: p/q.html" in compare(folder, "--html", "p/q.html")
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    assert Path("p/q.html").read_text() == render_comparison(sorted(runs, key=lambda each: each.path))
    compare(folder, "--json", "--out", "a.svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.svg", "p"]
    assert "plot: compare.png" in compare(runs[0].path, runs[3].path)
    Path("compare.png").unlink()
    monkeypatch.setattr("prefed.ui.pages.plot_file.find_spec", lambda name: None)
    assert "no plot: it needs the package matplotlib" in compare(runs[0].path, runs[3].path)
    assert not Path("compare.png").exists()
    assert "p is a folder; name a file for the page" in compare(folder, "--html", "p", code=1)
    assert "give at least two different runs" in compare(runs[0].path, "--html", "x.html", code=1)


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_shows_every_cell(tmp_path, width):
    """A table that is too wide is split: no cell is truncated, and every row has its name."""
    made = [read_run(write_run(tmp_path / f"run-{k}", settings={"rounds": 2 + k})) for k in (1, 2)]

    def lines(width):
        file = io.StringIO()
        print_comparison(made, Console(file=file, width=width))
        assert "…" not in file.getvalue()
        return file.getvalue().splitlines()

    whole = [line.split()[1:] for line in lines(200) if line.startswith(" run-")]
    for name, cells in zip("AB", whole, strict=True):
        parts = [line.split() for line in lines(width) if line.startswith(f" {name}   ")]
        assert len(parts) > 1
        assert [cell for part in parts for cell in part[1:]] == cells


def test_a_run_on_other_pairs_is_in_no_test_chart_or_pooled_figure(tmp_path):
    """Three seeds of two methods, the second with higher accuracies, and its third seed had other pairs. That
    run is a case of its own, with a mark in the tables. Nothing is tested, drawn or averaged with it."""
    made = [
        run(tmp_path, method, seed, ends, fingerprint={"data": data})
        for method, ends in (("feddpo", (0.5, 0.6)), ("fedprox", (0.6, 0.8)))
        for seed in (1, 2, 3)
        for data in ["y" if (method, seed) == ("fedprox", 3) else f"x{seed}"]
    ]
    compared = Compared(tuple(made))
    assert [case.seeds for case in compared.cases] == [(1, 2, 3), (1, 2), (3,)]
    assert len(compared.comparable) == 2
    (_, paired) = compared.paired("preference_accuracy")
    assert [*paired.differences] == [1, 2]
    assert len(compared.gains("preference_accuracy")) == 2
    assert {row["case"] for row in compared.plain()["paired"]} == {"fedprox-seed1"}
    page = Page(render_comparison(made))
    heads = [tag for tag, a in page.tags if tag == "svg" and "2 cases" in a.get("aria-label", "")]
    assert heads
    assert not any("3 cases" in a.get("aria-label", "") for _, a in page.tags)
    results, seeds = (
        page.data.split(word)[1] for word in ("traffic and time per run.", "each case against ")
    )
    assert "fedprox-seed3 *" in results.split("Accuracy over rounds")[0]
    assert "fedprox-seed3" not in seeds.split("Table of runs")[0]
    file = io.StringIO()
    print_comparison(made, Console(file=file, width=160))
    text = file.getvalue()
    assert re.search(r"fedprox-seed3 \*", text)
    tested = text.split("standard deviation over seeds")[1].split("* fedprox-seed3")[0]
    assert "fedprox-seed1" in tested
    assert "fedprox-seed3" not in tested


def test_a_band_ends_at_all_pairs(tmp_path):
    """Means of 0.9 and 1 have a deviation of 0.1/√2 = 0.07. One deviation about 0.95 ends at 1.02. Of 0 and
    0.3 it begins at 0.15 − 0.21."""
    made = [run(tmp_path, "feddpo", 1, (0.9, 0.9)), run(tmp_path, "feddpo", 2, (1.0, 1.0))]
    made += [run(tmp_path, "fedprox", seed, (0.3 * (seed - 1), 0.0)) for seed in (1, 2)]
    lines = over_rounds(Compared(tuple(made)), [0, 1], "preference_accuracy").panels[0].shown
    ends = [end for line in lines for end in (*line.low, *line.high)]
    assert (min(ends), max(ends)) == (0.0, 1.0)
    assert lines[0].low[-1] == pytest.approx(0.95 - 0.1 / 2**0.5)
    narrow = [run(tmp_path / "narrow", "feddpo", seed, (0.4, 0.5 + 0.1 * seed)) for seed in (1, 2)]
    (line,) = over_rounds(Compared(tuple(narrow)), [0], "preference_accuracy").panels[0].shown
    mean, arm = line.points[-1][1], line.points[-1][1] - line.low[-1]
    assert 0 < arm == pytest.approx(0.05 / 2**0.5)
    assert line.high[-1] == pytest.approx(mean + arm)
