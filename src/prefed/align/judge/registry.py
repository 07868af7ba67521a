"""Judges by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pydantic import Field

from prefed.align.judge.endpoint import URL, EndpointJudge
from prefed.align.judge.questions import Judge
from prefed.core.strict import StrictModel
from prefed.core.text import did_you_mean


class JudgeOptions(StrictModel):
    """What judges are given besides their name. Each takes those that it has a use for.

    Attributes:
        url: of an endpoint, up to and with ``/v1``.
        template: how a language model is asked, a name of :data:`~prefed.align.judge.questions.TEMPLATES`.
        judge_tokens: of a language model's answer at most.
        key_variable: the environment's variable with an endpoint's key.
        timeout: seconds to wait for an endpoint's answer.
        parallel: questions that an endpoint is asked at a time.
        taste: a client of a synthetic set, or ``"mean"``; of selectors with a latent taste, one that the
            server was told.
        device: where a model on this machine lives, as ``[model] device``.
    """

    url: str = URL
    template: str = "plain"
    judge_tokens: int = Field(1024, ge=1)
    key_variable: str = "OPENAI_API_KEY"
    timeout: float = Field(120.0, gt=0)
    parallel: int = Field(4, ge=1)
    taste: str = "mean"
    device: str = "auto"


def _reward(argument: str, options: JudgeOptions) -> Judge:
    from prefed.align.judge.local import RewardJudge
    from prefed.models.pretrained import find_device

    return RewardJudge(argument, find_device(options.device))


def _endpoint(argument: str, options: JudgeOptions) -> Judge:
    return EndpointJudge(
        argument,
        url=options.url,
        template=options.template,
        max_tokens=options.judge_tokens,
        key_variable=options.key_variable,
        timeout=options.timeout,
        parallel=options.parallel,
    )


def _local(argument: str, options: JudgeOptions) -> Judge:
    from prefed.align.judge.local import LocalJudge

    return LocalJudge(
        argument, template=options.template, max_tokens=options.judge_tokens, device=options.device
    )


JUDGES: Mapping[str, Callable[[str, JudgeOptions], Judge]] = {
    "reward": _reward,
    "endpoint": _endpoint,
    "local": _local,
}
"""Name → what makes the judge of its argument. Two more, of runs, are in :mod:`prefed.runs.judges`."""

ARGUMENTS: Mapping[str, str] = {
    "reward": "FOLDER",
    "endpoint": "MODEL",
    "local": "FOLDER",
    "selector": "RUN",
    "utility": "",
}
"""Name → its argument in ``NAME:ARGUMENT``; empty if it has none."""


def split_name(text: str) -> tuple[str, str]:
    """The name and the argument of a judge.

    Raises:
        ValueError: there is no such judge, or its argument is missing, or it has none.

    >>> split_name("endpoint:org/model:free"), split_name("utility")
    (('endpoint', 'org/model:free'), ('utility', ''))
    """
    name, _, argument = text.partition(":")
    known = ", ".join(f"{judge}:{what}" if what else judge for judge, what in ARGUMENTS.items())
    if name not in ARGUMENTS:
        raise ValueError(f"--judge {text!r}: the judges are {known}{did_you_mean(name, ARGUMENTS)}")
    if bool(argument) != bool(ARGUMENTS[name]):
        form = f"{name}:{ARGUMENTS[name]}" if ARGUMENTS[name] else name
        raise ValueError(f"--judge {text!r}: write it as {form}")
    return name, argument
