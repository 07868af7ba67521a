"""A judge behind an endpoint: what it is asked, what happens when it fails, and where the key may appear."""

import gzip
import re
import socket
import threading

import pytest

from endpoint import answer, failure, serving
from prefed.align.judge import JudgeError, Question, outcome
from prefed.align.judge import endpoint as module
from prefed.align.judge.endpoint import EndpointJudge
from prefed.config.align import JudgeOptions
from waiting import WATCHDOG

pytest.importorskip("openai")

KEY = "sk-very-secret-0123456789"
PAIR = Question("Name a colour.", " Blue, the good one.", " Mud.")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture
def naps(monkeypatch):
    """Seconds that were slept; nobody sleeps in fact."""
    seconds = []
    monkeypatch.setattr("time.sleep", seconds.append)
    return seconds


def ask(server, questions=(PAIR,), **options):
    options = {"template": "plain", "parallel": 1, "timeout": WATCHDOG, **options}
    return list(EndpointJudge("org/model", JudgeOptions(url=server.url, **options)).compare(questions))


def prefers_good(text, number):
    first = text.split("<response A>")[1].split("</response A>")[0]
    return answer("A" if "good" in first else "B")


def test_a_question_and_its_answer():
    """Asked both ways, the judge names the good response each time: the outcome is a win."""
    with serving(prefers_good) as server:
        verdicts = ask(server, [PAIR, PAIR.swapped()])
    assert [verdict.preference for verdict in verdicts] == [1.0, 0.0]
    assert outcome(*verdicts) == 1.0
    body, headers = server.requests[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("org/model", 0.0, 1024)
    assert "<prompt>\nName a colour.\n</prompt>" in body["messages"][0]["content"]
    assert headers["authorization"] == f"Bearer {KEY}"


def test_a_judge_that_always_says_a_gives_ties_alone():
    questions = [Question(f"Prompt {n}", f"one {n}", f"two {n}") for n in range(5)]
    with serving(lambda text, number: answer("A")) as server:
        verdicts = ask(server, [order for q in questions for order in (q, q.swapped())])
    assert [outcome(*verdicts[k : k + 2]) for k in range(0, 10, 2)] == [0.5] * 5


def test_verdicts_come_in_the_order_of_the_questions():
    """The first answer is held back until the third request is there: three are under way at a time."""
    third = threading.Event()

    def reply(text, number):
        if number == 3:
            third.set()
        if "Prompt 0\n" in text:
            assert third.wait(WATCHDOG)
        return answer("A" if "Prompt 0\n" in text or "Prompt 7\n" in text else "B")

    with serving(reply) as server:
        verdicts = ask(server, [Question(f"Prompt {n}", "x", "y") for n in range(9)], parallel=3)
    assert [k for k, verdict in enumerate(verdicts) if verdict.preference == 1] == [0, 7]


def test_retry_after_is_honoured(naps):
    def reply(text, number):
        return failure(429, "slow down", {"Retry-After": "7"}) if number == 1 else answer("tie")

    with serving(reply) as server:
        assert ask(server)[0].preference == 0.5
    assert len(server.requests) == 2
    assert 7.0 in naps


def test_too_many_requests_for_too_long_ends_the_judging(naps, monkeypatch):
    monkeypatch.setattr(module, "RETRIES", 2)
    with (
        serving(lambda text, number: failure(429, "slow down", {"Retry-After": "3"})) as server,
        pytest.raises(JudgeError, match=r"returned status 429: .*slow down; too many requests: wait"),
    ):
        ask(server)
    assert len(server.requests) == 3
    assert [nap for nap in naps if nap == 3.0] == [3.0, 3.0]


@pytest.mark.parametrize("status", [500, 502, 503])
def test_a_servers_own_failure_is_tried_again(naps, status):
    def reply(text, number):
        return (status, {"Content-Type": "text/html"}, b"<html>oops") if number < 3 else answer("B")

    with serving(reply) as server:
        assert ask(server)[0].preference == 0.0
    assert len(server.requests) == 3


def test_a_time_out_is_tried_again(naps):
    over = threading.Event()

    def reply(text, number):
        if number == 1:
            over.wait(WATCHDOG)
        return answer("A")

    with serving(reply) as server:
        verdicts = ask(server, timeout=2.0)
        over.set()
    assert verdicts[0].preference == 1.0
    assert len(server.requests) >= 2


def test_no_answer_at_all_ends_the_judging(naps, monkeypatch):
    monkeypatch.setattr(module, "RETRIES", 1)
    over = threading.Event()

    def reply(text, number):
        over.wait(WATCHDOG)
        return answer("A")

    with serving(reply) as server:
        with pytest.raises(JudgeError, match=r"did not answer within 0\.2 s in 2 attempts"):
            ask(server, timeout=0.2)
        over.set()


def test_a_closed_port(naps):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(JudgeError, match=r"cannot be reached .*check --url"):
        list(EndpointJudge("m", JudgeOptions(url=url, timeout=WATCHDOG)).compare([PAIR]))


def test_an_answer_that_cannot_be_used_is_kept_with_its_words(subtests):
    for reply, words in (
        (answer("Both are fine colours."), "no verdict in the answer: Both are fine colours."),
        (answer(""), "no verdict in the answer"),
        (answer(None), "malformed answer: no text"),
        ((200, {"Content-Type": "application/json"}, b"{}"), "malformed answer"),
        *(
            ((200, {"Content-Type": "application/json"}, f'{{"choices": {choices}}}'.encode()), "malformed")
            for choices in ["{}", "null", '"abc"', "[null]", '[{"message":[]}]', '[{"message":{}}]']
        ),
        (failure(400, "no", param=["max_tokens"]), "refused: .*no"),
        ((200, {"Content-Type": "application/json"}, b'{"choi'), "malformed answer"),
        ((200, {"Content-Type": "text/html"}, b"<html>Welcome"), "malformed answer"),
        ((200, {"Content-Type": "application/json"}, b"[" * 100_000), "malformed answer"),
        (failure(400, "the text is too long"), "refused: .*the text is too long"),
        (failure(413, "the text is too long"), "refused: .*the text is too long"),
    ):
        with subtests.test(reply=reply, words=words):
            with serving(lambda text, number, reply=reply: reply) as server:
                verdicts = ask(server, [PAIR, PAIR.swapped()])
            assert [verdict.preference for verdict in verdicts] == [None, None]
            assert outcome(*verdicts) is None
            assert re.match(words, verdicts[0].text)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_of_key_or_model_ends_the_judging_and_hides_the_key(status):
    """The server repeats the key in its message, as some do."""
    reply = failure(status, f"{KEY} may not use this model")
    with serving(lambda text, number: reply) as server, pytest.raises(JudgeError) as caught:
        ask(server)
    assert f"returned status {status}" in str(caught.value)
    assert "(the key) may not use this model" in str(caught.value)
    assert KEY not in str(caught.value)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "reply", [answer(f"I like {KEY}.\nA"), failure(400, f"no {KEY}"), (200, {}, KEY.encode())]
)
def test_the_key_is_in_no_verdict(reply):
    with serving(lambda text, number: reply) as server:
        verdict = ask(server)[0]
    assert KEY not in verdict.text
    assert "(the key)" in verdict.text


def test_newer_parameters_are_taken_where_the_older_ones_are_refused():
    """OpenAI's newer models name the limit otherwise and have one temperature alone."""

    def reply(text, number):
        body = server.requests[number - 1][0]
        for name in ("max_tokens", "temperature"):
            if name in body:
                return failure(400, f"unsupported: {name}", param=name, code="unsupported_parameter")
        return answer("A")

    with serving(reply) as server:
        verdicts = ask(server, [PAIR, PAIR])
    assert [verdict.preference for verdict in verdicts] == [1.0, 1.0]
    assert len(server.requests) == 4
    assert server.requests[-1][0]["max_completion_tokens"] == 1024


def test_questions_asked_at_the_same_time_are_all_asked_again():
    """Four questions wait for each other, so all four are refused for a name that none could know of yet."""
    together = threading.Barrier(4)

    def reply(text, number):
        if number > 4:
            return answer("A")
        together.wait(WATCHDOG)
        return failure(400, "unsupported: max_tokens", param="max_tokens", code="unsupported_parameter")

    with serving(reply) as server:
        verdicts = ask(server, [PAIR] * 6, parallel=4)
    assert [verdict.preference for verdict in verdicts] == [1.0] * 6
    assert len(server.requests) == 4 + 6


def test_openais_own_endpoint_needs_a_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(JudgeError, match=r"no key for https://api.openai.com/v1; set .* OPENAI_API_KEY"):
        EndpointJudge("m", JudgeOptions())
    with serving(lambda text, number: answer("A")) as server:
        assert ask(server)[0].preference == 1.0
    monkeypatch.setenv("MY_KEY", KEY)
    with serving(lambda text, number: answer("A")) as server:
        ask(server, key_variable="MY_KEY")
    assert server.requests[0][1]["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("key", ["sk-one\nsk-two", "sk-one…"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(monkeypatch, key):
    """The library that sends the header would quote the first in its error, and the second failed question by
    question."""
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with (
        serving(lambda text, number: answer("A")) as server,
        pytest.raises(JudgeError, match="OPENAI_API_KEY contains a line break, a control") as caught,
    ):
        ask(server)
    assert "sk-" not in str(caught.value)


def test_an_answer_of_a_million_characters_is_not_kept_whole():
    with serving(lambda text, number: answer("!" * 1_000_000 + "A")) as server:
        verdict = ask(server)[0]
    assert verdict.preference is None
    assert len(verdict.text) < 1000
    assert verdict.text.startswith("malformed answer of 1,000,001 characters: !!!")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host/v1", "http://me:word@host/v1", "https://"])
def test_urls_that_are_none(url):
    with pytest.raises(JudgeError, match="--url must be http:// or https:// with a host") as caught:
        EndpointJudge("m", JudgeOptions(url=url))
    assert "word@" not in str(caught.value)


def test_what_verdicts_depend_on_holds_no_key():
    judge = EndpointJudge("m", JudgeOptions(url="http://127.0.0.1:1/v1"))
    assert dict(judge.identity) == {
        "model": "m",
        "url": "http://127.0.0.1:1/v1",
        "template": "plain",
        "judge_tokens": 1024,
    }


def unread(server, match, **options):
    """The answer is refused: openai passes the reason on, or, in some versions, repeats the request first."""
    try:
        got = ask(server, **options)[0].text
    except JudgeError as error:
        got = str(error)
    assert match in got


def refused(server, match, **options):
    with pytest.raises(JudgeError, match=match) as caught:
        ask(server, **options)
    return str(caught.value)


def test_a_redirect_is_not_followed():
    """Prompts and key would go to a server that the user did not name."""
    with serving(lambda text, number: answer("A")) as other:
        away = 307, {"Location": f"{other.url}/chat/completions"}, b""
        with serving(lambda text, number: away) as server:
            refused(server, rf"returned status 307: .*it redirects to {other.url}.*: correct --url")
    assert (len(server.requests), other.requests) == (1, [])


def test_an_answer_without_end_is_not_read(naps, monkeypatch):
    """The server announces a terabyte, and writes until the client hangs up. Of each attempt, at most the
    limit and what the system's buffers hold is taken."""
    monkeypatch.setattr(module, "_BODY", 10_000)
    monkeypatch.setattr(module, "RETRIES", 1)
    written = []

    def endless():
        while True:
            written.append(2**16)
            yield b"!" * 2**16

    with serving(lambda text, number: (200, {"Content-Length": str(2**40)}, endless())) as server:
        unread(server, "the answer has more than")
    assert sum(written) < 2**25


def test_an_answer_that_drips_is_given_up(naps, monkeypatch):
    """Each byte comes in time, so no single read times out."""
    monkeypatch.setattr(module, "RETRIES", 0)
    over = threading.Event()

    def drips():
        while not over.wait(0.02):
            yield b" "

    with serving(lambda text, number: (200, {"Content-Length": str(2**20)}, drips())) as server:
        unread(server, "the answer was not complete after 0.2 s", timeout=0.2)
        over.set()


def test_a_compressed_answer_is_not_expanded(naps, monkeypatch):
    monkeypatch.setattr(module, "RETRIES", 0)
    bomb = 200, {"Content-Encoding": "gzip", "Content-Type": "application/json"}, gzip.compress(b" " * 2**20)
    with serving(lambda text, number: bomb) as server:
        unread(server, "the answer is compressed, although none was asked for")
    assert server.requests[0][1]["accept-encoding"] == "identity"


def test_messages_of_a_server_cannot_steer_a_terminal():
    with serving(lambda text, number: failure(404, "\x1b[2J\x1b]0;owned\x07 no")) as server:
        got = refused(server, "returned status 404")
    assert got.isprintable()
    with serving(lambda text, number: failure(400, "\x1b[2J")) as server:
        assert ask(server)[0].text.isprintable()


@pytest.fixture
def elsewhere(monkeypatch):
    """A server with a name of another machine's: names are looked up on this one."""
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **k: real("127.0.0.1", *more, **k))
    monkeypatch.setenv("NO_PROXY", "*")
    with serving(lambda text, number: failure(401, "who are you?")) as server:
        server.url = server.url.replace("127.0.0.1", "models.example.org")
        yield server


def test_the_key_of_openai_goes_to_no_other_machine(elsewhere):
    """It is often in the environment, and another server needs another key or none."""
    got = refused(elsewhere, "status 401: .*another variable: OPENAI_API_KEY is only sent to OpenAI")
    assert "run the command again" in got
    assert KEY not in str(elsewhere.requests)


def test_a_key_that_is_named_goes_to_its_server(elsewhere, monkeypatch):
    monkeypatch.setenv("THEIR_KEY", KEY)
    refused(elsewhere, "status 401: .*check the key in THEIR_KEY", key_variable="THEIR_KEY")
    assert elsewhere.requests[0][1]["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("local", [True, False])
def test_what_the_environment_holds_for_openai_goes_to_openai_alone(elsewhere, monkeypatch, local):
    """The library sends these with every request. The control is a plain client of the library,
    which sends them to the same server."""
    secrets = {"ORG_ID": "org-0", "PROJECT_ID": "proj-0", "ADMIN_KEY": "admin-0", "WEBHOOK_SECRET": "hook-0"}
    for name, value in secrets.items():
        monkeypatch.setenv(f"OPENAI_{name}", value)
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Mine: mine-0\nAuthorization: Bearer other-0")
    monkeypatch.setenv("THEIR_KEY", KEY)
    if local:
        elsewhere.url = elsewhere.url.replace("models.example.org", "127.0.0.1")
    refused(elsewhere, "status 401", key_variable="THEIR_KEY")
    ((_, sent),) = elsewhere.requests
    assert not [value for value in sent.values() if "-0" in value.replace(KEY, "")]
    assert sent["authorization"] == f"Bearer {KEY}"

    from openai import AuthenticationError, OpenAI

    client = OpenAI(base_url=elsewhere.url, max_retries=0)
    with pytest.raises(AuthenticationError):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    assert {"org-0", "proj-0"} <= set(elsewhere.requests[-1][1].values())
