"""``prefed judge`` on small real runs: who is compared, what is written, and how it continues."""

import importlib.util
import json
import re
import shutil
import stat
from dataclasses import replace
from inspect import signature
from itertools import count
from pathlib import Path
from typing import get_args

import pytest
import torch

from commands import prefed_
from endpoint import answer, completion, failure, serving
from finished import small_experiment
from prefed import Experiment
from prefed import run as run_experiment
from prefed.align.judge import endpoint
from prefed.config.align import JudgeOptions
from prefed.core import Key
from prefed.data import synthetic
from prefed.models.tiny import make_tiny
from prefed.runs import responses
from prefed.runs.judge import SAME, Comparison, summarize
from prefed.runs.loaded_run import load_run
from prefed.train.metrics.winrate import NothingJudgedError
from prefed.ui.cli.app import complete_command

pytest.importorskip("openai")

KEY = "sk-very-secret-0123456789"
PROMPTS = 6


def experiment(folder, method, **settings):
    tables = small_experiment(folder, "client", rounds=1)
    tables["data"]["max_length"] = 256
    tables["method"] |= {"name": method, "lr": 0.3, **settings}
    return tables


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The synthetic set with two clients of opposite tastes, and runs over it: with a shared model, and with
    personal models next to it."""
    folder = tmp_path_factory.mktemp("place")
    synthetic.write(folder, synthetic.generate(Key(1), clients=2, train=8, test=3))
    documents = list(synthetic.corpus(Key(1), 40))
    make_tiny(
        folder / "model", documents, Key(0), layers=1, width=32, heads=2, vocabulary=300, context=256, steps=8
    )
    for method in ("feddpo", "ditto"):
        run_experiment(Experiment.model_validate(experiment(folder, method)), folder / method)
    return folder


@pytest.fixture(scope="module")
def selectors(place):
    """Three selectors, trained for a round each and then grouped."""
    tree = experiment(place, "fedbiscuit", selectors=3, warmup_rounds=1, regroup_every=1)
    tree["rounds"] = 4
    tree["method"] |= {"lr": 0.03, "local_steps": 8}
    tree["data"]["validation_fraction"] = 0.25
    run_experiment(Experiment.model_validate(tree), place / "fedbiscuit")
    return place / "fedbiscuit"


@pytest.fixture
def runs(place, tmp_path):
    """Copies of the runs, without earlier verdicts."""
    for method in ("feddpo", "ditto"):
        shutil.copytree(place / method, tmp_path / method)
    return tmp_path


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(endpoint, "RETRIES", 0)


def judge(run, place, *more, code=0, tokens=8):
    words = ("judge", run, "--prompts", place / "test.jsonl", "--max-new-tokens", tokens, "--json", *more)
    output = prefed_(*words, code=code)
    return json.loads(output) if code == 0 else output


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def shown(text):
    """The two responses in a question."""
    return [text.split(f"<response {x}>\n")[1].split(f"\n</response {x}>")[0] for x in "AB"]


def prefers_o(text, number):
    """Prefers the response with more o's; the same number is a tie."""
    first, second = (part.count("o") for part in shown(text))
    return answer("tie" if first == second else "A" if first > second else "B")


def check_known(run, result):
    """TensorBoard has the win rate next to the run's rounds."""
    if importlib.util.find_spec("tensorboard") is None:
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    got = {name: events.Scalars(f"judge/vs-chosen/{name}") for name in ("win_rate/mean", "ties")}
    values = {name: [(point.step, point.value) for point in points] for name, points in got.items()}
    rate = pytest.approx(result["win_rate"]["mean"])
    assert values == {"win_rate/mean": [(1, rate)], "ties": [(1, result["ties"])]}
    assert [point.step for point in events.Scalars("loss")] == [1]


def test_what_names_a_client_is_known():
    """With [track] clients = false such a comparison is not logged."""
    how = Comparison("utility", Path("x"))
    assert not how.names_a_client
    for changes in ({"client": "ada"}, {"taste": "ada"}, {"options": JudgeOptions(taste="ada")}):
        assert replace(how, **changes).names_a_client


def test_a_run_against_reference_answers(runs, place):
    """Oracle: the responses by transformers' greedy ``generate`` on the exported adapter, and the rule."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prefed_("export", runs / "feddpo", "--out", runs / "out")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(place / "model"), runs / "out")
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    expected = []
    for row in rows(place / "test.jsonl"):
        ids = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
        with torch.inference_mode():
            output = model.generate(ids, max_new_tokens=8, do_sample=False, repetition_penalty=1.0)
        text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        gap = text.count("o") - row["chosen"].count("o")
        expected.append((row["prompt"], text, row["chosen"], 0.5 if gap == 0 else float(gap > 0)))
    options = ("--against", place / "test.jsonl", "--column", "chosen", "--name", "vs-chosen")
    with (runs / "feddpo/config.toml").open("a") as file:
        file.write('[track]\nto = ["tensorboard"]\nclients = false\n')
    with serving(prefers_o) as server:
        result = judge(runs / "feddpo", place, "--judge", "endpoint:m", "--url", server.url, *options)
    check_known(runs / "feddpo", result)
    folder = runs / "feddpo/judge/vs-chosen"
    verdicts = rows(folder / "verdicts.jsonl")
    assert [(v["prompt"], v["text"], v["against"], v["outcome"]) for v in verdicts] == expected
    assert [v["row"] for v in verdicts] == list(range(1, PROMPTS + 1))
    outcomes = [entry[-1] for entry in expected]
    assert result["win_rate"]["mean"] == sum(outcomes) / PROMPTS
    assert result["wins"] == outcomes.count(1.0) / PROMPTS
    assert (result["ties"], result["judged"], result["failed"]) == (outcomes.count(0.5), PROMPTS, 0)
    assert len(server.requests) == 2 * PROMPTS
    assert json.loads((folder / "summary.json").read_text()) == result
    assert result["round"] == 1


def test_what_was_asked_is_not_asked_again(runs, place, monkeypatch):
    """The endpoint breaks at question 6, in the middle of the third pair. Given again, the command generates
    nothing and asks about pairs 3 to 6: all in all 5 good answers, the broken one and 8 more."""
    broken = [True]

    def reply(text, number):
        return failure(500, "oops") if broken[0] and number >= 6 else prefers_o(text, number)

    options = ("--against", place / "test.jsonl", "--column", "chosen", "--name", "n", "--parallel", "1")
    with serving(reply) as server:
        words = ("--judge", "endpoint:m", "--url", server.url, *options)
        message = judge(runs / "feddpo", place, *words, code=1)
        assert "returned status 500" in message
        assert len(rows(runs / "feddpo/judge/n/verdicts.jsonl")) == 2
        # A process that was killed while it wrote leaves half a line.
        with (runs / "feddpo/judge/n/verdicts.jsonl").open("a") as file:
            file.write('{"row": 3, "prom')
        broken[0] = False
        monkeypatch.setattr(responses, "complete_batch", lambda *words: pytest.fail("generated again"))
        resumed = judge(runs / "feddpo", place, *words)
        assert len(server.requests) == 6 + 8
        assert judge(runs / "feddpo", place, *words) == resumed
        assert len(server.requests) == 6 + 8
        whole = judge(runs / "feddpo", place, *words, "--name", "whole")
    assert whole == {**resumed, "name": "whole"}
    assert rows(runs / "feddpo/judge/n/verdicts.jsonl") == rows(runs / "feddpo/judge/whole/verdicts.jsonl")


def test_texts_go_on_where_they_stopped(runs, place, monkeypatch):
    """The third batch dies. Given again, the command makes what is missing and nothing else, and the texts
    are those of a command that was never stopped."""
    made, real = [], responses.complete_batch

    def dies(backbone, tensors, prompts, *others, **more):
        made.append(len(prompts))
        if len(made) == 3:
            raise OSError("killed")
        return real(backbone, tensors, prompts, *others, **more)

    monkeypatch.setattr(responses, "complete_batch", dies)
    monkeypatch.setattr(responses, "BATCH", 2)
    assert "killed" in judge(runs / "feddpo", place, "--judge", "utility", "--name", "n", code=1)
    judge(runs / "feddpo", place, "--judge", "utility", "--name", "n")
    assert sum(made) - made[2] == 2 * PROMPTS
    shutil.copytree(place / "feddpo", runs / "other")
    judge(runs / "other", place, "--judge", "utility", "--name", "n")
    one, two = (rows(runs / run / "judge/n/verdicts.jsonl") for run in ("feddpo", "other"))
    assert one == two


def test_another_comparison_needs_another_name(runs, place, tmp_path, monkeypatch):
    """It is refused before a response is made, and the message names the setting and the option."""
    (tmp_path / "test.jsonl").write_text("".join((place / "test.jsonl").read_text().splitlines(True)[:-1]))
    with serving(prefers_o) as server:
        words = ("--judge", "endpoint:m", "--url", server.url, "--name", "n")
        judge(runs / "feddpo", place, *words)
        monkeypatch.setattr(responses, "complete_batch", lambda *words: pytest.fail("generated"))
        for folder, tokens, more, change in (
            (place, 8, ("--template", "mt-bench"), "template: 'plain' → 'mt-bench'"),
            (place, 9, (), "responses.max_new_tokens: 8 → 9"),
            (place, 8, ("--temperature", "1"), "responses.temperature: 0.0 → 1.0"),
            (tmp_path, 8, (), r"responses\.prompts: '6 prompts, \w+' → '5 prompts, \w+'"),
        ):
            message = judge(runs / "feddpo", folder, *words, *more, tokens=tokens, code=1)
            assert re.search(change, message)
            assert "--name" in message


def test_prompts_have_the_encoding_and_the_format_of_the_runs_data(runs, place, tmp_path):
    """In Latin-1 é is a byte that no UTF-8 text has there."""
    tree = experiment(tmp_path, "feddpo")
    tree["data"] |= {"encoding": "latin-1", "test_fraction": 0.25}
    del tree["data"]["test"]
    tree["model"]["name"] = str(place / "model")
    tree["method"]["local_steps"] = 1
    for name in ("train", "prompts"):
        content = (place / "train.jsonl").read_text().replace('prompt": "', 'prompt": "é ')
        (tmp_path / f"{name}.jsonl").write_bytes(content.encode("latin-1"))
    run_experiment(Experiment.model_validate(tree), tmp_path / "run")
    words = (
        "--judge",
        "utility",
        "--prompts",
        tmp_path / "prompts.jsonl",
        "--max-new-tokens",
        2,
        "--name",
        "n",
    )
    prefed_("judge", tmp_path / "run", *words, "--against", tmp_path / "prompts.jsonl", "--column", "chosen")
    assert all(row["prompt"].startswith("é ") for row in rows(tmp_path / "run/judge/n/verdicts.jsonl"))


def test_files_are_private_and_hold_no_key(runs, place):
    def reply(text, number):
        return answer(f"Your key is {KEY}.\nA")

    with serving(reply) as server:
        output = judge(runs / "feddpo", place, "--judge", "endpoint:m", "--url", server.url)
    assert KEY not in json.dumps(output)
    for path in (runs / "feddpo/judge").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    for path in runs.rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes(), path


def test_equal_texts_are_no_rate_where_the_judge_failed():
    """A tie that nobody judged is half a win next to verdicts; with failures only it is not a rate of 0.5.
    Equal texts everywhere are a rate of 0.5."""

    prompts = map(str, count())

    def row(outcome, words):
        said = {"preference": outcome, "words": words}
        texts = {"prompt": next(prompts), "text": "x", "against": "x"}
        return {"outcome": outcome, **texts, "first": said, "second": said}

    how, tie = Comparison("utility", Path("p.txt")), row(0.5, SAME)
    with pytest.raises(NothingJudgedError, match=r"1 of 1 prompts have no .* verdict; the first failure: Hm"):
        summarize([tie, row(None, "Hm.")], 0, how)
    result = summarize([tie, row(None, "Hm."), row(1.0, "A")], 0, how)
    assert (result["win_rate"]["mean"], result["judged"], result["failed"]) == (0.75, 2, 1)
    assert summarize([tie, tie], 0, how)["win_rate"]["mean"] == 0.5


@pytest.mark.parametrize("form", [str, lambda text: [{"role": "user", "content": str(text)}]])
def test_a_prompt_that_is_judged_again_is_no_further_prompt(form):
    """One win, one loss, on two prompts or both on one, as texts or as messages: the rate is the same, the
    interval is wider, and the note says over how many prompts it is."""
    said = {"preference": 1.0, "words": "A"}
    texts = {"text": "x", "against": "y", "first": said, "second": said}
    judged = [{**texts, "outcome": value, "prompt": form(k)} for k, value in enumerate((1.0, 0.0))]
    how = Comparison("utility", Path("p.txt"))
    once, again = (
        summarize(each, 0, how) for each in (judged, [{**row, "prompt": form(0)} for row in judged])
    )
    assert once["win_rate"]["mean"] == again["win_rate"]["mean"] == 0.5
    assert once["win_rate"]["high"] < again["win_rate"]["high"]
    assert "distinct prompts" not in once["note"]
    assert "1 distinct prompt was judged; the interval accounts for repeated prompts" in again["note"]


def test_failed_prompts_count_nowhere_and_are_said(runs, place):
    """The judge answers nothing usable about the first prompt when it sees it swapped."""
    first = rows(place / "test.jsonl")[0]["chosen"].strip()

    def reply(text, number):
        return answer("Hm." if shown(text)[0] == first else prefers_o(text, number)[2] and "A")

    options = ("--against", place / "test.jsonl", "--column", "chosen", "--name", "n")
    with serving(reply) as server:
        result = judge(runs / "feddpo", place, "--judge", "endpoint:m", "--url", server.url, *options)
    assert (result["judged"], result["failed"]) == (PROMPTS - 1, 1)
    assert "1 prompt has no usable verdict" in result["note"]


def test_a_clients_own_model_against_the_shared_one(runs, place):
    """Which text is whose: oracle is the run's own tensors, loaded and generated with here."""
    run = load_run(runs / "ditto", data=True)
    own, shared = run.model("ada"), run.job.shared(run.method.publish(run.server, "ada"))
    judge(runs / "ditto", place, "--judge", "utility", "--client", "ada", "--against-shared", "--name", "n")
    verdicts = rows(runs / "ditto/judge/n/verdicts.jsonl")
    for name, tensors in (("text", own), ("against", shared)):
        run.backbone.load(tensors)
        for row in verdicts:
            ids = torch.tensor([run.backbone.tokenizer(row["prompt"])["input_ids"]])
            with torch.inference_mode():
                output = run.backbone.causal.generate(ids, max_new_tokens=8, do_sample=False)
            text = run.backbone.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
            assert row[name] == text
    assert any(row["text"] != row["against"] for row in verdicts)
    message = judge(runs / "ditto", place, "--judge", "utility", "--client", "adda", code=1)
    assert "did you mean 'ada'" in message
    assert "--against-shared needs --client ID, the client with the personal model" in judge(
        runs / "ditto", place, "--judge", "utility", "--against-shared", code=2
    )


def test_two_runs_are_mirror_images(runs, place):
    """RUN against RUN2 and RUN2 against RUN: the rates add up to 1. The utility is that of
    :mod:`prefed.data.synthetic`, of the tastes that were drawn."""
    words = ("--judge", "utility", "--taste", "ben")
    one = judge(runs / "feddpo", place, runs / "ditto", *words, "--name", "n", "--client", "ada")
    other = judge(runs / "ditto", place, runs / "feddpo", *words, "--name", "n", "--client", "ada")
    assert one["win_rate"]["mean"] + other["win_rate"]["mean"] == 1
    taste = synthetic.tastes(Key(1), 2)["ben"]
    for row in rows(runs / "feddpo/judge/n/verdicts.jsonl"):
        gap = synthetic.utility(row["text"], taste) - synthetic.utility(row["against"], taste)
        assert row["outcome"] == (0.5 if gap == 0 else float(gap > 0))


def test_the_aligned_model_of_a_run_is_judged(runs, place):
    """An adapter under align/ is the run's model: the published one, exported there, responds alike."""
    words = ("--judge", "utility", "--temperature", "1", "--name")
    judge(runs / "feddpo", place, *words, "published")
    (runs / "feddpo/align").mkdir()
    prefed_("export", runs / "feddpo", "--out", runs / "feddpo/align/adapter")
    result = judge(runs / "feddpo", place, *words, "aligned")
    assert result["model"] == "feddpo, aligned"
    one, two = (rows(runs / f"feddpo/judge/{name}/verdicts.jsonl") for name in ("published", "aligned"))
    assert [row["text"] for row in one] == [row["text"] for row in two]
    assert any(row["text"] != row["against"] for row in one)


def test_prompts_beyond_the_window_are_left_out_and_counted(runs, place, tmp_path):
    lines = (place / "test.jsonl").read_text().splitlines()
    long = json.dumps({"prompt": "word " * 2000})
    (tmp_path / "test.jsonl").write_text("\n".join([long, *lines]) + "\n")
    result = judge(runs / "feddpo", tmp_path, "--judge", "utility", "--name", "n")
    assert (result["prompts"], result["judged"], result["left_out"]) == (PROMPTS + 1, PROMPTS, 1)
    assert "1 prompt is left out: no room for a response in the model's context" in result["note"]
    verdicts = rows(runs / "feddpo/judge/n/verdicts.jsonl")
    assert [(row["row"], row["prompt"]) for row in verdicts] == [
        (number, json.loads(line)["prompt"]) for number, line in enumerate(lines, 2)
    ]


SERVED = ("--responses", "m", "--responses-url", "http://localhost/v1")
TOGETHER = "use --responses MODEL and --responses-url URL together"
REFUSED = (
    (("--judge", "rewards:x"), "did you mean 'reward'", 2),
    (("--template", "none"), "the templates are plain", 2),
    (("--column", "y"), "use --against FILE and --column NAME together", 2),
    (("--name", "../x"), "--name '../x'", 2),
    (("--taste", "zoe"), "no such client in the data of the run; use mean", 1),
    (("--prompt-column", "question"), "no column 'question'", 1),
    (("--judge", "selector:{run}"), "feddpo trains no selectors", 1),
    (("--judge", "endpoint:m", "--url", "nowhere"), "--url must be http:// or https:// with a host", 1),
    (SERVED[:2], TOGETHER, 2),
    (SERVED[2:], TOGETHER, 2),
    (("--responses-key", "AWS_KEY"), "'AWS_KEY' should be PREFED_…API_KEY or OPENAI_API_KEY", 2),
    (("--timeout", "0"), "'--timeout': 0.0 should be greater than 0", 2),
    (("--timeout", "nan"), "'--timeout': nan should be a finite number", 2),
)


def test_what_cannot_be_judged(runs, place, subtests):
    for words, message, code in REFUSED:
        with subtests.test(words=words):
            words = [word.format(run=runs / "feddpo") for word in words]
            assert message in judge(runs / "feddpo", place, "--judge", "utility", *words, code=code)


def test_selectors_vote(runs, place, selectors):
    """Oracle: plain transformers with each selector's exported adapter, question by question, in both orders;
    and the sign of the sum of the signs of the three mean log-odds."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = ("--against", place / "test.jsonl", "--column", "chosen", "--name", "n", "--temperature", "1")
    judge(runs / "feddpo", place, "--judge", f"selector:{selectors}", *options)
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    letters = [tokenizer(f"\nBetter: {letter}")["input_ids"][-1] for letter in "AB"]
    models = [
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(place / "model"), adapter).eval()
        for adapter in sorted((selectors / "adapters").glob("selector-*"))
    ]
    assert len(models) == 3

    def log_odds(model, prompt, a, b):
        ids = tokenizer(f"Query: {prompt.strip()}")["input_ids"]
        ids += tokenizer(f"\nA: {a.strip()}\nB: {b.strip()}\nBetter: A")["input_ids"][:-1]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        return float(logits[letters[0]] - logits[letters[1]])

    decided = 0
    for row in rows(runs / "feddpo/judge/n/verdicts.jsonl"):
        own, other = row["text"], row["against"]
        if not own.strip():
            assert row["result"] == "failed"
            continue
        scores = [
            log_odds(m, row["prompt"], own, other) - log_odds(m, row["prompt"], other, own) for m in models
        ]
        votes = sum(1 if score > 0 else -1 for score in scores)
        if min(map(abs, scores)) > 1e-4:
            assert row["outcome"] == float(votes > 0)
            decided += 1
        words = row["first"]["words"]
        assert [float(word) for word in re.findall(r"[+-]\d\.\d{4}", words)] == pytest.approx(
            [score / 2 for score in scores], abs=2e-4
        )
    assert decided >= 3
    message = judge(selectors, place, "--judge", "utility", code=1)
    assert "trains selectors, which generate no text" in message


def test_a_server_generates_the_responses(runs, place, monkeypatch):
    """The run's responses, and with a second model the base model's too, are the answers to requests with the
    prompts' texts; nothing is generated here. A broken comparison asks only for what is missing: of the first
    2 answers, none is asked for again. That they are not reproducible is in the settings and the summary, and
    the key is in no file."""
    broken = [True]

    def reply(text, number):
        return failure(400, "\x1b[2Jno") if broken[0] and number == 3 else completion(f" number {number}")

    monkeypatch.setattr(responses, "complete_batch", lambda *words: pytest.fail("generated here"))
    with serving(reply) as server:
        words = ("--judge", "utility", "--responses", "org/policy", "--responses-url", server.url)
        words += ("--parallel", "1", "--name", "n")
        against = ("--against", place / "test.jsonl", "--column", "chosen")
        message = judge(runs / "feddpo", place, *words, *against, code=1)
        assert re.search(rf"{server.url}: no response of feddpo to prompt 3: refused: .*\\x1b\[2Jno", message)
        broken[0] = False
        result = judge(runs / "feddpo", place, *words, *against)
        assert len(server.requests) == PROMPTS + 1
        assert {body["model"] for body, _ in server.requests} == {"org/policy"}
        assert {(body["max_tokens"], body["temperature"]) for body, _ in server.requests} == {(8, 0.0)}
        verdicts = rows(runs / "feddpo/judge/n/verdicts.jsonl")
        answered = [body for n, (body, _) in enumerate(server.requests, 1) if n != 3]
        assert [v["prompt"] for v in verdicts] == [body["prompt"] for body in answered]
        assert [v["text"] for v in verdicts] == [f" number {n}" for n in (1, 2, 4, 5, 6, 7)]
        both = ("--responses", "org/base", "--name", "both")
        judge(runs / "feddpo", place, *words, *both)
        assert [body["model"] for body, _ in server.requests[PROMPTS + 1 :]] == ["org/base"] * PROMPTS
    assert f"from org/policy at {server.url}, not bit-reproducible" in result["note"]
    settings = json.loads((runs / "feddpo/judge/both/settings.json").read_text())["servers"]
    assert settings == {
        "feddpo": {"model": "org/policy", "url": server.url},
        "base": {"model": "org/base", "url": server.url},
        "bit_reproducible": False,
    }
    files = (path for path in (runs / "feddpo/judge").rglob("*") if path.is_file())
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_an_alignment_names_the_url_of_its_judge(selectors, place, tmp_path, monkeypatch):
    """The prompts are the server's own. All labels come from the judge at the URL in the file, with the key
    and the template named there."""
    monkeypatch.setenv("PREFED_TEST_API_KEY", "sk-theirs")
    prompts = [f"Server question {n}?" for n in range(4)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    run = tmp_path / "run"
    shutil.copytree(selectors, run)
    options = {"labels": "judge:endpoint:m", "completions": 2, "max_new_tokens": 4, "epochs": 1, "lr": 1e-3}
    with serving(lambda text, number: answer("BA"[number % 2])) as server:
        options |= {"judge.url": server.url, "judge.key_variable": "PREFED_TEST_API_KEY"}
        options |= {"judge.template": "helpful", "judge.parallel": 1, "held_out": 0}
        words = [word for name, value in options.items() for word in ("--set", f"align.{name}={value}")]
        output = prefed_("align", run, "--prompts", tmp_path / "prompts.txt", *words)
    assert f"prompts and completions are sent to {server.url}, which judges them" in output
    assert {headers["authorization"] for _, headers in server.requests} == {"Bearer sk-theirs"}
    assert all("which of them is the more helpful" in r["messages"][0]["content"] for r, _ in server.requests)
    assert len(rows(run / "align/labels.jsonl")) == len(server.requests) / 2 == 4
    files = (path for path in run.rglob("*") if path.is_file())
    assert not [path for path in files if b"sk-theirs" in path.read_bytes()]
    refusals = {
        "align.judge.template=helpfull": "[align.judge] template 'helpfull'",
        "align.judge.key_variable=AWS_SECRET_ACCESS_KEY": "key_variable",
    }
    for change, got in refusals.items():
        assert got in prefed_("align", run, "--stage", "labels", "--set", change, code=1)


def test_options_made_from_settings_have_their_ranges_and_words():
    """An open bound is in the help: Typer has closed ranges only."""
    parameters = signature(complete_command("judge")).parameters
    options = {name: get_args(each.annotation)[-1] for name, each in parameters.items() if name != "context"}
    assert (options["parallel"].min, options["max_new_tokens"].min) == (1, 1)
    assert options["timeout"].help.endswith("; above 0.")
    assert (options["key"].metavar, options["taste"].metavar) == ("VARIABLE", "CLIENT|mean")
