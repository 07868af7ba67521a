"""The chain of a site's log, approvals and withdrawals."""

import hashlib
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
import tomli_w
from typer.testing import CliRunner

from federating import experiment, site_config
from prefed.core import files
from prefed.data import FederatedDataset
from prefed.data.dataset import ClientSizes
from prefed.networks.federation import approvals_withdrawals
from prefed.networks.federation import site as site_module
from prefed.networks.federation.audit_log import SentLog, check_chain
from prefed.networks.federation.federate import experiment_for_sites
from prefed.networks.federation.messages import FORMAT, VERSION
from prefed.networks.federation.site import Site
from prefed.networks.federation.unix_socket import pack, unpack
from prefed.store import StoreError
from prefed.ui.cli.app import app

RUN, OTHER = "3fa9b2c4d5e6f708", "0123456789abcdef"


@pytest.fixture
def log(tmp_path):
    """Six lines over two months, the first two from before the chain, as an earlier version wrote them."""
    made = SentLog(tmp_path / "log")
    old = [{"time": "2026-10-01T00:00:00+00:00", "what": "train", "client": f"old{n}"} for n in range(2)]
    (tmp_path / "log" / "2026-10.jsonl").write_text("".join(json.dumps(each) + "\n" for each in old))
    for number in range(4):
        made.add("train", client=f"w{number}")
    return made


def lines_of(log):
    (path,) = (path for _, path in [max((p.name, p) for p in log._folder.glob("*.jsonl"))])
    return path, path.read_bytes().splitlines(keepends=True)


def test_each_line_has_the_hash_of_the_line_before(log):
    """By hashlib, over the bytes; the first also of the last older line, which it protects."""
    texts = [line for _, line in log.lines()]
    for before, line in pairwise(texts[1:]):
        assert json.loads(line)["before"] == hashlib.sha256(before).hexdigest()
    chain = check_chain(log)
    assert (chain.lines, chain.older, chain.faults, chain.cut) == (6, 2, [], [])
    assert chain.head == hashlib.sha256(texts[-1]).hexdigest()
    assert chain.start.endswith("line 1")
    assert "2026-10" not in chain.start


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda ls: [ls[0], ls[1].replace(b"w1", b"w9"), *ls[2:]], ["line 3: LOG, line 2 was altered"]),
        (lambda ls: [ls[0], *ls[2:]], ["line 2: line 2 of the log missing above"]),
        (lambda ls: ls[3:], ["line 1: lines 1 to 3 of the log missing above"]),
        (
            lambda ls: [ls[0], ls[1], ls[1], *ls[2:]],
            ["line 3: line 2 of the log is repeated or out of order"],
        ),
        (lambda ls: [*ls[:2], b'{"time": "t", "what": "train"}\n', *ls[2:]], ["line 3: has no number"]),
    ],
    ids=["altered", "missing", "start missing", "repeated", "inserted"],
)
def test_a_change_is_named(log, change, found):
    path, lines = lines_of(log)
    path.write_bytes(b"".join(change(lines)))
    faults = check_chain(log).faults
    assert len(faults) >= len(found)
    for fault, start in zip(faults, found, strict=False):
        assert fault.startswith(f"{path}, {start.replace('LOG', str(path))}")


def test_moved_lines_are_named(log):
    path, lines = lines_of(log)
    path.write_bytes(b"".join([lines[0], lines[2], lines[1], lines[3]]))
    assert [fault.removeprefix(f"{path}, ") for fault in check_chain(log).faults] == [
        "line 2: line 2 of the log missing above",
        "line 3: line 2 of the log is repeated or out of order",
        "line 4: line 3 of the log missing above",
    ]


def test_the_last_older_line_and_a_month_are_in_the_chain(log):
    old = min(log._folder.glob("*.jsonl"))
    old.write_bytes(old.read_bytes().replace(b"old1", b"new1"))
    assert [fault.endswith("was altered") for fault in check_chain(log).faults] == [True]
    old.unlink()
    assert len(check_chain(log).faults) == 1


def test_only_a_known_hash_shows_that_the_end_is_gone(log):
    """Lines that were cut away, or written again with a new chain, leave a chain without a fault."""
    head = check_chain(log).head
    path, lines = lines_of(log)
    path.write_bytes(b"".join(lines[:-1]))
    assert check_chain(log).faults == []
    assert len(check_chain(log, head).faults) == 1
    path.write_bytes(b"".join(lines))
    log.add("train", client="w4")
    assert check_chain(log, head).faults == []


@pytest.mark.parametrize("kept", range(1, 100, 7))
def test_a_line_cut_anywhere_breaks_no_chain(log, kept):
    """A process is killed after any part of a line; a whole line that only lacks its newline is an entry."""
    path, lines = lines_of(log)
    part = lines[-1][:-1][: max(1, len(lines[-1][:-1]) * kept // 99)]
    path.write_bytes(b"".join(lines[:-1]) + part)
    whole = part == lines[-1][:-1]
    log.add("train", client="w5")
    log.add("train", client="w6")
    chain = check_chain(log)
    assert chain.faults == []
    assert [*chain.cut] == ([] if whole else [f"{path}, line 4"])
    names = [entry["client"] for entry in log.entries()]
    assert names == ["old0", "old1", "w0", "w1", "w2", *(["w3"] if whole else []), "w5", "w6"]


def test_the_chain_goes_over_months_and_empty_or_cut_files(log):
    """A month whose first line was cut off, and one whose file the disk had no room to fill."""
    (log._folder / "2999-01.jsonl").write_bytes(b'{"time": "29')
    (log._folder / "2999-02.jsonl").write_bytes(b"")
    log.add("train", client="w4")
    assert check_chain(log).faults == []
    assert [*log.entries()][-1]["number"] == 5


@pytest.fixture
def site_file(tmp_path):
    def write(**changes):
        config = site_config(tmp_path, tmp_path, "w0", **changes)
        path = tmp_path / "site.toml"
        path.write_text(tomli_w.dumps(config.model_dump(exclude_none=True)))
        return site_module.SiteConfig.load(path)

    return write


def cli(*words):
    done = CliRunner().invoke(app, ["site", *map(str, words)])
    return done.exit_code, done.output


def test_the_command_checks_and_exports(site_file, tmp_path):
    config = site_file()
    log = SentLog(tmp_path / "site-w0" / "log")
    for number in range(3):
        log.add("train", run=RUN, round=number, client="w0")
    code, shown = cli("log", tmp_path / "site.toml", "--export", tmp_path / "bundle.json")
    assert code == 0
    bundle = json.loads((tmp_path / "bundle.json").read_text())
    assert bundle["head"] in shown
    assert (bundle["federation"], bundle["site"], bundle["faults"]) == (config.federation, "site-w0", [])
    for before, line in pairwise(bundle["log"]):
        assert json.loads(line)["before"] == hashlib.sha256(before.encode()).hexdigest()
    assert cli("log", tmp_path / "site.toml", "--export", tmp_path / "bundle.json")[0] == 1
    path, lines = lines_of(log)
    path.write_bytes(lines[0] + lines[2])
    code, shown = cli("log", tmp_path / "site.toml", "--known", bundle["head"])
    assert code == 1
    assert "line 2 of the log missing above" in shown
    assert cli("status", tmp_path / "site.toml", "--known", "x")[0] == 2


@pytest.fixture
def joins(monkeypatch):
    """Ask a site of w0 and w1 to join; its answer."""

    def own_dataset(asked, folder):
        clients = {"w0", "w1"} - {*asked.data.exclude}
        data = FederatedDataset.without_pairs(dict.fromkeys(sorted(clients), ClientSizes(8, 0, 2)))
        return replace(data, fingerprint=" ".join(sorted(clients)))

    monkeypatch.setattr(site_module, "own_dataset", own_dataset)

    def join(config, place, run=RUN, **changes):
        site = Site(config)
        common = {"format": FORMAT, "prefed": VERSION, "federation": "wards", "run": run}
        text = experiment_for_sites(experiment(place, **changes))
        answer = unpack(site.answer(pack(**common, kind="join", experiment=text)))[0]
        site.close()
        return answer

    return join


def test_a_run_starts_once_somebody_approved_it(site_file, joins, tmp_path):
    """The refusal has the digest and the command. Other settings have another digest; an approval that has
    expired is none, and the last one counts."""
    config, today = site_file(limits={"approval": "runs"}), datetime.now(UTC).date()
    refused = joins(config, tmp_path)["refused"]
    command = refused.split("`")[1]
    _, _, word, path, digest, *_ = command.split()
    assert (word, path, len(digest)) == ("approve", str(tmp_path / "site.toml"), 64)
    signed = ("--by", "Dr Ada", "--reason", "ethics vote 12")
    assert cli("approve", path, digest)[0] == 2
    assert cli("approve", path, digest[:16], *signed)[0] == 1
    for until, allowed in ((today - timedelta(1), False), (today, True), (None, True)):
        assert cli("approve", path, digest, *signed, *(("--until", str(until)) if until else ()))[0] == 0
        assert ("clients" in joins(config, tmp_path)) == allowed
    assert digest not in joins(config, tmp_path, rounds=4)["refused"]
    assert cli("approve", path, digest, *signed, "--until", str(today - timedelta(1)))[0] == 0
    assert "expired" in joins(config, tmp_path)["refused"]
    entries = [*SentLog(tmp_path / "site-w0" / "log").entries()]
    assert [each["by"] for each in entries if each["what"] == "approved"] == ["Dr Ada"] * 4
    assert {each["digest"] for each in entries if each["what"] == "join"} == {digest}


def test_a_version_of_code_is_approved(site_file, tmp_path, monkeypatch):
    config = site_file(limits={"approval": "code"})
    monkeypatch.setattr(approvals_withdrawals, "code_digests", lambda asked: {"pack.mod:M": "c" * 64})
    with pytest.raises(approvals_withdrawals.RefusalError, match=f"this version of pack.mod:M .*{'c' * 64}"):
        approvals_withdrawals.check_approved("", None, config)
    approvals_withdrawals.approve(config, "c" * 64, "Dr Ada", "read", None)
    approvals_withdrawals.check_approved("", None, config)
    monkeypatch.setattr(approvals_withdrawals, "code_digests", lambda asked: {})
    approvals_withdrawals.check_approved("", None, config)


def test_a_client_withdraws(site_file, joins, tmp_path):
    """What the state has of it is deleted; a run that had it is refused, one without it and a new one
    are not; nothing changes while the site runs."""
    config, state = site_file(), tmp_path / "site-w0"
    assert {*joins(config, tmp_path)["clients"]} == {"w0", "w1"}
    files.private_folder(state / "runs" / OTHER)
    (state / "runs" / OTHER / "order.json").write_bytes(files.dumps_with_digest({"names": {"w0": "w0"}}))
    for path in (
        f"runs/{RUN}/clients/w1@1",
        f"runs/{RUN}/answers.jsonl",
        "cache/data/x",
        f"runs/{OTHER}/text.json",
    ):
        (state / path).parent.mkdir(parents=True, exist_ok=True)
        (state / path).write_text("secret words of w1")
    site = Site(config)
    with pytest.raises(StoreError, match="stop it first"):
        approvals_withdrawals.withdraw(config, "w1", "Dr Ada", "asked for it")
    site.close()
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "worker": "v10"}
    (tmp_path / "w0.jsonl").write_text(json.dumps(row) + "\n")
    before = len([*SentLog(state / "log").lines()])
    code, shown = cli("withdraw", tmp_path / "site.toml", "v11", "--by", "Dr Ada", "--reason", "asked")
    assert code == 1
    assert "no run and no row of this site has a client 'v11'; did you mean 'v10'" in " ".join(shown.split())
    assert len([*SentLog(state / "log").lines()]) == before
    words = ("withdraw", tmp_path / "site.toml", "w1", "--by", "Dr Ada", "--reason", "asked for it")
    code, shown = cli(*words)
    assert code == 0
    left = {str(path.relative_to(state)) for path in state.rglob("*") if path.is_file()}
    assert {f"runs/{OTHER}/text.json", f"runs/{RUN}/order.json"} <= left
    assert not any("w1@" in path or "answers" in path or path.startswith("cache") for path in left)
    assert f"deleted runs/{RUN}/clients" in shown
    assert "'w1' withdrew" in joins(config, tmp_path)["refused"]
    assert {*joins(config, tmp_path, run="f" * 16)["clients"]} == {"w0"}
    assert cli(*words)[0] == 0
    code, shown = cli("withdraw", tmp_path / "site.toml", "--all", *words[3:])
    assert code == 0
    assert "this site withdrew" in joins(config, tmp_path, run="e" * 16)["refused"]
    assert not (state / "runs" / OTHER / "text.json").exists()
    assert check_chain(SentLog(state / "log")).faults == []
