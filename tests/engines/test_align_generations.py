"""Generations without a run, most with tastes: what they draw, and how they stop and continue."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.engines.test_align_stops import changing, stop_at

from alignments import align_killed, content, make_alignment, rows
from alignments import place as place
from alignments import voters as voters
from crashes import flip
from prefed.align import AlignError, KnownTastes, Selectors, align
from prefed.align.policy import read_state
from prefed.align.tastes import Generation, draw, dumps_tastes, load_tastes
from prefed.core import Key
from prefed.data import Record, SelectorConfig
from prefed.data.tokens import prompt_hash
from prefed.models import ModelConfig, load_backbone
from prefed.train.generation import Sampling, complete_batch
from small_models import away

VARIATIONAL = {"latent": 4, "widths": (16, 8), "scale": 2.0}
KNOWN = KnownTastes(
    population=torch.zeros(4),
    posteriors={
        "warm": (torch.tensor([2.0, 0, 0, 0]), torch.full((4,), -2.0)),
        "cold": (torch.tensor([-2.0, 0, 0, 0]), torch.full((4,), -3.0)),
    },
    prototypes=torch.tensor([[2.0, 0, 0, 0], [0, 2.0, 0, 0]]),
    labels={"warm": 0, "cold": 1, "mild": 1},
)


@pytest.fixture(scope="module")
def selectors(place):
    """One selector with a latent taste, at a random place."""
    model = ModelConfig(name=str(place / "model"), lora={"rank": 2}, variational=VARIATIONAL)
    backbone = load_backbone(model, Key(0), frozenset({"variational", "posterior", "latent"}))
    shared = away(backbone.layout, backbone.initial, scale=0.3)
    return Selectors(backbone, {"shared": shared}, SelectorConfig(), max_length=64)


def tasting(place, selectors, folder, **changes):
    plain = make_alignment(place, selectors, folder)
    keys = {"tastes": "posteriors", "generations": 2, "regenerate": 2, "completions": 2, "lr": 0.03}
    model = plain.model.model_copy(update={"variational": selectors.backbone.config.variational})
    config = plain.config.model_copy(update=keys | changes)
    return replace(plain, config=config, model=model, tastes=lambda: KNOWN)


@pytest.fixture(scope="module")
def whole(place, selectors, tmp_path_factory):
    """An alignment of two generations that was not stopped, and its summary."""
    alignment = tasting(place, selectors, tmp_path_factory.mktemp("whole") / "align")
    return alignment, align(alignment)


def test_a_taste_is_drawn_from_a_client_or_a_prototype():
    """Of 4,000 draws half are each client's (± 4 √(1/4/4000) = 0.032), with its mean and σ = e^(log σ²/2);
    prototype 1 has two of three clients. The file gives the tastes back bit for bit."""
    drawn = [draw(KNOWN, "posteriors", Key(1).at("n", number)) for number in range(4000)]
    of = Counter(own.origin["client"] for own in drawn)
    assert abs(of["warm"] / 4000 - 0.5) < 0.032
    for client, (mean, log_variance) in KNOWN.posteriors.items():
        z = torch.stack([own.z for own in drawn if own.origin["client"] == client])
        sigma = (log_variance / 2).exp()
        assert torch.allclose(z.mean(0), mean, atol=float(4 * sigma[0] / len(z) ** 0.5))
        assert torch.allclose(z.std(0), sigma, rtol=0.1)
    drawn = [draw(KNOWN, "prototypes", Key(1).at("n", number)) for number in range(900)]
    of = Counter(own.origin["prototype"] for own in drawn)
    assert abs(of[1] / 900 - 2 / 3) < 4 * (2 / 9 / 900) ** 0.5
    assert all(torch.equal(own.z, KNOWN.prototypes[own.origin["prototype"]]) for own in drawn)
    with pytest.raises(AlignError, match="use 'posteriors'"):
        draw(replace(KNOWN, labels={}), "prototypes", Key(1))
    with pytest.raises(AlignError, match="posteriors"):
        draw(replace(KNOWN, posteriors={}), "posteriors", Key(1))


def test_known_tastes_survive_their_file(tmp_path):
    noisy = replace(KNOWN, population=torch.randn(4, generator=torch.Generator().manual_seed(0)) / 3)
    (tmp_path / "tastes.json").write_bytes(dumps_tastes(noisy))
    again = load_tastes(tmp_path)
    assert torch.equal(again.population, noisy.population)
    assert torch.equal(again.posteriors["cold"][1], noisy.posteriors["cold"][1])
    assert (again.labels, again.prototypes.tolist()) == (noisy.labels, noisy.prototypes.tolist())
    (tmp_path / "tastes.json").write_text("{}")
    with pytest.raises(AlignError, match=r"tastes\.json is missing or damaged.*--stage tastes"):
        load_tastes(tmp_path)


def check_generation(alignment, number, tensors, selectors_for, tastes=None):
    """The completions are those of ``tensors``, one by one at their own keys, and the scores those of
    ``selectors_for`` a prompt's number; ``tastes`` are the prompts'."""
    folder, policy = alignment.folder / "generations" / str(number), alignment.policy
    made = rows(folder, "completions.jsonl")
    how, base = Sampling(max_tokens=6, temperature=1.0), alignment.key.at("generation", number)
    for row in made:
        own = alignment.template.prompt_ids(row["prompt"])
        key = base.at("prompt", prompt_hash(row["prompt"])).at("sample", row["sample"])
        z = None if tastes is None else tastes[row["index"]][None]
        ((tokens, _),) = complete_batch(policy, tensors, [own], how, [key], tastes=z)
        assert policy.tokenizer.decode(tokens, skip_special_tokens=True) == row["completion"]
    texts = {(row["index"], row["sample"]): row["completion"] for row in made}
    prompts = {row["index"]: row["prompt"] for row in made}
    for row in rows(folder, "scores.jsonl"):
        pair = Record(prompts[row["index"]], *(texts[row["index"], k] for k in row["samples"]))
        _, scores = selectors_for(row["index"]).scores([pair])
        assert row["scores"] == pytest.approx(scores[:, 0].tolist(), abs=1e-5)


def test_every_prompt_has_one_taste_which_completes_and_labels(whole, selectors):
    """z is drawn at the prompt's own name, whatever its place; all completions of a prompt are at it, the
    second generation's by the policy after the first; and scores are the selector's at it."""
    alignment, summary = whole
    folder, config = alignment.folder, alignment.config
    prompts = [row["prompt"] for row in rows(folder, "prompts.jsonl")]
    held = set(range(len(prompts))) - {row["index"] for row in rows(folder, "generations/2/tastes.jsonl")}
    labelled = {row["index"] for row in rows(folder, "generations/1/labels.jsonl")}
    assert len(held) == round(config.held_out * len(labelled))
    assert held <= labelled
    policy = alignment.policy
    for number in (1, 2):
        drawn = rows(folder, f"generations/{number}/tastes.jsonl")
        for row in drawn:
            key = alignment.key.at("taste", prompt_hash(prompts[row["index"]])).at("generation", number)
            expected = draw(KNOWN, "posteriors", key)
            assert (row["client"], row["z"]) == (expected.origin["client"], expected.z.tolist())
        z = {row["index"]: torch.tensor(row["z"]) for row in drawn}
        made = rows(folder, f"generations/{number}/completions.jsonl")
        assert {row["index"] for row in made} == (set(range(10)) if number == 1 else set(range(10)) - held)
        tensors = policy.initial
        if number == 2:
            tensors, moments, _ = read_state(folder / "generations/1/train.state", "train-1")
            assert moments.steps == 2

        def at_taste(index, z=z):
            at = {"latent/z": z[index]}
            return replace(selectors, models={"shared": selectors.models["shared"].replace(at)})

        check_generation(alignment, number, tensors, at_taste, z)
    assert read_state(folder / "generations/2/train.state", "train-2")[1].steps == 4
    train = summary["train"]
    assert train["held_out"] == sum(r["index"] in held for r in rows(folder, "generations/1/labels.jsonl"))
    assert [(row["epoch"], row["generation"], row["steps"]) for row in train["epochs"]] == [
        (1, 1, 2),
        (2, 2, 2),
    ]
    together = [rows(folder, f"generations/{number}/labels.jsonl") for number in (1, 2)]
    assert summary["labels"]["labelled"] == sum(map(len, together)) == len(rows(folder, "labels.jsonl"))
    assert {row["generation"] for row in rows(folder, "completions.jsonl")} == {1, 2}
    kept = load_file(folder / f"generations/{train['kept']}/checkpoints/epoch-1.safetensors")
    assert all(torch.equal(kept[k], v) for k, v in load_file(folder / "policy.safetensors").items())
    weight = policy.initial["taste_map/weight"]
    assert not torch.equal(kept["taste_map/weight"], weight)


def test_agreement_is_on_the_first_generations_held_out_pairs(place, selectors, whole):
    """The same pairs, with the same labels, at the tastes of the first generation, for every generation."""
    from prefed.align.tastes import held_out_prompts
    from prefed.align.training import agreement, label_trainer

    alignment, summary = whole
    first = Generation(1)
    held, drawn = held_out_prompts(alignment), first.tastes(alignment)
    own = [row for row in rows(alignment.folder, first.file("labels.jsonl")) if row["index"] in held]
    z = torch.stack([drawn[row["index"]] for row in own])
    trainer, _ = label_trainer(alignment, own, "test", z)
    for number in (1, 2):
        tensors, _, _ = read_state(alignment.folder / f"generations/{number}/train.state", "")
        figures = agreement(alignment.config, trainer, tensors, np.ones(len(own), bool))
        got = summary["train"]["epochs"][number - 1]
        assert got["agreement"] == figures["agreement"]
        assert got["margin"] == pytest.approx(figures["margin"], abs=1e-5)


def test_generations_without_tastes(place, voters, tmp_path):
    """The policy after the first generation completes the prompts that are not held out, all selectors label,
    training continues, and an epoch of any generation may be kept. No file is about tastes."""
    plain = make_alignment(place, voters, folder := tmp_path / "align")
    alignment = replace(plain, config=plain.config.model_copy(update={"generations": 2, "lr": 0.03}))
    summary = align(alignment)
    after, moments, _ = read_state(folder / "generations/1/train.state", "train-1")
    held = {row["index"] for row in rows(folder, "generations/1/completions.jsonl")} - {
        row["index"] for row in rows(folder, "generations/2/completions.jsonl")
    }
    assert len(held) == summary["train"]["answered"] == 2
    for number, tensors in ((1, alignment.policy.initial), (2, after)):
        check_generation(alignment, number, tensors, lambda index: voters)
    assert read_state(folder / "generations/2/train.state", "train-2")[1].steps > moments.steps > 0
    epochs, kept = summary["train"]["epochs"], summary["train"]["kept"]
    assert [(row["epoch"], row["generation"]) for row in epochs] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    path = folder / f"generations/{(kept + 1) // 2}/checkpoints/epoch-{2 - kept % 2}.safetensors"
    tensors = load_file(path)
    adapter = load_file(folder / "adapter/adapter_model.safetensors")
    assert sorted(t.double().sum().item() for t in adapter.values()) == pytest.approx(
        sorted(t.double().sum().item() for name, t in tensors.items() if name.startswith("lora/"))
    )
    assert not [name for name in content(folder) if "taste" in name or name == "policy.safetensors"]


def test_killed_at_every_write(place, selectors, whole, tmp_path, monkeypatch):
    """As in test_align_stops: each process is killed in its twelfth write or rename, until one comes through.
    Its folder is that of the alignment that was not stopped."""
    alignment = tasting(place, selectors, tmp_path / "align")
    processes = align_killed(alignment, monkeypatch, at=12, most=30)
    assert 4 < processes < 30
    assert content(alignment.folder) == content(whole[0].folder)


def test_a_stage_of_one_generation_again_and_more_generations(place, selectors, whole, tmp_path):
    """The second generation again ends in the same bytes; a third one continues from it; another rate is
    refused by the first stage with it. A policy without tastes needs another start, and leaves none of these
    files."""
    alignment = tasting(place, selectors, tmp_path / "align")
    align(alignment)
    before, ran = content(alignment.folder), []
    changed = changing(alignment, ran)

    align(changed(), "completions-2")
    assert ran == ["completions-2", "labels-2", "train-2", "train"]
    assert content(alignment.folder) == before == content(whole[0].folder)
    with pytest.raises(AlignError, match=r"generations: 2 → 3\n.*--stage train"):
        align(changed(generations=3))
    align(changed(generations=3), "train")
    assert ran[4:] == ["completions-3", "labels-3", "train-3", "train"]
    assert content(alignment.folder)["generations/2/train.state"] == before["generations/2/train.state"]
    with pytest.raises(AlignError, match=r"(?s)stage train-1 .* lr: 0\.03 → 0\.01\n.*--stage train-1"):
        align(changed(generations=3, lr=0.01))
    align(changed(), "train-2")
    assert content(alignment.folder) == before
    plain = {"tastes": None, "generations": None, "regenerate": None, "epochs": 1}
    with pytest.raises(AlignError, match=r"(?s)stage policy .*parts.*--stage policy"):
        align(changed(**plain))
    align(changed(**plain), "policy")
    assert {path.name for path in alignment.folder.iterdir()}.isdisjoint(
        {"tastes.json", "policy.safetensors"}
    )
    assert not list((alignment.folder / "stages").glob("*-*"))
    assert not any((alignment.folder / "generations").rglob("*.*"))
    align(alignment, "policy")
    assert content(alignment.folder) == before


def test_a_changed_checkpoint_is_noticed(place, selectors, tmp_path):
    alignment = tasting(place, selectors, tmp_path / "align", generations=1, regenerate=None)
    stop_at(alignment, "train-1", 0)
    flip(alignment.folder / "generations/1/checkpoints/epoch-1.safetensors")
    with pytest.raises(AlignError, match=r"epoch-1\.safetensors is missing or was changed; .* --stage train"):
        align(replace(alignment))
    assert [row["epoch"] for row in align(alignment, "train-1")["train"]["epochs"]] == [1, 2]
