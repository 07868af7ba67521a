"""Rows with several rated or ranked responses to a prompt: the best one is paired with the worst one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from prefed.data.errors import RowError
from prefed.data.sources.files import Row
from prefed.data.sources.pairs import (
    RawPair,
    extra_columns,
    list_at,
    number_at,
    pair_from_columns,
    parse_name,
    parse_number,
    text_at,
    user_turn,
    usual_columns,
    value_at,
)


def best_and_worst(rated: Iterable[tuple[Any, float | None]]) -> tuple[Any, Any, float] | None:
    """Return the responses with the highest and the lowest rating, and the difference of their ratings.

    The first of several equal ratings counts. Responses without a rating are ignored. Returns ``None`` if
    there are fewer than two distinct ratings.

    >>> best_and_worst([("a", 3), ("b", 5), ("c", 1), ("d", 5), ("e", None)])
    ('b', 'c', 4)
    """
    known = [(response, rating) for response, rating in rated if rating is not None]
    if len({rating for _, rating in known}) < 2:
        return None
    best, worst = (choose(known, key=lambda item: item[1]) for choose in (max, min))
    return best[0], worst[0], best[1] - worst[1]


def ratings(row: Row, column: str = "responses") -> RawPair | None:
    """Convert prompt, responses and ratings; other columns as in the format ``pairs``."""
    responses, ratings = list_at(row, column), list_at(row, "ratings")
    if len(responses) != len(ratings):
        raise RowError(
            f"{column} has {len(responses)} entries, but ratings has {len(ratings)}; give one rating per "
            "response"
        )
    numbers = [parse_number(item, f"rating {k}") for k, item in enumerate(ratings, 1)]
    pair = best_and_worst(zip(responses, numbers, strict=True))
    return pair and pair_from_columns(row, usual_columns(row), pair, (column, "ratings"))


def ranked(row: Row) -> RawPair | None:
    """Convert answers with ranks, of which 1 is the best."""
    rated = [
        (text_at(answer, "answer"), None if rank is None else -rank)
        for answer in list_at(row, "answers")
        for rank in [number_at(answer, "rank")]
    ]
    pair = best_and_worst(rated)
    return pair and pair_from_columns(row, usual_columns(row), pair, ("answers",))


def ultrafeedback(row: Row) -> RawPair | None:
    """Convert four completions, each rated by the mean of four aspects.

    ``overall_score`` is not used: copies from before December 2023 contain 10 instead of 1
    (https://github.com/OpenBMB/UltraFeedback, issue 8).
    """
    rated = [
        (text_at(completion, "response"), number_at(completion, "fine-grained_score"))
        for completion in list_at(row, "completions")
    ]
    pair = best_and_worst(rated)
    if pair is None:
        return None
    chosen, rejected, margin = pair
    return RawPair(
        user_turn(text_at(row, "instruction")),
        chosen,
        rejected,
        margin=margin,
        domain=parse_name(row.get("source"), "source"),
        extra=extra_columns(row, ("instruction",)),
    )


def prism(row: Row) -> list[RawPair | None]:
    """Convert a conversation. Each turn has a user message and rated responses, and continues one of them."""
    pairs: list[RawPair | None] = []
    start: list[dict[str, str]] = []
    client = parse_name(value_at(row, "user_id"), "user_id")
    category = parse_name(row.get("conversation_type"), "conversation_type")
    extra = extra_columns(row, ("opening_prompt", "open_feedback"))
    for turn, entries in groupby(list_at(row, "conversation_history"), lambda entry: value_at(entry, "turn")):
        question, *responses = entries
        if question.get("role") != "user" or any(entry.get("role") != "model" for entry in responses):
            raise RowError(f"turn {turn} is not a user message followed by model responses")
        if len(start) % 2:
            raise RowError(f"the turn before turn {turn} has no chosen response")
        start = [*start, *user_turn(text_at(question, "content"))]
        # Among equal ratings, prefer the response that the user continued with.
        responses.sort(key=lambda entry: not value_at(entry, "if_chosen"))
        rated = [
            (text_at(entry, "content"), parse_number(entry.get("score"), "score")) for entry in responses
        ]
        # PRISM's placeholder for a response without text, see process_text in its repository.
        pair = best_and_worst((text, score) for text, score in rated if text != "EMPTY STRING")
        if pair is None:
            pairs.append(None)
        else:
            chosen, rejected, margin = pair
            pairs.append(
                RawPair(start, chosen, rejected, margin, client=client, category=category, extra=extra)
            )
        if responses and responses[0]["if_chosen"]:
            start = [*start, {"role": "assistant", "content": rated[0][0]}]
    if not pairs:
        raise RowError("conversation_history is empty")
    return pairs


def oasst(row: Row) -> list[RawPair | None]:
    """Convert a tree of messages: the best-ranked reply to each prompt and the worst-ranked one."""
    pairs: list[RawPair | None] = []
    extra = extra_columns(row, ())

    def walk(node: Row, start: list[dict[str, str]]) -> None:
        role = "user" if text_at(node, "role") == "prompter" else "assistant"
        turn = {"role": role, "content": text_at(node, "text")}
        replies = [reply for reply in node.get("replies") or () if not reply.get("deleted")]
        if role == "user" and len(replies) > 1:
            ranks = [(text_at(reply, "text"), reply.get("rank")) for reply in replies]
            pair = best_and_worst((text, None if rank is None else -rank) for text, rank in ranks)
            pairs.append(pair and RawPair([*start, turn], *pair, category=node.get("lang"), extra=extra))
        for reply in replies:
            walk(reply, [*start, turn])

    # A copy, since the messages are read as a whole.
    walk(dict(value_at(row, "prompt")), [])
    return pairs or [None]
