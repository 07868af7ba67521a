"""Local web server of ``prefed collect``, accessible only through a secret link."""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Any, cast, get_args
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from prefed.ui.collect import page
from prefed.ui.collect.pairs import CollectError
from prefed.ui.collect.session import STRENGTHS, Answer, Session

HOST = "127.0.0.1"
_LONGEST = 100_000
"""Maximum size of a form in bytes."""
_DIGITS = 20
"""Maximum number of digits of a question's 64-bit number."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # With "no-referrer", browsers would also hide the origin of forms.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class Page:
    """The web application.

    Opening a link sets a cookie and invalidates the link. Other requests need the cookie, and forms must
    come from the same origin.

    Args:
        add: adds a typed prompt; ``None`` without a model.
        link: called with the secret of each new link.
        finish: called when the annotator finishes.
    """

    def __init__(
        self,
        session: Session,
        *,
        add: Callable[[str], None] | None,
        link: Callable[[str], None],
        finish: Callable[[], None],
    ) -> None:
        self._session, self._add, self._link, self._finish = session, add, link, finish
        self._cookie, self._secret = secrets.token_urlsafe(32), ""
        self._new_link()
        forms = {
            "/name": self._name,
            "/choose": self._choose,
            "/undo": self._undo,
            "/prompt": self._prompt,
            "/finish": self._done,
        }
        routes = [Route("/", self._show), Route("/state", self._state)]
        routes += [Route(path, self._form(action), methods=["POST"]) for path, action in forms.items()]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
        self.app = Starlette(routes=routes, middleware=[hosts])

    def _new_link(self) -> None:
        self._secret = secrets.token_urlsafe(24)
        self._link(self._secret)

    async def _show(self, request: Request) -> Response:
        given = request.query_params.get("token")
        if given is not None and hmac.compare_digest(given.encode(), self._secret.encode()):
            self._new_link()
            answer = RedirectResponse("/", 303, _HEADERS)
            answer.set_cookie(self._name_of_cookie(request), self._cookie, httponly=True, samesite="strict")
            return answer
        if not self._known(request):
            return _html(page.render_refusal(), 403)
        return self._page(page.state_of(self._session))

    async def _state(self, request: Request) -> Response:
        if not self._known(request):
            return PlainTextResponse("no link", 403, _HEADERS)
        return PlainTextResponse(page.state_of(self._session), headers=_HEADERS)

    def _form(self, action: Callable[[Mapping[str, str]], Response | None]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            if not self._known(request) or not _same_origin(request):
                return _html(page.render_refusal(), 403)
            chunked = "transfer-encoding" in request.headers
            if chunked or int(request.headers.get("content-length") or _LONGEST) >= _LONGEST:
                return PlainTextResponse("too long", 413, _HEADERS)
            try:
                body = (await request.body()).decode(errors="replace")
            except ClientDisconnect:
                return PlainTextResponse("incomplete", 400, _HEADERS)
            fields = {name: values[-1] for name, values in parse_qs(body, keep_blank_values=True).items()}
            try:
                done = action(fields)
            except (CollectError, OSError) as error:
                return self._page(page.state_of(self._session), problem=str(error), status=400)
            return done or RedirectResponse("/", 303, _HEADERS)

        return answer

    def _name(self, fields: Mapping[str, str]) -> None:
        if self._session.client is None:
            self._session.name(fields.get("client", ""))

    def _choose(self, fields: Mapping[str, str]) -> None:
        number, answer, strength = (fields.get(name, "") for name in ("number", "answer", "strength"))
        strengths: dict[str, int | None] = {"": None, **{str(level): level for level in STRENGTHS}}
        number = number if number.isdecimal() and len(number) <= _DIGITS else ""
        if not number or answer not in get_args(Answer) or strength not in strengths:
            raise CollectError("the form is incomplete; reload the page")
        self._session.choose(int(number), cast(Answer, answer), strengths[strength])

    def _undo(self, fields: Mapping[str, str]) -> None:
        # Ignore a form that is sent twice or from an outdated page.
        if fields.get("done") in (None, str(self._session.progress().done)):
            self._session.take_back()

    def _prompt(self, fields: Mapping[str, str]) -> None:
        if self._add is None or self._session.client is None:
            raise CollectError("prompts cannot be typed without a model; start prefed collect with --model")
        self._add(fields.get("prompt", "").replace("\r\n", "\n"))

    def _done(self, fields: Mapping[str, str]) -> Response:
        if self._session.client is None:
            raise CollectError("enter your name first")
        answer = self._page("finished")
        answer.background = BackgroundTask(self._finish)
        return answer

    def _page(self, state: str, problem: str | None = None, status: int = 200) -> Response:
        return _html(page.render(self._session, state, typed=self._add is not None, problem=problem), status)

    def _known(self, request: Request) -> bool:
        given = request.cookies.get(self._name_of_cookie(request), "")
        return hmac.compare_digest(given.encode(), self._cookie.encode())

    def _name_of_cookie(self, request: Request) -> str:
        # Cookies are shared by all ports of a host.
        return f"prefed-collect-{request.url.port}"


def _same_origin(request: Request) -> bool:
    """Whether a form comes from this page. A missing Origin header is accepted, as some clients send none."""
    origin = request.headers.get("origin")
    return origin is None or origin == f"http://{request.headers['host']}"


def _html(text: str, status: int) -> Response:
    return HTMLResponse(text, status, {**_HEADERS, "Content-Security-Policy": page.policy()})


def listen(port: int) -> socket.socket:
    """Open a listening socket on the loopback interface; port 0 picks a free one.

    Raises:
        CollectError: the port is not available.
    """
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        # Connections before the server starts wait in the backlog.
        listening.listen()
    except OSError as error:
        listening.close()
        raise CollectError(
            f"--port {port}: {error.strerror}; choose another port, or 0 for a free one"
        ) from error
    return listening


def serve(
    session: Session,
    listening: socket.socket,
    *,
    add: Callable[[str], None] | None,
    report: Callable[[str], None],
) -> None:
    """Serve the page until the annotator finishes or the process is stopped.

    Args:
        add: see :class:`Page`.
        report: called with each link to the page.
    """
    port = listening.getsockname()[1]

    def link(secret: str) -> None:
        report(f"http://{HOST}:{port}/?token={secret}")

    def finish() -> None:
        server.should_exit = True

    page_of = Page(session, add=add, link=link, finish=finish)
    config = uvicorn.Config(
        page_of.app,
        # Requests are parsed alike with and without the optional httptools.
        http="h11",
        lifespan="off",
        # uvicorn's own configuration of logging would close every handler of the process.
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    server.run(sockets=[listening])
