"""The gallery: every cell of its notebooks runs, and what they show is what the cells print."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
display = pytest.importorskip("IPython.display")

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all, in which the first notebook makes the model."""
    return tmp_path_factory.mktemp("examples")


def masked(text: str) -> str:
    """A text without numbers and the widths of columns, which differ from machine to machine."""
    return re.sub(r"[-+]?\d+", "0", re.sub(r"\s+", " ", text)).strip()


def played(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that a notebook's cells leave; what each prints is compared with what the notebook shows.

    The cells run in this process, because a kernel for each would import PyTorch anew.
    """
    names: dict[str, Any] = {}
    for cell in nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4).cells:
        if cell.cell_type != "code":
            continue
        shown: list[Any] = []
        monkeypatch.setattr(display, "display", lambda figure, metadata, shown=shown: shown.append(metadata))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(cell.source, name, "exec"), names)
        texts = [output["text"] for output in cell.outputs if output["output_type"] == "stream"]
        assert masked(printed.getvalue()) == masked("".join(texts))
        # An assignment or a call of print shows nothing else; a picture has its description.
        pictures = [o["metadata"] for o in cell.outputs if o["output_type"] == "display_data"]
        assert shown == [{"image/png": {"alt": each["image/png"]["alt"]}} for each in pictures]
    return names


@pytest.fixture
def play(place: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(place)
    return lambda name: played(name, monkeypatch)


def test_own_data(play: Any) -> None:
    """All clients agree on tone: held-out pairs of it are ordered better than by the untouched model, and the
    adapter in PEFT prefers the friendly one of two responses to a question that nobody has."""
    names = play("own-data")
    summary = names["result"].summary
    assert summary["preference_accuracy"]["mean"] > summary["baseline_accuracy"]["mean"] + 0.2
    base = names["AutoModelForCausalLM"].from_pretrained("prefed-examples/model")
    assert names["friendliness"](names["PeftModel"].from_pretrained(base, names["adapter"])) > 2


@pytest.mark.rare
def test_personal_models(play: Any) -> None:
    """Ann and Dan want opposite styles: no shared model serves both, so the worst client gains most."""
    names = play("personal-models")
    shared, own = names["columns"]["FedDPO"], names["columns"]["FedSDG"]
    assert own["mean"] > shared["mean"] + 0.1
    assert own["worst"] > shared["worst"] + 0.1
    model, peft = names["AutoModelForCausalLM"], names["PeftModel"]
    ahead = {}
    for client in ("ann", "dan"):
        base = model.from_pretrained("prefed-examples/model")
        ahead[client] = names["calm"](peft.from_pretrained(base, f"prefed-examples/exported/{client}"))
    assert ahead["ann"] > 2
    assert ahead["dan"] < -2


@pytest.mark.rare
def test_selectors_to_policy(play: Any) -> None:
    """The policy prefers what ann's selector was trained to prefer, on a prompt that nobody has."""
    names = play("selectors-to-policy")
    base = names["AutoModelForCausalLM"].from_pretrained("prefed-examples/model")
    before = names["calm"](base)
    policy = names["PeftModel"].from_pretrained(base, "prefed-examples/fedbiscuit/align/adapter")
    assert names["calm"](policy) > before + 0.5


@pytest.mark.rare
def test_no_server(play: Any) -> None:
    """W of a ring of four has the eigenvalues 1, 1/3, 1/3 and -1/3: a mix shrinks deviations from the mean by
    a factor of 3, and their squares, which are recorded, by 9."""
    result = play("no-server")["result"]
    for record in result.rounds:
        assert record["consensus_after"] == pytest.approx(record["consensus_before"] / 9, rel=1e-3)
    assert result.summary["preference_accuracy"]["mean"] > result.summary["baseline_accuracy"]["mean"] + 0.1


@pytest.mark.rare
def test_three_sites(play: Any) -> None:
    """The two others outvote the east, so the shared model serves it worse than its personal one does. That
    one is exported at the site, where its private state is, and no process is left."""
    pytest.importorskip("nvflare", reason="needs prefed[nvflare]")
    names = play("three-sites")
    summary = names["record"].summary
    own, shared = (summary[f"{name}_accuracy"]["per_client"]["east"] for name in ("preference", "shared"))
    assert own > shared + 0.2
    assert summary["preference_accuracy"]["mean"] > summary["baseline_accuracy"]["mean"] + 0.2
    assert Path("prefed-examples/east/adapter_model.safetensors").is_file()
    assert list(Path("prefed-examples/wards/east/state").glob("runs/*/clients/east@*"))
    assert all(process.poll() is not None for process in names["sites"])


@pytest.mark.rare
def test_own_method(play: Any) -> None:
    """The LoRA of one of two equal blocks is sent: half of the trained numbers."""
    summary = play("own-method")["result"].summary
    assert summary["parameters"]["communicated"] * 2 == summary["parameters"]["trainable"]
    assert summary["preference_accuracy"]["mean"] > summary["shared_accuracy"]["mean"]
