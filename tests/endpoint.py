"""A server of completions for tests, on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], bytes | Iterator[bytes]]
"""Status, headers and body, which may come in pieces."""


def answer(text: str | None, finish: str = "stop") -> Reply:
    """A chat completion with this text."""
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}}
    body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()


def completion(text: str, finish: str = "stop") -> Reply:
    """A completion of a text."""
    choice = {"index": 0, "finish_reason": finish, "text": text}
    body = {"id": "1", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}
    return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()


def failure(status: int, message: str, headers: dict[str, str] | None = None, **error: Any) -> Reply:
    """An error as OpenAI's endpoint words it."""
    body = {"error": {"message": message, "type": "error", "param": None, "code": None, **error}}
    return status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(body).encode()


class Server:
    """Answers each request by a function of the question, text or path, and of its number.

    Attributes:
        requests: bodies and headers (lower case) of all requests, in the order of their arrival.
        paths: of the requests.
        url: of the endpoint.
    """

    def __init__(self, reply: Callable[[str, int], Reply]) -> None:
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.paths: list[str] = []
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.requests.append(
                        (body, {name.lower(): value for name, value in self.headers.items()})
                    )
                    outer.paths.append(self.path)
                    number = len(outer.requests)
                chat = body.get("messages", [{"content": body.get("prompt", self.path)}])
                status, headers, data = reply(chat[-1]["content"], number)
                try:
                    self.send_response(status)
                    whole = {"Content-Length": str(len(data))} if isinstance(data, bytes) else {}
                    for name, value in {**headers, **whole}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    for piece in [data] if isinstance(data, bytes) else data:
                        self.wfile.write(piece)
                except OSError:
                    pass  # The client has stopped waiting.

            def log_message(self, *words: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def serving(reply: Callable[[str, int], Reply]) -> Iterator[Server]:
    """A server that runs as long as the block."""
    server = Server(reply)
    server.start()
    try:
        yield server
    finally:
        server.stop()
