"""What reports say of blocks that clients personalise and of an explicit reward head, on runs by hand."""

import json
import re

import pytest
from rich.console import Console

from finished import CLIENTS, write_run
from prefed.runs.finished_run import read_run
from prefed.train.metrics import federated_metric
from prefed.ui.pages import clients, round_curves
from prefed.ui.pages.comparison_tables import MEANS, means_table
from prefed.ui.pages.page import render
from prefed.ui.pages.tables import terminal

GATES = {"gate": {"ann": {"0": 0.25, "1": 0.5, "11": 1.0}, "cyd": {"0": 0.75, "1": 0.25, "11": 0.0}}}
HEAD = {
    "combined_accuracy": federated_metric({"ann": 0.5, "bob": 1.0, "cyd": 0.75}),
    "explicit_accuracy": federated_metric({"ann": 0.25, "bob": 0.5, "cyd": 0.0}),
    "agreement": federated_metric(dict.fromkeys(CLIENTS, 0.125)),
    "margin": 0.5,
    "explicit_margin": 0.4375,
}


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "gated", personal=GATES))


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory):
    """A run whose two evaluations have a reward head's figures."""
    path = write_run(tmp_path_factory.mktemp("runs") / "rewarded", **HEAD)
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        line["evaluation"] |= HEAD
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(path)


def printed(renderable):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(renderable)
    return console.export_text()


def test_a_profile_has_clients_in_rows_and_blocks_in_their_order(gated):
    """Block 11 after block 1, though "11" sorts before "2"; bob, who never took part, has no row. Means:
    (0.25 + 0.75)/2, (0.5 + 0.25)/2, (1 + 0)/2."""
    profile = gated.profiles["gate"]
    assert profile.clients == ("ann", "cyd")
    assert profile.blocks == (0, 1, 11)
    assert profile.values.tolist() == [[0.25, 0.5, 1.0], [0.75, 0.25, 0.0]]
    assert profile.means.tolist() == [0.5, 0.375, 0.5]
    assert profile.ends == "0.50 in block 0, 0.50 in block 11"


def test_many_clients_are_a_median_and_where_they_lie(tmp_path):
    """Client k of 0 … 100 has k/100: the median is 0.5, the middle half 0.25 to 0.75; in block 1 halved."""
    gates = {f"c{k}": {"0": k / 100, "1": k / 200} for k in range(101)}
    run = read_run(write_run(tmp_path / "run", personal={"gate": gates}))
    ((_, chart, _),) = clients.blocks(run)
    everybody, half = chart.panels[0].shown
    assert [y for _, y in half.points] == pytest.approx([0.5, 0.25])
    assert (everybody.low, everybody.high) == ([0.0, 0.0], [1.0, 0.5])
    assert (half.low, half.high) == (pytest.approx([0.25, 0.125]), pytest.approx([0.75, 0.375]))


def test_the_page_says_which_layers_are_personal(gated):
    page = render(gated)
    assert "Personalised layers" in page
    assert "Gates, means over 2 clients: block 0 0.50, block 1 0.38, block 11 0.50." in page
    assert "0 uses only the shared model, 1 the full personal LoRA" in page
    assert '<th scope="row">cyd</th><td>0.75</td><td>0.25</td><td>0.00</td>' in page
    assert "private states, rounded to two decimals, so this page discloses them to its readers." in page
    assert "The scale ranges from 0.00 to 1.00." in page
    assert "<title>cyd, block 11: 0.00</title>" in page


def test_the_page_says_what_a_reward_head_comes_to(rewarded):
    """Means over clients: combined (0.5 + 1 + 0.75)/3, the head alone 0.25."""
    page = render(rewarded)
    assert (
        "combined accuracy ends at 75.0%; explicit accuracy ends at 25.0%; agreement ends at 12.5%." in page
    )
    assert "the reward head scores higher" in page
    assert "mean reward-head score of the chosen response minus that of the rejected response." in page
    (chart,) = round_curves.reward_head(rewarded)
    curves = {line.name: [y for _, y in line.points] for line in chart.panels[0].shown}
    assert curves == {
        "combined accuracy": [0.75] * 2,
        "explicit accuracy": [0.25] * 2,
        "agreement": [0.125] * 2,
    }


def test_shifts_are_a_chart_and_a_table_where_runs_have_them(tmp_path, gated):
    """The chart starts at 0, the base model. A run from before the metric has neither."""
    curves = {"chosen_shift": [1.0, -4.25], "rejected_shift": [-2.0, -9.0]}
    ends = {name: values[-1] for name, values in curves.items()}
    run = read_run(write_run(tmp_path / "run", figures=curves, **ends))
    (chart,) = round_curves.shifts(run)
    assert [line.points for line in chart.panels[0].shown] == [
        [(0.0, 0.0), (1.0, 1.0), (2.0, -4.25)],
        [(0.0, 0.0), (1.0, -2.0), (2.0, -9.0)],
    ]
    assert chart.alt.endswith("ends at -4.2 nats (chosen) and -9.0 nats (rejected).")
    assert not {*curves} & {*round_curves.own_metrics(run), *round_curves.evaluated_metrics(run)}
    shifts, _ = MEANS.items()
    table = means_table([run, gated], ["run", "gated"], *shifts)
    assert re.search(r"run +-4.250 +-9.000", printed(terminal(table)))
    assert (round_curves.shifts(gated), means_table([gated], ["gated"], *shifts)) == ([], None)
