"""Stage ``labels``: selectors compare every two completions of a prompt in both orders.

For a policy that takes tastes, they use the taste drawn for the prompt.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prefed.align import completions
from prefed.align.alignment import Alignment, Scorer
from prefed.align.policy import AlignError
from prefed.align.prompts_and_policy import own_prompts
from prefed.align.stages import Figures, Stage, append, dumps, rows_in, whole_batches
from prefed.align.tastes import LABELS, Generation, at_prompts
from prefed.config.align import CLIENTS
from prefed.core import files
from prefed.core.records import LabelRow
from prefed.data import Record
from prefed.data.prompts import PromptRow
from prefed.data.record import plain_prompt
from prefed.train.metrics import majority

FILE, SCORES = LABELS, "scores.jsonl"
NEAR_TIES = 0.25
"""Share of the labels, those with the smallest margins, that count as near-ties."""
BATCH = 256
"""Pairs per batch. It is fixed, so that scores are bit-identical after a restart."""


@dataclass(frozen=True)
class Candidates:
    """Two different completions of a prompt, with the numbers of the prompt and the samples.

    ``ended`` is whether the policy ended each of them.
    """

    prompt: int
    samples: tuple[int, int]
    texts: tuple[str, str]
    ended: tuple[bool, bool]


def candidates(alignment: Alignment, generation: Generation, counts: dict[str, int]) -> Iterator[Candidates]:
    """Yield every two different completions of each prompt; the others are counted in ``counts``."""
    texts: defaultdict[int, dict[int, str]] = defaultdict(dict)
    ends: defaultdict[int, dict[int, bool]] = defaultdict(dict)
    for row in rows_in(generation.path(alignment, completions.FILE)):
        texts[row["index"]][row["sample"]] = row["completion"]
        # An older prefed did not record this.
        ends[row["index"]][row["sample"]] = row.get("ended", True)
    for prompt in sorted(texts):
        for one, other in combinations(sorted(texts[prompt]), 2):
            first, second = texts[prompt][one], texts[prompt][other]
            counts["pairs"] += 1
            # Selectors ignore spaces around a response.
            if first.strip() == second.strip():
                counts["identical"] += 1
            elif not first.strip() or not second.strip():
                counts["blank"] += 1
            else:
                ended = ends[prompt][one], ends[prompt][other]
                yield Candidates(prompt, (one, other), (first, second), ended)


def _work(alignment: Alignment, generation: Generation) -> Figures:
    names = ("pairs", "identical", "blank", _not_judged(alignment), "ties", "cut", "unanimous")
    counts = dict.fromkeys(names, 0)
    pairs = list(candidates(alignment, generation, counts))
    accuracy = {} if generation.before else unseen_accuracy(alignment)
    parts, best = [pairs], alignment.config.pairs == "best"
    if best:
        # A chosen completion that was cut teaches not to end: two such ones are judged if no label is left.
        parts = [[pair for pair in pairs if any(pair.ended) is ended] for ended in (True, False)]
    labels = list(_labels(alignment, generation, parts, counts))
    if best:
        kept = clearest(labels)
        counts["less_clear"] = len(labels) - len(kept)
        labels = kept
    path = generation.path(alignment, FILE)
    if not labels:
        left_out = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
        hint = "use more prompts, or raise align.temperature or data.max_length"
        voted = alignment.config.labels in (CLIENTS, "majority") and alignment.privacy is None
        if voted and 2 * counts["ties"] > counts["pairs"]:
            hint = (
                "votes for opposite tastes cancel out: serve one of them with selectors that have a latent "
                "taste (fedvpl or fedvpa) and align.taste"
            )
        raise AlignError(f"{path.parent}: no pair of completions got a label ({left_out}); {hint}")
    files.write(path, dumps(labels))
    return {**counts, "labelled": len(labels), **accuracy}


def unseen_accuracy(alignment: Alignment) -> Figures:
    """Measure and log how often the selectors order clients' pairs with unseen prompts as the clients do."""
    if alignment.judge is not None or alignment.config.tastes is not None:
        return {}
    pairs = list(alignment.unseen_pairs())
    correct = won(alignment, alignment.scorer(), pairs)
    text = "no client has a test pair whose prompt selectors were not trained on"
    accuracy = None
    if len(correct):
        accuracy = float(np.mean(correct))
        text = (
            f"selectors order {accuracy:.1%} of {len(correct):,} pairs of clients with unseen prompts "
            "correctly"
        )
    alignment.callback.on_note(
        f"{text}; their accuracy on the policy's own completions is unknown, as nobody labelled them: read "
        "some of labels.jsonl"
    )
    return {"unseen_pairs": len(correct), "unseen_accuracy": accuracy}


def won(
    alignment: Alignment, scorer: Scorer, records: Sequence[Record], tastes: torch.Tensor | None = None
) -> NDArray[np.float64]:
    """Return 1 for each pair whose chosen response the labeller prefers, 0.5 for a tie, else 0.

    Pairs that it does not judge are left out.

    Args:
        tastes: ``[len(records), d_z]``, for a selector that takes tastes.
    """
    asked, scores = scorer.scores(records, tastes)
    if not len(asked):
        return np.zeros(0)
    return (np.sign(leads(scores.astype(float), str(alignment.config.labels))) + 1) / 2


def clearest(labels: Sequence[LabelRow]) -> list[LabelRow]:
    """Return for each prompt the label with the largest margin, unless it is in the lowest quarter of all.

    Of equal margins, as those of judges are, the pair counts whose completions are the furthest apart in wins
    less defeats. The quarter is the scorer's own scale: log-odds of selectors and scores of judges have no
    common one.

    >>> pairs = ((0, "ab", 1), (0, "ac", 4), (1, "ab", 2), (1, "bc", 2), (1, "ac", 2), (2, "ab", 0))
    >>> labels = [{"index": k, "chosen": c, "rejected": r, "margin": m} for k, (c, r), m in pairs]
    >>> [(row["chosen"], row["rejected"], row["margin"]) for row in clearest(labels)]
    [('a', 'c', 4), ('a', 'c', 2)]
    """
    wins, best = Counter[tuple[int, str]](), dict[int, LabelRow]()
    for row in labels:
        wins[row["index"], row["chosen"]] += 1
        wins[row["index"], row["rejected"]] -= 1

    def clarity(row: LabelRow) -> tuple[float, int]:
        return row["margin"], wins[row["index"], row["chosen"]] - wins[row["index"], row["rejected"]]

    for row in labels:
        if row["index"] not in best or clarity(row) > clarity(best[row["index"]]):
            best[row["index"]] = row
    least = float(np.quantile([row["margin"] for row in labels], NEAR_TIES)) if labels else 0.0
    return [row for row in best.values() if row["margin"] >= least]


def records_of(pairs: Sequence[Candidates], prompts: Sequence[PromptRow]) -> list[Record]:
    """Return pairs of completions with their prompts."""
    return [
        Record(prompts[pair.prompt].prompt, *pair.texts, extra=dict(prompts[pair.prompt].extra))
        for pair in pairs
    ]


def _not_judged(alignment: Alignment) -> str:
    return "too_long" if alignment.judge is None else "failed"


def _judge(
    alignment: Alignment,
    generation: Generation,
    prompts: list[PromptRow],
    batches: list[list[Candidates]],
    done: int,
) -> None:
    """Append the scores of all batches but the first ``done`` to :data:`SCORES`."""
    path, name = generation.path(alignment, SCORES), generation.stage("labels")
    drawn, scorer = generation.tastes(alignment), generation.scorer(alignment)
    alignment.callback.on_stage_begin(name, done, len(batches))
    for number, batch in enumerate(batches[done:], done + 1):
        records = records_of(batch, prompts)
        asked, scores = scorer.scores(records, at_prompts(drawn, (pair.prompt for pair in batch)))
        column = {int(row): scores[:, k].astype(float).tolist() for k, row in enumerate(asked)}
        rows = [
            {"index": pair.prompt, "samples": pair.samples, "scores": column.get(row)}
            for row, pair in enumerate(batch)
        ]
        # A column of clients' votes is one client's.
        append(path, rows, mode=0o600 if alignment.config.labels == CLIENTS else 0o666)
        alignment.callback.on_stage_step(name, number, len(batches), {})


def leads(scores: NDArray[np.float64], rule: str) -> NDArray[np.float64]:
    """Return for each pair which response is chosen: above 0 the first, below 0 the second, 0 neither.

    The clients of a selector are a group. The rules except ``majority`` weigh the groups, as MaxMin-RLHF
    does for groups of annotators (Chakraborty et al. 2024, arXiv:2402.08925). A group gains 2 P − 1 from a
    label, where P is the probability that it prefers the chosen response.

    Args:
        scores: ``[U, n]`` log-odds by U selectors that the first response is better.
        rule: ``majority``; ``mean``, of the log-odds; ``minimum``, for each pair the response that the group
            most against it opposes least; ``adaptive``, Hedge over the pairs in their order: a group's weight
            is exp(−η times its gains so far), so that the mean gain of the worst group comes within
            η = √(2 ln U / n) of the largest possible one.

    >>> scores = np.array([[1.0, 1.0, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5], [-1.2, -1.2, -1.2, -1.2]])
    >>> [np.sign(leads(scores, rule)).tolist() for rule in ("majority", "mean", "minimum")]
    [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, -1.0]]
    >>> np.sign(leads(scores, "adaptive")).tolist()
    [1.0, -1.0, 1.0, -1.0]
    """
    if rule == "mean":
        return np.asarray(scores.mean(0))
    if rule == "minimum":
        return np.asarray(scores.min(0) + scores.max(0))
    if rule != "adaptive":
        return majority(scores)
    groups, pairs = scores.shape
    rate, gained, result = math.sqrt(2 * math.log(groups) / max(pairs, 1)), np.zeros(groups), np.zeros(pairs)
    for pair, gain in enumerate(np.tanh(scores.T / 2)):
        result[pair] = np.exp(-rate * (gained - gained.min())) @ gain
        gained += np.sign(result[pair]) * gain
    return result


def _labels(
    alignment: Alignment, generation: Generation, parts: Sequence[list[Candidates]], counts: dict[str, int]
) -> Iterator[LabelRow]:
    """Yield the labels of the first part that has any; pairs of later parts are counted as cut."""
    prompts, path = own_prompts(alignment), generation.path(alignment, SCORES)
    # Each request for noised votes is a release.
    released = alignment.privacy is not None and alignment.config.labels == CLIENTS
    sizes = [len(part) or 1 if released else BATCH for part in parts]
    batches = [
        [part[k : k + size] for k in range(0, len(part), size)]
        for part, size in zip(parts, sizes, strict=True)
    ]
    done = whole_batches(path, [len(batch) for part in batches for batch in part])
    found, judged = False, list[list[Candidates]]()
    for part, own in zip(parts, batches, strict=True):
        if found or not part:
            counts["cut"] += len(part)
            continue
        before, judged = sum(map(len, judged)), judged + own
        _judge(alignment, generation, prompts, judged, min(done, len(judged)))
        done = max(done, len(judged))
        scores = [row["scores"] for row in islice(rows_in(path), before, before + len(part))]
        for row in _labels_of(alignment, prompts, part, scores, counts):
            found = True
            yield row


def _labels_of(
    alignment: Alignment,
    prompts: list[PromptRow],
    pairs: list[Candidates],
    scores: list[list[float] | None],
    counts: dict[str, int],
) -> Iterator[LabelRow]:
    judged = [(pair, own) for pair, own in zip(pairs, scores, strict=True) if own is not None]
    counts[_not_judged(alignment)] += len(pairs) - len(judged)
    table = np.array([own for _, own in judged], np.float64)
    lead = leads(table.T, str(alignment.config.labels)) if judged else np.zeros(0)
    for (pair, own), sign in zip(judged, np.sign(lead).astype(int).tolist(), strict=True):
        if sign == 0:
            counts["ties"] += 1
            continue
        chosen, rejected = pair.texts[::sign]
        ended = pair.ended[::sign]
        if ended == (False, True):
            # It would teach the policy not to end.
            counts["cut"] += 1
            continue
        votes = [sum(sign * score > 0 for score in own), sum(sign * score < 0 for score in own)]
        counts["unanimous"] += votes[0] == len(own)
        yield {
            "prompt": plain_prompt(prompts[pair.prompt].prompt),
            "chosen": chosen,
            "rejected": rejected,
            "ended": ended,
            "votes": votes,
            "margin": sign * sum(own) / len(own),
            "index": pair.prompt,
        }


def _settings(alignment: Alignment) -> dict[str, Any]:
    labels, taste = alignment.config.labels, alignment.config.taste
    # An alignment of an older prefed, which kept all pairs, has no such setting.
    pairs = {} if alignment.config.pairs == "all" else {"pairs": alignment.config.pairs}
    return {"labels": labels, **pairs, **({} if taste is None else {"taste": taste})}


def stage(generation: Generation, selectors: str = "selectors") -> Stage:
    """Return the stage of a generation, whose labeller is the result of the stage or source ``selectors``."""
    inputs = ("prompts", generation.stage("completions"), selectors)
    work, parts = partial(_work, generation=generation), (generation.file(SCORES),)
    return Stage(generation.stage("labels"), inputs, _settings, (generation.file(FILE),), work, parts)


STAGE = stage(Generation())
