"""Estimates the memory of a training step on a GPU from the model's configuration, without its weights.

The step's own code runs on tensors without data (PyTorch's meta device), and the sizes of those that exist at
the same time are added up.
"""

from __future__ import annotations

import copy
import math
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prefed.config import ConfigError, Experiment
from prefed.core import Key
from prefed.core.text import one_line
from prefed.data import TokenSet
from prefed.methods import TrainingSettings
from prefed.methods.base.settings import BaselineSettings
from prefed.models import ModelConfig, ModelError
from prefed.models.backbone import adapted, with_parts
from prefed.models.pretrained import checkpoint_config, load_pretrained, with_dtype
from prefed.runs.build import build_data
from prefed.train.forward_passes import PairModel
from prefed.train.packed import PackedForward, Packing
from prefed.train.padded import pad
from prefed.train.pair_cache import Rows

META = torch.device("meta")
USABLE = 0.9
"""Share of a device's memory for tensors; the rest is for the CUDA context and gaps between them."""
FOUR_BITS = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Bytes per 4-bit weight: a scale in 8 bits for each 64 weights, and one in 32 bits for each 256 scales."""

_aten = torch.ops.aten


def _efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention that stores no weights, with the mask as a bias in the dtype of the queries."""
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    result, *_ = _aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )
    return result  # type: ignore[no-any-return]


def _dropout(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Dropout that stores a mask of one byte per number."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


# A GPU's kernels, which keep less memory than what PyTorch does with tensors without data.
_KERNELS = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
_KERNELS.impl("scaled_dot_product_attention", _efficient_attention, "AutogradMeta")  # type: ignore[no-untyped-call]
_KERNELS.impl("dropout", _dropout, "AutogradMeta")  # type: ignore[no-untyped-call]


def _unique(values: torch.Tensor, *options: Any, **more: Any) -> tuple[torch.Tensor, ...]:
    """The largest result of ``unique``: all values differ."""
    count = values.numel()
    return values.new_empty(count), values.new_empty(values.shape, dtype=torch.long), values.new_empty(count)


def _counts(values: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    """Counts of the values below ``minlength``."""
    return values.new_empty(minlength, dtype=torch.long)


def _grouped_product(
    a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor | None = None, *options: Any, **more: Any
) -> torch.Tensor:
    """The product of grouped matrices, in any dtype."""
    groups = () if a.dim() + b.dim() == 5 else (a.shape[0] if ends is None else ends.shape[0],)
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])


_WITHOUT_DATA = {
    _aten._unique2.default: _unique,
    _aten.bincount.default: _counts,
    _aten._grouped_mm.default: _grouped_product,
}
"""Operations whose result depends on data, or that PyTorch refuses without data in some dtypes."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the sizes of tensors that exist at the same time: given ones, and results of operations.

    Attributes:
        live: bytes now.
        peak: the highest value of ``live``.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._experts = 1
        self._known: dict[int, weakref.ref[Any]] = {}
        for tensor in tensors:
            self._add(tensor.untyped_storage())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return 0
        if func is _aten._to_copy.default and args[0].is_meta:
            kwargs["device"] = META  # no data that could be copied to the CPU
        if func is _aten.nonzero.default and args[0].is_meta:
            return self._nonzero(args[0])
        call = _WITHOUT_DATA.get(func, func) if args and getattr(args[0], "is_meta", False) else func
        result = call(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._add(tensor.untyped_storage())
        return result

    def _nonzero(self, values: torch.Tensor) -> torch.Tensor:
        """Return indices as families with loops over experts use them.

        They look for experts with tokens, which are all of them, then for the tokens of each: all experts
        have equally many.
        """
        if values.dim() == 1:
            self._experts = len(values)
        count = len(values) if values.dim() == 1 else math.ceil(values.numel() / self._experts)
        return values.new_empty(count, values.dim(), dtype=torch.long)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, count = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def freed(_: Any) -> None:
            self.live -= count
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self.live += count
        self.peak = max(self.peak, self.live)


@dataclass(frozen=True)
class StepMemory:
    """Bytes on the device during a training step.

    Attributes:
        weights: frozen weights.
        client: a client's tensors and their gradient, in fp32.
        optimizer: state of the optimiser.
        kept: intermediate results kept for the backward pass.
        passing: the most that exists during the step in addition, such as a block of logits.
    """

    weights: int
    client: int
    optimizer: int
    kept: int
    passing: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.client + self.optimizer + self.kept + self.passing


class PlannedModel:
    """A model without data, and the memory of its training steps on a GPU.

    Args:
        checkpoint: transformers' configuration of the model.
        config: settings of the model, with a dtype.
        needs: see :func:`prefed.models.load_backbone`.
        tokens: all pairs.
        max_tokens: most tokens in one forward pass.
        slots: numbers of the optimiser's state per trained number.
        clients: number of clients that share a pass, each with its own tensors.
        other: bytes of another frozen model on the device.

    Raises:
        ModelError: the model cannot be adapted, or does not support a part or ``checkpointing``.
    """

    def __init__(
        self,
        checkpoint: Any,
        config: ModelConfig,
        needs: frozenset[str],
        tokens: TokenSet,
        *,
        max_tokens: int = 1 << 60,
        slots: int = 2,
        clients: int = 1,
        other: int = 0,
    ) -> None:
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, str(config.dtype))
        with LiveBytes(), META, torch.random.fork_rng(devices=[]):
            # The packed path changes the configuration.
            model = AutoModelForCausalLM.from_config(copy.deepcopy(checkpoint), dtype=dtype)
            wrapped = adapted(model, config, needs).eval()
            self.backbone = with_parts(wrapped, None, config, Key(0), needs, META)
        self._four_bits = config.quantize is not None
        self.backbone.train_only(self.backbone.layout.names)
        with LiveBytes():
            self.pairs = PairModel(self.backbone, tokens, max_tokens=max_tokens, fast=config.fast)
        self._slots, self._clients, self._other = slots, clients, other

    def step(self, rows: Rows, *, rejected: bool = True) -> StepMemory:
        """Return the memory of a step that trains all tensors of a client on ``rows`` in one pass."""
        backbone, size = self.backbone, 4 * self.backbone.layout.size * self._clients
        weights, largest = self._weights()
        backbone.dropout(trunk=True, top=True)
        memory = LiveBytes([*self._tensors(), backbone.flat, backbone.grad])
        before = memory.live
        with memory:
            outputs = self.pairs.run(rows, rejected=rejected, rewards=backbone.reward is not None)
            kept = memory.live - before
            if outputs.requires_grad:
                outputs.sum().backward()  # type: ignore[no-untyped-call]
        return StepMemory(weights, 2 * size, self._slots * size, kept, memory.peak - before - kept + largest)

    @property
    def packed(self) -> bool:
        """Whether pairs take the packed path."""
        return isinstance(self.pairs.forward, PackedForward)

    def pair_tokens(self, rows: Rows) -> int:
        """Return the tokens of the pairs ``rows`` in one forward pass, padding included."""
        pairs = self.pairs.pairs(rows)
        return Packing.of(pairs).ids.numel() if self.packed else pad(pairs)[0].numel()

    def _tensors(self) -> list[torch.Tensor]:
        """Return all tensors of the model, some of which are parts of the client's buffer."""
        causal, bases = self.backbone.causal, self.backbone._bases.values()
        return [*causal.parameters(), *causal.buffers(), *(original for _, original, _ in bases)]

    def _weights(self) -> tuple[int, int]:
        """Return the bytes of all frozen weights, and of the largest one that is converted from 4 bits."""
        from transformers.pytorch_utils import Conv1D

        causal, client = self.backbone.causal, self.backbone.flat.untyped_storage()._cdata
        head, quantized = causal.get_output_embeddings().weight, set[int]()
        if self._four_bits:
            kinds = (nn.Linear, Conv1D)
            linear = [module.weight for module in causal.modules() if isinstance(module, kinds)]
            quantized = {weight.untyped_storage()._cdata for weight in linear if weight is not head}
        known = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in self._tensors()}
        item = head.element_size()
        total = sum(
            math.ceil(count / item * FOUR_BITS) if key in quantized else count
            for key, count in known.items()
            if key != client
        )
        return total + self._other, max((known[key] for key in quantized - {client}), default=0)


@dataclass(frozen=True)
class Variant:
    """The memory of a training step with some settings.

    Attributes:
        settings: changes to ``[model]``; empty for the experiment as it is.
        bytes: those of the parts of :class:`StepMemory`, and their ``total``.
        fits: whether the step fits on the device.
        most_pairs: number of the longest pairs that fit in one forward pass.
        max_tokens: ``[engine] max_tokens`` for so many pairs.
    """

    settings: dict[str, Any]
    bytes: dict[str, int]
    fits: bool
    most_pairs: int
    max_tokens: int


@dataclass(frozen=True)
class MemoryPlan:
    """The estimated memory of a run's training steps on a GPU.

    Every pair is taken to be as long as the longest one.

    Attributes:
        device: as given, e.g. ``cuda:80GB``.
        usable: bytes for tensors, :data:`USABLE` of the device.
        dtype: dtype of the frozen weights.
        path: ``packed`` or ``plain``.
        pass_pairs: pairs in a forward pass: a step of each client in it, or as many as ``[engine]
            max_tokens`` allows, rounded up because shorter pairs fill it.
        pair_tokens: tokens of a pair in a forward pass, padding included.
        variants: the experiment as it is, then with settings that save memory.
    """

    device: str
    usable: int
    dtype: str
    path: str
    pass_pairs: int
    pair_tokens: int
    variants: list[Variant]


def parse_device(text: str) -> int:
    """Return the bytes of a device.

    Raises:
        ConfigError: the text does not name a GPU with its memory.

    >>> parse_device("cuda:80GB"), parse_device("cuda:22.5GiB")
    (80000000000, 24159191040)
    """
    match = re.fullmatch(r"cuda:(\d+(?:\.\d+)?)(GB|GiB)", text)
    if match is None or not float(match[1]):
        raise ConfigError(f"--device {text!r}: give a GPU with its memory, such as cuda:80GB or cuda:24GiB")
    return int(float(match[1]) * (1e9 if match[2] == "GB" else 2**30))


def optimizer_slots(settings: TrainingSettings) -> int:
    """Return how many numbers the optimiser keeps per trained number."""
    own = {"adamw": 2, "adam": 2, "rmsprop": 1, "sgd": 0}[settings.optimizer]
    return own + (settings.optimizer in ("rmsprop", "sgd") and settings.momentum > 0)


def _reward_model_bytes(settings: TrainingSettings) -> int:
    """Return the bytes of the reward model of offline PPO, which remains on the device."""
    if not (isinstance(settings, BaselineSettings) and settings.ppo):
        return 0
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = load_pretrained(AutoConfig, "[method] reward_model", settings.reward_model, "configuration")
    with META:
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    return sum(parameter.nbytes for parameter in model.parameters())


def plan_memory(experiment: Experiment, device: str) -> MemoryPlan:
    """Read the data, and estimate the memory of training steps on a GPU.

    Files are written to a temporary folder and removed.

    Args:
        device: as for :func:`parse_device`.

    Raises:
        ConfigError: the device is not valid.
        DataError, ModelError: the data or the model cannot be used, or a step of it needs data.
    """
    usable = int(USABLE * parse_device(device))
    model = with_dtype(experiment.model, "cuda").model_copy(update={"kernels": None})
    settings = experiment.method.settings
    stack, most_tokens = experiment.engine.stack, experiment.engine.max_tokens
    size, other = stack * settings.step_pairs(), _reward_model_bytes(settings)
    savings: list[dict[str, Any]] = [{}, {"checkpointing": True}]
    if model.train == "lora" and model.quantize is None:
        savings += [{"quantize": "nf4"}, {"quantize": "nf4", "checkpointing": True}]
    variants: list[Variant] = []
    with TemporaryDirectory(prefix="prefed-memory-") as name:
        dataset = build_data(experiment, Path(name))
        trained = np.concatenate([data.train for data in dataset.clients.values()])
        longest = trained[dataset.tokens.lengths[trained].sum(1).argmax()]
        for changes in savings:
            if model.checkpointing and "checkpointing" in changes:
                continue
            config = model.model_copy(update=changes)
            try:
                planned = PlannedModel(
                    checkpoint_config(config),
                    config,
                    experiment.parts,
                    dataset.tokens,
                    max_tokens=most_tokens,
                    slots=optimizer_slots(settings),
                    clients=stack,
                    other=other,
                )
            except ModelError:
                if not changes:
                    raise
                continue  # the saving is not possible

            def rows(count: int) -> Rows:
                same = np.repeat(longest, count)
                return settings.feedback.together(same)

            if not variants:
                tokens = planned.pair_tokens(rows(1))
                whole = len(planned.pairs.groups(rows(size))[0])
                pass_pairs = min(size, whole + 1, max(1, math.ceil(most_tokens / tokens)))
                path = "packed" if planned.packed else "plain"
            rejected = settings.goal().name != "sft"
            try:
                step, double = (planned.step(rows(n * pass_pairs), rejected=rejected) for n in (1, 2))
            except (RuntimeError, ValueError) as error:
                raise ModelError(
                    f"--device {device}: a step of {model.name} cannot be estimated, as its code depends on "
                    f"the values of tensors, which a plan does not have ({type(error).__name__}: "
                    f"{one_line(error)[:200]}); use a dry run on the GPU itself"
                ) from error
            each = (double.total - step.total) / pass_pairs
            most = max(0, math.floor(pass_pairs + (usable - step.total) / each))
            bytes_ = {**asdict(step), "total": step.total}
            variants.append(Variant(changes, bytes_, step.total <= usable, most, most * tokens))
    return MemoryPlan(device, usable, str(model.dtype), path, pass_pairs, tokens, variants)
