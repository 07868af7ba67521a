"""Local judges: a language model, a reward model, and the known utility of a synthetic dataset."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from prefed.align.judge.questions import JudgeError, Question, Verdict, blocks, by_score, get_template
from prefed.config.align import JudgeOptions
from prefed.core import Key
from prefed.core.text import did_you_mean, listed
from prefed.data import DataError, Message, Record, Template
from prefed.data.encoding import SCORING_DATE
from prefed.data.synthetic import ATTRIBUTES, Taste, attributes, utility
from prefed.models import ModelConfig, load_pretrained, make_backbone
from prefed.models.pretrained import find_device, placement
from prefed.train.generation import Sampling, complete
from prefed.train.reward_model import RewardModel, model_fingerprint

KEY, KIND = "--judge local", "causal language model"


class LocalJudge:
    """A causal language model that answers a template greedily.

    The question is the user's turn in the chat template of the tokenizer or, without one, uses the bare form
    of the template. A question that fills the context gives a verdict without a preference.

    Args:
        folder: a folder or a hub name.

    Raises:
        ModelError: there is no such model.
        DataError: the chat template of the tokenizer computes the format of a date.
        ValueError: there is no such template.
    """

    def __init__(self, folder: str, options: JudgeOptions) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._template = get_template(options.template, options.prefix)
        tokenizer = load_pretrained(AutoTokenizer, KEY, folder, "tokenizer")
        # "auto" keeps the dtype of the checkpoint.
        options_of_load = placement(find_device(options.device))
        model = load_pretrained(AutoModelForCausalLM, KEY, folder, KIND, dtype="auto", **options_of_load)
        config = ModelConfig.model_validate({"name": folder, "device": options.device, "lora": {"rank": 1}})
        self._backbone = make_backbone(model, tokenizer, config, Key(0))
        self._form = Template(tokenizer, today=SCORING_DATE)
        self._how = Sampling(max_tokens=options.judge_tokens, temperature=0)
        self.identity: Mapping[str, Any] = {
            "model": model_fingerprint(folder, KEY, KIND),
            "template": options.template,
            "judge_tokens": options.judge_tokens,
        }

    def compare(self, questions: Iterable[Question]) -> Iterator[Verdict]:
        """Yield a verdict for every question, in order."""
        backbone = self._backbone
        for question in questions:
            try:
                answer = complete(backbone, backbone.reference, self._tokens(question), self._how, Key(0))
            except DataError:  # the chat template is at fault, not the question
                raise
            except ValueError as error:
                yield Verdict(None, str(error))
                continue
            yield self._template.verdict(answer)

    def _tokens(self, question: Question) -> list[int]:
        text = self._template.render(question)
        if self._form.chat:
            return self._form.prompt_ids((Message("user", text),))
        return self._form.prompt_ids(self._template.bare.replace("{text}", text))


REWARD_KEY = "--judge reward"
BLOCK = 64
"""Questions per batch of responses."""


class RewardJudge:
    """Prefers the response with the higher score of a :class:`~prefed.train.reward_model.RewardModel`.

    Args:
        folder: a sequence classification model: a folder or a hub name.

    Raises:
        ModelError: there is no such model, or it is not a reward model.
    """

    def __init__(self, folder: str, options: JudgeOptions) -> None:
        self._model = RewardModel(folder, find_device(options.device), REWARD_KEY)
        self.identity: Mapping[str, Any] = {"model": model_fingerprint(folder, REWARD_KEY)}

    def compare(self, questions: Iterable[Question]) -> Iterator[Verdict]:
        """Yield a verdict for every question, in order; equal texts in a block are scored once."""
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
"""Name of the mean taste of all clients."""

_TOLERANCE = 1e-6


class UtilityJudge:
    """Prefers the response with the higher utility for a taste (:mod:`prefed.data.synthetic`)."""

    def __init__(self, taste: Taste) -> None:
        self._taste = taste
        self.identity: Mapping[str, Any] = {"taste": {name: float(w) for name, w in taste.weights.items()}}

    def compare(self, questions: Iterable[Question]) -> Iterator[Verdict]:
        """Yield a verdict for every question, in order."""
        for question in questions:
            first, second = (utility(text, self._taste) for text in (question.first, question.second))
            yield by_score(first, second, f"utility {first:g} against {second:g}")


def read_taste(name: str, records: Iterable[Record], flipped: Collection[str] = ()) -> Taste:
    """Solve for the taste of one client, or the mean over clients, from utilities in a synthetic dataset.

    A utility is the weighted sum of the signs of five attributes, so each response gives a linear equation
    for the weights.

    Args:
        name: a client, or ``"mean"``.
        records: pairs with ``utility_chosen`` and ``utility_rejected``.
        flipped: clients whose preferences the experiment reversed; their weights are negated.

    Raises:
        JudgeError: the records have no utilities, none of this client, or too few to determine its weights.
    """
    rows: dict[str, list[tuple[Sequence[int], float]]] = {}
    for record in records:
        utilities = [record.extra.get(column) for column in ("utility_chosen", "utility_rejected")]
        if record.client is None or not all(isinstance(value, int | float) for value in utilities):
            continue
        # A flipped pair has its responses swapped, but not its columns.
        sign = -1.0 if record.client in flipped else 1.0
        texts = (record.chosen, record.rejected)[:: int(sign)]
        for text, value in zip(texts, utilities, strict=True):
            signs = attributes(text)
            row = [signs.get(attribute, 0) for attribute in ATTRIBUTES]
            rows.setdefault(record.client, []).append((row, sign * float(value or 0)))
    if not rows:
        raise JudgeError(
            "--judge utility: the pairs of the run have no columns utility_chosen and utility_rejected; use "
            "a dataset made with prefed.data.synthetic"
        )
    names = sorted(rows) if name == MEAN else [name]
    if not set(names) <= set(rows):
        hint = did_you_mean(name, rows) or f"; use {MEAN}, or one of {listed(sorted(rows), str)}"
        raise JudgeError(f"--taste {name!r}: no such client in the data of the run{hint}")
    weights = np.mean([_weights(client, rows[client]) for client in names], axis=0)
    # Rounding removes the remainders of opposite tastes that cancel.
    return Taste(name, {a: round(float(w), 6) for a, w in zip(ATTRIBUTES, weights, strict=True)})


def _weights(client: str, rows: Sequence[tuple[Sequence[int], float]]) -> Any:
    signs, values = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    weights, _, rank, _ = np.linalg.lstsq(signs, values, rcond=None)
    if rank < len(ATTRIBUTES) or not np.allclose(signs @ weights, values, atol=_TOLERANCE):
        raise JudgeError(
            f"--judge utility: cannot determine the taste of {client!r}: too few pairs, or utilities that "
            "were not made with prefed.data.synthetic"
        )
    return weights
