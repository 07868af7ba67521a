"""``prefed export`` on a base that is stored in bfloat16: what its lines load, and what it replaces."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from commands import prefed_
from finished import logprobs, small_experiment, small_place, write_run
from forked import Command
from prefed import Experiment
from prefed import run as run_experiment
from prefed.models.adapter_files import atomic_folder
from prefed.runs.loaded_run import load_run


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Runs in float32 over a base stored in bfloat16: without, with and of only personal parts."""
    folder = small_place(tmp_path_factory.mktemp("place"))
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    for method in ("feddpo", "fedpdpo", "fedper", "local"):
        tree = small_experiment(folder)
        tree["method"]["name"] = method
        run_experiment(Experiment.model_validate(tree), folder / method)
    return folder


@pytest.mark.parametrize(
    ("method", "client", "merge"),
    [
        *(
            (method, client, merge)
            for method, client in (("feddpo", None), ("local", "left"))
            for merge in (False, True)
        ),
        ("fedpdpo", None, False),
        ("fedpdpo", "left", False),
        ("fedper", None, True),
        ("fedper", "left", True),
    ],
)
def test_the_printed_lines_load_the_model_that_was_judged(place, tmp_path, method, client, merge):
    """The lines, run as they are printed, against the bench: loaded in bfloat16 the base's own rounding of
    about 2⁻⁸ would show, a thousand times what is allowed here."""
    words = ["--client", client] if client else []
    words += ["--merge"] if merge else []
    printed = prefed_("export", place / method, "--out", tmp_path / "it", *words)
    loaded = {}
    exec(re.sub("^ +", "", printed.partition("to load it:\n")[2], flags=re.MULTILINE), loaded)
    run = load_run(place / method, data=True)
    data = run.trainers.dataset.clients["left"].test
    expected = run.trainers.pair_trainer.score(run.model(client) if client else run.published_model, data)
    values = logprobs(loaded["model"].eval(), run.trainers.dataset.tokens, data)
    assert np.abs(values - expected.policy).max() < 1e-5 * np.abs(values).max()
    assert np.abs(values - expected.reference).max() > 1e-3
    assert AutoTokenizer.from_pretrained(tmp_path / "it")("up").input_ids


@pytest.mark.parametrize("method", ["fedpdpo", "fedper"])
def test_what_all_share_is_an_adapter_as_the_run_itself_writes_it(place, tmp_path, method):
    """File for file what the run left in adapters/shared: no bottleneck, no copy of the head; and merged,
    the base model's tensors, no head of its own among them."""
    shutil.copytree(place / method, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (place / method / "adapters/shared").iterdir()}
    prefed_("export", tmp_path / "run")
    after = {path.name: path.read_bytes() for path in (tmp_path / "run/adapters/shared").iterdir()}
    assert after == before
    assert "client.safetensors" not in after
    prefed_("export", tmp_path / "run", "--merge")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run/merged/shared")
    assert merged.config.tie_word_embeddings
    assert merged.lm_head.weight is merged.transformer.wte.weight


KEPT = {
    "run": "run contains the run; choose another --out",
    ".": "contains the run; choose another --out",
    "model": "contains the run's base model; choose another --out",
    "run/checkpoint": "is not an earlier export, because it contains 'COMMIT.json'; choose another --out",
    "run/adapters": "is not an earlier export, because it contains 'shared'; choose another --out",
    "mine": "is not an earlier export, because it contains 'tokenizer'; choose another --out",
    "run/config.toml": "config.toml is a file, not a folder; choose another --out",
}


def test_nothing_but_an_earlier_export_is_replaced(place, tmp_path):
    """Run, base model and other people's folders do not change, with --force or without."""
    for name in ("feddpo", "model"):
        shutil.copytree(place / name, tmp_path / ("run" if name == "feddpo" else name))
    config = (tmp_path / "run/config.toml").read_text()
    (tmp_path / "run/config.toml").write_text(config.replace(str(place / "model"), str(tmp_path / "model")))
    (tmp_path / "mine/tokenizer").mkdir(parents=True)
    (tmp_path / "mine/config.json").write_text("{}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for out, message in KEPT.items():
        for force in ((), ("--force",)):
            refused = prefed_("export", tmp_path / "run", "--out", tmp_path / out, *force, code=1)
            assert message in refused
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("first", [[], ["--merge"], ["--client", "left"]])
def test_an_earlier_export_of_any_kind_is_replaced(place, tmp_path, first):
    """Whole: none of its files is left next to the new ones."""
    method = "fedpdpo" if "--client" in first else "feddpo"
    prefed_("export", place / method, "--out", tmp_path / "it", *first)
    refused = prefed_("export", place / "feddpo", "--out", tmp_path / "it", code=1)
    assert "--out" in refused
    assert "--force" in refused
    prefed_("export", place / "feddpo", "--out", tmp_path / "it", "--force")
    names = {path.name for path in (place / "feddpo/adapters/shared").iterdir()}
    assert {path.name for path in (tmp_path / "it").iterdir()} == names
    assert {path.name for path in tmp_path.iterdir()} == {"it"}


@pytest.mark.parametrize("words", [[], ["--merge"], ["--client", "left"]])
def test_an_export_may_be_read_by_whom_the_umask_allows(place, tmp_path, words):
    """0644 with a umask of 022 and 0640 with one of 027, weights as well as configurations."""
    method = "fedpdpo" if "--client" in words else "feddpo"
    for mask, mode in ((0o022, 0o644), (0o027, 0o640)):
        before = os.umask(mask)
        try:
            prefed_("export", place / method, "--out", tmp_path / f"{mode:o}", *words)
        finally:
            os.umask(before)
        written = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / f"{mode:o}").iterdir()}
        assert set(written.values()) == {mode}
        assert any(name.endswith(".safetensors") for name in written)


def test_equal_adapters_are_equal_files(place, tmp_path):
    """The modules are in alphabetical order, whatever order a set of them has in this process."""
    config = json.loads((place / "feddpo/adapters/shared/adapter_config.json").read_text())
    assert len(config["target_modules"]) > 1
    assert config["target_modules"] == sorted(config["target_modules"])


def test_what_killed_exports_left_is_removed_by_the_next(tmp_path):
    """Of a process that is gone: its unfinished folder, and the old one where the new one was in place. An
    old one that was only moved aside comes back. What a living process writes, and others' files, stay."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    for name in (f"it.{gone.pid}.partial", f"it.{gone.pid}.old", "it.1.partial", "it.x.partial", "it.more"):
        (tmp_path / name).mkdir()
    (tmp_path / f"it.{gone.pid}.old/config.json").write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "it"):
        raise KeyboardInterrupt
    names = {"it", "it.1.partial", "it.x.partial", "it.more"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / "it/config.json").read_text() == "old"
    (tmp_path / f"it.{gone.pid}.old").mkdir()
    with atomic_folder(tmp_path / "it") as partial:
        (partial / "config.json").write_text("new")
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / "it/config.json").read_text() == "new"


def test_a_disk_that_is_full_while_weights_are_written_is_reported(place, tmp_path):
    """A limit of 8 KiB a file, which safetensors reports in an error of its own kind. It is one of a process
    of its own: this one's files have none."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    out = tmp_path / "disk/it"
    out.parent.mkdir()
    words = ["export", place / "feddpo", "--merge", "--out", out]
    code, errors = Command(tmp_path / "errors.txt", *words, before=limit).end()
    assert code == 1
    assert re.search(rf"error: cannot write {out} \([\d,]+ bytes\): .*File too large.*", errors)
    assert "free up space on the disk of" in errors
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize("renames", [0, 1])
def test_a_folder_is_somewhere_whole_whenever_its_replacement_ends(tmp_path, monkeypatch, renames):
    """Stopped in the first rename, the old one aside, or in the second, the new one in: nothing is deleted
    before both are done, and where the second fails the old one comes back."""
    folder = tmp_path / "it"
    folder.mkdir()
    (folder / "config.json").write_text("old")
    calls, rename = [], type(folder).rename

    def stopped(path, target):
        calls.append(path)
        if len(calls) == renames + 1:
            assert "old" in {file.read_text() for file in tmp_path.rglob("config.json")}
            raise OSError("no space left")
        return rename(path, target)

    monkeypatch.setattr(type(folder), "rename", stopped)
    with pytest.raises(OSError, match="no space left"), atomic_folder(folder) as partial:
        (partial / "config.json").write_text("new")
    assert {path.name: (path / "config.json").read_text() for path in tmp_path.iterdir()} == {"it": "old"}


def test_a_link_in_a_run_from_elsewhere_leads_nowhere(tmp_path):
    """Without --out an export replaces an earlier one, and here that is somebody's model."""
    run, model = write_run(tmp_path / "run"), tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (run / "adapters").mkdir()
    (run / "adapters/shared").symlink_to(model)
    assert "run contains a link" in prefed_("export", run, code=1)
    assert (model / "config.json").exists()
