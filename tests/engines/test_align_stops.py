"""Alignments that stop, continue, and find what another process or a user changed."""

import shutil
from dataclasses import replace

import pytest

from alignments import align_killed, content, make_alignment
from alignments import alignment as alignment
from alignments import place as place
from alignments import selectors as selectors
from crashes import flip
from prefed.align import AlignError, align
from prefed.core import Callback


def stop_at(alignment, stage, step):
    """An alignment until this step of this stage."""

    class Stop(Callback):
        def on_stage_step(self, name, done, total, figures):
            if name == stage and (done >= step):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        align(replace(alignment, callback=Stop()))


def changing(alignment, ran):
    """A function that gives the alignment with changed settings; it notes the stages that ran."""

    class Watch(Callback):
        def on_stage_end(self, stage, figures):
            ran.append(stage)

    return lambda **changes: replace(
        alignment, config=alignment.config.model_copy(update=changes), callback=Watch()
    )


@pytest.fixture(scope="module")
def whole(place, selectors, tmp_path_factory):
    """The folder of an alignment that was not stopped."""
    folder = tmp_path_factory.mktemp("whole") / "align"
    align(make_alignment(place, selectors, folder))
    return folder


def test_killed_at_every_write(alignment, whole, monkeypatch):
    """Every process is killed in the middle of its seventh write or rename: half of the bytes are there. The
    next one continues, until one ends. The folder is then what one process leaves."""
    processes = align_killed(alignment, monkeypatch, at=7, most=40)
    assert 6 < processes < 40
    assert content(alignment.folder) == content(whole)


def test_a_changed_byte_in_what_a_stopped_stage_left_is_noticed(alignment, whole):
    """A changed completion or score is made again, to the same bytes. A changed state of training is refused
    with its name, and the stage done again gives the same bytes too."""
    for name, batch, there in (("completions", 3, b'"sample": 1'), ("labels", 1, b'"scores": [')):
        stop_at(alignment, name, batch)
        path = alignment.folder / {"completions": "completions.jsonl", "labels": "scores.jsonl"}[name]
        flip(path, path.read_bytes().index(there) + len(there) + 3)
    stop_at(alignment, "train", 1)
    path = alignment.folder / "train.state"
    flip(path, path.stat().st_size // 2)
    with pytest.raises(AlignError, match=r"train\.state is damaged.*--stage train"):
        align(alignment)
    align(alignment, "train")
    assert content(alignment.folder) == content(whole)


def test_a_stage_alone_and_changed_settings(alignment, whole):
    """Stages that are done are not done again. Another learning rate is refused until the stage is asked for;
    then completions and labels stay as they are."""
    shutil.copytree(whole, alignment.folder)
    before = content(alignment.folder)
    ran = []
    changed = changing(alignment, ran)

    align(changed())
    assert (ran, content(alignment.folder)) == ([], before)
    with pytest.raises(AlignError, match=r"(?s)stage train .* lr: 0\.001 → 0\.01\n.*--stage train"):
        align(changed(lr=0.01))
    align(changed(lr=0.01), "train")
    assert ran == ["train"]
    after = content(alignment.folder)
    assert after["labels.jsonl"] == before["labels.jsonl"]
    assert after["adapter/adapter_model.safetensors"] != before["adapter/adapter_model.safetensors"]
    with pytest.raises(AlignError, match=r"(?s)stage completions .* temperature: 1\.0 → 0\.5"):
        align(changed(temperature=0.5, lr=0.01))
    with pytest.raises(AlignError, match="selectors changed"):
        align(replace(changed(lr=0.01), sources={"clients": "a", "selectors": "c"}))
    with pytest.raises(AlignError, match="did you mean 'labels'"):
        align(changed(), "label")
    (alignment.folder / "labels.jsonl").write_text("")
    with pytest.raises(AlignError, match=r"labels\.jsonl is missing or was changed; .* --stage labels"):
        align(changed(lr=0.01))
    align(alignment, "prompts")
    assert content(alignment.folder) == before


@pytest.mark.parametrize("change", ["byte", "gone"])
def test_a_checkpoint_that_changed_since_its_epoch_is_noticed(alignment, change):
    """Training stops after the first of two epochs. Later its file is another."""
    stop_at(alignment, "train", 1)
    path = alignment.folder / "checkpoints/epoch-1/adapter_model.safetensors"
    if change == "byte":
        flip(path)
    else:
        path.unlink()
    with pytest.raises(AlignError, match=r"checkpoints/epoch-1 is missing or was changed; .* --stage train"):
        align(replace(alignment))
    assert not (alignment.folder / "adapter").exists()
    assert "digest" not in align(alignment, "train")["train"]["epochs"][0]
