"""Frozen language models, and the trainable tensors of clients."""

from typing import TYPE_CHECKING

from prefed.core.lazy import attach

if TYPE_CHECKING:
    from prefed.models.adapter_files import load_client, save_adapter, save_client, save_merged
    from prefed.models.backbone import Backbone, load_backbone, make_backbone
    from prefed.models.config import LoraSettings, ModelConfig, VariationalSettings
    from prefed.models.pretrained import ModelError, load_causal, load_pretrained, load_tokenizer

__all__ = [
    "Backbone",
    "LoraSettings",
    "ModelConfig",
    "ModelError",
    "VariationalSettings",
    "load_backbone",
    "load_causal",
    "load_client",
    "load_pretrained",
    "load_tokenizer",
    "make_backbone",
    "save_adapter",
    "save_client",
    "save_merged",
]

attach(__name__, __file__)
