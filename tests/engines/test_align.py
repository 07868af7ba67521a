"""Alignment with prompts alone: its stages, and adapters that load elsewhere."""

import importlib.util
import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tests.cli.test_push import hub as hub
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from alignments import HELD, content, rows
from alignments import alignment as alignment
from alignments import place as place
from alignments import selectors as selectors
from commands import prefed_
from finished import small_experiment
from prefed.align import AlignError, align, completions, labels
from prefed.align.alignment import write_pairs
from prefed.align.held_out import HeldOutAnswers
from prefed.align.kept_epoch import best_epoch, kept_epoch
from prefed.align.policy import load_base
from prefed.align.run import STAGES, has_alignment
from prefed.align.stages import run_stages
from prefed.align.tastes import Generation
from prefed.align.training import label_trainer
from prefed.config import AlignConfig, ConfigError, Experiment
from prefed.config.align import align_settings
from prefed.core import Callback
from prefed.core.wire import decode_state
from prefed.data import Record, Source, Template
from prefed.data.prompts import PromptRow
from prefed.models import ModelConfig
from prefed.runs.align import _Source
from prefed.runs.align import align as align_run
from prefed.runs.finished_run import RunError
from prefed.runs.run import run
from prefed.train import generation
from prefed.train.generation import Completion
from prefed.train.metrics import WrittenAnswer, majority
from prefed.ui.cli import app
from small_models import away
from toy import Warned


def plain_logits(model, texts=((5, 9, 2, 40), (7, 3, 11, 8))):
    with torch.inference_mode():
        return model(torch.tensor(texts)).logits


def test_the_whole_path(alignment):
    """13 rows: clients hold cases 22 and 23, case 30 is there twice. Ten prompts have three completions
    and three pairs each. Labels are what the votes in scores.jsonl say, all pairs are accounted for, and no
    prompt is a client's."""
    summary = align(alignment)
    counts = {name: summary["prompts"][name] for name in ("read", "clients", "duplicates", "kept")}
    assert counts == {"read": 13, "clients": 2, "duplicates": 1, "kept": 10}
    made = rows(alignment.folder, "completions.jsonl")
    assert sorted((row["index"], row["sample"]) for row in made) == [
        (i, k) for i in range(10) for k in range(3)
    ]
    assert {row["prompt"] for row in made}.isdisjoint(HELD)
    assert summary["completions"]["tokens"] == sum(row["tokens"] for row in made)
    figures = summary["labels"]
    left_out = sum(figures[name] for name in ("identical", "blank", "too_long", "ties", "cut"))
    assert (figures["pairs"], figures["pairs"] - left_out) == (30, figures["labelled"])
    texts = {(row["index"], row["sample"]): row["completion"] for row in made}
    ends = {row["completion"]: row["ended"] for row in made}
    assert summary["completions"]["cut"] == sum(not row["ended"] for row in made)
    assert all((row["tokens"] < 6) <= row["ended"] for row in made)
    expected = []
    for row in rows(alignment.folder, "scores.jsonl"):
        one, other = (texts[row["index"], sample] for sample in row["samples"])
        first = sum(np.sign(row["scores"])) > 0
        chosen, rejected = (one, other) if first else (other, one)
        if ends[chosen] or not ends[rejected]:
            expected.append((chosen, rejected))
    labels = rows(alignment.folder, "labels.jsonl")
    assert [(row["chosen"], row["rejected"]) for row in labels] == expected
    assert [row["ended"] for row in labels] == [
        [ends[row["chosen"]], ends[row["rejected"]]] for row in labels
    ]
    assert summary["train"]["pairs"] + summary["train"]["held_out"] == len(labels)
    best = summary["train"]["epochs"][summary["train"]["kept"] - 1]
    assert all({"chosen_shift", "chosen_shift_error"} <= epoch.keys() for epoch in summary["train"]["epochs"])
    kept, adapter = (alignment.folder / name for name in (f"checkpoints/epoch-{best['epoch']}", "adapter"))
    assert content(kept) == content(adapter)


def test_scores_are_those_of_both_orders(selectors):
    """The score of a pair is minus that of the pair with its responses swapped, exactly; the full head's
    logits of plain forward passes give it too."""
    records = [Record("Case 40:", " up we go", " down"), Record("Case 41:", " a", " down we go")]
    asked, scores = selectors.scores(records)
    again, turned = selectors.scores([r.swapped() for r in records])
    assert asked.tolist() == again.tolist() == [0, 1]
    assert np.array_equal(scores, -turned)
    backbone, tokenizer = selectors.backbone, selectors.backbone.tokenizer
    for name, own in zip(selectors.models, scores, strict=True):
        backbone.load(selectors.models[name])
        total = 0.0
        for a, b, sign in ((" up we go", " down", 1), (" down", " up we go", -1)):
            parts = ["Query: Case 40:", f"\nA: {a.strip()}\nB: {b.strip()}\nBetter: A"]
            ids = [token for part in parts for token in tokenizer(part)["input_ids"]]
            letters = [tokenizer(f" {letter}")["input_ids"][-1] for letter in "AB"]
            with torch.inference_mode():
                logits = backbone.causal(torch.tensor([ids[:-1]])).logits[0, -1, letters]
            total += sign * float(logits[0] - logits[1]) / 2
        assert own[0] == pytest.approx(total, abs=1e-4)


def test_what_exceeds_the_models_context_is_cut_or_left_out(alignment, selectors):
    """The model has 64 positions, and ``max_length`` is 512. A question of about 160 tokens is shortened as
    for a ``max_length`` of 64. A response of 80 tokens makes no pair of the policy's; one of 40 does."""
    long = Record("Case 40:", " up" + " we go" * 60, " down" + " go we" * 60)
    judged = replace(selectors, max_length=512).scores([long])
    narrow = selectors.scores([long])
    assert judged[0].tolist() == [0]
    assert np.array_equal(judged[1], narrow[1])
    wide = replace(alignment, data=alignment.data.model_copy(update={"max_length": 512}))
    backbone = selectors.backbone
    texts = [" up" * count for count in (80, 40)]
    assert [len(backbone.tokenizer(text)["input_ids"]) for text in texts] == [80, 40]
    tokens = write_pairs(wide, backbone, [Record("Case 40:", text, " down") for text in texts], "labels")
    assert tokens.rows.tolist() == [2]


def test_labels_by_minimum(alignment):
    """The first response if min s + max s is positive, with the scores that were written."""
    align(replace(alignment, config=alignment.config.model_copy(update={"labels": "minimum", "epochs": 1})))
    made = rows(alignment.folder, "completions.jsonl")
    texts = {(row["index"], row["sample"]): row["completion"] for row in made}
    expected = []
    for row in rows(alignment.folder, "scores.jsonl"):
        one, other = (texts[row["index"], sample] for sample in row["samples"])
        first = min(row["scores"]) + max(row["scores"]) > 0
        expected.append((one, other) if first else (other, one))
    labels = rows(alignment.folder, "labels.jsonl")
    assert [(row["chosen"], row["rejected"]) for row in labels] == expected
    assert any(row["votes"][0] < row["votes"][1] for row in labels)


def test_one_selector_labels_alone(alignment, selectors):
    align(replace(alignment, config=alignment.config.model_copy(update={"labels": 1, "epochs": 1})))
    for row in rows(alignment.folder, "labels.jsonl"):
        assert row["votes"] == [1, 0]
    with pytest.raises(AlignError, match=r"labels = 3: the run has 3 selectors"):
        selectors.chosen_by(3)


def base(place):
    return AutoModelForCausalLM.from_pretrained(place / "model")


def test_the_adapter_loads_elsewhere(alignment, place):
    """Plain transformers and PEFT give the logits of the policy with the tensors of the only epoch."""
    align(replace(alignment, config=alignment.config.model_copy(update={"epochs": 1})))
    loaded = PeftModel.from_pretrained(base(place), alignment.folder / "adapter").eval()
    settings = json.loads((alignment.folder / "adapter/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(place / "model")
    state = decode_state((alignment.folder / "train.state").read_bytes().partition(b"\n")[2])
    backbone = alignment.policy
    backbone.load(state.tensors["policy"])
    assert torch.allclose(plain_logits(loaded), plain_logits(backbone.causal), atol=1e-5)
    assert not torch.allclose(plain_logits(loaded), plain_logits(base(place)), atol=1e-5)


@pytest.mark.parametrize("start", ["adapter", "rows"])
def test_a_fine_tuned_start_is_in_policy_reference_and_result(alignment, place, start, tmp_path):
    """The policy's logits at the start are those of plain PEFT with the adapter of the start, and with a
    learning rate of almost nothing so are the result's: one adapter for the base model holds both."""
    if start == "adapter":
        torch.manual_seed(0)
        tuned = get_peft_model(base(place), LoraConfig(r=3, lora_alpha=5, target_modules=["c_proj"]))
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        sft = tmp_path / "sft"
        tuned.save_pretrained(sft)
    else:
        sft = tmp_path / "sft.jsonl"
        texts = [{"prompt": f"Case {k}:", "response": f" up {k}"} for k in range(6)]
        sft.write_text("".join(json.dumps(row) + "\n" for row in texts))
    changes = {"sft": str(sft), "sft_lr": 0.01, "sft_epochs": 2, "lr": 1e-12, "epochs": 1}
    alignment = replace(alignment, config=alignment.config.model_copy(update=changes))
    summary = align(alignment)
    assert summary["policy"]["start"] == start
    started = PeftModel.from_pretrained(base(place), alignment.folder / "policy").eval()
    aligned = PeftModel.from_pretrained(base(place), alignment.folder / "adapter").eval()
    backbone = alignment.policy
    backbone.load(backbone.reference)
    expected = plain_logits(started)
    assert not torch.allclose(expected, plain_logits(base(place)), atol=1e-2)
    assert torch.allclose(plain_logits(backbone.causal), expected, atol=1e-4)
    assert torch.allclose(plain_logits(aligned), expected, atol=1e-4)


def test_more_than_a_plain_lora_is_no_start(alignment, place, tmp_path):
    tuned = get_peft_model(base(place), LoraConfig(r=3, target_modules=["c_proj"], use_dora=True))
    tuned.save_pretrained(tmp_path / "sft")
    config = alignment.config.model_copy(update={"sft": str(tmp_path / "sft")})
    with pytest.raises(AlignError, match="use_dora = True, but only plain LoRA"):
        align(replace(alignment, config=config))


def test_a_prompt_leaves_room_for_a_whole_completion_and_its_end(alignment):
    """The longest prompts have n tokens, a completion at most 6, and in training the end of text is one more.
    With ``max_length`` n + 7 such a pair keeps its whole prompt. With n + 6 it would lose a token, so these
    prompts are left out and counted."""
    backbone = alignment.selectors().backbone
    template = Template(backbone.tokenizer, alignment.data.template)
    texts = [*(f"Case {number}:" for number in range(24, 31)), "A word", "Two words", "Up"]
    lengths = {text: len(template.prompt_ids(text)) for text in texts}
    text, longest = max(lengths.items(), key=lambda item: item[1])
    for more, too_long in ((6, [*lengths.values()].count(longest)), (7, 0)):
        data = alignment.data.model_copy(update={"max_length": longest + more})
        one = replace(alignment, data=data, folder=alignment.folder / str(more))
        (one.folder / "stages").mkdir(parents=True)
        assert run_stages(one, STAGES[:3])["completions"]["too_long"] == too_long
        tokens = write_pairs(one, backbone, [Record(text, " up" * 6, " down")], "labels")
        assert tokens.lengths[0, :2].tolist() == [longest - (more == 6), 7]


def test_clip_bounds_a_step(alignment):
    """SGD at rate 1 and all pairs in one batch: one step, as long as the bound that the gradient exceeds."""
    for clip in (1e-3, 2e-3):
        changes = {"optimizer": "sgd", "lr": 1.0, "clip": clip, "batch_size": 64, "epochs": 1, "beta": 100.0}
        config = alignment.config.model_copy(update=changes)
        one = replace(alignment, config=config, folder=alignment.folder / str(clip))
        align(one)
        state = decode_state((one.folder / "train.state").read_bytes().partition(b"\n")[2])
        assert (state.tensors["policy"] - one.policy.initial).norm() == pytest.approx(clip, rel=1e-3)


def test_nothing_left_is_an_error(alignment, place, tmp_path):
    """Prompts that are all clients' own; completions that cannot differ."""
    file = tmp_path / "own.txt"
    file.write_text("\n".join(HELD))
    with pytest.raises(AlignError, match="no prompts are left: of 24, clients have 24"):
        align(replace(alignment, config=AlignConfig(prompts=str(file))))
    shutil.rmtree(alignment.folder)
    greedy = alignment.config.model_copy(update={"top_k": 1})
    with pytest.raises(AlignError, match=r"no pair of completions got a label \(30 pairs, 30 identical"):
        align(replace(alignment, config=greedy))


def test_a_table_with_overrides(place):
    config = align_settings({"prompts": {"path": "x.txt"}, "lr": 0.1}, ["align.lr=0.2"], place)
    assert (config.lr, config.prompts.path) == (0.2, "x.txt")
    assert align_settings(None, ["align.prompts.path=prompts.jsonl"], place).prompts.path == str(
        place / "prompts.jsonl"
    )
    with pytest.raises(ConfigError, match=r"--set align\.tempreture=1: .* no such key; did you mean"):
        align_settings({"prompts": "x"}, ["align.tempreture=1"], place)
    with pytest.raises(ConfigError, match="--prompts FILE"):
        align_settings(None, [], place)
    with pytest.raises(ConfigError, match="labels must be majority, mean"):
        align_settings({"prompts": "x", "labels": "most"}, [], place)
    with pytest.raises(ConfigError, match="feddpo trains none: use one of fedbis"):
        Experiment.from_tables({**small_experiment(place), "align": {"prompts": "x"}}, "x.toml")


SELECTORS = {"name": "fedbiscuit", "selectors": 2, "warmup_rounds": 1, "lr": 0.02, "batch_size": 4}


@pytest.fixture(scope="module")
def experiment(place):
    """The whole path in one file: two selectors in three rounds, then the alignment."""
    tables = small_experiment(
        place,
        rounds=3,
        method={**SELECTORS, "local_steps": 2},
        align={
            "prompts": str(place / "prompts.jsonl"),
            "completions": 2,
            "max_new_tokens": 6,
            "temperature": 1.0,
            "epochs": 1,
            "lr": 1e-3,
        },
    )
    tables["data"] |= {"max_length": 64, "test_fraction": 0.0, "validation_fraction": 0.25}
    return Experiment.from_tables(tables, "whole.toml")


@pytest.fixture(scope="module")
def finished(experiment, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    run(experiment, path)
    return path


def test_one_file_goes_the_whole_path(finished, place):
    """The clients hold 24 prompts by their tokens' hashes, also of those that they test on:
    cases 22 and 23 of the server's 13 rows. The adapter loads elsewhere."""
    summary = json.loads((finished / "align/summary.json").read_text())
    assert (summary["prompts"]["clients"], summary["prompts"]["kept"]) == (2, 10)
    assert {row["prompt"] for row in rows(finished / "align", "labels.jsonl")}.isdisjoint(HELD)
    assert {tuple(sorted(row["votes"])) for row in rows(finished / "align", "labels.jsonl")} <= {
        (0, 2),
        (1, 1),
    }
    PeftModel.from_pretrained(base(place), finished / "align/adapter")


def test_the_aligned_model_is_pushed_with_its_own_card(finished, hub, place, tmp_path):
    """What is pushed is the adapter of the last stage, to the byte. The card has the alignment's agreement
    and no figure of the selectors; a merged export gives the logits of base and adapter."""
    result = CliRunner().invoke(app, ["push", str(finished), "ann/aligned", "--aligned"])
    assert (result.exit_code, "publishing the aligned model" in result.output) == (0, True), result.output
    files = hub.repos["ann/aligned"].files
    weights = (finished / "align/adapter/adapter_model.safetensors").read_bytes()
    assert files["adapter_model.safetensors"] == weights
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "model"
    card, train = (
        files["README.md"].decode(),
        json.loads((finished / "align/summary.json").read_text())["train"],
    )
    agreement = train["epochs"][0]["agreement"]
    assert f"| agreement | {agreement:.1%} |" in card
    assert f"{train['held_out']} pair" in card
    for words in (
        "The server's model, aligned with labels from the clients' selectors.",
        "| align.lr | 0.001 |",
        "The server's model completed 10 prompts that no client holds.",
    ):
        assert words in card
    assert not any(words in card for words in (str(place), "left", "right", "| before |", "Case "))
    words = ["export", str(finished), "--aligned", "--merge", "--out", str(tmp_path / "merged")]
    assert CliRunner().invoke(app, words).exit_code == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = PeftModel.from_pretrained(base(place), finished / "align/adapter")
    assert torch.allclose(plain_logits(merged), plain_logits(adapted), atol=1e-4)
    words = ["export", str(finished), "--aligned", "--client", "left"]
    assert "the aligned model takes no tastes; leave out --client" in CliRunner().invoke(app, words).stderr


def test_generate_shows_the_aligned_model(finished, place):
    """Selectors write nothing: the responses are those of plain transformers with and without the adapter."""
    words = ("--prompt", "Case 30:", "--temperature", "0", "--max-new-tokens", "6", "--json")
    result = prefed_("generate", finished, *words)
    (shown,) = json.loads(result)
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    ids = tokenizer("Case 30:", return_tensors="pt")
    aligned = PeftModel.from_pretrained(base(place), finished / "align/adapter").eval()
    for name, model in (("base", base(place)), ("aligned", aligned)):
        answer = model.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert shown[name] == tokenizer.decode(answer, skip_special_tokens=True)


def test_a_resumed_run_may_have_another_table(experiment, finished, tmp_path):
    """The rounds stay; a changed [align] is refused by its stage, and a run without one is left alone. What
    is asked for last is in config.toml, and the run still opens."""
    path = tmp_path / "run"
    shutil.copytree(finished, path)
    before = content(path / "align")
    run(experiment, path, resume=True)
    assert content(path / "align") == before
    other = experiment.model_copy(update={"align": experiment.align.model_copy(update={"lr": 2e-3})})
    with pytest.raises(AlignError, match=r"lr: 0\.001 → 0\.002"):
        run(other, path, resume=True)
    align_run(path, other.align, stage="train")
    run(other, path, resume=True)
    assert Experiment.load(path / "config.toml").align.lr == 2e-3
    run(experiment.model_copy(update={"align": None}), path, resume=True)
    assert Experiment.load(path / "config.toml").align is None


def test_files_are_read_before_clients_train(experiment, place, tmp_path):
    """Prompts that are not there, a row without a prompt, or one of sft without a response: no stage starts.
    A selector's number is compared with how many there are, which the file says."""
    (tmp_path / "gap.jsonl").write_text('{"prompt": "Up"}\n{"text": "Down"}\n')
    (tmp_path / "sft.jsonl").write_text('{"prompt": "Up", "response": " "}\n')
    for changes, message in (
        ({"prompts": Source(path=str(tmp_path / "no.jsonl"))}, "no.jsonl"),
        ({"prompts": Source(path=str(tmp_path / "gap.jsonl"))}, "row 2"),
        ({"sft": str(tmp_path / "sft.jsonl")}, "row 1: no response to fine-tune on; add a column 'response'"),
    ):
        other = experiment.model_copy(update={"align": experiment.align.model_copy(update=changes)})
        with pytest.raises(ValueError, match=message):
            run(other, tmp_path / "run")
        assert not (tmp_path / "run").exists()
    tables = experiment.tables()
    with pytest.raises(ConfigError, match=r"labels = 2: fedbiscuit trains 2 selectors"):
        Experiment.from_tables({**tables, "align": {**tables["align"], "labels": 2}}, "x.toml")


def test_a_start_that_failed_holds_nothing(finished, place, tmp_path):
    """After a typo in --prompts, and after a file with an unusable row, the right file is taken as it
    is given; the failed start's other settings are not kept either."""
    path, runner = tmp_path / "run", CliRunner(env={"COLUMNS": "200"})
    shutil.copytree(finished, path, ignore=lambda at, names: ["align"] if at == str(finished) else [])
    (tmp_path / "gap.jsonl").write_text('{"prompt": "Up"}\n{"text": "Down"}\n')
    for wrong in ("no.jsonl", "gap.jsonl"):
        words = ["align", str(path), "--prompts", str(tmp_path / wrong), "--set", "align.limit=2"]
        assert runner.invoke(app, words).exit_code == 1
    right = ["align", str(path), "--prompts", str(place / "prompts.jsonl")]
    result = runner.invoke(app, [*right, "--set", "align.labels=2"])
    assert "labels = 2: the run has 2 selectors" in result.output
    assert "--set align.labels=majority" in result.output
    assert not has_alignment(path / "align")
    result = runner.invoke(app, right)
    assert (result.exit_code, "kept 10" in result.output) == (0, True), result.output


def test_a_run_without_selectors_is_refused(place, tmp_path):
    path = tmp_path / "run"
    run(Experiment.from_tables(small_experiment(place, rounds=1), "x.toml"), path)
    with pytest.raises(RunError, match=r"run: method feddpo trains no selectors.*; use a run of fedbis"):
        align_run(path, AlignConfig(prompts=str(place / "prompts.jsonl")))
    assert not (path / "align").exists()


def check_known(folder):
    """What TensorBoard reads is what the summary says: each epoch once, and counts."""
    if importlib.util.find_spec("tensorboard") is None:
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    summary = json.loads((folder / "summary.json").read_text())
    epochs = summary["train"]["epochs"]
    for name in ("loss", "agreement"):
        points = [(point.step, point.value) for point in events.Scalars(f"align/{name}")]
        assert points == [(epoch["epoch"], pytest.approx(epoch[name])) for epoch in epochs]
    (point,) = events.Scalars("summary/align/labels/labelled")
    assert (point.step, point.value) == (len(epochs), summary["labels"]["labelled"])
    written = b"".join(path.read_bytes() for path in (folder / "tensorboard").iterdir())
    assert not any(row["prompt"].encode() in written for row in rows(folder, "labels.jsonl"))


def test_the_command(finished, place, tmp_path):
    """A run that was aligned asks for --resume or --stage; a finished alignment has nothing left to do, and
    another key is read by --set. The settings are those of the last time."""
    path, runner = tmp_path / "run", CliRunner(env={"COLUMNS": "200"})
    shutil.copytree(finished, path)
    with (path / "config.toml").open("a") as file:
        file.write('[track]\nto = ["tensorboard"]\n')

    def command(*words):
        result = runner.invoke(app, ["align", str(path), *words])
        return result.exit_code, result.output

    code, text = command()
    assert (code, "--resume" in text, "--stage NAME" in text) == (1, True, True)
    assert command("--resume")[0] == 0
    check_known(path / "align")
    code, text = command("--resume", "--set", "align.epochs=2")
    assert (code, "epochs: 1 → 2" in text) == (1, True)
    assert command("--resume")[0] == 0
    code, text = command("--stage", "train", "--set", "align.epochs=2")
    assert (code, "of 2, win rate" in text) == (0, True)
    assert f"judge: prefed judge {path} --judge NAME --prompts FILE" in text
    assert "never trained" not in text
    check_known(path / "align")
    assert "adapter:" in command("--resume")[1]
    log = (path / "run.log").read_text()
    assert log.count(" ended by AlignError\n") == 1  # --resume with other settings
    assert " train: pairs " in log.partition("ended by AlignError")[2]
    assert command("--resume", "--quiet") == (0, f"adapter: {path / 'align/adapter'}\n")
    shutil.rmtree(path / "align")
    other = str(place / "prompts.jsonl")
    code, text = command("--prompts", other, "--set", "align.limit=4", "--set", "align.held_out=0")
    assert (code, "kept 4" in text, "win rate" in text) == (0, True, False)
    settings = json.loads((path / "align/settings.json").read_text())
    assert (settings["limit"], settings["prompts"]["path"]) == (4, other)


def test_a_selector_that_nobody_trained_is_named(experiment, place, tmp_path):
    """One round of warm-up for each of two selectors, and one round in all: the second is as it began."""
    path = tmp_path / "run"
    run(experiment.model_copy(update={"rounds": 1, "align": None}), path)
    runner = CliRunner(env={"COLUMNS": "200"})
    words = ["align", str(path), "--prompts", str(place / "prompts.jsonl"), "--set", "align.max_new_tokens=2"]
    words += ["--set", "align.epochs=1", "--set", "align.completions=2", "--set", "align.temperature=2.0"]
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "untrained selectors label completions: selector-1;" in result.output
    result = runner.invoke(app, ["align", str(path), "--stage", "labels", "--set", "align.labels=0"])
    assert "never trained" not in result.output


def test_an_adapter_of_another_model_leaves_nothing_behind(alignment, tmp_path):
    """Every tensor has half the rows that the model's has. The right start is then taken as it is given."""
    whole = replace(alignment, folder=tmp_path / "whole")
    align(whole)
    other = shutil.copytree(whole.folder / "adapter", tmp_path / "other")
    tensors = load_file(other / "adapter_model.safetensors")
    halves = {name: tensor[: len(tensor) // 2].clone() for name, tensor in tensors.items()}
    save_file(halves, other / "adapter_model.safetensors")
    config = alignment.config.model_copy(update={"sft": str(other)})
    with pytest.raises(AlignError, match=r"other does not fit the model .*\[align\.model\]$"):
        align(replace(alignment, config=config))
    align(alignment)
    assert content(alignment.folder) == content(whole.folder)


DAMAGE = {
    # What an adapter's file has instead of its last tensor, a factor B, and the words of the refusal.
    "none": (lambda last, value: {last: value}, None),
    "a missing factor": (lambda last, value: {}, "missing or unknown .*lora_B"),
    "a further tensor": (
        lambda last, value: {last: value, f"{last}s": torch.ones(2)},
        "missing or unknown .*weights",
    ),
    "a prefix": (lambda last, value: {f"module.{last}": value}, "missing or unknown .*, .*module"),
    "NaN": (lambda last, value: {last: value * torch.nan}, "not finite in float32"),
    "half a file": (None, "deserializing"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_adapter_is_refused(place, tmp_path, damage, words):
    """The undamaged one is merged: the logits are those of plain PEFT."""
    tuned = get_peft_model(base(place), LoraConfig(r=2, target_modules=["c_proj"], init_lora_weights=False))
    tuned.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    if damage is None:
        os.truncate(path, 100)
    else:
        tensors = load_file(path)
        value = tensors.pop(last := max(tensors))
        save_file({**tensors, **damage(last, value)}, path)
    model = ModelConfig(name=str(place / "model"), device="cpu", lora={"rank": 1})
    if words is None:
        expected = plain_logits(tuned.eval())
        assert torch.allclose(plain_logits(load_base(model, 0, tmp_path).causal), expected, atol=1e-4)
    else:
        with pytest.raises(AlignError, match=rf"the adapter {tmp_path} does not fit .*{words}"):
            load_base(model, 0, tmp_path)


def test_no_end_is_put_after_a_completion_that_was_cut(alignment, monkeypatch):
    """It has one token fewer than if it had ended. A record of an older prefed does not say so: every one has
    its end. No label prefers a completion that was cut to one that ended."""
    # Every fourth token ends a completion, or few of this model's would.
    monkeypatch.setattr(generation, "end_tokens", lambda backbone: set(range(0, 512, 4)))
    (alignment.folder / "stages").mkdir(parents=True)
    run_stages(alignment, STAGES[:4])
    labels = rows(alignment.folder, "labels.jsonl")
    lengths, end = [], alignment.policy.tokenizer.eos_token_id
    for name, fields in (("labels", {}), ("old", {"ended": [True, True]})):
        tokens = label_trainer(alignment, [{**row, **fields} for row in labels], name)[0].model.tokens
        lengths.append(tokens.lengths[:, 1:])
        assert [[ids[-1] == end for ids in tokens.pair(k)[1:]] for k in range(len(labels))] == [
            {**row, **fields}["ended"] for row in labels
        ]
    assert (lengths[1] - lengths[0]).tolist() == [[not ended for ended in row["ended"]] for row in labels]
    assert {tuple(row["ended"]) for row in labels} >= {(True, False), (False, False)}
    assert not any(row["ended"] == [False, True] for row in labels)


@pytest.mark.parametrize("ending", [512, 4])
def test_the_clearest_pair_of_each_prompt_is_kept(alignment, monkeypatch, ending):
    """Of at most three labels per prompt, the one with the largest margin; none is in the lowest quarter.
    Either no completion ends, or a fourth of the tokens ends one: then each chosen one has ended, and pairs
    of two that were cut are not judged. Every pair is counted once."""
    monkeypatch.setattr(generation, "end_tokens", lambda backbone: set(range(0, 512, ending)))
    (alignment.folder / "stages").mkdir(parents=True)
    run_stages(alignment, STAGES[:4])
    everything = rows(alignment.folder, "labels.jsonl")
    if ending == 4:
        everything = [row for row in everything if row["ended"][0]]
    best = replace(alignment, config=alignment.config.model_copy(update={"pairs": "best"}))
    figures = run_stages(best, STAGES[:4], "labels")["labels"]
    kept = rows(alignment.folder, "labels.jsonl")
    least = np.quantile([row["margin"] for row in everything], 0.25)
    largest = {
        row["index"]: max(r["margin"] for r in everything if r["index"] == row["index"]) for row in kept
    }
    assert {row["index"]: row["margin"] for row in kept} == pytest.approx(largest, rel=1e-5)
    assert {row["index"] for row in kept} == {r["index"] for r in everything if r["margin"] >= least}
    assert all(row["ended"][0] == (ending == 4) for row in everything)
    assert figures["less_clear"] == len(everything) - len(kept)
    left_out = ("identical", "blank", "too_long", "ties", "cut", "less_clear")
    assert figures["pairs"] == len(kept) + sum(figures[name] for name in left_out)
    ends = {
        (row["index"], row["sample"]): row["ended"] for row in rows(alignment.folder, "completions.jsonl")
    }
    judged = [
        [ends[row["index"], k] for k in row["samples"]] for row in rows(alignment.folder, "scores.jsonl")
    ]
    assert all(any(pair) == (ending == 4) for pair in judged)


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_pairs_of_two_cut_completions_have_labels_of_their_own(alignment, monkeypatch, stopped):
    """Where no pair with a whole completion has a label, because the cut one is preferred, the other pairs
    have those that their scores give, also if that is found after a stop."""

    class Longest:
        def scores(self, pairs, tastes=None):
            lead = [len(pair.chosen) - len(pair.rejected) for pair in pairs]
            return np.arange(len(pairs)), np.array([lead], np.float32)

    monkeypatch.setattr(Generation, "scorer", lambda *_: Longest())
    monkeypatch.setattr(labels, "BATCH", 1)
    asked = [PromptRow(f"question {k}") for k in range(3)]
    monkeypatch.setattr(labels, "own_prompts", lambda _: asked)
    whole = [labels.Candidates(0, (0, 1), ("longer", "short"), (False, True))]
    cut = [labels.Candidates(k, (0, 1), ("short", "longer"), (False, False)) for k in (1, 2)]
    alignment.folder.mkdir(exist_ok=True)
    names = ("pairs", "identical", "blank", "too_long", "ties", "cut", "unanimous")
    for _ in range(2):
        found = list(labels._labels(alignment, Generation(), [whole, cut], dict.fromkeys(names, 0)))
        assert [(row["index"], row["chosen"]) for row in found] == [(1, "longer"), (2, "longer")]
        path = alignment.folder / "scores.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        assert len(lines) == 3
        path.write_bytes(b"".join(lines[:stopped]))


@pytest.mark.parametrize(("cut", "limit"), [(1, 9), (2, 40)])
def test_the_limit_of_tokens_lets_nine_in_ten_end(alignment, monkeypatch, cut, limit):
    """Completions of ten prompts have 1, 2, … tokens, and the last ones are cut at what 64 tokens leave for a
    prompt of 23 and an end. If nine end, the limit is the longest of them."""
    seen = []

    def complete_batch(policy, tensors, prompts, how, keys, tastes=None):
        seen.extend(prompts)
        assert how.max_tokens == 40
        numbers = range(len(seen) - len(prompts) + 1, len(seen) + 1)
        return [Completion([5] * 40, None) if k > 10 - cut else Completion([5] * k, 0) for k in numbers]

    run_stages(whole := unlimited(alignment), STAGES[:2])
    monkeypatch.setattr(completions, "complete_batch", complete_batch)
    monkeypatch.setattr(Template, "prompt_ids", lambda self, prompt: [1] * (23 if prompt == "Up" else 20))
    assert completions.limit(whole) == completions.limit(whole) == limit
    assert len(seen) == 10


def test_a_measured_limit_is_used(alignment):
    """No completion is longer than the limit, which one of 30 reaches, and the summary has it."""
    figures = run_stages(unlimited(alignment), STAGES[:3])["completions"]
    limit = json.loads((alignment.folder / "limit.json").read_bytes())["max_new_tokens"]
    made = rows(alignment.folder, "completions.jsonl")
    assert max(row["tokens"] for row in made) == limit == figures["max_new_tokens"]


def unlimited(alignment):
    (alignment.folder / "stages").mkdir(parents=True)
    return replace(alignment, config=alignment.config.model_copy(update={"max_new_tokens": None}))


def test_the_accuracy_of_selectors_on_unseen_prompts_comes_first(alignment, selectors):
    """A share of pairs by majority, in the summary and in a note; without any such pair, the note says so."""
    pairs = [Record(f"Case {k}:", f" up {k}", f" down {k + 1}") for k in range(40, 52)]
    right = float(np.mean(majority(selectors.scores(pairs)[1]) > 0))
    assert 0 < right < 1
    for own, words in ((pairs, f"{right:.1%} of 12 pairs"), ([], "no client has a test pair")):
        heard = Warned()
        (alignment.folder / "stages").mkdir(parents=True, exist_ok=True)
        one = replace(alignment, unseen_pairs=lambda own=own: own, callback=heard)
        figures = run_stages(one, STAGES[:4], "labels")["labels"]
        assert (figures["unseen_pairs"], figures["unseen_accuracy"]) == (len(own), right if own else None)
        assert [words in text and "unknown" in text for text in heard.notes] == [True]


def test_unseen_prompts_are_in_no_training_pair(finished, place):
    """Of all clients, or of the one whose taste labels; the first test pair of each is also trained on."""
    for taste in (None, "left"):
        config = AlignConfig(prompts=str(place / "prompts.jsonl"), taste=taste)
        source = _Source(finished, config, Callback())
        dataset, split = source.run.trainers.dataset, source.run.job.evaluate.split
        rows = {client: getattr(own, split) for client, own in dataset.clients.items()}
        trained = {
            client: replace(own, train=np.append(own.train, rows[client][:1]))
            for client, own in dataset.clients.items()
        }
        source.run.trainers.dataset = replace(dataset, clients=trained)
        first = {dataset.tokens.record(own[0]).prompt for own in rows.values()}
        pairs = [
            dataset.tokens.record(row) for client in ([taste] if taste else rows) for row in rows[client]
        ]
        expected = [pair for pair in pairs if pair.prompt not in first]
        assert 0 < len(expected) < len(pairs)
        assert source.unseen_pairs() == expected


def test_a_win_is_an_answer_that_the_labeller_prefers(alignment, monkeypatch):
    """Equal answers are half a win, an empty one is none, and those too long to judge do not count: of four
    answers, (0.5 + 0 + 1) / 3."""
    (alignment.folder / "stages").mkdir(parents=True)
    run_stages(alignment, STAGES[:2])

    class Judge:
        def scores(self, pairs, tastes=None):
            assert [(pair.chosen, pair.rejected) for pair in pairs] == [(" c", " up"), (" d", " up")]
            return np.array([0]), np.array([[2.0]], np.float32)

    answers = HeldOutAnswers(alignment, Judge(), range(4), 6)
    written = {0: [" up"] * 4, 1: [" up ", "", " c", " d"]}
    monkeypatch.setattr(
        answers, "_write", lambda k: [WrittenAnswer("", text, [5, 6], True, 1.0) for text in written[int(k)]]
    )
    monkeypatch.setattr(type(answers), "_start", answers._write(0))
    monkeypatch.setattr(answers, "_kl", lambda *_: None)
    assert answers.measure(1, alignment.folder / "answers.jsonl")["win_rate"] == 0.5


def test_kl_is_the_log_ratio_of_answers(alignment, selectors):
    """By plain forward passes over each answer and its end, per token; the initial policy's is 0."""
    align(alignment)
    answers, policy = HeldOutAnswers(alignment, selectors, range(4), 6), alignment.policy
    moved = away(policy.layout, policy.initial, scale=0.3)
    path = alignment.folder / "answers.jsonl"
    assert answers.measure(policy.initial, path)["kl"] == pytest.approx(0, abs=1e-6)
    expected = []
    for (_, ids), answer in zip(answers._asked, answers._write(moved), strict=True):
        end = [policy.tokenizer.eos_token_id] if answer.ended else []
        whole, sums = torch.tensor([[*ids, *answer.tokens, *end]]), []
        for tensors in (moved, policy.reference):
            policy.load(tensors)
            with torch.inference_mode():
                logits = policy.causal(whole).logits[0, len(ids) - 1 : -1].log_softmax(-1)
            sums.append(logits.gather(1, whole[0, len(ids) :, None]).sum().item())
        expected.append((sums[0] - sums[1]) / (len(answer.tokens) + len(end)))
    assert answers.measure(moved, path)["kl"] == pytest.approx(np.mean(expected), abs=1e-5)
    assert np.mean(expected) > 0.01


def text(**own):
    """The health of 20 answers of the initial policy, and of a policy that differs in ``own``."""
    base = {"answers": 20, "ends": 1.0, "loops": 0.0, "empty": 0.0, "surprise": 1.0}
    base["surprise_band"] = [0.5, 1.5]
    return {"base": base, "shared": base | own}


def test_the_kept_epoch_has_whole_text():
    """The last epoch wins most and loops, the second one's text is unlikely (above 1.5 + 2), and the third
    was not measured."""
    measured = [
        (0.6, {}),
        (0.9, {"surprise": 3.6}),
        (None, {}),
        (0.7, {"surprise": 3.4}),
        (1.0, {"loops": 0.5}),
    ]
    epochs = [
        {"epoch": k, "win_rate": rate, "agreement": 0.5, "text": text(**own)}
        for k, (rate, own) in enumerate(measured, 1)
    ]
    assert best_epoch(epochs) == 4
    assert best_epoch([epochs[1], epochs[4]]) == 5


def test_whole_text_whose_chosen_completions_fall_is_kept_before_broken_text():
    """All four fall by 4 ± 1 nats. The labeller likes the last two best. Their text is unlikely (above
    1.5 + 2), and the last one's also loops."""
    fallen = {"agreement": 0.5, "chosen_shift": -4.0, "chosen_shift_error": 1.0}
    measured = [(0.8, {}), (0.85, {}), (0.9, {"surprise": 3.6}), (1.0, {"surprise": 3.6, "loops": 0.5})]
    epochs = [
        {"epoch": k, "win_rate": rate, "text": text(**own), **fallen}
        for k, (rate, own) in enumerate(measured, 1)
    ]
    assert best_epoch(epochs) == 2
    assert best_epoch(epochs[2:]) == 3
    assert best_epoch([epochs[0], epochs[1] | {"chosen_shift": 4.0}]) == 2


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"win_rate": 0.9, "chosen_shift": -4.0, "chosen_shift_error": 1.0}, ["-4.0 nats"]),
        ({"win_rate": 0.4, "chosen_shift": -4.0, "chosen_shift_error": 1.0}, ["-4.0 nats", "only 40.0%"]),
        ({"win_rate": 0.9, "chosen_shift": -4.0, "chosen_shift_error": 3.0}, []),
        ({"win_rate": 0.0}, ["only 0.0%"]),
        ({"win_rate": 0.9, "text": text(loops=0.5)}, ["10 of 20 answers loop; the initial policy: 0"]),
        ({"win_rate": 0.9, "text": text(loops=0.1)}, []),
        ({"agreement": 0.4}, []),  # from an older prefed
        ({"win_rate": None}, []),  # nothing is held out
    ],
)
def test_an_adapter_that_is_worse_than_its_start_is_called_so(figures, words):
    heard = Warned()
    assert kept_epoch([{"epoch": 2, "agreement": 0.5, **figures}], heard) == 2
    assert len(heard.texts) == bool(words)
    assert all(
        word in text for text in heard.texts for word in ("may be worse than the initial policy", *words)
    )
