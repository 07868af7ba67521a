"""Charts: looks and places in a page, what pointing at a mark says, numbers as CSV, and files."""

import base64
import csv
import io
import math
import re
import warnings
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finished import write_run
from law_examples import examples
from prefed.runs.finished_run import read_run
from prefed.ui.pages import clients, plot_file, round_curves
from prefed.ui.pages.chart_data import (
    COLORS,
    DARK,
    LIGHT,
    MARKS,
    STROKES,
    Axis,
    Cells,
    Chart,
    Line,
    Look,
    Panel,
    csv_of,
    heat,
    look_of,
)
from prefed.ui.pages.compare_charts import comparison
from prefed.ui.pages.html import environment
from prefed.ui.pages.page import render
from prefed.ui.pages.svg import csv_address, drawings, spread_out, ticks


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "run"))


def figure(chart):
    """A chart as a page has it."""
    return environment().from_string('{% import "parts.html" as p %}{{ p.figure(c) }}').render(c=chart)


def svgs(chart):
    return [
        ET.fromstring(svg) for svg in re.findall(r"<svg class=\"chart.*?</svg>", figure(chart), re.DOTALL)
    ]


def rows(chart):
    return list(csv.DictReader(io.StringIO(csv_of(chart))))


def chart_of(*lines, x=None, y=None, **options):
    panel = Panel(x or Axis("round", whole=True), y or Axis(), lines)
    return Chart("c", "alt", "caption", [panel], **options)


def line(points, **options):
    return Line("one", points, [f"{x:g}: {y:g}" for x, y in points], **options)


def shapes(drawing, kind):
    return [s for group in drawing.groups for s in group.shapes if s.attributes.get("class") == kind]


def test_points_say_their_values_in_both_widths(run):
    """Wilson's intervals of the mean, see ``test_page.py``."""
    for svg in svgs(round_curves.accuracy(run)):
        means = ("0: 25% (11% to 50%)", "1: 50% (30% to 70%)", "2: 67% (43% to 83%)")
        notes = [f"mean, round {mean}" for mean in means]
        notes += [f"worst client, round {r}: {v}%" for r, v in ((0, "0.0"), (1, "25.0"), (2, "25.0"))]
        assert {path.findtext("title") for path in svg.iter("path")} - {None} == set(notes)
    text = figure(clients.ends(run))
    assert "<title>bob, preference accuracy: 100.0%</title>" in text
    assert "<title>cyd, before: 0.0%</title>" in text


def test_colors_are_those_of_the_page(run):
    """No colour of a theme is in a chart; every variable is one of page.css, for light and dark screens."""
    text = figure(round_curves.cost(run))
    assert not any(c in text for theme in (LIGHT, DARK) for c in (theme.text, theme.quiet, *theme.lines))
    variables = set(re.findall(r"var\((--[\w-]+)\)", text))
    assert "--plot-1" in variables
    css = environment().get_template("page.css").render()
    assert all(css.count(f"{name}:") == 2 for name in variables)


def test_a_chart_puts_points_where_the_axes_say():
    """Rounds 0 and 10 with room of 4% on the right; a tick is where its value would be."""
    drawing = drawings(chart_of(line([(0.0, 0.2), (10.0, 0.6)])))[0]
    ((path,), axis) = shapes(drawing, "curve"), shapes(drawing, "axis")[0].attributes["d"]
    left, bottom, right = map(float, re.fullmatch(r"M(\S+) (\S+)H(\S+)", axis).groups())
    (x0, y0), (x1, y1) = (map(float, each.split()) for each in path.attributes["d"][1:].split("L"))
    assert (x0, x1) == pytest.approx((left, left + (right - left) * 10 / 10.4), abs=0.1)
    texts = {s.text: float(s.attributes["y"]) - 4 for s in drawing.groups[0].shapes if s.tag == "text"}
    assert (texts["0.2"], texts["0.6"]) == pytest.approx((y0, y1), abs=0.1)
    assert 0 < y1 < y0 < bottom


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 9), st.booleans())
def test_ticks_are_round_and_inside(first, span, most, whole):
    """Multiples of 1, 2 or 5 times a power of ten, evenly apart, at most ``most`` steps."""
    found = ticks(first, first + span, most, whole=whole)
    assert all(first - 1e-6 * span <= tick <= first + span * (1 + 1e-6) for tick in found)
    assert len(found) <= most + 1
    for one, two in pairwise(found):
        step = two - one
        assert not whole or step >= 1 - 1e-9
        lead = step / 10 ** math.floor(math.log10(step) + 1e-6)
        assert lead == pytest.approx(round(lead), rel=1e-3)
        assert round(lead) in (1, 2, 5)


def test_ticks_of_a_logarithmic_axis():
    assert ticks(0.5, 3.5, 7, log=True) == [10.0, 100.0, 1000.0]
    assert ticks(math.log10(2), math.log10(9), 7, log=True) == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]


def test_equal_lines_stay_visible():
    """No two of the first hundred cases look alike, neighbours differ in all four ways, and what lies above a
    line of the same course is thinner than it or dashed so that it shows through."""
    looks = [look_of(k) for k in range(100)]
    assert len({(look.color, look.width, look.dash, look.mark) for look in looks}) == 100
    for one, two in pairwise(looks):
        assert one.color != two.color
        assert one.width != two.width
        assert one.mark != two.mark
    assert (COLORS % len(STROKES), COLORS % len(MARKS)) != (0, 0)
    points = [(float(k), k / 40) for k in range(41)]
    lines = [Line("abc"[k], points, [str(x) for x, _ in points], look_of(k), key="ABC"[k]) for k in range(3)]
    wide = drawings(chart_of(*lines, named=True))[0]
    assert [s.attributes["stroke-width"] for s in shapes(wide, "curve")] == ["4.5", "3", "1.8"]
    # Marks of the three are at other rounds, but for the last one.
    groups = [{s.note for s in group.shapes if s.note} for group in wide.groups if group.kind == "case"]
    marked = [{note.partition(": ")[2] for note in notes} for notes in groups]
    assert marked[0] & marked[1] & marked[2] == {"40.0"}
    assert max(map(len, marked)) <= 13


@given(st.lists(st.floats(0, 100), max_size=9))
def test_labels_lie_apart_and_inside(wanted):
    """In their order, a gap apart, within the frame; where nothing is near, each where it belongs."""
    places = spread_out(wanted, 10, 0, 100)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    assert all(places[b] - places[a] >= 10 - 1e-9 for a, b in pairwise(order))
    assert all(-1e-9 <= place <= 100 + 1e-9 for place in places)
    if all(abs(a - b) >= 10 for k, a in enumerate(wanted) for b in wanted[:k]):
        assert places == wanted


def test_a_map_has_its_numbers_and_no_colour_for_none():
    cells = Cells([[0.0, 1.0], [math.nan, 0.5]], ["a0", "a1", "b0", "b1"], 0.0, 1.0)
    panel = Panel(Axis(names=["0", "1"]), Axis(names=["a", "b"]), [cells])
    for drawing in drawings(Chart("m", "", "", [panel])):
        (group,) = (each for each in drawing.groups if each.kind == "cells")
        rects = {s.note: s.attributes["fill"] for s in group.shapes if s.note}
        assert rects == {"a0": heat(0, 0, 1), "a1": heat(1, 0, 1), "b0": "none", "b1": heat(0.5, 0, 1)}
        assert [s.text for s in group.shapes if s.tag == "text"] == ["0.00", "1.00", "0.50"]
    table = rows(Chart("m", "", "", [panel]))
    assert [(r["y"], r["x"], r["value"]) for r in table] == [
        ("a", "0", "0"),
        ("a", "1", "1"),
        ("b", "0", ""),
        ("b", "1", "0.5"),
    ]


def test_numbers_are_those_of_the_chart(run):
    cost = round_curves.cost(run)
    kind, _, data = csv_address(cost).partition(",")
    assert kind == "data:text/csv;charset=utf-8;base64"
    assert base64.b64decode(data).decode() == csv_of(cost)
    assert [(r["panel"], r["series"], r["x"], r["y"]) for r in rows(cost) if r["series"] != "down"] == [
        *(("cumulative traffic", "up", str(x), y) for x, y in enumerate(("0", "1000", "2000"))),
        *(("seconds per round", "", str(x), "1.5") for x in (1, 2)),
    ]
    assert {(r["y"], r["series"]): float(r["x"]) for r in rows(clients.ends(run))} == {
        **{("ann", "before"): 0.25, ("bob", "before"): 0.5, ("cyd", "before"): 0.0},
        **{(c, "preference accuracy"): v for c, v in (("ann", 0.75), ("bob", 1.0), ("cyd", 0.25))},
    }


def test_a_name_is_no_formula_for_a_spreadsheet(tmp_path):
    run = read_run(write_run(tmp_path / "run", {"=1+1": (0.25, 0.5), "@x": (0.25, 0.5), "$a$": (0.25, 0.5)}))
    assert {row["y"] for row in rows(clients.ends(run))} == {"'=1+1", "'@x", "$a$"}


@examples(20)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_any_curve_can_be_read_back(values):
    table = rows(chart_of(line([(float(x), y) for x, y in enumerate(values)])))
    assert [row["x"] for row in table] == [str(number) for number in range(len(values))]
    assert [float(row["y"]) for row in table] == pytest.approx(values, rel=1e-9, abs=1e-9)


def test_a_metric_of_any_name_is_drawn(tmp_path):
    """Names of metrics come from the round log. A control character would be no XML."""
    figures = {"a\x01b\u202ec": [1.0, 2.0], "<script>&": [1.0, 3.0], "$\\frac{$/\ud83d": [1.0, 2.0]}
    text = render(read_run(write_run(tmp_path / "run", figures=figures)))
    assert "a\\x01b\\u202ec" in text
    assert not {"\x01", "\u202e"} & set(text)
    assert text.count("<script") == 1


def test_names_in_any_script_are_written_without_a_warning(tmp_path):
    """A letter that no font has is a box; a dollar starts no formula."""
    names = {"安娜": (0.2, 0.3), "ミナ": (0.3, 0.4), "민아": (0.4, 0.5), "a\x1b[31mb\u202ec $x": (0.1, 0.4)}
    run = read_run(write_run(tmp_path / "run", names))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_file.save(clients.ends(run), tmp_path / "p.png")


@pytest.mark.parametrize(("name", "head"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml"), ("p.PDF", b"%PDF")])
def test_a_plot_is_of_the_kind_its_name_says(tmp_path, run, name, head):
    plot_file.save(comparison([run, run]), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(head)


def test_a_plot_of_another_kind_is_refused(tmp_path, run):
    with pytest.raises(ValueError, match=r"p\.jpg.*\.png"):
        plot_file.save(comparison([run, run]), tmp_path / "p.jpg")


def test_every_kind_of_mark_can_be_a_file(tmp_path):
    cells = Cells([[0.0, 1.0]], ["", ""], 0.0, 1.0)
    several = [
        Panel(Axis(names=["0", "1"]), Axis(names=["a"]), [cells]),
        Panel(
            Axis(log=True),
            Axis(log=True),
            [line([(1.0, 2.0), (2.0, 3.0)], look=Look(2, dash="5 4"), low=[1.0, 2.0], high=[3.0, 4.0])],
            at_x=1.5,
            at_y=2.0,
        ),
        Panel(Axis(), Axis(), [line([(1.0, 2.0), (2.0, 3.0)], step=True)]),
    ]
    plot_file.save(Chart("c", "", "", several), tmp_path / "p.svg")
    ET.parse(tmp_path / "p.svg")


def test_a_file_has_the_diagonal_of_its_panel(tmp_path):
    """From 2 to 3, where both axes have values; a dotted line."""
    drawn = []
    for wanted in (True, False):
        panel = Panel(Axis(), Axis(), [line([(1.0, 2.0), (3.0, 4.0)])], diagonal=wanted)
        plot_file.save(Chart("c", "", "", [panel]), tmp_path / "p.svg")
        drawn.append((tmp_path / "p.svg").read_text().count("stroke-dasharray"))
    assert drawn == [1, 0]


def test_a_comparison_file_has_what_its_runs_have(run):
    """Round 0 is the baseline. Bytes down lie behind bytes up."""
    over, ends, traffic = comparison([run, run]).panels
    mean, worst = over.shown[:2]
    assert [y for _, y in mean.points] == pytest.approx([0.25, 0.5, 2 / 3])
    assert [y for _, y in worst.points] == [0.0, 0.25, 0.25]
    assert ends.y.names == ["cyd", "ann", "bob"]
    assert [bars.spans for bars in traffic.shown[:2]] == [[(0, 0.0, 2000.0)], [(0, 2000.0, 6000.0)]]
