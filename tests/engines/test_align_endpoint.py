"""Completions from a server: what it is asked, what is kept, and what happens when it fails."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from alignments import HELD, make_alignment, rows
from alignments import place as place
from alignments import selectors as selectors
from endpoint import answer, completion, failure, serving
from prefed.align import AlignError, completions
from prefed.align.judge import JudgeError, endpoint
from prefed.align.run import STAGES
from prefed.align.stages import run_stages
from prefed.config import AlignConfig, EndpointConfig
from prefed.core import Key
from prefed.data import Message
from prefed.train.generation import Sampling

pytest.importorskip("openai")

KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(endpoint, "RETRIES", 0)


@pytest.fixture
def alignment(place, selectors, tmp_path):
    made = make_alignment(place, selectors, tmp_path / "align")
    (made.folder / "stages").mkdir(parents=True)
    return made


def at(alignment, url, **changes):
    """The same alignment, with completions of a server."""
    server = EndpointConfig(model="org/policy", url=url, **changes)
    return replace(alignment, config=alignment.config.model_copy(update={"endpoint": server, "top_k": 7}))


def by_seed(server):
    return {(body["prompt"], body["seed"]): f" number {n}" for n, (body, _) in enumerate(server.requests, 1)}


def test_a_server_completes_the_prompts_of_the_server_and_no_others(alignment):
    """Ten prompts with three completions each: thirty requests with seeds of their own. The completion of a
    prompt is the answer to the request with its text and the seed of its random stream. The record says that
    the numbers are not reproducible, and the key is in no file."""
    with serving(lambda text, number: completion(f" number {number}")) as server:
        figures = run_stages(at(alignment, server.url, parallel=3), STAGES[:3])["completions"]
    assert (figures["completions"], figures["model"], figures["url"]) == (30, "org/policy", server.url)
    assert figures["bit_reproducible"] is False
    own = [row["prompt"] for row in rows(alignment.folder, "prompts.jsonl")]
    bodies = [body for body, _ in server.requests]
    assert sorted({body["prompt"] for body in bodies}) == sorted(own)
    assert {body["prompt"] for body in bodies}.isdisjoint(HELD)
    assert len({body["seed"] for body in bodies}) == 30
    got = {"model": "org/policy", "max_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 7}
    assert all({name: body[name] for name in got} == got for body in bodies)
    assert set(server.paths) == {"/v1/completions"}
    assert {headers["authorization"] for _, headers in server.requests} == {f"Bearer {KEY}"}
    answers, key = by_seed(server), alignment.key
    for row in rows(alignment.folder, "completions.jsonl"):
        stream = key.at("prompt", completions.prompt_hash(row["prompt"])).at("sample", row["sample"])
        assert row["completion"] == answers[row["prompt"], stream.number() % 2**31]
    files = (path for path in alignment.folder.rglob("*") if path.is_file())
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_complete_batches_are_not_asked_again(alignment):
    """At most 5 completions a batch, one request at a time. Request 13 fails: of 12 answers, those of the
    batch that is not complete, at most 4, are asked for again."""

    def breaks(text, number):
        return failure(403, "no more") if number == 13 else completion(" yes")

    with serving(breaks) as server:
        with pytest.raises(JudgeError, match=rf"{server.url} returned status 403: .*check the key"):
            run_stages(at(alignment, server.url, parallel=1), STAGES[:3])
        kept = len(rows(alignment.folder, "completions.jsonl"))
        assert 12 - 4 <= kept <= 12 < len(server.requests)
        run_stages(at(alignment, server.url, parallel=1), STAGES[:3])
        assert len(server.requests) == 13 + 30 - kept
    assert len(rows(alignment.folder, "completions.jsonl")) == 30


def test_a_server_that_is_not_there_is_named(alignment):
    with serving(lambda text, number: completion("")) as server:
        url = server.url
    with pytest.raises(JudgeError, match=rf"{url} cannot be reached .*; check \[align.endpoint\] url"):
        run_stages(at(alignment, url), STAGES[:3])


def asked(folder, reply, prompt, chat=True, **settings):
    """Complete a prompt at a server, and return the text, the requests and the paths."""
    template = SimpleNamespace(chat=chat, prompt=lambda prompt: prompt, formed=lambda prompt: prompt)
    with serving(reply) as server:
        config = EndpointConfig(model="org/policy", url=server.url, **settings)
        about = SimpleNamespace(folder=folder, template=template)
        texts = completions._from_endpoint(about, config, Sampling(max_tokens=80))([(prompt, Key(3))])
    return texts, [body for body, _ in server.requests], server.paths


def test_a_conversation_is_a_chat(tmp_path):
    """A server that takes neither seeds nor max_tokens is asked again without them. Its answer was cut."""

    def choosy(text, number):
        name = {1: "seed", 2: "max_tokens"}.get(number)
        return answer("Hello.", "length") if name is None else failure(400, "unknown", param=name)

    prompt = (Message("system", "Be brief."), Message("user", "Hi"))
    texts, bodies, paths = asked(tmp_path, choosy, prompt)
    assert texts == [("Hello.", False)]
    assert bodies[2]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert "seed" not in bodies[2]
    assert (bodies[2]["max_completion_tokens"], bodies[2]["temperature"]) == (80, 0.7)
    assert paths == ["/v1/chat/completions"] * 3


def test_the_temperature_is_not_left_out(tmp_path):
    """Completions at another temperature would be those of another policy."""
    with pytest.raises(AlignError, match=r"/v1 did not complete 'Hi': refused: .*only 1 is supported"):
        asked(tmp_path, lambda *_: failure(400, "only 1 is supported", param="temperature"), "Hi")


def test_the_server_loads_the_adapter_of_the_initial_policy(tmp_path):
    """A vLLM server that has none under this name answers the first request with 404."""

    def vllm(text, number):
        if text == "/v1/unload_lora_adapter":
            return failure(404, "not found")
        if text == "/v1/load_lora_adapter":
            return 200, {"Content-Type": "text/plain"}, b"Success: LoRA adapter 'org/policy' added."
        return completion(" there")

    texts, bodies, paths = asked(tmp_path, vllm, "Hi", load_adapter=True)
    assert texts == [(" there", True)]
    assert bodies[1] == {"lora_name": "org/policy", "lora_path": str(tmp_path / "policy")}
    assert paths == ["/v1/unload_lora_adapter", "/v1/load_lora_adapter", "/v1/completions"]


@pytest.mark.parametrize("status", [400, 404])
def test_a_server_that_loads_no_adapters_is_named(tmp_path, status):
    with pytest.raises(
        JudgeError, match=r"http://127.0.0.1:\d+/v1 (did not load the adapter|returned status)"
    ):
        asked(tmp_path, lambda *_: failure(status, "no"), "Hi", load_adapter=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tastes": "posteriors"}, "completions are generated here: remove endpoint"),
        ({"endpoint": {"load_adapter": True}}, "the initial policy has no adapter: remove endpoint.load"),
    ],
)
def test_settings_that_contradict_a_server_are_refused(changes, words):
    server = {"model": "m", "url": "http://localhost:8000/v1", **changes.get("endpoint", {})}
    with pytest.raises(ValueError, match=words):
        AlignConfig(**{"prompts": "p.jsonl", **changes, "endpoint": server})


def test_a_user_name_in_the_url_is_refused():
    """It would be in the run's files."""
    config = EndpointConfig(model="m", url="http://me:secret@localhost/v1")
    with pytest.raises(JudgeError, match=r"\[align.endpoint\] url must be http.*no user name or password"):
        completions.endpoint_of(config)
