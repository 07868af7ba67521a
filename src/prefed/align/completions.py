"""Stage ``completions``: the initial policy generates several completions of each prompt.

There is one such stage per generation: the current policy completes each prompt, if it takes tastes with the
one drawn for the prompt. Held-out prompts are completed only in the first generation.

Completions come from :func:`~prefed.train.generation.complete_batch`, or from a server, whose numbers prefed
does not control: with the same settings, it may give others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from prefed.align.alignment import Alignment
from prefed.align.judge.endpoint import Answer, Endpoint, NoAnswerError
from prefed.align.policy import FOLDER, AlignError
from prefed.align.prompts_and_policy import own_prompts
from prefed.align.stages import Figures, Stage, append, rows_in, whole_batches
from prefed.align.tastes import TASTES, Generation, at_prompts, held_out_prompts, policy_before
from prefed.config import AlignConfig, EndpointConfig
from prefed.core import Key, files
from prefed.data import Prompt
from prefed.data.encoding import continuation_text
from prefed.data.record import plain_prompt
from prefed.data.tokens import prompt_hash
from prefed.train.generation import Sampling, complete_batch, padded_batches

FILE, LIMIT = "completions.jsonl", "limit.json"
LONGEST, MEASURED, ENDING = 512, 16, 0.9
"""Largest measured limit of tokens, the prompts that it is measured on, and the share that should end."""


def endpoint_of(config: EndpointConfig) -> Endpoint:
    """Return the client of a server that generates completions.

    Raises:
        JudgeError: as :class:`~prefed.align.judge.endpoint.Endpoint`.
    """
    return Endpoint(config.model, config, setting="[align.endpoint]", prefix="[align.endpoint] ")


def _from_endpoint(
    alignment: Alignment, server: EndpointConfig, how: Sampling
) -> Callable[[Sequence[tuple[Prompt, Key]]], list[Answer]]:
    """Return a function that lets a server complete prompts."""
    endpoint, template = endpoint_of(server), alignment.template
    if server.load_adapter:
        endpoint.load_adapter(alignment.folder / FOLDER)

    def ask(wanted: tuple[Prompt, Key]) -> Answer:
        prompt, key = wanted
        try:
            # With one seed for all requests, a server could repeat a completion.
            return endpoint.respond(prompt, template, how, key.number())
        except NoAnswerError as error:
            raise AlignError(
                f"{server.url} did not complete {plain_prompt(prompt)!r:.200}: {error}"
            ) from None

    return lambda batch: list(endpoint.map(ask, batch))


def _work(alignment: Alignment, generation: Generation) -> Figures:
    config, prompts, policy = alignment.config, own_prompts(alignment), alignment.policy
    hashes = [prompt_hash(own.prompt) for own in prompts]
    left_out = held_out_prompts(alignment) if generation.before else frozenset[int]()
    numbers = [number for number in range(len(prompts)) if number not in left_out]
    path = generation.path(alignment, FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn, tensors = None, policy_before(alignment, generation)
    if config.tastes is not None:
        drawn = generation.draw_tastes(alignment, [(number, hashes[number]) for number in numbers])
    ids = [alignment.template.prompt_ids(own.prompt) for own in prompts]
    # Training appends the end-of-text token to a completion.
    most = limit(alignment)
    room = _longest(alignment) - most - 1

    wanted = [
        (number, sample)
        for number in numbers
        if len(ids[number]) <= room
        for sample in range(config.completions)
    ]
    if not wanted:
        raise AlignError(
            f"every prompt has more than {room} tokens, the limit with align.max_new_tokens = "
            f"{most}: lower it, or raise data.max_length"
        )
    sequences = [ids[number] for number, _ in wanted]
    how = _sampling(config, most)
    batches = padded_batches(policy, sequences, how, config.generate)
    done = whole_batches(path, map(len, batches))
    name, key = generation.stage("completions"), generation.key(alignment)
    server = config.endpoint
    remote = None if server is None or done == len(batches) else _from_endpoint(alignment, server, how)
    started, tokens, finished = time.perf_counter(), 0, sum(map(len, batches[:done]))
    alignment.callback.on_stage_begin(name, finished, len(wanted))
    for batch in batches[done:]:
        keys = [
            key.at("prompt", hashes[number]).at("sample", sample)
            for number, sample in (wanted[place] for place in batch)
        ]
        if remote is not None:
            answers = remote(
                [(prompts[wanted[place][0]].prompt, key) for place, key in zip(batch, keys, strict=True)]
            )
            counts = [
                len(policy.tokenizer(answer.text, add_special_tokens=False)["input_ids"])
                for answer in answers
            ]
        else:
            responses = complete_batch(
                policy,
                tensors,
                [sequences[place] for place in batch],
                how,
                keys,
                tastes=at_prompts(drawn, (wanted[place][0] for place in batch)),
            )
            answers = [
                Answer(continuation_text(policy.tokenizer, sequences[place], response.tokens), response.ended)
                for place, response in zip(batch, responses, strict=True)
            ]
            counts = [len(response.tokens) for response in responses]
        rows = []
        for place, answer, count in zip(batch, answers, counts, strict=True):
            number, sample = wanted[place]
            rows.append(
                {
                    "prompt": plain_prompt(prompts[number].prompt),
                    "completion": answer.text,
                    "ended": answer.ended,
                    "index": number,
                    "sample": sample,
                    "tokens": count,
                }
            )
        append(path, rows)
        tokens, finished = tokens + sum(counts), finished + len(batch)
        rate = tokens / max(time.perf_counter() - started, 1e-9)
        alignment.callback.on_stage_step(name, finished, len(wanted), {"tokens_per_second": rate})
    seconds = max(time.perf_counter() - started, 1e-9)
    written = list(rows_in(path))
    # An older prefed did not record whether a completion ended.
    cut = sum(not row.get("ended", True) for row in written)
    if 2 * cut > len(written):
        alignment.callback.on_warning(
            f"{cut:,} of {len(written):,} completions were cut at align.max_new_tokens = {most}: "
            "selectors judge only their beginnings, and the policy hardly learns "
            "to end; raise it"
        )
    return {
        "completions": len(wanted),
        "cut": cut,
        "max_new_tokens": most,
        "tokens": sum(row["tokens"] for row in written),
        "too_long": sum(len(ids[number]) > room for number in numbers),
        "tokens_per_second": tokens / seconds,
        **({} if server is None else {"model": server.model, "url": server.url, "bit_reproducible": False}),
    }


def limit(alignment: Alignment) -> int:
    """Return the maximum number of tokens in a completion, which is measured unless it is set.

    The initial policy completes the first prompts, and the measured limit lets nine in ten of these
    completions end. If fewer end at all, it is the largest limit that leaves room for their prompts.
    """
    config, path = alignment.config, alignment.folder / LIMIT
    if config.max_new_tokens is not None:
        return config.max_new_tokens
    if path.exists():
        return int(json.loads(path.read_bytes())["max_new_tokens"])
    policy, prompts = alignment.policy, own_prompts(alignment)[:MEASURED]
    ids = [alignment.template.prompt_ids(own.prompt) for own in prompts]
    most = max(1, min(LONGEST, _longest(alignment) - 1 - max(map(len, ids))))
    if config.endpoint is None:
        how, key, lengths = _sampling(config, most), alignment.key.at("limit"), list[int]()
        for batch in padded_batches(policy, ids, how, config.generate):
            keys = [key.at("prompt", place) for place in batch]
            asked = [ids[place] for place in batch]
            for response in complete_batch(policy, alignment.start, asked, how, keys):
                lengths.append(len(response.tokens) if response.ended else most)
        most = max(1, int(np.quantile(lengths, ENDING, method="inverted_cdf")))
    files.write(path, json.dumps({"max_new_tokens": most}).encode())
    return most


def _sampling(config: AlignConfig, most: int) -> Sampling:
    return Sampling(max_tokens=most, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k)


def _longest(alignment: Alignment) -> int:
    return min(alignment.data.max_length, alignment.policy.window or alignment.data.max_length)


_ASKED = {"model", "url", "load_adapter"}
"""Settings of an endpoint that its completions depend on."""


def _settings(alignment: Alignment) -> dict[str, Any]:
    config, data = alignment.config, alignment.data
    tastes = {} if config.tastes is None else {"tastes": config.tastes}
    names = ("completions", "max_new_tokens", "temperature", "top_p", "top_k", "generate")
    return {
        **{name: getattr(config, name) for name in names},
        **tastes,
        **({} if config.endpoint is None else {"endpoint": config.endpoint.model_dump(include=_ASKED)}),
        "seed": alignment.seed,
        "template": data.template,
        "max_length": data.max_length,
    }


def stage(generation: Generation, tasting: bool = False) -> Stage:
    """Return the stage of a generation, with a taste drawn for each prompt if ``tasting``."""
    return Stage(
        generation.stage("completions"),
        ("prompts", "policy", *(("tastes",) if tasting else ()), *generation.inputs),
        _settings,
        (*((generation.file(TASTES),) if tasting else ()), generation.file(FILE)),
        partial(_work, generation=generation),
        () if generation.before else (LIMIT,),
    )


STAGE = stage(Generation())
