"""Loading and checking of pretrained models."""

from __future__ import annotations

import logging
import os
import timeit
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch

from prefed.core.text import listed
from prefed.models.config import Dtype, ModelConfig, present_devices

_log = logging.getLogger("prefed")
NEEDED = "give one with config.json, weights and tokenizer"
_REASON = 400
"""Maximum length of a library's message to repeat."""


class ModelError(ValueError):
    """A model cannot be loaded or adapted; the message names it and suggests a fix."""


def find_device(name: str) -> torch.device:
    """Return the device ``name``; ``auto`` selects the fastest one.

    Raises:
        ModelError: PyTorch does not find it on this machine.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device in available if available[device])
    if not available[name]:
        raise ModelError(f"[model] device = {name!r} is not available; this machine has {present_devices()}")
    return torch.device(name)


def with_dtype(config: ModelConfig, device: str | None = None) -> ModelConfig:
    """Fill in the dtype of a model whose settings name none.

    It is float32 on a CPU and if all weights train. On a GPU it is the dtype in the checkpoint's config.json,
    or float32 if that names none or another one.

    Args:
        device: type of the model's device; ``None``: that of :func:`find_device`.

    Raises:
        ModelError: the checkpoint has no readable configuration.
    """
    if config.dtype is not None:
        return config
    dtype = "float32"
    if config.train == "lora" and (device or find_device(config.device).type) != "cpu":
        checkpoint = checkpoint_config(config)
        own = str(checkpoint.dtype or text_config(checkpoint).dtype).removeprefix("torch.")
        dtype = own if own in get_args(Dtype) else dtype
    return config.model_copy(update={"dtype": dtype})


LIGER_CLASSES = {
    **{"gemma": "Gemma", "granite": "Granite", "llama": "Llama", "mistral": "Mistral"},
    **{"qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"},
}
"""Model types with kernels of liger-kernel → start of the names of their modules' classes."""


def with_kernels(config: ModelConfig) -> ModelConfig:
    """Fill in the kernels of a model on a CUDA device whose settings name none.

    They are Liger's if they are installed and support the model.

    Raises:
        ModelError: the checkpoint has no readable configuration.
    """
    if config.kernels is not None or (device := find_device(config.device)).type != "cuda":
        return config
    supported = not _without_liger(config, device)
    supported = supported and text_config(checkpoint_config(config)).model_type in LIGER_CLASSES
    return config.model_copy(update={"kernels": "liger" if supported else "torch"})


def check_kernels(config: ModelConfig, device: torch.device) -> None:
    """Check that the kernels that the settings name can run.

    Raises:
        ModelError: the device or other settings rule them out, or liger-kernel is missing.
    """
    if config.kernels == "liger" and (reason := _without_liger(config, device)):
        raise ModelError(f"[model] kernels = 'liger' {reason}")


def _without_liger(config: ModelConfig, device: torch.device) -> str:
    """Return what rules out Liger's kernels, or ``""``."""
    if device.type != "cuda":
        return f"requires a CUDA device, but the model is on {device.type}: remove it"
    if config.gpus > 1 or not config.fast:
        key = f"gpus = {config.gpus}" if config.gpus > 1 else "fast = false"
        return f"is not possible with {key}: remove one of them"
    if find_spec("liger_kernel") is None:
        return "requires liger-kernel: pip install 'prefed[kernels]'"
    return ""


def checkpoint_config(config: ModelConfig) -> Any:
    """Return the configuration in the checkpoint's config.json.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    from transformers import AutoConfig

    return load_pretrained(AutoConfig, "[model] name", config.name, "configuration", revision=config.revision)


def precision_notes(config: ModelConfig) -> list[str]:
    """Return a line with a model's dtype, device and kernels, and one if another dtype is faster there.

    There is none for float32 on a CPU.
    """
    dtype, device = with_dtype(config).dtype, find_device(config.device)
    if (dtype, device.type) == ("float32", "cpu"):
        return []
    kernels = ", with Liger's kernels" if config.kernels == "liger" else ""
    notes = [f"the model is in {dtype} on {device.type}{kernels}"]
    if dtype == "bfloat16" and device.type == "cpu" and (cost := bfloat16_cost()) > 1:
        notes.append(
            f"[model] dtype = 'bfloat16': this CPU takes {cost:.3g} times as long for a product as in "
            "float32; bfloat16 saves memory, but float32 is faster"
        )
    if dtype == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        notes.append("[model] dtype = 'bfloat16': this GPU emulates it; float16 is faster")
    return notes


@cache
def bfloat16_cost() -> float:
    """Return how many times as long this CPU takes for a bfloat16 product as for one in float32.

    It is timed once in a process, in at most some tenths of a second.
    """

    def seconds(dtype: torch.dtype) -> float:
        rows, weights = torch.ones(64, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        return min(timeit.repeat(lambda: rows @ weights, number=1, repeat=5))

    return seconds(torch.bfloat16) / seconds(torch.float32)


def silence_transformers() -> None:
    """Disable progress bars and notices of transformers, unless ``TRANSFORMERS_VERBOSITY`` is set."""
    if "TRANSFORMERS_VERBOSITY" in os.environ:
        return
    from transformers.utils import logging as verbosity

    verbosity.set_verbosity_error()
    verbosity.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\b")


def _in_reach() -> AbstractContextManager[bool]:
    from prefed.core.huggingface import in_reach

    return in_reach()


def load_pretrained(kind: Any, key: str, name: str, what: str, **options: Any) -> Any:
    """Return ``kind.from_pretrained(name, **options)``, from a folder, the hub or the hub's cache.

    Every weight of a model must be in its checkpoint and finite. Weights that the model does not read, and
    warnings of transformers, are logged. Transformers is silent from then on; see
    :func:`silence_transformers`.

    Args:
        kind: one of transformers' ``Auto`` classes.
        key: the setting that contains the name, for messages.
        name: a folder or a hub name.
        what: kind of object to load, for messages.

    Raises:
        ModelError: it cannot be loaded.
    """
    silence_transformers()
    folder = Path(name)
    absent = absent_files(folder) if folder.is_dir() else []
    empty = folder.is_dir() and not any(folder.iterdir())
    what_lacks = "is empty" if empty else f"has no {', no '.join(absent)}"
    lacks = ModelError(f"{key} = {name!r}: the folder {what_lacks}; {NEEDED}")
    if folder.is_dir():
        # Transformers would fail with a long message, or make a tokenizer without a vocabulary.
        if ("tokenizer" if what == "tokenizer" else "config.json") in absent:
            raise lacks
        if (folder / "adapter_config.json").exists():
            raise ModelError(
                f"{key} = {name!r}: the folder has an adapter (adapter_config.json) next to the weights of "
                "a model; merge the adapter into the weights and save them in a separate folder, or move its "
                "files away to use the model without it"
            )
    elif folder.exists():
        raise ModelError(f"{key} = {name!r}: this is a file; give a folder")
    # Not a valid hub name, so it must be a folder. The message of the hub client would be misleading.
    elif name[:1] in ("/", ".", "~") or name.count("/") > 1:
        raise ModelError(f"{key} = {name!r}: no such folder; {NEEDED}")
    with nullcontext(True) if folder.is_dir() else _in_reach() as answers:
        try:
            is_model = kind.__name__.startswith("AutoModel")
            if is_model:
                _check_kernels(name, options.get("revision"))
                options["output_loading_info"] = True
            with _warnings_of_transformers(f"{key} = {name!r}"):
                # By default transformers asks on the terminal and reads the answer from standard input.
                loaded = kind.from_pretrained(name, trust_remote_code=False, **options)
            if is_model:
                loaded, report = loaded
                _check_weights(loaded, report, f"{key} = {name!r}", what)
            if _is_empty(loaded):
                raise ValueError("its tokenizer has no vocabulary except special tokens")
            return loaded
        except ModelError:
            raise
        except Exception as error:  # a downloaded folder may contain anything
            if not answers:
                raise ModelError(
                    f"{key} = {name!r}: the Hugging Face hub is not reachable (or HF_HUB_OFFLINE is set), "
                    f"its local cache has no {what} with this name, and there is no such folder; {NEEDED}, "
                    "or run once with network access"
                ) from error
            reason = f"{brief(error)}; {NEEDED}, or a hub name"
            if "trust_remote_code" in str(error):
                reason = "it requires custom code, which prefed does not run"
            elif "weights_only" in str(error):
                reason = "its weights may contain code; convert them to safetensors"
            elif "weights" in absent and what != "tokenizer":
                raise lacks from error
            elif "backend tokenizer" in reason:
                reason = "its tokenizer has no vocabulary: tokenizer.json or a vocabulary file is missing"
            raise ModelError(f"{key} = {name!r}: cannot load a {what}: {reason}") from error


@contextmanager
def _warnings_of_transformers(prefix: str) -> Iterator[None]:
    """Log warnings of transformers as warnings of prefed, except those that :func:`_check_weights` reports.

    Args:
        prefix: start of the messages.
    """
    logger, kept = logging.getLogger("transformers"), _Kept(logging.WARNING)
    handlers, level, propagate = logger.handlers, logger.level, logger.propagate
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logger.handlers = [kept]
        logger.setLevel(logging.WARNING)
        logger.propagate = False  # transformers sets it where the variable CI is set
    try:
        yield
    finally:
        logger.handlers = handlers
        logger.setLevel(level)
        logger.propagate = propagate
    for text in kept.texts:
        if "LOAD REPORT" not in text and "This checkpoint seem corrupted" not in text:
            _log.warning("%s: transformers warns: %s", prefix, text[:_REASON])


class _Kept(logging.Handler):
    """Keeps messages, each once and on one line."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.texts: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.texts[" ".join(record.getMessage().split())] = None


def _check_weights(model: Any, report: Mapping[str, Any], prefix: str, what: str) -> None:
    """Check transformers' report on the weights of a model; see :func:`load_pretrained`.

    Args:
        prefix: start of the messages.
        what: kind of model.
    """
    # Transformers initialises missing weights at random. Buffers are computed.
    parameters = dict(model.named_parameters())
    missing = sorted(
        {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])} & {*parameters}
    )
    unread = sorted(report["unexpected_keys"])
    if missing:
        start = next((key.removesuffix(own) for own in missing for key in unread if key.endswith(own)), "")
        remedy = "complete it, or correct config.json"
        if any(".lora_" in key or ".base_layer." in key for key in unread):
            remedy = "it holds an adapter; merge it into the weights (merge_and_unload) and save them again"
        elif start:
            remedy = f"remove the prefix {start!r} from the names of its weights"
        raise ModelError(
            f"{prefix}: this is not a {what}: the checkpoint has no weights for {listed(missing, str, 3)}; "
            f"{remedy}"
        )
    if unread:
        _log.warning(
            "%s: the model does not read these weights of the checkpoint: %s", prefix, listed(unread, str, 3)
        )
    check_finite(parameters, prefix)


def check_finite(parameters: Mapping[str, torch.Tensor], prefix: str) -> None:
    """Check that all weights are finite.

    Args:
        prefix: start of the message.

    Raises:
        ModelError: some are not; the message names them.
    """
    wrong = []
    for name, weight in parameters.items():
        if weight.is_floating_point() and weight.numel() and not weight.is_meta:
            extremes = torch.stack(weight.detach().aminmax())  # NaN if there is one
            if not bool(torch.isfinite(extremes).all()):
                wrong.append(name)
    if wrong:
        dtype = str(parameters[wrong[0]].dtype).removeprefix("torch.")
        raise ModelError(
            f"{prefix}: weights are not finite in {dtype}: {listed(wrong, str, 3)}; the checkpoint is "
            "damaged, its training diverged, or its values exceed this dtype"
        )


def _check_kernels(name: str, revision: str | None) -> None:
    """Refuse a config.json with kernels, which transformers would download from the hub and run."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name, trust_remote_code=False, revision=revision)
    if any("/" in str(getattr(config, f"_{part}_implementation", "")) for part in ("attn", "experts")):
        raise ValueError("a kernel from the hub is code, as with trust_remote_code")


def _is_empty(loaded: Any) -> bool:
    """Return whether ``loaded`` is a tokenizer without a vocabulary."""
    words: dict[str, int] = getattr(loaded, "get_vocab", dict)()
    return bool(words) and not words.keys() - loaded.get_added_vocab().keys()


def absent_files(folder: Path) -> list[str]:
    """Return the required files that a model folder lacks."""
    files = {
        "config.json": ("config.json",),
        "weights": ("*.safetensors", "*.bin"),
        "tokenizer": ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json"),
    }
    return [what for what, names in files.items() if not any(any(folder.glob(name)) for name in names)]


def brief(error: Exception) -> str:
    """Return the first part of a library's message as a single line."""
    return (" ".join(str(error).split()) or type(error).__name__)[:_REASON]


def load_tokenizer(config: ModelConfig) -> Any:
    """Load the base model's tokenizer.

    Raises:
        ModelError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    return load_pretrained(AutoTokenizer, "[model] name", config.name, "tokenizer", revision=config.revision)


def reads_clock(config: ModelConfig) -> bool:
    """Return whether the chat template of a model contains today's date.

    It is ``False`` where the tokenizer cannot be loaded, which whatever needs it reports.
    """
    folder = Path(config.name)
    if folder.is_dir():
        places = (folder / "tokenizer_config.json", *sorted(folder.rglob("*.jinja")))
        texts = [path.read_text("utf-8", errors="replace") for path in places if path.is_file()]
    else:
        try:
            texts = [str(load_tokenizer(config).chat_template)]
        except ModelError:
            return False
    return any("strftime_now" in text for text in texts)


def load_causal(config: ModelConfig) -> Any:
    """Load the base model: weights in the dtype of :func:`with_dtype`, or linear layers in 4 bits.

    The 4-bit format is QLoRA's (arXiv:2305.14314, section 3): ``quantize`` with double quantisation. Layers
    convert their weights to ``dtype`` before each product.

    Raises:
        ModelError: it cannot be loaded, the device does not support its dtype, bitsandbytes is missing, or it
            does not fit on ``gpus`` devices.
    """
    from transformers import AutoModelForCausalLM

    device = find_device(config.device)
    check_dtype(config, device)
    dtype, options = getattr(torch, str(with_dtype(config).dtype)), placement(device, config.gpus)
    if config.quantize is not None:
        # Weights are quantised on the device that they are loaded to.
        options = {"device_map": {"": "cpu"}, **options, **_four_bits(config.quantize, dtype)}
    model = load_pretrained(
        AutoModelForCausalLM,
        "[model] name",
        config.name,
        "causal language model",
        revision=config.revision,
        dtype=dtype,
        **options,
    )
    if config.gpus > 1 and {"cpu", "disk"} & set(getattr(model, "hf_device_map", {}).values()):
        raise ModelError(
            f"[model] name = {config.name!r} does not fit in the free memory of {config.gpus} GPUs; raise "
            "[model] gpus, or set quantize = 'nf4'"
        )
    return model


def placement(device: torch.device, gpus: int = 1) -> dict[str, Any]:
    """Return the options of ``from_pretrained`` that read weights to GPUs without a copy in main memory.

    Args:
        gpus: spread the model over this many CUDA devices, in proportion to their free memory.

    Raises:
        ModelError: this process sees fewer of them.
    """
    if gpus > 1:
        if (count := torch.cuda.device_count()) < gpus:
            raise ModelError(
                f"[model] gpus = {gpus}, but a process here has {count}; lower gpus, or start fewer processes"
            )
        free = {number: torch.cuda.mem_get_info(number)[0] for number in range(gpus)}
        # Without room on the disk, accelerate cannot finish a map that does not fit.
        return {"device_map": "auto", "max_memory": free}
    if device.type == "cpu":
        return {}
    return {"device_map": {"": torch.cuda.current_device() if device.type == "cuda" else device.type}}


def own_forward(module: Any) -> str:
    """Return the attribute with a module's forward, inside the hook that moves its inputs to its device."""
    return "_old_forward" if hasattr(module, "_old_forward") else "forward"


def check_dtype(config: ModelConfig, device: torch.device) -> None:
    """Check that the device supports ``dtype``.

    Raises:
        ModelError: float16 on a CPU.
    """
    if config.dtype == "float16" and device.type == "cpu":
        raise ModelError(
            "[model] dtype = 'float16' requires a GPU, but the model is on the CPU; use bfloat16 or float32"
        )


def check_quantized(quantize: str) -> None:
    """Check that the package for 4-bit weights is installed.

    Raises:
        ModelError: it is not.
    """
    if find_spec("bitsandbytes") is None:
        raise ModelError(
            f"[model] quantize = {quantize!r} requires bitsandbytes: pip install 'prefed[quantized]'"
        )


def check_device(config: ModelConfig) -> torch.device:
    """Return the device of a model, after checking that this machine has what the settings name.

    Raises:
        ModelError: it does not.
    """
    device = find_device(config.device)
    check_dtype(config, device)
    check_kernels(config, device)
    if config.quantize is not None:
        check_quantized(config.quantize)
    return device


def _four_bits(quantize: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the options of ``from_pretrained`` for 4-bit weights."""
    check_quantized(quantize)
    from transformers import BitsAndBytesConfig

    scheme = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantize,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
    )
    return {"quantization_config": scheme}


def keep_four_bits(model: Any) -> None:
    """Make 4-bit layers compute the same with and without gradients.

    On some CPUs they repack their weights for bfloat16 products in the first pass without gradients, so
    scoring would differ from training.
    """
    for module in model.modules():
        if hasattr(module, "quant_state"):
            module.training = True


def check_vocabulary(model: Any, tokenizer: Any, name: str) -> None:
    """Check that the embedding has a row for every token of the tokenizer, except for padding.

    Raises:
        ModelError: it has not.
    """
    embeddings = model.get_input_embeddings()
    rows: int = getattr(embeddings, "num_embeddings", None) or embeddings.weight.shape[0]
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= rows}
    if tokenizer.pad_token_id not in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        beyond.pop(tokenizer.pad_token, None)
    if not beyond:
        return
    highest, template = max(beyond.values()), str(getattr(tokenizer, "chat_template", None))
    used = ", which the chat template uses" if any(token in template for token in beyond) else ""
    raise ModelError(
        f"[model] name = {name!r}: the tokenizer has token ids up to {highest}, but the model's embedding "
        f"{rows} rows, for ids up to {rows - 1}: none for {listed(sorted(beyond, key=beyond.__getitem__))}"
        f"{used}; use the model's own tokenizer, or resize the embedding and save the model: "
        f"model.resize_token_embeddings({highest + 1})"
    )


PROBE = 4
"""Number of tokens in the sequence that checks a model."""


def check_language_model(model: Any, name: str) -> None:
    """Check that a model is causal and needs only token ids.

    Otherwise the log-probabilities of a response would be conditioned on the response itself. The check is
    that earlier logits have zero gradient with respect to the last token's embedding. This is exact in any
    dtype, whereas changing the token may change other logits by rounding.

    Args:
        model: the model on its device, in evaluation mode.

    Raises:
        ModelError: it is not causal, or cannot process the probe.
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
            f"[model] name = {name!r}: model type {model.config.model_type!r} does not accept token ids "
            f"only: {brief(error)}; use a causal language model"
        ) from error
    if any(bool(gradient[..., -1, :].any()) for gradient in gradients):
        raise ModelError(
            f"[model] name = {name!r} is not causal: its logits at a token depend on later tokens; use a "
            "causal language model (for BERT-like models, one with is_decoder = true in config.json)"
        )


def text_config(config: Any) -> Any:
    """Return the language model's part of a configuration, which may be all of it."""
    return config.get_text_config(decoder=True)


def head_width(causal: Any) -> int:
    """Return the width of the hidden states that the head reads; OPT-350m projects them first."""
    width: int = causal.get_output_embeddings().weight.shape[1]
    return width


def rope_settings(text: Any) -> Iterator[dict[str, Any]]:
    """Yield the rotary settings of a text configuration, possibly several by layer type."""
    rope = getattr(text, "rope_parameters", None) or {}
    for each in [rope] if "rope_type" in rope else rope.values():
        if isinstance(each, dict) and "rope_type" in each:
            yield each
