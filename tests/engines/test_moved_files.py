"""Traces and graphs in files next to the experiment: found there, moved with it, compared by their
content."""

import pytest

from prefed import Experiment, run
from prefed.core import Callback, Key
from prefed.models.tiny import make_tiny
from prefed.store import RunReader, StoreError
from preferences import jsonl

EXPERIMENT = """
seed = 3
rounds = 2

[data]
train = "train.jsonl"
test_fraction = 0.25
partition = {{ by = "column", column = "worker" }}

[model]
name = "model"
lora = {{ rank = 1, dropout = 0.0 }}

[method]
name = "{method}"
local_steps = 1
batch_size = 2

{table}

[engine]
threads = 1
"""
FILES = {
    "trace.csv": (
        "feddpo",
        '[fleet]\ntrace = "trace.csv"\nserver = "buffered"\nbuffer = 1',
        "client,start,end,seconds\nw0,,,1\nw1,,,2\n",
    ),
    "edges.txt": ("decdpo", '[graph]\nname = "edges"\nfile = "edges.txt"', "w0 w1\n"),
}
"""File → the method, its table, and what is in the file: two clients always there, the edge between them."""


class Stops(Callback):
    def on_round_end(self, record):
        raise KeyboardInterrupt


@pytest.mark.parametrize("name", FILES)
def test_a_file_may_lie_elsewhere_but_not_say_anything_else(tmp_path, name):
    """The folder of an interrupted run's experiment is moved, and the run resumes; then the file changes."""
    method, table, content = FILES[name]
    first = tmp_path / "first"
    first.mkdir()
    rows = [{"prompt": f"Q{k}", "chosen": " yes", "rejected": " no", "worker": f"w{k % 2}"} for k in range(8)]
    jsonl(first / "train.jsonl", rows)
    make_tiny(
        first / "model", ["Q0 yes", "Q1 no"], Key(0), layers=1, width=16, heads=2, vocabulary=260, steps=1
    )
    (first / "experiment.toml").write_text(EXPERIMENT.format(method=method, table=table))
    (first / name).write_text(content)
    made = Experiment.load(first / "experiment.toml")
    with pytest.raises(KeyboardInterrupt):
        run(made, tmp_path / "run", callbacks=[Stops()])
    second = tmp_path / "second"
    first.rename(second)
    again = Experiment.load(second / "experiment.toml")
    assert again.tables() != made.tables()
    (second / name).write_text(content + "\n")
    with pytest.raises(StoreError, match=r"cannot continue: its (graph|trace) changed since it started"):
        run(again, tmp_path / "run", resume=True)
    (second / name).write_text(content)
    run(again, tmp_path / "run", resume=True)
    assert RunReader(tmp_path / "run").commit.round == 2
