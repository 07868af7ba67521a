"""How the rows of known preference sets become pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from prefed.data.config import Columns
from prefed.data.errors import DataError, RowError
from prefed.data.sources.files import Row
from prefed.data.sources.pairs import Draft, common, extra, label, number, split_name, text, value

__all__ = ["FORMATS", "Format", "find", "recognize"]


@dataclass(frozen=True)
class Format:
    """How to read one kind of rows.

    Attributes:
        name: for ``data.format``.
        draft: a row → its pair, or ``None`` where the source says that neither response is better.
        hub: the hub name, which stands for the format too.
        subset: the configuration to load where none is given.
        folders: the hub set's subsets are folders.
        needs: columns that tell such rows from others; empty where they cannot be told.
    """

    name: str
    draft: Callable[[Row], Draft | None]
    hub: str | None = None
    subset: str | None = None
    folders: bool = False
    needs: frozenset[str] = frozenset()


def pairs(columns: Columns | None = None) -> Format:
    """Rows with chosen and rejected in columns of their own, as TRL expects them.

    Prompt, chosen and rejected are texts or lists of messages; without a prompt, chosen and rejected are
    whole dialogues. Without ``columns``, those named margin, client, category, domain and split are used
    where present.
    """

    def draft(row: Row) -> Draft:
        if columns is not None:
            return common(row, columns, columns.prompt)
        names = {n: n for n in ("margin", "client", "category", "domain", "split") if n in row}
        return common(row, Columns(**names), "prompt" if "prompt" in row else None)

    return Format("pairs", draft)


def _shp(row: Row) -> Draft:
    choice = value(row, "labels")
    if choice not in (0, 1):
        raise RowError(f"labels is {choice!r}, neither 1 (A is preferred) nor 0 (B is)")
    better, worse = ("A", "B") if choice == 1 else ("B", "A")
    ratio = number(row.get("score_ratio"), "score_ratio")
    if ratio is not None and ratio <= 0:
        raise RowError(f"score_ratio is {ratio}, not positive")
    domain = text(row, "domain")
    for split in ("_train", "_validation", "_test"):
        domain = domain.removesuffix(split)
    return Draft(
        _user(text(row, "history")),
        text(row, f"human_ref_{better}"),
        text(row, f"human_ref_{worse}"),
        margin=None if ratio is None else math.log(ratio),
        category=domain,
        extra=extra(row, ("history", "human_ref_A", "human_ref_B", "domain")),
    )


def _summaries(row: Row) -> Draft:
    choice, summaries, info = (value(row, name) for name in ("choice", "summaries", "info"))
    if not isinstance(summaries, list) or len(summaries) != 2 or choice not in (0, 1):
        raise RowError("a comparison has two summaries and a choice of 0 or 1")
    more = row.get("extra") or {}
    for name, item in (("info", info), ("extra", more)):
        if not isinstance(item, Mapping):
            raise RowError(f"{name} is not an object")
    better, worse = (" " + text(summaries[k], "text").lstrip() for k in (choice, 1 - choice))
    split = row.get("split")
    confidence = more.get("confidence")
    return Draft(
        _post(info),
        better,
        worse,
        client=label(row.get("worker"), "worker"),
        category=label(info.get("subreddit") or info.get("site"), "subreddit"),
        # "valid1" chose models while training and "valid2" was kept for the final figures.
        split=split_name({"valid1": "validation", "valid2": "test"}.get(str(split), split)),
        extra={
            **extra(row, ("split",)),
            **({} if info.get("id") is None else {"post_id": str(info["id"])}),
            **({} if confidence is None else {"confidence": int(confidence)}),
        },
    )


def _post(info: Mapping[str, Any]) -> str:
    """The prompt of the summarisation tasks: a Reddit post, or a news article."""
    if info.get("post"):
        head = [("SUBREDDIT", "r/" + str(info["subreddit"]))] if info.get("subreddit") else []
        head += [("TITLE", info["title"])] if info.get("title") else []
        return "\n\n".join(f"{name}: {item}" for name, item in [*head, ("POST", info["post"])]) + "\n\nTL;DR:"
    if info.get("article"):
        return f"{info['article']}\n\nTL;DR:"
    raise RowError("info has neither a post nor an article")


def _imdb(row: Row) -> Draft:
    rewards = [number(value(row, f"{which}_reward"), f"{which}_reward") for which in ("chosen", "rejected")]
    margin = None if None in rewards else rewards[0] - rewards[1]  # type: ignore[operator]
    return Draft(
        text(row, "prompt"),
        text(row, "chosen"),
        text(row, "rejected"),
        margin=margin,
        extra=extra(row, ("prompt", "chosen", "rejected")),
    )


def _code(row: Row) -> Draft:
    return Draft(
        _user(text(row, "question"), row.get("system")),
        text(row, "chosen"),
        text(row, "rejected"),
        category=label(value(row, "lang"), "lang"),
        extra=extra(row, ("question", "system", "chosen", "rejected")),
    )


def _webgpt(row: Row) -> Draft | None:
    scores = [number(value(row, f"score_{k}"), f"score_{k}") for k in (0, 1)]
    if scores[0] is None or scores[1] is None:
        raise RowError("a score is missing")
    if scores[0] == scores[1]:
        return None
    better = int(scores[1] > scores[0])
    question = value(row, "question")
    nested = isinstance(question, Mapping)
    return Draft(
        _user(text(row, "question.full_text" if nested else "question")),
        text(row, f"answer_{better}"),
        text(row, f"answer_{1 - better}"),
        margin=abs(scores[0] - scores[1]),
        category=label(question.get("dataset"), "dataset") if nested else None,
        extra=extra(row, ("question", "answer_0", "answer_1")),
    )


def _safe(which: str) -> Callable[[Row], Draft]:
    def draft(row: Row) -> Draft:
        choice = value(row, f"{which}_response_id")
        if choice not in (0, 1):
            raise RowError(f"{which}_response_id is {choice!r}, neither 0 nor 1")
        return Draft(
            _user(text(row, "prompt")),
            text(row, f"response_{choice}"),
            text(row, f"response_{1 - choice}"),
            extra=extra(row, ("prompt", "response_0", "response_1")),
        )

    return draft


def _instruction(row: Row) -> Draft:
    """Prompt, chosen and rejected, with the prompt an instruction, and perhaps a system message."""
    draft = common(row, Columns(), "prompt")
    if isinstance(draft.prompt, str) and isinstance(draft.chosen, str):
        draft.prompt = _user(draft.prompt, row.get("system") or row.get("system_message"))
    return draft


def _user(content: str, system: Any = None) -> list[dict[str, str]]:
    start = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    return [*start, {"role": "user", "content": content}]


def _columns(*names: str) -> frozenset[str]:
    return frozenset(names)


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            pairs(),
            Format("hh-rlhf", pairs().draft, "Anthropic/hh-rlhf", folders=True),
            Format(
                "shp",
                _shp,
                "stanfordnlp/SHP",
                folders=True,
                needs=_columns("history", "human_ref_A", "human_ref_B", "labels"),
            ),
            Format(
                "summarize-from-feedback",
                _summaries,
                "openai/summarize_from_feedback",
                subset="comparisons",
                needs=_columns("info", "summaries", "choice"),
            ),
            Format(
                "imdb-dpo",
                _imdb,
                "yuasosnin/imdb-dpo",
                needs=_columns("prompt", "chosen", "rejected", "chosen_reward", "rejected_reward"),
            ),
            Format(
                "code-vulnerability",
                _code,
                "CyberNative/Code_Vulnerability_Security_DPO",
                needs=_columns("lang", "vulnerability", "question", "chosen", "rejected"),
            ),
            Format(
                "webgpt",
                _webgpt,
                "openai/webgpt_comparisons",
                needs=_columns("question", "answer_0", "answer_1", "score_0", "score_1"),
            ),
            Format("py-dpo", _instruction, "jondurbin/py-dpo-v0.1"),
            Format("ultrafeedback", _instruction, "kaitchup/UltraFeedback-prompt-chosen-rejected"),
            Format(
                "safe-rlhf",
                _safe("better"),
                "PKU-Alignment/PKU-SafeRLHF",
                needs=_columns("prompt", "response_0", "response_1", "better_response_id"),
            ),
            Format("safe-rlhf-safer", _safe("safer")),
        )
    }
)
"""Formats by name. ``safe-rlhf`` takes the more helpful response, ``safe-rlhf-safer`` the safer one."""


def find(name: str) -> Format:
    """The format of that name or hub name.

    Raises:
        DataError: there is none, with the names there are.
    """
    import difflib

    for entry in FORMATS.values():
        if name == entry.name or (entry.hub is not None and name.lower() == entry.hub.lower()):
            return entry
    near = difflib.get_close_matches(name, FORMATS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(['auto', *FORMATS])}"
    raise DataError(f"no data format {name!r}{hint}")


def recognize(row: Row) -> Format:
    """The format of a row, told by its columns.

    Raises:
        RowError: it is of no known kind.
    """
    for entry in FORMATS.values():
        if entry.needs and entry.needs <= row.keys():
            return entry
    if {"chosen", "rejected"} <= row.keys():
        return FORMATS["pairs"]
    raise RowError(
        f"the columns are {', '.join(map(str, row))}, and no known format has these; expected prompt, chosen "
        'and rejected, or name them: columns = {prompt = "…", chosen = "…", rejected = "…"}'
    )
