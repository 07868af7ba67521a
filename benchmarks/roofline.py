r"""A model of a DPO step on GPUs, prefed's and TRL's: operations, bytes, kernel launches, host syncs.

    OMP_NUM_THREADS=1 python benchmarks/roofline.py  # all shapes, two pairs of at most 1,500 tokens
    OMP_NUM_THREADS=1 python benchmarks/roofline.py --shapes smollm2-135m --batch 4 --tokens 192

Nothing here is measured. The code of both trainers runs on tensors without data (PyTorch's meta device), in
bfloat16 with LoRA 8/16 on all linear modules of the blocks, and its operations are counted:

- floating-point operations of matrix products and attention; under a causal window, of the scores inside it;
- bytes of inputs and outputs, once each, as if nothing stayed in a cache;
- one kernel launch each, whatever an operation computes; allocations and views launch none;
- a host sync for each copy between host and device and each number or index that the host reads.

A kernel takes the longer of its operations at the device's peak and its bytes at the device's bandwidth. A
step takes the longer of all its kernels and all their launches by the host. It is bound by launches, or by
what limits most of its kernels' time. Kernels reach neither peak, and the host waits at each sync: times are
lower bounds.

prefed's side is :class:`~prefed.train.PairTrainer` as a run calls it, and TRL's is ``DPOTrainer``: as it
comes, and with the reference precomputed. Kernels that need a GPU are not traced but modelled by what they
must read and write: TRL's for the head, and for "Liger" one in each direction for every norm, SwiGLU and
rotary embedding. "flash" is attention without mask and padding, which DPO in TRL 1.16 does not have.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import tokenizers
import torch
import transformers
import trl.kernels.chunked_logprob as head_of_trl
from common import Pairs
from dpo_step import BETA, LR, RANK, Trl
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface, AttentionMaskInterface

from prefed.core import Key, Objective, Optimizer, Owner, Ownership, Phase
from prefed.data import Pair
from prefed.models import ModelConfig
from prefed.models.families import FAMILIES
from prefed.runs.memory_plan import META, LiveBytes, PlannedModel
from prefed.train import PairTrainer, logprobs, packed
from prefed.train.packed import Sequences


@dataclass(frozen=True)
class Device:
    """What a data sheet says.

    Attributes:
        flops: dense products of bfloat16 with sums in fp32, per second.
        bandwidth: bytes per second.
    """

    flops: float
    bandwidth: float


DEVICES = {
    "H100 SXM": Device(989e12, 3.35e12),  # nvidia.com/en-us/data-center/h100
    "A100 80 GB SXM": Device(312e12, 2.039e12),  # nvidia.com/en-us/data-center/a100
    "L4": Device(121e12, 0.3e12),  # nvidia.com/en-us/data-center/l4
    # nvidia.com/en-us/geforce/laptops/compare has 233 AI TOPS, of sparse products of 8 bits: eight times the
    # rate of dense ones in bfloat16 with sums in fp32. 128 bits of GDDR6 at 16 Gbit/s.
    "RTX 4060 Laptop": Device(29e12, 0.256e12),
}
"""Rates with sparsity, where a sheet gives only these, are halved."""

LAUNCH = 5e-6
"""Seconds of the host per operation of PyTorch: an assumption, since no data sheet has it."""


def shape(
    kind: Any,
    width: int,
    inner: int,
    blocks: int,
    heads: int,
    keys: int,
    vocabulary: int,
    tied: bool = True,
) -> Callable[[], Any]:
    """Return what makes a configuration; ``keys`` is the number of heads of keys and values."""
    return lambda: kind(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )


SHAPES: Mapping[str, Callable[[], Any]] = {
    "smollm2-135m": shape(transformers.LlamaConfig, 576, 1536, 30, 9, 3, 49152),
    "qwen2-0.5b": shape(transformers.Qwen2Config, 896, 4864, 24, 14, 2, 151936),
    "qwen2-1.5b": shape(transformers.Qwen2Config, 1536, 8960, 28, 12, 2, 151936),
    "llama-3-8b": shape(transformers.LlamaConfig, 4096, 14336, 32, 32, 8, 128256, tied=False),
}

SIDES = (
    *("prefed", "prefed, checkpointing", "prefed, Liger"),
    *("TRL", "TRL, precomputed", "TRL, precomputed, Liger, flash"),
)

_NO_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"),
    *("detach", "alias", "_local_scalar_dense", "resize_", "set_"),
}
_GATHERS = {"embedding", "index_select", "index", "masked_select"}
"""They read as much as they write."""
_MASKED = {"index", "index_put", "index_put_", "_index_put_impl_", "masked_select"}
"""With a mask, the size of what they select depends on data."""


@dataclass(frozen=True)
class Work:
    """What a step does.

    Attributes:
        kernels: floating-point operations and bytes of each.
        syncs: times that the host waits.
        peak: the most bytes of tensors that exist at the same time.
    """

    kernels: tuple[tuple[float, float], ...]
    syncs: int = 0
    peak: int = 0

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return sum(flops for flops, _ in self.kernels)

    @property
    def bytes(self) -> float:
        """Bytes of inputs and outputs."""
        return sum(moved for _, moved in self.kernels)

    def since(self, first: Work) -> Work:
        """Return the last kernels of this work, in which ``first`` is contained."""
        count = len(self.kernels) - len(first.kernels)
        return Work(self.kernels[-count:], self.syncs - first.syncs, self.peak)

    def on(self, device: Device) -> tuple[float, str]:
        """Return the seconds that a device takes, and what bounds them."""
        by = {"compute": 0.0, "memory": 0.0}
        for flops, moved in self.kernels:
            times = {"compute": flops / device.flops, "memory": moved / device.bandwidth}
            kind = max(times, key=times.__getitem__)
            by[kind] += times[kind]
        kernels, host = sum(by.values()), LAUNCH * len(self.kernels)
        return max(kernels, host), "launches" if host > kernels else max(by, key=by.__getitem__)


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, those of expanded dimensions once."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(n for n, stride in sides if stride or n == 0)


class Trace(LiveBytes):
    """Counts the work of operations on tensors without data.

    Args:
        selected: completion tokens in a padded batch, and its rows, for results whose size depends on data.

    Attributes:
        scores: rows of queries and of keys → scores inside the causal windows of all sequences.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], selected: tuple[int, int]) -> None:
        super().__init__(tensors)
        self._selected, self._syncs = selected, 0
        self._kernels: list[tuple[float, float]] = []
        self.scores: dict[tuple[int, int], int] = {}

    @property
    def work(self) -> Work:
        """The work so far."""
        return Work(tuple(self._kernels), self._syncs, self.peak)

    def add(self, flops: float, moved: float) -> None:
        """Add a kernel."""
        self._kernels.append((flops, moved))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, named = func._overloadpacket.__name__, kwargs or {}
        given = [each for each in tree_leaves((args, named)) if _is_tensor(each)]
        masks = [each for each in tree_leaves(args[1:2]) if _is_tensor(each) and each.dtype == torch.bool]
        masked = name in _MASKED and masks and masks[0].is_meta
        copied = name == "_to_copy" and named.get("device") not in (None, given[0].device)
        read = name == "_local_scalar_dense" and given[0].is_meta
        self._syncs += bool(masked or copied or read)
        if masked:
            result = self._select(args[0], masks[0]) if name in _GATHERS else args[0]
        else:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        made = [each for each in tree_leaves(result) if _is_tensor(each)]
        if func.is_view or name in _NO_KERNEL or not any(each.is_meta for each in (*given, *made)):
            return result
        moved = 2 * sum(map(size_of, made)) if name in _GATHERS else sum(map(size_of, (*given, *made)))
        self.add(self._flops(func, name, args, named, result), moved)
        return result

    def _select(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return a result of the right size for ``tensor[mask]``, with a mask over rows of the batch."""
        count, rows = self._selected
        result = tensor.new_empty(count * len(mask) // rows, *tensor.shape[mask.dim() :])
        self._add(result.untyped_storage())
        return result

    def _flops(self, func: Any, name: str, args: Sequence[Any], named: Mapping[str, Any], out: Any) -> float:
        backward = name.endswith("backward")
        products = 10 if backward else 4  # per score and number of a head: five products, or two
        query: Any
        key: Any
        query, key, *_ = args[backward:] if "att" in name else (None, None)
        if name.startswith("_varlen_attn"):
            return float(products * self.scores[len(query), len(key)] * query.shape[1] * query.shape[2])
        if "attention" in name:
            batch, heads, rows, width = query.shape
            given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | {**named}
            scores = rows * (rows + 1) / 2 if given.get("is_causal") else rows * key.shape[2]
            return float(products * scores * batch * heads * width)
        if name == "addmm_":  # PyTorch has no formula for it
            return float(2 * math.prod(args[1].shape) * args[2].shape[1])
        formula = flop_registry.get(func._overloadpacket)
        return float(formula(*args, **named, out_val=out)) if formula else 0.0


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


TRACE: list[Trace] = []
"""The trace that runs."""


class OneKernel(torch.autograd.Function):
    """A fused kernel in each direction, modelled by what it must read and write."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> Any:
        """Return one output like the first tensor, or of four tensors two like the first two."""
        ctx.save_for_backward(*tensors)
        made = [torch.empty_like(each) for each in tensors[: 2 if len(tensors) == 4 else 1]]
        TRACE[-1].add(0.0, sum(map(size_of, (*tensors, *made))))
        return tuple(made) if len(made) > 1 else made[0]

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> Any:
        """Return a gradient for each tensor that needs one."""
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        made = [torch.empty_like(tensor) if wants else None for tensor, wants in wanted]
        moved = [*ctx.saved_tensors, *slopes, *(each for each in made if each is not None)]
        TRACE[-1].add(0.0, sum(map(size_of, moved)))
        return tuple(made)


def with_liger(model: torch.nn.Module) -> Any:
    """Model Liger's kernels for norms and SwiGLU in ``model``; return a patch for its rotary embedding."""
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = lambda x, own=module: OneKernel.apply(x, own.weight)
        elif name.endswith("MLP"):
            module.forward = lambda x, own=module: own.down_proj(
                OneKernel.apply(own.gate_proj(x), own.up_proj(x))
            )
    return patch.object(
        sys.modules[type(model).__module__],
        "apply_rotary_pos_emb",
        lambda q, k, cos, sin, *_: OneKernel.apply(q, k, cos, sin),
    )


def without_padding(model: Any, lengths: Sequence[int]) -> None:
    """Let the trunk of a model run on one row without padding, with attention by sequences."""
    ends = torch.empty(len(lengths) + 1, dtype=torch.int32, device=META)
    sequences = Sequences(None, None, tuple(lengths), tuple(lengths), ends, ends)

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **_: Any
    ) -> tuple[torch.Tensor, None]:
        return packed._by_sequences(packed._varlen, sequences, query, key, value, None)[None], None

    AttentionInterface.register("roofline", attention)
    AttentionMaskInterface.register("roofline", lambda *args, **kwargs: None)
    model.set_attn_implementation("roofline")
    trunk, total = model.base_model, sum(lengths)
    original, rows = trunk.forward, torch.empty(total, dtype=torch.long, device=META)

    def forward(input_ids: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        flat = input_ids.reshape(-1).index_select(0, rows)[None]
        outputs = original(input_ids=flat, position_ids=rows[None], **kwargs)
        hidden = outputs.last_hidden_state[0]
        padded = hidden.new_zeros(input_ids.numel(), hidden.shape[1]).index_copy(0, rows, hidden)
        outputs.last_hidden_state = padded.view(*input_ids.shape, -1)
        return outputs

    trunk.forward = forward


@contextmanager
def gpu_code(trace: Trace) -> Iterator[None]:
    """Let tensors without data take the code of a GPU, and note the sequences of flash attention."""
    varlen, product = packed._varlen, logprobs.product

    def counted(sequences: Sequences, q: torch.Tensor, k: torch.Tensor, *rest: Any) -> torch.Tensor:
        counts = zip(sequences.query_counts, sequences.key_counts, strict=True)
        trace.scores[len(q), len(k)] = sum(n * m - n * (n - 1) // 2 for n, m in counts)
        return varlen(sequences, q, k, *rest)

    def wide(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if left.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(left, right, out_dtype=torch.float32)
        return product(left, right)

    def tile(times: int, *args: Any, **_: Any) -> None:
        """TRL's Triton kernel reads a tile of logits; backward it also writes it."""
        trace.add(0.0, times * size_of(args[0]))

    def add_product(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        rows, inner = left.shape
        trace.add(2.0 * rows * inner * right.shape[1], 2 * size_of(into) + size_of(left) + size_of(right))

    def supported() -> list[str]:
        return ["cuda", "meta"]

    TRACE.append(trace)
    with (
        patch.object(packed, "_varlen", counted),
        patch.object(logprobs, "product", wide),
        patch.object(head_of_trl, "_forward_tile", partial(tile, 1)),
        patch.object(head_of_trl, "_backward_tile", partial(tile, 2)),
        patch.object(head_of_trl, "_addmm_fp32", add_product),
        patch("torch.utils._foreach_utils._get_foreach_kernels_supported_devices", supported),
        patch("torch.optim.optimizer._get_foreach_kernels_supported_devices", supported),
        patch("torch.optim.optimizer._get_fused_kernels_supported_devices", supported),
        patch("torch.is_autocast_enabled", lambda *_: False),
        patch.object(transformers.Trainer, "_move_model_to_device", lambda *_: None),
    ):
        yield
    TRACE.pop()


def step_of_prefed(config: Any, pairs: Pairs, *, checkpointing: bool = False, fused: bool = False) -> Work:
    """Trace the second step of a phase of prefed's trainer."""
    settings: dict[str, Any] = {"name": "shape", "dtype": "bfloat16", "checkpointing": checkpointing}
    settings["lora"] = {"rank": RANK, "alpha": 16, "dropout": 0.0}
    model = PlannedModel(config, ModelConfig.model_validate(settings), frozenset({"lora"}), pairs)
    backbone, rows = model.backbone, np.arange(len(pairs))
    trainer = PairTrainer(backbone, pairs, max_tokens=1 << 60)
    trainer.references.training.put(rows, np.zeros((len(pairs), 2), np.float32))
    parts = Ownership.of(backbone.layout, lambda entry: Owner.SHARED)
    objective, optimizer = Objective("dpo", {"beta": BETA}), Optimizer("adamw", lr=LR)
    rotary = with_liger(backbone.causal) if fused else nullcontext()
    visits = []
    for steps in (1, 2):
        phase = Phase("train", parts.names(Owner.SHARED), objective, optimizer, len(pairs), steps=steps)
        trace = Trace([*model._tensors(), backbone.flat, backbone.grad], (0, 1))
        with gpu_code(trace), rotary, trace:
            trainer.visit(rows, Key(0), parts).train(backbone.initial, phase)
        visits.append(trace.work)
    # Loading the client comes first, and reading it last.
    return visits[1].since(visits[0])


def step_of_trl(config: Any, pairs: Pairs, *, precomputed: bool = False, fused: bool = False) -> Work:
    """Trace the second step of TRL's trainer."""
    lengths = pairs.lengths.astype(int)
    whole = [int(p + n) for column in (1, 2) for p, n in zip(lengths[:, 0], lengths[:, column], strict=True)]
    with LiveBytes(), META, torch.random.fork_rng(devices=[]):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    reference = np.zeros((len(pairs), 2), np.float32) if precomputed else None
    targets = list(FAMILIES[config.model_type].targets)
    given = [*model.parameters(), *model.buffers()]
    trace = Trace(given, (int(lengths[:, 1:].sum()), 2 * len(pairs)))
    with gpu_code(trace), tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        side = Trl(
            model,
            targets,
            pairs,
            tokenizer=Path(folder),
            reference=reference,
            compact=True,
            batch=len(pairs),
            bf16=False,
        )
        for parameter in side.model.parameters():
            parameter.data = parameter.data.to(META, torch.bfloat16)
        side.trainer._prepare_inputs = lambda inputs: {k: v.to(META) for k, v in inputs.items()}
        if fused:
            without_padding(side.model.get_base_model(), whole)
        rotary = with_liger(side.model.get_base_model()) if fused else nullcontext()
        with rotary, trace:
            side.step(np.arange(len(pairs)))
            first = trace.work
            side.step(np.arange(len(pairs)))
    return trace.work.since(first)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of two words, which TRL's trainer must have."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
    fast.save_pretrained(folder)


def step_of(side: str, shape: str, pairs: Pairs) -> Work:
    """Trace a step of one of :data:`SIDES`."""
    config = SHAPES[shape]()
    config.use_cache = False
    if side.startswith("prefed"):
        return step_of_prefed(config, pairs, checkpointing="checkpointing" in side, fused="Liger" in side)
    return step_of_trl(config, pairs, precomputed=side != "TRL", fused="Liger" in side)


def make_pairs(batch: int, tokens: int) -> Pairs:
    """Pairs whose prompt and responses have a third of the tokens each, the rejected one at most that."""
    third, draw = tokens // 3, np.random.default_rng(0)
    shorter = draw.integers(third // 2, third + 1, batch)
    sizes = [(tokens - 2 * third, third, int(count)) for count in shorter]
    return Pairs([Pair(*(np.ones(n, np.int32) for n in each)) for each in sizes])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1500, help="of a pair, at most (default 1500)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    pairs = make_pairs(args.batch, args.tokens)
    heads = ["shape", "trainer", "TFLOP", "GB", "launches", "host syncs", "peak, GiB"]
    heads += [f"{name}, ms" for name in DEVICES]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for shape in args.shapes:
        for side in SIDES:
            work = step_of(side, shape, pairs)
            cells = [f"`{shape}`", side, f"{work.flops / 1e12:.2f}", f"{work.bytes / 1e9:.1f}"]
            cells += [f"{len(work.kernels):,}", f"{work.syncs}", f"{work.peak / 2**30:.1f}"]
            for device in DEVICES.values():
                seconds, bound = work.on(device)
                cells.append(f"{1e3 * seconds:,.1f} {bound}")
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
