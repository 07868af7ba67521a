"""Clusters and the agreement of selectors, on pages and terminals, on runs written by hand."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finished import write_run
from prefed.runs.finished_run import RunRecord, read_run
from prefed.runs.metrics import VOTE
from prefed.train.metrics import federated_metric
from prefed.ui.pages import selector_agreement
from prefed.ui.pages.chart_data import Bars, Line
from prefed.ui.pages.page import render

ALONE = ({"ann": 1.0, "bob": 0.5, "cyd": 0.0}, {"ann": 0.25, "bob": 0.5, "cyd": 0.75})
"""Each selector's accuracies."""
MAJORITY = {"ann": 0.5, "bob": 0.5, "cyd": 0.25}
FIRST = {"clusters": [["ann"], ["bob", "cyd"]], "moved": [], "selector_losses": [0.5, 0.625]}
SECOND = {"clusters": [["ann", "bob"], ["cyd"]], "moved": ["bob"], "selector_losses": [0.25, 0.375]}


def selectors_run(path: Path, *groupings: dict[str, Any], **summary: Any) -> RunRecord:
    """A run of two selectors, with a grouping in each of its rounds."""
    figures = {f"selector_{u}_accuracy": federated_metric(own) for u, own in enumerate(ALONE)}
    figures |= {"majority_accuracy": federated_metric(MAJORITY)}
    path = write_run(path, **{**figures, "choice_loss": 0.625, "margin": 0.125, **summary})
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    for line, grouping in zip(lines, groupings, strict=False):
        line |= {**grouping, "balance_gap": 0.0}
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(path)


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    return selectors_run(tmp_path / "run", FIRST, SECOND)


def test_agreement_by_hand(run: RunRecord) -> None:
    """After the second grouping ann and bob are the first selector's: (1 + ½)/2 = ¾, cyd 0; the second's is
    cyd: ¾, the others (¼ + ½)/2 = ⅜."""
    first, second, vote = run.agreements
    assert (first.clients, first.mean, first.worst, first.members, first.others) == (2, 0.5, 0.0, 0.75, 0.0)
    assert (second.clients, second.mean, second.members, second.others) == (1, 0.5, 0.75, 0.375)
    assert (vote.name, vote.clients, vote.mean, vote.worst) == (VOTE, None, pytest.approx(1.25 / 3), 0.25)


def test_before_the_first_grouping_there_are_no_members(tmp_path: Path) -> None:
    run = selectors_run(tmp_path / "run")
    assert [(each.clients, each.members, each.others) for each in run.agreements] == [(None,) * 3] * 3
    assert selector_agreement.clusters_chart(run) is None
    table = selector_agreement.agreement_table(run.agreements, "test pairs")
    assert table is not None
    assert table.heads == ["selector", "mean", "worst"]


def test_clients_too_small_for_a_figure_are_in_no_clusters_mean(tmp_path: Path) -> None:
    """Bob is left out of the figures: the first cluster's mean is ann's alone. Its size counts him."""
    small = federated_metric(ALONE[0], small=["bob"])
    run = selectors_run(tmp_path / "run", SECOND, selector_0_accuracy=small)
    first = run.agreements[0]
    assert (first.clients, first.members, first.others, first.mean) == (2, 1.0, 0.0, 0.5)


def test_the_page_shows_clusters_moves_losses_and_agreement(run: RunRecord) -> None:
    page = re.sub(r"</?t[hd][^>]*>", "|", render(run))
    assert "Clusters after 2 groupings: 2 in selector-0, 1 in selector-1; 1 move in total." in page
    assert "|2, selector-0||2||0.2500||bob||ann, bob|" in page
    assert "|1, selector-1||2||0.6250||||bob, cyd|" in page
    assert "|selector-0||2||0.500||0.000||0.750||0.000|" in page
    assert "|vote of all||||0.417||0.250||||" in page
    assert "|cyd||4||selector-1|" in page
    assert "scores higher than the rejected one, by selector 1." in page
    assert "mean score margin of the chosen response over the rejected response, in nats." in page


@given(st.lists(st.lists(st.integers(0, 2), min_size=7, max_size=7), min_size=1, max_size=6))
def test_spans_are_the_groupings_again(table: list[list[int]]) -> None:
    """At every round from the first grouping to the last one exactly one span says what the last grouping
    says; two spans that follow each other have different clusters. Groupings are in rounds 3, 5, 7 …"""
    rounds = [
        {
            "round": 3 + 2 * k,
            "clusters": [[f"c{i}" for i in range(7) if row[i] == u] for u in range(3)],
            "moved": [],
            "selector_losses": [],
        }
        for k, row in enumerate(table)
    ]
    last = 3 + 2 * len(table)
    run = RunRecord(Path(), {}, tuple(rounds), {"rounds": last}, {})
    for client, own in selector_agreement.spans(run).items():
        for number in range(3, last + 1):
            got = table[min((number - 3) // 2, len(table) - 1)][int(client[1:])]
            assert [u for start, end, u in own if start <= number < end] == [got]
        assert all(one[2] != other[2] for one, other in pairwise(own))


def test_each_client_is_a_bar_in_the_colour_of_its_cluster(run: RunRecord) -> None:
    """Ann and bob end in the first cluster and stand above cyd; bob is in the second for round 1."""
    chart = selector_agreement.clusters_chart(run)
    assert chart is not None
    (panel,) = chart.panels
    shown = [each for each in panel.shown if isinstance(each, Bars)]
    bars = {span: each.color for each in shown for span in each.spans}
    assert set(bars) == {(0, 0.5, 2.5), (1, 0.5, 1.5), (1, 1.5, 2.5), (2, 0.5, 2.5)}
    assert bars[0, 0.5, 2.5] == bars[1, 1.5, 2.5] != bars[2, 0.5, 2.5] == bars[1, 0.5, 1.5]
    assert panel.y.names == ["ann", "bob", "cyd"]
    assert "ann, selector-0: rounds 1 to 2" in shown[0].notes


def test_of_very_many_clients_sizes_and_moves_are_drawn(tmp_path: Path) -> None:
    names = [f"c{k:04}" for k in range(selector_agreement.CLIENTS + 1)]
    groupings = [
        {"clusters": [names[:cut], names[cut:]], "moved": names[:moved], "selector_losses": []}
        for cut, moved in ((100, 0), (150, 50))
    ]
    run = selectors_run(tmp_path / "run", *groupings)
    chart = selector_agreement.clusters_chart(run)
    assert chart is not None
    curves = [
        [[y for _, y in line.points] for line in panel.shown if isinstance(line, Line)]
        for panel in chart.panels
    ]
    assert curves == [[[100, 150], [201, 151]], [[0, 50]]]
    page = render(run)
    assert "Number of clients per cluster, and number of clients that moved at each grouping." in page
    assert "c0039 and 110 more" in page
    assert "c0040" not in page
