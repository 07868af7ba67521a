"""Export of client tensors for other tools: PEFT adapters and merged models.

Functions that save load ``tensors`` (full layout) into the backbone. Folders are written atomically and
replace existing ones.
"""

from __future__ import annotations

import copy
import fnmatch
import glob
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from prefed.core import Key, Tensors, files
from prefed.models.backbone import Backbone, load_backbone
from prefed.models.config import MIXTURE, TASTE_MAP, ModelConfig
from prefed.models.fused_lora import lora_factors
from prefed.models.pretrained import ModelError
from prefed.models.trainable_parts import WEIGHTS, lora_layers

FORMAT = 1
ABOUT, TENSORS = "prefed.json", "client.safetensors"
EXPORTED = (
    *("adapter_config.json", "adapter_model*.safetensors", ABOUT, TENSORS, "README.md"),
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model"),
    "chat_template.*",
)
"""File name patterns in an exported folder, including the files that PEFT and transformers write."""


def unexpected_files(folder: Path) -> list[str]:
    """Return names in ``folder`` that no export writes; an export must not replace such a folder."""
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if not (entry.is_file() and any(fnmatch.fnmatchcase(entry.name, name) for name in EXPORTED))
    )


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces ``folder`` at the end of the block, and is removed on errors.

    File permissions follow the umask. If the process is killed, the earlier folder remains, under its own
    name or one ending in ``.old``; the next call cleans up.
    """
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    _clean_up(folder)
    partial, old = (folder.with_name(f"{folder.name}.{os.getpid()}.{end}") for end in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        # safetensors writes files that only their owner may read. An export is for others too.
        mode = partial.stat().st_mode & 0o666
        for path in partial.iterdir():
            path.chmod(mode)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        try:
            partial.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise files.write_error(folder, files.folder_size(partial), error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _clean_up(folder: Path) -> None:
    """Clean up after killed processes that wrote ``folder``, and restore an ``.old`` folder."""
    for leftover in folder.parent.glob(f"{glob.escape(folder.name)}.*"):
        number, _, end = leftover.name.removeprefix(f"{folder.name}.").partition(".")
        if end not in ("partial", "old") or not number.isdecimal():
            continue
        if int(number) != os.getpid() and files.is_running(int(number)):
            continue
        if end == "old" and not folder.exists():
            leftover.rename(folder)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def _on_hidden_states(backbone: Backbone) -> str:
    """Return what the model has besides its language model if that reads hidden states, else ``""``."""
    if "variational" in backbone.needs:
        return "a selector with a latent taste"
    return "rewards that clients mix" if MIXTURE in backbone.needs else ""


def save_adapter(
    backbone: Backbone, tensors: Tensors, folder: Path, taste: torch.Tensor | None = None
) -> None:
    """Write the LoRA of ``tensors`` as an adapter folder for ``PeftModel.from_pretrained``.

    A gated personal LoRA becomes part of the adapter, which then has twice the rank. Heads, norms and
    bottlenecks do not fit into an adapter: see :func:`save_client`.

    For a policy with a taste map, the adapter is for a single taste z: e(z), equal for all tokens, becomes a
    LoRA of rank 1 on the input embeddings, with A a row of ones and B = e(z).

    Args:
        taste: ``[d_z]``, for a policy with a taste map.

    Raises:
        ModelError: no adapter can hold the model: residuals changed base weights, all weights were trained,
            it is a selector with a latent taste, or PEFT cannot adapt its input embeddings. Or ``taste`` does
            not fit the model.
    """
    residuals = [n for n in tensors if tensors.layout[n].part == "residual" and bool(tensors[n].any())]
    if residuals:
        raise ModelError(
            f"[merge] lora changed {len(residuals)} base weights, which an adapter cannot contain; "
            "export a merged model"
        )
    if WEIGHTS in backbone.needs:
        raise ModelError("all weights were trained, which an adapter cannot contain; export a merged model")
    if selector := _on_hidden_states(backbone):
        raise ModelError(f"an adapter cannot contain {selector}; export the client's folder")
    backbone.load(tensors)
    added = OneTaste.of(backbone, taste)
    with atomic_folder(folder) as partial:
        _write_adapter(backbone, partial, added)


def _write_adapter(backbone: Backbone, folder: Path, added: OneTaste | None = None) -> None:
    from safetensors.torch import save_file

    adapter, rank = {}, 0
    for path, layer in backbone.causal.named_modules():
        if hasattr(layer, "lora_A"):
            a, b = lora_factors(layer)
            rank = a.shape[0]
            for name, factor in (("lora_A", a), ("lora_B", b)):
                adapter[f"base_model.model.{path}.{name}.weight"] = factor.detach().cpu().clone().contiguous()
    config = copy.deepcopy(backbone.model.peft_config["default"])
    config.r, config.lora_alpha, config.inference_mode = rank, backbone.scaling * rank, True
    if isinstance(config.target_modules, set):
        # Set order differs between processes, but equal runs must write equal files.
        config.target_modules = sorted(config.target_modules)
    if added is not None:
        stem, count = f"base_model.model.{added.path}", backbone.causal.get_input_embeddings().num_embeddings
        adapter[f"{stem}.lora_embedding_A"] = torch.ones(1, count)
        adapter[f"{stem}.lora_embedding_B"] = added.row[:, None].float().contiguous()
        config.target_modules = [*config.target_modules, added.path]
        config.rank_pattern = config.alpha_pattern = {added.path: 1}
    config.save_pretrained(str(folder))
    save_file(adapter, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    if backbone.tokenizer is not None:
        backbone.tokenizer.save_pretrained(folder)


def save_client(backbone: Backbone, tensors: Tensors, folder: Path) -> None:
    """Write all parts of a client's model: adapter, bottleneck, heads, norms, gates.

    :func:`load_client` reads the folder. If the model has a LoRA, the folder also contains a PEFT adapter;
    for a policy with a taste map, that adapter ignores the taste.
    """
    from safetensors.torch import save_file

    backbone.load(tensors)
    about = {
        "format": FORMAT,
        "model": backbone.config.model_dump(mode="json", exclude={"kernels"}),
        "needs": sorted(backbone.needs),
        "parts": sorted({entry.part for entry in tensors.layout.entries}),
    }
    with atomic_folder(folder) as partial:
        if "lora" in backbone.needs:
            _write_adapter(backbone, partial)
        values = {name: value.clone() for name, value in tensors.items()}
        save_file(values, str(partial / TENSORS), metadata={"format": "pt"})
        (partial / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def load_client(folder: str | Path, base: str | None = None) -> Backbone:
    """Load a folder from :func:`save_client`.

    ``load_client(folder).model`` is a Hugging Face model with the client's parts in place.

    Args:
        base: folder or hub name of the base model, if it has moved.

    Raises:
        ModelError: the folder contains no client, or its tensors do not fit the base model.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    try:
        about = json.loads((folder / ABOUT).read_text("utf-8"))
        values = load_file(str(folder / TENSORS))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} does not contain an exported client: {error}") from error
    if about["format"] != FORMAT:
        raise ModelError(f"{folder / ABOUT} has format {about['format']}; this version supports {FORMAT}")
    config = ModelConfig.model_validate({**about["model"], **({"name": base} if base else {})})
    backbone = load_backbone(config, Key(0), frozenset(about["needs"]))
    expected = {(entry.name, entry.shape) for entry in backbone.layout.entries}
    wrong = {name for name, _ in expected ^ {(name, tuple(value.shape)) for name, value in values.items()}}
    if wrong:
        raise ModelError(f"{folder} does not fit the base model {config.name!r}: {', '.join(sorted(wrong))}")
    backbone.load(Tensors.gather(backbone.layout, values))
    return backbone


def save_merged(
    backbone: Backbone, tensors: Tensors, folder: Path, taste: torch.Tensor | None = None
) -> None:
    """Write a plain Hugging Face model: W + s·BA, with gated branches and residual merged, head and norms.

    Reward heads and critics are dropped. For a policy with a taste map, the model is for a single taste: e(z)
    is added to every row of the input embeddings, and a tied head is saved separately without it.

    Args:
        taste: ``[d_z]``, for a policy with a taste map.

    Raises:
        ModelError: a plain model cannot hold a trained bottleneck, a latent taste, or separate adapters of
            blocks that share weights; the weights are in 4 bits; or ``taste`` does not fit the model.
    """
    if backbone.config.quantize is not None:
        raise ModelError("an adapter cannot be merged into 4-bit weights; export the adapter")
    if selector := _on_hidden_states(backbone):
        raise ModelError(f"a plain model cannot contain {selector}; export without --merge")
    changed = {n.partition("/")[0] for n in tensors if not torch.equal(tensors[n], backbone.reference[n])}
    if "bottleneck" in changed:
        raise ModelError(
            "a bottleneck cannot be merged into a plain model; export without --merge, and load the client's "
            "folder with prefed.models.load_client"
        )
    backbone.load(tensors)
    added = OneTaste.of(backbone, taste)
    causal: Any = backbone.causal
    adapted = [layer.base_layer.weight for _, _, layer in lora_layers(causal)]
    if len(set(map(id, adapted))) < len(adapted):
        raise ModelError(
            "blocks of this model share weights but have separate adapters, which cannot be merged; export "
            "the adapter"
        )
    deltas = {} if added is None else {f"{added.path}.weight": added.row.to(backbone.device)}
    for path, layer in causal.named_modules():
        if hasattr(layer, "lora_A"):
            a, b = lora_factors(layer)
            delta = backbone.scaling * (b.detach() @ a.detach())
            transposed = not isinstance(layer.base_layer, torch.nn.Linear)
            deltas[f"{path}.base_layer.weight"] = delta.t() if transposed else delta
    state = {}
    for name, value in causal.state_dict().items():
        if ".lora_" in name:
            continue
        weight = value.detach()
        if name in deltas:
            weight = (weight.float() + deltas[name]).to(value.dtype)
        state[name.replace(".base_layer.", ".")] = weight
    with atomic_folder(folder) as partial:
        # A LoRA on a tied head, or a trained head, must not change the embeddings.
        on_head = hasattr(causal.get_output_embeddings(), "lora_A")
        untied = "head" in changed or added is not None or on_head
        _plain_copy(causal, state, untied=untied).save_pretrained(partial)
        if backbone.tokenizer is not None:
            backbone.tokenizer.save_pretrained(partial)


def _plain_copy(causal: Any, state: dict[str, torch.Tensor], *, untied: bool) -> Any:
    """Create a new model of ``causal``'s class with the weights ``state``."""
    config = copy.deepcopy(causal.config)
    config._attn_implementation = None
    if untied:
        config.tie_word_embeddings = False
    plain = type(causal)(config).to(causal.dtype)
    missing, unexpected = plain.load_state_dict(state, strict=False)
    if missing or unexpected:
        raise ModelError(f"cannot write a merged model: missing {missing}, unexpected {unexpected}")
    plain.tie_weights()
    if causal.generation_config is not None:
        plain.generation_config = copy.deepcopy(causal.generation_config)
    return plain


@dataclass(frozen=True)
class OneTaste:
    """Effect of one taste on the input embeddings.

    Attributes:
        path: path of the input embeddings in the model.
        row: ``[d]`` e(z) divided by the embedding scale, by which PEFT multiplies a LoRA.
    """

    path: str
    row: torch.Tensor

    @staticmethod
    def of(backbone: Backbone, taste: torch.Tensor | None) -> OneTaste | None:
        """Return the effect of ``taste`` ``[d_z]`` in the loaded model; ``None`` without a taste map.

        Raises:
            ModelError: ``taste`` does not fit the model, or other tools could not load the result.
        """
        taste_map = backbone.taste_map
        if taste_map is None:
            if taste is not None:
                raise ModelError(f"a taste is given, but the model has no part {TASTE_MAP!r}")
            return None
        elsewhere = "or export the client's folder, which contains the policy for all tastes"
        if taste is None:
            raise ModelError(f"this policy can only be exported for one taste: give a taste, {elsewhere}")
        embeddings = taste_map.embeddings
        if not isinstance(embeddings, torch.nn.Embedding):
            kind = type(embeddings).__name__
            raise ModelError(
                f"PEFT has no LoRA for input embeddings of type {kind}: use another model, {elsewhere}"
            )
        path = next(name for name, module in backbone.causal.named_modules() if module is embeddings)
        row = taste_map(taste).detach().cpu() / float(getattr(embeddings, "embed_scale", 1.0))
        if not bool(torch.isfinite(row).all()):
            raise ModelError("the policy is not finite at this taste: training diverged, or z is NaN")
        return OneTaste(path, row)
