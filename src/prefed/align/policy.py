"""The policy at the start: the base model with the adapter of an earlier fine-tuning in its weights."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from prefed.align.errors import AlignError
from prefed.core import Key, Tensors, files
from prefed.models import Backbone, ModelConfig, load_causal, load_pretrained, make_backbone, save_adapter
from prefed.models.adapters import atomic_folder
from prefed.models.taste_map import TASTE_MAP
from prefed.train.trainer_factory import model_digest

FILE, FOLDER = "policy.json", "policy"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PLAIN, TASTING = frozenset({"lora"}), frozenset({"lora", TASTE_MAP})
"""The parts of a policy, and those of one that takes a taste."""
_PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Settings with which an adapter is BA on linear modules and nothing else."""


def load_base(model: ModelConfig, seed: int, adapter: Path | None, needs: frozenset[str] = PLAIN) -> Backbone:
    """A model with an adapter merged into its weights, and a LoRA that changes nothing yet over it.

    Args:
        adapter: a PEFT adapter's folder; ``None`` merges nothing.
        needs: its parts.

    Raises:
        ModelError: the model cannot be loaded.
        AlignError: the adapter does not fit the model.
    """
    from peft import PeftModel
    from transformers import AutoTokenizer

    tokenizer = load_pretrained(
        AutoTokenizer, "[model] name", model.name, "tokenizer", revision=model.revision
    )
    causal = load_causal(model)
    if adapter is not None and model.quantize is not None:
        raise AlignError(
            f"the adapter {adapter} cannot be merged into a model of 4 bits: leave quantize = "
            f"{model.quantize!r} out, or give a model that holds the fine-tuning already"
        )
    if adapter is not None:
        try:
            adapted = PeftModel.from_pretrained(causal, str(adapter))
            _untie(adapted)
            causal = adapted.merge_and_unload()
        except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
            # PyTorch has a line for each tensor.
            problem = "; ".join(line.strip() for line in str(error).splitlines()[:2])
            raise AlignError(
                f"the adapter {adapter} does not fit the model {model.name!r}: {problem}; give one that was "
                "trained on this model, or name its model in [align.model]"
            ) from error
    return make_backbone(causal, tokenizer, model, Key(seed).at("align").at("model"), needs)


def _untie(adapted: Any) -> None:
    """Part a tied head from input embeddings that have a LoRA: merging would change the head with them."""
    base = adapted.get_base_model()
    head, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
    if hasattr(embeddings, "lora_embedding_A") and head.weight is embeddings.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        base.config.tie_word_embeddings = False


def load_policy(model: ModelConfig, seed: int, folder: Path, needs: frozenset[str] = PLAIN) -> Backbone:
    """The policy that the stage ``policy`` left in an alignment's folder.

    Raises:
        AlignError: the model changed since.
    """
    adapter = folder / FOLDER
    backbone = load_base(model, seed, adapter if adapter.exists() else None, needs)
    if json.loads((folder / FILE).read_text("utf-8"))["model"] != model_digest(backbone):
        raise AlignError(
            f"the model {model.name!r} is not the one that stage policy in {folder} found; put it back, or "
            "do this stage and those after it again: --stage policy"
        )
    return backbone


def save_policy(tensors: Tensors, path: Path) -> None:
    """Write the tensors of a policy that takes a taste, by their names."""
    from safetensors.torch import save

    content = {name: value.cpu().clone() for name, value in tensors.items()}
    files.write(path, save(content, metadata={"format": "pt"}))


def read_policy(backbone: Backbone, path: Path) -> Tensors:
    """The tensors (full layout) that :func:`save_policy` wrote.

    Raises:
        AlignError: the file is missing or damaged, or its tensors are those of another model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(str(path))
        if {name: tuple(t.shape) for name, t in tensors.items()} != {
            entry.name: entry.shape for entry in backbone.layout.entries
        }:
            raise ValueError(f"its tensors are not those of a policy on {backbone.config.name!r}")
        return Tensors.gather(backbone.layout, tensors)
    except (OSError, ValueError, SafetensorError) as error:
        raise AlignError(f"{path}: no policy: {error}; do the stage again: --stage train") from error


def adapter_settings(folder: Path) -> Mapping[str, Any]:
    """The settings of an adapter that can be joined with another.

    Raises:
        AlignError: the folder holds none, or it is more than a plain LoRA.
    """
    try:
        settings: dict[str, Any] = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise AlignError(f"[align] sft: {folder} holds no PEFT adapter: {error}") from error
    if not (folder / WEIGHTS).exists():
        raise AlignError(f"[align] sft: {folder} has no {WEIGHTS}; save the adapter as safetensors")
    for name, value in _PLAIN.items():
        if settings.get(name, value) != value:
            raise AlignError(
                f"[align] sft: the adapter in {folder} has {name} = {settings[name]!r}, and only a plain "
                f"LoRA ({name} = {value!r}) can be a part of the aligned adapter; merge it into the model "
                "and give that as [align.model] name"
            )
    return settings


def save_over_start(
    backbone: Backbone, tensors: Tensors, start: Path, folder: Path, taste: torch.Tensor | None = None
) -> None:
    """Write ``tensors`` as one adapter for the base model, together with that of the policy at the start.

    With W + s₁B₁A₁ at the start and s₂B₂A₂ trained over it, the sum is W + [s₁B₁ s₂B₂][A₁; A₂]: a LoRA whose
    rank is the sum of both. A module that only one of the two adapts gets zeros in the place of the other.

    Args:
        start: an adapter's folder; if there is none, ``tensors`` alone are written.
        taste: ``[d_z]``, for a policy that takes one; see :func:`prefed.models.save_adapter`.
    """
    if not start.exists():
        save_adapter(backbone, tensors, folder, taste)
        return
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory(prefix="prefed-adapter-") as temporary:
        own = Path(temporary) / "adapter"
        save_adapter(backbone, tensors, own, taste)
        settings = json.loads((own / CONFIG).read_text("utf-8"))
        # A taste has a rank of its own, and nothing to be joined with.
        tasted = {n: t for n, t in load_file(str(own / WEIGHTS)).items() if ".lora_embedding_" in n}
        parts = []
        for place, about in ((start, adapter_settings(start)), (own, settings)):
            factors = {n: t for n, t in load_file(str(place / WEIGHTS)).items() if n not in tasted}
            rank = int(about["r"])
            root = rank**0.5 if about.get("use_rslora") else rank
            parts.append((factors, rank, float(about["lora_alpha"]) / root))
        joined, modules = _join(parts)
        joined |= tasted
        settings["target_modules"] = [*modules, *settings["rank_pattern"]]
        settings["r"] = settings["lora_alpha"] = sum(rank for _, rank, _ in parts)
        with atomic_folder(folder) as partial:
            for item in own.iterdir():
                shutil.copyfile(item, partial / item.name)
            (partial / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", "utf-8")
            save_file(joined, str(partial / WEIGHTS), metadata={"format": "pt"})


def _join(
    parts: list[tuple[dict[str, torch.Tensor], int, float]],
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Both factors of every module, side by side; and the modules' paths, sorted."""
    stems = sorted({name.rpartition(".lora_")[0] for tensors, _, _ in parts for name in tensors})
    joined: dict[str, torch.Tensor] = {}
    for stem in stems:
        a_name, b_name = f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"
        shapes = next((t[a_name].shape[1], t[b_name].shape[0]) for t, _, _ in parts if a_name in t)
        a, b = [], []
        for tensors, rank, scaling in parts:
            zeros = torch.zeros(rank, shapes[0]), torch.zeros(shapes[1], rank)
            a.append(tensors.get(a_name, zeros[0]).float())
            b.append(scaling * tensors.get(b_name, zeros[1]).float())
        joined[a_name], joined[b_name] = torch.cat(a).contiguous(), torch.cat(b, 1).contiguous()
    return joined, [stem.removeprefix("base_model.model.") for stem in stems]
