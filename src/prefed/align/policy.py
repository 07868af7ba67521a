"""The policy: loading the base model with an earlier adapter, saving it, and training it by epochs.

The state stored after each epoch allows a stopped training to continue bit for bit.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from prefed.core import (
    Callback,
    Key,
    Moments,
    Objective,
    Optimizer,
    Owner,
    Ownership,
    Phase,
    Plain,
    State,
    Tensors,
    files,
)
from prefed.core.text import listed
from prefed.core.wire import decode_state, encode
from prefed.models import Backbone, ModelConfig, load_causal, load_tokenizer, make_backbone, save_adapter
from prefed.models.adapter_files import atomic_folder
from prefed.models.backbone import model_digest
from prefed.models.config import TASTE_MAP
from prefed.models.pretrained import check_finite
from prefed.train import PairTrainer
from prefed.train.pair_cache import Rows

FILE, FOLDER = "policy.json", "policy"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PLAIN, TASTING = frozenset({"lora"}), frozenset({"lora", TASTE_MAP})
"""The trainable parts of a policy, and of one that takes tastes."""
_PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""PEFT settings of a plain LoRA."""


class AlignError(ValueError):
    """An alignment cannot continue."""


def load_base(model: ModelConfig, seed: int, adapter: Path | None, needs: frozenset[str] = PLAIN) -> Backbone:
    """Load a model, merge an adapter into its weights, and add a LoRA with initial values.

    Args:
        adapter: the folder of a PEFT adapter, if any.
        needs: the trainable parts.

    Raises:
        ModelError: the model cannot be loaded.
        AlignError: the adapter does not fit the model.
    """
    from peft import PeftModel
    from safetensors import SafetensorError

    tokenizer = load_tokenizer(model)
    causal = load_causal(model)
    if adapter is not None and model.quantize is not None:
        raise AlignError(
            f"the adapter {adapter} cannot be merged into a 4-bit model: leave out quantize = "
            f"{model.quantize!r}, or use a model that is already fine-tuned"
        )
    if adapter is not None:
        try:
            adapted = PeftModel.from_pretrained(causal, str(adapter))
            # from_pretrained only warns of missing factors, and says nothing of those that it does not read.
            result = adapted.load_adapter(str(adapter), "default")
            if wrong := sorted({*result.missing_keys, *result.unexpected_keys}):
                raise ValueError(f"missing or unknown tensors: {listed(wrong, str, 3)}")
            _untie(adapted)
            causal = adapted.merge_and_unload()
            check_finite(dict(causal.named_parameters()), f"the adapter {adapter}")
        except (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError) as error:
            # PyTorch prints one line per tensor.
            problem = "; ".join(line.strip() for line in str(error).splitlines()[:2])
            raise AlignError(
                f"the adapter {adapter} does not fit the model {model.name!r}: {problem}; use one that was "
                "trained on this model, or set its model in [align.model]"
            ) from error
    return make_backbone(causal, tokenizer, model, Key(seed).at("align").at("model"), needs)


def _untie(adapted: Any) -> None:
    """Untie the head from input embeddings with a LoRA, since merging would change the head too."""
    base = adapted.get_base_model()
    head, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
    if hasattr(embeddings, "lora_embedding_A") and head.weight is embeddings.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        base.config.tie_word_embeddings = False


def load_policy(model: ModelConfig, seed: int, folder: Path, needs: frozenset[str] = PLAIN) -> Backbone:
    """Load the policy that the stage ``policy`` wrote to the folder of an alignment.

    Raises:
        AlignError: the base model changed.
    """
    adapter = folder / FOLDER
    backbone = load_base(model, seed, adapter if adapter.exists() else None, needs)
    if json.loads((folder / FILE).read_text("utf-8"))["model"] != model_digest(backbone):
        raise AlignError(
            f"the model {model.name!r} changed after stage policy in {folder}; restore it, or run this stage "
            "and all later ones again: --stage policy"
        )
    return backbone


def save_policy(tensors: Tensors, path: Path) -> None:
    """Write the tensors of a policy that takes tastes, by their names."""
    from safetensors.torch import save

    content = {name: value.cpu().clone() for name, value in tensors.items()}
    files.write(path, save(content, metadata={"format": "pt"}))


def read_policy(backbone: Backbone, path: Path) -> Tensors:
    """Read the tensors (full layout) that :func:`save_policy` wrote.

    Raises:
        AlignError: the file is missing or damaged, or its tensors belong to another model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(str(path))
        if {name: tuple(t.shape) for name, t in tensors.items()} != {
            entry.name: entry.shape for entry in backbone.layout.entries
        }:
            raise ValueError(f"its tensors do not fit {backbone.config.name!r}")
        return Tensors.gather(backbone.layout, tensors)
    except (OSError, ValueError, SafetensorError) as error:
        raise AlignError(
            f"cannot read the policy {path}: {error}; run the stage again: --stage train"
        ) from error


def adapter_settings(folder: Path) -> Mapping[str, Any]:
    """Read the settings of an adapter, which must be a plain LoRA.

    Raises:
        AlignError: the folder has no adapter, or not a plain LoRA.
    """
    try:
        settings: dict[str, Any] = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise AlignError(f"[align] sft: {folder} is not a PEFT adapter: {error}") from error
    if not (folder / WEIGHTS).exists():
        raise AlignError(f"[align] sft: {folder} has no {WEIGHTS}; save the adapter as safetensors")
    for name, value in _PLAIN.items():
        if settings.get(name, value) != value:
            raise AlignError(
                f"[align] sft: the adapter in {folder} has {name} = {settings[name]!r}, but only plain LoRA "
                f"({name} = {value!r}) is supported; merge the adapter into its model, and set this model as "
                "[align.model] name"
            )
    return settings


def copy_adapter(source: Path, folder: Path) -> None:
    """Copy the files of an adapter to another folder."""
    with atomic_folder(folder) as partial:
        for item in sorted(source.iterdir()):
            shutil.copyfile(item, partial / item.name)


def save_over_start(
    backbone: Backbone, tensors: Tensors, start: Path, folder: Path, taste: torch.Tensor | None = None
) -> None:
    """Write ``tensors``, joined with the adapter of the initial policy, as one adapter for the base model.

    An initial W + s₁B₁A₁ plus a trained s₂B₂A₂ is W + [s₁B₁ s₂B₂][A₁; A₂]: a LoRA whose rank is the sum of
    both ranks. For a module in only one adapter, the other part is zero.

    Args:
        start: the folder of the initial adapter; if it does not exist, only ``tensors`` are written.
        taste: ``[d_z]``, for a policy that takes tastes; see :func:`prefed.models.save_adapter`.
    """
    if not start.exists():
        save_adapter(backbone, tensors, folder, taste)
        return
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory(prefix="prefed-adapter-") as temporary:
        own = Path(temporary) / "adapter"
        save_adapter(backbone, tensors, own, taste)
        settings = json.loads((own / CONFIG).read_text("utf-8"))
        # The LoRA for the taste has a different rank, and the initial adapter has no such part.
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
    """Concatenate the factors of each module; also return the sorted paths of the modules."""
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


_MOMENTS = "moments."
"""Prefix of the groups with the optimiser state."""

Measure = Callable[[int, Tensors], Mapping[str, Plain]]
"""Called with the number of an epoch and the tensors after it; returns metrics."""


@dataclass(frozen=True)
class Training:
    """Settings of a training on the server.

    Attributes:
        stage: the name of the stage, for callbacks and messages.
        rows: rows of the pairs in the trainer's token set.
        state: the file to write after each epoch.
        remedy: for the error message if training diverges.
        steps: steps per epoch; ``None`` for one pass over the rows.
        before: a state file with the initial tensors and optimiser state.
    """

    stage: str
    rows: Rows
    objective: Objective
    optimizer: Optimizer
    batch_size: int
    epochs: int
    state: Path
    remedy: str
    steps: int | None = None
    before: Path | None = None


def train_epochs(
    trainer: PairTrainer, training: Training, key: Key, callback: Callback, measure: Measure
) -> tuple[Tensors, list[dict[str, Any]]]:
    """Train all tensors, or continue an interrupted training.

    Returns:
        The tensors, and the metrics of each epoch.

    Raises:
        AlignError: a tensor is not finite after an epoch, or a state file is damaged.
    """
    backbone = trainer.backbone
    ownership = Ownership.of(backbone.layout, lambda entry: Owner.SHARED)
    tensors, moments, history = backbone.initial, Moments(), cast(list[dict[str, Any]], [])
    if training.state.exists():
        tensors, moments, history = read_state(training.state, training.stage)
    elif training.before is not None:
        tensors, moments, _ = read_state(training.before, training.stage)
    callback.on_stage_begin(training.stage, len(history), training.epochs)
    for epoch in range(len(history) + 1, training.epochs + 1):
        phase = Phase(
            f"epoch-{epoch}",
            backbone.layout.names,
            training.objective,
            training.optimizer,
            training.batch_size,
            steps=training.steps,
            epochs=1 if training.steps is None else None,
            moments=moments,
        )
        result = trainer.visit(training.rows, key, ownership).train(tensors, phase)
        tensors, moments = result.tensors, result.moments or Moments()
        if not bool(torch.isfinite(tensors.flat).all()):
            raise AlignError(f"epoch {epoch} of stage {training.stage} diverged: {training.remedy}")
        figures = {"epoch": epoch, "loss": result.loss, "steps": result.steps, **measure(epoch, tensors)}
        history.append(figures)
        # This write commits the epoch.
        files.write(training.state, _encode(tensors, moments, history))
        numbers = {name: float(value) for name, value in figures.items() if isinstance(value, float)}
        callback.on_stage_step(training.stage, epoch, training.epochs, numbers)
    return tensors, history


def _encode(tensors: Tensors, moments: Moments, history: list[dict[str, Any]]) -> bytes:
    groups = {f"{_MOMENTS}{name}": slot for name, slot in moments.slots.items()}
    data = encode(
        State({"policy": tensors, **groups}, {"steps": moments.steps, "history": cast(Any, history)})
    )
    return files.digest(data).encode() + b"\n" + data


def read_state(path: Path, stage: str) -> tuple[Tensors, Moments, list[dict[str, Any]]]:
    """Read tensors, optimiser state and metrics of all epochs from a state file.

    Args:
        stage: the stage that wrote it, for messages.

    Raises:
        AlignError: the file is damaged.
    """
    digest, _, data = path.read_bytes().partition(b"\n")
    if digest != files.digest(data).encode():
        raise AlignError(
            f"{path} is damaged: its digest does not match; run the stage again: --stage {stage}"
        )
    state = decode_state(data)
    slots = {
        name.removeprefix(_MOMENTS): group
        for name, group in state.tensors.items()
        if name.startswith(_MOMENTS)
    }
    history = cast(list[dict[str, Any]], state.values["history"])
    return state.tensors["policy"], Moments(slots, int(state.number("steps", 0))), history
