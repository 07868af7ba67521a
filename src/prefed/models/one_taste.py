"""A policy that takes a taste, as files for other tools hold it: at one taste."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prefed.models.backbone import Backbone
from prefed.models.pretrained import ModelError
from prefed.models.taste_map import TASTE_MAP


@dataclass(frozen=True)
class OneTaste:
    """What a taste adds to every row of the input embeddings' weight.

    Attributes:
        path: of the input embeddings in the model.
        row: ``[d]`` e(z), over the scale by which the embedding module multiplies its weight. PEFT multiplies
            a LoRA on it by the same scale.
    """

    path: str
    row: torch.Tensor

    @staticmethod
    def of(backbone: Backbone, taste: torch.Tensor | None) -> OneTaste | None:
        """``taste`` ``[d_z]`` in the model as it is loaded; ``None`` for a model that takes none.

        Raises:
            ModelError: a taste is missing or cannot be taken; or other tools could not read the result.
        """
        taste_map = backbone.taste_map
        if taste_map is None:
            if taste is not None:
                raise ModelError(f"a taste is given, and the model has no part {TASTE_MAP!r} to take it")
            return None
        elsewhere = "or export a client's folder, which holds the policy for all tastes"
        if taste is None:
            raise ModelError(
                f"this policy takes a taste, and what other tools read is for one: give a taste, {elsewhere}"
            )
        embeddings = taste_map.embeddings
        if not isinstance(embeddings, torch.nn.Embedding):
            kind = type(embeddings).__name__
            raise ModelError(
                f"PEFT has no LoRA for input embeddings of the kind {kind}: take another model, {elsewhere}"
            )
        path = next(name for name, module in backbone.causal.named_modules() if module is embeddings)
        row = taste_map(taste).detach().cpu() / float(getattr(embeddings, "embed_scale", 1.0))
        if not bool(torch.isfinite(row).all()):
            raise ModelError(
                "at this taste the policy is not finite: its training diverged, or z is no number"
            )
        return OneTaste(path, row)
