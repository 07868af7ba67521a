"""Judges on this machine: a language model, a reward model, and the known utility of a synthetic set."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from prefed.align.judge.questions import (
    JudgeError,
    JudgeOptions,
    Question,
    Verdict,
    blocks,
    by_score,
    get_template,
)
from prefed.core import Key
from prefed.core.text import did_you_mean
from prefed.data import Record
from prefed.data.synthetic import ATTRIBUTES, Taste, attributes, utility
from prefed.models import ModelConfig, load_pretrained, make_backbone
from prefed.models.pretrained import find_device
from prefed.train.generation import Sampling, complete
from prefed.train.rewards import RewardModel, model_fingerprint

KEY, KIND = "--judge local", "causal language model"


class LocalJudge:
    """A causal language model that answers a template, always taking the most likely token.

    The question is a user's turn in the tokenizer's chat template; without one it takes the template's bare
    form. A question that fills the model's window is a verdict without a preference.

    Args:
        folder: a folder or a hub name.

    Raises:
        ModelError: there is no such model.
        ValueError: there is no such template.
    """

    def __init__(self, folder: str, options: JudgeOptions) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._template = get_template(options.template)
        tokenizer = load_pretrained(AutoTokenizer, KEY, folder, "tokenizer")
        # With "auto" a large model keeps the type in which it is stored.
        model = load_pretrained(AutoModelForCausalLM, KEY, folder, KIND, dtype="auto")
        config = ModelConfig.model_validate({"name": folder, "device": options.device, "lora": {"rank": 1}})
        self._backbone = make_backbone(model, tokenizer, config, Key(0))
        self._how = Sampling(max_tokens=options.judge_tokens, temperature=0)
        self.identity: Mapping[str, Any] = {
            "model": model_fingerprint(folder, KEY, KIND),
            "template": options.template,
            "judge_tokens": options.judge_tokens,
        }

    def compare(self, questions: Iterable[Question]) -> Iterator[Verdict]:
        """A verdict for every question, in their order."""
        backbone = self._backbone
        for question in questions:
            try:
                answer = complete(backbone, backbone.reference, self._tokens(question), self._how, Key(0))
            except ValueError as error:
                yield Verdict(None, str(error))
                continue
            yield self._template.verdict(answer)

    def _tokens(self, question: Question) -> list[int]:
        tokenizer, text = self._backbone.tokenizer, self._template.render(question)
        if not tokenizer.chat_template:
            return list(tokenizer(self._template.bare.replace("{text}", text), verbose=False)["input_ids"])
        turn = [{"role": "user", "content": text}]
        whole = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"])


REWARD_KEY = "--judge reward"
BLOCK = 64
"""Questions whose responses are scored together."""


class RewardJudge:
    """The response with the higher reward is the better one.

    Texts are joined as for :class:`~prefed.train.rewards.RewardModel`.

    Args:
        folder: a sequence classification model: a folder or a hub name.

    Raises:
        ModelError: there is no such model, or it is no reward model.
    """

    def __init__(self, folder: str, options: JudgeOptions) -> None:
        self._model = RewardModel(folder, find_device(options.device), REWARD_KEY)
        self.identity: Mapping[str, Any] = {"model": model_fingerprint(folder, REWARD_KEY)}

    def compare(self, questions: Iterable[Question]) -> Iterator[Verdict]:
        """A verdict for every question, block by block; a text that a block has twice is scored once."""
        for block in blocks(questions, BLOCK):
            encoded: dict[Any, dict[str, list[int]]] = {}
            for question in block:
                texts = question.first, question.second
                codes = self._model.encode(question.prompt, *texts)
                for text, code in zip(texts, codes, strict=True):
                    encoded.setdefault((question.prompt, text), code)
            scores = self._model.score(list(encoded.values()))
            rewards = dict(zip(encoded, map(float, scores), strict=True))
            for question in block:
                pair = [rewards[question.prompt, text] for text in (question.first, question.second)]
                if np.isfinite(pair).all():
                    yield by_score(pair[0], pair[1], f"reward {pair[0]:.6g} against {pair[1]:.6g}")
                else:
                    yield Verdict(None, f"a reward is not finite: {pair[0]} and {pair[1]}")


MEAN = "mean"
"""Names the mean taste of all clients."""

_TOLERANCE = 1e-6


class UtilityJudge:
    """The response with the larger utility to a taste is the better one (:mod:`prefed.data.synthetic`)."""

    def __init__(self, taste: Taste) -> None:
        self._taste = taste
        self.identity: Mapping[str, Any] = {"taste": {name: float(w) for name, w in taste.weights.items()}}

    def compare(self, questions: Iterable[Question]) -> Iterator[Verdict]:
        """A verdict for every question, in their order."""
        for question in questions:
            first, second = (utility(text, self._taste) for text in (question.first, question.second))
            yield by_score(first, second, f"utility {first:g} against {second:g}")


def read_taste(name: str, records: Iterable[Record], flipped: Collection[str] = ()) -> Taste:
    """The taste of one client, or the clients' mean, from the utilities that a synthetic set's rows have.

    A utility is the weighted sum of the signs of five attributes. So a client's weights are the solution of
    linear equations, one for each response.

    Args:
        name: a client, or ``"mean"``.
        records: pairs of the set, with ``utility_chosen`` and ``utility_rejected``.
        flipped: clients whose preferences the experiment reversed. Their taste is the opposite one.

    Raises:
        JudgeError: the records have no utilities, none of that client, or too few to determine its weights.
    """
    rows: dict[str, list[tuple[Sequence[int], float]]] = {}
    for record in records:
        utilities = [record.extra.get(column) for column in ("utility_chosen", "utility_rejected")]
        if record.client is None or not all(isinstance(value, int | float) for value in utilities):
            continue
        # A turned pair has its responses swapped, but not its columns.
        sign = -1.0 if record.client in flipped else 1.0
        texts = (record.chosen, record.rejected)[:: int(sign)]
        for text, value in zip(texts, utilities, strict=True):
            signs = attributes(text)
            row = [signs.get(attribute, 0) for attribute in ATTRIBUTES]
            rows.setdefault(record.client, []).append((row, sign * float(value or 0)))
    if not rows:
        raise JudgeError(
            "--judge utility: the run's pairs have no client with the columns utility_chosen and "
            "utility_rejected; only those of prefed.data.synthetic do"
        )
    names = sorted(rows) if name == MEAN else [name]
    if not set(names) <= set(rows):
        raise JudgeError(
            f"--taste {name!r}: no client of the run's data{did_you_mean(name, rows)}; the clients are "
            f"{', '.join(sorted(rows)[:8])}, and {MEAN} is the mean of all"
        )
    weights = np.mean([_weights(client, rows[client]) for client in names], axis=0)
    # Opposite tastes cancel; what rounding leaves of them is no taste.
    return Taste(name, {a: round(float(w), 6) for a, w in zip(ATTRIBUTES, weights, strict=True)})


def _weights(client: str, rows: Sequence[tuple[Sequence[int], float]]) -> Any:
    signs, values = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    weights, _, rank, _ = np.linalg.lstsq(signs, values, rcond=None)
    if rank < len(ATTRIBUTES) or not np.allclose(signs @ weights, values, atol=_TOLERANCE):
        raise JudgeError(
            f"--judge utility: the utilities of {client!r} are not those of prefed.data.synthetic, or are "
            "too few to determine its taste"
        )
    return weights
