"""Run directories that somebody else wrote: what is odd in them is said in a line, and obeyed by nobody."""

import csv
import io
import json
import shlex
from html.parser import HTMLParser

import pytest

from commands import prefed_
from finished import write_run
from prefed.runs.finished_run import RunError, read_run
from prefed.store import RunWriter, StoreError
from prefed.store.directory import refuse_links
from prefed.trackers.tools import MLflow, Results
from prefed.ui.pages.compare_page import render_comparison
from prefed.ui.pages.page import public_page, render

DEEP = f"{'[' * 100_000}{']' * 100_000}"


ODD = (
    ("summary.json", '"ann": 0.75', '"ann": NaN', "preference_accuracy.per_client.ann: "),
    ("summary.json", '"ann": 0.75', '"ann": 1e308', "preference_accuracy.per_client.ann: "),
    ("summary.json", '"seconds": 3.0', '"seconds": Infinity', "seconds: should be a finite number"),
    ("summary.json", '"test": 4', '"test": -4', "clients.ann.test: "),
    ("summary.json", '"left_out": 0', '"left_out": "x"', "left_out: "),
    ("summary.json", '"left_out": 0', f'"left_out": {DEEP}', "recursion"),
    ("summary.json", '"left_out": 0', '"origin": {"finished": "soon"}', "origin.finished: "),
    ("summary.json", '"left_out": 0', '"origin": {"hardware": {"cores": "x"}}', "origin.hardware.cores: "),
    ("summary.json", '"left_out": 0', '"origin": {"command": "prefed \'"}', "origin.command: "),
    ("summary.json", '"trainable"', '"trained"', "parameters.trainable: "),
    ("summary.json", '"left_out": 0', '"personal": {"gate": {"ann": {"x": 1}}}', "personal.gate.ann.x"),
    ("rounds.jsonl", '"dropped": []', '"dropped": [{}]', "line 1.dropped.line 1.client: "),
    ("rounds.jsonl", '"dropped": []', f'"dropped": {DEEP}', "maximum recursion"),
    ("config.toml", "seed = 1", f"seed = {DEEP}", "recursion"),
    ("checkpoint/COMMIT.json", '"totals": {}', f'"totals": {DEEP}', "recursion"),
    ("checkpoint/COMMIT.json", '"private": {}', '"private": {"../x": 1}', "state is named by a path"),
)


def test_an_odd_file_is_named(tmp_path, subtests):
    for number, (file, before, after, message) in enumerate(ODD):
        with subtests.test(message, number=number):
            run = write_run(tmp_path / str(number), fingerprint={})
            text = (run / file).read_text("utf-8")
            assert before in text
            (run / file).write_text(text.replace(before, after))
            with pytest.raises(RunError) as raised:
                read_run(run)
            assert file in str(raised.value)
            assert message in str(raised.value)


@pytest.mark.parametrize("name", ["cache", "cache/data", "align", "judge/ours", "checkpoint"])
def test_a_link_leads_to_no_folder_elsewhere(tmp_path, name):
    """Tokens, labels and verdicts are written below these. The control: a folder, and a link to a run."""
    run = write_run(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=f"{name} is a link to a folder"):
        read_run(run)
    with pytest.raises(StoreError, match=f"{name} is a link to a folder"):
        RunWriter(run, resume=True)
    (run / name).unlink()
    (run / name).mkdir()
    (tmp_path / "link").symlink_to(run)
    assert read_run(tmp_path / "link").name == "run"


def test_the_links_of_wandb_are_no_obstacle(tmp_path):
    """It makes one to the folder of its last run. The control: one to another place."""
    run = write_run(tmp_path / "run")
    (run / "wandb/offline-run-1").mkdir(parents=True)
    (run / "wandb/latest-run").symlink_to("offline-run-1")
    assert read_run(run).name == "run"
    refuse_links(run)
    (tmp_path / "elsewhere").mkdir()
    (run / "wandb/latest-run").unlink()
    (run / "wandb/latest-run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="wandb/latest-run is a link to a folder"):
        read_run(run)


def test_other_ends_of_lines_end_no_round(tmp_path):
    run = write_run(tmp_path / "run")
    text = (run / "rounds.jsonl").read_text("utf-8")
    drop = '"dropped": [{"client": "a\u2028b", "reason": "x"}]'
    (run / "rounds.jsonl").write_text(text.replace('"dropped": []', drop), encoding="utf-8")
    assert read_run(run).rounds[0]["dropped"][0]["client"] == "a\u2028b"


def test_json_on_a_terminal_holds_no_control(tmp_path):
    r"""U+009B begins a terminal's commands as ESC [ does; half a surrogate pair cannot be written at all."""
    name = "\x9b2J\u202e\ud83d"
    runs = [str(write_run(tmp_path / n, {name: (0.0, 0.5), "bob": (0.0, 0.5)})) for n in ("a", "b\x9b")]
    result = prefed_("compare", "--json", *runs)
    assert not set("\x9b\u202e\ud83d") & set(result)
    assert [run["name"] for run in json.loads(result)["runs"]] == ["a", "b\x9b"]


def test_a_page_that_leaves_names_no_folder(tmp_path):
    settings = {"model": {"name": "/home/eve/model"}, "data": {"train": {"path": "/home/eve/pairs.jsonl"}}}
    origin = {"command": "prefed run '/home/eve smith/first.toml' --set data.test=/home/eve/x.jsonl"}
    page = public_page(write_run(tmp_path / "run", settings=settings, origin=origin))
    assert "prefed run first.toml --set data.test=x.jsonl" in page
    assert "pairs.jsonl" in page
    assert not {"eve", str(tmp_path)} & set(page.replace("/", " ").split())
    assert "/home" not in page


def test_a_name_is_no_formula_in_mlflows_table(monkeypatch):
    texts = {}

    class Client:
        def log_text(self, run, text, name):
            texts[name] = text

    tracker = object.__new__(MLflow)
    tracker._client, tracker.known = Client(), "x"
    monkeypatch.setattr(tracker, "log", lambda number, figures: None)
    tracker.finish(Results(1, {}, ["client", "accuracy"], [["=cmd()", 0.5], ["ann", -0.5]], None))
    rows = list(csv.reader(io.StringIO(texts["clients.csv"])))
    assert rows[1:] == [["'=cmd()", "0.5"], ["ann", "-0.5"]]


class Elements(HTMLParser):
    """Start tags with the names of their attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.add((tag, tuple(name for name, _ in attributes)))


HOSTILE = "\"'><img src=x onerror=alert(1)></title></style></script><script>alert(2)</script>"


@pytest.mark.parametrize("page", [render, lambda run: render_comparison([run])])
def test_no_text_of_a_record_is_an_element_or_an_attribute(tmp_path, page):
    """Names of clients, metrics, models, methods, settings, versions, reasons, prompts and responses. The
    control: the parser finds the elements in the text itself."""
    pages = []
    for name, text in (("a", HOSTILE), ("b", "word")):
        clients = {f"{text} {k}": (0.25, 0.5, 0.75) for k in range(3)}
        settings = {"model": {"name": text}, "method": {"name": text, "lr": 0.1, text: text}}
        settings[text] = {text: text}
        origin = {"command": f"prefed {shlex.quote(text)}", "hardware": {"processor": text, "system": text}}
        run = write_run(
            tmp_path / name,
            clients,
            settings=settings,
            figures={text: [1.0, 2.0]},
            method=text,
            origin=origin,
            versions={text: text},
            set_aside={text: 3},
            split=text,
        )
        lines = (run / "rounds.jsonl").read_text()
        drop = json.dumps([{"client": text, "reason": text}])
        (run / "rounds.jsonl").write_text(lines.replace('"dropped": []', f'"dropped": {drop}'))
        answers = [("untouched", None, 0), ("shared", None, 1), ("own", f"{text} 0", 1)]
        rows = [{"round": r, "model": m, "client": c, "prompt": text, "text": text} for m, c, r in answers]
        (run / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pages.append(page(read_run(run)))
    assert pages[0].count("alert(2)") >= 5
    assert Elements(pages[0]).found == Elements(pages[1]).found
    assert ("img", ("src", "onerror")) in Elements(HOSTILE).found
