"""Stage ``refresh``: clients judge completions of the current policy, and selectors learn from them.

Clients receive prompts and completions; verdicts stay with them, and only the method's uploads return.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from prefed.align.alignment import Alignment, Scorer
from prefed.align.judge.people import WaitingError
from prefed.align.labels import candidates, records_of, won
from prefed.align.policy import AlignError
from prefed.align.prompts_and_policy import own_prompts
from prefed.align.stages import Figures, Stage, append, dumps, rows_in, whole_batches
from prefed.align.tastes import REFRESH, Generation
from prefed.core import files
from prefed.data import Record
from prefed.data.record import parse_prompt, plain_prompt

JUDGED, PAIRS, HELD_OUT, RESULT = "judged.jsonl", "pairs.jsonl", "held-out.jsonl", "refresh.json"
"""A refresh's verdicts, the pairs of this refresh and earlier ones, the pairs of clients that it is evaluated
on, and the digest of its selectors."""


def _work(alignment: Alignment, generation: Generation) -> Figures:
    clients, before = alignment.clients, _earlier(alignment, generation)
    assert clients is not None
    path = generation.path(alignment, PAIRS)
    if clients.judge is None:
        figures = _judge_here(alignment, generation, before, clients.scorers)
    else:
        asked, numbers = dict(_asked(alignment, generation)), [each.number or 0 for each in before]
        kept = clients.judge([*numbers, generation.number or 0], asked)
        # Nobody measures the selectors' accuracy on verdicts that stay where they are.
        figures = {"judged": sum(map(len, asked.values())), "pairs": kept, "accuracy": None}
    if not figures["pairs"]:
        raise AlignError(
            f"{path.parent}: no client prefers a completion to another; raise refresh.pairs or temperature"
        )
    earlier = [each.path(alignment, REFRESH) for each in before]
    digest = clients.train(path, earlier, generation.path(alignment, REFRESH))
    files.write(generation.path(alignment, RESULT), dumps([{"selectors": digest}]))
    return figures


def _judge_here(
    alignment: Alignment, generation: Generation, before: list[Generation], scorers: Mapping[str, Scorer]
) -> dict[str, Any]:
    """Write :data:`JUDGED` and :data:`PAIRS`."""
    judged = _judged(alignment, generation, scorers)
    accuracy = _accuracy(alignment, before, judged)
    rows = [
        pair_row(row["client"], _record(row))
        for each in (*before, generation)
        for row in rows_in(each.path(alignment, JUDGED))
        if row["score"]
    ]
    files.write(generation.path(alignment, PAIRS), dumps(rows), mode=0o600)
    return {"judged": sum(row["score"] is not None for row in judged), "pairs": len(rows), **accuracy}


def _asked(alignment: Alignment, generation: Generation) -> Iterator[tuple[str, list[Record]]]:
    """Yield each client with the pairs of completions that it is asked about, drawn at random."""
    config, clients, prompts = alignment.config.refresh, alignment.clients, own_prompts(alignment)
    assert config is not None
    assert clients is not None
    pairs = list(candidates(alignment, generation, dict.fromkeys(("pairs", "identical", "blank"), 0)))
    key = generation.key(alignment).at("refresh")
    for client in clients.names:
        drawn = key.at("client", client).numpy().permutation(len(pairs))[: config.pairs]
        yield client, records_of([pairs[place] for place in drawn], prompts)


def _earlier(alignment: Alignment, generation: Generation) -> list[Generation]:
    """Return the earlier generations with a refresh."""
    assert generation.number is not None
    config = alignment.config
    return [Generation(each) for each in range(1, generation.number) if config.refreshed(each) == each]


def _judged(
    alignment: Alignment, generation: Generation, scorers: Mapping[str, Scorer]
) -> list[dict[str, Any]]:
    """Let every client judge, and return a row for each pair that it was asked about.

    ``score`` is 0 for a tie, and ``None`` if the judge gives no verdict.
    """
    asked = list(_asked(alignment, generation))
    path, name = generation.path(alignment, JUDGED), generation.stage("refresh")
    done = whole_batches(path, [len(records) for _, records in asked])
    alignment.callback.on_stage_begin(name, done, len(asked))
    waiting = list[str]()
    for number, (client, records) in enumerate(asked[done:], done + 1):
        try:
            usable, scores = scorers[client].scores(records)
        except WaitingError as error:
            # The others are asked, too.
            waiting.append(str(error))
        if waiting:
            continue
        found = dict(zip(usable.tolist(), scores[0].tolist(), strict=True))
        rows = [_row(client, record, found.get(place)) for place, record in enumerate(records)]
        append(path, rows, mode=0o600)
        alignment.callback.on_stage_step(name, number, len(asked), {})
    if waiting:
        raise AlignError("\n".join(["let them judge, then continue with prefed align --resume:", *waiting]))
    return list(rows_in(path))


def _row(client: str, record: Record, score: float | None) -> dict[str, Any]:
    best = record if score is None or score >= 0 else record.swapped()
    return {
        **pair_row(client, replace(best, extra={})),
        "score": None if score is None else abs(score),
        "extra": dict(record.extra),
    }


def _record(row: dict[str, Any]) -> Record:
    return Record(parse_prompt(row["prompt"]), row["chosen"], row["rejected"], extra=row["extra"])


def pair_row(client: str, record: Record) -> dict[str, Any]:
    """Return a client's pair as a row of a file."""
    prompt = plain_prompt(record.prompt)
    return {
        **record.extra,
        "client": client,
        "prompt": prompt,
        "chosen": record.chosen,
        "rejected": record.rejected,
    }


def _accuracy(alignment: Alignment, before: list[Generation], judged: list[dict[str, Any]]) -> dict[str, Any]:
    """Measure how often the selectors, before this refresh, order judged pairs as the clients do."""
    pairs = [_record(row) for row in judged if row["score"]]
    scorer = alignment.scorer(before[-1].path(alignment, REFRESH) if before else None)
    right = won(alignment, scorer, pairs)
    return {"accuracy": float(np.mean(right)) if len(right) else None}


def _settings(alignment: Alignment) -> dict[str, Any]:
    config = alignment.config
    assert config.refresh is not None
    return {"labels": config.labels, "client_judge": config.client_judge, **config.refresh.model_dump()}


def stage(generation: Generation, before: str) -> Stage:
    """Return the stage of a generation.

    Args:
        before: the source of the run's selectors, or the stage of the last refresh.
    """
    outputs = tuple(generation.file(name) for name in (JUDGED, RESULT))
    parts = tuple(generation.file(name) for name in (PAIRS, HELD_OUT, REFRESH))
    inputs = ("prompts", generation.stage("completions"), "judges", before)
    work = partial(_work, generation=generation)
    return Stage(generation.stage("refresh"), inputs, _settings, outputs, work, parts)
