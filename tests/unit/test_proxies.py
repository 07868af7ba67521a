"""Which servers are asked through a proxy of the environment; with a proxy of this machine that notes it."""

import json
import os
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from endpoint import answer, serving
from prefed.align.judge import Question
from prefed.align.judge.endpoint import EndpointJudge
from prefed.config.align import AlignConfig, JudgeOptions
from prefed.core.proxies import direct_here, proxies, through
from prefed.runs.align import what_is_sent
from prefed.runs.machine_requirements import environment
from waiting import WATCHDOG

NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture
def set_proxies(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)

    def set_them(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_them


@contextmanager
def proxy():
    """A proxy that answers each request itself: its URL, and the URLs that it was asked for."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            _, headers, body = answer("B")
            self.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()


def judged(url):
    options = JudgeOptions(url=url, template="plain", parallel=1, timeout=WATCHDOG)
    (verdict,) = EndpointJudge("m", options).compare([Question("A colour?", "one", "two")])
    return verdict.preference


@pytest.mark.parametrize("name", ["HTTP_PROXY", "all_proxy"])
def test_private_text_for_this_machine_goes_to_no_proxy(set_proxies, name):
    """The server chooses A, and the proxy B. The control: another machine's server is asked through it."""
    pytest.importorskip("openai")
    with serving(lambda text, number: answer("A")) as server, proxy() as (url, seen):
        set_proxies(**{name: url})
        port = server.url.partition("127.0.0.1")[2]
        assert [judged(f"http://{host}{port}") for host in ("127.0.0.1", "localhost")] == [1.0, 1.0]
        assert (len(server.requests), seen) == (2, [])
        assert judged("http://judge.example.org/v1") == 0.0
        assert seen == ["http://judge.example.org/v1/chat/completions"]


def test_other_libraries_get_no_proxy(set_proxies, monkeypatch):
    """What the environment lists already stays, and without a proxy nothing is set."""
    assert direct_here() == {}
    with serving(lambda text, number: answer("A")) as server, proxy() as (url, seen):
        set_proxies(HTTP_PROXY=url, NO_PROXY="10.0.0.7")
        content = json.dumps({"prompt": ""}).encode()
        urllib.request.urlopen(f"{server.url}/x", content).read()
        assert len(seen) == 1
        for name, value in direct_here().items():
            monkeypatch.setenv(name, value)
        urllib.request.urlopen(f"{server.url}/x", content).read()
        assert (len(seen), len(server.requests)) == (1, 1)
    assert os.environ["NO_PROXY"].split(",") == ["10.0.0.7", "localhost", "127.0.0.0/8", "127.0.0.1", "::1"]


def test_doctor_prints_proxies_without_passwords(set_proxies, tmp_path):
    def printed():
        (found,) = (each.text for each in environment(tmp_path) if each.what == "proxy")
        return found

    assert printed() == "none"
    set_proxies(HTTPS_PROXY="http://ada:secret@proxy.example.org:3128", NO_PROXY="far.example.org")
    assert proxies() == {"https": "http://proxy.example.org:3128"}
    assert printed() == (
        "https: http://proxy.example.org:3128; asked directly: this machine, and NO_PROXY = far.example.org"
    )
    assert through("https://api.openai.com/v1") == "http://proxy.example.org:3128"
    for url in ("http://api.openai.com", "https://far.example.org", "https://127.0.0.9:80", "https://[::1]"):
        assert through(url) == "", url
    judge = {"url": "https://api.openai.com/v1"}
    config = AlignConfig.model_validate({"prompts": "p", "judge": judge, "labels": "judge:endpoint:m"})
    (sent,) = what_is_sent(config)
    assert f"{judge['url']}, through the proxy http://proxy.example.org:3128, which judges them" in sent
