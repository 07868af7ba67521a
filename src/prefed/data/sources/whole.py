"""Pairs whose texts are scored as a whole, prompt and response, and may lose their beginning.

Distributed DPO (arXiv:2605.20696), E.1: the last 300 characters of each branch of a dialogue are all that its
model reads, and its code scores every token of them.
"""

from __future__ import annotations

from prefed.data.record import Prompt
from prefed.data.templates import dialogue


def whole_texts(prompt: Prompt, responses: tuple[str, str], tail: int | None) -> tuple[str, str]:
    r"""Prompt and response as one text, for each response; of a conversation in the Human/Assistant form.

    Args:
        tail: keep so many characters of each, its last ones; ``None``: all.

    >>> whole_texts("\n\nHuman: Hi\n\nAssistant:", (" Hello", " Hey"), 10)
    ('ant: Hello', 'stant: Hey')
    """
    start = prompt if isinstance(prompt, str) else dialogue(prompt)
    apart = "" if isinstance(prompt, str) else " "
    chosen, rejected = (
        start + (response if response[:1].isspace() else apart + response) for response in responses
    )
    return (chosen, rejected) if tail is None else (chosen[-tail:], rejected[-tail:])
