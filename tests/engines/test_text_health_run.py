"""Health of text in runs: which prompts, whose answers, the guard rails, and what is shown of them."""

import json
from dataclasses import replace

import numpy as np
import pytest

import toy
from finished import small_experiment
from prefed import Experiment, load_run, read_run, run
from prefed.core import Key
from prefed.engines import InProcess
from prefed.models import ModelConfig
from prefed.runs.export import Export
from prefed.runs.responses import Models
from prefed.store import RunReader
from prefed.train.generation import Sampling, complete_batch
from prefed.train.metrics.text import distinct_2
from prefed.ui.pages.card import model_card
from prefed.ui.pages.page import public_page, render

LIMIT = 64
"""Lowest limit of tokens in an answer; the longest chosen response has fewer than 32. The context is 64."""
CLIENTS = ("left", "right")


def fedper(place, **tables):
    method = {"name": "fedper", "lr": 0.01, "local_steps": 3, "batch_size": 4}
    return Experiment.model_validate(small_experiment(place, **{"rounds": 3, "method": method, **tables}))


@pytest.fixture(scope="module")
def finished(place, tmp_path_factory):
    return run(fedper(place, evaluate={"text": 5}), tmp_path_factory.mktemp("runs") / "run").path


def rows(path):
    return [json.loads(line) for line in (path / "answers.jsonl").read_text("utf-8").splitlines()]


def test_clients_take_turns_with_their_first_prompts(place, finished):
    """The base model answers each prompt, so does the shared one, and the own one of the prompt's holder."""
    test = [json.loads(line) for line in (place / "test.jsonl").read_text("utf-8").splitlines()]
    held = [[row["prompt"] for row in test if row["worker"] == client] for client in CLIENTS]
    wanted = [(CLIENTS[turn % 2], held[turn % 2][turn // 2]) for turn in range(5)]
    for number, model in ((0, "untouched"), (1, "shared"), (1, "own"), (3, "shared"), (3, "own")):
        some = [row for row in rows(finished) if (row["round"], row["model"]) == (number, model)]
        assert {(row["holder"], row["prompt"]) for row in some} == set(wanted)
        assert len(some) == 5
        assert all(row.get("client") == (row["holder"] if model == "own" else None) for row in some)


def test_answers_and_health_are_those_of_the_finished_runs_models(finished):
    summary, models = read_run(finished).summary, Models(load_run(finished), Sampling(temperature=0))
    last, counts, distinct = [row for row in rows(finished) if row["round"] == 3 and "client" in row], [], []
    for row in last:
        side = models.own(row["client"])
        ids, how = side.ids(row["prompt"]), Sampling(max_tokens=LIMIT, temperature=0)
        (own,) = complete_batch(side.backbone, side.tensors, [ids], how, [Key(0)])
        assert (row["text"], row["ended"]) == (side.backbone.tokenizer.decode(own.tokens), own.ended)
        counts.append(len(own.tokens))
        distinct.append(distinct_2(own.tokens))
    health = summary["text"]["own"]
    assert (health["answers"], health["ends"]) == (5, sum(row["ended"] for row in last) / 5)
    assert health["length"] == pytest.approx(sum(counts) / 5)
    assert health["surprise"] == pytest.approx(np.median([row["surprise"] for row in last]), abs=1e-4)
    assert health["distinct_2"] == pytest.approx(sum(distinct) / 5)
    assert {client: own["answers"] for client, own in health["per_client"].items()} == {"left": 3, "right": 2}
    trainers = load_run(finished, data=True).trainers
    scores = [trainers.score(client, trainers.backbone.reference, "test") for client in CLIENTS]
    places = [(scores[turn % 2], turn // 2) for turn in range(5)]
    chosen = [-own.reference[row, 0] / own.lengths[row, 0] for own, row in places]
    assert summary["text"]["base"]["chosen_surprise"] == pytest.approx(np.quantile(chosen, 0.9), rel=1e-5)
    measured = [record["evaluation"]["text"] for record in read_run(finished).rounds]
    assert measured[-1] == summary["text"]
    assert [text["base"] for text in measured] == 3 * [summary["text"]["base"]]


def test_text_changes_no_other_number_and_is_off_without_a_chat_template(place, finished, tmp_path):
    run(fedper(place), tmp_path / "run")
    for name in ("checkpoint/server@000003.safetensors", "adapters/shared/adapter_model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()
    plain = read_run(tmp_path / "run")
    assert "text" not in plain.summary
    assert not (tmp_path / "run" / "answers.jsonl").exists()
    for record, own in zip(plain.rounds, read_run(finished).rounds, strict=True):
        text = own["evaluation"].pop("text")
        assert text
        assert own["evaluation"] == record["evaluation"]


def test_pages_show_health_and_only_private_ones_the_prompts(finished):
    record, page, public = read_run(finished), render(read_run(finished)), public_page(finished)
    prompt = rows(finished)[0]["prompt"]
    model = ModelConfig.model_validate(record.config["model"])
    export = Export(None, None, aligned=False, taste=None, merged=False, more=(), model=model)
    assert f"left: {prompt}" in page
    for words in ("Health of text", "answers that end", "5 answers"):
        assert words in page
        assert words in public
    assert prompt not in public
    assert prompt not in model_card(record, export)


def health(loops, surprise=1.0):
    shares = {"ends": 1.0, "empty": 0.0, "distinct_2": 0.9, "loops": loops}
    return {"answers": 20, **shares, "length": 9.0, "surprise": surprise, "surprise_band": [0.5, 1.0]}


def written(loops):
    """What answers after each round: the share of the shared model's that loop. The base model's never do."""
    return lambda server, publish, states, number, *, last: {
        "base": health(0.0),
        "shared": health(loops[number - 1]),
    }


def test_a_round_whose_text_breaks_is_warned_of_once_and_never_the_best(tmp_path):
    """Without text, the best of the toy's rounds is the second; with it, the best of the others."""
    options = {"rounds": 5, "stop": {"metric": "preference_accuracy"}}
    toy.run(tmp_path / "plain", **options)
    values = [record["validation"] for record in RunReader(tmp_path / "plain").rounds()]
    best = 1 + values.index(max(values))
    assert RunReader(tmp_path / "plain").commit.best["round"] == best
    loops = [0.0] * 5
    loops[best - 1] = 0.5
    listener = toy.Warned()
    toy.run(tmp_path / "run", callback=listener, answers=written(loops), **options)
    others = [-1.0 if number == best else value for number, value in enumerate(values, 1)]
    assert RunReader(tmp_path / "run").commit.best["round"] == 1 + others.index(max(others))
    (warning,) = listener.texts
    assert warning == (
        f"round {best}: the models' text breaks: 10 of 20 answers loop; the base model: 0; "
        'try method.objective = "rpo" or a larger method.objective_settings.alpha, a lower method.lr or '
        "fewer rounds"
    )
    listener = toy.Warned()
    toy.run(tmp_path / "broken", callback=listener, answers=written([0.5] * 5), **options)
    assert RunReader(tmp_path / "broken").commit.best["round"] == 0
    assert len(listener.texts) == 1


class Falls(InProcess):
    """Chosen responses change by 1, then −2 and then −4.5 nats, each client's with an error of 2."""

    def run(self, tasks):
        for task in tasks:
            for result in super().run([task]):
                if task.kind == "evaluate":
                    shift = (1.0, -2.0, -4.5, -4.5)[task.round - 1]
                    forged = {"chosen_shift": shift, "chosen_shift_error": 2.0}
                    message = json.dumps({**json.loads(result.message), **forged}).encode()
                    result = replace(result, message=message)
                yield result


@pytest.mark.parametrize(("clients", "warned"), [(1, ["round 3"]), (6, ["round 2"])])
def test_chosen_responses_that_become_less_likely_beyond_noise_are_warned_of_once(tmp_path, clients, warned):
    """The error of a mean over 6 clients is 2 / √6 = 0.816. −2 is within 1.96 · 2 of 0, but not within
    1.96 · 0.816; −4.5 is beyond both."""
    listener = toy.Warned()
    toy.run(tmp_path / "run", backend=Falls, callback=listener, rounds=4, evaluation_cohort=clients)
    assert [text.split(":")[0] for text in listener.texts] == warned
    assert "even the chosen responses less likely" in listener.texts[0]
    errors = [record["evaluation"]["chosen_shift_error"] for record in RunReader(tmp_path / "run").rounds()]
    assert errors == pytest.approx([2.0 / clients**0.5] * 4)
