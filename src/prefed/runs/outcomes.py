"""What was made of a finished run, as files tell: win rates with their verdicts, and an alignment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefed.runs.record import RunError
from prefed.runs.schema import Label, Verdict, read_alignment, read_judged, read_rows

EXAMPLES = 4
"""Prompts that are shown of a comparison or an alignment."""


@dataclass(frozen=True)
class Example:
    """Two responses to a prompt.

    Attributes:
        first: the model's response; of a label the chosen one.
        second: the other response.
        outcome: in words.
    """

    prompt: str
    first: str
    second: str
    outcome: str


@dataclass(frozen=True)
class Outcome:
    """A comparison by a judge, or an alignment.

    Attributes:
        summary: what its ``summary.json`` holds.
        examples: of its first prompts, whatever came of them.
    """

    summary: Mapping[str, Any]
    examples: tuple[Example, ...]


def judged_of(run: Path) -> list[Outcome]:
    """The finished comparisons under ``RUN/judge``, by name.

    For whoever may not read that folder there are none.

    Raises:
        RunError: a file is damaged.
    """
    try:
        return [
            Outcome(read_judged(path), _verdicts(path.with_name("verdicts.jsonl")))
            for path in sorted((run / "judge").glob("*/summary.json"))
            if os.access(path, os.R_OK)
        ]
    except ValueError as error:
        raise RunError(str(error)) from error


def alignment_of(run: Path) -> Outcome | None:
    """The finished alignment under ``RUN/align``; ``None`` where there is none.

    Raises:
        RunError: a file is damaged.
    """
    path = run / "align" / "summary.json"
    if not path.exists():
        return None
    try:
        return Outcome(read_alignment(path), _labels(path.with_name("labels.jsonl")))
    except ValueError as error:
        raise RunError(str(error)) from error


def _verdicts(path: Path) -> tuple[Example, ...]:
    first: dict[int, Verdict] = {}
    for row in read_rows(path, Verdict):
        # The rows stand in the order in which they were judged, and the last one of a prompt counts.
        first[row.row] = row
        if len(first) > EXAMPLES:
            del first[max(first)]
    rows = (first[number] for number in sorted(first))
    return tuple(Example(_text(row.prompt), row.text, row.against, row.result) for row in rows)


def _labels(path: Path) -> tuple[Example, ...]:
    first: dict[int, Label] = {}
    for row in read_rows(path, Label):
        first.setdefault(row.index, row)
        if len(first) == EXAMPLES:
            break
    return tuple(
        Example(_text(row.prompt), row.chosen, row.rejected, f"{row.votes[0]} to {row.votes[1]} votes")
        for row in first.values()
    )


def _text(prompt: str | list[dict[str, str]]) -> str:
    """A prompt as people read it; the turns of a conversation below one another."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{turn.get('role', '')}: {turn.get('content', '')}" for turn in prompt)
