"""A model card over a run's record that somebody else wrote."""

import pytest

from finished import write_run
from prefed.models import ModelConfig
from prefed.runs.export import Export
from prefed.runs.finished_run import read_run
from prefed.ui.pages.card import model_card

EVIL = "x\n---\n\n# Evil"


def card(folder, **summary):
    base = folder / "base"
    base.mkdir()
    (base / "README.md").write_text(f"---\nlicense: {EVIL!r}\n---\n".replace("'", '"'))
    run = read_run(write_run(folder / "run", **summary))
    model = ModelConfig.model_validate({"name": str(base), "lora": {"rank": 1}})
    return model_card(
        run, Export(client=None, selector=None, aligned=False, taste=None, merged=False, more=(), model=model)
    )


def test_what_a_record_holds_adds_no_line(tmp_path):
    text = card(tmp_path, method=EVIL, versions={"torch": EVIL})
    assert "\n# Evil" not in text
    assert text.count(r"x\n---\n\n# Evil") == 5


@pytest.mark.parametrize(("epsilon", "words"), [(2.5, "epsilon 2.5 at delta 1e-05"), (None, "have no noise")])
def test_the_card_says_what_privacy_the_run_promises(tmp_path, epsilon, words):
    told = {"kind": "central", "epsilon": epsilon, "delta": 1e-5, "adjacency": "a", "bound": "b"}
    text = card(tmp_path, privacy={**told, "releases": 2, "draws": "system"})
    assert words in text
    assert "no noise was added" not in text
