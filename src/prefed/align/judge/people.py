"""What people chose with ``prefed collect``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefed.align.judge.questions import JudgeError, Question, Verdict
from prefed.config.align import JudgeOptions
from prefed.core import files
from prefed.data.record import plain_prompt
from prefed.store import client_file


class WaitingError(JudgeError):
    """A person has not judged yet."""


def files_of(folder: str, name: str) -> tuple[Path, Path]:
    """Return the files with what a person chose, and with what it is asked."""
    place, name = Path(folder).expanduser(), client_file(name)
    return place / f"{name}.jsonl", place / f"{name}.questions.jsonl"


class PeopleJudge:
    """Looks up what the person who is named by ``taste`` chose; other pairs have no verdict.

    Choices are in ``FOLDER/NAME.jsonl``. Without any among the pairs that it is asked about, it writes these
    to ``FOLDER/NAME.questions.jsonl``.

    Args:
        folder: of questions and choices.
    """

    def __init__(self, folder: str, options: JudgeOptions) -> None:
        self._name = options.taste
        self._choices, self._questions = files_of(folder, options.taste)
        self.identity: Mapping[str, Any] = {"people": folder, "name": options.taste}

    def compare(self, questions: Iterable[Question]) -> Iterator[Verdict]:
        """Yield a verdict for every question, in order.

        Raises:
            WaitingError: the person chose from none of the pairs.
            JudgeError: a row of the choices is damaged.
        """
        asked, chosen = list(questions), self._read()
        if asked and not any(_pair(each) in chosen for each in asked):
            self._ask(asked)
        for each in asked:
            text = chosen.get(_pair(each))
            if text is None:
                yield Verdict(None, f"{self._name} chose neither")
            else:
                yield Verdict(float(text == each.first), text)

    def _read(self) -> dict[Any, str]:
        """Pair → the chosen response."""
        chosen = {}
        if self._choices.exists():
            for number, line in enumerate(files.read_lines(self._choices), 1):
                try:
                    row = json.loads(line)
                    chosen[_key(row["prompt"], row["chosen"], row["rejected"])] = str(row["chosen"])
                except (ValueError, KeyError, TypeError) as error:
                    raise JudgeError(
                        f"{self._choices}, line {number} is no choice ({error}); restore the file"
                    ) from error
        return chosen

    def _ask(self, asked: Sequence[Question]) -> None:
        rows = {
            _pair(each): {"prompt": plain_prompt(each.prompt), "chosen": each.first, "rejected": each.second}
            for each in reversed(asked)
        }
        self._questions.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in reversed(rows.values()))
        files.write(self._questions, text.encode(), mode=0o600)
        words = ("prefed", "collect", "--from", str(self._questions), "--client", self._name)
        command = shlex.join([*words, "--out", str(self._choices)])
        raise WaitingError(f"{self._name!r} has not judged {len(rows)} pairs: {command}")


def _pair(question: Question) -> Any:
    return _key(plain_prompt(question.prompt), question.first, question.second)


def _key(prompt: Any, first: str, second: str) -> Any:
    return json.dumps(prompt, sort_keys=True), frozenset((first, second))
