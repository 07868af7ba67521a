"""The commands for what comes after a run, on small real runs."""

import functools
import gzip
import json
import re
import shutil
import sys
from contextlib import suppress
from io import StringIO
from pathlib import Path

import pytest
import tomli_w
import torch
from rich.console import Console
from typer.testing import CliRunner

from commands import prefed_
from finished import small_experiment, small_place
from prefed import Experiment
from prefed import run as run_experiment
from prefed.runs.evaluate import evaluate
from prefed.runs.finished_run import RunError, read_run
from prefed.runs.loaded_run import load_run
from prefed.runs.responses import Models
from prefed.train.generation import Sampling
from prefed.ui.cli import app
from prefed.ui.pages.page import public_page
from prefed.ui.pages.terminal import print_result

ACCURACIES = ("preference_accuracy", "reward_accuracy", "baseline_accuracy", "normalized_accuracy")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The small place, with finished runs: one shared model, training alone, parts next to an adapter."""
    folder = small_place(tmp_path_factory.mktemp("place"))
    for method in ("feddpo", "local", "fedpdpo", "fedper"):
        tree = small_experiment(folder)
        tree["method"]["name"] = method
        run_experiment(Experiment.model_validate(tree), folder / method)
    tree = small_experiment(folder, evaluate={"unseen": ["right"], "unseen_steps": [0, 2]})
    run_experiment(Experiment.model_validate(tree), folder / "newcomer")
    return folder


@pytest.fixture(scope="module")
def opened(place):
    return load_run(place / "feddpo", data=True)


@pytest.fixture(autouse=True)
def terminal(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)


def summary(path):
    return json.loads((path / "summary.json").read_text())


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("method", ["feddpo", "local", "fedpdpo", "fedper"])
def test_evaluate_gives_again_what_the_run_found(place, method):
    figures, before = json.loads(prefed_("evaluate", place / method, "--json")), summary(place / method)
    names = [*ACCURACIES, *(["shared_accuracy"] if method != "feddpo" else [])]
    for name in names:
        assert figures[name] == before[name]
    for name in ("margin", "dpo_loss"):
        assert figures[name]["mean"] == pytest.approx(before[name], abs=1e-6)
    assert figures["dpo_loss"]["worst"] == max(figures["dpo_loss"]["per_client"].values())
    assert figures["margin"]["worst"] == min(figures["margin"]["per_client"].values())
    assert figures["clients"] == {"left": {"pairs": 4}, "right": {"pairs": 4}}


def test_clients_that_never_took_part_are_judged_apart(place):
    """With 0 steps a newcomer's model is the published one, which is what its export holds."""
    figures, before = (
        json.loads(prefed_("evaluate", place / "newcomer", "--json")),
        summary(place / "newcomer"),
    )
    assert set(figures["unseen_accuracy"]) == {"0", "2"}
    for name in ("unseen_accuracy", *ACCURACIES):
        assert figures[name] == before[name]
    assert set(figures["preference_accuracy"]["per_client"]) == {"left"}
    text = prefed_("evaluate", place / "newcomer", "--client", "right")
    assert "Clients that never trained" in text
    assert re.search(r"2 +1 +\d\.\d\d\d", text)
    run = load_run(place / "newcomer")
    assert run.model("right").equal(run.published_model)
    prefed_("report", place / "newcomer")
    assert "Clients that never trained" in (place / "newcomer/report.html").read_text()


def test_evaluate_other_pairs_of_the_run(place):
    figures = json.loads(
        prefed_("evaluate", place / "feddpo", "--split", "train", "--client", "left", "--json")
    )
    assert figures["clients"] == {"left": {"pairs": 8}}
    assert "split = 'validation'" in prefed_("evaluate", place / "feddpo", "--split", "validation", code=1)
    same = prefed_("evaluate", place / "feddpo", "--test", place / "train.jsonl")
    assert "have trained on 16 of these 16 pairs" in same


def test_evaluate_a_file_gives_each_client_its_own_rows(place, tmp_path):
    """The run's own test rows in another file, gzipped, after two strangers' rows: the same figures."""
    strangers = [dict(row, worker="nobody") for row in rows(place / "train.jsonl")[:2]]
    with gzip.open(tmp_path / "other.jsonl.gz", "wt") as file:
        for row in [*strangers, *rows(place / "test.jsonl")]:
            file.write(json.dumps(row) + "\n")
    figures = json.loads(
        prefed_("evaluate", place / "local", "--test", tmp_path / "other.jsonl.gz", "--json")
    )
    for name in ("preference_accuracy", "baseline_accuracy"):
        assert figures[name] == summary(place / "local")[name]
    assert figures["notes"] == ["left out: 2 pairs belong to no client of the run"]


@pytest.mark.parametrize("table", [False, True])
def test_evaluate_reads_a_file_with_the_options_of_the_runs_sources(place, tmp_path, table):
    """The columns of each source swap chosen and rejected and name the client. The run's own test rows give
    its accuracy again; with default columns, they would have no client, and an accuracy of 1 minus it."""
    columns = {"prompt": "prompt", "chosen": "rejected", "rejected": "chosen", "client": "worker"}
    tree = small_experiment(place)
    tree["data"]["partition"]["column"] = "client"
    for role in ("train", "test"):
        source = {"path": tree["data"][role], "columns": columns}
        tree["data"][role] = {"a": source} if table else source
    tree["method"] |= {"name": "local", "lr": 0.1}
    run_experiment(Experiment.model_validate(tree), tmp_path / "run")
    before = summary(tmp_path / "run")["preference_accuracy"]
    assert before["mean"] != 0.5
    words = ("evaluate", tmp_path / "run", "--test", place / "test.jsonl", "--json")
    assert json.loads(prefed_(*words))["preference_accuracy"] == before


def test_evaluate_a_file_for_everyone(place, opened):
    """One shared model is judged once on all rows: half of them agree with each worker, so its accuracy is
    the mean of its accuracies on the two halves. Models of their own are judged one by one."""
    file = place / "test.jsonl"
    figures = json.loads(prefed_("evaluate", place / "feddpo", "--test", file, "--everyone", "--json"))
    assert figures["clients"] == {"everybody": {"pairs": 8}}
    own = evaluate(opened).figures["preference_accuracy"]["mean"]
    assert figures["preference_accuracy"]["mean"] == pytest.approx(own)
    alone = json.loads(prefed_("evaluate", place / "local", "--test", file, "--everyone", "--json"))
    assert set(alone["clients"]) == {"left", "right"}
    assert alone["clients"]["left"] == {"pairs": 8}


def test_a_client_called_everybody_is_one_client(place, tmp_path):
    """It has one row in the file, and the other client four."""
    tree = small_experiment(place)
    tree["data"]["partition"]["groups"] = {"everybody": ["left"], "right": ["right"]}
    run_experiment(Experiment.model_validate(tree), tmp_path / "run")
    test_rows = rows(place / "test.jsonl")
    some = [row for row in test_rows if row["worker"] == "right"] + [
        r for r in test_rows if r["worker"] == "left"
    ][:1]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    words = ("evaluate", tmp_path / "run", "--test", tmp_path / "some.jsonl", "--json")
    assert json.loads(prefed_(*words))["clients"] == {"everybody": {"pairs": 1}, "right": {"pairs": 4}}
    assert json.loads(prefed_(*words, "--client", "right"))["clients"] == {"right": {"pairs": 4}}


def test_evaluate_a_file_that_names_no_client(place, tmp_path):
    (tmp_path / "bare.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    refused = prefed_("evaluate", place / "feddpo", "--test", tmp_path / "bare.jsonl", code=1)
    assert "bare.jsonl, row 1: no value in column 'worker'" in refused
    assert "--everyone" in refused
    (tmp_path / "other.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c", "worker": "x"}\n')
    refused = prefed_("evaluate", place / "feddpo", "--test", tmp_path / "other.jsonl", code=1)
    assert "no row's 'worker' is a client of the run ('left', 'right')" in refused


def test_evaluate_refuses_a_file_with_pairs_beyond_the_context(place, tmp_path):
    """The model has 64 positions, and the run's max_length is 512."""
    row = rows(place / "test.jsonl")[0]
    (tmp_path / "long.jsonl").write_text(json.dumps(row | {"prompt": "Case 1: " * 64}))
    refused = prefed_("evaluate", place / "feddpo", "--test", tmp_path / "long.jsonl", code=1)
    assert "the context is 64 tokens, but the longest prompt with its response has" in refused
    assert "set [data] max_length = 64 or shorten such pairs" in refused


def test_evaluate_makes_deleted_data_again_and_refuses_other_data(place, tmp_path):
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(place / name, tmp_path / name)
    shutil.copytree(place / "feddpo", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/cache")
    config = (tmp_path / "run/config.toml").read_text()
    (tmp_path / "run/config.toml").write_text(config.replace(str(place / "t"), str(tmp_path / "t")))
    figures = json.loads(prefed_("evaluate", tmp_path / "run", "--json"))
    assert figures["preference_accuracy"] == summary(place / "feddpo")["preference_accuracy"]
    shutil.rmtree(tmp_path / "run/cache")
    with (tmp_path / "test.jsonl").open("a") as file:
        file.write('{"prompt": "a", "chosen": "b", "rejected": "c", "worker": "left"}\n')
    assert "the data changed since the run" in prefed_("evaluate", tmp_path / "run", code=1)


def test_an_export_needs_neither_cache_nor_data(place, tmp_path):
    shutil.copytree(place / "local", tmp_path / "run", ignore=shutil.ignore_patterns("cache"))
    config = (tmp_path / "run/config.toml").read_text()
    (tmp_path / "run/config.toml").write_text(config.replace(str(place / "t"), "/nowhere/t"))
    prefed_("export", tmp_path / "run", "--client", "left")
    prefed_("export", place / "local", "--client", "left", "--out", tmp_path / "it")
    name = "adapter_model.safetensors"
    ours = tmp_path / "run/adapters/client-left" / name
    assert ours.read_bytes() == (tmp_path / "it" / name).read_bytes()
    assert not (tmp_path / "run/cache").exists()


def test_a_bottleneck_is_merged_into_no_model(place):
    refused = prefed_("export", place / "fedpdpo", "--client", "left", "--merge", code=1)
    assert "a bottleneck cannot be merged" in refused


def test_generate_takes_the_likeliest_tokens_of_both_models(place, opened):
    """At temperature 0 against a plain loop: the argmax of a plain model's logits, token by token."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    words = ("--prompt", "Case 3:", "--temperature", 0, "--max-new-tokens", 12, "--json")
    (responses,) = json.loads(prefed_("generate", place / "feddpo", *words))
    plain = AutoModelForCausalLM.from_pretrained(place / "model").eval()
    tuned = AutoModelForCausalLM.from_pretrained(place / "model")
    tuned = PeftModel.from_pretrained(tuned, place / "feddpo/adapters/shared").eval()
    tokenizer = opened.backbone.tokenizer
    start = tokenizer("Case 3:", return_tensors="pt").input_ids
    for name, model in (("base", plain), ("aligned", tuned)):
        ids = start
        for _ in range(12):
            with torch.inference_mode():
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
            if ids[0, -1] == tokenizer.eos_token_id:
                break
        assert responses[name] == tokenizer.decode(ids[0, start.shape[1] :], skip_special_tokens=True)
    assert responses["base"] != responses["aligned"]


@pytest.fixture(scope="module")
def dialogue(place, tmp_path_factory):
    """A run without cache/ on data with Human and Assistant, and a way to form a prompt with it."""
    folder = tmp_path_factory.mktemp("dialogue")
    for name in ("train", "test"):
        own = [
            dict(row, prompt=f"\n\nHuman: {row['prompt']}\n\nAssistant:")
            for row in rows(place / f"{name}.jsonl")
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    tree = small_experiment(folder)
    tree["rounds"], tree["model"]["name"] = 1, str(place / "model")
    run_experiment(Experiment.model_validate(tree), folder / "run")
    shutil.rmtree(folder / "run/cache")
    return folder


def test_prompts_keep_the_form_of_the_data_without_cache(dialogue):
    """The form is that of the run's data, which is still there: the tokens of the whole dialogue."""
    run = load_run(dialogue / "run")
    ids = Models(run, Sampling()).own(None).ids("Case 3:")
    assert run.backbone.tokenizer.decode(ids) == "\n\nHuman: Case 3:\n\nAssistant:"
    assert not (dialogue / "run/cache").exists()


def test_prompts_without_data_are_used_unchanged_with_a_warning(dialogue, tmp_path, caplog):
    """With ``raw``, no data are needed and nothing is said."""
    shutil.move(dialogue / "train.jsonl", tmp_path / "train.jsonl")
    try:
        run = load_run(dialogue / "run")
        for raw in (True, False):
            assert "are used unchanged" not in caplog.text
            ids = Models(run, Sampling(), raw=raw).own(None).ids("Case 3:")
            assert run.backbone.tokenizer.decode(ids) == "Case 3:"
        assert "the pairs of the run are not on this machine: prompts are used unchanged" in caplog.text
    finally:
        shutil.move(tmp_path / "train.jsonl", dialogue / "train.jsonl")


def test_generate_draws_by_the_seed_alone(place):
    def drawn(*words):
        options = ("--max-new-tokens", 8, "--temperature", 2, "--samples", 2, "--json")
        return json.loads(prefed_("generate", place / "local", "--client", "left", *options, *words))

    first = drawn("--prompt", "Case 1:")
    assert drawn("--prompt", "other", "--prompt", "Case 1:")[2:] == first
    assert drawn("--prompt", "Case 1:", "--seed", 1) != first
    assert first[0]["base"] != first[1]["base"]


def test_generate_prints_side_by_side_and_reads_standard_input(place):
    result = CliRunner().invoke(
        app, ["generate", str(place / "feddpo"), "--prompt", "-", "--max-new-tokens", "4"], input="Case [7]:"
    )
    assert result.exit_code == 0
    assert "Case [7]:" in result.stdout
    assert "base" in result.stdout
    assert "aligned" in result.stdout


def test_a_prompt_longer_than_the_window_is_refused(place):
    refused = prefed_("generate", place / "feddpo", "--prompt", "word " * 100, code=1)
    assert "tokens but the model's context is 64; shorten it" in refused


@pytest.mark.parametrize("command", ["evaluate", "export", "report", "compare"])
def test_what_is_no_finished_run_is_refused(place, tmp_path, command):
    more = [place / "local"] if command == "compare" else []
    assert "no such directory" in prefed_(command, tmp_path / "none", *more, code=1)
    assert "is not a run directory" in prefed_(command, tmp_path, *more, code=1)
    shutil.copytree(place / "feddpo", tmp_path / "run")
    (tmp_path / "run/summary.json").unlink()
    refused = prefed_(command, tmp_path / "run", *more, code=1)
    assert "is not finished: it stopped after round 2; resume it: prefed run" in refused
    assert "--resume" in refused


def test_another_base_model_under_the_same_name_is_refused(place):
    from safetensors.torch import load_file, save_file

    path = place / "model/model.safetensors"
    before = path.read_bytes()
    weights = load_file(path)
    weights["transformer.h.0.mlp.c_fc.bias"] += 1
    try:
        save_file(weights, path, metadata={"format": "pt"})
        with pytest.raises(RunError, match=r"the base model .* changed since the run"):
            load_run(place / "feddpo")
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("out", "message"),
    [("x.html", "x.html: the name of a plot must end in .png, .svg or .pdf"), ("a.png", "a.png is a folder")],
)
def test_compare_looks_at_the_plots_name_before_it_prints(place, tmp_path, out, message):
    (tmp_path / "a.png").mkdir()
    result = CliRunner().invoke(app, ["compare", str(place / "feddpo"), str(place / "local"), "--out", out])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {message}")


@pytest.mark.parametrize("command", [["evaluate"], ["export"], ["generate", "--prompt", "a"]])
def test_a_flipped_bit_in_the_models_of_a_run_is_noticed(place, tmp_path, command):
    """In the last tensor of the server's state, and of a client's; in the run's data, where they are read."""
    shutil.copytree(place / "fedper", tmp_path / "run")
    states = [
        next((tmp_path / "run/checkpoint").rglob(f"{name}@*.safetensors")) for name in ("server", "left")
    ]
    more = ["--client", "left", "--out", tmp_path / "it"][: 4 if command == ["export"] else 2]
    for path in [*states, *([tmp_path / "run/cache/data/ids.i32"] if command == ["evaluate"] else [])]:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 64]))
        refused = prefed_(command[0], tmp_path / "run", *command[1:], *more, code=1)
        assert path.name in refused
        path.write_bytes(data)
    path = states[0]
    path.write_bytes(path.read_bytes()[:1000])
    refused = prefed_(command[0], tmp_path / "run", *command[1:], *more, code=1)
    assert f"{path} is damaged: its 1,000 bytes do not match their digest; restore it from a copy" in refused


@pytest.mark.parametrize("command", [["evaluate"], ["export"], ["generate", "--prompt", "a"]])
def test_changed_settings_of_a_run_are_noticed(place, tmp_path, command):
    """A bit that makes another number of one: the model would be built, or judged, otherwise."""
    shutil.copytree(place / "feddpo", tmp_path / "run")
    path = tmp_path / "run/config.toml"
    text = path.read_text()
    assert "seed = " in text
    path.write_text(re.sub(r"(?m)^seed = \d+$", "seed = 4", text))
    refused = prefed_(command[0], tmp_path / "run", *command[1:], code=1)
    assert f"{path} was edited after the start of the run; restore it from a backup" in refused


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_changed_record_is_noticed_where_the_commit_is_there(place, tmp_path, command):
    shutil.copytree(place / "feddpo", tmp_path / "run")
    path = tmp_path / "run/rounds.jsonl"
    path.write_text(path.read_text().replace('"loss": 0.', '"loss": 1.', 1))
    refused = prefed_(command, tmp_path / "run", *([place / "local"] if command == "compare" else []), code=1)
    assert f"{path} is damaged" in refused


def test_report_writes_a_page_into_the_run(place):
    assert prefed_("report", place / "local").strip() == f"report: {place / 'local/report.html'}"
    page = (place / "local/report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "shared model" in page
    mean = summary(place / "local")["preference_accuracy"]["mean"]
    card = rf"preference accuracy, mean over clients</span><strong>{100 * mean:.0f}%<small> \("
    assert re.search(card, page)
    assert "category_distance" in summary(place / "local")["data"]
    assert "UTC" in page


def keys_and_texts(content, path=()):
    """The path of each key and of each text in JSON, the first of a list's."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield (*path, key)
            yield from keys_and_texts(value, (*path, key))
    elif isinstance(content, list) and content:
        yield from keys_and_texts(content[0], (*path, 0))
    elif isinstance(content, str):
        yield path


def newer(content, path):
    """JSON in which a text is another one, or each table of a level has another key with the same value."""
    content = json.loads(json.dumps(content))
    inner = functools.reduce(lambda value, key: value[key], path[:-1], content)
    if isinstance(inner[path[-1]], str):
        inner[path[-1]] = "newer"
    else:
        inner["newer"] = inner[path[-1]]
    return content


def test_values_of_a_newer_version_are_shown_or_refused(place, tmp_path):
    """A run whose summary has a text or a key that this version does not know, such as a reason why rows were
    left out: its page and its table show it, or a message refuses the file."""
    run = shutil.copytree(place / "fedpdpo", tmp_path / "run")
    content = summary(run)
    content["data"]["dropped"] = {"older": 3}
    console = Console(file=StringIO())
    kinds = {}
    for path in keys_and_texts(content):
        if path[-1] not in ("left", "right") and "per_client" not in path:
            kinds[path[:-1], type(functools.reduce(lambda value, key: value[key], path, content))] = path
    for path in kinds.values():
        (run / "summary.json").write_text(json.dumps(newer(content, path)))
        with suppress(RunError):
            text = public_page(run)
            print_result(read_run(run).summary, console)
    assert "left out: 3 older" in text


def test_a_client_that_a_run_lacks_is_refused_before_anything_is_loaded(place, monkeypatch):
    for module in ("evaluate", "loaded_run", "export"):
        monkeypatch.setitem(sys.modules, f"prefed.runs.{module}", None)
    run = place / "feddpo"
    for words in (("evaluate", run), ("export", run), ("generate", run, "--prompt", "Go")):
        for name, remedy in (("lefty", "did you mean 'left'?"), ("bob", "the clients are 'left', 'right'")):
            error = prefed_(*words, "--client", name, code=1)
            assert f"no client is called {name!r}; {remedy}" in error, words


def test_a_run_of_a_file_by_its_path_and_one_whose_uploads_are_all_dropped(place, tmp_path):
    """At a rate of 1e30 every upload is NaN: the last warning says so, and what to do."""
    tree = small_experiment(place)
    tree["method"]["lr"] = 1e30
    (tmp_path / "exp.toml").write_text(tomli_w.dumps(tree))
    result = run_experiment("exp.toml", "out")
    assert result.summary["dropped"] == 4
    last = [line for line in Path("out/run.log").read_text().splitlines() if "warning: " in line][-1]
    assert last.endswith("so nothing was learned: scalar 'loss' is nan; lower [method] lr")
