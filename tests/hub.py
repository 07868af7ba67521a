"""A stand-in for the part of the Hugging Face hub's API that an upload uses, on the loopback interface."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "s" * 34


@dataclass
class Repo:
    """What one repository holds."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0
    large: set[str] = field(default_factory=set)


@dataclass
class Hub:
    """What the stand-in holds, and how it is to fail.

    Attributes:
        uploaded: large files by their SHA-256, which it checks.
        fail: the beginning of a request, such as ``"POST /api/repos/create"`` → the status of its answer;
            0 closes the connection instead.
        seen: every request, by its method and path.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    uploaded: dict[str, bytes] = field(default_factory=dict)
    fail: dict[str, int] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    url: str = ""


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, status: int, content: Any = None) -> None:
            data = json.dumps({} if content is None else content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def handle_any(self) -> None:
            path = self.path.partition("?")[0]
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = f"{self.command} {path}"
            hub.seen.append(request)
            status = next((s for start, s in hub.fail.items() if request.startswith(start)), None)
            if status == 0:
                self.close_connection = True
                return
            if status is not None:
                self.answer(status, {"error": "fails on request"})
            elif path.startswith("/large/"):
                self.large(path.removeprefix("/large/"), body)
            elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.answer(401, {"error": "Invalid username or password."})
            else:
                self.api(request, body)

        do_GET = do_POST = do_PUT = do_DELETE = handle_any

        def large(self, oid: str, body: bytes) -> None:
            right = hashlib.sha256(body).hexdigest() == oid
            if right:
                hub.uploaded[oid] = body
            self.answer(200 if right else 400)

        def api(self, request: str, body: bytes) -> None:
            if request == "POST /api/repos/create":
                return self.create(json.loads(body))
            if request == "POST /api/validate-yaml":
                return self.answer(200, {"errors": [], "warnings": []})
            if found := re.fullmatch(r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch", request):
                return self.batch(json.loads(body))
            found = re.fullmatch(r"\w+ /api/models/([^/]+/[^/]+)(?:/(\w+)(?:/main)?)?", request)
            repo = hub.repos.get(found[1]) if found else None
            if found is None or repo is None:
                return self.answer(404, {"error": "Repository not found"})
            content = {
                None: lambda: {"id": found[1], "private": repo.private, "sha": "0" * 40, "siblings": []},
                "preupload": lambda: self.modes(json.loads(body)),
                "tree": lambda: [
                    {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                    for name, data in repo.files.items()
                ],
                "commit": lambda: self.commit(found[1], repo, body),
            }
            content["revision"] = content[None]
            return self.answer(200, content[found[2]]())

        def create(self, asked: dict[str, Any]) -> None:
            name = f"{asked['organization']}/{asked['name']}"
            if name in hub.repos:
                return self.answer(409, {"error": "You already created this model repo"})
            private = asked.get("visibility") == "private" or asked.get("private") is True
            hub.repos[name] = Repo(private)
            return self.answer(200, {"url": f"{hub.url}/{name}"})

        def modes(self, asked: dict[str, Any]) -> Any:
            def mode(name: str) -> str:
                return "lfs" if name.endswith(".safetensors") else "regular"

            names = [file["path"] for file in asked["files"]]
            return {"files": [{"path": n, "uploadMode": mode(n), "shouldIgnore": False} for n in names]}

        def batch(self, asked: dict[str, Any]) -> None:
            objects = [
                {**each, "actions": {"upload": {"href": f"{hub.url}/large/{each['oid']}"}}}
                for each in asked["objects"]
            ]
            self.answer(200, {"transfer": "basic", "objects": objects})

        def commit(self, name: str, repo: Repo, body: bytes) -> Any:
            for line in body.decode().splitlines():
                operation = json.loads(line)
                value = operation["value"]
                if operation["key"] == "file":
                    repo.files[value["path"]] = base64.b64decode(value["content"])
                elif operation["key"] == "lfsFile":
                    repo.files[value["path"]] = hub.uploaded[value["oid"]]
                    repo.large.add(value["path"])
                elif operation["key"] == "deletedFile":
                    del repo.files[value["path"]]
            repo.commits += 1
            oid = f"{repo.commits:040x}"
            return {"commitOid": oid, "commitUrl": f"{hub.url}/{name}/commit/{oid}", "success": True}

    return Handler


@contextmanager
def stand_in() -> Iterator[Hub]:
    """A hub of its own for the block."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
