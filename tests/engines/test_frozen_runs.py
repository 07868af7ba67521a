"""Run directories of earlier versions, made by scripts/freeze_run.py, opened by the code of today."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prefed import Experiment, load_run, read_run, run
from prefed.config import ConfigError
from prefed.runs.evaluate import evaluate
from prefed.runs.export import write_model
from prefed.runs.finished_run import RunError
from prefed.store import RunReader, StoreError

FROZEN = Path(__file__).parent.parent / "frozen"
CLIENTS = ("left", "right")
ONE_STEP = 0.02
"""The learning rate of the frozen runs: about what a step of Adam moves a number by."""


@pytest.fixture(params=sorted(path.name for path in FROZEN.iterdir()))
def frozen(request, tmp_path, monkeypatch):
    """A copy of what a version left. The paths in the run are relative to its folder."""
    folder = tmp_path / request.param
    shutil.copytree(FROZEN / request.param, folder)
    monkeypatch.chdir(folder)
    return folder


def states(path):
    """Name → tensors of the server and of each client, after the last round."""
    reader = RunReader(path)
    every = {"server": reader.server(), **{client: reader.client(client) for client in CLIENTS}}
    return {name: {group: t.flat for group, t in s.tensors.items()} for name, s in every.items()}


def same(one, other):
    return all(
        torch.equal(flat, other[name][group])
        for name, groups in one.items()
        for group, flat in groups.items()
    )


def test_it_is_opened_evaluated_and_exported(frozen):
    """The shared adapter is copied from the checkpoint, so its bits are those that the old version wrote.
    Log-probabilities are sums, whose last bits depend on the processor. Accuracies only depend on signs; the
    closest pair has a difference of 0.01 nats, far from rounding."""
    record = read_run("run")
    assert (record.method, len(record.rounds), record.clients) == ("fedsdg", 2, CLIENTS)
    evaluation = evaluate(load_run("run", data=True))
    for name in ("baseline_accuracy", "preference_accuracy", "reward_accuracy", "shared_accuracy"):
        assert evaluation.figures[name] == record.summary[name], name
    for name in ("margin", "dpo_loss"):
        assert evaluation.figures[name]["mean"] == pytest.approx(record.summary[name], rel=1e-4)
    write_model("run", Path("exported"))
    files = [Path(folder) / "adapter_model.safetensors" for folder in ("exported", "run/adapters/shared")]
    new, old = map(load_file, files)
    assert new.keys() == old.keys()
    assert all(torch.equal(new[name], old[name]) for name in old)


def test_it_is_resumed(frozen):
    """A third round continues from the frozen states as from those of two rounds made now. On a processor
    that gives the first two rounds the bits of the frozen ones, the third has the same bits too. Another one
    sums in another order (AVX2 or AVX-512), which over two rounds moved no number by more than 0.0004;
    forgotten states, moments or draws move it by a step and more."""
    tables = Experiment.load("run/config.toml").tables()
    run(Experiment.from_tables(tables, "now"), "now")
    alike = same(states("run"), states("now"))
    longer = Experiment.from_tables({**tables, "rounds": 3}, "longer")
    for folder in ("run", "now"):
        run(longer, folder, resume=True)
    old, new = states("run"), states("now")
    if alike:
        assert same(old, new)
    for name, groups in old.items():
        for group, flat in groups.items():
            assert torch.allclose(flat, new[name][group], rtol=0, atol=ONE_STEP / 4), (name, group)


def test_a_run_of_a_later_format_is_refused_before_its_settings_are_read(frozen):
    """Its settings may have keys that this version does not know; the advice must not be to remove them."""
    commit, config = Path("run/checkpoint/COMMIT.json"), Path("run/config.toml")
    commit.write_text(json.dumps({**json.loads(commit.read_text()), "format": 2, "prefed": "3.1.0"}))
    experiment = Experiment.load(config)
    config.write_text("of_a_later_version = 1\n" + config.read_text())
    with pytest.raises(ConfigError, match="of_a_later_version"):
        Experiment.load(config)
    advice = r"COMMIT\.json has format 2, and prefed .* reads format 1: use the prefed that wrote it, 3\.1\.0"
    with pytest.raises(RunError, match=advice):
        read_run("run")
    with pytest.raises(StoreError, match=advice):
        run(experiment, "run", resume=True)
