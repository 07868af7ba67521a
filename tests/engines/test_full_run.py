"""Whole runs in which every weight of a tiny language model trains, from Python."""

import pytest

import toy
from commands import prefed_
from finished import small_experiment
from prefed import ConfigError, Experiment, run
from prefed.core import Key
from prefed.models import load_client
from prefed.models.tiny import make_tiny
from prefed.runs.loaded_run import load_run
from prefed.store import RunReader
from preferences import jsonl
from toy import left

REFUSE = {
    "fedpdpo": "bottleneck, head, reward",
    "fedper": "head",
    "fedrep": "head",
    "fedsdg": "personal_lora",
    "fedbn": "norm",
    "feddpa": "gate, personal_lora",
}
"""Method → the parts that it puts on a frozen model, with default settings."""
FROZEN = ("fedvpl", "fedvpa", "lore", "pal", "icl")
"""Methods on a frozen model that train no part of it."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model of one small block, and pairs of three clients."""
    folder = tmp_path_factory.mktemp("full")
    lines = [
        {
            "prompt": f"Question {number}?",
            "chosen": f" yes please {number}",
            "rejected": f" no thanks {number}",
            "worker": f"w{number % 3}",
        }
        for number in range(24)
    ]
    jsonl(folder / "train.jsonl", lines[:18])
    jsonl(folder / "test.jsonl", lines[18:])
    texts = [line["prompt"] + line["chosen"] for line in lines]
    make_tiny(folder / "model", texts, Key(0), layers=1, width=16, heads=2, vocabulary=270, steps=2)
    return folder


def experiment(place, method="feddpo", *, merge=None, graph=None, **settings):
    tree = small_experiment(
        place,
        model={"name": str(place / "model"), "train": "full"},
        method={"name": method, "lr": 0.01, "local_steps": 2, "batch_size": 4, **settings},
        merge=merge or {},
        **({"graph": graph} if graph else {}),
    )
    return Experiment.model_validate(tree)


@pytest.fixture(scope="module")
def finished(place):
    return run(experiment(place), place / "run")


@pytest.mark.parametrize("method", ["feddpo", "decdpo"])
def test_stopped_and_resumed_it_ends_the_same(place, tmp_path, method):
    """Stopped in the second round, where optimisers continue with kept moments of every weight."""
    whole = experiment(place, method, optimizer_state="kept")
    run(whole, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(whole, tmp_path / "parts", callbacks=[toy.InterruptAt(7)])
    assert RunReader(tmp_path / "parts").commit.round == 1
    run(whole, tmp_path / "parts", resume=True)
    assert left(tmp_path / "parts") == left(tmp_path / "whole")


def test_every_weight_travels_and_the_reference_stays(finished):
    """A message has four bytes for each of the model's weights, and less than a twentieth more. Each client's
    reference is the model as it was loaded: its score of the first tensors has no margin."""
    loaded = load_run(finished.path, data=True)
    counts, size = finished.summary["parameters"], loaded.backbone.causal.num_parameters()
    assert (counts["trainable"], counts["communicated"]) == (size, size)
    messages = 3 * 2
    assert messages * 4 * size < finished.summary["bytes"]["up"] < 1.05 * messages * 4 * size
    assert finished.adapter is None
    trained = loaded.published_model
    assert (trained - loaded.backbone.initial).norm() > 0.1
    loaded.trainers.score("w0", trained, "test")
    scores = loaded.trainers.score("w0", loaded.backbone.initial, "test")
    assert (scores.policy == scores.reference).all()


def test_an_exported_model_loads(finished, tmp_path):
    """``prefed export`` writes a folder that gives a model with the trained weights."""
    done = prefed_("export", finished.path, "--out", tmp_path / "model")
    assert "(weights)" in done
    assert load_client(tmp_path / "model").extract().equal(finished.server.tensors["model"])


@pytest.mark.parametrize("method", sorted({*FROZEN, *REFUSE}))
def test_methods_with_parts_of_their_own_refuse(place, method):
    with pytest.raises(ConfigError, match=f"{method} adds its own parts to a frozen model") as refused:
        Experiment.model_validate({**experiment(place).model_dump(), "method": {"name": method}})
    assert REFUSE.get(method, "") in str(refused.value)


def test_what_else_is_refused(place):
    """Rules on a LoRA's factors, a dtype of frozen models, and an alignment that has no model of its own."""
    tree, full = experiment(place).model_dump(), {"name": "m", "train": "full"}
    for changes, text in (
        ({"merge": {"lora": "ffa"}}, "applies to the factors of a LoRA"),
        ({"model": {**full, "dtype": "bfloat16"}}, "train = 'full' requires float32"),
        ({"method": "fedbis", "align": {"prompts": "p.txt"}}, "set the model to align in"),
        ({"align": {"prompts": "p.txt", "objective": "grpo"}}, "compares all completions: set pairs = 'all'"),
        ({"align": {"prompts": "p.txt", "objective": "sft"}}, "'sft' cannot train on labelled pairs"),
        ({"align": {"prompts": "p.txt", "model": full}}, "model.train = 'full': the alignment trains a LoRA"),
    ):
        with pytest.raises(ConfigError, match=text):
            Experiment.model_validate({**tree, **changes})
