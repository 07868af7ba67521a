"""Servers that are compatible with OpenAI's API: a client for them, and a judge that asks one."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from prefed.align.judge.questions import JudgeError, Question, Verdict, get_template
from prefed.config.align import OPENAI_KEY, URL, EndpointConfig, JudgeOptions
from prefed.core.proxies import is_here
from prefed.core.text import printable
from prefed.data import Prompt, Template
from prefed.train.generation import Sampling

RETRIES = 6
"""Retries after a time-out, a broken connection, or status 408, 409, 429 or 5xx."""

_REASON = 400
"""Most characters of a server's message to print."""
_ANSWER = 100_000
"""Most characters of an answer to keep, since a server may ignore the token limit."""
_BODY = 8 * 2**20
"""Maximum number of bytes of an answer."""
_HEADERS = frozenset({"accept", "accept-encoding", "connection", "content-length", "content-type", "host"})
"""Headers of a request to a server that is not OpenAI's, besides the key and the name of the client."""
_T = TypeVar("_T")
_U = TypeVar("_U")


class NoAnswerError(ValueError):
    """The server rejected one request (400, 413, 422), or its answer is malformed."""


class Answer(NamedTuple):
    """The text of an answer, and whether the model ended it; ``False`` if it was cut at ``max_tokens``."""

    text: str
    ended: bool


class Endpoint:
    """A client of a server that is compatible with OpenAI's API.

    The ``openai`` package repeats requests after time-outs, too many requests (429) and server errors, and
    respects ``Retry-After`` up to two minutes.

    The key is only sent to the server; ``OPENAI_API_KEY`` only if that is OpenAI's, or on this machine.

    Args:
        model: the name of the model at the endpoint.
        config: URL, key, time-out and number of concurrent requests.
        setting: the setting that names the endpoint, for messages.
        prefix: start of the names of the other settings, for messages.
        url_setting: the setting with the URL, for messages; defaults to ``url`` after ``prefix``.

    Raises:
        JudgeError: the package ``openai`` is missing, the key for OpenAI's endpoint is missing, or the key
            cannot be sent in a header.
    """

    def __init__(
        self,
        model: str,
        config: EndpointConfig | JudgeOptions,
        *,
        setting: str,
        prefix: str,
        url_setting: str = "",
    ) -> None:
        url, key_variable, timeout = config.url, config.key_variable, config.timeout
        self._prefix, self._url_setting = prefix, url_setting or f"{prefix}url"
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise JudgeError(
                f"{self._url_setting} must be http:// or https:// with a host, and no user name or "
                f"password; set the key in the environment variable {key_variable}"
            )
        try:
            from openai import DefaultHttpxClient, OpenAI
        except ModuleNotFoundError as error:
            raise JudgeError(f"{setting} needs the package openai: pip install 'prefed[judge]'") from error
        # A user who names another server, or runs another's file, may have this key in the environment.
        keyless = key_variable == OPENAI_KEY and not openai_or_here(url)
        key = "" if keyless else os.environ.get(key_variable, "").strip()
        self._key_hint = "check the key in " + (
            f"another variable: {OPENAI_KEY} is only sent to OpenAI and to servers on this machine"
            if keyless
            else key_variable
        )
        if not key and url == URL:
            raise JudgeError(f"{setting}: no key for {URL}; set the environment variable {key_variable}")
        if not (key.isascii() and key.isprintable()):
            # A header cannot contain it, and the library's error message would quote it.
            raise JudgeError(
                f"{setting}: the environment variable {key_variable} contains a line break, a control "
                "character or a non-ASCII letter; copy the key again"
            )
        self._model, self._url, self._key = model, url, key
        self._parallel, self._timeout = config.parallel, timeout
        self._other_names: dict[str, str | None] = {}
        # A redirected request would carry prompts to a server that the user did not name.
        hooks: dict[str, list[Callable[..., Any]]] = {"response": [self._read]}
        if not _is_openai(parts.scheme, parts.hostname):
            hooks["request"] = [self._forget_openai]
        # httpx would send what is for this machine to the proxy of the environment, too.
        direct = {"http://": None, "https://": None} if is_here(parts.hostname) else None
        http = DefaultHttpxClient(event_hooks=hooks, follow_redirects=False, mounts=direct)
        # The package requires a key. A compressed answer could be of any size.
        self._client = OpenAI(
            api_key=key or "none",
            base_url=url,
            timeout=timeout,
            max_retries=RETRIES,
            default_headers={"Accept-Encoding": "identity"},
            http_client=http,
        )

    def _forget_openai(self, request: Any) -> None:
        """Remove what the library adds from OPENAI_ORG_ID, _PROJECT_ID and _CUSTOM_HEADERS."""
        for name in set(request.headers) - _HEADERS:
            del request.headers[name]
        request.headers.update({"Authorization": f"Bearer {self._key or 'none'}", "User-Agent": "prefed"})

    def _read(self, response: Any) -> None:
        """Read an answer with limits on its size and total time, which the library does not have."""
        end, content = time.monotonic() + self._timeout, bytearray()
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ValueError("the answer is compressed, although none was asked for")
        for chunk in response.stream:
            content += chunk
            if len(content) > _BODY:
                raise ValueError(f"the answer has more than {_BODY >> 20} MiB")
            if time.monotonic() > end:
                raise ValueError(f"the answer was not complete after {self._timeout:g} s")
        response.stream.close()
        response.stream = type(response)(200, content=bytes(content)).stream

    def map(self, ask: Callable[[_T], _U], items: Iterable[_T]) -> Iterator[_U]:
        """Yield ``ask`` of every item, in order, with at most ``parallel`` concurrent requests."""
        under_way: deque[Future[_U]] = deque()
        with ThreadPoolExecutor(self._parallel) as pool:
            try:
                for item in items:
                    under_way.append(pool.submit(ask, item))
                    if len(under_way) == self._parallel:
                        yield under_way.popleft().result()
                while under_way:
                    yield under_way.popleft().result()
            finally:
                for future in under_way:
                    future.cancel()

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        options: Mapping[str, Any],
        droppable: Mapping[str, str | None],
    ) -> Answer:
        """Answer a conversation.

        Args:
            options: of the request.
            droppable: options that the server may reject, and other names for them; ``None`` for none.

        Raises:
            NoAnswerError: the server rejects this request, or its answer is malformed.
            JudgeError: the server cannot be used.
        """
        create = self._client.chat.completions.create
        answer = self._request(create, {"messages": messages}, options, droppable)
        return self._text(answer, lambda choice: choice.message.content, "a chat completion")

    def complete(self, text: str, options: Mapping[str, Any], droppable: Mapping[str, str | None]) -> Answer:
        """Continue a text; see :meth:`chat`."""
        answer = self._request(self._client.completions.create, {"prompt": text}, options, droppable)
        return self._text(answer, lambda choice: choice.text, "a completion")

    def respond(self, prompt: Prompt, template: Template, how: Sampling, seed: int) -> Answer:
        """Respond to a prompt: a conversation in a chat if there is a chat template, else as a text.

        Raises:
            NoAnswerError, JudgeError: as :meth:`chat`.
        """
        options: dict[str, Any] = {
            **how.model_dump(include={"max_tokens", "temperature", "top_p"}),
            **({"extra_body": {"top_k": how.top_k}} if how.top_k else {}),
            "seed": seed % 2**31,
        }
        # Not every server takes seeds. Another temperature would be another policy's.
        others = {"seed": None}
        if template.chat and not isinstance(prompt := template.formed(prompt), str):
            messages = [vars(message) for message in prompt]
            return self.chat(messages, options, {**others, "max_tokens": "max_completion_tokens"})
        return self.complete(template.prompt(prompt), options, others)

    def load_adapter(self, folder: Path) -> None:
        """Make a vLLM server read the adapter in a folder, under the name of the model.

        Raises:
            JudgeError: the server cannot be used or loads no adapters.
        """
        import openai

        name = {"lora_name": self._model}
        # Another alignment may have loaded another adapter under this name. The next request
        # raises all other failures again.
        with suppress(openai.OpenAIError):
            self._client.post("/unload_lora_adapter", body=name, cast_to=str)
        body = {**name, "lora_path": str(folder.absolute())}
        try:
            self._calling(self._client.post, "/load_lora_adapter", body=body, cast_to=str)
        except NoAnswerError as error:
            raise JudgeError(f"{self._url} did not load the adapter {folder}: {error}") from None

    def _calling(self, call: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        import openai

        try:
            return call(*args, **fields)
        except openai.APIStatusError as error:
            if error.status_code in (400, 413, 422):
                raise NoAnswerError(self.safe(f"refused: {error}")) from error
            raise JudgeError(self._failure(error)) from None
        except openai.APITimeoutError:
            raise JudgeError(
                f"{self._url} did not answer within {self._timeout:g} s in {RETRIES + 1} attempts; run the "
                f"command again to continue, or raise {self._prefix}timeout"
            ) from None
        except openai.APIConnectionError as error:
            reason = error.__cause__ or error
            raise JudgeError(
                self.safe(
                    f"{self._url} cannot be reached ({reason}); check {self._url_setting}, and try again"
                )
            ) from None
        except (openai.OpenAIError, ValueError, RecursionError) as error:
            raise NoAnswerError(self.safe(f"malformed answer: {error}")) from None

    def _request(
        self,
        create: Callable[..., Any],
        content: Mapping[str, Any],
        options: Mapping[str, Any],
        droppable: Mapping[str, str | None],
    ) -> Any:
        import openai

        names = {name: self._other_names.get(name, name) for name in options}
        fields = {other: options[name] for name, other in names.items() if other is not None}
        try:
            return self._calling(create, model=self._model, **content, **fields)
        except NoAnswerError as error:
            cause = error.__cause__
            param = cause.param if isinstance(cause, openai.BadRequestError) else None
            # Not whether its other name is known: a request sent at the same time may have found it.
            if not isinstance(param, str) or param not in droppable or param not in fields:
                raise
            self._other_names[param] = droppable[param]
        return self._request(create, content, options, droppable)

    def _text(self, answer: Any, read: Callable[[Any], Any], what: str) -> Answer:
        try:
            choice = answer.choices[0]
            text, ended = read(choice), choice.finish_reason != "length"
        except (AttributeError, LookupError, TypeError):
            raise NoAnswerError(self.safe(f"malformed answer, not {what}: {answer}")) from None
        if not isinstance(text, str):
            raise NoAnswerError("malformed answer: no text")
        if len(text) > _ANSWER:
            raise NoAnswerError(self.safe(f"malformed answer of {len(text):,} characters: {text[:_REASON]}"))
        return Answer(self.without_key(text), ended)

    def _failure(self, error: Any) -> str:
        prefix = self._prefix
        hint = {
            401: self._key_hint,
            403: self._key_hint,
            404: f"check {self._url_setting} and the name of the model",
            429: f"too many requests: wait, or lower {prefix}parallel",
        }.get(error.status_code, "try again later")
        if 300 <= error.status_code < 400:
            hint = f"it redirects to {error.response.headers.get('location')}: correct {self._url_setting}"
        # The text of the error itself quotes the whole body in some versions of openai.
        said = error.body.get("message", error) if isinstance(error.body, dict) else error
        why = self.safe(f"{self._url} returned status {error.status_code}: {said}")
        return f"{why}; {self.safe(hint)}; then run the command again to continue"

    def safe(self, text: str) -> str:
        """Shorten a message to one line, without the key, which a server may repeat."""
        line = printable(self.without_key(" ".join(text.split())))
        return line if len(line) <= _REASON else f"{line[:_REASON]} …"

    def without_key(self, text: str) -> str:
        """Remove the key from a text."""
        return text.replace(self._key, "(the key)") if self._key else text


def openai_or_here(url: str) -> bool:
    """Whether a server is OpenAI's or on this machine.

    >>> [openai_or_here(f"https://api.openai.com{end}/v1") for end in ("", ".evil.org")]
    [True, False]
    >>> [openai_or_here(f"http://{host}/v1") for host in ("localhost", "[::1]:80", "127.0.0.1.evil.org")]
    [True, True, False]
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    return is_here(host) or _is_openai(parts.scheme, host)


def _is_openai(scheme: str, host: str) -> bool:
    return scheme == "https" and (host == "openai.com" or host.endswith(".openai.com"))


class EndpointJudge:
    """A language model at an :class:`Endpoint` that answers a template greedily.

    An answer that cannot be parsed, or a question that the server rejects (400, 413, 422: too long, against
    its rules), gives a verdict without a preference. All other failures end the judging.

    Args:
        model: the name of the model at the endpoint.

    Raises:
        JudgeError: as :class:`Endpoint`.
    """

    def __init__(self, model: str, options: JudgeOptions) -> None:
        self._template = get_template(options.template, options.prefix)
        self._endpoint = Endpoint(model, options, setting="the judge at an endpoint", prefix=options.prefix)
        self.identity: Mapping[str, Any] = {
            "model": model,
            "url": options.url,
            "template": options.template,
            "judge_tokens": options.judge_tokens,
        }
        self._options: Mapping[str, Any] = {"max_tokens": options.judge_tokens, "temperature": 0.0}

    def compare(self, questions: Iterable[Question]) -> Iterator[Verdict]:
        """Yield a verdict for every question, in order, with at most ``parallel`` concurrent requests.

        Raises:
            JudgeError: the endpoint does not answer, or rejects the key or the model.
        """
        return self._endpoint.map(self._ask, questions)

    def _ask(self, question: Question) -> Verdict:
        messages = [{"role": "user", "content": self._template.render(question)}]
        # Newer OpenAI models use another name for max_tokens, and have a fixed temperature.
        others = {"max_tokens": "max_completion_tokens", "temperature": None}
        try:
            return self._template.verdict(self._endpoint.chat(messages, self._options, others).text)
        except NoAnswerError as error:
            return Verdict(None, str(error))
