"""Run records, tables and plots, on runs written by hand."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from finished import CLIENTS, write_run
from prefed.runs.finished_run import RunError, read_run
from prefed.train.metrics import federated_metric, spread
from prefed.ui.pages import clients
from prefed.ui.pages.comparison_data import Compared, differences, disagreements, labels
from prefed.ui.pages.comparison_tables import differences_table, runs_table
from prefed.ui.pages.page import render
from prefed.ui.pages.tables import terminal


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "first"))


def printed(renderable, width=200):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(renderable)
    return console.export_text()


def side_by_side(*runs):
    compared = Compared(runs)
    return printed(terminal(runs_table(compared, compared.labels)))


def differing(runs):
    return printed(terminal(differences_table(runs, labels(runs))))


def test_a_spread_in_six_numbers():
    """0.75, 1.0 and 0.25: mean 2/3; deviations 1/12, 1/3, −5/12 give a variance of
    (1 + 16 + 25)/144/3 = 42/432 = 7/72; Jain 2²/(3·(9/16 + 1 + 1/16)) = 4/(3·13/8) = 32/39.
    A tenth of three clients is one client, the worst."""
    figure = spread(federated_metric({"ann": 0.75, "bob": 1.0, "cyd": 0.25}))
    assert figure.mean == pytest.approx(2 / 3)
    assert (figure.worst, figure.worst_decile, figure.best) == (0.25, 0.25, 1.0)
    assert figure.std == pytest.approx((7 / 72) ** 0.5)
    assert figure.jain == pytest.approx(32 / 39)


def test_the_worst_tenth_of_twenty_is_two():
    assert spread(federated_metric({str(k): k / 20 for k in range(20)})).worst_decile == pytest.approx(0.025)


def test_jain_of_nothing_at_all_is_even():
    assert spread(federated_metric({"a": 0.0, "b": 0.0})).jain == 1.0


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=30).filter(lambda values: max(values) > 1e-3),
    st.floats(0.1, 10),
)
def test_jain_is_a_share_and_has_no_unit(values, factor):
    """Cauchy and Schwarz: (Σx)² ≤ n Σx²; for x ≥ 0 Σx² ≤ (Σx)². Scaling cancels."""
    figure = spread(federated_metric({str(k): x for k, x in enumerate(values)}))
    scaled = spread(federated_metric({str(k): factor * x for k, x in enumerate(values)}))
    assert 1 / len(values) - 1e-12 <= figure.jain <= 1 + 1e-12
    assert scaled.jain == pytest.approx(figure.jain)
    assert scaled.std == pytest.approx(factor * figure.std, abs=1e-12)


def test_a_record_reads_what_a_run_left(run):
    assert (run.name, run.method, run.split, run.clients) == (
        "first",
        "feddpo",
        "test",
        ("ann", "bob", "cyd"),
    )
    assert list(run.figures) == ["baseline_accuracy", "preference_accuracy"]
    assert [figure.label for figure in run.figures.values()] == ["before", "preference accuracy"]
    assert run.curve("preference_accuracy") == ([1, 2], [0.5, pytest.approx(2 / 3)])
    assert run.curve("preference_accuracy", "worst") == ([1, 2], [0.25, 0.25])
    assert run.curve("loss") == ([1, 2], [0.7, 0.35])
    assert run.curve("loss", "worst") == ([], [])
    assert run.curve("margin") == ([1, 2], [0.25, 0.5])
    assert run.own_figures == ("margin",)
    assert run.pairs("ann") == 4


def test_rounds_without_an_evaluation_or_a_loss_are_gaps(tmp_path):
    """A round in which nothing could be merged has a null loss; evaluations may be rare."""
    path = write_run(tmp_path / "run")
    first, second = (json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines())
    del first["evaluation"], first["preference_accuracy"]
    second["loss"] = None
    (path / "rounds.jsonl").write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    run = read_run(path)
    assert run.curve("preference_accuracy")[0] == [2]
    assert run.curve("loss") == ([1], [0.7])
    assert "<html" in render(run)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "summary.json").unlink(), "is not finished: it stopped before the first round"),
        (lambda path: (path / "config.toml").unlink(), "is not a run directory: it has no config.toml"),
        (lambda path: (path / "rounds.jsonl").unlink(), "rounds.jsonl is missing; restore it from a backup"),
    ],
)
def test_a_directory_that_holds_no_finished_run_is_refused(tmp_path, damage, message):
    path = write_run(tmp_path / "run")
    damage(path)
    with pytest.raises(RunError, match=message):
        read_run(path)


def cut(name, share):
    """Leave the first ``share`` of a file, as a full disk would."""

    def damage(path):
        text = (path / name).read_text()
        (path / name).write_text(text[: int(len(text) * share)])

    return damage


def put(name, old, new):
    return lambda path: (path / name).write_text((path / name).read_text().replace(old, new))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut("summary.json", 0.5), "summary.json is damaged: .*line 1 column"),
        (cut("rounds.jsonl", 0.9), "rounds.jsonl is damaged: line 2: .*column"),
        (cut("rounds.jsonl", 0), "rounds.jsonl is damaged: it has 0 of 2 rounds; restore it from a backup"),
        (put("rounds.jsonl", '"round": 2', '"round": null'), "line 2.round: should be a valid integer"),
        (cut("config.toml", 0.05), "config.toml is damaged: .*; restore it from a backup"),
        (put("config.toml", "[method]", "[mothed]"), "config.toml is damaged: method: field required"),
        (
            put("summary.json", '"bytes": {"up": 2000, "down": 4000}', '"bytes": 3'),
            "summary.json is damaged: bytes: should be an object, not 3; restore it from a backup",
        ),
        (lambda path: (path / "summary.json").write_text("[]"), "summary.json is damaged: the content"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong_in_it(tmp_path, damage, message):
    path = write_run(tmp_path / "run")
    damage(path)
    with pytest.raises(RunError, match=message) as error:
        read_run(path)
    assert str(error.value).startswith(str(path))


def test_the_error_for_a_misspelt_directory_names_the_nearest(tmp_path):
    write_run(tmp_path / "feddpo-seed1")
    with pytest.raises(RunError, match=r"no such directory; did you mean .*feddpo-seed1\?"):
        read_run(tmp_path / "feddpo-sed1")
    with pytest.raises(RunError, match=r"it has no config\.toml; runs inside: feddpo-seed1"):
        read_run(tmp_path)


def test_a_comparison_marks_the_best_and_what_differs(tmp_path):
    better = {client: (*values[:2], 1.0) for client, values in CLIENTS.items()}
    runs = [
        read_run(write_run(tmp_path / "a", fingerprint={"data": "x"})),
        read_run(
            write_run(
                tmp_path / "b",
                better,
                settings={"method": {"name": "fedprox", "lr": 0.02, "beta": 0.1, "mu": 1.0}},
                fingerprint={"data": "x"},
            )
        ),
    ]
    text = side_by_side(*runs)
    assert re.search(r"a +feddpo +2 +0.667 +0.250 +0.250 +0.250 +2.0 kB +4.0 kB +3.0 s", text)
    assert re.search(r"b +fedprox +2 +1.000 +1.000", text)
    assert "*" not in text
    assert differences(runs) == {"method.name": ["feddpo", "fedprox"], "method.lr": ["0.01", "0.02"]}
    assert re.search(r"method.lr +0.01 a; 0.02 b", differing(runs))
    assert differences_table(runs[:1], ["a"]) is None


def test_a_setting_that_one_run_leaves_out_is_a_difference(tmp_path):
    """Of the same method, or outside [method]; not what another method does not have."""
    method = {"name": "feddpo", "lr": 0.01, "beta": 0.1}
    runs = [
        read_run(write_run(tmp_path / name, settings=settings))
        for name, settings in (
            ("a", {"method": method, "cohort": {"size": 3}}),
            ("b", {"method": {**method, "clip": 1.0}}),
            ("c", {"method": {"name": "other", "lr": 0.01, "mu": 1.0}}),
        )
    ]
    assert differences(runs) == {
        "method.name": ["feddpo", "feddpo", "other"],
        "cohort.size": ["3", None, None],
        "method.clip": [None, "1.0", None],
    }
    assert re.search(r"cohort.size +3 a; unset b, c", differing(runs))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"fingerprint": {"data": "y"}}, "other data"),
        ({"settings": {"data": {"train": {"path": "other.jsonl"}}}}, r"other \[data\] settings"),
        ({"split": "validation", "fingerprint": {"data": "x"}}, "evaluated on validation pairs.*"),
        ({"clients": {"ann": (0.1, 0.2, 0.3)}, "fingerprint": {"data": "x"}}, "evaluated on other clients"),
        ({"settings": {"model": {"name": "larger"}}, "fingerprint": {"data": "x"}}, "another base model"),
    ],
)
def test_runs_that_cannot_be_set_side_by_side_are_flagged(tmp_path, changes, why):
    first = read_run(write_run(tmp_path / "a", fingerprint={"data": "x"}))
    other = read_run(write_run(tmp_path / "b", **changes))
    assert list(disagreements([first, first, other])) == [2]
    assert re.fullmatch(why, disagreements([first, other])[1])
    assert "b *" in side_by_side(first, other)


def test_the_engine_is_no_difference(tmp_path):
    first = read_run(write_run(tmp_path / "a"))
    other = read_run(write_run(tmp_path / "b", settings={"engine": {"name": "local", "workers": 8}}))
    assert differences([first, other]) == {}
    assert disagreements([first, other]) == {}


def test_runs_of_one_name_are_distinguished(tmp_path):
    paths = [write_run(tmp_path / folder / "run") for folder in ("x", "y")]
    assert labels([read_run(path) for path in paths]) == ["x/run", "y/run"]
    assert labels([read_run(paths[0])]) == ["run"]


def test_many_clients_are_drawn_as_a_distribution(tmp_path):
    """The k-th of 200 clients stands at k/200: the curve is the sorted accuracies."""
    run = read_run(write_run(tmp_path / "run", {f"c{k}": (0.5, (k * 37 % 200) / 200) for k in range(200)}))
    line = clients.ends(run).panels[0].shown[-1]
    assert [x for x, _ in line.points] == pytest.approx([k / 200 for k in range(200)])
    assert [y for _, y in line.points] == pytest.approx([(k + 1) / 200 for k in range(200)])


def test_the_same_model_in_another_folder_is_comparable(tmp_path):
    """The folder's name differs; the digest of the model decides."""
    first = write_run(tmp_path / "a", fingerprint={"data": "x", "model": "m"})
    settings = {"model": {"name": "moved"}}
    for digest, count in (("m", 0), ("n", 1)):
        other = write_run(tmp_path / digest, settings=settings, fingerprint={"data": "x", "model": digest})
        assert len(disagreements([read_run(first), read_run(other)])) == count
