"""A language model on this machine as a judge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prefed.align.judge.base import Question, Verdict
from prefed.align.judge.templates import get_template
from prefed.core import Key
from prefed.models import ModelConfig, load_pretrained, make_backbone
from prefed.train.generation import Sampling, complete
from prefed.train.rewards import model_fingerprint

KEY, KIND = "--judge local", "causal language model"


class LocalJudge:
    """A causal language model that answers a template, taking the likeliest token each time.

    The question is a user's turn in the tokenizer's chat template; without one it takes the template's bare
    form. A question that fills the model's window is a verdict without a preference.

    Args:
        folder: a folder or a hub name.
        template: a name of :data:`~prefed.align.judge.templates.TEMPLATES`.
        max_tokens: of an answer.
        device: as ``[model] device``.

    Raises:
        ModelError: there is no such model.
        ValueError: there is no such template.
    """

    def __init__(
        self, folder: str, *, template: str = "plain", max_tokens: int = 1024, device: str = "auto"
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._template = get_template(template)
        tokenizer = load_pretrained(AutoTokenizer, KEY, folder, "tokenizer")
        # With "auto" a large model keeps the type in which it is stored.
        model = load_pretrained(AutoModelForCausalLM, KEY, folder, KIND, dtype="auto")
        config = ModelConfig.model_validate({"name": folder, "device": device, "lora": {"rank": 1}})
        self._backbone = make_backbone(model, tokenizer, config, Key(0))
        self._how = Sampling(max_tokens=max_tokens, temperature=0)
        self.identity: Mapping[str, Any] = {
            "model": model_fingerprint(folder, KEY, KIND),
            "template": template,
            "judge_tokens": max_tokens,
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
