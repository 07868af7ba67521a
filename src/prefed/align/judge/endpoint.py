"""A judge at an endpoint that is compatible with OpenAI's chat completions."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from prefed.align.judge.questions import URL, JudgeError, JudgeOptions, Question, Verdict, get_template

RETRIES = 6
"""Retries after a time-out, a broken connection, or status 408, 409, 429 or 5xx."""

_REASON = 400
"""Most characters of a server's message to print."""
_ANSWER = 100_000
"""Most characters of an answer to keep, since a server may ignore the token limit."""


class EndpointJudge:
    """A language model at an OpenAI-compatible endpoint that answers a template greedily.

    The ``openai`` package repeats requests after time-outs, too many requests (429) and server errors, and
    respects ``Retry-After`` up to two minutes.

    An answer that cannot be parsed, or a question that the server rejects (400, 413, 422: too long, against
    its rules), gives a verdict without a preference. All other failures end the judging.

    Args:
        model: the name of the model at the endpoint.

    Raises:
        JudgeError: the package ``openai`` is missing, the key for OpenAI's endpoint is missing, or the key
            cannot be sent in a header.
    """

    def __init__(self, model: str, options: JudgeOptions) -> None:
        url, key_variable = options.url, options.key_variable
        self._template = get_template(options.template)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
            raise JudgeError(
                "--url must be http:// or https:// with a host, and no user name or password; set the key in "
                f"the environment variable {key_variable}"
            )
        try:
            from openai import OpenAI
        except ModuleNotFoundError as error:
            raise JudgeError(
                "--judge endpoint needs the package openai: pip install 'prefed[judge]'"
            ) from error
        key = os.environ.get(key_variable, "").strip()
        if not key and url == URL:
            raise JudgeError(
                f"--judge endpoint: no key for {URL}; set the environment variable {key_variable}"
            )
        if not (key.isascii() and key.isprintable()):
            # A header cannot contain it, and the library's error message would quote it.
            raise JudgeError(
                f"--judge endpoint: the environment variable {key_variable} contains a line break, a control "
                "character or a non-ASCII letter; copy the key again"
            )
        self.identity: Mapping[str, Any] = {
            "model": model,
            "url": url,
            "template": options.template,
            "judge_tokens": options.judge_tokens,
        }
        self._model, self._url, self._key = model, url, key
        self._options: Mapping[str, Any] = {"max_tokens": options.judge_tokens, "temperature": 0.0}
        self._parallel, self._timeout = options.parallel, options.timeout
        # The package requires a key.
        self._client = OpenAI(
            api_key=key or "none", base_url=url, timeout=options.timeout, max_retries=RETRIES
        )

    def compare(self, questions: Iterable[Question]) -> Iterator[Verdict]:
        """Yield a verdict for every question, in order, with at most ``parallel`` concurrent requests.

        Raises:
            JudgeError: the endpoint does not answer, or rejects the key or the model.
        """
        under_way: deque[Future[Verdict]] = deque()
        with ThreadPoolExecutor(self._parallel) as pool:
            try:
                for question in questions:
                    under_way.append(pool.submit(self._ask, question))
                    if len(under_way) == self._parallel:
                        yield under_way.popleft().result()
                while under_way:
                    yield under_way.popleft().result()
            finally:
                for future in under_way:
                    future.cancel()

    def _ask(self, question: Question) -> Verdict:
        import openai

        try:
            answer = self._request(self._template.render(question))
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            return Verdict(None, self._safe(f"refused: {error}"))
        except openai.APIStatusError as error:
            if error.status_code == 413:
                return Verdict(None, self._safe(f"refused: {error}"))
            raise JudgeError(self._failure(error)) from None
        except openai.APITimeoutError:
            raise JudgeError(
                f"{self._url} did not answer within {self._timeout:g} s in {RETRIES + 1} attempts; run the "
                "command again to continue, or raise --timeout"
            ) from None
        except openai.APIConnectionError as error:
            reason = error.__cause__ or error
            raise JudgeError(
                self._safe(f"{self._url} cannot be reached ({reason}); check --url, and try again")
            ) from None
        except (openai.OpenAIError, ValueError) as error:
            return Verdict(None, self._safe(f"malformed answer: {error}"))
        try:
            text = answer.choices[0].message.content
        except (AttributeError, IndexError, TypeError):
            return Verdict(None, self._safe(f"malformed answer, not a chat completion: {answer}"))
        if not isinstance(text, str):
            return Verdict(None, "malformed answer: no text")
        if len(text) > _ANSWER:
            return Verdict(
                None, self._safe(f"malformed answer of {len(text):,} characters: {text[:_REASON]}")
            )
        verdict = self._template.verdict(text)
        return Verdict(verdict.preference, self._without_key(verdict.text))

    def _request(self, text: str) -> Any:
        import openai

        messages: Any = [{"role": "user", "content": text}]
        create: Any = self._client.chat.completions.create
        options = self._options
        try:
            return create(model=self._model, messages=messages, **options)
        except openai.BadRequestError as error:
            if error.param not in options:
                raise
            # Newer OpenAI models use another name for max_tokens, and have a fixed temperature.
            others = {name: value for name, value in options.items() if name != error.param}
            if error.param == "max_tokens":
                others["max_completion_tokens"] = options["max_tokens"]
            self._options = others
        return self._request(text)

    def _failure(self, error: Any) -> str:
        hint = {
            401: "check the key",
            403: "check the key",
            404: "check --url and the name of the model",
            429: "too many requests: wait, or lower --parallel",
        }.get(error.status_code, "try again later")
        why = self._safe(f"{self._url} returned status {error.status_code}: {error}")
        return f"{why}; {hint}; then run the command again to continue"

    def _safe(self, text: str) -> str:
        """Shorten a message to one line, without the key, which a server may repeat."""
        line = self._without_key(" ".join(text.split()))
        return line if len(line) <= _REASON else f"{line[:_REASON]} …"

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "(the key)") if self._key else text
