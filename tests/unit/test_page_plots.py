"""Plots as they stand in a page: in two widths, with titles where one points and with their numbers."""

import base64
import csv
import io
import re
import xml.etree.ElementTree as ET
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finished import write_run
from prefed.runs.record import read_run
from prefed.ui.pages import curves, drawing, plots
from prefed.ui.pages.html import environment
from prefed.ui.pages.inline_svg import NARROW
from prefed.ui.pages.page import render
from prefed.ui.pages.parts import plot
from prefed.ui.pages.plotted import csv_of


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "run"))


@pytest.fixture(scope="module")
def costs(run):
    """A plot of two panels side by side."""
    return plot(partial(curves.cost, run), "costs")


def sizes(svg):
    return [float(number) for number in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()]


def test_points_have_titles_that_stand_at_them(run):
    """Each title is in a group with the one thing that it names, once in each width."""
    drawn = plot(partial(curves.accuracy, run), "accuracy")
    for svg in (drawn.wide, drawn.narrow):
        titled = [group for group in ET.fromstring(svg).iter("g") if group.find("title") is not None]
        texts = [group.findtext("title") for group in titled]
        means = ("0: 25% (11% to 50%)", "1: 50% (30% to 70%)", "2: 67% (43% to 83%)")
        assert texts[:3] == [f"mean, round {mean}" for mean in means]
        assert texts[3:] == ["worst client, round 0: 0.0%"] + [
            f"worst client, round {number}: 25.0%" for number in (1, 2)
        ]
        assert all(
            [child.tag for child in group] in (["title", "use"], ["title", "path"]) for group in titled
        )


def test_bars_tell_their_client(run):
    drawn = plot(partial(plots.clients, run), "clients")
    assert "<title>bob, preference accuracy: 100.0%</title>" in drawn.wide
    assert "<title>cyd, before: 0.0%</title>" in drawn.narrow


def test_a_narrow_plot_has_its_panels_below_each_other(costs):
    """A figure of 7.2 × 2.6 inches, 72 points each, with two panels in a row; narrow it is twice as high."""
    assert sizes(costs.wide) == pytest.approx([7.2 * 72, 2.6 * 72])
    assert sizes(costs.narrow) == pytest.approx([NARROW * 72, 2 * 2.6 * 72])
    for text in ET.fromstring(costs.narrow).iter("text"):
        moved = re.match(r"translate\(([\d.]+)", text.get("transform", ""))
        assert 0 <= float(moved[1] if moved else text.get("x")) <= NARROW * 72


def test_colors_are_those_of_the_page(costs):
    """No colour of the theme is left; every variable is one of page.css, for light and for dark screens."""
    for svg in (costs.wide, costs.narrow):
        assert not any(
            color in svg for color in (drawing.LIGHT.text, drawing.LIGHT.quiet, *drawing.LIGHT.lines)
        )
        assert "var(--plot-1)" in svg
    variables = set(re.findall(r"var\((--[\w-]+)\)", costs.wide))
    css = environment().get_template("page.css").render()
    assert all(css.count(f"{name}:") == 2 for name in variables)


def test_names_within_a_page_are_unique_and_are_there(run):
    """A reference from one plot into another would show nothing where the other one is hidden."""
    text = render(run)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    svgs = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(svgs) >= 8
    for svg in svgs:
        assert set(re.findall(r'(?:url\(|href=")#([^")]+)', svg)) == set(re.findall(r'\bid="([^"]+)"', svg))


def test_numbers_are_those_of_the_plot(run, costs):
    kind, _, data = costs.csv.partition(",")
    assert (kind, costs.name) == ("data:text/csv;charset=utf-8;base64", "cost.csv")
    rows = list(csv.DictReader(io.StringIO(base64.b64decode(data).decode())))
    assert [(r["panel"], r["series"], r["x"], r["y"]) for r in rows if r["series"] != "down"] == [
        *(("sent so far", "up", str(x), y) for x, y in enumerate(("0", "1000", "2000"))),
        *(("seconds a round", "", str(x), "1.5") for x in (1, 2)),
    ]
    bars = list(csv.DictReader(io.StringIO(csv_of(plots.clients(run, drawing.LIGHT)))))
    assert {(r["y"], r["series"]): float(r["x"]) for r in bars} == {
        **{("ann", "before"): 0.25, ("bob", "before"): 0.5, ("cyd", "before"): 0.0},
        **{
            ("ann", "preference accuracy"): 0.75,
            ("bob", "preference accuracy"): 1.0,
            ("cyd", "preference accuracy"): 0.25,
        },
    }


def test_a_name_is_no_formula_for_a_spreadsheet(tmp_path):
    run = read_run(write_run(tmp_path / "run", {"=1+1": (0.25, 0.5), "@x": (0.25, 0.5), "$a$": (0.25, 0.5)}))
    rows = csv.DictReader(io.StringIO(csv_of(plots.clients(run, drawing.LIGHT))))
    assert {row["y"] for row in rows} == {"'=1+1", "'@x", "$a$"}


@settings(max_examples=20)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_any_curve_can_be_read_back(values):
    figure, (axes,) = drawing.canvas(3, 2)
    drawing.draw_line(axes, range(len(values)), values, color="k", label="x", told=[""] * len(values))
    rows = list(csv.DictReader(io.StringIO(csv_of(figure))))
    assert [row["x"] for row in rows] == [str(number) for number in range(len(values))]
    assert [float(row["y"]) for row in rows] == pytest.approx(values, rel=1e-9, abs=1e-9)


def test_of_very_many_points_some_tell(tmp_path):
    rounds = 3 * drawing.TELLING
    _, (axes,) = drawing.canvas(3, 2)
    drawing.tell_points(axes, range(rounds), range(rounds), [str(number) for number in range(rounds)])
    (targets,) = axes.collections
    assert len(targets.get_offsets()) == drawing.TELLING
    assert targets.get_gid().endswith('"357"]')


def test_a_figure_of_any_name_is_drawn(tmp_path):
    """Names of figures come from the round log. A control character would be no XML."""
    figures = {"a\x01b\u202ec": [1.0, 2.0], "<script>&": [1.0, 3.0], "$\\frac{$/\ud83d": [1.0, 2.0]}
    text = render(read_run(write_run(tmp_path / "run", figures=figures)))
    assert "a\\x01b\\u202ec" in text
    assert not {"\x01", "\u202e"} & set(text)
    assert text.count("<script") == 1


def test_a_file_of_a_plot_has_no_titles(tmp_path, run):
    drawing.save(partial(plots.clients, run), tmp_path / "p.svg")
    assert drawing.TOLD not in (tmp_path / "p.svg").read_text()
