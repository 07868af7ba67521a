"""Generation of responses in a background thread, ahead of the annotator."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Protocol

from prefed.core import Key, files
from prefed.data import Prompt, Template
from prefed.data.encoding import continuation_text
from prefed.data.errors import RowError
from prefed.data.record import plain_prompt
from prefed.data.tokens import prompt_hash
from prefed.models import Backbone
from prefed.models.backbone import model_digest
from prefed.train.generation import Sampling, as_prompt, complete_batch, prompt_form
from prefed.ui.collect.pairs import CollectError, DrawnPairs
from prefed.ui.collect.session import Session

ATTEMPTS = 4
"""Number of times that two responses are sampled before a prompt is left out."""


class Responder(Protocol):
    """Generates responses to prompts.

    Attributes:
        identity: digest of everything the responses depend on.
    """

    identity: str

    def as_prompt(self, text: str) -> Prompt:
        """Convert typed text to the format of the other prompts."""

    def draw(self, prompt: Prompt) -> tuple[str, str] | str:
        """Two different responses, or the reason why there are none."""


class ModelResponder:
    """Generates responses with a language model.

    Args:
        key: random key; the responses to a prompt depend only on it and on the prompt.
        like: a prompt whose format typed prompts take, if any.
    """

    def __init__(
        self, backbone: Backbone, how: Sampling, key: Key, like: Prompt | None, *, raw: bool = False
    ) -> None:
        self._backbone, self._how, self._key, self._raw = backbone, how, key, raw
        self._template = Template(backbone.tokenizer)
        self._like = prompt_form(self._template) if like is None else like
        about = {"model": model_digest(backbone), "seed": key.path, **how.model_dump()}
        self.identity = files.digest(json.dumps([key.seed, about], sort_keys=True).encode())

    def as_prompt(self, text: str) -> Prompt:
        """Convert typed text to the format of the other prompts."""
        return as_prompt(text, self._like, raw=self._raw)

    def draw(self, prompt: Prompt) -> tuple[str, str] | str:
        """Two different non-blank responses, or the reason why there are none."""
        backbone, window = self._backbone, self._backbone.window
        try:
            ids = self._template.prompt_ids(prompt)
        except RowError as error:
            return str(error)
        if window is not None and len(ids) >= window:
            return f"the prompt has {len(ids)} tokens, but the model's context is {window}"
        key, different = self._key.at("prompt", prompt_hash(prompt)), dict[str, str]()
        for attempt in range(ATTEMPTS):
            keys = [key.at("sample", 2 * attempt + place) for place in (0, 1)]
            for each in complete_batch(backbone, backbone.reference, [ids, ids], self._how, keys):
                text = continuation_text(backbone.tokenizer, ids, each.tokens)
                if text.strip():
                    different.setdefault(text.strip(), text)
            if len(different) >= 2:
                first, second, *_ = different.values()
                return first, second
        return f"the model generated no two different responses in {2 * ATTEMPTS} samples"


class Drawing:
    """Background thread that keeps ``ahead`` unanswered questions ready.

    Args:
        report: called with a message for each prompt that is left out.
    """

    def __init__(
        self,
        session: Session,
        pairs: DrawnPairs,
        responder: Responder,
        *,
        ahead: int,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._session, self._pairs, self._responder = session, pairs, responder
        self._ahead, self._report, self._ended = ahead, report, False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="responses", daemon=True)

    def __enter__(self) -> Drawing:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        """Stop after the current prompt, and raise the thread's error, if any."""
        with self._session.changed:
            self._ended = True
            self._session.changed.notify_all()
        self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def add(self, text: str) -> None:
        """Add a typed prompt, to be asked next.

        Raises:
            CollectError: the text is blank, or the annotator already answered this prompt.
        """
        if not text.strip():
            raise CollectError("the prompt is blank; type some text")
        with self._session.changed:
            number = self._pairs.add(self._responder.as_prompt(text))
            if number in self._session.judged():
                raise CollectError("you have already answered this prompt; type another")
            self._session.changed.notify_all()

    def _run(self) -> None:
        changed = self._session.changed
        try:
            while (number := self._next()) is not None:
                drawn = self._responder.draw(self._pairs.prompt(number))
                with changed:
                    self._pairs.keep(number, drawn)
                    changed.notify_all()
                if isinstance(drawn, str):
                    prompt = json.dumps(plain_prompt(self._pairs.prompt(number)), ensure_ascii=False)
                    self._report(f"left out: {prompt[:200]}: {drawn}")
        except Exception as error:
            with changed:
                self._error = error
                self._session.failure = str(error) or type(error).__name__
                changed.notify_all()

    def _next(self) -> int | None:
        with self._session.changed:
            while not self._ended:
                number = self._pairs.missing(self._session.judged(), self._ahead)
                if number is not None:
                    return number
                self._session.changed.wait()
        return None
