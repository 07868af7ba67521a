"""What a person at a site sees of what goes wrong there; without NVIDIA FLARE."""

import json
import traceback
from pathlib import Path

import pytest

from federating import experiment, site_config
from prefed.core.text import is_ours
from prefed.data import DataError, DataMismatchError
from prefed.engines import JobFactory, WorkerError
from prefed.engines.backends.processes import Worker
from prefed.models import ModelError
from prefed.networks.federation import experiment as site_job
from prefed.networks.federation import site as site_module
from prefed.networks.federation.experiment import own_dataset
from prefed.networks.federation.federate import experiment_for_sites
from prefed.networks.federation.messages import FORMAT, VERSION
from prefed.networks.federation.site import LONGEST_REASON, Site
from prefed.networks.federation.unix_socket import pack, unpack
from prefed.store import StoreError

ROWS = "w0.jsonl: 2 rows cannot be used:\n  row 3: empty\n  row 4: \x1b[31m"


@pytest.fixture
def joins(tmp_path, monkeypatch):
    """Start a run at a site where its data raise ``error``: its answer, what a person saw, its log."""
    opened = []

    def joins(error):
        def fails(*arguments):
            raise error

        got = []
        monkeypatch.setattr(site_module, "own_dataset", fails)
        opened.append(Site(site_config(tmp_path, tmp_path, "w0"), got.append))
        text = experiment_for_sites(experiment(Path("x")))
        request = pack(
            format=FORMAT, prefed=VERSION, federation="wards", run="0" * 16, kind="join", experiment=text
        )
        return unpack(opened[0].answer(request))[0], got, [*opened[0].log.entries()]

    yield joins
    for site in opened:
        site.close()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (DataError(ROWS), "DataError: w0.jsonl: 2 rows cannot be used: row 3: empty row 4: \\x1b[31m"),
        (ModelError("no such folder"), "ModelError: no such folder"),
        (StoreError("damaged"), "StoreError: damaged"),
        (FileNotFoundError(2, "No such file", "a"), "FileNotFoundError: [Errno 2] No such file: 'a'"),
    ],
)
def test_what_a_person_can_mend_takes_one_line(joins, caplog, error, line):
    """Also where the message has several. The hub receives only the kind."""
    answer, got, (entry,) = joins(error)
    assert answer == {"failed": f"{type(error).__name__}: see the site's log"}
    assert got == [line]
    assert entry["failed"] == line
    assert not caplog.records


def test_what_nobody_knows_has_its_trace(joins, caplog):
    _, got, _ = joins(KeyError("pairs"))
    assert got == ["KeyError: 'pairs'"]
    (record,) = caplog.records
    assert record.exc_info[0] is KeyError


def test_a_long_reason_is_cut_and_in_the_log(joins):
    """As long in the log, where quotation marks take two characters and letters of any script one."""
    _, got, (entry,) = joins(DataError("é'\"" * LONGEST_REASON))
    assert got == [entry["failed"]]
    assert entry["failed"].startswith("DataError: é'")
    assert len(entry["failed"]) == LONGEST_REASON + 2


def test_data_of_another_run_are_no_reason(tmp_path, monkeypatch):
    """The folder holds other data, so these are built in a folder of their own, where they cannot be read:
    that alone is the reason."""
    tried = []

    def build(asked, folder):
        tried.append(folder)
        raise (
            DataMismatchError("use another folder", "a1")
            if len(tried) == 1
            else DataError("no column 'clinet'")
        )

    monkeypatch.setattr(site_job, "build_data", build)
    with pytest.raises(DataError, match="clinet") as caught:
        own_dataset(experiment(tmp_path), tmp_path / "cache")
    assert caught.value.__context__ is None
    assert len({*tried}) == 2


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("text", "known", "message"),
    [
        ({"experiment": "rounds ="}, True, "a worker process failed: .* is not TOML"),
        ({}, False, "(?s)a worker process failed:\nTraceback .*KeyError: 'experiment'"),
    ],
)
def test_a_process_that_trains_says_what_a_person_can_mend(text, known, message):
    worker = Worker()
    worker.build(JobFactory("prefed.networks.federation.experiment:build_site_job", json.dumps(text)), 1)
    with pytest.raises(WorkerError, match=message) as caught:
        worker.receive()
    worker.stop()
    assert bool(caught.value.trace) != known
    assert site_module._reason(caught.value).startswith("a worker process failed: ")
    assert "\n" not in site_module._reason(caught.value)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ValueError("tensors do not fit"), "ValueError: tensors do not fit"),
        (StopIteration(), "StopIteration"),
    ],
)
def test_the_reason_of_a_failed_visit_is_what_was_raised(error, raised):
    """The task that failed is a note below it, of which the log has the client and the round already."""
    error.add_note("(client 'w0', round 1, train)")
    try:
        raise error
    except Exception:
        trace = traceback.format_exc()
    assert site_module._reason(WorkerError("it failed", trace)) == f"a worker process failed: {raised}"
    assert site_module._reason(WorkerError("it failed", raised)) == f"a worker process failed: {raised}"


def test_errors_of_other_packages_are_not_ours():
    assert is_ours(StoreError(""))
    assert not is_ours(json.JSONDecodeError("", "", 0))
