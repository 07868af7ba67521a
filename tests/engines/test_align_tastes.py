"""Alignment with selectors that have a latent taste: whose taste labels, and a policy that takes tastes."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import PeftModel
from tests.cli.test_push import hub as hub
from tests.engines.test_experiment import place as place
from tests.engines.test_taste_run import METHOD, tasty
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from prefed import run
from prefed.align import AlignError
from prefed.align.judge import Question
from prefed.config import AlignConfig
from prefed.config.align import JudgeOptions
from prefed.core import Callback, Key, Privacy
from prefed.data import Record
from prefed.methods.base.tastes import Z, posteriors
from prefed.runs.align import align as align_run
from prefed.runs.align import check_named_tastes
from prefed.runs.dry_run import dry_run
from prefed.runs.evaluate import evaluate
from prefed.runs.finished_run import RunError
from prefed.runs.labels import make_judge, selectors_of
from prefed.runs.loaded_run import load_run
from prefed.runs.responses import Models
from prefed.runs.tastes import at_taste, common_taste, known_tastes, published_taste, taste_of_file
from prefed.train.generation import Sampling, complete_batch
from prefed.ui.cli import app

PAIRS = [Record(f"Why {number}?", f" yes please {number}", " no thanks") for number in range(6)]


@pytest.fixture(scope="module")
def finished(place):
    """A run of three clients; the server's own prompts are next to it."""
    rows = [{"prompt": f"Why {number}?"} for number in range(6)]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = place / "tasty"
    run(tasty(place), path)
    return path


@pytest.fixture(scope="module")
def opened(finished):
    return load_run(finished, data=True)


def config(place, **changes):
    values = {"completions": 2, "max_new_tokens": 4, "temperature": 1.5, "lr": 1e-3, "epochs": 1}
    return AlignConfig(prompts=str(place / "prompts.jsonl"), **values | changes)


class Watch(Callback):
    def __init__(self):
        self.warned = []

    def on_warning(self, message):
        self.warned.append(message)


def rewrite_tastes(path, **changes):
    """Put figures into the run's tastes.json."""
    file = path / "tastes.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_named_taste_labels(opened):
    """z in the selector is what the server received, from its own state: the mean of all, a client's, P's
    row. Scores are those of the published selector with that z in it."""
    got = posteriors(opened.server)
    mean = torch.stack([posterior.mean for posterior in got.values()]).mean(0)
    assert torch.allclose(published_taste(opened, "population"), mean)
    assert torch.equal(published_taste(opened, "w1"), got["w1"].mean)
    for name in ("w1", "prototype:1"):
        z = published_taste(opened, name)
        (model,) = selectors_of(opened, name).models.values()
        assert torch.equal(model[Z], z)
        assert model.replace({Z: opened.published_model[Z]}).equal(opened.published_model)
    assert torch.equal(
        published_taste(opened, "prototype:1"), opened.server.tensors["model"]["prototypes"][1]
    )
    scores = [selectors_of(opened, name).scores(PAIRS)[1] for name in ("prototype:0", "prototype:1")]
    assert not np.allclose(*scores)
    for name, message in (
        ("w9", "no taste is called 'w9'"),
        ("prototype:2", "2 prototypes, numbered from 0"),
        ("prototype:x", "the number of a prototype"),
        ("infer:2", "the server has no pairs"),
    ):
        with pytest.raises(ValueError, match=message):
            published_taste(opened, name)


def test_a_client_that_sent_nothing_labels_nothing(opened):
    """As for a client that never took part: its row among the peers is zeros, which is not a taste."""
    sent = {client: number for client, number in opened.server.values["sent"].items() if client != "w1"}
    changed = replace(opened)
    changed.__dict__["server"] = opened.server.update(values={"sent": sent})
    with pytest.raises(RunError, match="'w1' sent no taste"):
        published_taste(changed, "w1")


def test_the_mean_of_opposed_tastes_is_said_to_be_nobodys(opened, finished, place):
    """Two clients at z and −z, the decoder without a bias: w(z) and −w(z) cancel, and three at z do not."""
    server = opened.server
    z = published_taste(opened, "w0")
    model = server.tensors["model"]
    model = model.replace({"variational/decoder/bias": torch.zeros_like(model["variational/decoder/bias"])})

    def at(*signs):
        rows = torch.stack([sign * z for sign in signs])
        peers = server.tensors["peers"].replace({"peers/mean": rows})
        changed = replace(opened)
        changed.__dict__["server"] = server.update({"model": model, "peers": peers}, {"sent": sent})
        return common_taste(changed)

    sent = dict.fromkeys(("w0", "w1", "w2"), 3)
    assert at(1, 1, 1) == pytest.approx(1)
    assert at(1, 1, -1) == pytest.approx(1 / 3)
    sent = dict.fromkeys(("w0", "w1"), 3)
    assert at(1, -1, 1) == pytest.approx(0, abs=1e-6)


def test_the_taste_is_a_setting_of_the_labels(finished, place, monkeypatch):
    """Another taste is refused until labels are asked for again; population is as if left out; a run without
    tastes, a judge with one, and an unknown client are refused. Opposed tastes are warned of."""
    align_run(finished, config(place, taste="population"))
    settings = json.loads((finished / "align/stages/labels.json").read_text())["settings"]
    assert settings == {"labels": "majority", "pairs": "best"}
    with pytest.raises(AlignError, match=r"taste: None → 'prototype:1'"):
        align_run(finished, config(place, taste="prototype:1"))
    labels = [(finished / "align/scores.jsonl").read_bytes()]
    align_run(finished, config(place, taste="prototype:1"), stage="labels")
    labels.append((finished / "align/scores.jsonl").read_bytes())
    assert labels[0] != labels[1]
    with pytest.raises(RunError, match="no taste is called 'w9'"):
        align_run(finished, config(place, taste="w9"), stage="labels")
    assert (finished / "align/scores.jsonl").read_bytes() == labels[1]
    with pytest.raises(ValueError, match="the server has no pairs"):
        config(place, taste="infer:8")
    with pytest.raises(ValueError, match="taste: remove taste = 'w1'"):
        config(place, taste="w1", tastes="posteriors")
    with pytest.raises(ValueError, match="regenerate requires several generations"):
        config(place, regenerate=2)
    with pytest.raises(ValueError, match="taste requires selectors, but labels = 'judge:"):
        config(place, taste="w1", labels="judge:utility")
    with pytest.raises(ValueError, match="fedbis has no latent taste"):
        tasty(place, method={**METHOD, "name": "fedbis"}, align=config(place, taste="w1").model_dump())
    monkeypatch.setattr("prefed.runs.align.common_taste", lambda run: 0.25)
    rewrite_tastes(finished, collapsed=False)
    watch = Watch()
    align_run(finished, config(place), stage="labels", callbacks=[watch])
    align_run(finished, config(place, taste="w1"), stage="labels", callbacks=[watch])
    (message,) = (text for text in watch.warned if "taste" in text)
    assert "the taste of the population, but the clients' tastes oppose each other" in message
    assert "0.25" in message


def test_collapsed_tastes_are_warned_of_before_the_first_stage(finished, place, monkeypatch):
    """By tastes.json, if it is there, where selectors label, whosever taste; a judge's labels have none. That
    their mean is nobody's is then not said."""
    monkeypatch.setattr("prefed.runs.align.common_taste", lambda run: 0.25)
    monkeypatch.setattr("prefed.runs.align.run_stages", lambda alignment, stage: alignment.selectors())
    got = (finished / "tastes.json").read_bytes()

    def warned(**changes):
        watch = Watch()
        align_run(finished, config(place, **changes), stage="prompts", callbacks=[watch])
        return watch.warned

    rewrite_tastes(finished, collapsed=True, own=0.5, another=0.49)
    for changes in ({}, {"taste": "w1"}, {"tastes": "posteriors"}, {"tastes": "prototypes"}):
        (message,) = warned(**changes)
        assert "have collapsed: accuracy 0.500" in message
        assert f"prefed report {finished}" in message
    assert not any("collapsed" in message for message in warned(labels=f"judge:selector:{finished}"))
    (finished / "tastes.json").unlink()
    assert warned(taste="w1") == []
    (finished / "tastes.json").write_bytes(got)


def test_a_taste_that_nobody_sent_is_refused_before_the_first_stage(finished, place, tmp_path, monkeypatch):
    """A finished run asks its server's state: no stage is started, and none that is done is forgotten."""
    path = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("align"))
    path.joinpath("align").mkdir()
    for taste, message in (("w9", "no taste is called 'w9'"), ("prototype:2", "numbered from 0")):
        with pytest.raises(RunError, match=message):
            align_run(path, config(place, taste=taste))
    known = known_tastes(load_run(path))
    for changes, tastes in (({"labels": {}}, "prototypes"), ({"posteriors": {}}, "posteriors")):
        monkeypatch.setattr("prefed.runs.align.known_tastes", lambda run, c=changes: replace(known, **c))
        with pytest.raises(AlignError, match=f"tastes = '{tastes}': "):
            align_run(path, config(place, tastes=tastes))
    assert not list(path.joinpath("align").iterdir())


def test_a_taste_that_nobody_will_send_is_refused_before_clients_train(opened, place, tmp_path):
    """By the data's clients, those among them that train and have pairs enough, and the method's
    prototypes; a dry run and a run ask alike."""

    def asked(job=opened.job, method=METHOD, **changes):
        check_named_tastes(tasty(place, method=method, align=config(place, **changes).model_dump()), job)

    for changes in ({}, {"taste": "w1"}, {"taste": "prototype:1"}, {"tastes": "prototypes"}):
        asked(**changes)
    asked(method={**METHOD, "name": "fedvpl"}, tastes="posteriors")
    small = {client: 3.0 if client == "w1" else weight for client, weight in opened.job.weights.items()}
    few = SimpleNamespace(**{n: getattr(opened.job, n) for n in ("members", "trainers")}, weights=small)
    few.privacy = Privacy(minimum_pairs=4)
    never = replace(opened.job, unseen=("w1",))
    for message, changes in (
        ("taste = 'ghost': no such client in the data; the clients are 'w0'", {"taste": "ghost"}),
        ("'w1': this client will not send its taste", {"taste": "w1", "job": never}),
        ("'w1': this client will not send its taste", {"taste": "w1", "job": few}),
        ("fedvpa has 2 prototypes, numbered from 0", {"taste": "prototype:2"}),
        ("give the number of a prototype, e.g. prototype:0", {"taste": "prototype:x"}),
    ):
        with pytest.raises(ValueError, match=message):
            asked(**changes)
    for name, own in (("fedvpl", {}), ("fedvpa", {"prototypes": False})):
        method = {**METHOD, "name": name, **own}
        with pytest.raises(AlignError, match=f"{name} has 0 prototypes"):
            asked(method=method, taste="prototype:0")
        with pytest.raises(AlignError, match="a run of fedvpa with prototypes = true"):
            asked(method=method, tastes="prototypes")
    ghost = tasty(place, align=config(place, taste="ghost").model_dump())
    for begin in (run, dry_run):
        with pytest.raises(AlignError, match="taste = 'ghost': no such client in the data"):
            begin(ghost, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_new_users_pairs_give_a_taste(finished, opened, place, tmp_path):
    """z of a file is that of a client whose pairs these are, up to how they fall into contexts: of one
    context of up to 16 pairs the order makes no difference. It may not be inferred from the judged pairs."""
    rows = [json.loads(line) for line in (place / "train.jsonl").read_text().splitlines()]
    own, file = [row for row in rows if row["worker"] == "w1"][:16], tmp_path / "new.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in own))
    tokens = opened.trainers.dataset.tokens
    texts = {(row["prompt"], row["chosen"]) for row in own}
    numbers = [k for k in range(len(tokens)) if (tokens.record(k).prompt, tokens.record(k).chosen) in texts]
    trainer = replace(opened.job.trainer("w1", 3, "predict"), rows=np.array(numbers))
    goal = opened.experiment.method.settings.goal()
    ((mean,), _) = trainer.posteriors(opened.published_model, goal)
    posterior, _ = taste_of_file(opened, str(file))
    assert torch.allclose(posterior.mean, mean, atol=1e-6)

    def judged(run):
        return evaluate(run).figures["preference_accuracy"]["per_client"]

    shown = CliRunner().invoke(app, ["evaluate", str(finished), "--taste", f"infer:{file}", "--json"])
    z = {Z: posterior.mean}
    model = opened.model("w0").replace(z)
    orders = opened.trainers.score("w0", model, "test").orders.mean(1)
    assert json.loads(shown.output)["preference_accuracy"]["per_client"]["w0"] == float((orders > 0).mean())
    by_prototype = judged(at_taste(opened, "prototype:1"))["w0"]
    model = model.replace({Z: published_taste(opened, "prototype:1")})
    orders = opened.trainers.score("w0", model, "test").orders.mean(1)
    assert by_prototype == float((orders > 0).mean())
    with pytest.raises(RunError, match="12 of the 12 pairs that the taste is inferred from are also"):
        at_taste(opened, f"infer:{place / 'test.jsonl'}")
    at_taste(opened, f"infer:{place / 'test.jsonl'}", str(file))
    with pytest.raises(RunError, match="16 of the 16 pairs"):
        at_taste(opened, f"infer:{file}", str(place / "train.jsonl"))


@pytest.fixture(scope="module")
def tasting(finished, place, tmp_path_factory):
    """The run with a policy that takes tastes; a high rate, so that its responses differ by taste."""
    path = tmp_path_factory.mktemp("runs") / "tasting"
    shutil.copytree(finished, path, ignore=lambda at, names: ["align"] if at == str(finished) else [])
    keys = {"tastes": "prototypes", "generations": 2, "lr": 0.03, "max_new_tokens": 6}
    align_run(path, config(place, **keys))
    return path


def command(*words):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(word) for word in words])
    return result.exit_code, result.output


def test_a_policy_is_asked_for_a_taste(tasting, opened, place, tmp_path):
    """`--taste` gives what plain transformers + peft give with the exported adapter, and each name the taste
    that it stands for: a client's as the server received it, or as inferred from pairs."""
    words = ("--prompt", "Why 3?", "--temperature", "0", "--max-new-tokens", "6", "--json")

    def asked(*taste):
        code, output = command("generate", tasting, *words, *taste)
        assert code == 0, output
        return json.loads(output)[0]["aligned"]

    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    ids = tokenizer("Why 3?", return_tensors="pt")

    def plain(folder):
        base = AutoModelForCausalLM.from_pretrained(place / "model")
        model = PeftModel.from_pretrained(base, folder).eval()
        tokens = model.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
        return tokenizer.decode(tokens, skip_special_tokens=True), model(**ids).logits

    code, output = command("export", tasting, "--taste", "prototype:1", "--out", tmp_path / "one")
    assert (code, "PeftModel.from_pretrained" in output) == (0, True), output
    text, logits = plain(tmp_path / "one")
    assert asked("--taste", "prototype:1") == text
    assert (
        command("export", tasting, "--taste", "prototype:1", "--merge", "--out", tmp_path / "merged")[0] == 0
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(**ids).logits
    assert torch.allclose(merged.log_softmax(-1), logits.log_softmax(-1), atol=1e-4)
    assert asked() == asked("--taste", "population") == plain(tasting / "align/adapter")[0]
    models = Models(load_run(tasting, data=True), Sampling(temperature=0))
    for names, z in (
        (("w1", None), models.own(None, "w1").taste),
        ((None, "w1"), published_taste(opened, "w1")),
        ((None, "prototype:0"), published_taste(opened, "prototype:0")),
        (("w0", "infer:2"), opened.method.infer(infer_as(opened, "w0"), opened.published("w0"), 2)[Z]),
    ):
        assert torch.equal(models.own(*names).taste, z)
    for words, message in (
        (("--taste", "infer:2"), "taste 'infer:2' needs a client, whose pairs are used: add --client ID"),
        (("--taste", "prototype:0", "--client", "w0"), "can only be used with --taste infer:N"),
        (("--taste", "w9"), "no taste is called 'w9'"),
    ):
        code, output = command("generate", tasting, "--prompt", "x", *words)
        assert (code, message in output) == (1, True), output


def test_a_policy_is_pushed_at_a_taste(tasting, hub):
    """What is pushed is what is exported; nobody's taste is the population's, and a client's is asked for."""
    weights = "adapter_model.safetensors"
    for taste, got in (
        (("--aligned",), "publishing the aligned model\n"),
        (("--aligned", "--client", "w1"), "at the taste 'w1': if it is a client's taste"),
        (("--taste", "prototype:1"), "at the taste 'prototype:1': if it is a client's taste"),
    ):
        folder = tasting / "one"
        code, output = command("export", tasting, *taste, "--out", folder, "--force")
        assert code == 0, output
        code, output = command("push", tasting, "ann/one", *taste, *(["--update"] if hub.repos else []))
        assert (code, got in output) == (0, True), output
        files = hub.repos["ann/one"].files
        assert files[weights] == (folder / weights).read_bytes()
        card = files["README.md"].decode()
        assert "aligned with labels from the clients' selectors, with one taste." in card
        assert "| align.tastes | prototypes |" in card
        assert "w1" not in card
        if taste == ("--aligned",):
            assert files[weights] == (tasting / "align/adapter" / weights).read_bytes()


def infer_as(opened, client):
    return opened.job.trainer(client, 3, "predict")


def test_a_judge_compares_a_taste_with_another(finished, tasting, place):
    """Texts at two tastes are kept apart, and a run whose policy takes none says what to do."""
    prompts = place / "prompts.jsonl"
    words = ("--judge", f"selector:{tasting}", "--prompts", prompts, "--max-new-tokens", 6, "--json")
    for number in (0, 1):
        taste, name = f"prototype:{number}", ("--name", f"taste-{number}")
        code, output = command("judge", tasting, *words, "--policy-taste", taste, "--against-shared", *name)
        assert code == 0, output
        summary = json.loads(output)
        assert summary["model"] == f"tasting, aligned, taste {taste}"
        assert summary["against"] == "tasting, aligned"
        verdicts = (tasting / f"judge/taste-{number}/verdicts.jsonl").read_text().splitlines()
        side = Models(load_run(tasting), Sampling(max_tokens=6, temperature=0)).own(None, taste)
        ((tokens, _),) = complete_batch(
            side.backbone, side.tensors, [side.ids("Why 3?")], side.how, [Key(0)], tastes=side.taste[None]
        )
        texts = {row["prompt"]: row["text"] for row in map(json.loads, verdicts)}
        assert texts["Why 3?"] == side.backbone.tokenizer.decode(tokens, skip_special_tokens=True)
        (score,) = selectors_of(load_run(tasting), taste).scores([PAIRS[0]])[1]
        (judged,) = make_judge(words[1], JudgeOptions(taste=taste), load_run(tasting)).compare(
            [Question(PAIRS[0].prompt, PAIRS[0].chosen, PAIRS[0].rejected)]
        )
        assert f"{float(score[0]):+.4f}" in judged.text
    code, output = command("judge", finished, *words, "--policy-taste", "w0")
    assert (code, "has no model that takes tastes" in output) == (1, True), output
    code, output = command("judge", tasting, *words, "--criterion", "helpful")
    assert (code, "needs a language model as the judge" in output) == (2, True), output
