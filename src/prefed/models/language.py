"""What is asked of a model: that it is causal, and how long a sequence it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from prefed.models.pretrained import ModelError, brief

PROBE = 4
"""Tokens of the sequence that a model is checked with."""


def check_language_model(model: Any, name: str) -> None:
    """Refuse a model whose logits at a token depend on later tokens, or that needs more than token ids.

    A response's log-probabilities would otherwise be conditioned on the response itself. What is checked is
    the gradient of earlier logits in the embedding of the last token. In a causal model it is exactly zero,
    whatever the dtype; a change of the token itself can change other tokens' logits by rounding.

    Args:
        model: the model on its device, in evaluation mode.
        name: its name, for messages.

    Raises:
        ModelError: it is not causal, or it cannot read the probe.
    """
    embedded: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # some models add to it in place

    try:
        embeddings = model.get_input_embeddings()
        device = next(embeddings.parameters()).device
        ids = torch.arange(1, PROBE + 1, device=device)[None]
        hook = embeddings.register_forward_hook(keep)
        try:
            with torch.enable_grad():
                logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
                earlier = logits[0, : PROBE - 1].float().logsumexp(-1).sum()
                gradients = torch.autograd.grad(earlier, embedded)
        finally:
            hook.remove()
    except Exception as error:  # code of some two hundred architectures
        raise ModelError(
            f"[model] name = {name!r}: a model of type {model.config.model_type!r} does not read text alone: "
            f"{brief(error)}; take a causal language model"
        ) from error
    if any(bool(gradient[..., -1, :].any()) for gradient in gradients):
        raise ModelError(
            f"[model] name = {name!r} is not causal: its logits at a token depend on later tokens, so it "
            "sees the tokens that it is to predict; take a causal language model (for BERT-like models, "
            "one with is_decoder = true in config.json)"
        )


def text_config(config: Any) -> Any:
    """The language model's part of a configuration, which may be all of it."""
    return config.get_text_config(decoder=True)


def head_width(causal: Any) -> int:
    """Numbers of a hidden state as the head reads it; OPT-350m projects it to fewer than its blocks have."""
    width: int = causal.get_output_embeddings().weight.shape[1]
    return width


def window(config: Any) -> int | None:
    """The most tokens of a sequence that a configuration has positions for; ``None`` if it does not say.

    With LongRoPE these are the tokens of the original context, see :func:`stretches`.
    """
    text = text_config(config)
    known = [getattr(text, "max_position_embeddings", None)]
    known += [r.get("original_max_position_embeddings") for r in _rope(text) if r["rope_type"] == "longrope"]
    return min((length for length in known if length is not None), default=None)


def stretches(config: Any) -> bool:
    """Whether sequences longer than :func:`window` go through the model as shorter ones do.

    That needs rotary positions with fixed frequencies. With LongRoPE and dynamic NTK scaling the longest
    sequence of a batch changes the positions of all, so policy and reference could be different models.
    """
    text = text_config(config)
    kinds = [rope["rope_type"] for rope in _rope(text)]
    return bool(kinds) and not any(kind == "longrope" or "dynamic" in kind for kind in kinds)


def _rope(text: Any) -> Iterator[dict[str, Any]]:
    """The rotary settings of a text configuration, which may be several by type of layer."""
    rope = getattr(text, "rope_parameters", None) or {}
    for each in [rope] if "rope_type" in rope else rope.values():
        if isinstance(each, dict) and "rope_type" in each:
            yield each
