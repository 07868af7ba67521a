"""Formats of known preference datasets: how their rows become pairs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

from prefed.core.plugins import Registry
from prefed.data.config import Columns
from prefed.data.encoding import instruction
from prefed.data.errors import DataError, RowError
from prefed.data.record import plain_prompt
from prefed.data.sources.files import Row, peek, unmarked
from prefed.data.sources.pairs import (
    RawPair,
    better_of,
    different_parts,
    extra_columns,
    is_dialogue,
    list_at,
    number_at,
    pair_from_columns,
    parse_name,
    parse_number,
    parse_split,
    split_prompt,
    text_at,
    user_turn,
    usual_columns,
    value_at,
    voted,
)
from prefed.data.sources.rated_responses import oasst, prism, ranked, ratings, ultrafeedback
from prefed.data.sources.unread import PROMPT_NAMES, columns_line


@dataclass(frozen=True)
class Format:
    """How to read the rows of one dataset.

    Attributes:
        name: value of ``data.format``.
        convert: turns a row into a pair or a thumb, or into a list of them if a row has several. ``None``
            instead of a pair means that the source prefers neither response.
        hub: name of the dataset on the hub, accepted instead of ``name``; empty if there is none.
        detected_by: columns that identify the format, separated by spaces; empty if it cannot be detected.
        subset: default configuration of the hub dataset.
        subset_is_folder: subsets of the hub dataset are folders.
        has_prompts: a source in which all prompts are empty is refused.
    """

    name: str
    convert: Callable[[Row], RawPair | list[RawPair | None] | None]
    hub: str = ""
    detected_by: str = ""
    subset: str | None = None
    subset_is_folder: bool = False
    has_prompts: bool = True

    def pairs(self, row: Row) -> list[RawPair | None]:
        """Return one entry per comparison of a row, at least one; ``None`` for a tie.

        Raises:
            RowError: the row does not have this format.
        """
        found = self.convert(row)
        return found if isinstance(found, list) else [found]


def _label_studio(row: Row) -> list[RawPair | None]:
    """Convert a task with pairwise comparisons, whose client is the annotator."""
    pairs: list[RawPair | None] = []
    data, others = value_at(row, "data"), dict[str, None]()
    for annotation in list_at(row, "annotations"):
        who = annotation.get("completed_by")
        for result in () if annotation.get("was_cancelled") else annotation.get("result") or ():
            if result.get("type") != "pairwise":
                others[str(result.get("type"))] = None
                continue
            names = tuple(text_at(result, "to_name").split(","))
            if len(names) != 2 or not set(names) <= data.keys():
                raise RowError(
                    f"the comparison is of {' and '.join(names)}; name the fields of data like that"
                )
            vote = value_at(result, "value.selected")
            pairs.append(_vote(data, names, vote, who.get("email") if isinstance(who, Mapping) else who))
    if others and not pairs:
        raise RowError(
            f"the annotations are of type {', '.join(others)}; prefed reads those of type pairwise"
        )
    return pairs or [None]


def _argilla(row: Row) -> list[RawPair | None]:
    """Convert a record with a question about two responses, whose client is the annotator."""
    fields, answers = value_at(row, "fields"), value_at(row, "responses")
    columns = usual_columns(fields)
    names = tuple(name for name in fields if name not in (*columns.prompts, columns.system))
    if len(names) != 2 or len(answers) != 1:
        raise RowError(
            f"this Argilla record has {len(names)} responses ({', '.join(names)}) and {len(answers)} "
            "answered questions; prefed reads records with one question about two responses: give the fields "
            "of the prompt usual names, such as prompt, and keep one question"
        )
    (question,) = answers
    votes = [vote for vote in list_at(answers, question) if vote.get("status") in (None, "submitted")]
    return [_vote(fields, names, _first(vote.get("value")), vote.get("user_id")) for vote in votes] or [None]


def _first(vote: Any) -> Any:
    """Return what a ranking places first, ``None`` if that is several responses; any other vote unchanged."""
    if not isinstance(vote, list):
        return vote
    best = [entry.get("value") for entry in vote if entry.get("rank") == 1]
    return best[0] if len(best) == 1 else None


def _vote(fields: Row, names: tuple[str, ...], vote: Any, client: Any) -> RawPair | None:
    winner = better_of(vote, names, "the vote")
    if winner is None:
        return None
    found = text_at(fields, names[winner]), text_at(fields, names[1 - winner]), None
    pair = pair_from_columns(fields, usual_columns(fields), found, names)
    return replace(pair, client=pair.client or parse_name(client, "annotator"))


_OTHER = {"a": "b", "b": "a"}


def _arena(row: Row) -> RawPair | None:
    """Convert a vote between two dialogues."""
    winner = better_of(text_at(row, "winner"), ("model_a", "model_b"), "winner")
    if winner is None:
        return None
    better = "ab"[winner]
    return RawPair(
        None,
        list_at(row, f"conversation_{better}"),
        list_at(row, f"conversation_{_OTHER[better]}"),
        client=parse_name(row.get("judge"), "judge"),
        extra=extra_columns(row, ("conversation_a", "conversation_b")),
    )


def _arena_55k(row: Row) -> RawPair | None:
    """Convert a vote: each turn is an entry of three lists, each outcome a column of 0 or 1."""
    outcomes = [f"winner_{name}" for name in ("model_a", "model_b", "tie")]
    votes = [number_at(row, name) for name in outcomes]
    if sorted(vote or 0 for vote in votes) != [0, 0, 1]:
        raise RowError(f"one of {', '.join(outcomes)} must be 1, and the other two 0")
    if votes[2] == 1:
        return None
    better = "a" if votes[0] == 1 else "b"
    questions = list_at(row, "prompt")

    def dialogue(which: str) -> list[dict[str, Any]]:
        answers = list_at(row, f"response_{which}")
        if len(answers) != len(questions):
            raise RowError(f"response_{which} has {len(answers)} turns, but prompt has {len(questions)}")
        turns = zip(questions, answers, strict=True)
        return [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]

    return RawPair(
        None,
        dialogue(better),
        dialogue(_OTHER[better]),
        extra=extra_columns(row, ("prompt", "response_a", "response_b", *outcomes)),
    )


def _signed(row: Row, strength: str, names: tuple[str, str]) -> tuple[str, str, float] | None:
    """Return the better and the worse of two responses and the strength of the preference.

    HelpSteer2 and 3: from −3 (the first is much better) to 3 (the second is much better).
    """
    preference = number_at(row, strength)
    if preference is None or abs(preference) > 3:
        raise RowError(f"{strength} must be a number from -3 to 3, not {preference}")
    if preference == 0:
        return None
    better, worse = names if preference < 0 else names[::-1]
    return text_at(row, better), text_at(row, worse), abs(preference)


def _helpsteer3(row: Row) -> RawPair | None:
    found = _signed(row, "overall_preference", ("response1", "response2"))
    if found is None:
        return None
    chosen, rejected, margin = found
    return RawPair(
        list_at(row, "context"),
        chosen,
        rejected,
        margin=margin,
        category=parse_name(row.get("domain"), "domain"),
        extra=extra_columns(row, ("context", "response1", "response2", "domain")),
    )


def _helpsteer2(row: Row) -> RawPair | None:
    """Convert the preferences of HelpSteer2. Its prompts are what users say."""
    names = "response_1", "response_2"
    found = _signed(row, "preference_strength", names)
    if found is None:
        return None
    columns = usual_columns(row).model_copy(update={"prompt": ("prompt",)})
    return pair_from_columns(row, columns, found, names)


def _community(row: Row) -> list[RawPair | None]:
    """Convert up to four turns, each of which pairs the preferred response with every other response.

    The prompt of a turn contains the earlier turns with their preferred responses.
    """
    pairs: list[RawPair | None] = []
    start: list[dict[str, str]] = []
    end = None
    client = parse_name(row.get("annotator_id"), "annotator_id")
    language = parse_name(row.get("assigned_lang"), "assigned_lang")
    extra = extra_columns(row, [str(name) for name in row if "_turn_" in str(name)])
    for turn in ("first", "second", "third", "fourth"):
        if not row.get(f"{turn}_turn_prompt"):
            end = end or f"{turn}_turn_prompt"
            continue
        if end:
            raise RowError(f"{turn}_turn_prompt is given, but {end} is missing")
        start = [*start, *user_turn(text_at(row, f"{turn}_turn_prompt"))]
        choice = row.get(f"{turn}_turn_preferred_response")
        if not choice:
            pairs.append(None)
            end = f"{turn}_turn_preferred_response"
            continue
        names = {f"response_{k}": f"{turn}_turn_response_{k}" for k in "abcd"}
        texts = {label: text_at(row, name) for label, name in names.items() if row.get(name)}
        if choice not in texts:
            raise RowError(
                f"{turn}_turn_preferred_response must be one of {', '.join(texts)}, not {choice!r}"
            )
        chosen = texts.pop(choice)
        pairs += [
            RawPair(start, chosen, other, client=client, category=language, extra=extra)
            for other in texts.values()
        ] or [None]
        start = [*start, {"role": "assistant", "content": chosen}]
    if not pairs:
        raise RowError("first_turn_prompt is missing")
    return pairs


_DIALOGUES = ("messages", "conversations")
_COMPLETIONS = ("completion", "output", *_DIALOGUES)
"""Columns of a response with a thumb. A dialogue also contains its prompt."""
POST_FIELDS = ("subreddit", "title", "post")
"""The fields of a Reddit post in FedBiscuit's templates."""


def pairs_format(columns: Columns | None = None) -> Format:
    """Return the format of rows with columns for chosen and rejected, as in TRL.

    Prompt, chosen and rejected are texts or lists of messages. Without a prompt, chosen and rejected are
    whole dialogues. If ``columns`` is not given, the columns margin, client, category, domain and split are
    used if present. With columns for a thumb, the rows are thumbs.
    """

    def to_pair(row: Row) -> RawPair | None:
        if columns is None:
            return pair_from_columns(row, usual_columns(row))
        if columns.responses is not None and columns.preference is not None:
            found = voted(row, columns)
            return found and pair_from_columns(row, columns, found, (*columns.responses, columns.preference))
        if columns.thumb and columns.prompt is None and not is_dialogue(peek(row, columns.thumb[0])):
            usual = usual_columns(row)
            return pair_from_columns(row, columns.model_copy(update={"prompt": usual.prompt or "prompt"}))
        return pair_from_columns(row, columns)

    return Format("pairs", to_pair)


def _named(**names: Any) -> Callable[[Row], RawPair | list[RawPair | None] | None]:
    """Return a conversion by the names of columns, which otherwise have their usual names."""
    return lambda row: pairs_format(usual_columns(row).model_copy(update=names)).convert(row)


def _thumbs(row: Row) -> list[RawPair | None]:
    """Convert prompt, completion and label, as in TRL. A row with chosen and rejected becomes two thumbs."""
    usual = usual_columns(row)
    if "label" in row or not {"chosen", "rejected"} <= row.keys():
        label = "kto_tag" if "kto_tag" in row else "label"
        completion = next((name for name in _COMPLETIONS if name in row), "completion")
        named = None if completion in _DIALOGUES else usual.prompt or "prompt"
        names = {"prompt": named, "completion": completion, "label": label}
        return [pair_from_columns(row, usual.model_copy(update=names))]
    both = pairs_format().convert(row)
    assert isinstance(both, RawPair)
    prompt, chosen, rejected, _ = split_prompt(both)
    if chosen == rejected:
        return [None]
    return [
        replace(both, prompt=plain_prompt(prompt), chosen=text, rejected=text, label=up)
        for text, up in ((chosen, True), (rejected, False))
    ]


def _shp(row: Row) -> RawPair:
    choice = value_at(row, "labels")
    if choice not in (0, 1):
        raise RowError(f"labels must be 1 (A is preferred) or 0 (B is preferred), not {choice!r}")
    better, worse = ("A", "B") if choice == 1 else ("B", "A")
    ratio = parse_number(row.get("score_ratio"), "score_ratio")
    if ratio is not None and ratio <= 0:
        raise RowError(f"score_ratio must be positive, not {ratio}")
    domain = text_at(row, "domain")
    for split in ("_train", "_validation", "_test"):
        domain = domain.removesuffix(split)
    return RawPair(
        user_turn(text_at(row, "history")),
        text_at(row, f"human_ref_{better}"),
        text_at(row, f"human_ref_{worse}"),
        margin=None if ratio is None else math.log(ratio),
        category=domain,
        extra=extra_columns(row, ("history", "human_ref_A", "human_ref_B", "domain")),
    )


def _shp_responses(row: Row) -> RawPair | None:
    """Convert an SHP comparison without its post, as in the code of Distributed DPO (arXiv:2605.20696)."""
    scores = [parse_number(row.get(f"score_{k}"), f"score_{k}") for k in "AB"]
    if scores[0] is not None and scores[0] == scores[1]:
        return None
    pair = _shp(row)
    pair.prompt = ""
    return pair


def _summaries(row: Row) -> RawPair:
    choice, summaries, info = (value_at(row, name) for name in ("choice", "summaries", "info"))
    if not isinstance(summaries, list) or len(summaries) != 2 or choice not in (0, 1):
        raise RowError("summaries must be a list of two, and choice must be 0 or 1")
    more = row.get("extra") or {}
    for name, item in (("info", info), ("extra", more)):
        if not isinstance(item, Mapping):
            raise RowError(f"{name} must be an object")
    better, worse = (" " + text_at(summaries[k], "text").lstrip() for k in (choice, 1 - choice))
    split = row.get("split")
    confidence = more.get("confidence")
    return RawPair(
        _post(info),
        better,
        worse,
        client=parse_name(row.get("worker"), "worker"),
        category=parse_name(info.get("subreddit") or info.get("site"), "subreddit"),
        # The authors selected models on "valid1" and reported results on "valid2".
        split=parse_split({"valid1": "validation", "valid2": "test"}.get(str(split), split)),
        extra={
            **extra_columns(row, ("split",)),
            **({} if info.get("id") is None else {"post_id": str(info["id"])}),
            **({} if confidence is None else {"confidence": int(confidence)}),
            **{name: str(info[name]) for name in POST_FIELDS if info.get("post") and info.get(name)},
        },
    )


def _summaries_instruction(row: Row) -> RawPair:
    """Convert a comparison of summaries, with FedBiscuit's instruction (figure 4) as the prompt."""
    pair = _summaries(row)
    missing = [name for name in POST_FIELDS if name not in pair.extra]
    if missing:
        raise RowError(f"info has no {' and no '.join(missing)}, which the instruction contains")
    subreddit, title, post = (pair.extra[name] for name in POST_FIELDS)
    pair.prompt = instruction(
        "Summarize the following Reddit post in a paragraph of 50 words or less.",
        f"SUBREDDIT: r/{subreddit}\nTITLE: {title}\nPOST: {post}",
    )
    return pair


def _post(info: Mapping[str, Any]) -> str:
    """Return the prompt of a summarisation task: a Reddit post or a news article."""
    if info.get("post"):
        head = [("SUBREDDIT", "r/" + str(info["subreddit"]))] if info.get("subreddit") else []
        head += [("TITLE", info["title"])] if info.get("title") else []
        return "\n\n".join(f"{name}: {item}" for name, item in [*head, ("POST", info["post"])]) + "\n\nTL;DR:"
    if info.get("article"):
        return f"{info['article']}\n\nTL;DR:"
    raise RowError("info has neither a post nor an article")


def _imdb(row: Row) -> RawPair:
    chosen, rejected = (number_at(row, f"{which}_reward") for which in ("chosen", "rejected"))
    margin = None if chosen is None or rejected is None else chosen - rejected
    return RawPair(
        text_at(row, "prompt"),
        text_at(row, "chosen"),
        text_at(row, "rejected"),
        margin=margin,
        extra=extra_columns(row, ("prompt", "chosen", "rejected")),
        whole=True,
    )


def _code(row: Row) -> RawPair:
    return RawPair(
        user_turn(text_at(row, "question"), row.get("system")),
        text_at(row, "chosen"),
        text_at(row, "rejected"),
        category=parse_name(value_at(row, "lang"), "lang"),
        extra=extra_columns(row, ("question", "system", "chosen", "rejected")),
    )


def _webgpt(row: Row) -> RawPair | None:
    first, second = (number_at(row, f"score_{k}") for k in (0, 1))
    if first is None or second is None:
        raise RowError("score_0 or score_1 is missing")
    if first == second:
        return None
    better = int(second > first)
    question = value_at(row, "question")
    nested = isinstance(question, Mapping)
    return RawPair(
        user_turn(text_at(row, "question.full_text" if nested else "question")),
        text_at(row, f"answer_{better}"),
        text_at(row, f"answer_{1 - better}"),
        margin=abs(first - second),
        category=parse_name(question.get("dataset"), "dataset") if nested else None,
        extra=extra_columns(row, ("question", "answer_0", "answer_1")),
    )


def _safe(row: Row, column: str = "better_response_id") -> RawPair:
    choice = value_at(row, column)
    if choice not in (0, 1):
        raise RowError(f"{column} must be 0 or 1, not {choice!r}")
    return RawPair(
        user_turn(text_at(row, "prompt")),
        text_at(row, f"response_{choice}"),
        text_at(row, f"response_{1 - choice}"),
        extra=extra_columns(row, ("prompt", "response_0", "response_1")),
    )


def _instruction(row: Row) -> RawPair:
    """Convert prompt, chosen and rejected. A text prompt becomes a user turn, after any system message."""
    pair = pair_from_columns(row, Columns(prompt="prompt"))
    if isinstance(pair.prompt, str) and isinstance(pair.chosen, str):
        pair.prompt = user_turn(pair.prompt, row.get("system") or row.get("system_message"))
    return pair


_ALL = (
    pairs_format(),
    Format("thumbs", _thumbs, "trl-lib/kto-mix-14k", "completion label"),
    Format("hh-rlhf", pairs_format().convert, "Anthropic/hh-rlhf", subset_is_folder=True),
    Format("shp", _shp, "stanfordnlp/SHP", "history human_ref_A human_ref_B labels", subset_is_folder=True),
    Format("shp-responses", _shp_responses, subset_is_folder=True, has_prompts=False),
    Format(
        "summarize-from-feedback",
        _summaries,
        "openai/summarize_from_feedback",
        "info summaries choice",
        "comparisons",
    ),
    Format("summarize-from-feedback-instruction", _summaries_instruction, subset="comparisons"),
    Format("imdb-dpo", _imdb, "yuasosnin/imdb-dpo", "prompt chosen rejected chosen_reward rejected_reward"),
    Format(
        "code-vulnerability",
        _code,
        "CyberNative/Code_Vulnerability_Security_DPO",
        "lang vulnerability question chosen rejected",
    ),
    Format("webgpt", _webgpt, "openai/webgpt_comparisons", "question answer_0 answer_1 score_0 score_1"),
    Format("py-dpo", _instruction, "jondurbin/py-dpo-v0.1"),
    Format("ultrafeedback", _instruction, "kaitchup/UltraFeedback-prompt-chosen-rejected"),
    Format(
        "safe-rlhf",
        _safe,
        "PKU-Alignment/PKU-SafeRLHF",
        "prompt response_0 response_1 better_response_id",
    ),
    Format("safe-rlhf-safer", partial(_safe, column="safer_response_id")),
    Format(
        "chatbot-arena", _arena, "lmsys/chatbot_arena_conversations", "conversation_a conversation_b winner"
    ),
    Format(
        "arena-55k",
        _arena_55k,
        "lmsys/lmsys-arena-human-preference-55k",
        "prompt response_a response_b winner_model_a winner_model_b",
    ),
    Format(
        "helpsteer3",
        _helpsteer3,
        "nvidia/HelpSteer3",
        "context response1 response2 overall_preference",
        "preference",
    ),
    Format(
        "helpsteer2",
        _helpsteer2,
        "nvidia/HelpSteer2",
        "prompt response_1 response_2 preference_strength",
        "preference",
        subset_is_folder=True,
    ),
    Format(
        "community-alignment",
        _community,
        "facebook/community-alignment-dataset",
        "annotator_id first_turn_prompt first_turn_preferred_response",
    ),
    Format("ratings", ratings, detected_by="responses ratings"),
    Format("distilabel", partial(ratings, column="generations"), detected_by="generations ratings"),
    Format("nectar", ranked, "berkeley-nest/Nectar", "prompt answers num_responses"),
    Format(
        "openai",
        _named(prompt="input.messages", chosen="preferred_output", rejected="non_preferred_output"),
        detected_by="input preferred_output non_preferred_output",
    ),
    Format(
        "alpaca-farm",
        _named(prompt=("instruction", "input"), responses=("output_1", "output_2"), preference="preference"),
        "tatsu-lab/alpaca_farm",
        "instruction input output_1 output_2 preference",
        "alpaca_human_preference",
    ),
    Format("oasst", oasst, detected_by="message_tree_id prompt"),
    Format("label-studio", _label_studio, detected_by="data annotations"),
    Format("argilla", _argilla, detected_by="fields responses suggestions"),
    Format("ultrafeedback-ratings", ultrafeedback, "openbmb/UltraFeedback", "instruction completions models"),
    Format(
        "prism",
        prism,
        "HannahRoseKirk/prism-alignment",
        "conversation_history conversation_id user_id",
        "conversations",
    ),
)
FORMATS = Registry("formats", {entry.name: entry for entry in _ALL}, "FORMAT", Format)
"""Formats by name. ``safe-rlhf`` prefers the more helpful response, ``safe-rlhf-safer`` the safer one.

``shp-responses`` omits SHP's posts. ``summarize-from-feedback-instruction`` uses FedBiscuit's generation
template (figure 4) as the prompt.
"""


def get_format(name: str) -> Format:
    """Return the format with this name or hub name.

    Raises:
        DataError: there is no such format. The message suggests a name, or lists all names.
    """
    for entry in FORMATS.builtin.values():
        if name and name.lower() == entry.hub.lower():
            return entry
    if name not in FORMATS:
        raise DataError(f"unknown data format {name!r}{FORMATS.hint(name)}")
    return FORMATS[name]


def _known(row: Row) -> Format | None:
    forms = (entry for entry in FORMATS.builtin.values() if entry.detected_by)
    return next((entry for entry in forms if row.keys() >= {*entry.detected_by.split()}), None)


def is_known(row: Row) -> bool:
    """Whether a row has the columns of a known dataset, and not only those of any pairs or thumbs."""
    entry = _known(row)
    return entry is not None and entry.name != "thumbs"


def detect_format(row: Row) -> Format:
    """Detect the format of a row by its columns.

    Raises:
        RowError: no format has these columns.
    """
    if entry := _known(row):
        return entry
    if {"chosen", "rejected"} <= row.keys() or {"chosen_response", "rejected_response"} <= row.keys():
        return FORMATS["pairs"]
    if "kto_tag" in row:
        return FORMATS["thumbs"]
    raise RowError(f"no known format has the columns {', '.join(map(str, row))}; {_help(row)}")


_CHOICES = {"winner", "label", "labels", "choice", "preference", "preferred", "better", "overall_preference"}
"""Columns that may name the better of two responses."""


def _help(row: Row) -> str:
    """Return a hint for turning rows with unknown columns into pairs.

    Columns whose names differ in a number or a letter, such as response_1 and response_2, are not the chosen
    and the rejected one of every row.
    """
    if {"interaction_id", "user_prompt", "model_response"} <= row.keys():
        return (
            "these are PRISM utterances, with one response per row; use conversations.jsonl, which contains "
            "the same data"
        )
    if {"message_id", "parent_id", "text", "role"} <= row.keys():
        return "these are single messages of trees; use the file of trees, such as …_ready.trees.jsonl.gz"
    # Names with capitals or blanks, such as those of a sheet.
    usual = {str(name).strip().lower(): str(name) for name in row}
    for needed in (("chosen", "rejected"), ("completion", "label")):
        if usual.keys() >= {*needed}:
            others = tuple(name for key, name in usual.items() if key in PROMPT_NAMES)
            found: dict[str, Any] = {name: usual[name] for name in (*needed, "client") if name in usual}
            found["prompt"] = usual.get("prompt", others or "…")
            return f"read them with {columns_line(Columns(**found))}"
    texts = [str(n) for n, item in unmarked(row) if str(n).lower() not in PROMPT_NAMES and _may_respond(item)]
    prompt = usual_columns(row).prompt or "…"
    chooser = next((str(name) for name in row if str(name).lower().split("_")[-1] in _CHOICES), None)
    texts = [name for name in texts if name != chooser] or [n for n in _DIALOGUES if n in row]
    thumbs = [str(name) for name, item in unmarked(row) if isinstance(item, bool)]
    if len(texts) == len(thumbs) == 1:
        named = None if texts[0] in _DIALOGUES else prompt
        line = columns_line(Columns(prompt=named, completion=texts[0], label=thumbs[0]))
        return f"if {thumbs[0]} is a thumb up or down, read such rows with {line}"
    both = [str(n) for n, item in unmarked(row) if isinstance(item, list) and [*map(type, item)] == [str] * 2]
    if len(both) == 1:
        order = {"chosen": f"{both[0]}.0", "rejected": f"{both[0]}.1", "prompt": prompt}
        line = columns_line(usual_columns(row).model_copy(update=order))
        return f"if the first text of {both[0]} is the better response, read such rows with {line}"
    if len(texts) < 2:
        return (
            "give two responses to each prompt, in the columns prompt, chosen and rejected, or one with a "
            "thumb, in the columns prompt, completion and label"
        )
    for name in texts:
        other = name.replace("chosen", "rejected").replace("accepted", "rejected")
        if other != name and other in texts:
            return f"read them with {columns_line(Columns(prompt=prompt, chosen=name, rejected=other))}"
    numbered = next((pair for pair in combinations(texts, 2) if _numbered(*pair)), None)
    if numbered and chooser and _names_one(peek(row, chooser), numbered):
        line = columns_line(Columns(prompt=prompt, responses=numbered, preference=chooser))
        return f"if {chooser} names the better response, read them with {line}"
    if numbered or chooser:
        named = f", which {chooser!r} may name" if chooser else ""
        return (
            f"use the columns prompt, chosen and rejected: in each row, find the better response{named}, and "
            "write it as chosen and the other one as rejected"
        )
    return (
        "use the columns prompt, chosen and rejected, or name yours: "
        'columns = {prompt = "…", chosen = "…", rejected = "…"}, or those of thumbs: '
        'columns = {prompt = "…", completion = "…", label = "…"}'
    )


def _numbered(one: str, other: str) -> bool:
    """Whether two names differ only in a number or a letter.

    >>> _numbered("model_a_output", "model_b_output"), _numbered("best", "bad")
    (True, False)
    """
    parts = different_parts(one.lower(), other.lower())
    return all(re.fullmatch(r"\d+|[a-z]", part) for part in parts) and len(one) > len(parts[0])


def _names_one(vote: Any, names: tuple[str, str]) -> bool:
    try:
        better_of(vote, names, "")
    except RowError:
        return False
    return True


def _may_respond(item: Any) -> bool:
    """Whether a value is, or contains, a non-numeric text or a list of messages."""
    if isinstance(item, Mapping):
        return any(map(_may_respond, item.values()))
    if isinstance(item, str):
        return not item.replace(".", "", 1).removeprefix("-").isdigit()
    return isinstance(item, list) and bool(item) and all(isinstance(turn, Mapping) for turn in item)
