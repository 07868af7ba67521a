"""A judge behind any endpoint that speaks OpenAI's chat completions."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from prefed.align.judge.questions import URL, JudgeError, JudgeOptions, Question, Verdict, get_template

RETRIES = 6
"""Further attempts at a question after a time-out, a broken connection, 408, 409, 429 or 5xx."""

_REASON = 400
"""Most characters of a server's message to repeat."""
_ANSWER = 100_000
"""Most characters of an answer to keep. A server need not respect the maximum number of tokens."""


class EndpointJudge:
    """A language model that answers a template, greedily, at an OpenAI-compatible endpoint.

    The ``openai`` package speaks to it: it repeats a request that timed out, was refused as too many (429) or
    failed on the server's side, and waits as long as ``Retry-After`` says, up to two minutes.

    An answer that cannot be read, and a question that the server refuses (400, 413, 422: too long, against
    its rules), is a verdict without a preference. Everything else that fails ends the judging.

    Args:
        model: the model's name at the endpoint.

    Raises:
        JudgeError: the package ``openai`` is not there, OpenAI's own endpoint is asked without a key, or the
            key cannot be sent in a header.
    """

    def __init__(self, model: str, options: JudgeOptions) -> None:
        url, key_variable = options.url, options.key_variable
        self._template = get_template(options.template)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
            raise JudgeError(
                "--url is http:// or https:// and a host, without a name or password in it; a key comes from "
                f"the environment's {key_variable}"
            )
        try:
            from openai import OpenAI
        except ModuleNotFoundError as error:
            raise JudgeError(
                "--judge endpoint needs the package openai: pip install 'prefed[judge]'"
            ) from error
        key = os.environ.get(key_variable, "").strip()
        if not key and url == URL:
            raise JudgeError(f"--judge endpoint: put the key for {URL} into the environment's {key_variable}")
        if not (key.isascii() and key.isprintable()):
            # No header can hold it, and the error of the library that sends the header would quote it.
            raise JudgeError(
                f"--judge endpoint: what the environment's {key_variable} holds is no key: it has a line "
                "break, a control character or a letter that is not ASCII; copy the key again"
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
        # The package demands some key; without one the header says "none".
        self._client = OpenAI(
            api_key=key or "none", base_url=url, timeout=options.timeout, max_retries=RETRIES
        )

    def compare(self, questions: Iterable[Question]) -> Iterator[Verdict]:
        """A verdict for every question, in their order; at most ``parallel`` at once.

        Raises:
            JudgeError: (while iterating) the endpoint does not answer, or refuses the key or the model.
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
                f"{self._url} gave no answer within {self._timeout:g} s, {RETRIES + 1} times; run the "
                "command again to continue where it stopped (--timeout waits longer)"
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
            return Verdict(None, self._safe(f"malformed answer, no chat completion: {answer}"))
        if not isinstance(text, str):
            return Verdict(None, "malformed answer: it holds no text")
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
            # Newer models of OpenAI name the first otherwise, and have one temperature.
            others = {name: value for name, value in options.items() if name != error.param}
            if error.param == "max_tokens":
                others["max_completion_tokens"] = options["max_tokens"]
            self._options = others
        return self._request(text)

    def _failure(self, error: Any) -> str:
        """The message where the endpoint refuses to answer at all."""
        hint = {
            401: "check the key",
            403: "check the key",
            404: "check --url and the model's name",
            429: "it has had too many requests: wait, or ask fewer at a time (--parallel)",
        }.get(error.status_code, "try again later")
        why = self._safe(f"{self._url} answers {error.status_code}: {error}")
        return f"{why}; {hint}; run the command again to continue where it stopped"

    def _safe(self, text: str) -> str:
        """A library's or a server's text on one line, cut, and without the key, which a server may repeat."""
        line = self._without_key(" ".join(text.split()))
        return line if len(line) <= _REASON else f"{line[:_REASON]} …"

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "(the key)") if self._key else text
