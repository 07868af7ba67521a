"""The page of ``prefed collect`` over a real socket: who is let in, what is sent, what is kept."""

import base64
import hashlib
import logging
import re
import socket
from contextlib import closing
from http.client import HTTPConnection

import pytest

from collecting import RECORDS, Browser, serving, session
from prefed.data import Message, Record
from waiting import WATCHDOG

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from prefed.ui.collect.server import HOST, listen


@pytest.fixture
def place(tmp_path):
    with session(tmp_path) as opened, serving(opened) as links:
        yield opened, links, tmp_path


def test_a_link_opens_one_browser_once(place):
    _, links, _ = place
    first = Browser(links[0])
    assert first.status == 200
    assert "Case 0:" in first.text
    (cookie,) = first.cookies
    assert cookie.has_nonstandard_attr("HttpOnly")
    assert cookie.get_nonstandard_attr("SameSite") == "strict"
    second = Browser(links[0])
    assert (second.status, "Case 0:" in second.text) == (403, False)
    assert len(links) == 2
    assert Browser(links[1]).status == 200
    assert first.get() == Browser(links[2]).text


def test_handlers_of_the_process_stay_open(tmp_path):
    """``logging.config.dictConfig`` closes all handlers, and with some of them standard error."""
    closed = []

    class Handler(logging.Handler):
        def close(self):
            closed.append(True)
            super().close()

    handler = Handler()
    with session(tmp_path) as opened, serving(opened) as links:
        assert Browser(links[0]).status == 200
    assert not closed
    handler.close()
    assert closed


@pytest.mark.parametrize("path", ["/", "/state", "/?token=", "/?token=ä"])
def test_without_a_link_nothing_is_said(place, path):
    _, links, _ = place
    stranger = Browser(root=links[0].partition("/?")[0])
    stranger.get(path.replace("ä", "%C3%A4"))
    assert stranger.status == 403
    assert "Case" not in stranger.text
    assert "ann" not in stranger.text


def test_other_sites_and_other_names_of_the_host_are_refused(place):
    """A page elsewhere may send a form with the browser's cookie, and a name of its own may lead here."""
    opened, links, _ = place
    browser = Browser(links[0])
    for origin in ("http://example.org", "null", browser.root.replace("127.0.0.1", "localhost")):
        browser.get()
        browser.answer("left", headers={"Origin": origin})
        assert browser.status == 403
    browser.get("/", headers={"Host": "example.org"})
    assert browser.status == 400
    assert not opened.judged()
    assert links[0].startswith(f"http://{HOST}:")
    assert HOST == "127.0.0.1"


def test_the_page_may_load_nothing_and_run_only_its_own_script(place):
    _, links, _ = place
    browser = Browser(links[0])
    policy = dict(part.partition(" ")[::2] for part in browser.headers["Content-Security-Policy"].split("; "))
    for name, tag in (("script-src", "script"), ("style-src", "style")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", browser.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[name] == f"'sha256-{digest}'"
    others = {name: value for name, value in policy.items() if name not in ("script-src", "style-src")}
    assert others == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "form-action": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "frame-ancestors": "'none'",
    }
    assert not re.findall(r'(?:src|href|action)="(?!/|data:,)', browser.text)
    assert "onclick" not in browser.text
    assert browser.headers["Cache-Control"] == "no-store"


def test_texts_are_shown_and_never_obeyed(tmp_path):
    evil = "</div><script>alert(1)</script><img src=x onerror=alert(2)>"
    record = Record((Message("user", evil), Message("assistant", "&amp;")), evil + "a", evil + "b")
    with session(tmp_path, [record]) as opened, serving(opened) as links:
        text = Browser(links[0]).text
    assert text.count("<script>") == 1
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 3
    assert "<img" not in text
    assert "&amp;amp;" in text


def test_a_session_by_forms_alone(tmp_path):
    """Name, three choices, one sent twice, one taken back, one with neither, and the end."""
    with session(tmp_path, RECORDS[:3], client=None) as opened, serving(opened) as links:
        browser = Browser(links[0])
        assert "3 prompts" in browser.text
        assert "at most" not in browser.post("/name", client="x" * 101)
        assert (browser.status, "101 characters" in browser.text) == (400, True)
        browser.post("/name", client=" Zoë ")
        number = browser.number
        browser.answer("left", strength=2)
        assert "1 of 3" in browser.text
        browser.post("/choose", number=number, answer="right", strength="")
        assert "1 of 3" in browser.text
        browser.post("/undo")
        assert browser.number == number
        browser.answer("right", strength="")
        browser.answer("neither")
        assert browser.get("/state") == "pair"
        browser.get()
        browser.answer("left")
        assert "That was the last pair" in browser.text
        assert "2 chosen pairs are saved in" in browser.text
        assert re.search(r"In \d of 2 pairs", browser.text)
        assert "Thank you" in browser.post("/finish")
    rows = (tmp_path / "pairs.jsonl").read_text("utf-8").splitlines()
    assert [('"side": "right"' in row, '"client": "Zoë"' in row) for row in rows] == [
        (True, True),
        (False, True),
    ]
    assert not any("margin" in row for row in rows)


@pytest.mark.parametrize(
    ("path", "fields", "status", "message"),
    [
        ("/choose", {"number": "x", "answer": "left"}, 400, "the form is incomplete; reload the page"),
        ("/choose", {"number": "1", "answer": "left"}, 400, "this question does not exist; reload the page"),
        ("/choose", {"answer": "best"}, 400, "the form is incomplete; reload the page"),
        ("/prompt", {"prompt": "Go"}, 400, "prompts cannot be typed without a model; start prefed collect"),
        ("/prompt", {"prompt": "x" * 200_000}, 413, "too long"),
        ("/none", {}, 404, "Not Found"),
    ],
)
def test_forms_that_are_not_the_pages_change_nothing(place, path, fields, status, message):
    opened, links, _ = place
    browser = Browser(links[0])
    if path == "/choose" and "number" not in fields:
        fields = {"number": browser.number, **fields}
    assert message in browser.post(path, **fields)
    assert browser.status == status
    assert not opened.judged()


def test_a_body_without_a_length_is_not_read(place):
    _, links, _ = place
    browser = Browser(links[0])
    host, (cookie,) = browser.root.removeprefix("http://"), browser.cookies
    with closing(HTTPConnection(host, timeout=WATCHDOG)) as connection:
        headers = {"Cookie": f"{cookie.name}={cookie.value}", "Content-Length": "5"}
        connection.request("POST", "/undo", iter([b"x"]), headers | {"Transfer-Encoding": "chunked"})
        assert connection.getresponse().status == 413


def test_requests_that_are_cut_leave_no_traceback(tmp_path, caplog):
    """Half a request line, half the headers, a form without its body and one with half of it: the connection
    ends, the page continues, and nothing is saved."""
    with session(tmp_path) as opened, serving(opened) as links:
        browser = Browser(links[0])
        host, (cookie,) = browser.root.removeprefix("http://"), browser.cookies
        head = f"POST /choose HTTP/1.1\r\nHost: {host}\r\nCookie: {cookie.name}={cookie.value}\r\n"
        head += "Content-Length: 40\r\n\r\n"
        for request in (head[:9], head[:-30], head, f"{head}number={browser.number}&answ"):
            with socket.create_connection(host.split(":"), timeout=WATCHDOG) as connection:
                connection.sendall(request.encode())
        assert "Case 0:" in browser.get()
        assert not opened.judged()
    assert [record.getMessage() for record in caplog.records] == []


def test_an_undo_that_is_sent_twice_takes_back_one_choice(tmp_path):
    """As by a double click, or from a second tab that still shows the page of before."""
    with session(tmp_path, RECORDS[:3]) as opened, serving(opened) as links:
        browser = Browser(links[0])
        browser.answer("left")
        browser.answer("right")
        (done,) = re.findall(r'name="done" value="(\d+)"', browser.text)
        for _ in range(2):
            browser.post("/undo", done=done)
        assert "1 of 3" in browser.text


def test_typed_prompts_reach_the_model_with_their_lines(tmp_path):
    prompts = []
    with session(tmp_path, RECORDS[:1]) as opened, serving(opened, prompts.append) as links:
        browser = Browser(links[0])
        assert "Enter your own prompt" in browser.text
        browser.post("/prompt", prompt="One\r\ntwo & three")
    assert prompts == ["One\ntwo & three"]


def test_a_port_in_use_is_named():
    with listen(0) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port}: .*choose another port, or 0 for a free one"):
            listen(port)
